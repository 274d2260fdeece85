# SPDX-License-Identifier: LGPL-2.1-or-later

"""Times of CPUs: idle, pending and counted, and when their last tick was."""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks, Jiffies, last_update, read_jiffies
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import MAX_PLAUSIBLE, Addresses, Reader, column
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Numbers,
    Structs,
    enumerators,
    find_offset,
    lose_many,
    read_structs,
)
from msatools.selfdesc.find import (
    find_symbol,
    find_type,
    find_variable,
    member_of,
    offset_of,
)
from msatools.tasks.states import NICE_0

# --- Per-CPU numbers, some of which may be unknown.


class Counts(Struct, frozen=True):
    """One number for each CPU, in the order of ``PerCpu.cpus``."""

    values: Numbers
    """The numbers; 0 if unknown."""

    known: Booleans

    def __add__(self, other: "Counts") -> "Counts":
        """Return the sum for each CPU; known if both numbers are."""
        return counts(self.values + other.values, self.known & other.known)

    def less(self, other: "Counts") -> "Counts":
        """Return these numbers minus *other*, which is a part of them; 0 if it is more.

        A part is not read or counted at the same moment, so it may be a few more.
        """
        rest = np.maximum(self.values - other.values, 0)
        return counts(rest, self.known & other.known)

    def at(self, row: int) -> int | None:
        """Return the number of one CPU; ``None`` if unknown."""
        return int(self.values[row]) if self.known[row] else None


def counts(values: npt.NDArray[Any], known: Booleans) -> Counts:
    """Return :class:`Counts` with unknown values set to 0."""
    return Counts(np.where(known, values, 0).astype(np.int64), known)


def total(parts: Iterable[Counts]) -> Counts | None:
    """Sum up the parts by CPU, known if all parts are; ``None`` if there are none."""
    all_parts = list(parts)
    return reduce(Counts.__add__, all_parts) if all_parts else None


def believed(table: Structs, column: str, losses: LossLog) -> Counts | None:
    """Return a column of a table; ``None`` if the kernel does not keep it.

    Impossible numbers, as in a damaged dump, become unknown and are counted as lost.
    """
    if not table.has(column):
        return None
    numbers = table[column]
    # As unsigned numbers, negative ones are too large as well.
    possible = numbers.astype(np.uint64) <= MAX_PLAUSIBLE
    wrong = int(np.count_nonzero(~possible))
    text = "some times or counts of CPUs are impossible"
    losses.lose(Loss.COUNTS, text, count=wrong)
    return counts(numbers, table.readable & possible)


# --- Idle time of CPUs, and the time up to which it counts.
#
# An idle CPU has no tick that counts its time (NO_HZ_IDLE). So the kernel stores when
# the CPU went idle, and adds the time since then when the idle time is read:
# fs/proc/stat.c and kernel/time/tick-sched.c, as of v7.2 kernel/sched/cputime.c.


# Bits of ``flags``: TS_FLAG_* macros of kernel/time/tick-sched.h. They were bit-fields
# before "tick: Move individual bit features to debuggable mask accesses" (in v6.9).
_STOPPED = 1
_IDLE_ACTIVE = 2

_TRIES = 4
"""Maximum attempts to read data that changes on a live kernel."""


class IdleState(Struct, frozen=True):
    """Each CPU's idle time that the kernel has counted, and its current idle period."""

    idle: Counts
    """Nanoseconds idle while no task that was last on the CPU waited for I/O."""

    iowait: Counts
    """Nanoseconds idle while a task that was last on the CPU waited for I/O."""

    since: Numbers
    """CLOCK_MONOTONIC at the start of the current idle period; 0 if not idle."""

    stolen: tuple[Numbers, Numbers]
    """Nanoseconds of the current period that the hypervisor stole, without and with I/O
    wait; they are to be subtracted."""


def idle_times(
    naps: IdleState, waits: Booleans, readable: Booleans, now: int | None
) -> tuple[Counts, Counts]:
    """Return the ns that each CPU was idle until now, without and with I/O wait.

    :param waits: whether a task that was last on the CPU waits for I/O
    :param readable: whether *waits* could be read
    :param now: CLOCK_MONOTONIC; if ``None``, times of idle CPUs are unknown
    """
    asleep = naps.since != 0
    since = np.maximum((now or 0) - naps.since, 0)
    added = [
        np.where(asleep & which, since - np.minimum(stolen, since), 0)
        for which, stolen in zip((~waits, waits), naps.stolen, strict=True)
    ]
    known = ~asleep | (readable if now is not None else False)
    return (
        counts(naps.idle.values + added[0], naps.idle.known & known),
        counts(naps.iowait.values + added[1], naps.iowait.known & known),
    )


