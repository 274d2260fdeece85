# SPDX-License-Identifier: LGPL-2.1-or-later

"""Splits time by the kernel's statistics of sleeps, and by microstates."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Accounting, Clocks, Nanoseconds
from msatools.kernel.structs import Booleans
from msatools.tasks.accounting import Delays, Microstates, bound_of
from msatools.tasks.sampler import TaskState
from msatools.tasks.states import INTERRUPTIBLE, UNINTERRUPTIBLE, asleep
from msatools.tasks.table import PF_KTHREAD, TaskTable
from msatools.tasks.waits import TaskClass

# --- Split the time off the CPU by the kernel's statistics of sleeps. Pure.
#
# kernel/sched/stats.c, __update_stats_enqueue_sleeper(): sum_sleep_runtime includes all
# sleeps that have ended, sum_block_runtime the uninterruptible ones of them, and
# iowait_sum those of the latter in I/O wait. They lack
#
# - the current sleep: it is added here, from each thread's class and age;
# - sleeps while the statistics were off: see coverage;
# - stops of any kind: by signals, tracers, the freezer; and parked kernel threads;
# - threads of the stop class (migration/N), and of the deadline class since Linux
#   kernel commit 63ba8422f876 ("sched/deadline: Introduce deadline servers") (in v6.8);
# - sleep on the run queue, since "sched/fair: Implement delayed dequeue" (in v6.12).


SCHED_DEADLINE = 6
SLEEP_SUMS = ("sum_sleep_ns", "sum_block_ns", "iowait_sum_ns")
SLEEP_STAMPS = ("sleep_start_ns", "block_start_ns")


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
    if not all(map(tasks.has, (*SLEEP_SUMS, *SLEEP_STAMPS))):
        nothing = _where(np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.bool_))
        return Sleeps(nothing, nothing, nothing)
    total, block, iowait = (tasks[column].astype(np.int64) for column in SLEEP_SUMS)
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

    :param tasks: All threads: any may show when the statistics were switched on.
    """
    bound = bound_of(accounting)
    interrupted = _breakdown_interrupted(lives, delays, accounting)
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
        stopped=_breakdown_stopped(
            tasks, clocks, slept, unexplained, interrupted, accounting
        ),
        interrupted=interrupted,
        delays=delayed,
        unexplained_ns=unexplained,
        coverage=np.where(slept.known, np.clip(share, 0, 1), np.nan),
        known=slept.known,
        impossible=overrun | too_long,
    )


_ZERO = bytes(8)


def _where(ns: Nanoseconds, known: Booleans) -> SplitColumn:
    if not known.any():
        # Usually nothing is known: save the memory. np.broadcast_to() takes
        # four times as long, for a dozen columns in each report.
        zeros: Nanoseconds = np.ndarray(known.shape, np.int64, _ZERO, strides=(0,))
        return SplitColumn(zeros, known)
    return SplitColumn(np.where(known, ns, 0), known)


