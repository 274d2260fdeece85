# SPDX-License-Identifier: LGPL-2.1-or-later

"""Timers that have expired and were not run (kernel/time/hrtimer.c, timer.c)."""

from collections.abc import Callable, Iterator

import drgn
import numpy as np

from msatools.cpus.stalls.model import OverdueTimer
from msatools.cpus.ticksched import TickSched
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.jiffies import Jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import (
    Members,
    WordArray,
    find_offset,
    read_struct,
    read_structs,
)
from msatools.selfdesc.find import drgn_lookups, find_type, find_variable

LATE_NS = 1_000_000_000
"""Minimum delay of a timer that is reported; of the kernel's own, none is so late."""

_NEXT: Members = {"timer": ("next_timer",)}
_HRTIMER: Members = {"function": ("function",)}

_WHEEL: Members = {
    "next": ("next_expiry",),
    "pending": WordArray(("pending_map",)),
}
_TIMER: Members = {
    "next": ("entry.next",),
    "expires": ("expires",),
    "function": ("function",),
}

_MAX_BUCKETS = 64
_MAX_TIMERS = 16
"""Maximum numbers of buckets, and of timers in a bucket, to search for the first."""


def overdue_timers(
    reader: Reader,
    percpu: PerCpu,
    ticks: TickSched,
    jiffies: Jiffies,
    idle: frozenset[int],
    online: frozenset[int],
    name: Callable[[int], str | None],
    losses: LossLog,
) -> tuple[OverdueTimer, ...]:
    """Return the first overdue timer of each kind on each CPU.

    :param idle: CPUs that are idle: like those whose tick is stopped, they may run
        timers late that need not wake them (TIMER_DEFERRABLE).
    :param name: Returns the function at an address.
    """
    found = list(_hrtimers(reader, percpu, ticks, online, name, losses))
    found += _wheel(reader, percpu, ticks, jiffies, idle, online, name, losses)
    return tuple(sorted(found, key=lambda timer: (timer.cpu, timer.kind)))


def _hrtimers(
    reader: Reader,
    percpu: PerCpu,
    ticks: TickSched,
    online: frozenset[int],
    name: Callable[[int], str | None],
    losses: LossLog,
) -> Iterator[OverdueTimer]:
    late = {
        row: (cpu, ticks.latest_ns - due)
        for row, (cpu, due) in enumerate(
            zip(percpu.cpus.tolist(), ticks.due_ns, strict=True)
        )
        if due is not None and cpu in online and ticks.latest_ns - due >= LATE_NS
    }
    if not late:
        return
    rows = np.array(list(late), np.intp)
    bases = percpu.addresses("hrtimer_bases")[rows]
    read = read_structs(reader, "struct hrtimer_cpu_base", _NEXT, bases, losses)
    for number, (cpu, delay) in enumerate(late.values()):
        timer = int(read["timer"][number]) if read.has("timer") else 0
        function = None
        if timer:
            try:
                members = read_struct(reader, "struct hrtimer", _HRTIMER, timer)
                function = name(members["function"])
            except UNREADABLE as error:
                losses.lose(Loss.VARIABLES, f"cannot read a timer: {error}")
        yield OverdueTimer(cpu=cpu, kind="hrtimer", function=function, late_ns=delay)


def _wheel(
    reader: Reader,
    percpu: PerCpu,
    ticks: TickSched,
    jiffies: Jiffies,
    idle: frozenset[int],
    online: frozenset[int],
    name: Callable[[int], str | None],
    losses: LossLog,
) -> Iterator[OverdueTimer]:
    try:
        with drgn_lookups:
            variable = find_variable(reader.prog, "timer_bases")
            type_ = find_type(reader.prog, "struct timer_base")
            count = variable.type_.length
    except MissingError:
        return
    if not count or find_offset(type_, ("next_expiry",)) is None:
        return
    size = drgn.sizeof(type_)
    rows = [row for row, cpu in enumerate(percpu.cpus.tolist()) if cpu in online]
    starts = percpu.addresses("timer_bases")[rows]
    for number in range(count):
        # The last of several has the timers that need not wake a CPU.
        is_deferrable = count > 1 and number == count - 1
        bases: Addresses = starts + np.uint64(number * size)
        read = read_structs(reader, "struct timer_base", _WHEEL, bases, losses)
        pending = (read["pending"] != 0).any(axis=1).tolist()
        for index, row in enumerate(rows):
            cpu = int(percpu.cpus[row])
            if not read.readable[index] or not pending[index]:
                continue
            if is_deferrable and (cpu in idle or ticks.stopped[row]):
                continue
            due = jiffies.past_ns(int(read["next"][index]))
            if due is None or ticks.latest_ns - due < LATE_NS:
                continue
            yield OverdueTimer(
                cpu=cpu,
                kind="timer",
                function=_first(
                    reader, int(bases[index]), read["pending"][index], name
                ),
                late_ns=ticks.latest_ns - due,
            )


def _first(
    reader: Reader, base: int, pending: Addresses, name: Callable[[int], str | None]
) -> str | None:
    """Return the function of the timer that expires first; ``None`` if not found."""
    offset = find_offset(find_type(reader.prog, "struct timer_base"), ("vectors",))
    if offset is None:
        return None
    bits = np.flatnonzero(np.unpackbits(pending.view(np.uint8), bitorder="little"))
    best: tuple[int, int] | None = None
    try:
        for bucket in bits[:_MAX_BUCKETS].tolist():
            timer = int(reader.words(base + offset + 8 * bucket, 1)[0])
            for _ in range(_MAX_TIMERS):
                if not timer:
                    break
                read = read_struct(reader, "struct timer_list", _TIMER, timer)
                found = (read["expires"], read["function"])
                best = found if best is None else min(best, found)
                timer = read["next"]
    except UNREADABLE:
        # What was found so far may not be the first.
        return None
    return None if best is None else name(best[1])
