# SPDX-License-Identifier: LGPL-2.1-or-later

"""Description of each CPU (psrinfo -v), its topology, and its row of the report."""

from collections.abc import Collection, Mapping, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import Cpu, Processor, Running, RunQueue, State
from msatools.cpus.times import Counts, TickSched, counts
from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import (
    Cpus,
    PerCpu,
    cpus_of,
    is_pointer,
    kept_mask,
    masks_at,
)
from msatools.kernel.reader import Addresses, Reader, column, decode_string, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, enumerators, lose_many, read_structs
from msatools.selfdesc.find import find_type, find_variable, object_at, offset_of
from msatools.tasks.table import IDENTITY, TaskTable

# --- Topology of the CPUs: /sys/devices/system/cpu/cpuN/topology and node.


_X86: Members = {
    "index": ("cpu_index",),
    # "x86/cpu: Encapsulate topology information in cpuinfo_x86" and what follows it
    # (in v6.7)
    "package": ("topo.pkg_id",),
    "die": ("topo.die_id",),
    "core": ("topo.core_id",),
    "old_package": ("phys_proc_id",),
    "old_die": ("cpu_die_id",),
    "old_core": ("cpu_core_id",),
}

_ARM64: Members = {"package": ("package_id",), "core": ("core_id",)}


class CpuPlace(Struct, frozen=True):
    """Topology of one CPU; ``None`` if unknown."""

    package: int | None = None
    die: int | None = None
    core: int | None = None
    siblings: Cpus = ()
    """All online CPUs of its core, including itself; empty if it is offline."""

    node: int | None = None


