# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the free pages on the per-CPU lists of each zone.

The buddy allocator counts them as allocated and does not mark their struct pages
(mm/page_alloc.c); /proc/meminfo has no row for them either.
"""

import itertools
import struct
from collections.abc import Callable
from functools import cached_property
from typing import cast

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingMemberError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.enums import constant
from msatools.kernel.losses import Loss
from msatools.kernel.pagetables import pmd_order
from msatools.kernel.reader import Reader, distinct
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
from msatools.selfdesc.find import ask, drgn_lookups, member_of

_LIST_HEAD = struct.Struct("<QQ")
"""``struct list_head``: next, previous."""

_MAX_LISTED = 1 << 26
"""Maximum number of listed pages: an eighth of 2 TiB, more than CPUs keep."""


class PcpList(Struct, frozen=True):
    """One list of free pages of one order."""

    head: int
    """Address of the list head."""

    first: int
    last: int
    order: int


class PcpLists(Struct, frozen=True):
    """All per-CPU lists, and the kernel's count of their pages."""

    lists: list[PcpList]
    count: int | None
    """Sum of ``pcp->count``; ``None`` if some could not be read."""


def pcp_lists(reader: Reader, zones: list[Zone], losses: LossLog) -> PcpLists:
    """Read the heads of all per-CPU free lists, one read a CPU and zone."""
    lists: list[PcpList] = []
    count = 0
    cpus = possible_cpus(reader.prog, losses)
    for zone, cpu in itertools.product(zones, cpus):
        try:
            held, heads = _read_heads(reader, _per_cpu_pages(zone.object, cpu))
        except UNREADABLE:
            losses.lose(Loss.PCP_LISTS)
            continue
        count += held
        lists += heads
    unreadable = losses.coverage["pcp_lists_unreadable"]
    is_partial = unreadable or losses.lost[Loss.NODES.value] or not cpus
    return PcpLists(lists, None if is_partial else count)


def _per_cpu_pages(zone: drgn.Object, cpu: int) -> drgn.Object:
    """Return a zone's ``struct per_cpu_pages`` of a CPU."""
    try:
        with drgn_lookups:
            return ask(per_cpu_ptr, zone.per_cpu_pageset, cpu)
    except MissingMemberError:
        # Before Linux kernel commit 28f836b6777b ("mm/page_alloc: split per cpu
        # page lists and zone stats") (in v5.14).
        return ask(per_cpu_ptr, zone.pageset, cpu).pcp.address_of_()


def _read_heads(reader: Reader, pcp: drgn.Object) -> tuple[int, list[PcpList]]:
    type_ = pcp.type_.type
    lists = member_of(type_, "lists")
    count = member_of(type_, "count")
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
    Return the order of the pages on list number *index*.

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

    :param links: Finds such pages by their links if lists cannot be followed.
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
    for key, code in itertools.product(distinct(keys), distinct(codes)):
        moved = sizes[(keys == key) & (codes == code)].sum()
        result.move(int(key), int(code), PageClass.FREE_PCP, int(moved))
    return int(sizes.sum()), broken


