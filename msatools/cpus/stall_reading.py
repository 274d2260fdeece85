# SPDX-License-Identifier: LGPL-2.1-or-later

"""Cheap reads of all CPUs for the search for stalls.

Running tasks, preempt counts, lockup detectors, and expired timers that did not run.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import drgn
import numpy as np
from msgspec import Struct

from msatools.cpus.model import OverdueTimer, RunQueue, StallLimits
from msatools.cpus.runqueues import tick_delay
from msatools.cpus.times import TickSched
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks, Jiffies
from msatools.kernel.percpu import PerCpu, online_cpus
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Members,
    WordArray,
    find_offset,
    read_struct,
    read_structs,
)
from msatools.program.model import Crash
from msatools.selfdesc.find import drgn_lookups, find_type, find_variable
from msatools.tasks.preemption import PreemptCounts
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.text import KernelText

_QUEUES: Members = {"current": ("curr",), "idle": ("idle",)}


class CpuState(Struct, frozen=True):
    """The data of all CPUs that are read before the search for stalls."""

    percpu: PerCpu
    clocks: Clocks
    ticks: TickSched
    queues: tuple[RunQueue, ...]
    crash: Crash | None = None


class RunningTasks(Struct, frozen=True):
    """The tasks that CPUs run."""

    addresses: Addresses
    """Address of each CPU's task, in the order of ``PerCpu.cpus``; 0 if unreadable."""

    table: TaskTable
    """The tasks except idle tasks, in the order of addresses."""

    rows: Mapping[int, int]
    """Row in *table* of each CPU's task, by CPU."""

    def of(self, cpu: int, column_: str) -> int:
        """Return a member of a CPU's task; 0 if it could not be read."""
        row = self.rows.get(cpu)
        return 0 if row is None else int(self.table[column_][row])


class CpuReader:
    """Reads the data that several parts of the search for stalls need, each once."""

    def __init__(self, reader: Reader, cpus: CpuState, losses: LossLog) -> None:
        self.reader = reader
        self.losses = losses
        self.percpu = cpus.percpu
        self.clocks = cpus.clocks
        self.ticks = cpus.ticks
        self.queues = {queue.cpu: queue for queue in cpus.queues}
        self.numbers: list[int] = cpus.percpu.cpus.tolist()
        self.rows = {cpu: row for row, cpu in enumerate(self.numbers)}
        self.online = frozenset(online_cpus(reader, losses))
        self.counts = PreemptCounts(
            reader, cpus.percpu, lambda: self.running.addresses, losses
        )

    def name(self, address: int) -> str | None:
        """Return the function at an address without compiler suffixes, if found."""
        found = self.text.name(address)
        return None if found is None else found.partition(".")[0]

    @cached_property
    def text(self) -> KernelText:
        """Functions by address; made when first needed."""
        return self.reader.once(
            KernelText, lambda: KernelText(self.reader, self.losses)
        )

    def is_idle(self, cpu: int) -> bool:
        """Return whether a CPU runs its idle task."""
        queue = self.queues.get(cpu)
        current = queue.current if queue else None
        return current is not None and current.sched_class == "idle"

    def delay(self, cpu: int) -> int | None:
        """Return by how long a CPU's timer interrupt is late, in ns.

        :return: Below 0 if it is not due yet; ``None`` if unknown, or if it is offline.
        """
        if cpu not in self.online:
            return None
        return tick_delay(self.ticks, self.rows[cpu], self.queues[cpu].lag_ns)

    @cached_property
    def running(self) -> RunningTasks:
        """The tasks that CPUs run."""
        queues = read_structs(
            self.reader,
            "struct rq",
            _QUEUES,
            self.percpu.addresses("runqueues"),
            self.losses,
        )
        addresses = np.where(queues.readable, queues["current"], 0)
        task_reader = self.reader.once(TaskReader, lambda: TaskReader(self.reader))
        # Idle tasks are in no list of tasks, and have no PID.
        unique = sorted({*addresses.tolist()} - {0, *queues["idle"].tolist()})
        table = task_reader.read(unique, self.losses)
        known = {address: row for row, address in enumerate(table["address"].tolist())}
        rows = {
            cpu: known[address]
            for cpu, address in zip(self.numbers, addresses.tolist(), strict=True)
            if address in known
        }
        return RunningTasks(addresses, table, rows)


# --- The kernel's lockup detectors: their limits, and when they last ran on each CPU.
#
# kernel/watchdog.c: a timer of each CPU wakes the stopper thread, which outranks all
# other tasks, to stamp the time (watchdog_touch_ts). A CPU whose stamp is older than
# twice watchdog_thresh has a soft lockup; one that took no such timer's interrupt for
# watchdog_thresh has a hard lockup.