class TickRecords(Struct, frozen=True):
    """The raw ``struct tick_sched`` of each CPU; zeros if unreadable."""

    type_: drgn.Type
    records: npt.NDArray[np.uint8]
    readable: Booleans

    def words(self, member: str) -> Addresses | None:
        """Return each CPU's member of 64 bits; ``None`` if the kernel has none."""
        offset = find_offset(self.type_, (member,))
        return None if offset is None else column(self.records, offset)

    def times(self, member: str) -> Numbers | None:
        """Return a member in nanoseconds; 0 where the value is impossible.

        :return: One value a CPU; ``None`` if the kernel does not have the member.
        """
        words = self.words(member)
        return None if words is None else stamps(words)

    @property
    def stopped(self) -> Booleans:
        """Whether each CPU's tick is stopped."""
        return self._is_set(_STOPPED, "tick_stopped")

    @property
    def idle(self) -> Booleans:
        """Whether each CPU is idle, and not in an interrupt."""
        return self._is_set(_IDLE_ACTIVE, "idle_active")

    def _is_set(self, bit: int, member: str) -> Booleans:
        flags = find_offset(self.type_, ("flags",))
        if flags is not None:
            return bits_at(self.records, 8 * flags + bit)
        return bits_at(self.records, member_of(self.type_, member).bit_offset)


