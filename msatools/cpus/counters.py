# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-CPU counters and times since boot (mpstat's columns), and their growth."""

from collections.abc import Callable, Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.model import Vector
from msatools.cpus.times import (
    Counts,
    IdleState,
    Vtime,
    awake,
    believed,
    counts,
    idle_times,
    monotonic_ns,
    naps_of_ticks,
    read_ticks,
    read_vtime,
    stamps,
    stops_ticks,
    total,
    uncounted_times,
)
from msatools.cpus.vectors import (
    FLUSHES,
    Vectors,
    read_vectors,
    softirq_names,
    softirq_rows,
    vector_rows,
)
from msatools.errors import MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.percpu import PerCpu, online_cpus
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Numbers,
    Structs,
    enumerators,
    read_structs,
)

# --- Per-CPU counters and times since boot: mpstat's columns.
#
# Faults as in mm/vmstat.c, interrupts and times as in fs/proc/stat.c, switches and run
# queues as in kernel/sched/core.c. Each per-CPU variable takes one read a CPU.


_QUEUE: Members = {
    "csw": ("nr_switches",),
    "runq": ("nr_running",),
    "waits": ("nr_iowait.counter",),
}

_EVENTS = ("PGFAULT", "PGMAJFAULT")

_TRIES = 8
"""Maximum attempts to read counted and pending times of one moment, if live."""

_TIMES = (
    *("USER", "NICE", "SYSTEM", "IRQ", "SOFTIRQ"),
    *("IDLE", "IOWAIT", "STEAL", "GUEST", "GUEST_NICE"),
)
"""Members of ``enum cpu_usage_stat`` without ``CPUTIME_``; all are in nanoseconds."""

_NAPS: Members = {
    # Members of struct kernel_cpustat as of v7.2; before, of struct tick_sched.
    "idle": ("idle_elapse",),
    "since": ("idle_entrytime",),
    "stolen": ("idle_stealtime[0]",),
    "stolen_iowait": ("idle_stealtime[1]",),
}


class CpuCounters(Struct, frozen=True):
    """Counters and times of each CPU, since boot or in an interval."""

    cpus: Numbers
    """Numbers of all possible CPUs, ascending."""

    online: Booleans
    """Whether each CPU was online at the end."""

    taken_ns: int | None
    """CLOCK_MONOTONIC at the end, as last stored by the kernel: at most a tick old,
    unless all CPUs were idle; ``None`` if unknown."""

    interval_ns: int | None
    """Length of the interval; ``None`` if since boot, or if unknown."""

    counts: Mapping[str, Counts]
    """By name: ``faults``, ``mjf``, ``irqs`` (of devices), ``csw``, and ``runq``, which
    is the length at the end."""

    times: Mapping[str, Counts]
    """Nanoseconds by the names of ``enum cpu_usage_stat`` without ``CPUTIME_``."""

    vectors: Vectors
    softirqs: Mapping[str, Counts]
    """Counts by softirq name, in the order of softirq numbers; 32 bits each."""

    def columns(self) -> dict[str, Counts | None]:
        """Return the counters of all CPUs by field of
        :class:`~msatools.cpus.model.Cpu`; ``None`` if this kernel does not keep one.

        - ``minf``: faults without I/O: all faults minus major ones. Major faults are
          counted before the I/O, all faults at the end, maybe on another CPU: a CPU's
          number may be off by a few.
        - ``xcal``: interrupts for function calls; x86 and arm64 only. One interrupt may
          bring several calls, and a polling idle CPU takes calls without an interrupt.
        - ``tlb``: function calls that flushed the TLB; x86 only. They are included in
          ``xcal``.
        - ``intr``: as in /proc/stat, by CPU: on arm64 all interrupts; on x86 interrupts
          of devices and of the CPU itself, such as its timer.
        - times: ``usr_ns`` and ``nice_ns`` are without guests' time; ``irq_ns`` is with
          softirqs.
        """
        vectors, times, kept = self.vectors, self.times, self.counts
        user, nice = times.get("USER"), times.get("NICE")
        guest, nice_guest = times.get("GUEST"), times.get("GUEST_NICE")
        nice = _less(nice, nice_guest)
        return {
            "minf": _less(kept.get("faults"), kept.get("mjf")),
            "mjf": kept.get("mjf"),
            "xcal": vectors.calls,
            "tlb": vectors.counts.get(FLUSHES),
            "intr": _sum(kept.get("irqs"), vectors.interrupts),
            "soft": total(self.softirqs.values()),
            "csw": kept.get("csw"),
            "runq": kept.get("runq"),
            "usr_ns": _sum(_less(user, guest), nice),
            "nice_ns": nice,
            "sys_ns": times.get("SYSTEM"),
            "irq_ns": _sum(times.get("IRQ"), times.get("SOFTIRQ")),
            "softirq_ns": times.get("SOFTIRQ"),
            "wt_ns": times.get("IOWAIT"),
            "st_ns": times.get("STEAL"),
            "gst_ns": _sum(guest, nice_guest),
            "idl_ns": times.get("IDLE"),
        }

    def rows(self) -> dict[int, dict[str, int | None]]:
        """Return by CPU its counters, as :meth:`columns` names them."""
        columns = self.columns()
        return {
            cpu: {
                name: None if column is None else column.at(row)
                for name, column in columns.items()
            }
            for row, cpu in enumerate(self.cpus.tolist())
        }

    def vector_rows(self) -> tuple[Vector, ...]:
        """Return the CPUs' own interrupts (not of devices), as in /proc/interrupts."""
        return vector_rows(self.vectors, self.cpus.tolist())

    def softirq_rows(self) -> tuple[Vector, ...]:
        """Return the softirqs, in the order of /proc/softirqs."""
        return softirq_rows(self.softirqs, self.cpus.tolist())


