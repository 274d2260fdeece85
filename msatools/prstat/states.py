# SPDX-License-Identifier: LGPL-2.1-or-later

"""The states of Gelato's and Solaris's microstate accounting, as far as Linux has them.

Pure. Gelato's patch for Linux 2.6 and Solaris (LMS_* in sys/msacct.h) have a timer for
each state. Linux has some of them, under other names. For most states at least the
current threads and their ages are known.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from msatools.kernel.accounting import Accounting
from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.structs import Booleans
from msatools.prstat.breakdown import Breakdown, SplitColumn
from msatools.prstat.pasts import (
    GELATO_NOW,
    SLEEPS,
    SOLARIS_NOW,
    STATES,
    Bound,
    Family,
    Known,
    StateSums,
    pasts,
)
from msatools.tasks.classes import TaskClass
from msatools.tasks.microstates import Microstates, bound_of
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState


class StateTime(Struct, frozen=True):
    """Time in one state, summed over the selected threads."""

    name: str
    family: Family
    ns: int | None
    """Time since each thread's start; ``None`` if Linux does not keep it."""

    bound: Bound | Literal["none"]
    """Accuracy of ``ns``; "none" if it is unknown."""

    now_threads: int | None
    """Number of threads in it now; ``None`` if unknown. A thread is in one state of
    each family."""

    now_ns: int | None
    """Sum of their ages in it; of running threads since they came to the CPU."""

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
    """Return which threads are in each state now.

    Each thread is in one, unless it runs in an unknown mode.
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
    """Return which threads are in each state now: each that is alive is in one."""
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
    """Sum up the times that the kernel keeps, over some threads."""

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
        stopped=_stopped(parts, selected),
        swapped=_total([c for k, c in parts.delays.items() if k == "swapin"], selected),
    )


def _stopped(parts: Breakdown, selected: Booleans) -> Known:
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
