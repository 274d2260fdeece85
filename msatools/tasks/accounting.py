# SPDX-License-Identifier: LGPL-2.1-or-later

"""Times and counts that the kernel keeps of threads: delays, children, memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import UNREADABLE
from msatools.kernel.clocks import Accounting, Clocks, Nanoseconds
from msatools.kernel.percpu import sum_parts
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Structs,
    constant,
    lose_many,
    read_struct,
    read_structs,
)
from msatools.selfdesc.find import find_type, find_variable, offset_of
from msatools.tasks.table import PF_KTHREAD, TaskTable, cut

# --- Decompose each thread's lifetime: user, system, latency, off the CPU, zombie.
#
# Pure: computed from a table of tasks and the clocks. Every kernel always keeps the
# fields needed here (kernel/sched/cputime.c, stats.h). The microstates add up to the
# lifetime: time neither on the CPU nor waiting for one is off the CPU.


EXIT_ZOMBIE = 0x20

BOUND_NS = 10_000_000
"""Maximum difference of CPUs' clocks: one tick, by which an idle CPU's may lag."""

UNSTABLE_BOUND_NS = 100_000_000
"""Maximum difference of unstable clocks: each stops one tick after its CPU's last tick
(sched_clock_local()). An emulated CPU may have no tick for any length of time; this is
a few times the worst measured: 17 ms, in a guest with the HPET as clock source."""


class Microstates(Struct, frozen=True):
    """The microstates of each thread; the first five add up to the lifetime."""

    user_ns: Nanoseconds
    system_ns: Nanoseconds
    latency_ns: Nanoseconds
    off_cpu_ns: Nanoseconds
    zombie_ns: Nanoseconds
    lifetime_ns: Nanoseconds
    latency_is_bound: bool
    """Whether latency may include sleep: see :func:`microstates`."""

    impossible: Booleans
    """Whether the kernel's latency exceeded the lifetime by more than the bound of the
    clocks, and was cut."""

    missed_ns: Nanoseconds
    """Nanoseconds by which the counted times exceeded the lifetime before the cut."""


def bound_of(accounting: Accounting) -> int:
    """Return the maximum difference of the CPUs' clocks, in nanoseconds."""
    return BOUND_NS if accounting.stable_clock else UNSTABLE_BOUND_NS


def microstates(
    tasks: TaskTable, clocks: Clocks, bound_ns: int = BOUND_NS
) -> Microstates:
    """Decompose each thread's life up to now.

    Time on the CPU is exact. It is split as the kernel does: by ticks, which sample
    user and system mode. Latency is exact up to Linux 6.11. Since "sched/fair:
    Implement delayed dequeue" (in v6.12) a task may sleep on the run queue, and that
    sleep counts as latency when it wakes up: latency is an upper bound.

    :param bound_ns: see :func:`bound_of`
    """
    now_task = clocks.task_clock_ns(tasks["cpu"])
    dead = tasks["exit_state"] != 0
    on_cpu = (tasks["on_cpu"] != 0) & ~dead
    cpu_ns = tasks["sum_exec_ns"].astype(np.int64)
    exec_start = tasks["exec_start_ns"].astype(np.int64)
    cpu_ns = cpu_ns + np.where(on_cpu, np.maximum(now_task - exec_start, 0), 0)
    started = tasks["start_ns"].astype(np.int64) + (clocks.monotonic_offset_ns or 0)
    lifetime = np.maximum(clocks.local_ns - started, 0)
    zombie = np.where(dead, np.clip(now_task - exec_start, 0, lifetime), 0)
    latency = tasks["run_delay_ns"].astype(np.int64) + _open_latency(
        tasks, clocks, dead
    )

    left = lifetime - cpu_ns - zombie
    missed = np.maximum(latency - left, 0)
    latency = np.clip(latency, 0, np.maximum(left, 0))
    # If both are too much, time as a zombie is cut: it is the difference of two CPUs'
    # clocks, while time on the CPU is counted.
    cpu_ns = np.minimum(cpu_ns, lifetime)
    zombie = np.minimum(zombie, lifetime - cpu_ns)
    user = user_time(cpu_ns, tasks["utime_ns"], tasks["stime_ns"], tasks["flags"])
    return Microstates(
        user_ns=user,
        system_ns=cpu_ns - user,
        latency_ns=latency,
        off_cpu_ns=lifetime - zombie - cpu_ns - latency,
        zombie_ns=zombie,
        lifetime_ns=lifetime,
        latency_is_bound=tasks.has("sched_delayed"),
        impossible=missed > bound_ns,
        missed_ns=missed,
    )


