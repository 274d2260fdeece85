# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which threads' sleep the kernel counts as waiting for input or output."""

import numpy as np

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, lose_many
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.table import TaskTable


def read_in_iowait(reader: Reader, tasks: TaskTable, losses: LossLog) -> Booleans:
    """Read ``in_iowait`` (io_schedule_prepare()) of those that sleep uninterruptibly.

    All others are not looked at, and do not wait so; nor does a thread that cannot be
    read, which is counted.
    """
    byte, bit = _place(reader)
    waits: Booleans = (tasks["state"] & UNINTERRUPTIBLE) != 0
    waits &= tasks["exit_state"] == 0
    addresses = tasks["address"][waits].astype(np.uint64) + np.uint64(byte)
    records, readable = reader.read_records(addresses, 1)
    lose_many(losses, "struct task_struct", int(np.count_nonzero(~readable)))
    waits[waits] = (records[:, 0] >> bit & 1) != 0
    return waits


def read_one_in_iowait(reader: Reader, task: int) -> bool:
    """Read the same of one thread that sleeps uninterruptibly.

    :param task: address of its ``struct task_struct``
    :raises drgn.FaultError: if it cannot be read
    """
    byte, bit = reader.once(_place, lambda: _place(reader))
    return bool(reader.read(task + byte, 1)[0] >> bit & 1)


def _place(reader: Reader) -> tuple[int, int]:
    """Find the byte that has the member, and the bit of that."""
    member = reader.prog.type("struct task_struct").member("in_iowait")
    bit_offset: int = member.bit_offset
    return divmod(bit_offset, 8)
