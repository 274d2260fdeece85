# SPDX-License-Identifier: LGPL-2.1-or-later

"""Refines classes that struct page alone does not determine, for the scan.

These are pages on per-CPU free lists, of executed files, of block devices, and of
shared memory in the swap cache. Either the sums are corrected after the scan, or each
page during the scan.
"""

import itertools
import stat
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import cast

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.percpu import per_cpu_ptr
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingMemberError
from msatools.kernel.mm import Zone, pmd_order
from msatools.kernel.percpu import possible_cpus
from msatools.kernel.reader import LIST_HEAD, Reader, column, distinct, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import constant
from msatools.kernel.walks import list_words, tree_records
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.classify import (
    POINTER_BYTES,
    UNLISTED,
    Block,
    FreeLinks,
    Indices,
    free_rooms,
    inside_others,
    spread_orders,
    where,
)
from msatools.memory.sums import (
    FreeCandidates,
    ScanResult,
    nameless_swap,
    swapped_shmem,
)
from msatools.program.linear import vmemmap_base
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_type,
    find_variable,
    member_of,
)

# --- Finds the free pages on the per-CPU lists of each zone.
#
# The buddy allocator counts these pages as allocated and does not mark them
# (mm/page_alloc.c); /proc/meminfo has no row for them either.


_MAX_LISTED = 1 << 26
"""Maximum number of blocks on the lists: pages of an eighth of 2 TiB."""


class PcpList(Struct, frozen=True):
    """One list of free pages of one order."""

    head: int
    """Address of the list head."""

    first: int
    last: int
    """Addresses of the first and the last node on the list (``page->lru``)."""

    order: int


class PcpLists(Struct, frozen=True):
    """All per-CPU lists, and the kernel's count of their pages."""

    lists: list[PcpList]
    count: int | None
    """Sum of ``pcp->count``; ``None`` if some could not be read."""


def pcp_lists(reader: Reader, zones: list[Zone], losses: LossLog) -> PcpLists:
    """Read the heads of all per-CPU free lists that are not empty, with one read for
    each CPU and zone."""
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

    :param links: Finds these pages by their links where lists cannot be followed.
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
        # The size of list heads and of unknown nodes is 0: a walk ends there.
        rooms = self._rooms.tolist() + [0] * (len(self._lists) + 1)
        orders = np.full(pages, UNLISTED, np.intp)
        broken = 0
        for number, pcp_list in enumerate(self._lists):
            size = 1 << pcp_list.order
            taken: list[int] = []
            for starts, links in directions:
                node, following = starts[number], links()
                # In a damaged dump, a list may lead to smaller blocks of another list.
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
                    links = LIST_HEAD.unpack(reader.read_near(node, LIST_HEAD.size))
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


# --- Classifies page-cache mappings: plain files, executed files, block devices.


_VM_EXEC = 0x4


class _Offsets(Struct, frozen=True):
    """Byte offsets of the members that are read, in their structures."""

    i_mode: int
    i_data: int
    host: int
    i_mmap: int
    nrpages: int
    record: int
    """Bytes of ``struct inode`` to read, from its start."""

    rb: int
    """Offset of a VMA's node in its file's interval tree (i_mmap)."""

    vm_flags: int
    vma_record: int

    @classmethod
    def of(cls, prog: drgn.Program) -> "_Offsets":
        inode = find_type(prog, "struct inode")
        mapping = find_type(prog, "struct address_space")
        i_data = member_of(inode, "i_data").offset
        host = member_of(mapping, "host").offset
        i_mmap = member_of(mapping, "i_mmap").offset
        nrpages = member_of(mapping, "nrpages").offset
        vma = find_type(prog, "struct vm_area_struct")
        rb = member_of(vma, "shared").offset
        vm_flags = member_of(vma, "vm_flags").offset
        return cls(
            i_mode=member_of(inode, "i_mode").offset,
            i_data=i_data,
            host=host,
            i_mmap=i_mmap,
            nrpages=nrpages,
            record=max(
                member_of(inode, "i_mode").offset + 2,
                i_data + max(host, i_mmap, nrpages) + 8,
            ),
            rb=rb,
            vm_flags=vm_flags,
            vma_record=max(rb + 24, vm_flags + 8),
        )


