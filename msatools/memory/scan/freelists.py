# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Free pages on the per-CPU lists of each zone.

The buddy allocator counts them as allocated and marks nothing in their struct
pages (mm/page_alloc.c); /proc/meminfo has no row for them either.
"""

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr

from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.enums import constant
from msatools.kernel.losses import Loss
from msatools.kernel.pagetables import pmd_order
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.zones import Zone
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Indices, where
from msatools.memory.pages.freelinks import (
    UNLISTED,
    FreeLinks,
    inside_others,
    spread_orders,
)
from msatools.memory.pages.layout import PageLayout
from msatools.memory.scan.result import FreeCandidates, ScanResult

_LIST_HEAD = struct.Struct("<QQ")
"""``struct list_head``: next, previous."""

_MAX_LISTED = 1 << 26
"""More than what all CPUs keep back: an eighth of 2 TiB."""


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


def pcp_lists(reader: Reader, zones: list[Zone], losses: LossLog) -> PcpLists:
    """Read the heads of all per-CPU free lists, one read a CPU and zone."""
    lists: list[PcpList] = []
    count = 0
    cpus = possible_cpus(reader.prog, losses)
    for zone, cpu in itertools.product(zones, cpus):
        try:
            held, heads = _read_heads(reader, _per_cpu_pages(zone.object, cpu))
        except drgn.FaultError:
            losses.lose(Loss.PCP_LISTS)
            continue
        count += held
        lists += heads
    lost = losses.coverage["pcp_lists_unreadable"] or losses.lost[Loss.NODES.value]
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
    migrate_types = constant(reader.prog, "MIGRATE_PCPTYPES")
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


def settle_pcp(
    result: ScanResult, pcp: PcpLists, links: FreeLinks | None = None
) -> tuple[int, int]:
    """
    Move the pages on the per-CPU lists to their class.

    :param links: Finds those pages where the lists cannot be followed.
    :return: Pages moved, and lists that broke off before their end (on a live
        kernel, or in a damaged dump).
    """
    candidates = result.candidates
    if not candidates.nodes:
        return 0, len(pcp.lists)
    candidates.join()
    lists = _Lists(candidates, pcp.lists)
    orders, broken = lists.follow()
    (codes,), (keys,) = candidates.codes, candidates.keys
    if links is not None:
        lists.add_linked(orders, codes == PageClass.UNATTRIBUTED, links)
    chosen = where(orders != UNLISTED)
    sizes = np.left_shift(1, orders[chosen])
    codes, keys = codes[chosen], keys[chosen]
    for key, code in itertools.product(np.unique(keys), np.unique(codes)):
        moved = sizes[(keys == key) & (codes == code)].sum()
        result.move(int(key), int(code), PageClass.FREE_PCP, int(moved))
    return int(sizes.sum()), broken


class _Lists:
    """The per-CPU lists in what a scan has found of them."""

    def __init__(self, candidates: FreeCandidates, lists: list[PcpList]) -> None:
        self._lists = lists
        (self._nodes,), (self._rooms,) = candidates.nodes, candidates.rooms
        (self._nexts,), (self._prevs,) = candidates.nexts, candidates.prevs
        heads = np.array([one.head for one in lists], np.uint64)
        self._places = _Places(np.concatenate((self._nodes, heads)))

    @cached_property
    def _following(self) -> list[int]:
        return self._places.of(self._nexts)

    @cached_property
    def _preceding(self) -> list[int]:
        return self._places.of(self._prevs)

    def follow(self) -> tuple[Indices, int]:
        """
        Follow all lists.

        :return: By candidate, the order of the list that it is on, if it is; and how
            many lists broke off.
        """
        firsts = np.array([one.first for one in self._lists], np.uint64)
        lasts = np.array([one.last for one in self._lists], np.uint64)
        # The kernel takes from and adds to the front. On a running one that end has
        # changed since the scan, and what is behind is found from the other end.
        ways: tuple[tuple[list[int], Callable[[], list[int]]], ...] = (
            (self._places.of(firsts), lambda: self._following),
            (self._places.of(lasts), lambda: self._preceding),
        )
        pages = len(self._nodes)
        # Behind those of the pages: none where a list ends, or leads elsewhere.
        rooms = self._rooms.tolist() + [0] * (len(self._lists) + 1)
        orders = np.full(pages, UNLISTED, np.intp)
        broken = 0
        for number, pcp_list in enumerate(self._lists):
            size = 1 << pcp_list.order
            taken: list[int] = []
            for ends, links in ways:
                place, following = ends[number], links()
                # Too little room: a damaged list leads to another's smaller blocks.
                while rooms[place] >= size:
                    rooms[place] = 0
                    taken.append(place)
                    place = following[place]
                if place == pages + number:
                    break
            else:
                broken += 1
            orders[taken] = pcp_list.order
        return orders, broken

    def add_linked(
        self, orders: Indices, may_be: npt.NDArray[np.bool_], links: FreeLinks
    ) -> None:
        """Set the order of pages that only their links show to be listed."""
        ends = [*(one.order for one in self._lists), UNLISTED]
        known = np.concatenate((orders, np.array(ends, np.intp)))
        ways = (self._following, self._preceding)
        found = spread_orders(known, ways)[: len(orders)]
        # At least it is one page.
        found[np.left_shift(1, np.maximum(found, 0)) > self._rooms] = 0
        left = may_be & (orders == UNLISTED)
        left &= links.lead_to_others(self._nodes, self._nexts, self._prevs)
        orders[left] = np.maximum(found[left], 0)
        orders[inside_others(links.pfns(self._nodes), orders)] = UNLISTED


class _Places:
    """Where nodes of lists are in an array of their addresses."""

    def __init__(self, nodes: npt.NDArray[np.uint64]) -> None:
        self._order = np.argsort(nodes, kind="stable")
        self._nodes = nodes[self._order]

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, links: npt.NDArray[np.uint64]) -> list[int]:
        """Return the index of the node of each link; the number of nodes if none."""
        found = np.minimum(self._nodes.searchsorted(links), len(self) - 1)
        known = self._nodes[found] == links
        return cast(
            "list[int]", np.where(known, self._order[found], len(self)).tolist()
        )


@dataclass(frozen=True)
class ListedPages:
    """Pages on the per-CPU lists, whatever their struct pages say."""

    pfns: npt.NDArray[np.uint64]
    """The first page of each entry, ascending."""

    orders: npt.NDArray[np.uint8]
    broken: int
    """Lists that broke off before their end."""


def listed_pages(reader: Reader, layout: PageLayout, pcp: PcpLists) -> ListedPages:
    """
    Follow the per-CPU lists before the struct pages are scanned.

    :func:`settle_pcp` does so afterwards, and without a read; this is for those who
    must know a page's class as it is scanned.
    """
    base = vmemmap_base(reader.prog) + layout.lru
    orders: dict[int, int] = {}
    broken = 0
    for pcp_list in pcp.lists:
        # From both ends, as there.
        for node, side in ((pcp_list.first, 0), (pcp_list.last, 1)):
            while node != pcp_list.head and len(orders) < _MAX_LISTED:
                pfn, rest = divmod(node - base, layout.size)
                if rest or pfn < 0 or pfn in orders or pfn % (1 << pcp_list.order):
                    break
                try:
                    links = _LIST_HEAD.unpack(reader.read_near(node, _LIST_HEAD.size))
                except drgn.FaultError:
                    break
                orders[pfn] = pcp_list.order
                node = links[side]
            if node == pcp_list.head:
                break
        else:
            broken += 1
    pfns = np.array(sorted(orders), np.uint64)
    return ListedPages(
        pfns, np.array([orders[pfn] for pfn in pfns.tolist()], np.uint8), broken
    )