class _Lists:
    """Follows the per-CPU lists through the candidates that a scan collected."""

    def __init__(self, candidates: FreeCandidates, lists: list[PcpList]) -> None:
        self._lists = lists
        (self._nodes,), (self._rooms,) = candidates.nodes, candidates.rooms
        (self._nexts,), (self._prevs,) = candidates.nexts, candidates.prevs
        heads = np.array([pcp_list.head for pcp_list in lists], np.uint64)
        self._indices = _NodeIndices(np.concatenate((self._nodes, heads)))

    @cached_property
    def _following(self) -> list[int]:
        return self._indices.of(self._nexts)

    @cached_property
    def _preceding(self) -> list[int]:
        return self._indices.of(self._prevs)

    def follow(self) -> tuple[Indices, int]:
        """
        Follow all lists.

        :return: Order of each candidate's list, ``UNLISTED`` if it is on none; and the
            number of broken lists.
        """
        firsts = np.array([pcp_list.first for pcp_list in self._lists], np.uint64)
        lasts = np.array([pcp_list.last for pcp_list in self._lists], np.uint64)
        # The kernel adds and removes pages at the front. On a running kernel the front
        # has changed since the scan; the other pages are found from the tail.
        directions: tuple[tuple[list[int], Callable[[], list[int]]], ...] = (
            (self._indices.of(firsts), lambda: self._following),
            (self._indices.of(lasts), lambda: self._preceding),
        )
        pages = len(self._nodes)
        # List heads, and links to unknown nodes, have no room: a walk ends there.
        rooms = self._rooms.tolist() + [0] * (len(self._lists) + 1)
        orders = np.full(pages, UNLISTED, np.intp)
        broken = 0
        for number, pcp_list in enumerate(self._lists):
            size = 1 << pcp_list.order
            taken: list[int] = []
            for starts, links in directions:
                node, following = starts[number], links()
                # Too little room: a damaged list leads to another's smaller blocks.
                while rooms[node] >= size:
                    rooms[node] = 0
                    taken.append(node)
                    node = following[node]
                if node == pages + number:
                    break
            else:
                broken += 1
            orders[taken] = pcp_list.order
        return orders, broken

    def add_linked(
        self, orders: Indices, may_be: npt.NDArray[np.bool_], links: FreeLinks
    ) -> None:
        """Set the order of pages whose links alone show that they were on a list."""
        ends = [*(pcp_list.order for pcp_list in self._lists), UNLISTED]
        known = np.concatenate((orders, np.array(ends, np.intp)))
        ways = (self._following, self._preceding)
        spread = spread_orders(known, ways)[: len(orders)]
        # A block of unknown or impossible order counts as one page.
        spread[np.left_shift(1, np.maximum(spread, 0)) > self._rooms] = 0
        left = may_be & (orders == UNLISTED)
        left &= links.lead_to_others(self._nodes, self._nexts, self._prevs)
        orders[left] = np.maximum(spread[left], 0)
        orders[inside_others(links.pfns(self._nodes), orders)] = UNLISTED


class _NodeIndices:
    """Maps addresses of list nodes to their indices in an array."""

    def __init__(self, nodes: npt.NDArray[np.uint64]) -> None:
        self._order = np.argsort(nodes, kind="stable")
        self._nodes = nodes[self._order]

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, links: npt.NDArray[np.uint64]) -> list[int]:
        """Return the index of each link's node; the number of nodes if not found."""
        rows = np.minimum(self._nodes.searchsorted(links), len(self) - 1)
        known = self._nodes[rows] == links
        return cast("list[int]", np.where(known, self._order[rows], len(self)).tolist())


class ListedPages(Struct, frozen=True):
    """Pages on the per-CPU lists, regardless of their struct pages."""

    pfns: npt.NDArray[np.uint64]
    """First page of each block, ascending."""

    orders: npt.NDArray[np.uint8]
    broken: int
    """Number of lists that could not be followed to their end."""


def listed_pages(reader: Reader, layout: PageLayout, pcp: PcpLists) -> ListedPages:
    """
    Follow the per-CPU lists before the struct pages are scanned.

    :func:`settle_pcp` follows them after the scan, without reads. This function is for
    observers, which need the class of a page when it is scanned.
    """
    base = vmemmap_base(reader.prog) + layout.lru
    orders: dict[int, int] = {}
    broken = 0
    for pcp_list in pcp.lists:
        # From both ends, as in settle_pcp().
        for node, side in ((pcp_list.first, 0), (pcp_list.last, 1)):
            while node != pcp_list.head and len(orders) < _MAX_LISTED:
                pfn, rest = divmod(node - base, layout.size)
                if rest or pfn < 0 or pfn in orders or pfn % (1 << pcp_list.order):
                    break
                try:
                    links = _LIST_HEAD.unpack(reader.read_near(node, _LIST_HEAD.size))
                except UNREADABLE:
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
