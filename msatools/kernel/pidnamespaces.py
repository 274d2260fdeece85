# SPDX-License-Identifier: LGPL-2.1-or-later

"""PID namespaces and the number of PIDs in use in each (kernel/pid_namespace.c)."""

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.pids import PidTree
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Structs, read_structs
from msatools.selfdesc.find import find_type, find_variable, offset_of

MAX_LEVEL = 32
"""``MAX_PID_NS_LEVEL`` (include/linux/pid_namespace.h)."""

RESERVED_PIDS = 300
"""A namespace that has reached it reuses no lower PID (include/linux/pid.h)."""

_ADDING = 1 << 31
"""``PIDNS_ADDING``, a flag in the count: the namespace still accepts new processes."""

_NAMESPACE = {
    "inode": ("ns.inum",),
    "level": ("level",),
    "parent": ("parent",),
    "init": ("child_reaper",),
    # Linux kernel commit e8cfbc245e24 ("pid: remove pidhash") (in v4.15)
    "taken": ("pid_allocated", "nr_hashed"),
    # Linux kernel commit 7863dcc72d0f ("pid: allow pid_max to be set per pid
    # namespace") (in v6.14)
    "most": ("pid_max",),
}

_PID = {"level": ("level",), "space": ("numbers[0].ns",)}
_UPID = {"nr": ("nr",), "space": ("ns",)}


class PidNamespace(Struct, frozen=True):
    """A ``struct pid_namespace``."""

    address: int
    inode: int
    level: int
    """Nesting level; 0 for the initial namespace."""

    parent: int
    """Address of the parent namespace; 0 if it has none."""

    init: int
    """Address of the ``struct task_struct`` that inherits orphans."""

    taken: int
    """Number of PIDs in use by threads, process groups and sessions."""

    most: int | None
    """``pid_max``: all PIDs are smaller; ``None`` if it cannot be read."""


def read_namespaces(
    reader: Reader, addresses: Addresses, losses: LossLog
) -> dict[int, PidNamespace]:
    """Read some ``struct pid_namespace`` and all their ancestors, by address.

    Namespaces that cannot be read are left out, and count as losses.
    """
    found: dict[int, PidNamespace] = {}
    level = distinct(addresses)
    for _ in range(MAX_LEVEL + 1):
        level = level[(level != 0) & ~np.isin(level, list(found))]
        if not len(level):
            break
        read = read_structs(reader, "struct pid_namespace", _NAMESPACE, level, losses)
        shared = None if read.has("most") else _pid_max(reader.prog, losses)
        for row in np.flatnonzero(read.readable).tolist():
            found[int(level[row])] = _namespace(int(level[row]), read, row, shared)
        level = distinct(read["parent"].astype(np.uint64))
    return found


def _namespace(
    address: int, read: Structs, row: int, shared: int | None
) -> PidNamespace:
    return PidNamespace(
        address=address,
        inode=int(read["inode"][row]),
        level=int(read["level"][row]),
        parent=int(read["parent"][row]),
        init=int(read["init"][row]),
        taken=int(read["taken"][row]) & ~_ADDING,
        most=int(read["most"][row]) if read.has("most") else shared,
    )


def _pid_max(prog: drgn.Program, losses: LossLog) -> int | None:
    """Read ``pid_max`` where all namespaces share it."""
    try:
        most: int = find_variable(prog, "pid_max").value_()
    except LOST as error:
        losses.lose(Loss.LIMITS, f"pid_max cannot be read: {error}")
        return None
    return most


def reserved_taken(
    reader: Reader, namespace: PidNamespace, losses: LossLog
) -> int | None:
    """Count the PIDs below :data:`RESERVED_PIDS` in use; ``None`` if lost."""
    try:
        return PidTree(reader, namespace.address).count_below(RESERVED_PIDS)
    except UNREADABLE as error:
        losses.lose(Loss.PIDS, f"cannot read numbers that are taken: {error}")
        return None


def innermost_numbers(
    reader: Reader, pids: Addresses, losses: LossLog
) -> tuple[Addresses, npt.NDArray[np.int64]]:
    """Find the innermost namespace of each ``struct pid``, and its number there.

    :return: Addresses of ``struct pid_namespace``, 0 if it cannot be read; and the
        numbers, 0 for the initial namespace.
    """
    read = read_structs(reader, "struct pid", _PID, pids, losses)
    levels = read["level"].astype(np.uint64)
    spaces: Addresses = read["space"].astype(np.uint64)
    numbers = np.zeros(len(pids), np.int64)
    nested = np.flatnonzero(read.readable & (levels > 0) & (levels <= MAX_LEVEL))
    if len(nested):
        # A struct pid has one struct upid per nesting level.
        first = np.uint64(offset_of(find_type(reader.prog, "struct pid"), "numbers"))
        size = np.uint64(drgn.sizeof(find_type(reader.prog, "struct upid")))
        addresses = pids[nested] + first + levels[nested] * size
        innermost = read_structs(reader, "struct upid", _UPID, addresses, losses)
        spaces[nested] = innermost["space"]
        numbers[nested] = innermost["nr"]
    spaces[levels > MAX_LEVEL] = 0
    return spaces, numbers
