# SPDX-License-Identifier: LGPL-2.1-or-later

"""Topology of the CPUs: /sys/devices/system/cpu/cpuN/topology and node."""

import drgn
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.kernel.cpumask import Cpus, cpus_of, is_pointer, masks_at
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, lose_many, read_structs
from msatools.selfdesc.find import find_type, find_variable, offset_of

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

    Of a CPU that has never been online only the node is known.
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
