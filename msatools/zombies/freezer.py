# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who is frozen, by a control group or as the system suspends."""

import numpy as np

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.structs import Booleans
from msatools.tasks.states import INTERRUPTIBLE
from msatools.tasks.table import TaskTable
from msatools.tasks.text import kernel_symbol

_FROZEN = 0x8000
"""``TASK_FROZEN`` of ``task_struct.__state``."""

_TRAP_FREEZE = 1 << 23
"""``JOBCTL_TRAP_FREEZE`` (include/linux/sched/jobctl.h)."""

_PF_FROZEN = 0x0001_0000
"""Of ``task_struct.flags``."""


def read_frozen(reader: Reader, tasks: TaskTable) -> Booleans:
    """Tell who is frozen, by a control group or as the system suspends."""
    addresses = tasks["address"].astype(np.uint64)
    # By cgroup v2: do_freezer_trap(). The bit is set, too, while a task waits for its
    # child of vfork() or is stopped: that will do for a group that is to be frozen.
    frozen: Booleans = (tasks["jobctl"] & _TRAP_FREEZE) != 0
    frozen &= (tasks["state"] & INTERRUPTIBLE) != 0
    if frozen.any():
        frozen &= read_bits(reader, "struct task_struct", "frozen", addresses)
    frozen |= (tasks["state"] & _FROZEN) != 0
    # A flag before Linux kernel commit f5d39b020809 ("freezer,sched: Rewrite core
    # freezer logic") (in v6.1), which brought this symbol.
    flagged = (tasks["flags"] & _PF_FROZEN) != 0
    if flagged.any():
        try:
            kernel_symbol(reader.prog, "freezer_active")
        except LookupError:
            frozen |= flagged
    return frozen


def read_bits(
    reader: Reader, type_name: str, member: str, addresses: Addresses
) -> Booleans:
    """Read a member of one bit; not set where the kernel has none, or unreadable."""
    place = reader.once((type_name, member), lambda: _bit(reader, type_name, member))
    if place is None:
        return np.zeros(len(addresses), np.bool_)
    byte, bit = divmod(place, 8)
    records, _ = reader.read_records(addresses + np.uint64(byte), 1)
    found: Booleans = (records[:, 0] >> bit & 1) != 0
    return found


def _bit(reader: Reader, type_name: str, member: str) -> int | None:
    try:
        place: int = reader.prog.type(type_name).member(member).bit_offset
    except LookupError:
        return None
    return place