_SECOND = 1_000_000_000

_THRESH_S = 10
"""``watchdog_thresh`` if it cannot be read: the kernel's default, in seconds."""

_RCU_S = 21
"""``rcu_cpu_stall_timeout`` if it cannot be read: the kernel's default, in seconds."""

_CALL_NS = 5 * _SECOND
"""The default of ``csd_lock_timeout``, which only kernels with the rare
CONFIG_CSD_LOCK_WAIT_DEBUG have."""

_HARD, _SOFT = 1, 2
"""Bits of ``watchdog_enabled`` (include/linux/nmi.h)."""

_STAMP_SHIFT = 30
"""Stamps are in units of 2^30 ns: get_timestamp()."""

_MAX_S = 3600
"""Maximum limit that is believed, in seconds."""


class Watchdogs(Struct, frozen=True):
    """The limits of the lockup detectors, and when they last ran."""

    limits: StallLimits
    ages_ns: tuple[int | None, ...]
    """Age of each CPU's stamp, in the order of ``PerCpu.cpus``; ``None`` without one.
    """


def read_watchdogs(
    reader: Reader, percpu: PerCpu, clocks: Clocks, losses: LossLog
) -> Watchdogs:
    """Read the limits, and the stamps of the detector of soft lockups if it is on."""
    enabled = _number(reader.prog, "watchdog_enabled", losses)
    thresh = _number(reader.prog, "watchdog_thresh", losses)
    rcu = _number(reader.prog, "rcu_cpu_stall_timeout", losses)
    # watchdog_thresh = 0 turns the detectors off; a damaged value is no limit.
    seconds = thresh if thresh and 0 < thresh <= _MAX_S else _THRESH_S
    rcu_s = rcu if rcu and 0 < rcu <= _MAX_S else _RCU_S
    is_soft = None if enabled is None else bool(enabled & _SOFT and thresh)
    is_hard = None if enabled is None else bool(enabled & _HARD and thresh)
    limits = StallLimits(
        no_tick_ns=seconds * _SECOND,
        no_switch_ns=2 * seconds * _SECOND,
        rcu_ns=rcu_s * _SECOND,
        call_ns=_CALL_NS,
        soft_watchdog=is_soft,
        hard_watchdog=is_hard,
    )
    none = (None,) * len(percpu.cpus)
    ages = _ages(reader, percpu, clocks) if is_soft else none
    return Watchdogs(limits, ages)


def _ages(reader: Reader, percpu: PerCpu, clocks: Clocks) -> tuple[int | None, ...]:
    try:
        addresses = percpu.addresses("watchdog_touch_ts")
    except MissingError:
        # Without CONFIG_SOFTLOCKUP_DETECTOR.
        return (None,) * len(percpu.cpus)
    records, _ = reader.read_records(addresses, 8)
    stamps = column(records, 0).tolist()
    # Stamps are of the local clock. 0: never stamped, or unreadable; all bits set: the
    # detector is to start anew (up to v5.12).
    ages = (clocks.local_ns - (stamp << _STAMP_SHIFT) for stamp in stamps)
    return tuple(
        max(age, 0) if stamp and age > -(1 << _STAMP_SHIFT) else None
        for stamp, age in zip(stamps, ages, strict=True)
    )


def _number(prog: drgn.Program, name: str, losses: LossLog) -> int | None:
    """Read a variable; ``None`` if the kernel lacks it, or it cannot be read."""
    try:
        return int(find_variable(prog, name).value_())
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.lose(Loss.VARIABLES, f"{name} cannot be read: {error}", about=name)
        return None


# --- Timers that have expired and were not run (kernel/time/hrtimer.c, timer.c).


OVERDUE_NS = 1_000_000_000
"""Minimum delay of a timer that is reported; timers of a healthy kernel are never so
late."""

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
"""Maximum numbers of the wheel's buckets, and of timers in a bucket, that are searched
for the timer that expires first."""


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

    :param idle: CPUs that are idle. They may run deferrable timers (TIMER_DEFERRABLE)
        late, as may CPUs whose tick is stopped.
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
        if due is not None and cpu in online and ticks.latest_ns - due >= OVERDUE_NS
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
        # The last of several bases has the deferrable timers.
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
            if due is None or ticks.latest_ns - due < OVERDUE_NS:
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
    """Return the function of a base's timer that expires first, if it is found."""
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
        # The first timer may be among those that were not read.
        return None
    return None if best is None else name(best[1])