def bits_at(records: npt.NDArray[np.uint8], bit: int) -> Booleans:
    """Return which records have a bit set; *bit* counts from a record's first byte."""
    is_set: Booleans = (records[:, bit // 8] >> bit % 8 & 1) != 0
    return is_set


class Ticks(Struct, frozen=True):
    """``struct tick_sched`` of each CPU: one value for each, 0 if unreadable."""

    idle_ns: Numbers | None
    """Idle time without I/O wait; ``None`` if the kernel keeps it elsewhere."""

    iowait_ns: Numbers | None
    since_ns: Numbers
    """CLOCK_MONOTONIC at the start of the idle period, if ``idle``."""

    idle: Booleans
    readable: Booleans
    latest_ns: int
    """The latest time stamp of any CPU, in CLOCK_MONOTONIC; 0 if there is none."""


def stamps(words: npt.NDArray[np.uint64]) -> Numbers:
    """Return times in ns; impossible times, as in a damaged dump, become 0."""
    return np.where(words <= MAX_PLAUSIBLE, words, 0).astype(np.int64)


def read_ticks(reader: Reader, percpu: PerCpu, losses: LossLog) -> Ticks | None:
    """Read ``struct tick_sched`` of each CPU; ``None`` if the kernel has none."""
    try:
        ticks = read_tick_records(reader, percpu, losses)
    except MissingError:
        return None
    marks = [ticks.times(f"idle_{name}time") for name in ("entry", "wake", "exit")]
    latest = max((int(s.max(initial=0)) for s in marks if s is not None), default=0)
    since = marks[0]
    return Ticks(
        idle_ns=ticks.times("idle_sleeptime"),
        iowait_ns=ticks.times("iowait_sleeptime"),
        since_ns=np.zeros(len(percpu.cpus), np.int64) if since is None else since,
        idle=ticks.idle,
        readable=ticks.readable,
        latest_ns=latest,
    )


def read_tick_records(reader: Reader, percpu: PerCpu, losses: LossLog) -> TickRecords:
    """Read ``struct tick_sched`` of each CPU.

    :raises MissingError: if the kernel has none
    """
    addresses = percpu.addresses("tick_cpu_sched")
    type_ = find_type(reader.prog, "struct tick_sched")
    live = reader.is_live
    records, readable = _read_steady(reader, addresses, drgn.sizeof(type_), live)
    lose_many(losses, "struct tick_sched", int(np.count_nonzero(~readable)))
    return TickRecords(type_, records, readable)


def _read_steady(
    reader: Reader, addresses: Addresses, size: int, live: bool
) -> tuple[npt.NDArray[np.uint8], Booleans]:
    """Read records; on a live kernel, repeat until two reads agree.

    A single read may have an idle period both added to the idle time and still going.
    """
    records, readable = reader.read_records(addresses, size)
    changing = np.arange(len(addresses) if live else 0)
    for _ in range(_TRIES):
        again, readable[changing] = reader.read_records(addresses[changing], size)
        changed = (again != records[changing]).any(axis=1)
        records[changing] = again
        changing = changing[changed]
    return records, readable


def naps_of_ticks(
    ticks: Ticks, online: Booleans, idle: Counts, iowait: Counts
) -> IdleState:
    """Return the idle state from ``struct tick_sched``, before v7.2.

    :param idle: idle time in ``kernel_cpustat``, which counts for offline CPUs, and for
        all CPUs if ``struct tick_sched`` keeps none
    :param iowait: the same for idle time in I/O wait
    """
    if ticks.idle_ns is None or ticks.iowait_ns is None:
        return awake(idle, iowait)
    known = ticks.readable
    none = np.zeros(len(online), np.int64)
    return IdleState(
        _either(online, counts(ticks.idle_ns, known), idle),
        _either(online, counts(ticks.iowait_ns, known), iowait),
        np.where(ticks.idle & online & known, ticks.since_ns, 0),
        (none, none),
    )


def awake(idle: Counts, iowait: Counts) -> IdleState:
    """Return the idle state of CPUs whose counted idle time is complete."""
    none = np.zeros(len(idle.values), np.int64)
    return IdleState(idle, iowait, none, (none, none))


def _either(which: Booleans, first: Counts, second: Counts) -> Counts:
    return Counts(
        np.where(which, first.values, second.values),
        np.where(which, first.known, second.known),
    )


def stops_ticks(prog: drgn.Program, losses: LossLog) -> bool:
    """Return whether CPUs have no tick while idle (``tick_nohz_active``)."""
    try:
        # An int, later a long; BTF does not have the variable.
        address = find_symbol(prog, "tick_nohz_active").address
        return any(prog.read(address, 4))
    except MissingError:
        return False
    except UNREADABLE as error:
        losses.lose(
            Loss.TICKS, f"cannot determine whether idle CPUs have ticks: {error}"
        )
        return True


def monotonic_ns(reader: Reader, stamps: Iterable[int], losses: LossLog) -> int | None:
    """Return CLOCK_MONOTONIC; ``None`` if unknown.

    It is the latest of *stamps* and of the timekeeper's last update, which some CPU
    does at each tick unless all are idle. So it lags by at most a tick, or by the time
    for which all CPUs have been idle.

    The scheduler's clocks would not be better: NTP does not correct them, so they may
    be minutes apart from CLOCK_MONOTONIC.
    """
    latest = [int(stamp) for stamp in stamps if 0 < stamp <= MAX_PLAUSIBLE]
    update = last_update(reader, losses)
    if update is not None:
        latest.append(update.monotonic_ns)
    return max(latest, default=None)


# --- The last tick of each CPU, and its next timer interrupt.
#
# kernel/time/tick-sched.c, kernel/time/hrtimer.c


_FAR_NS = 1_000_000_000
"""Limit for a stamp that is later than all others, which is then damaged: much more
than jiffies, or the last tick of a busy CPU, may lag."""


class TickSched(Struct, frozen=True):
    """Ticks and due timers of CPUs; tuples have one value for each CPU, in the order of
    ``PerCpu.cpus``."""

    stopped: tuple[bool | None, ...]
    """Whether its tick is stopped; ``None`` if unreadable."""

    ticked_ns: tuple[int | None, ...]
    """CLOCK_MONOTONIC at which its last tick was due; ``None`` if unknown."""

    due_ns: tuple[int | None, ...]
    """CLOCK_MONOTONIC at which its next timer interrupt is due, also if its tick is
    stopped; ``None`` if none is due, or if unknown."""

    latest_ns: int
    """The latest CLOCK_MONOTONIC that a tick, the start of an idle period or the update
    of jiffies has stored; 0 if none."""


def read_tick_sched(reader: Reader, percpu: PerCpu, losses: LossLog) -> TickSched:
    """Read the last tick and the next timer interrupt of each CPU.

    The timer of a running tick expires one tick after the last one was due; when the
    tick stops, ``last_tick`` keeps that expiry. A later tick caused by another timer is
    known by its jiffies (``last_tick_jiffies``). Offline CPUs have no tick. Ticks of
    the clock event device itself (without high resolution timers and NO_HZ) are not
    recorded.
    """
    try:
        jiffies = read_jiffies(reader.prog)
        found = read_tick_records(reader, percpu, losses)
    except LOST as error:
        losses.lose(Loss.TICKS, f"cannot determine when CPUs ticked: {error}")
        unknown = (None,) * len(percpu.cpus)
        return TickSched(unknown, unknown, unknown, 0)
    due = np.where(
        found.stopped,
        _words(found, "last_tick"),
        _words(found, "sched_timer.node.expires"),
    )
    ticked = [
        max(_before(moment, jiffies), jiffies.past_ns(count) or 0)
        for moment, count in zip(
            due.tolist(),
            # "tick: Detect and fix jiffies update stall" (in v5.18, and stable kernels)
            _words(found, "last_tick_jiffies").tolist(),
            strict=True,
        )
    ]
    idle = _words(found, "idle_entrytime").tolist()
    return TickSched(
        tuple(
            bool(is_stopped) if known else None
            for is_stopped, known in zip(found.stopped, found.readable, strict=True)
        ),
        tuple(moment or None for moment in ticked),
        _read_due(reader, percpu, losses),
        _latest(jiffies.updated_ns, ticked, idle),
    )


def _latest(updated: int, ticked: list[int], idle: list[int]) -> int:
    """Return the latest stamp, unless it is damaged.

    A CPU that stores a stamp also updates jiffies within some ticks (before "tick:
    Detect and fix jiffies update stall", one CPU did, or those that woke up). So a
    stamp much later than all others is damaged, and would make all CPUs look late.
    """
    idle = [moment if moment < MAX_PLAUSIBLE else 0 for moment in idle]
    noted = sorted([updated, *map(max, ticked, idle)])
    others = max(noted[:-1], default=0)
    return others if others and noted[-1] - others > _FAR_NS else noted[-1]


def _read_due(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> tuple[int | None, ...]:
    """Return when each CPU's next timer interrupt is due; ``None`` if unknown, or if
    none is, as without high resolution timers."""
    name = "struct hrtimer_cpu_base"
    type_ = find_type(reader.prog, name)
    addresses = percpu.addresses("hrtimer_bases")
    records, readable = reader.read_records(addresses, drgn.sizeof(type_))
    lose_many(losses, name, int(np.count_nonzero(~readable)))
    known = bits_at(records, member_of(type_, "hres_active").bit_offset)
    due = column(records, offset_of(type_, "expires_next"))
    return tuple(
        moment if is_known and 0 < moment < MAX_PLAUSIBLE else None
        for is_known, moment in zip(known.tolist(), due.tolist(), strict=True)
    )


def _words(found: TickRecords, member: str) -> Addresses:
    """Return a member of 64 bits for each CPU; zeros if the kernel does not have it."""
    words = found.words(member)
    return np.zeros(len(found.records), np.uint64) if words is None else words


def _before(due: int, jiffies: Jiffies) -> int:
    """Return the time of the tick before the one at *due*; 0 if impossible."""
    return due - jiffies.tick_ns if jiffies.tick_ns <= due < MAX_PLAUSIBLE else 0


# --- Pending CPU time that is not counted yet (kernel/sched/cputime.c).
#
# A nohz_full CPU has no tick while one task runs. It counts time when the task enters
# or leaves the kernel (CONFIG_VIRT_CPU_ACCOUNTING_GEN). The time since then is added
# when the counters are read.


_ANY_CPU = (1 << 32) - 1
"""``vtime.cpu`` of a task that has not run yet."""

_TASK: Members = {
    "sequence": ("vtime.seqcount.sequence",),
    "state": ("vtime.state",),
    "cpu": ("vtime.cpu",),
    "start_ns": ("vtime.starttime",),
    "user_ns": ("vtime.utime",),
    "system_ns": ("vtime.stime",),
    "guest_ns": ("vtime.gtime",),
    "static_prio": ("static_prio",),
}


_QUEUE: Members = {"current": ("curr",)}


class Vtime(Struct, frozen=True):
    """``struct vtime`` of the running task of each CPU."""

    exact: Booleans
    """Whether each CPU counts time at entries to and exits from the kernel."""

    known: Booleans
    """Whether *exact* and, if it is set, the task could be read."""

    here: Booleans
    """Whether ``vtime.cpu`` of the task is this CPU; if not, a switch is under way."""

    tasks: Structs

    def lasted_until(self, later: "Vtime") -> bool:
        """Return whether no CPU's pending time was counted until *later* was read."""
        sequence = self.tasks["sequence"]
        # Odd while the task is being updated.
        still = (sequence & 1 == 0) & (later.tasks["sequence"] == sequence)
        still &= self.here & (later.tasks["start_ns"] == self.tasks["start_ns"])
        return bool((still | ~self.exact).all())


def read_vtime(reader: Reader, percpu: PerCpu, losses: LossLog) -> Vtime | None:
    """Read the vtime of the running tasks; ``None`` if no CPU keeps pending time."""
    tracking = _read_tracking(reader, percpu, losses)
    if tracking is None:
        return None
    exact = tracking["active"] != 0
    if not exact.any() and tracking.readable.all():
        return None
    queues = read_structs(
        reader, "struct rq", _QUEUE, percpu.addresses("runqueues"), losses
    )
    current = np.where(exact, queues["current"], 0)
    tasks = read_structs(reader, "struct task_struct", _TASK, current, losses)
    here = (tasks["cpu"] == percpu.cpus) | (tasks["cpu"] == _ANY_CPU)
    known = tracking.readable & (~exact | tasks.readable)
    return Vtime(exact, known, here, tasks)


def uncounted_times(
    prog: drgn.Program, vtime: Vtime, clocks: Clocks, waits: Booleans | None
) -> Mapping[str, Counts]:
    """Return the pending nanoseconds of each CPU, by ``CPUTIME_`` name without prefix.

    Like the kernel, use the task's current nice value.

    :param waits: whether a task that was last on each CPU waits for I/O; ``None`` if
        idle time is never pending (before v7.2)
    """
    states = enumerators(prog, "enum vtime_state")
    tasks = vtime.tasks
    asked = vtime.exact & tasks.readable & vtime.here
    now = clocks.local_ns - _clock_offset(prog)
    start = np.minimum(tasks["start_ns"], MAX_PLAUSIBLE).astype(np.int64)
    since = np.maximum(now - start, 0)
    nice = tasks["static_prio"] > NICE_0

    def part(state: str, column: str | None, which: Booleans | None = None) -> Numbers:
        chosen = asked & (tasks["state"] == states[f"VTIME_{state}"])
        if which is not None:
            chosen = chosen & which
        if column is None:
            return np.where(chosen, since, 0)
        pending = np.minimum(tasks[column], MAX_PLAUSIBLE).astype(np.int64)
        return np.where(chosen, since + pending, 0)

    guest, nice_guest = (part("GUEST", "guest_ns", which) for which in (~nice, nice))
    # Guests' time is included in user time.
    times: dict[str, Numbers] = {
        "SYSTEM": part("SYS", "system_ns"),
        "USER": part("USER", "user_ns", ~nice) + guest,
        "NICE": part("USER", "user_ns", nice) + nice_guest,
        "GUEST": guest,
        "GUEST_NICE": nice_guest,
    }
    if waits is not None:
        times["IDLE"] = part("IDLE", None, ~waits)
        times["IOWAIT"] = part("IDLE", None, waits)
    return {name: counts(numbers, vtime.known) for name, numbers in times.items()}


def _read_tracking(reader: Reader, percpu: PerCpu, losses: LossLog) -> Structs | None:
    """Read which CPUs count time at kernel entries and exits; ``None`` if none can."""
    # Check the member first: the first lookup of a missing symbol takes long.
    if not find_type(reader.prog, "struct task_struct").has_member("vtime"):
        return None
    try:
        tracking = read_structs(
            reader,
            "struct context_tracking",
            {"active": ("active",)},
            percpu.addresses("context_tracking"),
            losses,
        )
    except MissingError:
        return None
    return tracking if tracking.has("active") else None


def _clock_offset(prog: drgn.Program) -> int:
    """Return ``local_clock() - sched_clock()`` in ns.

    0 on architectures whose clock is always stable.
    """
    try:
        offset = find_variable(prog, "__sched_clock_offset").value_()
    except LOST:
        return 0
    return int(np.uint64(offset).astype(np.int64))
