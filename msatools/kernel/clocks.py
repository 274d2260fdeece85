# SPDX-License-Identifier: LGPL-2.1-or-later

"""The current time in each of the clocks that the scheduler stamps tasks with.

kernel/sched/clock.c and kernel/sched/core.c. All in nanoseconds:

- ``rq->clock`` of a run queue is the local clock of its CPU, which all CPUs share if it
  is stable; run queue stamps (``sched_info``) are taken from it;
- ``rq->clock_task`` leaves out interrupt time and steal time; ``sum_exec_runtime`` and
  ``exec_start`` are taken from it;
- CLOCK_MONOTONIC stamps the start of tasks.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.timekeeper import last_update
from msatools.kernel.words import MAX_PLAUSIBLE, U64
from msatools.selfdesc.find import find_symbol, find_type, find_variable, offset_of

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
    """``rq->clock`` minus ``rq->clock_task``, by CPU."""

    @property
    def monotonic_ns(self) -> int | None:
        """CLOCK_MONOTONIC; ``None`` if its offset is unknown."""
        if self.monotonic_offset_ns is None:
            return None
        return self.local_ns - self.monotonic_offset_ns

    def task_clock_ns(self, cpus: npt.NDArray[np.uint32]) -> Nanoseconds:
        """Return the task clock of each CPU; the local clock if there is no such CPU.

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
    """Read the clocks; a CPU whose run queue cannot be read costs a note.

    :raises MissingError: if no run queue can be found at all
    """
    # One read per CPU and no numpy arrays, for the sake of queries of one thread.
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

    Where the local clock may be unstable (x86), the kernel keeps the difference of the
    two from the moment that it found the clock to be stable. Elsewhere both are of one
    hardware counter, and are compared at the last update of CLOCK_MONOTONIC.
    """
    try:
        address = reader.once(monotonic_offset, lambda: _gtod_offset(reader.prog))
        if address is None:
            return _offset_by_counter(reader, losses)
        # The variable is unsigned, but holds a signed difference.
        (difference,) = _S64.unpack(reader.read(address, _S64.size))
    except UNREADABLE as error:
        losses.lose(Loss.CLOCKS, f"cannot read {_DIFFERENCE}: {error}")
        return None
    if abs(difference) > MAX_PLAUSIBLE:
        losses.lose(Loss.CLOCKS, f"{_DIFFERENCE} cannot be {difference}")
        return None
    return int(difference)


def _gtod_offset(prog: drgn.Program) -> int | None:
    """Find the address of the variable; ``None`` if the kernel lacks it."""
    try:
        address: int | None = find_variable(prog, "__gtod_offset").address_
        return address
    except MissingError:
        return None


def _offset_by_counter(reader: Reader, losses: LossLog) -> int | None:
    """
    Compare the clocks at a value of the counter that both are of.

    kernel/time/sched_clock.c, with CONFIG_GENERIC_SCHED_CLOCK.

    :return: ``None`` if they are not, or the kernel has no such clock.
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
    # A latch: the kernel changes the one that is not in use. A seqcount_t of its own
    # since v5.10.
    now = clock.read_data[clock.seq.seqcount.sequence & 1]
    mask = now.sched_clock_mask.value_()
    # The update may be before the epoch.
    cycles = (update.cycle - now.epoch_cyc.value_()) & mask
    if cycles > mask >> 1:
        cycles -= mask + 1
    passed = cycles * now.mult.value_() >> now.shift.value_()
    # The epoch moves on before the counter can wrap around.
    if abs(passed) > 2 * clock.wrap_kt.value_():
        return None
    difference: int = now.epoch_ns.value_() + passed - update.monotonic_ns
    return difference
