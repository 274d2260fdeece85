# SPDX-License-Identifier: LGPL-2.1-or-later

"""For how long CPUs have been idle, and what time it is for that.

A CPU that is idle has no tick that could count its time (NO_HZ_IDLE), so the kernel
notes when it went idle, and adds what came since whenever somebody asks: fs/proc/stat.c
and kernel/time/tick-sched.c, since v7.2 kernel/sched/cputime.c. So do we.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.cpus.counts import Counts, Numbers, counts
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, find_offset, lose_many
from msatools.selfdesc.variables import find_variable

# Bits of ``flags``: TS_FLAG_* of kernel/time/tick-sched.h, macros. Each was a bit-field
# before "tick: Move individual bit features to debuggable mask accesses" (in v6.9).
_STOPPED = 1
_IDLE_ACTIVE = 2

_MOST_NS = 1 << 60
"""36 years, more than any machine is up: a stamp that says so is damaged."""

_TRIES = 4
"""To read what a live kernel changes meanwhile."""


@dataclass(frozen=True)
class IdleState:
    """How long each CPU has been idle, but for what is not added yet."""

    idle: Counts
    """In nanoseconds, while no task that was last there waited for I/O."""

    iowait: Counts
    """While one did."""

    since: Numbers
    """When it went idle, in CLOCK_MONOTONIC; 0 if it is not idle now."""

    stolen: tuple[Numbers, Numbers]
    """What the hypervisor has stolen of idle time, and of that with I/O, that is to
    be taken off what is to be added."""


def idle_times(
    naps: IdleState, waits: Booleans, readable: Booleans, now: int | None
) -> tuple[Counts, Counts]:
    """Return the time that each CPU was idle, and that with I/O under way, until now.

    :param waits: whether tasks that were last there wait for I/O
    :param readable: whether that could be told
    :param now: CLOCK_MONOTONIC; if it is not known, nor are those of CPUs that are idle
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


@dataclass(frozen=True)
class TickRecords:
    """``struct tick_sched`` of each CPU, as it lies in memory; 0 where not readable."""

    type_: drgn.Type
    records: npt.NDArray[np.uint8]
    readable: Booleans

    def words(self, member: str) -> Addresses | None:
        """Return a member of 64 bits; ``None`` if the kernel has none such."""
        offset = find_offset(self.type_, (member,))
        return None if offset is None else column(self.records, offset)

    def times(self, member: str) -> Numbers | None:
        """Return a time in nanoseconds; 0 where it cannot be."""
        words = self.words(member)
        return None if words is None else stamps(words)

    @property
    def stopped(self) -> Booleans:
        """Which have their tick stopped."""
        return self._is_set(_STOPPED, "tick_stopped")

    @property
    def idle(self) -> Booleans:
        """Which are idle, and in no interrupt meanwhile."""
        return self._is_set(_IDLE_ACTIVE, "idle_active")

    def _is_set(self, bit: int, member: str) -> Booleans:
        flags = find_offset(self.type_, ("flags",))
        if flags is not None:
            return bits_at(self.records, 8 * flags + bit)
        return bits_at(self.records, self.type_.member(member).bit_offset)


