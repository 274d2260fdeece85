# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rows of CPUs, put together of what was read of each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msatools.cpus.counts import Counts
from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import Cpu, Processor, Running, RunQueue, State


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is known of the CPUs."""

    cpus: Sequence[int]
    masks: CpuMasks
    no_intr: Collection[int]
    """Those that no interrupt of a device may go to."""

    sets: Mapping[int, str]
    counters: Mapping[int, Mapping[str, int | None]]
    processors: Sequence[Processor]
    """One a CPU, in the order of ``cpus``."""

    queues: Mapping[int, RunQueue]
    icsw: Counts | None
    migr: Counts | None


def cpu_rows(parts: Parts) -> tuple[Cpu, ...]:
    """Make the row of each CPU."""
    return tuple(_row(parts, place, cpu) for place, cpu in enumerate(parts.cpus))


def _row(parts: Parts, place: int, cpu: int) -> Cpu:
    processor, queue = parts.processors[place], parts.queues.get(cpu)
    return Cpu(
        cpu=cpu,
        online=cpu in parts.masks.online,
        set=parts.sets[cpu],
        state=_states(parts, cpu, processor, queue),
        icsw=None if parts.icsw is None else parts.icsw.at(place),
        migr=None if parts.migr is None else parts.migr.at(place),
        current=_running(queue),
        processor=processor,
        **parts.counters[cpu],  # type: ignore[arg-type]
    )


def _running(queue: RunQueue | None) -> Running | None:
    if queue is None or queue.current is None:
        return None
    task = queue.current
    return Running(pid=task.pid, comm=task.comm, sched_class=task.sched_class)


def _states(
    parts: Parts, cpu: int, processor: Processor, queue: RunQueue | None
) -> tuple[State, ...]:
    masks = parts.masks
    online = cpu in masks.online
    current = queue.current if queue else None
    holds: Mapping[State, bool] = {
        "on": online,
        "off": not online,
        "no-intr": online and cpu in parts.no_intr,
        "isolated": cpu in (masks.isolated or ()),
        "nohz_full": cpu in (masks.nohz_full or ()),
        "rcu_nocb": cpu in (masks.rcu_nocb or ()),
        "inactive": online and processor.active is False,
        # stop_machine() and moves of tasks run in the class that nothing preempts.
        "stopped": current is not None and current.sched_class == "stop",
        "idle": current is not None and current.sched_class == "idle",
    }
    return tuple(state for state, does_hold in holds.items() if does_hold)
