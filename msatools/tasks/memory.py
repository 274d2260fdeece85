# SPDX-License-Identifier: LGPL-2.1-or-later

"""Virtual and resident size of each thread's address space (``struct mm_struct``)."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.enums import constant
from msatools.kernel.losses import Loss
from msatools.kernel.percpusums import sum_parts
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Structs,
    lose_many,
    read_structs,
)
from msatools.selfdesc.find import find_type, find_variable, offset_of
from msatools.tasks.table import PF_KTHREAD, TaskTable

Bytes = npt.NDArray[np.int64]
_Pages = npt.NDArray[np.int64]

_MOST_PAGES = 1 << 45
"""Pages of an address space of 57 bits."""

_RESIDENT = ("MM_FILEPAGES", "MM_ANONPAGES", "MM_SHMEMPAGES")


class TaskMemory(Struct, frozen=True):
    """One value a thread, the same for all threads that share an address space."""

    has_mm: Booleans
    """Whether the thread has an address space: kernel threads and dead threads have
    none, even if other threads of the process live."""

    known: Booleans
    """Whether the address space could be read; sizes are zero if not."""

    rss_known: Booleans
    """Whether the resident size is known: a later kernel may keep it in another way."""

    size_bytes: Bytes
    """Size of all mappings: VmSize of /proc/PID/status."""

    rss_bytes: Bytes
    """Exact size of the resident pages: with the counts cached by CPUs and tasks.

    VmRSS of /proc/PID/status and statm since Linux kernel commit 82241a83cd15 ("mm: fix
    the inaccurate memory statistics issue for users") (in v6.16, and in stable ones).
    """

    rss_counted_bytes: Bytes
    """The same without cached counts: as in /proc/PID/stat, and before that commit in
    status and statm, too."""


def read_memory(reader: Reader, tasks: TaskTable, losses: LossLog) -> TaskMemory:
    """Read each address space once.

    A part of a counter that cannot be read is noted, and missing in the sum.
    """
    prog = reader.prog
    of_task: Addresses = tasks["mm"].astype(np.uint64)
    mms, index = np.unique(of_task, return_inverse=True)
    counters = {name: constant(prog, name) for name in _RESIDENT}
    spaces = read_structs(reader, "struct mm_struct", _members(counters), mms, losses)
    has_rss = all(spaces.has(name) for name in _RESIDENT)
    counted = exact = np.zeros(len(mms), np.int64)
    if has_rss:
        counted, exact = _resident(reader, tasks, spaces, index, counters, losses)
    elif len(mms):
        losses.lose(Loss.SIZES, "resident sizes are kept in a way that is not known")
    # A kernel thread may borrow an address space (kthread_use_mm()).
    has_mm = (of_task != 0) & ((tasks["flags"] & PF_KTHREAD) == 0)
    possible = np.max(np.stack((spaces["total_vm"], exact)), axis=0) <= _MOST_PAGES
    lose_many(losses, "struct mm_struct", int(np.count_nonzero(~possible)))
    known = has_mm & (spaces.readable & possible)[index]
    shift = find_variable(prog, "PAGE_SHIFT").value_()

    def bytes_of(pages: _Pages) -> Bytes:
        return np.where(known, pages[index] << shift, 0)

    return TaskMemory(
        has_mm=has_mm,
        known=known,
        rss_known=known & has_rss,
        size_bytes=bytes_of(spaces["total_vm"].astype(np.int64)),
        rss_bytes=bytes_of(exact),
        rss_counted_bytes=bytes_of(counted),
    )


def _members(numbers: dict[str, int]) -> Members:
    counters = {
        # Linux kernel commit f1a7941243c1 ("mm: convert mm's rss stats into
        # percpu_counter") (in v6.2)
        name: (f"rss_stat[{number}].count", f"rss_stat.count[{number}]")
        for name, number in numbers.items()
    }
    parts = {
        f"{name}.parts": (f"rss_stat[{number}].counters",)
        for name, number in numbers.items()
    }
    return {"total_vm": ("total_vm",), **counters, **parts}


def _resident(
    reader: Reader,
    tasks: TaskTable,
    spaces: Structs,
    index: npt.NDArray[np.intp],
    numbers: dict[str, int],
    losses: LossLog,
) -> tuple[_Pages, _Pages]:
    """Return resident pages by the counters alone, and with their cached parts.

    A single counter can be below zero, which the kernel takes for zero.

    :param index: Row in *spaces* of each task's address space.
    """
    counters = np.stack([spaces[name].astype(np.int64) for name in _RESIDENT])
    counted = _sum(counters)
    if spaces.has("MM_FILEPAGES.parts"):
        parts = np.stack([spaces[f"{name}.parts"] for name in _RESIDENT])
        sums = sum_parts(reader, parts.ravel().astype(np.uint64), losses)
        counters += sums.reshape(counters.shape)
    else:
        _add_cached(reader, tasks, counters, index, numbers, losses)
    return counted, _sum(counters)


def _sum(counters: _Pages) -> _Pages:
    """Sum up counters; limit each, so that a damaged one does not overflow the sum."""
    total: _Pages = np.clip(counters, 0, 2 * _MOST_PAGES).sum(axis=0)
    return total


def _add_cached(
    reader: Reader,
    tasks: TaskTable,
    counters: _Pages,
    index: npt.NDArray[np.intp],
    numbers: dict[str, int],
    losses: LossLog,
) -> None:
    """Add the counts cached in tasks (SPLIT_RSS_COUNTING, up to v6.1).

    A task flushes them every 64 faults; the kernel itself never sums them up.
    """
    type_ = find_type(reader.prog, "struct task_struct")
    if not type_.has_member("rss_stat"):
        return
    first = offset_of(type_, "rss_stat.count[0]")
    size = 4 * (max(numbers.values()) + 1)
    rows, chunks = [], []
    users = np.flatnonzero(tasks["mm"])
    # Tasks are too far apart for one read.
    for row, address in zip(
        users.tolist(), tasks["address"][users].tolist(), strict=True
    ):
        try:
            chunks.append(reader.read(address + first, size))
        except UNREADABLE:
            continue
        rows.append(row)
    lose_many(losses, "struct task_struct", len(users) - len(rows))
    cached = np.frombuffer(b"".join(chunks), "<i4").reshape(len(rows), size // 4)
    for counter, name in zip(counters, _RESIDENT, strict=True):
        np.add.at(counter, index[rows], cached[:, numbers[name]])