def _sum(first: Counts | None, second: Counts | None) -> Counts | None:
    """Sum up the parts that are not ``None``; ``None`` if both are."""
    return total(part for part in (first, second) if part is not None)


def _less(all_: Counts | None, part: Counts | None) -> Counts | None:
    """Return *all_* minus *part*; a *part* of ``None`` counts as 0."""
    return all_ if all_ is None or part is None else all_.less(part)


def read_counters(
    reader: Reader, percpu: PerCpu, clocks: Clocks, losses: LossLog
) -> CpuCounters:
    """Read the counters of each CPU since boot."""
    online = np.isin(percpu.cpus, online_cpus(reader, losses))
    queues = read_structs(
        reader, "struct rq", _QUEUE, percpu.addresses("runqueues"), losses
    )
    irqs, softirqs = _read_interrupts(reader, percpu, losses)
    kept = {
        **_read_faults(reader, percpu, losses),
        "irqs": irqs,
        "csw": believed(queues, "csw", losses),
        "runq": believed(queues, "runq", losses),
    }
    vectors = read_vectors(reader, percpu, losses)
    times, now = _read_times(reader, percpu, online, queues, clocks, losses)
    return CpuCounters(
        cpus=percpu.cpus,
        online=online,
        taken_ns=now,
        interval_ns=None,
        counts={name: column for name, column in kept.items() if column is not None},
        times=times,
        vectors=vectors,
        softirqs=softirqs,
    )


