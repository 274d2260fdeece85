# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each CPU has counted since boot, and in what time: mpstat's columns.

Faults as in mm/vmstat.c, interrupts and times as in fs/proc/stat.c, switches and run
queues as in kernel/sched/core.c. Nothing here goes from CPU to CPU: it takes one read
a CPU for each of the variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from msatools.cpus.counts import Counts, Numbers, believed, total
from msatools.cpus.idle_time import (
    IdleState,
    awake,
    idle_times,
    monotonic_ns,
    naps_of_ticks,
    read_ticks,
    stamps,
    stops_ticks,
)
from msatools.cpus.model import Vector
from msatools.cpus.vectors import (
    CALLS,
    FLUSHES,
    Vectors,
    read_vectors,
    softirq_names,
    softirq_rows,
    vector_rows,
)
from msatools.cpus.vtime import Vtime, read_vtime, uncounted_times
from msatools.kernel.clocks import Clocks
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.enums import enumerators
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Members, Structs, read_structs

_QUEUE: Members = {
    "csw": ("nr_switches",),
    "runq": ("nr_running",),
    "waits": ("nr_iowait.counter",),
}

_EVENTS = ("PGFAULT", "PGMAJFAULT")

_TRIES = 8
"""Looks at the times of CPUs that count them as they enter and leave the kernel."""

_TIMES = (
    *("USER", "NICE", "SYSTEM", "IRQ", "SOFTIRQ"),
    *("IDLE", "IOWAIT", "STEAL", "GUEST", "GUEST_NICE"),
)
"""``CPUTIME_`` names, in nanoseconds."""

_NAPS: Members = {
    # Seen in v7.2: before, ``struct tick_sched`` has it.
    "idle": ("idle_elapse",),
    "since": ("idle_entrytime",),
    "stolen": ("idle_stealtime[0]",),
    "stolen_iowait": ("idle_stealtime[1]",),
}


