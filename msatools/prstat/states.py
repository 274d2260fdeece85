# SPDX-License-Identifier: LGPL-2.1-or-later

"""The states of two microstate accountings of old, and what Linux tells of each.

Pure. Gelato's patch for Linux 2.6 and Solaris (LMS_* in sys/msacct.h) had a timer for
each state. Linux has some of them, under other names, and can tell of most at least who
is in them now, and for how long.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from msatools.kernel.accounting import Accounting
from msatools.kernel.clocks import Nanoseconds
from msatools.prstat.breakdown import Breakdown, Column
from msatools.prstat.microstates import Booleans, Microstates, bound_of
from msatools.tasks.classes import TaskClass
from msatools.tasks.now import Now
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.table import TaskTable

Family = Literal["gelato", "solaris"]
Bound = Literal["exact", "estimate", "upper", "lower", "none"]

_NONE = "Linux keeps no time of "
_NOW = "the past is not kept; now: class "


@dataclass(frozen=True)
class StateTime:
    """What is known of one state, summed over the selected threads."""

    name: str
    family: Family
    ns: int | None
    """Time in it since each thread's start; ``None`` if it is not kept."""

    bound: Bound
    """How well ``ns`` is known; "none" if it is not."""

    now_threads: int | None
    """Threads in it at this moment, each in one state of a family; ``None`` if that
    cannot be told."""

    now_ns: int | None
    """For how long they have been, summed; those on a CPU since they came there."""

    reason: str
    """Where the time comes from, or why there is none."""


@dataclass(frozen=True)
class _Past:
    ns: int | None
    bound: Bound
    reason: str


def states(
    tasks: TaskTable,
    lives: Microstates,
    parts: Breakdown,
    accounting: Accounting,
    now: Now,
    selected: Booleans | None = None,
    text_faults: Booleans | None = None,
) -> tuple[StateTime, ...]:
    """Sum up each state, Gelato's thirteen first, then those of Solaris.

    :param selected: The threads to sum over; all of them if ``None``.
    :param text_faults: Whose page fault is on what is mapped executable; ``None`` if
        nobody has looked: then all count as faults on data.
    """
    if selected is None:
        selected = np.ones(len(tasks), np.bool_)
    places: dict[Family, Mapping[str, Booleans]] = {
        "gelato": _gelato(tasks, now),
        "solaris": _solaris(tasks, now, text_faults),
    }

    def lasting(family: Family, name: str) -> int:
        return int(now.age_ns[selected & places[family][name]].sum())

    pasts = {
        **_pasts(lives, parts, accounting, selected),
        "paging": _paging(parts, selected, lasting("gelato", "PAGING_SLEEP")),
        "data faults": _paging(parts, selected, lasting("solaris", "DFAULT")),
    }
    # A live kernel does not tell in which mode a thread runs.
    somewhere = bool((selected & (now.classes == TaskClass.CPU)).any())
    found = []
    for family, names in _STATES.items():
        for name, tell in names.items():
            here = places[family].get(name)
            unknown = here is None or (somewhere and name in _ON_CPU)
            rows = selected & here if here is not None else selected
            past = tell(pasts)
            found.append(
                StateTime(
                    name=name,
                    family=family,
                    ns=past.ns,
                    bound=past.bound,
                    now_threads=None if unknown else int(np.count_nonzero(rows)),
                    now_ns=None if unknown else int(now.age_ns[rows].sum()),
                    reason=past.reason,
                )
            )
    return tuple(found)


_ON_CPU = frozenset(("ONCPU_USR", "ONCPU_SYS", "INTERRUPTED", "USER", "SYSTEM"))
_Pasts = Mapping[str, _Past]


def _kept(name: str) -> Callable[[_Pasts], _Past]:
    return lambda pasts: pasts[name]


def _not_kept(reason: str) -> Callable[[_Pasts], _Past]:
    return lambda _: _Past(None, "none", reason)


