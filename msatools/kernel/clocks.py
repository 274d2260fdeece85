# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's clocks: jiffies, timekeeper, run queues' clocks; the load average.

Also the switches of optional accounting of tasks.
"""

import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.sched import loadavg
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.percpu import online_cpus, read_percpu
from msatools.kernel.reader import MAX_PLAUSIBLE, U64, Reader, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.selfdesc.find import ask, find_symbol, find_type, find_variable, offset_of

# --- Converts jiffies, the kernel's count of ticks, to times.


class Jiffies(Struct, frozen=True):
    """The count of ticks at its last update."""

    tick_ns: int
    count: int
    updated_ns: int
    """CLOCK_MONOTONIC at the last update of the count."""

    def time_ns(self, count: int) -> int | None:
        """Return CLOCK_MONOTONIC when jiffies is *count*; ``None`` if impossible.

        :param count: A count of jiffies, past or future, modulo ``2**64``.
        """
        ahead = (count - self.count) & _U64_MAX
        if ahead > _U64_MAX >> 1:
            ahead -= _U64_MAX + 1
        moment = self.updated_ns + ahead * self.tick_ns
        return moment if moment > 0 else None

    def past_ns(self, count: int) -> int | None:
        """Return :meth:`time_ns`; ``None`` if that is later than the last update."""
        moment = self.time_ns(count)
        return moment if moment is not None and moment <= self.updated_ns else None


_U64_MAX = (1 << 64) - 1


def read_jiffies(prog: drgn.Program) -> Jiffies:
    """Read jiffies.

    :raises drgn.FaultError: if they cannot be read
    :raises MissingError: if the kernel has no such variables
    """
    # One cycle of the jiffies clock source is a tick (kernel/time/jiffies.c).
    clock = find_variable(prog, "clocksource_jiffies")
    return Jiffies(
        tick_ns=clock.mult.value_() >> clock.shift.value_(),
        count=find_variable(prog, "jiffies_64").value_(),
        updated_ns=find_variable(prog, "last_jiffies_update").value_(),
    )


# --- The kernel's timekeeper (kernel/time/timekeeping.c).


_TRIES = 4
"""Maximum number of reads of a structure that the kernel changes during the read."""

_PAUSE_S = 0.002
"""Seconds between these reads: the CPU that changes the structure may be a virtual one
that is not running."""


class Update(NamedTuple):
    """The last update of the timekeeper, at each tick unless all CPUs are idle."""

    monotonic_ns: int
    """CLOCK_MONOTONIC at the update."""

    cycle: int
    """Hardware counter of the clock source at the update."""

    source: int
    """Address of the clock source, a ``struct clocksource``."""


class _Timekeeper(NamedTuple):
    """Location of the timekeeper, and offsets of its members."""

    address: int
    size: int
    base: int
    fraction: int
    shift: int
    cycle: int
    source: int
    sequence: int


def last_update(reader: Reader, losses: LossLog) -> Update | None:
    """Read the last update; ``None`` if it is unreadable or was under way."""
    if reader.is_live:
        return _last_update(reader, losses)
    return reader.once(Update, lambda: _last_update(reader, losses))


def _last_update(reader: Reader, losses: LossLog) -> Update | None:
    try:
        core = reader.once(_Timekeeper, lambda: _timekeeper(reader.prog))
        for again in range(_TRIES if reader.is_live else 1):
            if again:
                time.sleep(_PAUSE_S)
            data = reader.read(core.address, core.size)
            before = unsigned(data, core.sequence, 4)
            steady = not before & 1
            if steady and reader.is_live:
                after = reader.read(core.address + core.sequence, 4)
                steady = before == unsigned(after, 0, 4)
            if steady:
                return _update(core, data)
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.lose(Loss.CLOCKS, f"the time cannot be read: {error}")
        return None
    losses.note("clocks-changing", "the kernel was just setting its clocks")
    return None


def _update(core: _Timekeeper, data: bytes) -> Update:
    base, fraction, shift, cycle, source = (
        unsigned(data, offset, size)
        for offset, size in (
            *((core.base, 8), (core.fraction, 8), (core.shift, 4)),
            *((core.cycle, 8), (core.source, 8)),
        )
    )
    now = base + (fraction >> (shift & 63))
    if now > MAX_PLAUSIBLE:
        raise DamagedDataError(f"it cannot be {now} ns", core.address)
    return Update(now, cycle, source)


def _timekeeper(prog: drgn.Program) -> _Timekeeper:
    core = _timekeeper_core(prog)
    mono = "timekeeper.tkr_mono"
    offsets = (
        offset_of(core.type_, member)
        for member in (
            f"{mono}.base",
            f"{mono}.xtime_nsec",
            f"{mono}.shift",
            f"{mono}.cycle_last",
            f"{mono}.clock",
            "seq.seqcount.sequence",
        )
    )
    return _Timekeeper(core.address_, drgn.sizeof(core.type_), *offsets)


def _timekeeper_core(prog: drgn.Program) -> drgn.Object:
    try:
        type_ = find_type(prog, "struct tk_data")
    except MissingError:
        # Before v6.13 the type has no name.
        return find_variable(prog, "tk_core")
    try:
        # An array since there are auxiliary clocks (v6.17); the first is the system's.
        # Found as a symbol, as a variable's lookup also derives the array's length.
        symbol = find_symbol(prog, "timekeeper_data")
    except MissingError:
        symbol = find_symbol(prog, "tk_core")
    return drgn.Object(prog, type_, address=symbol.address)


# --- The current time in each of the clocks that the scheduler stamps tasks with.
#
# kernel/sched/clock.c and kernel/sched/core.c. All in nanoseconds:
#
# - rq->clock of a run queue is the local clock of its CPU, which all CPUs share if it
#   is stable; run queue stamps (sched_info) are taken from it;
# - rq->clock_task leaves out interrupt time and steal time; sum_exec_runtime and
#   exec_start are taken from it;
# - CLOCK_MONOTONIC stamps the start of tasks.


Nanoseconds = npt.NDArray[np.int64]

_S64 = struct.Struct("<q")

_DIFFERENCE = "how CLOCK_MONOTONIC differs from the others"


class Clocks(Struct, frozen=True):
    """The clocks at one moment."""

    local_ns: int
    """The local clock: the latest ``rq->clock``, as those of idle CPUs are stale."""

    monotonic_offset_ns: int | None
    """The local clock minus CLOCK_MONOTONIC; ``None`` if unknown."""

    behind_ns: Nanoseconds
    """``rq->clock`` minus ``rq->clock_task``, by CPU number; 0 if unknown."""

    @property
    def monotonic_ns(self) -> int | None:
        """CLOCK_MONOTONIC; ``None`` if its offset is unknown."""
        if self.monotonic_offset_ns is None:
            return None
        return self.local_ns - self.monotonic_offset_ns

    def task_clock_ns(self, cpus: npt.NDArray[np.uint32]) -> Nanoseconds:
        """Return ``clock_task`` of each CPU; the local clock if there is no such CPU.

        :return: Shape ``(len(cpus),)``.
        """
        known = cpus < len(self.behind_ns)
        behind = np.zeros(len(cpus), np.int64)
        behind[known] = self.behind_ns[cpus[known]]
        return self.local_ns - behind


class _Queues(NamedTuple):
    """Location of ``rq->clock`` and ``rq->clock_task`` of all CPUs."""

    addresses: Mapping[int, int]
    """Address of the first of the two, by CPU."""

    clock: int
    task: int
    """Offsets of the two from that address."""

    size: int
    """Bytes from that address to the end of the second."""


def read_clocks(reader: Reader, losses: LossLog) -> Clocks:
    """Read the clocks; a run queue that cannot be read is noted as a loss.

    :raises MissingError: if no run queue can be found at all
    """
    # One read per CPU and no numpy arrays, so that a query of one thread is fast.
    queues = reader.once(_Queues, lambda: _queues(reader, losses))
    behind = [0]
    length = latest = 0
    for cpu in online_cpus(reader, losses):
        address = queues.addresses.get(cpu)
        if address is not None:
            length = cpu + 1
            behind += [0] * (length - len(behind))
        try:
            if address is None:
                raise DamagedDataError("no variables of that CPU", 0)
            clocks = reader.read(address, queues.size)
            (clock,) = U64.unpack_from(clocks, queues.clock)
            (task,) = U64.unpack_from(clocks, queues.task)
            if max(clock, task) > MAX_PLAUSIBLE:
                raise DamagedDataError("no time of a clock", address)
        except UNREADABLE:
            losses.lose(Loss.RUN_QUEUES, f"CPU {cpu}'s run queue cannot be read")
            continue
        latest = max(latest, clock)
        behind[cpu] = clock - task
    return Clocks(
        local_ns=latest,
        monotonic_offset_ns=monotonic_offset(reader, losses),
        behind_ns=np.array(behind[:length], np.int64),
    )


def _queues(reader: Reader, losses: LossLog) -> _Queues:
    percpu = read_percpu(reader, losses)
    queue = find_type(reader.prog, "struct rq")
    clock, task = offset_of(queue, "clock"), offset_of(queue, "clock_task")
    start = min(clock, task)
    addresses = percpu.addresses("runqueues") + np.uint64(start)
    return _Queues(
        dict(zip(percpu.cpus.tolist(), addresses.tolist(), strict=True)),
        clock - start,
        task - start,
        abs(clock - task) + U64.size,
    )


def monotonic_offset(reader: Reader, losses: LossLog) -> int | None:
    """Return the local clock minus CLOCK_MONOTONIC, in ns; ``None`` if unknown.

    If both follow one hardware counter, they are compared at the last update of
    CLOCK_MONOTONIC, as NTP corrects only that clock, by minutes in a year. On x86 with
    another clock source, as a guest whose hypervisor provides the local clock, before
    v5.13 and without CONFIG_PARAVIRT, the kernel's ``__gtod_offset`` is returned
    (kernel/sched/clock.c): exact while the local clock is unstable, else as of when the
    kernel last found the clock stable, which is at boot if no watchdog checks it.
    """
    try:
        address = reader.once(monotonic_offset, lambda: _gtod_offset(reader.prog))
        if address is None:
            return _offset_by_counter(reader, losses)
        try:
            difference = _offset_by_tsc(reader, losses)
        except UNREADABLE as error:
            losses.lose(Loss.CLOCKS, f"the scale of the TSC cannot be read: {error}")
            difference = None
        if difference is None:
            # The variable is unsigned, but holds a signed difference.
            (difference,) = _S64.unpack(reader.read(address, _S64.size))
    except UNREADABLE as error:
        losses.lose(Loss.CLOCKS, f"cannot read {_DIFFERENCE}: {error}")
        return None
    if abs(difference) > MAX_PLAUSIBLE:
        losses.lose(Loss.CLOCKS, f"{_DIFFERENCE} cannot be {difference}")
        return None
    return difference


class _TscClock(NamedTuple):
    """Location of the scales by which the local clock follows from the TSC of x86."""

    address: int
    """Address of a ``struct cyc2ns``: two scales, of which one is in use."""

    size: int
    sequence: int
    scales: int
    scale_size: int
    mult: int
    shift: int
    offset: int
    """Offsets in the struct, and in one scale."""

    start_ns: int
    """The local clock when ``sched_clock()`` was 0."""

    sources: frozenset[int]
    """Addresses of the clock sources that read the TSC."""

    def local_ns(self, reader: Reader, cycle: int) -> int:
        """Return the local clock when the TSC was *cycle*.

        :raises drgn.FaultError: if it cannot be read
        """
        data = reader.read(self.address, self.size)
        used = unsigned(data, self.sequence, 4) & 1
        scale = self.scales + used * self.scale_size
        mult, shift = (
            unsigned(data, scale + offset, 4) for offset in (self.mult, self.shift)
        )
        if not mult:
            raise DamagedDataError("no scale of the TSC", self.address)
        passed = cycle * mult >> (shift & 63)
        ns = unsigned(data, scale + self.offset, 8) + passed + self.start_ns
        return ns & _U64_MAX


def _offset_by_tsc(reader: Reader, losses: LossLog) -> int | None:
    """Return the offset by the TSC; ``None`` if a clock uses another counter."""
    tsc = reader.once(_TscClock, lambda: _tsc_clock(reader, losses))
    update = tsc and last_update(reader, losses)
    if tsc is None or update is None or update.source not in tsc.sources:
        return None
    return tsc.local_ns(reader, update.cycle) - update.monotonic_ns


def _tsc_clock(reader: Reader, losses: LossLog) -> _TscClock | None:
    """Find how the local clock is computed from the TSC (arch/x86/kernel/tsc.c).

    :return: ``None`` if it is not: the TSC is unstable, or a hypervisor's clock is
        used instead.
    :raises drgn.FaultError: if the parameters cannot be read
    """
    prog = reader.prog
    try:
        # A static key, which begins with its enable count.
        stable = find_symbol(prog, "__sched_clock_stable").address
        # A static call since "x86/paravirt: Switch time pvops functions to use
        # static_call()" (in v5.13); its key's first member is the function in use.
        call = find_symbol(prog, "__SCK__pv_sched_clock").address
        native = find_symbol(prog, "native_sched_clock").address
        sources = frozenset(
            find_symbol(prog, name).address
            for name in ("clocksource_tsc", "clocksource_tsc_early")
        )
        clocks = read_percpu(reader, losses).addresses("cyc2ns")
        clock = find_type(prog, "struct cyc2ns")
        scale = find_type(prog, "struct cyc2ns_data")
        start = find_variable(prog, "__sched_clock_offset").value_()
        sequence, scales = (
            offset_of(clock, member) for member in ("seq.seqcount.sequence", "data")
        )
        mult, shift, offset = (
            offset_of(scale, f"cyc2ns_{name}") for name in ("mul", "shift", "offset")
        )
    except MissingError:
        return None
    if not any(reader.read(stable, 4)) or reader.words(call, 1)[0] != native:
        return None
    if not len(clocks):
        return None  # which is a loss already
    # The scales are the same on all CPUs.
    return _TscClock(
        address=int(clocks[0]),
        size=drgn.sizeof(clock),
        sequence=sequence,
        scales=scales,
        scale_size=drgn.sizeof(scale),
        mult=mult,
        shift=shift,
        offset=offset,
        start_ns=start,
        sources=sources,
    )


def _gtod_offset(prog: drgn.Program) -> int | None:
    """Find the address of ``__gtod_offset``; ``None`` if the kernel lacks it."""
    try:
        address: int | None = find_variable(prog, "__gtod_offset").address_
        return address
    except MissingError:
        return None


def _offset_by_counter(reader: Reader, losses: LossLog) -> int | None:
    """
    Return the offset by the hardware counter that both clocks follow.

    The local clock is that of kernel/time/sched_clock.c (CONFIG_GENERIC_SCHED_CLOCK).

    :return: ``None`` if the kernel lacks that clock, or the counters seem to differ.
    :raises drgn.FaultError: if the clock cannot be read
    """
    prog = reader.prog
    try:
        type_, symbol = find_type(prog, "struct clock_data"), find_symbol(prog, "cd")
    except MissingError:
        return None
    update = last_update(reader, losses)
    if update is None:
        return None
    data = reader.read(symbol.address, drgn.sizeof(type_))
    clock = drgn.Object.from_bytes_(prog, type_, data)
    # A latch (seqcount_latch_t since v5.10): the kernel changes the copy that the
    # sequence number does not select.
    now = clock.read_data[clock.seq.seqcount.sequence & 1]
    mask = now.sched_clock_mask.value_()
    # Signed, as the timekeeper's update may be before the epoch.
    cycles = (update.cycle - now.epoch_cyc.value_()) & mask
    if cycles > mask >> 1:
        cycles -= mask + 1
    passed = cycles * now.mult.value_() >> now.shift.value_()
    # The kernel renews the epoch before the counter wraps: this is another counter.
    if abs(passed) > 2 * clock.wrap_kt.value_():
        return None
    difference: int = now.epoch_ns.value_() + passed - update.monotonic_ns
    return difference


# --- The load averages (kernel/sched/loadavg.c).


def load_averages(prog: drgn.Program, losses: LossLog) -> tuple[float, ...] | None:
    """Read the load averages over 1, 5 and 15 minutes; ``None`` if unreadable."""
    try:
        return ask(loadavg, prog)
    except LOST as error:
        losses.lose(Loss.LOAD, f"cannot read the load averages: {error}")
        return None


# --- The switches of the kernel's optional accounting of tasks.
#
# A switch shows only the present state: a counter may hold what was counted before it
# was switched off, and lack what happened before it was switched on.


_COUNT = struct.Struct("<i")


class _Switch(NamedTuple):
    name: str
    address: int


class Accounting(Struct, frozen=True):
    """Which kinds of time the kernel accounts at one moment."""

    schedstats: bool | None
    """Whether sleep statistics are kept (kernel/sched/stats.c); ``None`` if the kernel
    has no such statistics, or if the switch cannot be read."""

    delayacct: bool | None
    """Whether delay accounting is on (kernel/delayacct.c); ``None`` if the kernel lacks
    it, or if the switch cannot be read."""

    irq_time: bool
    """Whether a task's CPU time excludes the interrupts that it was interrupted by
    (IRQ_TIME_ACCOUNTING)."""

    precise_cputime: bool
    """Whether some CPUs, those of nohz_full, measure user and system time exactly, not
    by ticks (VIRT_CPU_ACCOUNTING_GEN)."""

    stable_clock: bool
    """Whether all CPUs share one clock; else each CPU's clock is corrected at its own
    ticks (kernel/sched/clock.c)."""


class AccountingReader:
    """Reads which kinds of time the kernel accounts, by its sysctls and static keys.

    It can read them repeatedly: their addresses are looked up once.
    """

    def __init__(self, prog: drgn.Program) -> None:
        self._prog = prog
        # The member exists with IRQ_TIME_ACCOUNTING only. It is looked up first, as the
        # first lookup of a symbol that does not exist is slow.
        has_irq_time = find_type(prog, "struct rq").has_member("prev_irq_time")
        self._schedstats = _find(prog, "sched_schedstats")
        # The variable exists in all versions. Linux kernel commit 0cd7c741f01d
        # ("delayacct: Add sysctl to enable at runtime") (in v5.14) added a static key
        # that is set together with it.
        self._delayacct = _find(prog, "delayacct_on")
        # A static key for a while: Linux kernel commit 8722903cbb8f ("sched: Define
        # sched_clock_irqtime as static key") until f3fa0e40df17 (both in v6.14).
        self._irq_time = _find(prog, "sched_clock_irqtime") if has_irq_time else None
        # Renamed by Linux kernel commit 74c578759f15 ("context_tracking: Rename
        # context_tracking_is_enabled() => context_tracking_enabled()") (in v5.5)
        self._precise = _find(prog, "context_tracking_key", "context_tracking_enabled")
        self._stable = _find(prog, "__sched_clock_stable")

    def read(self, losses: LossLog) -> Accounting:
        """Read all switches; one that cannot be read is noted as a loss."""
        stable = self._switch(self._stable, losses)
        return Accounting(
            schedstats=self._switch(self._schedstats, losses),
            delayacct=self._switch(self._delayacct, losses),
            irq_time=bool(self._switch(self._irq_time, losses)),
            precise_cputime=bool(self._switch(self._precise, losses)),
            # Without HAVE_UNSTABLE_SCHED_CLOCK the CPUs' clocks cannot differ.
            stable_clock=stable is None or stable,
        )

    def _switch(self, switch: _Switch | None, losses: LossLog) -> bool | None:
        """Read a switch; ``None`` if the kernel lacks it or it cannot be read.

        No type is needed: each switch is an int, or begins with one, the enable count
        of a ``struct static_key``.
        """
        if switch is None:
            return None
        try:
            (count,) = _COUNT.unpack(self._prog.read(switch.address, _COUNT.size))
        except UNREADABLE as error:
            losses.lose(Loss.ACCOUNTING, f"{switch.name} cannot be read: {error}")
            return None
        return bool(count)


def read_accounting(prog: drgn.Program, losses: LossLog) -> Accounting:
    """Read all switches once; one that cannot be read is noted as a loss."""
    return AccountingReader(prog).read(losses)


def _find(prog: drgn.Program, *names: str) -> _Switch | None:
    """Find the first of *names* that this kernel has; ``None`` if not found."""
    for name in names:
        try:
            return _Switch(name, find_symbol(prog, name).address)
        except MissingError:
            continue
    return None
