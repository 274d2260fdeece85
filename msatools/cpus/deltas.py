# SPDX-License-Identifier: LGPL-2.1-or-later

"""Growth of CPUs' counters between two samples.

Counters of 32 bits wrap around. Others never decrease: one that seems to changed while
it was read, and its growth is unknown.
"""

from collections.abc import Callable, Mapping

import numpy as np
from msgspec.structs import replace

from msatools.cpus.counters import CpuCounters
from msatools.cpus.counts import Counts, counts
from msatools.cpus.vectors import Vectors
from msatools.kernel.report import LossLog

_U32_MAX = (1 << 32) - 1

_SLACK_NS = 50_000_000
"""Maximum error of times: reading a sample takes some milliseconds, and the clock lags
by up to a tick, which is 10 ms at most."""

_STATE = "runq"
"""Column that is not a counter: its value is that at the end."""

_FAULTS = ("faults", "mjf")
"""Counters that an offline CPU hands over to another (page_alloc_cpu_dead())."""

_IDLE = ("IDLE", "IOWAIT")

Columns = Mapping[str, Counts]
Grown = Callable[[Counts, Counts], Counts]


def delta(before: CpuCounters, after: CpuCounters, losses: LossLog) -> CpuCounters:
    """Return the growth of all counters between two samples.

    An unknown growth is noted.
    """
    before = _with_cpus_of(after, before)
    interval = None
    if before.taken_ns is not None and after.taken_ns is not None:
        interval = max(after.taken_ns - before.taken_ns, 0)
    grown = _each(_grown, before.counts, after.counts)
    grown |= {_STATE: after.counts[_STATE]} if _STATE in after.counts else {}
    times = _each(_grown_times, before.times, after.times)
    times |= _grown_idle(before, after, interval)
    faults = {name: grown[name] for name in _FAULTS if name in grown}
    if (before.online & ~after.online).any() or _missing(before.counts, faults):
        unknown = np.zeros(len(after.cpus), np.bool_)
        grown |= {name: counts(one.values, unknown) for name, one in faults.items()}
    gone = sorted(_missing(before.counts, grown) | _missing(before.times, times))
    if gone:
        losses.note(
            "cpus-changed",
            "CPUs went offline or came, or counted while they were read:"
            f" not known meanwhile are some of {', '.join(gone)}",
        )
    return CpuCounters(
        cpus=after.cpus,
        online=after.online,
        taken_ns=after.taken_ns,
        interval_ns=interval,
        counts=grown,
        times=times,
        vectors=Vectors(
            _each(_grown_words, before.vectors.counts, after.vectors.counts),
            {
                name: (number - before.vectors.totals[name]) & _U32_MAX
                for name, number in after.vectors.totals.items()
                if name in before.vectors.totals
            },
            after.vectors.texts,
            after.vectors.calls_name,
        ),
        softirqs=_each(_grown_words, before.softirqs, after.softirqs),
    )


def _with_cpus_of(after: CpuCounters, before: CpuCounters) -> CpuCounters:
    """Return *before* with the CPUs of *after*; additional CPUs have unknown counts."""
    if np.array_equal(before.cpus, after.cpus):
        return before
    both = np.isin(after.cpus, before.cpus)
    rows = np.searchsorted(before.cpus, after.cpus[both])

    def spread(column: Counts) -> Counts:
        values, known = np.zeros(len(both), np.int64), np.zeros(len(both), np.bool_)
        values[both], known[both] = column.values[rows], column.known[rows]
        return Counts(values, known)

    def spread_all(columns: Columns) -> dict[str, Counts]:
        return {name: spread(column) for name, column in columns.items()}

    online = np.zeros(len(both), np.bool_)
    online[both] = before.online[rows]
    return replace(
        before,
        cpus=after.cpus,
        online=online,
        counts=spread_all(before.counts),
        times=spread_all(before.times),
        vectors=replace(before.vectors, counts=spread_all(before.vectors.counts)),
        softirqs=spread_all(before.softirqs),
    )


def _each(grown: Grown, before: Columns, after: Columns) -> dict[str, Counts]:
    return {name: grown(before[name], after[name]) for name in after if name in before}


def _grown(before: Counts, after: Counts) -> Counts:
    more = after.values - before.values
    return counts(more, before.known & after.known & (more >= 0))


def _grown_words(before: Counts, after: Counts) -> Counts:
    more = (after.values - before.values) & _U32_MAX
    return counts(more, before.known & after.known)


def _grown_times(before: Counts, after: Counts) -> Counts:
    more = after.values - before.values
    known = before.known & after.known & (more >= -_SLACK_NS)
    return counts(np.maximum(more, 0), known)


def _grown_idle(
    before: CpuCounters, after: CpuCounters, interval: int | None
) -> dict[str, Counts]:
    """Return the growth of idle time, and of idle time in I/O wait.

    A task in I/O wait is counted on the CPU that it was last on, and may be woken by
    another one. Then the current idle period of its CPU changes from one kind to the
    other, so that one of the two may decrease, but not their sum.

    A CPU that is offline keeps them elsewhere, and restarts from 0 when it is back
    (before "tick-sched: Fix idle and iowait sleeptime accounting vs CPU hotplug" (in
    v6.8)).
    """
    if not all(name in sample.times for sample in (before, after) for name in _IDLE):
        return {}
    idle, iowait = ((before.times[name], after.times[name]) for name in _IDLE)
    known = before.online == after.online
    for column in (*idle, *iowait):
        known = known & column.known
    more_idle = idle[1].values - idle[0].values
    more = more_idle + iowait[1].values - iowait[0].values
    known &= more >= -_SLACK_NS
    if interval is not None:
        known &= more <= interval + _SLACK_NS
    more = np.maximum(more, 0)
    spent = np.clip(more_idle, 0, more)
    return {"IDLE": counts(spent, known), "IOWAIT": counts(more - spent, known)}


def _missing(known: Columns, grown: Columns) -> set[str]:
    """Return the columns with a growth that is unknown though the count was known."""
    return {name for name in grown if (known[name].known & ~grown[name].known).any()}