@dataclass(frozen=True)
class CpuCounters:
    """What each CPU has counted, since boot or in an interval."""

    cpus: Numbers
    """Their numbers, ascending: all that can ever be online."""

    online: Booleans
    """At the end."""

    taken_ns: int | None
    """CLOCK_MONOTONIC at the end, as far as the kernel noted it: a tick too early at
    most, unless all CPUs were idle; ``None`` if it did not."""

    interval_ns: int | None
    """``None`` if since boot, or if the time is not known."""

    counts: Mapping[str, Counts]
    """``faults``, ``mjf``, ``irqs`` (devices'), ``csw`` and ``runq`` (at the end)."""

    times: Mapping[str, Counts]
    """In nanoseconds, by the names that ``enum cpu_usage_stat`` has for them, without
    ``CPUTIME_``."""

    vectors: Vectors
    softirqs: Mapping[str, Counts]
    """By name, in the order of their numbers; of 32 bits each."""

    def columns(self) -> dict[str, Counts | None]:
        """Return the columns of :class:`~msatools.cpus.model.Cpu` that are counters.

        ``None`` is what this kernel does not keep.

        - ``minf``: faults but for those that took I/O. These are counted before the
          I/O, all when done, maybe elsewhere: CPUs may differ by a few.
        - ``xcal``: interrupts for function calls. One may bring several calls, and an
          idle CPU that polls takes them without any. ``tlb``: those of the calls that
          flushed the TLB, so they are never to be added to ``xcal``. x86 alone has
          these two.
        - ``intr``: as in /proc/stat, by CPU: devices' interrupts, on arm64 all, on x86
          with those of the CPU's own.
        - times: guests' are taken off ``usr_ns`` and ``nice_ns``; ``irq_ns`` has the
          softirqs'.
        """
        vectors, times, kept = self.vectors, self.times, self.counts
        user, nice = times.get("USER"), times.get("NICE")
        guest, nice_guest = times.get("GUEST"), times.get("GUEST_NICE")
        nice = _less(nice, nice_guest)
        return {
            "minf": _less(kept.get("faults"), kept.get("mjf")),
            "mjf": kept.get("mjf"),
            "xcal": vectors.counts.get(CALLS),
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
        """Return the columns of :class:`~msatools.cpus.model.Cpu`, by CPU."""
        columns = self.columns()
        return {
            cpu: {
                name: None if column is None else column.at(row)
                for name, column in columns.items()
            }
            for row, cpu in enumerate(self.cpus.tolist())
        }

    def vector_rows(self) -> tuple[Vector, ...]:
        """Return the interrupts of the CPUs' own, in the order of /proc/interrupts."""
        return vector_rows(self.vectors, self.cpus.tolist())

    def softirq_rows(self) -> tuple[Vector, ...]:
        """Return the softirqs, in the order of /proc/softirqs."""
        return softirq_rows(self.softirqs, self.cpus.tolist())


def _sum(first: Counts | None, second: Counts | None) -> Counts | None:
    """Add what there is."""
    return total(part for part in (first, second) if part is not None)


def _less(all_: Counts | None, part: Counts | None) -> Counts | None:
    """Take a part off; if it is not kept there was none."""
    return all_ if all_ is None or part is None else all_.less(part)


def read_counters(
    reader: Reader, percpu: PerCpu, clocks: Clocks, losses: LossLog
) -> CpuCounters:
    """Read what each CPU has counted since boot."""
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
    """Read page faults; a CPU that goes offline hands its own to another."""
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
    except LookupError:
        # Without CONFIG_VM_EVENT_COUNTERS.
        return {}
    faults, major = (believed(events, name, losses) for name in _EVENTS)
    return {"faults": faults, "mjf": major}


def _read_interrupts(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> tuple[Counts | None, dict[str, Counts]]:
    """Read how many interrupts of devices there were, and the softirqs by name."""
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
    """Read the times, and CLOCK_MONOTONIC up to which they are."""
    numbers = enumerators(reader.prog, "enum cpu_usage_stat")
    places = {name: f"cpustat[{numbers['CPUTIME_' + name]}]" for name in _TIMES}
    members: Members = {
        **_NAPS,
        **{name: (place,) for name, place in places.items()},
    }
    stat, vtime = _read_stat(reader, percpu, members, losses)
    found = {name: believed(stat, name, losses) for name in _TIMES}
    times = {name: column for name, column in found.items() if column is not None}
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
    # Last, to be no earlier than any stamp.
    taken = [*naps.since.tolist(), ticks.latest_ns if ticks else 0]
    now = monotonic_ns(reader, taken, losses)
    times["IDLE"], times["IOWAIT"] = idle_times(naps, waits, queues.readable, now)
    return times, now


def _read_stat(
    reader: Reader, percpu: PerCpu, members: Members, losses: LossLog
) -> tuple[Structs, Vtime | None]:
    """Read what the CPUs have counted, and what they have noted and not counted yet.

    Both of one moment: what is counted between two looks would be in neither.
    """
    addresses = percpu.addresses("kernel_cpustat")
    vtime = read_vtime(reader, percpu, losses)
    stat = read_structs(reader, "struct kernel_cpustat", members, addresses, losses)
    if vtime is None or not reader.is_live:
        return stat, vtime
    for _ in range(_TRIES):
        # What cannot be read was told the first time.
        again = read_vtime(reader, percpu, LossLog())
        if again is None or vtime.lasted_until(again):
            break
        # One that enters the kernel all the time has counted all but a moment.
        vtime = again
        stat = read_structs(
            reader, "struct kernel_cpustat", members, addresses, LossLog()
        )
    return stat, vtime


def _naps_of(stat: Structs, idle: Counts, iowait: Counts) -> IdleState:
    """Return the naps of a kernel that keeps them with its times, since v7.2."""
    asleep = stat.readable & (stat["idle"] != 0)
    return IdleState(
        idle,
        iowait,
        stamps(np.where(asleep, stat["since"], 0)),
        (stamps(stat["stolen"]), stamps(stat["stolen_iowait"])),
    )