def read_places(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> tuple[CpuPlace, ...]:
    """Return the topology of each CPU of ``percpu.cpus``.

    For a CPU that has never been online only the node is known.
    """
    prog = reader.prog
    try:
        if _has(prog, "cpu_info"):
            places = _x86_places(reader, percpu, losses)
        elif _has(prog, "cpu_topology"):
            places = _arm64_places(reader, percpu, losses)
        else:
            places = [CpuPlace()] * len(percpu.cpus)
    except MissingError as error:
        losses.lose(Loss.TOPOLOGY, f"cannot read packages, cores and threads: {error}")
        places = [CpuPlace()] * len(percpu.cpus)
    return tuple(
        replace(place, node=node)
        for place, node in zip(places, _nodes(reader, percpu, losses), strict=True)
    )


def _x86_places(reader: Reader, percpu: PerCpu, losses: LossLog) -> list[CpuPlace]:
    """Read ``struct cpuinfo_x86`` (arch/x86/include/asm/processor.h) of each CPU."""
    infos = read_structs(
        reader, "struct cpuinfo_x86", _X86, percpu.addresses("cpu_info"), losses
    )
    prefix = "" if infos.has("package") else "old_"
    columns = [infos[prefix + name].tolist() for name in ("package", "die", "core")]
    # cpu_index is nr_cpu_ids or 0 for a CPU that was never identified.
    known = infos.readable & (infos["index"] == percpu.cpus)
    return [
        CpuPlace(package, die, core, siblings) if is_known else CpuPlace()
        for is_known, package, die, core, siblings in zip(
            known.tolist(),
            *columns,
            _masks(reader, _x86_siblings(reader, percpu, losses), losses),
            strict=True,
        )
    ]


def _x86_siblings(reader: Reader, percpu: PerCpu, losses: LossLog) -> Addresses:
    addresses = percpu.addresses("cpu_sibling_map")
    if not is_pointer(find_variable(reader.prog, "cpu_sibling_map").type_):
        return addresses
    # With CONFIG_CPUMASK_OFFSTACK, a cpumask_var_t is a pointer.
    pointers, readable = reader.read_records(addresses, 8)
    lose_many(losses, "struct cpumask", int(np.count_nonzero(~readable)))
    return column(pointers, 0)


def _arm64_places(reader: Reader, percpu: PerCpu, losses: LossLog) -> list[CpuPlace]:
    """Read the ``struct cpu_topology`` of each CPU (drivers/base/arch_topology.c)."""
    prog = reader.prog
    type_ = find_type(prog, "struct cpu_topology")
    first = find_variable(prog, "cpu_topology").address_
    # The address does not fit a signed 64-bit number.
    steps = (percpu.cpus * drgn.sizeof(type_)).astype(np.uint64)
    addresses = np.uint64(first) + steps
    found = read_structs(reader, "struct cpu_topology", _ARM64, addresses, losses)
    siblings = addresses + np.uint64(offset_of(type_, "thread_sibling"))
    return [
        # The kernel has -1 for unknown IDs.
        CpuPlace(package, None, core, cpus) if package >= 0 else CpuPlace()
        for package, core, cpus in zip(
            found["package"].tolist(),
            found["core"].tolist(),
            _masks(reader, siblings, losses),
            strict=True,
        )
    ]


def _masks(reader: Reader, addresses: Addresses, losses: LossLog) -> list[Cpus]:
    masks, readable = masks_at(reader, addresses)
    lost = int(np.count_nonzero(~readable & (addresses != 0)))
    lose_many(losses, "struct cpumask", lost)
    return [cpus_of(mask) for mask in masks]


def _nodes(reader: Reader, percpu: PerCpu, losses: LossLog) -> list[int | None]:
    """Read the NUMA node of each CPU; ``None`` without NUMA."""
    try:
        # With CONFIG_USE_PERCPU_NUMA_NODE_ID, as on x86-64 and arm64.
        addresses = percpu.addresses("numa_node")
    except MissingError:
        return [None] * len(percpu.cpus)
    records, readable = reader.read_records(addresses, 4)
    lose_many(losses, "numa_node", int(np.count_nonzero(~readable)))
    numbers = records.view("<i4")[:, 0].tolist()
    return [
        node if known and node >= 0 else None
        for node, known in zip(numbers, readable.tolist(), strict=True)
    ]


def _has(prog: drgn.Program, name: str) -> bool:
    try:
        find_variable(prog, name)
    except MissingError:
        return False
    return True


# --- Description of each CPU: psrinfo -v.


_MAX_NAME = 128
"""Maximum length of a hotplug state's name; the longest have some 40 bytes."""

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
    """Return the hotplug state of each CPU, and the target state if not reached."""
    try:
        addresses = percpu.addresses("cpuhp_state")
    except MissingError as error:
        # Every SMP kernel has ``cpuhp_state``, also without CONFIG_HOTPLUG_CPU.
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
    """Return the names of *states*, as in /sys/devices/system/cpu/hotplug/states.

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

    The run queue points to the state while the CPU is in it (idle_set_state()).
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


# --- The rows of CPUs in the report, built from the data of each CPU.
#
# The kernel counts involuntary switches and migrations only by task. They are added to
# the CPU that the task is or was last on; those of dead tasks are not included.


class Parts(Struct, frozen=True, kw_only=True):
    """The data that make up the rows of CPUs; mappings are by CPU number."""

    cpus: Sequence[int]
    masks: CpuMasks
    no_intr: Collection[int]
    """CPUs that no interrupt of a device may go to."""

    sets: Mapping[int, str]
    """Name of each CPU's set."""

    counters: Mapping[int, Mapping[str, int | None]]
    """Counters of each CPU by the field of :class:`~msatools.cpus.model.Cpu`."""

    processors: Sequence[Processor]
    """Processors in the order of ``cpus``."""

    queues: Mapping[int, RunQueue]
    icsw: Counts | None
    migr: Counts | None


def cpu_rows(parts: Parts) -> tuple[Cpu, ...]:
    """Return the row of each CPU."""
    return tuple(_row(parts, index, cpu) for index, cpu in enumerate(parts.cpus))


def _row(parts: Parts, index: int, cpu: int) -> Cpu:
    processor, queue = parts.processors[index], parts.queues.get(cpu)
    return Cpu(
        cpu=cpu,
        online=cpu in parts.masks.online,
        set=parts.sets[cpu],
        state=_states(parts, cpu, processor, queue),
        icsw=None if parts.icsw is None else parts.icsw.at(index),
        migr=None if parts.migr is None else parts.migr.at(index),
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
        # stop_machine() and migrations run in the stop class.
        "stopped": current is not None and current.sched_class == "stop",
        "idle": current is not None and current.sched_class == "idle",
    }
    return tuple(state for state, does_hold in holds.items() if does_hold)


def involuntary(
    tasks: TaskTable, cpus: npt.NDArray[np.int64], before: TaskTable | None = None
) -> Counts:
    """Count the involuntary context switches of tasks by the CPU they were last on.

    :param cpus: CPUs of the result
    :param before: an earlier table, to count the switches since then
    """
    return _by_cpu(tasks, "nivcsw", cpus, before)


def moves(
    tasks: TaskTable, cpus: npt.NDArray[np.int64], before: TaskTable | None = None
) -> Counts | None:
    """Count tasks' migrations by the CPU they were last on; ``None`` if not kept.

    :param cpus: CPUs of the result
    :param before: an earlier table, to count the migrations since then
    """
    if not tasks.has("migrations"):
        return None
    return _by_cpu(tasks, "migrations", cpus, before)


def _by_cpu(
    tasks: TaskTable,
    column: str,
    cpus: npt.NDArray[np.int64],
    before: TaskTable | None,
) -> Counts:
    numbers = tasks[column].astype(np.int64)
    if before is not None:
        rows, rows_before = _same(tasks, before)
        # All events of a task that is new since *before* count.
        numbers[rows] -= before[column].astype(np.int64)[rows_before]
        numbers = np.maximum(numbers, 0)
    here = np.isin(tasks["cpu"], cpus)
    indices = np.searchsorted(cpus, tasks["cpu"][here])
    sums = np.zeros(len(cpus), np.int64)
    np.add.at(sums, indices, numbers[here])
    return counts(sums, np.ones(len(cpus), np.bool_))


def _same(
    tasks: TaskTable, before: TaskTable
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the rows in each table of the tasks that are in both."""
    now, then = (
        np.rec.fromarrays([table[name] for name in IDENTITY])
        for table in (tasks, before)
    )
    _, rows, rows_before = np.intersect1d(now, then, return_indices=True)
    return rows, rows_before
