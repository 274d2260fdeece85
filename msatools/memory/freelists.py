# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Free pages on the per-CPU lists of each zone.

The buddy allocator counts them as allocated and marks nothing in their struct
pages (mm/page_alloc.c); /proc/meminfo has no row for them either.
"""

import itertools
from dataclasses import dataclass

import drgn
import numpy as np
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.kernel.cpus import possible_cpus
from msatools.kernel.pagetables import pmd_order
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.zones import Zone
from msatools.memory.classes import PageClass
from msatools.memory.scan import ScanResult


@dataclass(frozen=True)
class PcpList:
    """One list of free pages of one order."""

    head: int
    """Address of the list's head."""

    first: int
    last: int
    order: int


@dataclass(frozen=True)
class PcpLists:
    """All per-CPU lists, and how many pages the kernel says are on them."""

    lists: list[PcpList]
    count: int | None
    """``None`` if some could not be read."""


def pcp_lists(reader: Reader, zones: list[Zone], findings: Findings) -> PcpLists:
    """Read the heads of all per-CPU free lists, one read a CPU and zone."""
    lists: list[PcpList] = []
    count = 0
    cpus = possible_cpus(reader.prog, findings)
    for zone, cpu in itertools.product(zones, cpus):
        try:
            held, heads = _read_heads(reader, _per_cpu_pages(zone.object, cpu))
        except drgn.FaultError:
            findings.coverage["pcp_lists_unreadable"] += 1
            continue
        count += held
        lists += heads
    lost = findings.coverage["pcp_lists_unreadable"] or findings.lost["nodes"]
    return PcpLists(lists, None if lost or not cpus else count)


def _per_cpu_pages(zone: drgn.Object, cpu: int) -> drgn.Object:
    """Find a zone's ``struct per_cpu_pages`` of a CPU."""
    try:
        return per_cpu_ptr(zone.per_cpu_pageset, cpu)
    except AttributeError:
        # Before Linux kernel commit 28f836b6777b ("mm/page_alloc: split per cpu
        # page lists and zone stats") (in v5.14).
        return per_cpu_ptr(zone.pageset, cpu).pcp.address_of_()


def _read_heads(reader: Reader, pcp: drgn.Object) -> tuple[int, list[PcpList]]:
    type_ = pcp.type_.type
    lists = type_.member("lists")
    count = type_.member("count")
    data = reader.read(pcp.value_(), drgn.sizeof(type_))
    held = int(np.frombuffer(data, "<i4", 1, count.offset)[0])
    links = np.frombuffer(data, "<u8", 2 * lists.type.length, lists.offset)
    migrate_types = reader.prog.constant("MIGRATE_PCPTYPES").value_()
    huge = pmd_order(reader.prog)
    heads = []
    for index, (first, last) in enumerate(links.reshape(-1, 2).tolist()):
        head = pcp.value_() + lists.offset + 16 * index
        if first not in (head, 0):
            order = _order(index, migrate_types, huge)
            heads.append(PcpList(head, first, last, order))
    return held, heads


def _order(index: int, migrate_types: int, huge: int) -> int:
    """
    Find the order of the pages on list number *index*.

    Orders 0 to PAGE_ALLOC_COSTLY_ORDER (3) have a list for each migrate type;
    the lists after them are for huge pages: Linux kernel commit 44042b449872
    ("mm/page_alloc: allow high-order pages to be stored on the per-cpu lists")
    (in v5.14).
    """
    order = index // migrate_types
    return order if order <= 3 else huge


def settle_pcp(result: ScanResult, pcp: PcpLists) -> tuple[int, int]:
    """
    Move the pages on the per-CPU lists to their class.

    :return: Pages moved, and lists that broke off before their end (on a live
        kernel, or in a damaged dump).
    """
    candidates = result.candidates
    if not candidates.nodes:
        return 0, len(pcp.lists)
    nodes = np.concatenate(candidates.nodes).tolist()
    nexts = np.concatenate(candidates.nexts).tolist()
    prevs = np.concatenate(candidates.prevs).tolist()
    codes = np.concatenate(candidates.codes).tolist()
    keys = np.concatenate(candidates.keys).tolist()
    index_of = {node: i for i, node in enumerate(nodes)}
    taken = bytearray(len(nodes))
    moved = broken = 0
    for pcp_list in pcp.lists:
        pages = 1 << pcp_list.order
        # The kernel takes from and adds to the front. On a running one that end has
        # changed since the scan, and what is behind is found from the other end.
        for node, links in ((pcp_list.first, nexts), (pcp_list.last, prevs)):
            while (i := index_of.get(node)) is not None and not taken[i]:
                taken[i] = True
                result.move(keys[i], codes[i], PageClass.FREE_PCP, pages)
                moved += pages
                node = links[i]
            if node == pcp_list.head:
                break
        else:
            broken += 1
    return moved, broken
