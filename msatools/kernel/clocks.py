# SPDX-License-Identifier: LGPL-2.1-or-later

"""What time it is, in each of the clocks that the scheduler stamps tasks with.

kernel/sched/clock.c and kernel/sched/core.c. All in nanoseconds:

- a run queue's clock (``rq->clock``) is the local clock of its CPU, which all CPUs
  share where it is stable; run queue stamps (``sched_info``) are taken with it;
- its task clock (``rq->clock_task``) leaves out time of interrupts and the hypervisor;
  ``sum_exec_runtime`` and ``exec_start`` are in it;
- CLOCK_MONOTONIC stamps the start of tasks.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.cpumask import online_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.variables import find_variable

Nanoseconds = npt.NDArray[np.int64]

_CLOCK = struct.Struct("<Q")
_SIGNED = struct.Struct("<q")

_DIFFERENCE = "how CLOCK_MONOTONIC differs from the others"

_MOST_NS = 1 << 60
"""36 years, more than any machine is up: a clock that says so is damaged."""


@dataclass(frozen=True)
class Clocks:
    """The clocks at one moment."""

    local_ns: int
    """The local clock: the latest of all run queues', as idle ones lag behind."""

    monotonic_offset_ns: int | None
    """What to add to CLOCK_MONOTONIC to have the local clock; ``None`` if unknown."""

    behind_ns: Nanoseconds
    """By CPU: how far its task clock is behind the local clock."""

    @property
    def monotonic_ns(self) -> int | None:
        """CLOCK_MONOTONIC."""
        if self.monotonic_offset_ns is None:
            return None
        return self.local_ns - self.monotonic_offset_ns

    def task_clock_ns(self, cpus: npt.NDArray[np.uint32]) -> Nanoseconds:
        """Tell the task clocks of some CPUs; the local clock where there is no CPU."""
        known = cpus < len(self.behind_ns)
        behind = np.zeros(len(cpus), np.int64)
        behind[known] = self.behind_ns[cpus[known]]
        return self.local_ns - behind


class _Queues(NamedTuple):
    """Where the clocks of run queues are."""

    places: Mapping[int, int]
    """Address of the first clock, by CPU."""

    clock: int
    task: int
    """Offsets of the two clocks from there."""

    size: int
    """Bytes from there that have both."""


def read_clocks(reader: Reader, losses: LossLog) -> Clocks:
    """Read the clocks; a CPU whose run queue cannot be read costs a note.

    :raises LookupError: if no run queue can be found at all
    """
    # One read a CPU and no array: a query for one thread has no time for more.
    queues = reader.once(_Queues, lambda: _queues(reader, losses))
    behind = [0]
    length = latest = 0
    for cpu in online_cpus(reader, losses):
        place = queues.places.get(cpu)
        if place is not None:
            length = cpu + 1
            behind += [0] * (length - len(behind))
        try:
            if place is None:
                raise drgn.FaultError("no variables of that CPU", 0)
            clocks = reader.read(place, queues.size)
            (clock,) = _CLOCK.unpack_from(clocks, queues.clock)
            (task,) = _CLOCK.unpack_from(clocks, queues.task)
            if max(clock, task) > _MOST_NS:
                raise drgn.FaultError("no time of a clock", place)
        except drgn.FaultError:
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
    queue = reader.prog.type("struct rq")
    clock, task = drgn.offsetof(queue, "clock"), drgn.offsetof(queue, "clock_task")
    start = min(clock, task)
    places = percpu.addresses("runqueues") + np.uint64(start)
    return _Queues(
        dict(zip(percpu.cpus.tolist(), places.tolist(), strict=True)),
        clock - start,
        task - start,
        abs(clock - task) + _CLOCK.size,
    )


def monotonic_offset(reader: Reader, losses: LossLog) -> int | None:
    """Tell by how much the local clock is ahead of CLOCK_MONOTONIC.

    Where the local clock may be unstable (x86), the kernel keeps the difference of the
    two, from when it found the clock to be stable.
    """
    try:
        place = reader.once(monotonic_offset, lambda: _offset_place(reader.prog))
        if place is None:
            return None
        # An unsigned variable for a difference with a sign.
        (difference,) = _SIGNED.unpack(reader.read(place, _SIGNED.size))
    except drgn.FaultError as error:
        losses.lose(Loss.CLOCKS, f"{_DIFFERENCE} is lost: {error}")
        return None
    if abs(difference) > _MOST_NS:
        losses.lose(Loss.CLOCKS, f"{_DIFFERENCE} cannot be {difference}")
        return None
    found: int = difference
    return found


def _offset_place(prog: drgn.Program) -> int | None:
    """Find the variable; ``None`` where the kernel has none."""
    try:
        address: int | None = find_variable(prog, "__gtod_offset").address_
        return address
    except LookupError:
        return None
