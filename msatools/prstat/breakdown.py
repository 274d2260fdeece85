# SPDX-License-Identifier: LGPL-2.1-or-later

"""Split the time off the CPU by the kernel's statistics of sleeps. Pure.

kernel/sched/stats.c, __update_stats_enqueue_sleeper(): ``sum_sleep_runtime`` includes
all sleeps that have ended, ``sum_block_runtime`` the uninterruptible ones of them, and
``iowait_sum`` those of the latter in I/O wait. They lack

- the current sleep: it is added here, from each thread's class and age;
- sleeps while the statistics were off: see ``coverage``;
- stops of any kind: by signals, tracers, the freezer; and parked kernel threads;
- threads of the stop class (``migration/N``), and of the deadline class since Linux
  kernel commit 63ba8422f876 ("sched/deadline: Introduce deadline servers") (in v6.8);
- sleep on the run queue, since "sched/fair: Implement delayed dequeue" (in v6.12).
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.accounting import Accounting
from msatools.kernel.clocks import Clocks, Nanoseconds
from msatools.kernel.structs import Booleans
from msatools.tasks.delays import Delays
from msatools.tasks.microstates import Microstates, bound_of
from msatools.tasks.states import INTERRUPTIBLE, UNINTERRUPTIBLE, asleep
from msatools.tasks.table import PF_KTHREAD, TaskTable
from msatools.tasks.task_state import TaskState

SCHED_DEADLINE = 6
_SUMS = ("sum_sleep_ns", "sum_block_ns", "iowait_sum_ns")
_STAMPS = ("sleep_start_ns", "block_start_ns")


class SplitColumn(Struct, frozen=True):
    """One value a thread, if known."""

    ns: Nanoseconds
    """The values; zero if unknown."""

    known: Booleans

    def __getitem__(self, row: int) -> int | None:
        return int(self.ns[row]) if self.known[row] else None

    def total(self, selected: Booleans) -> int:
        """Sum over some threads; unknown values count as zero."""
        return int(self.ns[selected].sum())


class Sleeps(Struct, frozen=True):
    """Sleep up to now; the kinds do not overlap."""

    sleep: SplitColumn
    """Interruptible sleep."""

    blocked: SplitColumn
    """Uninterruptible sleep without I/O wait."""

    iowait: SplitColumn
    """Uninterruptible sleep in I/O wait."""

    @property
    def total_ns(self) -> Nanoseconds:
        """Sum of all kinds; zero if unknown."""
        return self.sleep.ns + self.blocked.ns + self.iowait.ns

    @property
    def known(self) -> Booleans:
        """Whether each thread has statistics."""
        return self.sleep.known

    @property
    def below_zero(self) -> Booleans:
        """Whether a part exceeds its sum, as in a damaged dump."""
        kinds = (self.sleep.ns, self.blocked.ns, self.iowait.ns)
        below: Booleans = np.stack(kinds).min(axis=0) < 0
        return below

    def where(self, known: Booleans) -> "Sleeps":
        """Make the values of all other threads unknown."""
        kinds = (self.sleep, self.blocked, self.iowait)
        return Sleeps(*(_where(kind.ns, kind.known & known) for kind in kinds))


class Breakdown(Struct, frozen=True):
    """The parts of the time off the CPU."""

    sleeps: Sleeps
    stopped: SplitColumn
    """Time stopped, traced or frozen: the time with no other explanation."""

    interrupted: SplitColumn
    """Time in interrupts while the thread was running. If the kernel keeps it, it
    counts as off the CPU; else it is in user and system time."""

    delays: Mapping[str, SplitColumn]
    """Delays by kind. They overlap each other and the parts above: ``blkio`` is all off
    the CPU; the others last from the start to the end of some work, waits included."""

    unexplained_ns: Nanoseconds
    """Time off the CPU that is not in ``sleeps`` or ``interrupted``; negative if those
    are too long. Zero if not ``known``."""

    coverage: npt.NDArray[np.float64]
    """Share of the time off the CPU that the statistics explain; nan if unknown."""

    known: Booleans
    """Whether each thread has statistics."""

    impossible: Booleans
    """Whether a counter exceeded the time that it is part of, and was left out. Delayed
    sleepers (v6.12) have such counters, usually ``blkio``: when they leave the run
    queue, its start is set in the task that runs then (__block_task())."""


def sleeps(
    tasks: TaskTable, accounting: Accounting, now: TaskState, in_iowait: Booleans
) -> Sleeps:
    """Return the time that each thread has slept, by the statistics.

    :param in_iowait: whether each thread's current sleep is I/O wait
    """
    if not all(map(tasks.has, (*_SUMS, *_STAMPS))):
        nothing = _where(np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.bool_))
        return Sleeps(nothing, nothing, nothing)
    total, block, iowait = (tasks[column].astype(np.int64) for column in _SUMS)
    # If switched off meanwhile, the sums are right but incomplete.
    known = (total != 0) | bool(accounting.schedstats)
    blocks = asleep(tasks) & ((tasks["state"] & UNINTERRUPTIBLE) != 0)
    rests = asleep(tasks) & ((tasks["state"] & INTERRUPTIBLE) != 0) & ~blocks
    return Sleeps(
        sleep=_where(total - block + np.where(rests, now.age_ns, 0), known),
        blocked=_where(
            block - iowait + np.where(blocks & ~in_iowait, now.age_ns, 0), known
        ),
        iowait=_where(iowait + np.where(blocks & in_iowait, now.age_ns, 0), known),
    )


def breakdown(
    tasks: TaskTable,
    clocks: Clocks,
    lives: Microstates,
    slept: Sleeps,
    delays: Delays,
    accounting: Accounting,
) -> Breakdown:
    """Split each thread's time off the CPU up to now.

    :param tasks: All threads, as some show since when the statistics are on.
    """
    bound = bound_of(accounting)
    interrupted = _interrupted(lives, delays, accounting)
    off_cpu = lives.off_cpu_ns - interrupted.ns
    left = off_cpu - slept.total_ns
    overrun = slept.known & ((left < -bound) | slept.below_zero)
    slept = slept.where(~overrun)
    unexplained = np.where(slept.known, left, 0)
    delayed, too_long = _delays(lives, delays, slept, unexplained, bound)
    share = np.divide(
        slept.total_ns, off_cpu, out=np.ones(len(tasks)), where=off_cpu > 0
    )
    return Breakdown(
        sleeps=slept,
        stopped=_stopped(tasks, clocks, slept, unexplained, interrupted, accounting),
        interrupted=interrupted,
        delays=delayed,
        unexplained_ns=unexplained,
        coverage=np.where(slept.known, np.clip(share, 0, 1), np.nan),
        known=slept.known,
        impossible=overrun | too_long,
    )


def _where(ns: Nanoseconds, known: Booleans) -> SplitColumn:
    if not known.any():
        # Usually nothing is known: save the memory.
        return SplitColumn(np.broadcast_to(np.int64(0), known.shape), known)
    return SplitColumn(np.where(known, ns, 0), known)


def _interrupted(
    lives: Microstates, delays: Delays, accounting: Accounting
) -> SplitColumn:
    """Return the time that each running thread was interrupted."""
    length = len(lives.lifetime_ns)
    if not accounting.irq_time or "irq" not in delays.delay_ns:
        return _where(np.zeros(length, np.int64), np.zeros(length, np.bool_))
    time = delays.delay_ns["irq"]
    return _where(time, delays.has & (time <= lives.off_cpu_ns))


def _delays(
    lives: Microstates,
    delays: Delays,
    slept: Sleeps,
    unexplained_ns: Nanoseconds,
    bound_ns: int,
) -> tuple[dict[str, SplitColumn], Booleans]:
    """Return the possible delays, and which threads have impossible ones."""
    alive = lives.lifetime_ns - lives.zombie_ns
    waited = lives.off_cpu_ns
    if lives.latency_is_bound:
        # Delayed sleepers have wrong values. (On other kernels it may be interruptible
        # sleep, too, by io_uring.)
        explained = slept.iowait.ns + np.maximum(unexplained_ns, 0)
        waited = np.where(slept.known, np.minimum(explained, waited), waited)
    impossible = np.zeros(len(alive), np.bool_)
    found = {}
    for kind, time in delays.delay_ns.items():
        limit = {"blkio": waited, "irq": lives.off_cpu_ns}.get(kind, alive)
        too_long = delays.has & (time > limit + bound_ns)
        found[kind] = _where(time, delays.has & ~too_long)
        impossible |= too_long
    return found, impossible


def _stopped(
    tasks: TaskTable,
    clocks: Clocks,
    slept: Sleeps,
    unexplained_ns: Nanoseconds,
    interrupted: SplitColumn,
    accounting: Accounting,
) -> SplitColumn:
    """Return the time that each thread was stopped, if all other times are known.

    It is zero for kernel threads, and if the unexplained time is within the maximum
    difference of the clocks.
    """
    none = (tasks["flags"] & PF_KTHREAD) != 0
    none |= unexplained_ns <= bound_of(accounting)
    whole = _covered_since_start(tasks, clocks, accounting)
    if accounting.irq_time:
        whole &= interrupted.known
    if tasks.has("sched_delayed"):
        whole[:] = False
    return _where(np.where(none, 0, unexplained_ns), slept.known & (none | whole))


def _covered_since_start(
    tasks: TaskTable, clocks: Clocks, accounting: Accounting
) -> Booleans:
    """Return for which threads the statistics were on all their life.

    The kernel does not store since when they are on. But while they are on it stamps
    the start of each sleep: so they have been on since the oldest stamp at least.
    """
    covered = np.zeros(len(tasks), np.bool_)
    if not accounting.schedstats or clocks.monotonic_offset_ns is None:
        return covered
    sleeps = asleep(tasks)
    stamps = np.concatenate([tasks[column][sleeps] for column in _STAMPS])
    # A stamp older than the last time on the CPU is of an earlier sleep.
    last_ran = np.tile(tasks["exec_start_ns"][sleeps], len(_STAMPS)).astype(np.int64)
    stamps = stamps.astype(np.int64)
    valid = stamps[(stamps != 0) & (stamps >= last_ran - bound_of(accounting))]
    if not len(valid):
        return covered
    started = tasks["start_ns"].astype(np.int64) + clocks.monotonic_offset_ns
    covered |= started >= valid.min()
    covered &= tasks["policy"] != SCHED_DEADLINE
    return covered
