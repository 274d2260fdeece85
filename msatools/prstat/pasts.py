# SPDX-License-Identifier: LGPL-2.1-or-later

"""Times in each microstate of Gelato and Solaris, with their bounds and sources.

Pure. :mod:`msatools.prstat.states` sums up a table of threads, and
:mod:`msatools.query` a single one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from msatools.kernel.accounting import Accounting
from msatools.tasks.classes import TaskClass

Family = Literal["gelato", "solaris"]
Bound = Literal["exact", "estimate", "upper", "lower"]

Known = tuple[int, Bound] | None
"""Nanoseconds and their bound; ``None`` if unknown."""

_NONE = "Linux keeps no time of "
_NOW = "the past is not kept; now: class "


class Time(NamedTuple):
    """Time in a state. A named tuple, as a query makes some twenty of them."""

    ns: int | None
    """Sum since the start of each thread; ``None`` if the kernel does not keep it."""

    bound: Bound | None
    """Bound of ``ns``; ``None`` without a time."""

    reason: str
    """Origin of the time, or the reason why there is none."""

    source: str = ""
    """The kernel's members that it is computed from; empty without a time."""


class StateSums(NamedTuple):
    """Sums of the times that the kernel keeps of some threads."""

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
    """Return the time of each kind.

    :param paging_ns: Sum of the durations of current page faults.
    :param data_paging_ns: The same of faults on mappings that are not executable.
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
        "interrupted": _interrupted(sums, accounting),
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
        "stopped": _stopped(sums),
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


def _interrupted(sums: StateSums, accounting: Accounting) -> Time:
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


def _stopped(sums: StateSums) -> Time:
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


def _kept(name: str) -> Callable[[Pasts], Time]:
    return lambda found: found[name]


def _not_kept(reason: str) -> Callable[[Pasts], Time]:
    none = Time(None, None, reason)
    return lambda _: none


STATES: Mapping[Family, Mapping[str, Callable[[Pasts], Time]]] = {
    "gelato": {
        "ONCPU_USR": _kept("user"),
        "ONCPU_SYS": _kept("system"),
        "ONCPU_TRAP": _not_kept(f"{_NONE}traps: it is in user and system time"),
        "INTERRUPTED": _kept("interrupted"),
        "ONACTIVEQUEUE": _kept("latency"),
        "ONEXPIREDQUEUE": _not_kept(
            "there is one queue since Linux 2.6.23: its time is in ONACTIVEQUEUE"
        ),
        "PAGING_SLEEP": _kept("paging"),
        "FUTEX_SLEEP": _not_kept(f"{_NOW}LCK"),
        "POLL_SLEEP": _not_kept(f"{_NOW}POL"),
        "INTERRUPTIBLE_SLEEP": _kept("interruptible"),
        "UNINTERRUPTIBLE_SLEEP": _kept("uninterruptible"),
        "STOPPED": _kept("stopped"),
        "ZOMBIE": _kept("zombie"),
    },
    "solaris": {
        "USER": _kept("user"),
        "SYSTEM": _kept("system"),
        "TRAP": _not_kept(f"{_NONE}traps: it is in user and system time"),
        "TFAULT": _not_kept(f"{_NOW}FLT or SWP, on what is mapped executable"),
        "DFAULT": _kept("data faults"),
        "KFAULT": _not_kept(f"{_NONE}faults of the kernel: it is not paged"),
        "USER_LOCK": _not_kept(f"{_NOW}LCK"),
        "SLEEP": _kept("sleep"),
        "WAIT_CPU": _kept("latency"),
        "STOPPED": _kept("stopped"),
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
"""Maps classes to the timer that runs; for other classes, but CPU, it is that of the
sleep: see :data:`SLEEPS`."""

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
    """Return the sum of the known values, and whether all are known.

    :return: ``None`` if no value is known.
    """
    if len(values) == 1:
        # A short cut for queries of one thread.
        return None if values[0] is None else (values[0], "exact")
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known), "exact" if len(known) == len(values) else "lower"