def settle_cache(reader: Reader, result: ScanResult, losses: LossLog) -> None:
    """
    Move pages of executed files and block devices out of the class of plain files.

    A whole file counts as executed while a process maps part of it with permission to
    execute, as Solaris counts "exec and libs". The mappings come from the inode's
    i_mmap tree, so that the cost grows with the files in the page cache and not with
    the mappings of all processes.
    """
    mappings, keys, pages = result.cache.sum()
    unique, inverse = np.unique(mappings, return_inverse=True)
    cache = CacheClasses(reader)
    classes = cache.of(unique)
    for inode_losses in cache.take_losses().values():
        losses.add(inode_losses)
    for key in distinct(keys):
        for target in (PageClass.EXEC, PageClass.BLOCKDEV, PageClass.UNATTRIBUTED):
            chosen = (keys == key) & (classes[inverse] == target)
            result.move(int(key), PageClass.FILE, target, int(pages[chosen].sum()))


class CacheClasses:
    """Finds the classes of mappings from their inodes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._offsets = _Offsets.of(reader.prog)
        self._losses: dict[int, LossLog] = defaultdict(LossLog)

    def take_losses(self) -> dict[int, LossLog]:
        """Return and clear the losses by mapping."""
        losses, self._losses = self._losses, defaultdict(LossLog)
        return {mapping: losses[mapping] for mapping in sorted(losses)}

    def of(self, mappings: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        """Return the class of each mapping's pages; FILE if the inode is unreadable."""
        offsets = self._offsets
        classes = np.full(len(mappings), PageClass.FILE, np.uint8)
        inodes = mappings - np.uint64(offsets.i_data)
        records, readable = self._reader.read_records(inodes, offsets.record)
        for mapping in mappings[~readable].tolist():
            self._losses[mapping].lose(Loss.INODES)
        modes = column(records, offsets.i_mode, 2)
        hosts = column(records, offsets.i_data + offsets.host)
        roots = column(records, offsets.i_data + offsets.i_mmap)
        # Usually the mapping is its inode's i_data; a few file systems differ.
        for i in np.flatnonzero(readable & (hosts != inodes)):
            try:
                data = self._reader.read(int(hosts[i]) + offsets.i_mode, 2)
            except UNREADABLE:
                self._losses[int(mappings[i])].lose(Loss.INODES)
                continue
            modes[i] = int.from_bytes(data, "little")
        # perf sets the mapping of its ring buffers' pages to that of its file, which
        # has no page cache: these are kernel pages.
        counts = column(records, offsets.i_data + offsets.nrpages)
        classes[readable & (counts == 0)] = PageClass.UNATTRIBUTED
        block = stat.S_IFMT(0xFFFF) & modes == stat.S_IFBLK
        classes[block & (counts != 0)] = PageClass.BLOCKDEV
        for i in np.flatnonzero(readable & ~block & (roots != 0) & (counts != 0)):
            if self._is_executed(int(mappings[i])):
                classes[i] = PageClass.EXEC
        return classes

    def _is_executed(self, mapping: int) -> bool:
        """Return whether a file's i_mmap tree has an executable mapping."""
        losses = LossLog()
        vmas = tree_records(
            self._reader,
            mapping + self._offsets.i_mmap,
            self._offsets.rb,
            self._offsets.vma_record,
            losses,
            "a file's tree of mappings",
        )
        offset = self._offsets.vm_flags
        executed = any(unsigned(data, offset, 8) & _VM_EXEC for _, data in vmas)
        if losses.coverage:
            self._losses[mapping].add(losses)
        return executed


def blockdev_pages(reader: Reader, losses: LossLog) -> int | None:
    """
    Sum ``nrpages`` of all block devices; ``None`` if some are unreadable.

    The kernel computes ``Buffers`` of /proc/meminfo the same way (nr_blockdev_pages()
    in block/bdev.c).

    :raises MissingError: if the kernel has no block devices
    """
    prog = reader.prog
    inode = find_type(prog, "struct inode")
    nrpages = member_of(inode, "i_data").offset
    nrpages += member_of(find_type(prog, "struct address_space"), "nrpages").offset
    inodes = find_variable(prog, "blockdev_superblock").s_inodes.address_of_().value_()
    name = "the list of block devices"
    before = losses.about[name]
    node = member_of(inode, "i_sb_list").offset
    counts = list_words(reader, inodes, node, nrpages, losses, name)
    return sum(counts.tolist()) if losses.about[name] == before else None


