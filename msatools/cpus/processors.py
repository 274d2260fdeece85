# SPDX-License-Identifier: LGPL-2.1-or-later

"""Description of each CPU: psrinfo -v."""

from collections.abc import Mapping, Sequence

import drgn
import numpy as np

from msatools.cpus.model import Processor
from msatools.cpus.ticksched import TickSched
from msatools.cpus.topology import read_places
from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.cpumask import Cpus, kept_mask
from msatools.kernel.enums import enumerators
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string, read_string
from msatools.kernel.structs import Members, read_structs
from msatools.selfdesc.find import find_variable, object_at

_MAX_NAME = 128
"""Limit for names of hotplug states; the longest have some 40 bytes."""

_HOTPLUG: Members = {"state": ("state",), "target": ("target",)}

_QUEUE: Members = {
    "capacity": ("cpu_capacity",),
    "idle_state": ("idle_state",),
}


def read_processors(
    reader: Reader, percpu: PerCpu, ticks: TickSched, losses: LossLog
) -> tuple[Processor, ...]:
    """Return the description of each CPU of ``percpu.cpus``.

    The topology of a CPU that has never been online is unknown.

    :raises MissingError: if no run queue can be found at all
    """
    active = kept_mask(reader, "active", losses)
    hotplug = _hotplug(reader, percpu, losses)
    places = read_places(reader, percpu, losses)
    queues = read_structs(
        reader, "struct rq", _QUEUE, percpu.addresses("runqueues"), losses
    )
    capacities = queues["capacity"].tolist()
    # Without CONFIG_CPU_IDLE there are no idle states.
    none = np.zeros(len(percpu.cpus), np.uint64)
    idle_states = queues.columns.get("idle_state", none).tolist()
    idle = _idle_states(reader, idle_states, losses)
    return tuple(
        Processor(
            active=None if active is None else cpu in active,
            hotplug=hotplug[row][0],
            hotplug_target=hotplug[row][1],
            package=places[row].package,
            die=places[row].die,
            core=places[row].core,
            thread=_index_in(places[row].siblings, cpu),
            siblings=places[row].siblings,
            node=places[row].node,
            capacity=capacities[row] if queues.readable[row] else None,
            idle_state=idle[row][0],
            idle_depth=idle[row][1],
            tick_stopped=ticks.stopped[row],
        )
        for row, cpu in enumerate(percpu.cpus.tolist())
    )


def _index_in(siblings: Cpus, cpu: int) -> int | None:
    return siblings.index(cpu) if cpu in siblings else None


def _hotplug(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> list[tuple[str | None, str | None]]:
    """Return the hotplug state of each CPU, and its target if not reached."""
    try:
        addresses = percpu.addresses("cpuhp_state")
    except MissingError as error:
        # All kernels with SMP have it, also without CONFIG_HOTPLUG_CPU.
        losses.lose(Loss.HOTPLUG, f"cannot read steps of hot-plug: {error}")
        return [(None, None)] * len(percpu.cpus)
    found = read_structs(reader, "struct cpuhp_cpu_state", _HOTPLUG, addresses, losses)
    states, targets = found["state"].tolist(), found["target"].tolist()
    steps = enumerators(reader.prog, "enum cpuhp_state")
    names = _step_names(reader.prog, {*states, *targets}, steps, losses)
    # Before "cpu/hotplug: Set cpuhp target for boot cpu" (in v6.2), the boot CPU's
    # target stays at its initial value: offline.
    online = steps.get("CPUHP_ONLINE")
    return [
        (names.get(state), None if state in (target, online) else names.get(target))
        if known
        else (None, None)
        for state, target, known in zip(
            states, targets, found.readable.tolist(), strict=True
        )
    ]


def _step_names(
    prog: drgn.Program, states: set[int], steps: Mapping[str, int], losses: LossLog
) -> Mapping[int, str]:
    """Return the names of states in /sys/devices/system/cpu/hotplug/states.

    States without a name there have the name of their enumerator.
    """
    known = {value: name for name, value in steps.items() if value in states}
    last = max(steps.values())
    reader = Reader(prog)  # these reads do not count in the report
    try:
        described = find_variable(prog, "cpuhp_hp_states")
        for state in states:
            # Dynamic states (CPUHP_AP_ONLINE_DYN and above) have no enumerator.
            if 0 <= state <= last and (name := described[state].name):
                known[state] = read_string(reader, name.value_(), _MAX_NAME)
    except LOST as error:
        losses.lose(Loss.HOTPLUG, f"cannot read names of steps of hot-plug: {error}")
    return known


def _idle_states(
    reader: Reader, addresses: Sequence[int], losses: LossLog
) -> list[tuple[str | None, int | None]]:
    """Return the name and number of each CPU's current idle state.

    The run queue points to it while the CPU is in it (idle_set_state()).
    """
    found: dict[int, tuple[str | None, int | None]] = {0: (None, None)}
    for address in set(addresses) - {0}:
        state = object_at(reader.prog, "struct cpuidle_state", address)
        try:
            name = decode_string(state.name.string_())
        except UNREADABLE as error:
            losses.lose(Loss.IDLE_STATES, f"cannot read an idle state's name: {error}")
            found[address] = None, None
        else:
            found[address] = name, _idle_depth(reader.prog, state)
    return [found[address] for address in addresses]


def _idle_depth(prog: drgn.Program, state: drgn.Object) -> int | None:
    """Return a state's number in its driver; ``None`` with per-CPU drivers."""
    try:
        states = find_variable(prog, "cpuidle_curr_driver").states
        first, size = states[0].address_of_().value_(), drgn.sizeof(states[0])
        count = drgn.sizeof(states) // size
    except LOST:
        return None
    number, between = divmod(state.address_of_().value_() - first, size)
    return number if not between and 0 <= number < count else None