def _breakdown_interrupted(
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
    """Return the delays by kind, and which threads have impossible ones."""
    alive = lives.lifetime_ns - lives.zombie_ns
    waited = lives.off_cpu_ns
    if lives.latency_is_bound:
        # Delayed sleepers have wrong blkio delays: only I/O wait and unexplained time
        # are possible. (On other kernels, io_uring's interruptible sleep is, too.)
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


def _breakdown_stopped(
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
    """Return which threads have had statistics all their life.

    The kernel does not record when statistics were switched on. But while they are on,
    it stamps the start of each sleep: so they were on at the oldest stamp, and since.
    """
    covered = np.zeros(len(tasks), np.bool_)
    if not accounting.schedstats or clocks.monotonic_offset_ns is None:
        return covered
    sleeps = asleep(tasks)
    stamps = np.concatenate([tasks[column][sleeps] for column in SLEEP_STAMPS])
    # A stamp older than the last time on the CPU is of an earlier sleep.
    last_ran = np.tile(tasks["exec_start_ns"][sleeps], len(SLEEP_STAMPS)).astype(
        np.int64
    )
    stamps = stamps.astype(np.int64)
    valid = stamps[(stamps != 0) & (stamps >= last_ran - bound_of(accounting))]
    if not len(valid):
        return covered
    started = tasks["start_ns"].astype(np.int64) + clocks.monotonic_offset_ns
    covered |= started >= valid.min()
    covered &= tasks["policy"] != SCHED_DEADLINE
    return covered


# --- Times in each microstate of Gelato and Solaris, with their bounds and sources.
#
# Pure. states() sums up a table of threads, msatools.query.life a single thread.


Family = Literal["gelato", "solaris"]
Bound = Literal["exact", "estimate", "upper", "lower"]

Known = tuple[int, Bound] | None
"""Nanoseconds and their bound; ``None`` if unknown."""

_NONE = "Linux keeps no time of "
_NOW = "the past is not kept; now: class "


class Time(NamedTuple):
    """Time in a state."""

    ns: int | None
    """Sum since the start of each thread; ``None`` if the kernel does not keep it."""

    bound: Bound | None
    """Bound of ``ns``; ``None`` without a time."""

    reason: str
    """Origin of the time, or the reason why there is none."""

    source: str = ""
    """The kernel's members that it is computed from; empty without a time."""


class StateSums(NamedTuple):
    """Sums over threads of the times that the kernel keeps."""

    user_ns: int
    system_ns: int
    latency_ns: int
    off_cpu_ns: int
    """Time off the CPU, without interrupts."""

    zombie_ns: int
    latency_is_bound: bool
    """Whether latency may include sleep (v6.12)."""

    interrupted: Known
    interruptible: Known
    uninterruptible: Known
    stopped: Known
    swapped: Known
    """Waits for pages that were swapped out."""


def pasts(
    sums: StateSums, accounting: Accounting, paging_ns: int, data_paging_ns: int
) -> Mapping[str, Time]:
    """Return the times by kind, such as ``user`` or ``paging``: see :data:`STATES`.

    :param paging_ns: Sum of the durations of current page faults.
    :param data_paging_ns: Sum for page faults on mappings that are not executable.
    """
    split = "time on the CPU is exact; ticks sampled the mode it was in"
    if accounting.precise_cputime:
        split += ", but on nohz_full CPUs"
    delayed = sums.latency_is_bound
    stopped_ns, stopped_bound = sums.stopped or (0, None)
    return {
        "user": Time(sums.user_ns, "estimate", split, _CPU),
        "system": Time(sums.system_ns, "estimate", split, _CPU),
        "latency": Time(
            sums.latency_ns,
            "upper" if delayed else "exact",
            _LATENCY_DELAYED if delayed else _LATENCY,
            "sched_info.run_delay, sched_info.last_queued",
        ),
        "interrupted": _pasts_interrupted(sums, accounting),
        "interruptible": _slept(
            sums.interruptible,
            "sum_sleep_runtime less sum_block_runtime, and the present sleep; past "
            "sleeps on futexes and in poll are in it",
            "stats.sum_sleep_runtime, stats.sum_block_runtime, stats.sleep_start",
        ),
        "uninterruptible": _slept(
            sums.uninterruptible,
            "sum_block_runtime and the present sleep; past page faults are in it",
            "stats.sum_block_runtime, stats.block_start",
        ),
        "sleep": Time(
            sums.off_cpu_ns - (stopped_ns if stopped_bound == "exact" else 0),
            "estimate" if delayed else "upper",
            "all time off the CPU that is not known to be stopped; past locks and page "
            "faults are in it",
            "start_time, se.sum_exec_runtime, sched_info.run_delay",
        ),
        "stopped": _pasts_stopped(sums),
        "zombie": Time(
            sums.zombie_ns,
            "estimate",
            "since exec_start, by a CPU's clock that may have lagged",
            "se.exec_start",
        ),
        "paging": _paging(sums, paging_ns),
        "data faults": _paging(sums, data_paging_ns),
    }


# Times that are equal for most threads are created once.
_PAGING_NEEDS_DELAYS = Time(None, None, f"{_NOW}FLT or SWP; needs delay accounting")
_NO_SWAP_INS = Time(
    None, None, "no swap-ins; past faults on files are not kept: see blkio"
)
_SLEPT_NEEDS_STATISTICS = Time(None, None, "needs schedstats, which have not been on")
_STOPPED_NEEDS_STATISTICS = Time(None, None, f"{_NOW}STP or TRC; needs schedstats")
_INTERRUPTED_NEEDS = {
    irq_time: Time(
        None, None, f"without {lacks} it is in the time of the threads it met"
    )
    for irq_time, lacks in ((True, "delay accounting"), (False, "IRQ_TIME_ACCOUNTING"))
}
_CPU = "se.sum_exec_runtime, utime, stime"
_LATENCY = "run_delay and the present wait"
_LATENCY_DELAYED = f"{_LATENCY}; sleep on the run queue may be in it (6.12)"


def _pasts_interrupted(sums: StateSums, accounting: Accounting) -> Time:
    if sums.interrupted is None:
        return _INTERRUPTED_NEEDS[accounting.irq_time]
    return Time(*sums.interrupted, "irq_delay of delay accounting", "delays.irq_delay")


def _paging(sums: StateSums, lasting_ns: int) -> Time:
    """Return the time in page faults: swap-ins, and current faults.

    Past faults on files are a part of ``blkio`` that cannot be separated.

    :param lasting_ns: Sum of the durations of current page faults.
    """
    if sums.swapped is None:
        return _PAGING_NEEDS_DELAYS
    least = sums.swapped[0] + lasting_ns
    if not least:
        return _NO_SWAP_INS
    return Time(
        least,
        "lower",
        "swap-ins that have ended, and present faults; past faults on files are not "
        "kept",
        "delays.swapin_delay, se.exec_start",
    )


def _slept(known: Known, reason: str, source: str) -> Time:
    if known is None:
        return _SLEPT_NEEDS_STATISTICS
    return Time(*known, reason, source)


def _pasts_stopped(sums: StateSums) -> Time:
    if sums.stopped is None:
        return _STOPPED_NEEDS_STATISTICS
    reason = "time off the CPU that no sleep explains"
    if sums.stopped[1] == "upper":
        reason += "; the statistics lack some sleeps"
    return Time(
        *sums.stopped,
        reason,
        "start_time, se.sum_exec_runtime, sched_info.run_delay, "
        "stats.sum_sleep_runtime",
    )


Pasts = Mapping[str, Time]


def _not_kept(reason: str) -> Callable[[Pasts], Time]:
    none = Time(None, None, reason)
    return lambda _: none


STATES: Mapping[Family, Mapping[str, Callable[[Pasts], Time]]] = {
    "gelato": {
        "ONCPU_USR": itemgetter("user"),
        "ONCPU_SYS": itemgetter("system"),
        "ONCPU_TRAP": _not_kept(f"{_NONE}traps: it is in user and system time"),
        "INTERRUPTED": itemgetter("interrupted"),
        "ONACTIVEQUEUE": itemgetter("latency"),
        "ONEXPIREDQUEUE": _not_kept(
            "there is one queue since Linux 2.6.23: its time is in ONACTIVEQUEUE"
        ),
        "PAGING_SLEEP": itemgetter("paging"),
        "FUTEX_SLEEP": _not_kept(f"{_NOW}LCK"),
        "POLL_SLEEP": _not_kept(f"{_NOW}POL"),
        "INTERRUPTIBLE_SLEEP": itemgetter("interruptible"),
        "UNINTERRUPTIBLE_SLEEP": itemgetter("uninterruptible"),
        "STOPPED": itemgetter("stopped"),
        "ZOMBIE": itemgetter("zombie"),
    },
    "solaris": {
        "USER": itemgetter("user"),
        "SYSTEM": itemgetter("system"),
        "TRAP": _not_kept(f"{_NONE}traps: it is in user and system time"),
        "TFAULT": _not_kept(f"{_NOW}FLT or SWP, on what is mapped executable"),
        "DFAULT": itemgetter("data faults"),
        "KFAULT": _not_kept(f"{_NONE}faults of the kernel: it is not paged"),
        "USER_LOCK": _not_kept(f"{_NOW}LCK"),
        "SLEEP": itemgetter("sleep"),
        "WAIT_CPU": itemgetter("latency"),
        "STOPPED": itemgetter("stopped"),
    },
}
"""Maps the states of each family, in their order, to functions that select a time."""

GELATO_NOW: Mapping[TaskClass, str] = {
    TaskClass.USR: "ONCPU_USR",
    TaskClass.SYS: "ONCPU_SYS",
    TaskClass.INT: "INTERRUPTED",
    # A task that is being woken is on no run queue yet, but waits for a CPU.
    TaskClass.LAT: "ONACTIVEQUEUE",
    TaskClass.WAK: "ONACTIVEQUEUE",
    TaskClass.FLT: "PAGING_SLEEP",
    TaskClass.SWP: "PAGING_SLEEP",
    TaskClass.LCK: "FUTEX_SLEEP",
    TaskClass.POL: "POLL_SLEEP",
    TaskClass.STP: "STOPPED",
    TaskClass.TRC: "STOPPED",
    TaskClass.ZMB: "ZOMBIE",
}
"""Maps classes to Gelato's timer that runs; in other classes, except CPU, a timer of
:data:`SLEEPS` runs."""

SLEEPS = {False: "INTERRUPTIBLE_SLEEP", True: "UNINTERRUPTIBLE_SLEEP"}
"""Maps whether a sleep is uninterruptible to its timer."""

SOLARIS_NOW: Mapping[str, str] = {
    "ONCPU_USR": "USER",
    "ONCPU_SYS": "SYSTEM",
    # An interrupt counts as system time of the interrupted thread.
    "INTERRUPTED": "SYSTEM",
    "PAGING_SLEEP": "DFAULT",
    "FUTEX_SLEEP": "USER_LOCK",
    "POLL_SLEEP": "SLEEP",
    "INTERRUPTIBLE_SLEEP": "SLEEP",
    "UNINTERRUPTIBLE_SLEEP": "SLEEP",
    "ONACTIVEQUEUE": "WAIT_CPU",
    "STOPPED": "STOPPED",
}
"""Maps Gelato's timers to Solaris's states; zombies have none. A page fault on an
executable mapping is TFAULT."""


def known_sum(values: Sequence[int | None]) -> Known:
    """Return the sum of the known values: ``exact`` if all are known, else ``lower``.

    :return: ``None`` if no value is known.
    """
    if len(values) == 1:
        # A short cut for queries of one thread.
        return None if values[0] is None else (values[0], "exact")
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known), "exact" if len(known) == len(values) else "lower"


# --- The states of Gelato's and Solaris's microstate accounting, as far as Linux has
# them.
#
# Pure. Gelato's patch for Linux 2.6 and Solaris (LMS_* in sys/msacct.h) have a timer
# for each state. Linux has some of them, under other names. For most states at least
# the current threads and their ages are known.


class StateTime(Struct, frozen=True):
    """Time in one state, summed over the selected threads."""

    name: str
    family: Family
    ns: int | None
    """Time since each thread's start; ``None`` if Linux does not keep it."""

    bound: Bound | Literal["none"]
    """Accuracy of ``ns``; "none" if it is unknown."""

    now_threads: int | None
    """Number of threads in the state now; ``None`` if unknown. A thread is in one state
    of each family."""

    now_ns: int | None
    """Sum of their times in the state; for running threads, since they got the CPU."""

    reason: str
    """Where the time comes from, or why there is none."""


def states(
    tasks: TaskTable,
    lives: Microstates,
    parts: Breakdown,
    accounting: Accounting,
    now: TaskState,
    selected: Booleans | None = None,
    text_faults: Booleans | None = None,
) -> tuple[StateTime, ...]:
    """Sum up each state, Gelato's thirteen first, then those of Solaris.

    :param selected: The threads to sum over; all of them if ``None``.
    :param text_faults: Whether each thread's page fault is on an executable mapping;
        ``None`` if unknown: then all count as faults on data.
    """
    if selected is None:
        selected = np.ones(len(tasks), np.bool_)
    members: dict[Family, Mapping[str, Booleans]] = {
        "gelato": _gelato(tasks, now),
        "solaris": _solaris(tasks, now, text_faults),
    }

    def lasting(family: Family, name: str) -> int:
        return int(now.age_ns[selected & members[family][name]].sum())

    found = pasts(
        sums(lives, parts, accounting, selected),
        accounting,
        lasting("gelato", "PAGING_SLEEP"),
        lasting("solaris", "DFAULT"),
    )
    mode_unknown = bool((selected & _in_unknown_mode(tasks, now)).any())
    times = []
    for family, names in STATES.items():
        for name, time_of in names.items():
            inside = members[family].get(name)
            unknown = inside is None or (mode_unknown and name in _ON_CPU)
            rows = selected & inside if inside is not None else selected
            past = time_of(found)
            times.append(
                StateTime(
                    name=name,
                    family=family,
                    ns=past.ns,
                    bound=past.bound or "none",
                    now_threads=None if unknown else int(np.count_nonzero(rows)),
                    now_ns=None if unknown else int(now.age_ns[rows].sum()),
                    reason=past.reason,
                )
            )
    return tuple(times)


_ON_CPU = frozenset(("ONCPU_USR", "ONCPU_SYS", "INTERRUPTED", "USER", "SYSTEM"))


def _in_unknown_mode(tasks: TaskTable, now: TaskState) -> Booleans:
    """Return which threads run in an unknown mode.

    A live kernel has no registers to read; a dump may lack those of some CPUs.
    """
    runs = (tasks["on_cpu"] != 0) & (tasks["exit_state"] == 0)
    unread: Booleans = now.classes == TaskClass.CPU
    unread |= runs & (now.classes == TaskClass.OTH)
    return unread


def _gelato(tasks: TaskTable, now: TaskState) -> dict[str, Booleans]:
    """Map Gelato's states to the threads that are in them now.

    Each thread is in one state, unless it runs in an unknown mode.
    """
    of: dict[str, Booleans] = {}
    for task_class, name in GELATO_NOW.items():
        inside: Booleans = now.classes == task_class
        of[name] = of[name] | inside if name in of else inside
    rest = ~np.any(list(of.values()), axis=0) & ~_in_unknown_mode(tasks, now)
    blocked = (tasks["state"] & UNINTERRUPTIBLE) != 0
    of[SLEEPS[True]] = rest & blocked
    of[SLEEPS[False]] = rest & ~blocked
    return of


def _solaris(
    tasks: TaskTable, now: TaskState, text_faults: Booleans | None
) -> dict[str, Booleans]:
    """Map Solaris's states to the threads in them now; zombies are in none."""
    of: dict[str, Booleans] = {}
    for timer, inside in _gelato(tasks, now).items():
        if timer in SOLARIS_NOW:
            name = SOLARIS_NOW[timer]
            of[name] = of[name] | inside if name in of else inside
    if text_faults is not None:
        paging = of["DFAULT"]
        of |= {"TFAULT": paging & text_faults, "DFAULT": paging & ~text_faults}
    return of


def sums(
    lives: Microstates, parts: Breakdown, accounting: Accounting, selected: Booleans
) -> StateSums:
    """Sum up the times that the kernel keeps, over the selected threads."""

    def total(values: Nanoseconds) -> int:
        return int(values[selected].sum())

    lacking = (parts.unexplained_ns - parts.stopped.ns)[selected]
    whole = not lives.latency_is_bound and bool((lacking <= bound_of(accounting)).all())

    def slept(*kinds: SplitColumn) -> Known:
        times = _total(kinds, selected)
        return times if times is None or whole else (times[0], "lower")

    return StateSums(
        user_ns=total(lives.user_ns),
        system_ns=total(lives.system_ns),
        latency_ns=total(lives.latency_ns),
        off_cpu_ns=total(lives.off_cpu_ns) - parts.interrupted.total(selected),
        zombie_ns=total(lives.zombie_ns),
        latency_is_bound=lives.latency_is_bound,
        interrupted=_total((parts.interrupted,), selected),
        interruptible=slept(parts.sleeps.sleep),
        uninterruptible=slept(parts.sleeps.blocked, parts.sleeps.iowait),
        stopped=_states_stopped(parts, selected),
        swapped=_total([c for k, c in parts.delays.items() if k == "swapin"], selected),
    )


def _states_stopped(parts: Breakdown, selected: Booleans) -> Known:
    column = parts.stopped
    if column.known[selected].all():
        return column.total(selected), "exact"
    if not parts.known[selected].all():
        return None
    unknown = selected & ~column.known
    most = column.total(selected) + int(parts.unexplained_ns[unknown].clip(0).sum())
    return most, "upper"


def _total(columns: Sequence[SplitColumn], selected: Booleans) -> Known:
    """Sum up columns, exact if all values are known; ``None`` if none is."""
    known = [column.known[selected] for column in columns]
    if not known or not np.any(known):
        return None
    total = sum(column.total(selected) for column in columns)
    return total, "exact" if np.all(known) else "lower"