# --- Resolves page classes during the scan, so that observers see the final ones.
#
# A scan without observers is faster: it corrects only the sums after the scan
# (settle_pcp(), settle_cache(), settle_swapcache()). FinalClasses reads the same
# structures before the scan, or when the scan reaches one of their pages.


class FinalClasses:
    """Sets the classes that struct page does not determine, block by block."""

    def __init__(
        self,
        reader: Reader,
        losses: LossLog,
        listed: ListedPages,
        links: FreeLinks | None = None,
    ) -> None:
        """
        :param listed: Pages on the per-CPU lists.
        :param links: Finds more pages on these lists, by the pages' links.
        """
        self._reader = reader
        self._listed = listed
        self._links = links
        self._cache = CacheClasses(reader)
        self._mappings = np.empty(0, np.uint64)
        self._classes = np.empty(0, np.uint8)
        self._swapped = swapped_shmem(reader, losses)
        self.reads = 0

    @property
    def know_swap(self) -> bool:
        """Whether swap cache pages are resolved; otherwise they are left as anon."""
        return self._swapped is not None

    def take_losses(self) -> dict[int, LossLog]:
        return self._cache.take_losses()

    def settle(self, block: Block, orphans: Indices) -> None:
        before = self._reader.reads
        self._settle_linked(block, orphans)
        self._settle_listed(block, orphans)
        self._settle_cache(block)
        self._settle_swap(block)
        self.reads += self._reader.reads - before

    def _settle_linked(self, block: Block, orphans: Indices) -> None:
        if self._links is None:
            return
        orphans = orphans[block.codes[orphans] == PageClass.UNATTRIBUTED]
        lru = block.layout.lru
        nexts, prevs = (
            block.column(offset)[orphans] for offset in (lru, lru + POINTER_BYTES)
        )
        linked = self._links.lead_to_others(block.nodes(orphans), nexts, prevs)
        # Struct page does not have the order: count one page.
        block.codes[orphans[linked]] = PageClass.FREE_PCP

    def _settle_listed(self, block: Block, orphans: Indices) -> None:
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self._listed.pfns, ends)
        if first == last or not len(orphans):
            return
        pages = (self._listed.pfns[first:last] - np.uint64(block.pfn)).astype(np.intp)
        orders = self._listed.orders[first:last]
        # A listed page that is in use was allocated since, or the list is damaged.
        free = np.isin(pages, orphans, assume_unique=True)
        rooms = free_rooms(block, orphans)
        indices = np.searchsorted(orphans, pages[free])
        free[free] = rooms[indices] >= np.left_shift(1, orders[free].astype(np.intp))
        block.codes[pages[free & (orders == 0)]] = PageClass.FREE_PCP
        for i in where(free & (orders != 0)):
            # int(): in the array's type, u8, 1 << 9 is 0.
            count = 1 << int(orders[i])
            block.codes[pages[i] : pages[i] + count] = PageClass.FREE_PCP

    def _settle_cache(self, block: Block) -> None:
        pages = where(block.codes == PageClass.FILE)
        if not len(pages):
            return
        mappings = block.mapping[pages]
        # Runs of the same file are far fewer than pages.
        new = np.ones(len(pages), np.bool_)
        new[1:] = mappings[1:] != mappings[:-1]
        starts = where(new)
        classes = self._classes_of(mappings[starts])
        lengths = np.diff(starts, append=len(pages))
        block.codes[pages] = np.repeat(classes, lengths)

    def _classes_of(self, mappings: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        unknown = distinct(mappings)
        unknown = unknown[~np.isin(unknown, self._mappings, assume_unique=True)]
        if len(unknown):
            indices = np.searchsorted(self._mappings, unknown)
            classes = self._cache.of(unknown)
            self._mappings = np.insert(self._mappings, indices, unknown)
            self._classes = np.insert(self._classes, indices, classes)
        rows = np.searchsorted(self._mappings, mappings)
        of_mappings: npt.NDArray[np.uint8] = self._classes[rows]
        return of_mappings

    def _settle_swap(self, block: Block) -> None:
        if self._swapped is None:
            return
        pages, entries = nameless_swap(block)
        block.codes[pages[self._swapped.have(entries)]] = PageClass.SHMEM
