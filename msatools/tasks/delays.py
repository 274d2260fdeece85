# SPDX-License-Identifier: LGPL-2.1-or-later

"""Delay accounting of each thread (``struct task_delay_info``, kernel/delayacct.c)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, read_struct, read_structs
from msatools.tasks.table import TaskTable, cut

# In the order in which the kernel added them; older kernels have fewer.
KINDS = ("blkio", "swapin", "freepages", "thrashing", "compact", "wpcopy", "irq")

_MEMBERS = {
    **{f"{kind}_ns": (f"{kind}_delay",) for kind in KINDS},
    **{f"{kind}_count": (f"{kind}_count",) for kind in KINDS},
}
_OWNER = {"pid": ("pid",), "delays": ("delays",)}


class Delays(Struct, frozen=True):
    """One value a thread, by the kinds of delay that this kernel keeps.

    ``thrashing`` overlaps ``blkio`` and ``swapin``. A delay is added when it ends.
    """

    has: Booleans
    """Whether the kernel keeps delays of the thread and they could be read. It keeps
    none if delay accounting was off at the fork. The other values are zero if not."""

    delay_ns: Mapping[str, Nanoseconds]
    count: Mapping[str, npt.NDArray[np.int64]]


def read_delays(reader: Reader, tasks: TaskTable, losses: LossLog) -> Delays:
    """Read the delays of each thread."""
    if not tasks.has("delays"):
        return Delays(np.zeros(len(tasks), np.bool_), {}, {})
    infos = read_structs(
        reader,
        "struct task_delay_info",
        _MEMBERS,
        tasks["delays"].astype(np.uint64),
        losses,
    )
    has = infos.readable & _have(reader, tasks)
    kinds = [kind for kind in KINDS if infos.has(f"{kind}_ns")]
    return Delays(
        has=has,
        delay_ns={
            kind: cut(np.where(has, infos[f"{kind}_ns"], 0), losses) for kind in kinds
        },
        count={
            kind: np.where(has, infos[f"{kind}_count"], 0).astype(np.int64)
            for kind in kinds
        },
    )


def read_delay(reader: Reader, address: int) -> Mapping[str, Any]:
    """Read the ``struct task_delay_info`` of one thread, without the cost of arrays.

    :return: ``KIND_ns`` and ``KIND_count`` of the kinds that this kernel keeps.
    :raises drgn.FaultError: if it cannot be read
    """
    return read_struct(reader, "struct task_delay_info", _MEMBERS, address)


def _have(reader: Reader, tasks: TaskTable) -> Booleans:
    """Return which threads still own their delays: free_task() frees them."""
    if not reader.is_live:
        return np.ones(len(tasks), np.bool_)
    kept = tasks["delays"] != 0
    addresses = np.where(kept, tasks["address"], 0).astype(np.uint64)
    now = read_structs(reader, "struct task_struct", _OWNER, addresses, LossLog())
    have: Booleans = now.readable.copy()
    for name in _OWNER:
        have &= now[name] == tasks[name]
    return have