def _read_faults(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> dict[str, Counts | None]:
    """Read page faults; a CPU that goes offline hands its counts over to another."""
    try:
        numbers = enumerators(reader.prog, "enum vm_event_item")
        members = {name: (f"event[{numbers[name]}]",) for name in _EVENTS}
        events = read_structs(
            reader,
            "struct vm_event_state",
            members,
            percpu.addresses("vm_event_states"),
            losses,
        )
    except MissingError:
        # Without CONFIG_VM_EVENT_COUNTERS.
        return {}
    faults, major = (believed(events, name, losses) for name in _EVENTS)
    return {"faults": faults, "mjf": major}


def _read_interrupts(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> tuple[Counts | None, dict[str, Counts]]:
    """Read the counts of devices' interrupts, and of softirqs by name."""
    names = softirq_names(reader, losses)
    members: Members = {
        "irqs": ("irqs_sum",),
        **{name: (f"softirqs[{row}]",) for row, name in enumerate(names)},
    }
    addresses = percpu.addresses("kstat")
    kstat = read_structs(reader, "struct kernel_stat", members, addresses, losses)
    softirqs = {name: believed(kstat, name, losses) for name in names}
    return believed(kstat, "irqs", losses), {
        name: column for name, column in softirqs.items() if column is not None
    }


def _read_times(
    reader: Reader,
    percpu: PerCpu,
    online: Booleans,
    queues: Structs,
    clocks: Clocks,
    losses: LossLog,
) -> tuple[dict[str, Counts], int | None]:
    """Read the times by name, in ns, and CLOCK_MONOTONIC up to which they count."""
    index = enumerators(reader.prog, "enum cpu_usage_stat")
    members: Members = {
        **_NAPS,
        **{name: (f"cpustat[{index['CPUTIME_' + name]}]",) for name in _TIMES},
    }
    stat, vtime = _read_stat(reader, percpu, members, losses)
    columns = {name: believed(stat, name, losses) for name in _TIMES}
    times = {name: column for name, column in columns.items() if column is not None}
    naps_kept = stat.has("since")
    waits = queues["waits"] > 0
    if vtime is not None:
        uncounted = uncounted_times(
            reader.prog, vtime, clocks, waits if naps_kept else None
        )
        for name, more in uncounted.items():
            times[name] += more
    ticks = read_ticks(reader, percpu, losses)
    if naps_kept:
        naps = _naps_of(stat, times["IDLE"], times["IOWAIT"])
    elif ticks and stops_ticks(reader.prog, losses):
        naps = naps_of_ticks(ticks, online, times["IDLE"], times["IOWAIT"])
    else:
        naps = awake(times["IDLE"], times["IOWAIT"])
    # The clock is read last, so that no stamp is later.
    taken = [*naps.since.tolist(), ticks.latest_ns if ticks else 0]
    now = monotonic_ns(reader, taken, losses)
    times["IDLE"], times["IOWAIT"] = idle_times(naps, waits, queues.readable, now)
    return times, now


def _read_stat(
    reader: Reader, percpu: PerCpu, members: Members, losses: LossLog
) -> tuple[Structs, Vtime | None]:
    """Read the counted times, and the pending times of running tasks (vtime).

    Both have to be of one moment: pending time that the kernel counts between the two
    reads would be in neither.
    """
    addresses = percpu.addresses("kernel_cpustat")
    vtime = read_vtime(reader, percpu, losses)
    stat = read_structs(reader, "struct kernel_cpustat", members, addresses, losses)
    if vtime is None or not reader.is_live:
        return stat, vtime
    for _ in range(_TRIES):
        # Losses were recorded by the first read.
        again = read_vtime(reader, percpu, LossLog())
        if again is None or vtime.lasted_until(again):
            break
        # After the last try the two may differ, but a CPU that changes them all the
        # time, as it enters the kernel often, has little pending time.
        vtime = again
        stat = read_structs(
            reader, "struct kernel_cpustat", members, addresses, LossLog()
        )
    return stat, vtime


def _naps_of(stat: Structs, idle: Counts, iowait: Counts) -> IdleState:
    """Return the idle state from ``struct kernel_cpustat``, as of v7.2."""
    asleep = stat.readable & (stat["idle"] != 0)
    return IdleState(
        idle,
        iowait,
        stamps(np.where(asleep, stat["since"], 0)),
        (stamps(stat["stolen"]), stamps(stat["stolen_iowait"])),
    )


# --- Growth of CPUs' counters between two samples.
#
# Counters of 32 bits wrap around. Others never decrease: if one seems to, it changed
# while it was read, and its growth is unknown.


_U32_MAX = (1 << 32) - 1

_SLACK_NS = 50_000_000
"""Maximum error of the growth of times: reading a sample takes some milliseconds, and
the clock lags by up to a tick, which is 10 ms at most."""

_STATE = "runq"
"""The column that is no counter: it has the length at the end, not the growth."""

_FAULTS = ("faults", "mjf")
"""Counters that an offline CPU hands over to another (page_alloc_cpu_dead())."""

_IDLE = ("IDLE", "IOWAIT")

Columns = Mapping[str, Counts]
Grown = Callable[[Counts, Counts], Counts]


def delta(before: CpuCounters, after: CpuCounters, losses: LossLog) -> CpuCounters:
    """Return the growth of all counters between two samples.

    The report has a note if the growth of a counter is unknown.
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

    A task in I/O wait is counted on the CPU that it was last on. When another CPU wakes
    the task, the current idle period of its old CPU changes from I/O wait to idle: so
    one of the two times may decrease, but not their sum.

    The growth is unknown if the CPU went offline or online: offline CPUs have these
    times in ``kernel_cpustat``, and before "tick-sched: Fix idle and iowait sleeptime
    accounting vs CPU hotplug" (in v6.8) they restarted from 0.
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
    """Return the columns in which a CPU's count was known before, its growth is not."""
    return {name for name in grown if (known[name].known & ~grown[name].known).any()}
