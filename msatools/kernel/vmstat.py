# SPDX-License-Identifier: LGPL-2.1-or-later

"""The counters of mm/vmstat.c, with the parts that CPUs have not yet passed on."""

from collections import Counter

import drgn
import numpy as np
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.zones import populated_zones


def vm_counters(
    reader: Reader, nodes_online: list[drgn.Object], findings: Findings
) -> Counter[str]:
    """
    Sum all node and zone counters, by the name of their enumerator.

    The kernel adds a CPU's changes to the counters only once they pass a
    threshold; /proc/vmstat and drgn's helpers read the counters alone.

    :return: Pages, but for the few items that count something else.
    """
    prog = reader.prog
    zones = _names(prog, "enum zone_stat_item", "NR_VM_ZONE_STAT_ITEMS")
    nodes = _names(prog, "enum node_stat_item", "NR_VM_NODE_STAT_ITEMS")
    totals = _global(reader, "vm_zone_stat", zones) + _global(
        reader, "vm_node_stat", nodes
    )
    cpus = list(for_each_possible_cpu(prog))
    for pgdat in nodes_online:
        for cpu in cpus:
            diff = per_cpu_ptr(pgdat.per_cpu_nodestats, cpu).vm_node_stat_diff
            _add(reader, totals, nodes, diff, findings)
    for zone in populated_zones(nodes_online):
        for cpu in cpus:
            _add(reader, totals, zones, _zone_diff(zone.object, cpu), findings)
    return totals


def _names(prog: drgn.Program, enum: str, end: str) -> list[str]:
    """List an enum's names in order, up to the one that gives their number."""
    names: dict[int, str] = {}
    count = 0
    for name, value in prog.type(enum).enumerators or ():
        if name == end:
            count = value
        else:
            names.setdefault(value, name)
    return [names[value] for value in range(count)]


def _global(reader: Reader, variable: str, names: list[str]) -> Counter[str]:
    address = reader.prog[variable].address_
    values = reader.words(address, len(names)).view(np.int64).tolist()
    return Counter(dict(zip(names, values, strict=True)))


def _zone_diff(zone: drgn.Object, cpu: int) -> drgn.Object:
    try:
        return per_cpu_ptr(zone.per_cpu_zonestats, cpu).vm_stat_diff
    except AttributeError:
        # Before Linux kernel commit 28f836b6777b ("mm/page_alloc: split per cpu
        # page lists and zone stats") (in v5.14).
        return per_cpu_ptr(zone.pageset, cpu).vm_stat_diff


def _add(
    reader: Reader,
    totals: Counter[str],
    names: list[str],
    diff: drgn.Object,
    findings: Findings,
) -> None:
    try:
        data = reader.read(diff.address_of_().value_(), len(names))
    except drgn.FaultError:
        findings.coverage["vmstat_cpus_unreadable"] += 1
        return
    for name, value in zip(names, np.frombuffer(data, "i1").tolist(), strict=True):
        if value:
            totals[name] += value
