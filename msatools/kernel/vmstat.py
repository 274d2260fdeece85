# SPDX-License-Identifier: LGPL-2.1-or-later

"""The counters of mm/vmstat.c, including per-CPU deltas not yet folded in."""

import itertools
from collections.abc import Collection

import drgn
import numpy as np
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.errors import UNREADABLE, MissingMemberError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.enums import enumerators
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.zones import populated_zones
from msatools.selfdesc.find import ask, drgn_lookups, find_variable


def vm_counters(
    reader: Reader, nodes_online: list[drgn.Object], losses: LossLog
) -> dict[str, int | None]:
    """
    Sum all node and zone counters, by the name of their enumerator.

    The kernel adds a CPU's delta to the counters only when it exceeds a threshold;
    /proc/vmstat and drgn's helpers read the counters alone.

    :return: Pages, except for the few items that count something else; ``None`` for
        a counter that cannot be read.
    """
    prog = reader.prog
    zones = _names(prog, "enum zone_stat_item", "NR_VM_ZONE_STAT_ITEMS")
    nodes = _names(prog, "enum node_stat_item", "NR_VM_NODE_STAT_ITEMS")
    deltas: dict[str, int] = {}
    cpus = possible_cpus(prog, losses)
    populated = [zone.object for zone in populated_zones(nodes_online)]
    for names, objects, diff_of in (
        (nodes, nodes_online, _node_diff),
        (zones, populated, _zone_diff),
    ):
        total = np.zeros(len(names), np.int64)
        for owner, cpu in itertools.product(objects, cpus):
            try:
                address = diff_of(owner, cpu).address_of_().value_()
                data = reader.read(address, len(names))
            except UNREADABLE:
                losses.lose(Loss.VMSTAT_CPUS)
                continue
            total += np.frombuffer(data, "i1")
        deltas.update(zip(names, total.tolist(), strict=True))
    globals_ = {
        **_global(reader, "vm_zone_stat", zones, losses),
        **_global(reader, "vm_node_stat", nodes, losses),
    }
    return {
        name: None if value is None else value + deltas[name]
        for name, value in globals_.items()
    }


def vm_events(
    reader: Reader, names: Collection[str], losses: LossLog
) -> dict[str, int]:
    """
    Count events of ``enum vm_event_item``, over all CPUs and since boot.

    A CPU that goes offline adds its counts to those of another.

    :param names: Enumerators; those that this kernel lacks are left out.
    :raises MissingError: if the kernel counts no events (CONFIG_VM_EVENT_COUNTERS)
    :raises drgn.FaultError: if the counts of a CPU cannot be read
    """
    prog = reader.prog
    states = find_variable(prog, "vm_event_states").address_of_()
    indices = enumerators(prog, "enum vm_event_item")
    counts = {name: 0 for name in names if name in indices}
    length = max((indices[name] for name in counts), default=-1) + 1
    for cpu in possible_cpus(prog, losses):
        address = ask(per_cpu_ptr, states, cpu).value_()
        # struct vm_event_state has the array ``event`` as its only member.
        words = reader.words(address, length)
        for name in counts:
            counts[name] += int(words[indices[name]])
    return counts


PAGES_FREED = "PGFREE"
"""The event that counts freed pages."""


def pages_allocated(prog: drgn.Program) -> list[str]:
    """Return the names of the events that count allocated pages, one per zone type.

    :raises MissingError: if the types lack ``enum vm_event_item``
    """
    events = enumerators(prog, "enum vm_event_item")
    return [name for name in events if name.startswith("PGALLOC_")]


def _names(prog: drgn.Program, enum: str, end: str) -> list[str]:
    """Return an enum's names in order, up to the enumerator that is their count."""
    names: dict[int, str] = {}
    count = 0
    for name, value in enumerators(prog, enum).items():
        if name == end:
            count = value
        else:
            names.setdefault(value, name)
    return [names[value] for value in range(count)]


def _global(
    reader: Reader, variable: str, names: list[str], losses: LossLog
) -> dict[str, int | None]:
    try:
        words = reader.words(find_variable(reader.prog, variable).address_, len(names))
    except UNREADABLE as error:
        losses.lose(Loss.COUNTERS, f"cannot read the kernel's counters: {error}")
        return dict.fromkeys(names)
    return dict(zip(names, words.view(np.int64).tolist(), strict=True))


def _node_diff(pgdat: drgn.Object, cpu: int) -> drgn.Object:
    return ask(per_cpu_ptr, pgdat.per_cpu_nodestats, cpu).vm_node_stat_diff


def _zone_diff(zone: drgn.Object, cpu: int) -> drgn.Object:
    try:
        with drgn_lookups:
            return ask(per_cpu_ptr, zone.per_cpu_zonestats, cpu).vm_stat_diff
    except MissingMemberError:
        # Before Linux kernel commit 28f836b6777b ("mm/page_alloc: split per cpu
        # page lists and zone stats") (in v5.14).
        return ask(per_cpu_ptr, zone.pageset, cpu).vm_stat_diff