def bits_at(records: npt.NDArray[np.uint8], bit: int) -> Booleans:
    """Return which records have a bit, by its number from their beginning."""
    is_set: Booleans = (records[:, bit // 8] >> bit % 8 & 1) != 0
    return is_set


@dataclass(frozen=True)
class Ticks:
    """``struct tick_sched`` of each CPU: one value a CPU, 0 where not readable."""

    idle_ns: Numbers | None
    """Time idle; ``None`` if the kernel keeps it elsewhere."""

    iowait_ns: Numbers | None
    since_ns: Numbers
    """CLOCK_MONOTONIC at which it went idle, if ``idle`` says that it is."""

    idle: Booleans
    readable: Booleans
    latest_ns: int
    """The latest stamp of all, in CLOCK_MONOTONIC; 0 if there is none."""


def stamps(words: npt.NDArray[np.uint64]) -> Numbers:
    """Return times as they are; those that cannot be, of a damaged dump, are 0."""
    return np.where(words <= _MOST_NS, words, 0).astype(np.int64)


def read_ticks(reader: Reader, percpu: PerCpu, losses: LossLog) -> Ticks | None:
    """Read what the tick of each CPU has noted; ``None`` if the kernel has no such."""
    try:
        found = read_tick_records(reader, percpu, losses)
    except LookupError:
        return None
    marks = [found.times(f"idle_{name}time") for name in ("entry", "wake", "exit")]
    latest = max((int(s.max(initial=0)) for s in marks if s is not None), default=0)
    since = marks[0]
    return Ticks(
        idle_ns=found.times("idle_sleeptime"),
        iowait_ns=found.times("iowait_sleeptime"),
        since_ns=np.zeros(len(percpu.cpus), np.int64) if since is None else since,
        idle=found.idle,
        readable=found.readable,
        latest_ns=latest,
    )


def read_tick_records(reader: Reader, percpu: PerCpu, losses: LossLog) -> TickRecords:
    """Read ``struct tick_sched`` of each CPU.

    :raises LookupError: if the kernel has none
    """
    addresses = percpu.addresses("tick_cpu_sched")
    type_ = reader.prog.type("struct tick_sched")
    live = reader.is_live
    records, readable = _read_steady(reader, addresses, drgn.sizeof(type_), live)
    lose_many(losses, "struct tick_sched", int(np.count_nonzero(~readable)))
    return TickRecords(type_, records, readable)


def _read_steady(
    reader: Reader, addresses: Addresses, size: int, live: bool
) -> tuple[npt.NDArray[np.uint8], Booleans]:
    """Read records until each is twice the same; on a live kernel, some times at most.

    Else a nap may be seen to be added, and not to be over.
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
    """Return the naps of a kernel that keeps them with its ticks, before v7.2.

    :param idle: what ``kernel_cpustat`` says, which counts for CPUs that are offline,
        and for all if CPUs keep their ticks while idle (``nohz=off``)
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
    """Return the naps where all are counted."""
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
        # An int, later a long, and BTF tells of neither.
        address = prog.symbol("tick_nohz_active").address
        return any(prog.read(address, 4))
    except LookupError:
        return False
    except drgn.FaultError as error:
        losses.lose(Loss.TICKS, f"whether idle CPUs have ticks is lost: {error}")
        return True


def monotonic_ns(reader: Reader, stamps: Iterable[int], losses: LossLog) -> int | None:
    """Return CLOCK_MONOTONIC; ``None`` if nothing does.

    That is the latest of when the kernel last brought it up to date, which some CPU
    does at each tick unless all are idle, and of *stamps* that were taken. So it is
    behind by no more than a tick, or by the time since when all CPUs have been idle.

    The clocks of the scheduler would not tell better: they differ from this one by
    what NTP has corrected since boot, which may be minutes.
    """
    latest = [int(stamp) for stamp in stamps if 0 < stamp <= _MOST_NS]
    kept = _timekeeper_ns(reader, losses)
    if kept is not None:
        latest.append(kept)
    return max(latest, default=None)


def _timekeeper_ns(reader: Reader, losses: LossLog) -> int | None:
    """Return when the kernel brought CLOCK_MONOTONIC up to date (kernel/time)."""
    try:
        core = _timekeeper(reader.prog)
        mono = "timekeeper.tkr_mono"
        base, fraction, shift, sequence = (
            drgn.offsetof(core.type_, member)
            for member in (
                f"{mono}.base",
                f"{mono}.xtime_nsec",
                f"{mono}.shift",
                "seq.seqcount.sequence",
            )
        )
        size = drgn.sizeof(core.type_)
        for _ in range(_TRIES):
            data = reader.read(core.address_, size)
            before = _word(data, sequence, 4)
            steady = not before & 1
            if steady and reader.is_live:
                after = reader.read(core.address_ + sequence, 4)
                steady = before == _word(after, 0, 4)
            if steady:
                since = _word(data, fraction, 8) >> (_word(data, shift, 4) & 63)
                now = _word(data, base, 8) + since
                return now if now <= _MOST_NS else None
    except LookupError:
        return None
    except drgn.FaultError as error:
        losses.lose(Loss.CLOCKS, f"the time cannot be read: {error}")
        return None
    losses.note("clocks-changing", "the kernel was just setting its clocks")
    return None


def _timekeeper(prog: drgn.Program) -> drgn.Object:
    try:
        kept = prog.type("struct tk_data")
    except LookupError:
        # Before v6.13, when it had no name.
        return find_variable(prog, "tk_core")
    try:
        # An array since there are auxiliary clocks (v6.17); the first is the system's.
        # The symbol does: how many there are would take long to find out.
        symbol = prog.symbol("timekeeper_data")
    except LookupError:
        symbol = prog.symbol("tk_core")
    return drgn.Object(prog, kept, address=symbol.address)


def _word(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")
