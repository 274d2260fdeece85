# SPDX-License-Identifier: LGPL-2.1-or-later

"""Idle time of CPUs, and the time up to which it counts.

An idle CPU has no tick that counts its time (NO_HZ_IDLE). So the kernel stores when the
CPU went idle, and adds the time since then when the idle time is read: fs/proc/stat.c
and kernel/time/tick-sched.c, as of v7.2 kernel/sched/cputime.c.
"""

from collections.abc import Iterable

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.cpus.counts import Counts, Numbers, counts
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, find_offset, lose_many
from msatools.kernel.timekeeper import last_update
from msatools.kernel.words import MAX_PLAUSIBLE
from msatools.selfdesc.find import find_symbol, find_type, member_of

# Bits of ``flags``: TS_FLAG_* macros of kernel/time/tick-sched.h. They were bit-fields
# before "tick: Move individual bit features to debuggable mask accesses" (in v6.9).
_STOPPED = 1
_IDLE_ACTIVE = 2

_TRIES = 4
"""Maximum attempts to read data that changes on a live kernel."""


class IdleState(Struct, frozen=True):
    """Counted idle time of each CPU, and the start of its current idle period."""

    idle: Counts
    """Nanoseconds without I/O wait (of a task that was last on the CPU)."""

    iowait: Counts
    """Nanoseconds with I/O wait."""

    since: Numbers
    """CLOCK_MONOTONIC at the start of the current idle period; 0 if not idle."""

    stolen: tuple[Numbers, Numbers]
    """Time stolen by the hypervisor in the current period, without and with I/O wait;
    it is to be subtracted."""


def idle_times(
    naps: IdleState, waits: Booleans, readable: Booleans, now: int | None
) -> tuple[Counts, Counts]:
    """Return the time that each CPU was idle without and with I/O wait, until now.

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
        """Return a member of 64 bits; ``None`` if the kernel does not have it."""
        offset = find_offset(self.type_, (member,))
        return None if offset is None else column(self.records, offset)

    def times(self, member: str) -> Numbers | None:
        """Return a time in nanoseconds; 0 if impossible."""
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
    """Return which records have a bit set; *bit* counts from their beginning."""
    is_set: Booleans = (records[:, bit // 8] >> bit % 8 & 1) != 0
    return is_set


class Ticks(Struct, frozen=True):
    """``struct tick_sched`` of each CPU: one value a CPU, 0 if unreadable."""

    idle_ns: Numbers | None
    """Idle time; ``None`` if the kernel keeps it elsewhere."""

    iowait_ns: Numbers | None
    since_ns: Numbers
    """CLOCK_MONOTONIC at the start of the idle period, if ``idle``."""

    idle: Booleans
    readable: Booleans
    latest_ns: int
    """The latest stamp of all CPUs, in CLOCK_MONOTONIC; 0 if there is none."""


def stamps(words: npt.NDArray[np.uint64]) -> Numbers:
    """Return times, with impossible ones, as in a damaged dump, set to 0."""
    return np.where(words <= MAX_PLAUSIBLE, words, 0).astype(np.int64)


def read_ticks(reader: Reader, percpu: PerCpu, losses: LossLog) -> Ticks | None:
    """Read the idle times in ``struct tick_sched``; ``None`` without such."""
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

    Otherwise an idle period may look both added and not yet ended.
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

    :param idle: times of ``kernel_cpustat``, which hold for CPUs that are offline, and
        for all CPUs if they tick while idle (``nohz=off``)
    :param iowait: likewise
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
    """Return the idle state if all idle time is counted."""
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
    since which all CPUs have been idle.

    The scheduler's clocks are no better: they differ from this one by the corrections
    of NTP since boot, which may be minutes.
    """
    latest = [int(stamp) for stamp in stamps if 0 < stamp <= MAX_PLAUSIBLE]
    update = last_update(reader, losses)
    if update is not None:
        latest.append(update.monotonic_ns)
    return max(latest, default=None)