_STATES: dict[Family, dict[str, Callable[[_Pasts], _Past]]] = {
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


def _gelato(tasks: TaskTable, now: Now) -> dict[str, Booleans]:
    """Tell which threads are in each state now: each thread is in one."""
    of = {
        "ONCPU_USR": _of(now, TaskClass.USR),
        "ONCPU_SYS": _of(now, TaskClass.SYS),
        "INTERRUPTED": _of(now, TaskClass.INT),
        # Who is just being woken has no queue yet, and waits for one.
        "ONACTIVEQUEUE": _of(now, TaskClass.LAT, TaskClass.WAK),
        "PAGING_SLEEP": _of(now, TaskClass.FLT, TaskClass.SWP),
        "FUTEX_SLEEP": _of(now, TaskClass.LCK),
        "POLL_SLEEP": _of(now, TaskClass.POL),
        "STOPPED": _of(now, TaskClass.STP, TaskClass.TRC),
        "ZOMBIE": _of(now, TaskClass.ZMB),
    }
    rest = ~np.any(list(of.values()), axis=0) & ~_of(now, TaskClass.CPU)
    blocked = (tasks["state"] & UNINTERRUPTIBLE) != 0
    of["UNINTERRUPTIBLE_SLEEP"] = rest & blocked
    of["INTERRUPTIBLE_SLEEP"] = rest & ~blocked
    return of


def _solaris(
    tasks: TaskTable, now: Now, text_faults: Booleans | None
) -> dict[str, Booleans]:
    """Tell which threads are in each state now: each that is alive is in one."""
    gelato = _gelato(tasks, now)
    paging = gelato["PAGING_SLEEP"]
    of = {
        "USER": gelato["ONCPU_USR"],
        # An interrupt counts as time of whoever it meets, in system mode.
        "SYSTEM": gelato["ONCPU_SYS"] | gelato["INTERRUPTED"],
        "DFAULT": paging,
        "USER_LOCK": gelato["FUTEX_SLEEP"],
        "SLEEP": gelato["POLL_SLEEP"]
        | gelato["INTERRUPTIBLE_SLEEP"]
        | gelato["UNINTERRUPTIBLE_SLEEP"],
        "WAIT_CPU": gelato["ONACTIVEQUEUE"],
        "STOPPED": gelato["STOPPED"],
    }
    if text_faults is not None:
        of |= {"TFAULT": paging & text_faults, "DFAULT": paging & ~text_faults}
    return of


def _of(now: Now, *classes: TaskClass) -> Booleans:
    return np.isin(now.classes, classes)


def _pasts(
    lives: Microstates, parts: Breakdown, accounting: Accounting, selected: Booleans
) -> _Pasts:
    def total(values: Nanoseconds) -> int:
        return int(values[selected].sum())

    split = "time on the CPU is exact; ticks sampled the mode it was in"
    if accounting.precise_cputime:
        split += ", but on nohz_full CPUs"
    delayed = lives.latency_is_bound
    off_cpu = total(lives.off_cpu_ns) - parts.interrupted.total(selected)
    stopped = _stopped(parts, selected)
    return {
        "user": _Past(total(lives.user_ns), "estimate", split),
        "system": _Past(total(lives.system_ns), "estimate", split),
        "latency": _Past(
            total(lives.latency_ns),
            "upper" if delayed else "exact",
            "run_delay and the present wait"
            + ("; sleep on the run queue may be in it (6.12)" if delayed else ""),
        ),
        "interrupted": _interrupted(parts, accounting, selected),
        "interruptible": _slept(
            (parts.sleeps.sleep,),
            "sum_sleep_runtime less sum_block_runtime, and the present sleep; past "
            "sleeps on futexes and in poll are in it",
            parts,
            selected,
            delayed,
            bound_of(accounting),
        ),
        "uninterruptible": _slept(
            (parts.sleeps.blocked, parts.sleeps.iowait),
            "sum_block_runtime and the present sleep; past page faults are in it",
            parts,
            selected,
            delayed,
            bound_of(accounting),
        ),
        "sleep": _Past(
            off_cpu - (stopped.ns or 0 if stopped.bound == "exact" else 0),
            "estimate" if delayed else "upper",
            "all time off the CPU that is not known to be stopped; past locks and page "
            "faults are in it",
        ),
        "stopped": stopped,
        "zombie": _Past(
            total(lives.zombie_ns),
            "estimate",
            "since exec_start, by a CPU's clock that may have lagged",
        ),
    }


def _interrupted(parts: Breakdown, accounting: Accounting, selected: Booleans) -> _Past:
    told = _total((parts.interrupted,), selected)
    if told is None:
        lacks = "delay accounting" if accounting.irq_time else "IRQ_TIME_ACCOUNTING"
        return _Past(
            None, "none", f"without {lacks} it is in the time of the threads it met"
        )
    return _Past(*told, "irq_delay of delay accounting")


def _paging(parts: Breakdown, selected: Booleans, lasting_ns: int) -> _Past:
    """Swap-ins are known; faults on files are part of ``blkio`` and not told apart.

    :param lasting_ns: For how long those that are in page faults now have been.
    """
    told = _total([c for k, c in parts.delays.items() if k == "swapin"], selected)
    if told is None:
        return _Past(None, "none", f"{_NOW}FLT or SWP; needs delay accounting")
    least = told[0] + lasting_ns
    if not least:
        return _Past(
            None, "none", "no swap-ins; past faults on files are not kept: see blkio"
        )
    return _Past(
        least,
        "lower",
        "swap-ins that have ended, and present faults; past faults on files are not "
        "kept",
    )


def _slept(
    kinds: tuple[Column, ...],
    reason: str,
    parts: Breakdown,
    selected: Booleans,
    delayed: bool,
    bound_ns: int,
) -> _Past:
    told = _total(kinds, selected)
    if told is None:
        return _Past(None, "none", "needs schedstats, which have not been on")
    lacking = (parts.unexplained_ns - parts.stopped.ns)[selected]
    whole = not delayed and bool((lacking <= bound_ns).all())
    return _Past(told[0], told[1] if whole else "lower", reason)


def _stopped(parts: Breakdown, selected: Booleans) -> _Past:
    reason = "time off the CPU that no sleep explains"
    column = parts.stopped
    if column.known[selected].all():
        return _Past(column.total(selected), "exact", reason)
    if not parts.known[selected].all():
        return _Past(None, "none", f"{_NOW}STP or TRC; needs schedstats")
    unknown = selected & ~column.known
    most = column.total(selected) + int(parts.unexplained_ns[unknown].clip(0).sum())
    return _Past(most, "upper", f"{reason}; the statistics lack some sleeps")


def _total(columns: Sequence[Column], selected: Booleans) -> tuple[int, Bound] | None:
    """Sum columns, and tell whether all of it is known; ``None`` if nothing is."""
    known = [column.known[selected] for column in columns]
    if not known or not np.any(known):
        return None
    total = sum(column.total(selected) for column in columns)
    return total, "exact" if np.all(known) else "lower"