def without_sleep(lives: Microstates, slept_ns: Nanoseconds) -> Microstates:
    """Move known sleep from latency to off-CPU time, if latency is an upper bound.

    The kernel counts the next sleep of a delayed sleeper that was moved to another CPU
    twice: in ``sum_sleep_runtime``, and wrongly in ``run_delay`` (v6.12).

    :param slept_ns: Minimum time that each thread has slept.
    """
    if not lives.latency_is_bound:
        return lives
    twice = np.clip(slept_ns - lives.off_cpu_ns, 0, lives.latency_ns)
    return replace(
        lives,
        latency_ns=lives.latency_ns - twice,
        off_cpu_ns=lives.off_cpu_ns + twice,
    )


def _open_latency(tasks: TaskTable, clocks: Clocks, dead: Booleans) -> Nanoseconds:
    """Return the ns for which each thread has waited for a CPU until now, else 0."""
    queued = tasks["last_queued_ns"].astype(np.int64)
    waits = waits_for_cpu(tasks) & ~dead & (queued != 0)
    return np.where(waits, np.maximum(clocks.local_ns - queued, 0), 0)


def waits_for_cpu(tasks: TaskTable) -> Booleans:
    """Return which threads are runnable but not on a CPU."""
    waits: Booleans = (
        (tasks["state"] == 0) & (tasks["on_rq"] != 0) & (tasks["on_cpu"] == 0)
    )
    if tasks.has("sched_delayed"):
        waits &= tasks["sched_delayed"] == 0
    return waits


def user_time(
    cpu_ns: Nanoseconds,
    utime_ns: npt.NDArray[Any],
    stime_ns: npt.NDArray[Any],
    flags: npt.NDArray[np.uint32],
    otherwise: npt.NDArray[np.float64] | float = 1.0,
) -> Nanoseconds:
    """Return the part of the CPU time in user mode, by ticks (cputime_adjust()).

    Kernel threads have no user mode.

    :param flags: ``task_struct.flags``.
    :param otherwise: Share of user mode of a thread without a tick; the kernel's is 1.
    """
    utime = utime_ns.astype(np.float64)
    ticks = utime + stime_ns
    share = np.zeros(len(ticks)) + otherwise
    np.divide(utime, ticks, out=share, where=ticks > 0)
    share[(flags & PF_KTHREAD) != 0] = 0
    return np.minimum((cpu_ns * share).astype(np.int64), cpu_ns)


# --- Delay accounting of each thread (struct task_delay_info, kernel/delayacct.c).


# In the order in which the kernel added them; older kernels have fewer.
KINDS = ("blkio", "swapin", "freepages", "thrashing", "compact", "wpcopy", "irq")

_DELAY_MEMBERS = {
    **{f"{kind}_ns": (f"{kind}_delay",) for kind in KINDS},
    **{f"{kind}_count": (f"{kind}_count",) for kind in KINDS},
}
_OWNER = {"pid": ("pid",), "delays": ("delays",)}


class Delays(Struct, frozen=True):
    """The delays of each thread, by the kinds in ``KINDS`` that this kernel keeps.

    ``thrashing`` overlaps ``blkio`` and ``swapin``. A delay counts only once it ended.
    """

    has: Booleans
    """Whether the thread has delays that could be read; its other values are zero if
    not. It has none if delay accounting was off when it was forked."""

    delay_ns: Mapping[str, Nanoseconds]
    count: Mapping[str, npt.NDArray[np.int64]]


