# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is known of the time in each state of Gelato and Solaris, and by what.

Pure, of sums that :mod:`msatools.prstat.states` makes of a table of threads and
:mod:`msatools.query` of one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from msatools.kernel.accounting import Accounting
from msatools.tasks.classes import TaskClass

Family = Literal["gelato", "solaris"]
Bound = Literal["exact", "estimate", "upper", "lower"]

Known = tuple[int, Bound] | None
"""Nanoseconds and how well they are known; ``None`` if nothing is."""

_NONE = "Linux keeps no time of "
_NOW = "the past is not kept; now: class "


class Time(NamedTuple):
    """Time that was spent in a state; a query makes some twenty of them at once."""

    ns: int | None
    """Since the start of each thread; ``None`` if it is not kept."""

    bound: Bound | None
    """How well ``ns`` is known; ``None`` if it is not."""

    reason: str
    """Where the time comes from, or why there is none."""

    source: str = ""
    """The kernel's members that it is made of; empty if there is none."""


class StateSums(NamedTuple):
    """What the kernel keeps of some threads, summed up."""

    user_ns: int
    system_ns: int
    latency_ns: int
    off_cpu_ns: int
    """But for interrupts."""

    zombie_ns: int
    latency_is_bound: bool
    """Whether latency may have sleep in it (6.12)."""

    interrupted: Known
    interruptible: Known
    uninterruptible: Known
    stopped: Known
    swapped: Known
    """Waits for pages that were swapped out."""


def pasts(
    sums: StateSums, accounting: Accounting, paging_ns: int, data_paging_ns: int
) -> Mapping[str, Time]:
    """Put into words what is known of each kind of time.

    :param paging_ns: For how long those that are in page faults now have been.
    :param data_paging_ns: The same of faults on what is not mapped executable.
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


# What is the same of most threads is made once.
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
    """Swap-ins are known; faults on files are part of ``blkio`` and not told apart.

    :param lasting_ns: For how long those that are in page faults now have been.
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
"""By family, the states in their order, and which time each is."""

GELATO_NOW: Mapping[TaskClass, str] = {
    TaskClass.USR: "ONCPU_USR",
    TaskClass.SYS: "ONCPU_SYS",
    TaskClass.INT: "INTERRUPTED",
    # Who is just being woken has no queue yet, and waits for one.
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
"""Which timer runs for a thread of a class; of other classes, but for CPU, that of its
sleep: see :data:`SLEEPS`."""

SLEEPS = {False: "INTERRUPTIBLE_SLEEP", True: "UNINTERRUPTIBLE_SLEEP"}
"""By whether it is uninterruptible."""

SOLARIS_NOW: Mapping[str, str] = {
    "ONCPU_USR": "USER",
    "ONCPU_SYS": "SYSTEM",
    # An interrupt counts as time of whoever it meets, in system mode.
    "INTERRUPTED": "SYSTEM",
    "PAGING_SLEEP": "DFAULT",
    "FUTEX_SLEEP": "USER_LOCK",
    "POLL_SLEEP": "SLEEP",
    "INTERRUPTIBLE_SLEEP": "SLEEP",
    "UNINTERRUPTIBLE_SLEEP": "SLEEP",
    "ONACTIVEQUEUE": "WAIT_CPU",
    "STOPPED": "STOPPED",
}
"""By Gelato's timer, the state that is the same; none of the dead. A page fault on what
is mapped executable is TFAULT."""


def known_sum(values: Sequence[int | None]) -> Known:
    """Sum up what is known of each thread."""
    if len(values) == 1:
        # Of one thread, as queries are for: at once.
        return None if values[0] is None else (values[0], "exact")
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known), "exact" if len(known) == len(values) else "lower"
