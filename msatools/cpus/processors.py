# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each CPU is: psrinfo -v."""

from collections.abc import Mapping, Sequence

import drgn
import numpy as np

from msatools.cpus.model import Processor
from msatools.cpus.ticksched import TickSched
from msatools.cpus.topology import read_places
from msatools.kernel.cpumask import Cpus, kept_mask
from msatools.kernel.enums import enumerators
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string, read_string
from msatools.kernel.structs import Members, read_structs
from msatools.selfdesc.variables import find_variable

_MAX_NAME = 128
"""Of a step of hot-plug; the longest have some 40 bytes."""

_HOTPLUG: Members = {"state": ("state",), "target": ("target",)}

_QUEUE: Members = {
    "capacity": ("cpu_capacity",),
    "idle_state": ("idle_state",),
}


def read_processors(
    reader: Reader, percpu: PerCpu, ticks: TickSched, losses: LossLog
) -> tuple[Processor, ...]:
    """Return what each CPU of ``percpu.cpus`` is.

    A CPU that has never been online has no place in the machine that is known.

    :raises LookupError: if no run queue can be found at all
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
            thread=_place_in(places[row].siblings, cpu),
            siblings=places[row].siblings,
            node=places[row].node,
            capacity=capacities[row] if queues.readable[row] else None,
            idle_state=idle[row][0],
            idle_depth=idle[row][1],
            tick_stopped=ticks.stopped[row],
        )
        for row, cpu in enumerate(percpu.cpus.tolist())
    )


def _place_in(siblings: Cpus, cpu: int) -> int | None:
    return siblings.index(cpu) if cpu in siblings else None


def _hotplug(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> list[tuple[str | None, str | None]]:
    """Return the hotplug step of each CPU, and the step that it is on the way to."""
    try:
        addresses = percpu.addresses("cpuhp_state")
    except LookupError as error:
        # CONFIG_HOTPLUG_CPU or not, all kernels with SMP have it.
        losses.lose(Loss.HOTPLUG, f"steps of hot-plug are lost: {error}")
        return [(None, None)] * len(percpu.cpus)
    found = read_structs(reader, "struct cpuhp_cpu_state", _HOTPLUG, addresses, losses)
    states, targets = found["state"].tolist(), found["target"].tolist()
    steps = enumerators(reader.prog, "enum cpuhp_state")
    names = _step_names(reader.prog, {*states, *targets}, steps, losses)
    # Before "cpu/hotplug: Set cpuhp target for boot cpu" (in v6.2), that CPU's target
    # is as it was when the kernel came up: offline.
    there = steps.get("CPUHP_ONLINE")
    return [
        (names.get(state), None if state in (target, there) else names.get(target))
        if known
        else (None, None)
        for state, target, known in zip(
            states, targets, found.readable.tolist(), strict=True
        )
    ]


def _step_names(
    prog: drgn.Program, states: set[int], steps: Mapping[str, int], losses: LossLog
) -> Mapping[int, str]:
    """Name steps as /sys/devices/system/cpu/hotplug/states does.

    Those that it leaves out go by their enumerators.
    """
    known = {value: name for name, value in steps.items() if value in states}
    last = max(steps.values())
    reader = Reader(prog)  # as with drgn's objects, no report has its reads
    try:
        described = find_variable(prog, "cpuhp_hp_states")
        for state in states:
            # What asks for any step (CPUHP_AP_ONLINE_DYN) has no enumerator.
            if 0 <= state <= last and (name := described[state].name):
                known[state] = read_string(reader, name.value_(), _MAX_NAME)
    except (LookupError, drgn.FaultError) as error:
        losses.lose(Loss.HOTPLUG, f"names of steps of hot-plug are lost: {error}")
    return known


def _idle_states(
    reader: Reader, addresses: Sequence[int], losses: LossLog
) -> list[tuple[str | None, int | None]]:
    """Name the idle state that each CPU is in, and tell its number.

    The run queue leads to it (idle_set_state()) while the CPU is in it.
    """
    found: dict[int, tuple[str | None, int | None]] = {0: (None, None)}
    for address in set(addresses) - {0}:
        state = drgn.Object(reader.prog, "struct cpuidle_state", address=address)
        try:
            name = decode_string(state.name.string_())
        except drgn.FaultError as error:
            losses.lose(Loss.IDLE_STATES, f"an idle state's name is lost: {error}")
            found[address] = None, None
        else:
            found[address] = name, _idle_depth(reader.prog, state)
    return [found[address] for address in addresses]


def _idle_depth(prog: drgn.Program, state: drgn.Object) -> int | None:
    """Return a state's number in its driver; ``None`` with a driver for each CPU."""
    try:
        states = find_variable(prog, "cpuidle_curr_driver").states
        first, size = states[0].address_of_().value_(), drgn.sizeof(states[0])
        count = drgn.sizeof(states) // size
    except (LookupError, drgn.FaultError):
        return None
    number, between = divmod(state.address_of_().value_() - first, size)
    return number if not between and 0 <= number < count else None
