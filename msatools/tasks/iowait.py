# SPDX-License-Identifier: LGPL-2.1-or-later

"""Threads whose sleep the kernel counts as I/O wait."""

import numpy as np

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, lose_many
from msatools.selfdesc.find import find_type, member_of
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.table import TaskTable


def read_in_iowait(reader: Reader, tasks: TaskTable, losses: LossLog) -> Booleans:
    """Return which threads sleep uninterruptibly with ``in_iowait`` set.

    io_schedule_prepare() sets it. Other threads are not read. A thread that cannot be
    read is counted, and returned as false.
    """
    byte, bit = _member(reader)
    waits: Booleans = (tasks["state"] & UNINTERRUPTIBLE) != 0
    waits &= tasks["exit_state"] == 0
    addresses = tasks["address"][waits].astype(np.uint64) + np.uint64(byte)
    records, readable = reader.read_records(addresses, 1)
    lose_many(losses, "struct task_struct", int(np.count_nonzero(~readable)))
    waits[waits] = (records[:, 0] >> bit & 1) != 0
    return waits


def read_one_in_iowait(reader: Reader, task: int) -> bool:
    """Return ``in_iowait`` of one thread that sleeps uninterruptibly.

    :param task: address of its ``struct task_struct``
    :raises drgn.FaultError: if it cannot be read
    """
    byte, bit = reader.once(_member, lambda: _member(reader))
    return bool(reader.read(task + byte, 1)[0] >> bit & 1)


def _member(reader: Reader) -> tuple[int, int]:
    """Find the offset of the byte with ``in_iowait``, and its bit in that byte."""
    member = member_of(find_type(reader.prog, "struct task_struct"), "in_iowait")
    bit_offset: int = member.bit_offset
    return divmod(bit_offset, 8)
