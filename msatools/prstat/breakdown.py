# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the time off the CPU was, where the kernel keeps that.

Pure. kernel/sched/stats.c, __update_stats_enqueue_sleeper(): ``sum_sleep_runtime`` is
of all sleeps that have ended, those in ``sum_block_runtime`` (uninterruptible) among
them, and ``iowait_sum`` is of those of the latter that waited for input or output. They
lack

- what lasts: that is added here, from what each thread is doing now and since when;
- what was while the statistics were off: ``coverage`` tells how much is told;
- stops of any kind: by signals, tracers, the freezer; and parked kernel threads;
- threads of the stop class (``migration/N``), and of the deadline class since Linux
  kernel commit 63ba8422f876 ("sched/deadline: Introduce deadline servers") (in v6.8);
- sleep on the run queue, since "sched/fair: Implement delayed dequeue" (in v6.12).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class SplitColumn:
    """One value a thread, where it is known."""

    ns: Nanoseconds
    """Zero where it is not known."""

    known: Booleans

    def __getitem__(self, row: int) -> int | None:
        return int(self.ns[row]) if self.known[row] else None

    def total(self, selected: Booleans) -> int:
        """Sum over some threads; those of which it is not known add nothing."""
        return int(self.ns[selected].sum())


@dataclass(frozen=True)
class Sleeps:
    """Sleep up to now; each kind is apart from the others."""

    sleep: SplitColumn
    """Interruptible."""

    blocked: SplitColumn
    """Uninterruptible, but for the next."""

    iowait: SplitColumn
    """Uninterruptible, waiting for input or output."""

    @property
    def total_ns(self) -> Nanoseconds:
        """All kinds; zero where they are not known."""
        return self.sleep.ns + self.blocked.ns + self.iowait.ns

    @property
    def known(self) -> Booleans:
        """Whether the statistics tell anything of each thread."""
        return self.sleep.known

    @property
    def below_zero(self) -> Booleans:
        """Whether one kind is more than what it is a part of: in a damaged dump."""
        kinds = (self.sleep.ns, self.blocked.ns, self.iowait.ns)
        below: Booleans = np.stack(kinds).min(axis=0) < 0
        return below

    def where(self, known: Booleans) -> "Sleeps":
        """Forget those of all other threads."""
        kinds = (self.sleep, self.blocked, self.iowait)
        return Sleeps(*(_where(kind.ns, kind.known & known) for kind in kinds))


@dataclass(frozen=True)
class Breakdown:
    """What the time off the CPU was."""

    sleeps: Sleeps
    stopped: SplitColumn
    """Stopped, traced or frozen: what nothing else explains."""

    interrupted: SplitColumn
    """Interrupts that met the thread while it ran. It is off the CPU meanwhile, as the
    kernel counts, where it keeps this; else it is in user and system time."""

    delays: Mapping[str, SplitColumn]
    """By kind. They overlap each other and the above: ``blkio`` is all of it off the
    CPU; the others are from begin to end of some work, which has waits in it."""

    unexplained_ns: Nanoseconds
    """Off the CPU, for what is not in ``sleeps`` or ``interrupted``; below zero by how
    much those miss. Zero where ``known`` is not."""

    coverage: npt.NDArray[np.float64]
    """Share of the time off the CPU that the statistics explain; nan if not known."""

    known: Booleans
    """Whether the statistics tell anything of each thread."""

    impossible: Booleans
    """Whether some counter was more than the time that it is part of: it is left out.
    Delayed sleepers (v6.12) have such, in ``blkio`` above all: as they leave the run
    queue, its start is stamped on whatever task runs (__block_task())."""


def sleeps(
    tasks: TaskTable, accounting: Accounting, now: TaskState, in_iowait: Booleans
) -> Sleeps:
    """Return for how long each thread has slept, as far as statistics tell.

    :param in_iowait: whose sleep now is waiting for input or output
    """
    if not all(map(tasks.has, (*_SUMS, *_STAMPS))):
        nothing = _where(np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.bool_))
        return Sleeps(nothing, nothing, nothing)
    total, block, iowait = (tasks[column].astype(np.int64) for column in _SUMS)
    # Switched off since: what they counted until then is true, and not all.
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

    :param tasks: All threads: what some of them tell of the past holds for others.
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
        # Nothing takes no room: most kernels keep none of this.
        return SplitColumn(np.broadcast_to(np.int64(0), known.shape), known)
    return SplitColumn(np.where(known, ns, 0), known)


def _interrupted(
    lives: Microstates, delays: Delays, accounting: Accounting
) -> SplitColumn:
    """Return for how long interrupts have had each thread's CPU."""
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
    """Return those delays that can be, and tell which threads have others."""
    alive = lives.lifetime_ns - lives.zombie_ns
    waited = lives.off_cpu_ns
    if lives.latency_is_bound:
        # Where sleeps on the run queue spoil it. (Else it may be interruptible sleep,
        # too: io_uring's.)
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
    """Return for how long each thread was stopped, where nothing else can be left.

    The kernel's own threads are never stopped; nor are, as far as can be told, those of
    which no more is left than clocks may be apart.
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

    The kernel does not keep since when they are on. But it stamps sleeps when they
    begin if they are: they have been on since the oldest stamp, at least.
    """
    covered = np.zeros(len(tasks), np.bool_)
    if not accounting.schedstats or clocks.monotonic_offset_ns is None:
        return covered
    sleeps = asleep(tasks)
    stamps = np.concatenate([tasks[column][sleeps] for column in _STAMPS])
    # Older than when it was last on the CPU: from when they were on before.
    last_ran = np.tile(tasks["exec_start_ns"][sleeps], len(_STAMPS)).astype(np.int64)
    stamps = stamps.astype(np.int64)
    valid = stamps[(stamps != 0) & (stamps >= last_ran - bound_of(accounting))]
    if not len(valid):
        return covered
    started = tasks["start_ns"].astype(np.int64) + clocks.monotonic_offset_ns
    covered |= started >= valid.min()
    covered &= tasks["policy"] != SCHED_DEADLINE
    return covered