def read_delays(reader: Reader, tasks: TaskTable, losses: LossLog) -> Delays:
    """Read the delays of each thread."""
    if not tasks.has("delays"):
        return Delays(np.zeros(len(tasks), np.bool_), {}, {})
    infos = read_structs(
        reader,
        "struct task_delay_info",
        _DELAY_MEMBERS,
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
    return read_struct(reader, "struct task_delay_info", _DELAY_MEMBERS, address)


def _have(reader: Reader, tasks: TaskTable) -> Booleans:
    """Return which threads still own the delays that were read, see free_task()."""
    if not reader.is_live:
        return np.ones(len(tasks), np.bool_)
    kept = tasks["delays"] != 0
    addresses = np.where(kept, tasks["address"], 0).astype(np.uint64)
    now = read_structs(reader, "struct task_struct", _OWNER, addresses, LossLog())
    have: Booleans = now.readable.copy()
    for name in _OWNER:
        have &= now[name] == tasks[name]
    return have


# --- Counts of dead threads and reaped children of a process (struct signal_struct).
#
# include/linux/sched/signal.h: a thread that exits adds its counts to its process
# (__exit_signal()). A process that is reaped adds its own counts, and those of its
# children, to its parent's (wait_task_zombie()).


Counts = npt.NDArray[np.int64]

_SUMS = ("utime", "stime", "gtime", "nvcsw", "nivcsw", "min_flt", "maj_flt")
_PROCESS_MEMBERS = {
    "nr_threads": ("nr_threads",),
    "group_exit_code": ("group_exit_code",),
    "sum_exec": ("sum_sched_runtime",),
    **{name: (name,) for name in _SUMS},
}
_LEADER = {"tgid": ("tgid",), "signal": ("signal",)}
_REAPED = {f"c{name}": (f"c{name}",) for name in _SUMS}


class ProcessSums(Struct, frozen=True):
    """Counts of processes: one value for each thread of the table, the same for all
    threads of a process."""

    utime_ns: Nanoseconds
    stime_ns: Nanoseconds
    gtime_ns: Nanoseconds
    """Time running a guest, included in ``utime_ns``."""

    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts


class Processes(Struct, frozen=True):
    """State of processes: one value for each thread of the table, the same for all
    threads of a process."""

    known: Booleans
    """Whether the process still existed and could be read; the rest is zero if not."""

    nr_threads: Counts
    """Number of threads that have not been reaped, including a dead leader."""

    group_exit_code: Counts
    """Exit code of the process, or the signal that stopped it, as wait() encodes it."""

    dead: ProcessSums
    """Sums over dead threads; user and system time by ticks, not scaled to CPU time."""

    dead_sum_exec_ns: Nanoseconds
    """Exact CPU time of dead threads."""


def read_processes(reader: Reader, tasks: TaskTable, losses: LossLog) -> Processes:
    """Read the ``struct signal_struct`` of each thread's process.

    On a running kernel a process of the table may have ended since, and its memory may
    have been freed or reused: such processes are unknown, and counted.
    """
    signals = _keep_existing(
        reader,
        tasks,
        read_structs(
            reader,
            "struct signal_struct",
            _PROCESS_MEMBERS,
            tasks["signal"].astype(np.uint64),
            losses,
        ),
        losses,
    )
    return Processes(
        known=signals.readable,
        nr_threads=signals["nr_threads"].astype(np.int64).clip(0),
        group_exit_code=signals["group_exit_code"].astype(np.int64),
        dead=_sums(signals, "", losses),
        dead_sum_exec_ns=cut(signals["sum_exec"], losses),
    )


def read_reaped(reader: Reader, tasks: TaskTable, losses: LossLog) -> ProcessSums:
    """Read the sums over each process's reaped children, and the children they reaped.

    Times are scaled to the CPU time. All values are zero if unreadable, which
    :func:`read_processes` counts.
    """
    signals = read_structs(
        reader,
        "struct signal_struct",
        _REAPED,
        tasks["signal"].astype(np.uint64),
        LossLog(),
    )
    return _sums(_keep_existing(reader, tasks, signals, LossLog()), "c", losses)


def read_process(reader: Reader, signal: int) -> Mapping[str, Any]:
    """Read the counts of one process, without the cost of arrays.

    :param signal: address of its ``struct signal_struct``
    :return: Members by name. Names with a leading ``c`` are of reaped children, the
        others of dead threads.
    :raises drgn.FaultError: if it cannot be read
    """
    return read_struct(
        reader, "struct signal_struct", _PROCESS_MEMBERS | _REAPED, signal
    )


def _keep_existing(
    reader: Reader, tasks: TaskTable, signals: Structs, losses: LossLog
) -> Structs:
    """Drop structures whose process had ended when they were read.

    A process keeps its ``struct signal_struct`` until its leader is freed. So it is
    enough if the leader still points to it afterwards: a new task in reused memory has
    another PID.
    """
    if not reader.is_live:
        return signals
    leaders = read_structs(
        reader,
        "struct task_struct",
        _LEADER,
        tasks["group_leader"].astype(np.uint64),
        LossLog(),
    )
    exists = leaders.readable & signals.readable
    for name in _LEADER:
        exists &= leaders[name] == tasks[name]
    if gone := int(np.count_nonzero(signals.readable & ~exists & tasks.leaders)):
        losses.coverage["processes_gone"] += gone
    columns = {
        name: np.where(exists, column, column.dtype.type(0))
        for name, column in signals.columns.items()
    }
    return Structs(columns, exists)


def _sums(signals: Structs, prefix: str, losses: LossLog) -> ProcessSums:
    column = {name: cut(signals[prefix + name], losses) for name in _SUMS}
    return ProcessSums(
        utime_ns=column["utime"],
        stime_ns=column["stime"],
        gtime_ns=column["gtime"],
        nvcsw=column["nvcsw"],
        nivcsw=column["nivcsw"],
        min_flt=column["min_flt"],
        maj_flt=column["maj_flt"],
    )


# --- Virtual and resident size of each thread's address space (struct mm_struct).


Bytes = npt.NDArray[np.int64]
_Pages = npt.NDArray[np.int64]

_MOST_PAGES = 1 << 45
"""Number of pages in an address space of 57 bits: more is impossible."""

_RESIDENT = ("MM_FILEPAGES", "MM_ANONPAGES", "MM_SHMEMPAGES")


class TaskMemory(Struct, frozen=True):
    """Sizes of address spaces: one value for each thread, the same for all threads that
    share an address space."""

    has_mm: Booleans
    """Whether the thread has an address space: kernel threads and dead threads have
    none, even if other threads of the process live."""

    known: Booleans
    """Whether the address space could be read; sizes are zero if not."""

    rss_known: Booleans
    """Whether the resident size is known; not if a new kernel keeps it otherwise."""

    size_bytes: Bytes
    """Size of all mappings: VmSize of /proc/PID/status."""

    rss_bytes: Bytes
    """Exact size of the resident pages, which includes counts cached by CPUs and tasks.

    VmRSS of /proc/PID/status and statm since Linux kernel commit 82241a83cd15 ("mm: fix
    the inaccurate memory statistics issue for users") (in v6.16, and in stable ones).
    """

    rss_counted_bytes: Bytes
    """Size of the resident pages without cached counts: as in /proc/PID/stat, and
    before commit 82241a83cd15 also in status and statm."""


def read_memory(reader: Reader, tasks: TaskTable, losses: LossLog) -> TaskMemory:
    """Read the address space of each thread, each space once.

    A part of a counter that cannot be read is counted as lost, and not in the sum.
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
    """Return each space's resident pages by counters alone, and with cached parts.

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
    """Add to *counters* the counts cached in tasks (SPLIT_RSS_COUNTING, up to v6.1).

    A task flushes its cache every 64 faults; the kernel itself never sums caches up.
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
