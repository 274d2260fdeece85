# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the owners of pages whose struct page does not record an owner.

Reads pipes, sockets and hot-plugged memory, and combines them with the pages that
:mod:`msatools.memory.areas`, :mod:`msatools.memory.owned_pages` and others find.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.files import OpenFiles, processes
from msatools.kernel.mm import PageTables, Zone, pmd_order
from msatools.kernel.reader import (
    Addresses,
    Reader,
    column,
    distinct,
    first_of_each,
    unsigned,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import list_records, tree_records, xarray_entries
from msatools.memory.areas import (
    NO_AREAS,
    PercpuPages,
    VmallocAreas,
    cached_stacks,
    freed_stacks,
    has_vmapped_stacks,
    kernel_stacks,
    percpu_pages,
    vmalloc_areas,
)
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.device_pages import dma_pages, request_pages
from msatools.memory.dma_bufs import dma_bufs
from msatools.memory.global_pages import global_pages
from msatools.memory.memmap import MemmapRange, pages_per_section
from msatools.memory.owned_pages import (
    NO_PFNS,
    PFN_BITS,
    Pfns,
    mempool_pages,
    ring_pages,
    tracing_pages,
)
from msatools.program.arch import table_format
from msatools.program.linear import vmemmap_base
from msatools.selfdesc.find import (
    drgn_lookups,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Finds pages that hold data of pipes (fs/pipe.c) and sockets (net/core/skbuff.c).
#
# No kernel counter includes these pages. Socket buffers themselves are slab objects;
# only their page fragments are found here.


_MAX_RING = 1 << 20


def pipe_pages(reader: Reader, files: OpenFiles, losses: LossLog) -> Addresses:
    """
    Return the addresses of the struct pages in all open pipes.

    A page that was spliced from a file keeps the file's class while the file has it.
    After a truncation only the pipe has the page.
    """
    prog = reader.prog
    pipe = find_type(prog, "struct pipe_inode_info")
    buffer = find_type(prog, "struct pipe_buffer")
    page, ops = (member_of(buffer, name).offset // 8 for name in ("page", "ops"))
    # Anonymous pipes have their own file operations since v6.15.
    pipes = files.private_data(("pipeanon_fops", "pipefifo_fops"))
    records, readable = reader.read_records(pipes, drgn.sizeof(pipe))
    parts = _spare_pages(pipe, records)
    rings = column(records, member_of(pipe, "ring_size").offset, 4)
    bufs = column(records, member_of(pipe, "bufs").offset)
    # ring_size is a power of two: the kernel masks indices with it.
    possible = (rings & (rings - np.uint64(1))) == 0
    possible &= readable & (bufs != 0) & (rings != 0) & (rings <= _MAX_RING)
    losses.lose(Loss.PIPES, count=int(np.count_nonzero(~possible)))
    for address, ring in zip(
        bufs[possible].tolist(), rings[possible].tolist(), strict=True
    ):
        try:
            words = reader.words(address, ring * (drgn.sizeof(buffer) // 8))
        except UNREADABLE:
            losses.lose(Loss.PIPES)
            continue
        words = words.reshape(ring, drgn.sizeof(buffer) // 8)
        # A consumed buffer keeps its page pointer but not its ops.
        parts.append(words[words[:, ops] != 0, page])
    pages = np.concatenate(parts)
    used: Addresses = pages[pages != 0]
    return used


def _spare_pages(pipe: drgn.Type, records: npt.NDArray[np.uint8]) -> list[Addresses]:
    """Return the pages that pipes keep for the next write."""
    if not pipe.has_member("prealloc"):
        # ``tmp_page`` is an array of two pages since v6.15, a single page before.
        spare = member_of(pipe, "tmp_page")
        offsets = range(spare.offset, spare.offset + drgn.sizeof(spare.type), 8)
        return [column(records, offset) for offset in offsets]
    # ``prealloc`` is a stack, since v7.3; entries above its count are stale.
    stack = member_of(pipe, "prealloc")
    pages, count = (member_of(stack.type, name) for name in ("pages", "count"))
    counts = column(records, stack.offset + count.offset, drgn.sizeof(count.type))
    return [
        column(records, stack.offset + pages.offset + 8 * number)[counts > number]
        for number in range(drgn.sizeof(pages.type) // 8)
    ]


_QUEUES = ("sk_receive_queue", "sk_write_queue", "sk_error_queue")


def socket_pages(reader: Reader, files: OpenFiles, losses: LossLog) -> Addresses:
    """
    Return the addresses of the struct pages of all open sockets' fragments.

    These are the fragments of queued buffers, and the page_frag of each socket and
    process.

    :raises MissingError: if the kernel has no sockets or its types lack them
    """
    skbs = _Skbs(reader, losses)
    sockets = files.private_data(("socket_file_ops",))
    sk = member_of(find_type(reader.prog, "struct socket"), "sk").offset
    records, readable = reader.read_records(sockets, sk + 8)
    losses.lose(Loss.SOCKETS, count=int(np.count_nonzero(~readable)))
    socks = distinct(column(records, sk))
    skbs.add_queues(socks[socks != 0])
    # A page_frag of a thread other than the leader is not included.
    kept = processes(reader, losses).frag_pages
    pages = np.concatenate((np.array(skbs.pages, np.uint64), kept))
    return distinct(pages[pages != 0])


class _SkbLayout(Struct, frozen=True):
    """Offsets in a ``struct sk_buff``, and in its ``struct skb_shared_info``."""

    bytes: int
    """Bytes of a ``struct sk_buff`` to read."""

    end: int
    head: int
    shared_bytes: int
    nr_frags: int
    frag_list: int
    frags: int
    frag_words: int


def _skb_layout(prog: drgn.Program) -> _SkbLayout:
    skb = find_type(prog, "struct sk_buff")
    end, head = (member_of(skb, name).offset for name in ("end", "head"))
    shared = find_type(prog, "struct skb_shared_info")
    frags = member_of(shared, "frags")
    return _SkbLayout(
        bytes=max(end, head) + 8,
        end=end,
        head=head,
        shared_bytes=drgn.sizeof(shared),
        nr_frags=member_of(shared, "nr_frags").offset,
        frag_list=member_of(shared, "frag_list").offset,
        frags=frags.offset,
        # The first member of a fragment points to its page: bv_page, netmem since v6.9.
        frag_words=drgn.sizeof(frags.type.type) // 8,
    )


class _Skbs:
    """Collects the page fragments of socket buffers."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        prog = reader.prog
        self.pages: list[int] = []
        self._reader = reader
        self._losses = losses
        sock = find_type(prog, "struct sock")
        self._prot = offset_of(sock, "__sk_common.skc_prot")
        self._tcp = _addresses(prog, ("tcp_prot", "tcpv6_prot"))
        self._queues = [member_of(sock, name).offset for name in _QUEUES]
        self._rtx = member_of(sock, "tcp_rtx_queue").offset
        self._frag = offset_of(sock, "sk_frag.page")
        self._sock_size = max(*self._queues, self._rtx, self._prot, self._frag) + 16

    @cached_property
    def _skb(self) -> "_SkbLayout":
        return _skb_layout(self._reader.prog)

    def add_queues(self, socks: Addresses) -> None:
        records, readable = self._reader.read_records(socks, self._sock_size)
        unreadable = int(np.count_nonzero(~readable))
        self._losses.lose(Loss.SOCKETS, count=unreadable)
        self.pages += column(records, self._frag).tolist()
        for offset in self._queues:
            firsts = column(records, offset)
            heads = socks + np.uint64(offset)
            for head in heads[(firsts != heads) & (firsts != 0)].tolist():
                self._add_all(self._list(head))
        tcp = np.isin(column(records, self._prot), self._tcp)
        if not tcp.any():
            return
        tcp_sock = find_type(self._reader.prog, "struct tcp_sock")
        unordered = member_of(tcp_sock, "out_of_order_queue").offset
        # The retransmit queue and the out-of-order queue; most are empty.
        for offset in (self._rtx, unordered):
            roots = socks[tcp] + np.uint64(offset)
            firsts, known = self._reader.words_near(roots)
            for root in roots[(firsts != 0) | ~known].tolist():
                self._add_all(self._tree(root))

    def _list(self, head: int) -> Iterator[bytes]:
        for _, data in list_records(
            self._reader, head, 0, self._skb.bytes, self._losses, "a socket's queue"
        ):
            yield data

    def _tree(self, root: int) -> Iterator[bytes]:
        for _, data in tree_records(
            self._reader, root, 0, self._skb.bytes, self._losses, "a socket's queue"
        ):
            yield data

    def _add_all(self, skbs: Iterator[bytes]) -> None:
        for skb in skbs:
            try:
                self._add(skb)
            except UNREADABLE:
                self._losses.lose(Loss.SOCKET_BUFFERS)

    def _add(self, skb: bytes) -> None:
        """Add the fragments of a buffer and of the buffers on its frag_list."""
        layout = self._skb
        todo, seen = [skb], set[int]()
        while todo:
            skb = todo.pop()
            head = unsigned(skb, layout.head, 8)
            end = unsigned(skb, layout.end, 4)
            shared = self._reader.read(head + end, layout.shared_bytes)
            count = shared[layout.nr_frags]
            words = np.frombuffer(shared, np.uint64, offset=layout.frags)
            pages = words[:: layout.frag_words][:count]
            # Bit 0 marks device memory (net_iov), which has no struct page.
            self.pages += pages[pages & np.uint64(1) == 0].tolist()
            chained = unsigned(shared, layout.frag_list, 8)
            while chained and chained not in seen:
                seen.add(chained)
                todo.append(self._reader.read(chained, layout.bytes))
                chained = unsigned(todo[-1], 0, 8)  # skb->next


def _addresses(prog: drgn.Program, names: Iterable[str]) -> list[int]:
    """Return the addresses of those variables in *names* that this kernel has."""
    addresses = []
    for name in names:
        with suppress(MissingError):
            addresses.append(int(find_variable(prog, name).address_))
    return addresses


# --- Finds the memmap of hot-plugged memory blocks that is in the block itself.
#
# With memory_hotplug.memmap_on_memory (mm/memory_hotplug.c), the first pages of a block
# hold its memmap, and were never given to the page allocator.


_MOST_BLOCKS = 1 << 20
_MOST_PAGES = 1 << 20
"""Upper bound of the pages of a block's memmap: enough for a block of 256 GiB."""


def self_hosted_pages(reader: Reader, losses: LossLog) -> Pfns:
    """Return the pfns of all pages that hold the memmap of their own block."""
    prog = reader.prog
    try:
        with drgn_lookups:
            root = find_variable(prog, "memory_blocks").address_
            type_ = find_type(prog, "struct memory_block")
    except MissingError:
        return NO_PFNS  # CONFIG_MEMORY_HOTPLUG=n
    # nr_vmemmap_pages until 1a8c64e11043 ("mm/memory_hotplug: embed vmem_altmap details
    # in memory block") (in v6.6); neither member before v5.14.
    has_altmap = type_.has_member("altmap")
    if not has_altmap and not type_.has_member("nr_vmemmap_pages"):
        return NO_PFNS
    entries = xarray_entries(reader, root, losses, "the blocks of memory")
    each = pages_per_section(prog)
    parts = [NO_PFNS]
    # The bound is generous: the memmap is a small part of memory.
    left = reader.most(int(find_variable(prog, "PAGE_SIZE").value_()))
    addresses = sorted({entry for _, _, entry in entries})
    losses.lose(Loss.OWNERS, count=max(len(addresses) - _MOST_BLOCKS, 0))
    for address in addresses[:_MOST_BLOCKS]:
        block = drgn.Object(prog, type_, address=address)
        try:
            if has_altmap:
                count = int(block.altmap.free) if block.altmap else 0
            else:
                count = int(block.nr_vmemmap_pages)
            first = int(block.start_section_nr) * each
        except UNREADABLE as error:
            losses.lose(Loss.OWNERS, f"cannot read a block of memory: {error}")
            continue
        if not 0 <= count <= min(_MOST_PAGES, left) or first >> PFN_BITS:
            text = f"a block of memory cannot have {count:,} pages of memmap"
            losses.lose(Loss.OWNERS, text)
            continue
        left -= count
        parts.append(np.arange(first, first + count, dtype=np.uint64))
    return np.concatenate(parts)


# --- Structures of the kernel that own pages, and the pages of each.


_CLAIM_BITS = 64 - PFN_BITS
"""Bits below the pfn in a word that is sorted: for the claim's number and code."""

_CODE_BITS = 8
_MAX_CLAIMS = 1 << _CLAIM_BITS - _CODE_BITS
"""Upper bound of the number of claims; the collectors below make about 20."""


class OwnedPages(Struct, frozen=True):
    """Pages claimed by owners and their class codes, ascending and unique by pfn."""

    pfns: npt.NDArray[np.uint64]
    codes: npt.NDArray[np.uint8]


class Owners(Struct):
    """Pages claimed by their owners, and numbers that the checks need."""

    owned: list[tuple[int, Pfns]] = field(default_factory=list)
    """Class code and pages of each claim; the first claim to a page wins."""

    areas: VmallocAreas = NO_AREAS
    stack_pages: int = 0
    """Pages of each kernel stack; 0 without vmapped stacks."""

    cached_stacks: int = 0
    """Number of stacks of exited tasks that CPUs cache for the next fork."""

    freed_stacks: Callable[[], int] = lambda: 0
    """Counts the stacks of exited tasks that wait for an RCU grace period to be freed;
    a call reads each stack."""

    direct_stacks: bool = False
    """Whether kernel stacks are not areas of vmalloc."""

    percpu: PercpuPages = field(default_factory=lambda: PercpuPages([], 0, 0))
    _files: OpenFiles | None = None

    def files(self, reader: Reader, losses: LossLog) -> OpenFiles:
        """Return the open files; they are collected only once."""
        if self._files is None:
            self._files = OpenFiles(reader, losses)
        return self._files

    def claim(self, code: int, pfns: Pfns) -> None:
        """Claim pages for a class; impossible pfns of a damaged dump are dropped.

        :raises DamagedDataError: if there are more than :data:`_MAX_CLAIMS` claims
        """
        if len(self.owned) >= _MAX_CLAIMS:
            raise DamagedDataError(f"more than {_MAX_CLAIMS:,} kinds of owners")
        self.owned.append((code, pfns[pfns < np.uint64(1 << PFN_BITS)]))

    def pages(self) -> OwnedPages:
        """Return all claimed pages with the class of the first claim to each."""
        words = [np.empty(0, np.uint64)]
        for number, (code, pfns) in enumerate(self.owned):
            # Pfn, claim and code in one word: sorting takes half the time.
            claim = np.uint64(number << _CODE_BITS | code)
            words.append(pfns << np.uint64(_CLAIM_BITS) | claim)
        claims = np.sort(np.concatenate(words), kind="stable")
        pfns = claims >> np.uint64(_CLAIM_BITS)
        first = first_of_each(pfns)
        return OwnedPages(pfns[first], claims[first].astype(np.uint8))


class OwnerSearch:
    """Finds the owners of single pages; stops collecting once an owner is found."""

    def __init__(
        self,
        reader: Reader,
        layout: PageLayout,
        ranges: list[MemmapRange],
        losses: LossLog,
    ) -> None:
        self.owners = Owners()
        """The owners collected so far."""

        self._claims = _Claims(self.owners, reader, layout, ranges, losses).all()

    def find(self, pfns: Sequence[int]) -> int | None:
        """Return the class that an owner gives a page; ``None`` if none claims it.

        :param pfns: The page, and the head of its compound page.
        """
        looked = 0
        while True:
            for code, owned in self.owners.owned[looked:]:
                if any((owned == np.uint64(pfn)).any() for pfn in pfns):
                    return code
            looked = len(self.owners.owned)
            if next(self._claims, _NO_MORE) is _NO_MORE:
                return None


_NO_MORE = object()


def collect_owners(
    reader: Reader,
    layout: PageLayout,
    ranges: list[MemmapRange],
    losses: LossLog,
) -> Owners:
    """Collect the pages of all owners; note each owner that cannot be read."""
    owners = Owners()
    for _ in _Claims(owners, reader, layout, ranges, losses).all():
        pass
    return owners


class _Claims(Struct, frozen=True):
    """Claims the pages of all owners, one kind of owner after the other."""

    owners: Owners
    reader: Reader
    layout: PageLayout
    ranges: list[MemmapRange]
    losses: LossLog

    def all(self) -> Iterator[None]:
        """Claim the pages of all kinds of owners; yield after each kind."""
        for claim in (
            self.vmalloc,
            self.direct_stacks,
            self.percpu,
            self.page_tables,
            self.pipes,
            self.sockets,
            self.huge_zero,
            self.rings,
            self.requests,
            self.mempools,
            self.tracing,
            self.dma,
            self.globals,
            self.dma_bufs,
            self.vmap,
            self.memmap,
        ):
            try:
                with drgn_lookups:
                    claim()
            except LOST as error:
                what = claim.__name__.replace("_", " ")
                text = f"{what}: cannot be attributed: {error}"
                self.losses.lose(Loss.OWNERS, text, about=what)
            yield

    @property
    def files(self) -> OpenFiles:
        """The open files of all tasks."""
        return self.owners.files(self.reader, self.losses)

    def claim_structs(self, code: int, pages: Addresses) -> None:
        """Claim pages by the addresses of their struct pages."""
        self.owners.claim(code, pfns_of(pages, self.reader.prog, self.layout))

    def memmap(self) -> None:
        """Claim the memmap of hot-plugged memory; boot memory's is PG_reserved."""
        plugged = [part for part in self.ranges if not part.early]
        if not plugged or table_format(self.reader.prog) is None:
            return
        # Reserved like the memmap of boot memory: never given to the page allocator.
        self.owners.claim(
            PageClass.RESERVED, self_hosted_pages(self.reader, self.losses)
        )
        tables = PageTables(self.reader, self.losses)
        step = find_variable(self.reader.prog, "PAGE_SIZE").value_()
        pfns = (
            tables.pfn(address)
            for part in plugged
            for address in range(part.address, part.address_end(self.layout.size), step)
        )
        mapped = [pfn for pfn in pfns if pfn is not None]
        self.owners.claim(PageClass.MEMMAP, np.array(mapped, np.uint64))

    def vmalloc(self) -> None:
        areas = self.owners.areas = vmalloc_areas(self.reader, self.losses)
        stacks = kernel_stacks(self.reader, areas)
        self.owners.stack_pages = int(areas.lengths()[stacks].max(initial=0))
        self.owners.cached_stacks = cached_stacks(self.reader.prog, self.losses)
        self.owners.freed_stacks = partial(
            freed_stacks, self.reader, areas.start[stacks]
        )
        pfns = pfns_of(areas.pages, self.reader.prog, self.layout)
        is_stack, mapped = stacks[areas.rows], areas.mapped[areas.rows]
        self.owners.claim(PageClass.STACKS, pfns[is_stack])
        self.owners.claim(PageClass.VMALLOC, pfns[~is_stack & ~mapped])

    def direct_stacks(self) -> None:
        if not has_vmapped_stacks(self.reader.prog):
            # Imported here, as this takes 10 ms and most kernels have vmapped stacks.
            from msatools.tasks.stacks import direct_stacks

            self.owners.direct_stacks = True
            self.owners.claim(PageClass.STACKS, direct_stacks(self.reader, self.losses))

    def percpu(self) -> None:
        if table_format(self.reader.prog) is not None:
            self.owners.percpu = percpu_pages(
                self.reader, PageTables(self.reader, self.losses), self.losses
            )
            self.owners.claim(
                PageClass.PERCPU, np.array(self.owners.percpu.pfns, np.uint64)
            )

    def page_tables(self) -> None:
        if table_format(self.reader.prog) is None:
            self.losses.note(
                "no-page-tables",
                "this architecture's page tables are not read: the kernel's own and "
                "percpu memory are unattributed",
            )
            return
        tables = PageTables(self.reader, self.losses)
        own = tables.kernel_tables() | tables.user_top_tables(self._top_tables)
        self.owners.claim(
            PageClass.PAGE_TABLES_OWN, np.fromiter(own, np.uint64, len(own))
        )

    def _top_tables(self) -> list[int]:
        # Imported here, as this takes 10 ms and x86-64 does not need it.
        from msatools.tasks.identity import address_spaces

        return [space.top for space in address_spaces(self.reader, self.losses)]

    def pipes(self) -> None:
        pages = pipe_pages(self.reader, self.files, self.losses)
        self.claim_structs(PageClass.PIPES, pages)

    def sockets(self) -> None:
        pages = socket_pages(self.reader, self.files, self.losses)
        self.claim_structs(PageClass.SOCKETS, pages)

    def rings(self) -> None:
        pages = ring_pages(self.reader, self.files, self.losses)
        self.owners.claim(PageClass.RINGS, pages)

    def requests(self) -> None:
        self.owners.claim(
            PageClass.REQUESTS, request_pages(self.reader, self.layout, self.losses)
        )

    def mempools(self) -> None:
        self.owners.claim(PageClass.MEMPOOLS, mempool_pages(self.reader, self.losses))

    def tracing(self) -> None:
        self.owners.claim(PageClass.TRACING, tracing_pages(self.reader, self.losses))

    def dma(self) -> None:
        self.owners.claim(
            PageClass.DMA, dma_pages(self.reader, self.layout, self.losses)
        )

    def dma_bufs(self) -> None:
        buffers = dma_bufs(self.reader, self.layout, self.files, self.losses)
        own = [buffer.pages for buffer in buffers if buffer.own]
        self.owners.claim(
            PageClass.DMABUF, np.concatenate([np.empty(0, np.uint64), *own])
        )

    def globals(self) -> None:
        memmap = vmemmap_base(self.reader.prog)
        pages = global_pages(self.reader, memmap, self.layout.size, self.losses)
        self.owners.claim(PageClass.GLOBALS, pages)

    def vmap(self) -> None:
        """Claim the pages that areas map and that no earlier claim has."""
        areas = self.owners.areas
        pages = areas.pages[areas.mapped[areas.rows]]
        self.claim_structs(PageClass.VMAP, pages)

    def huge_zero(self) -> None:
        # A folio since Linux kernel commit 5691753d73a2 ("mm: convert huge_zero_page
        # to huge_zero_folio") (in v6.10).
        for name in ("huge_zero_folio", "huge_zero_page"):
            try:
                page = find_variable(self.reader.prog, name).value_()
            except MissingError:
                continue
            if page:
                (first,) = pfns_of(
                    np.array([page], np.uint64), self.reader.prog, self.layout
                )
                pages = np.arange(1 << pmd_order(self.reader.prog), dtype=np.uint64)
                self.owners.claim(PageClass.HUGE_ZERO, first + pages)
            return


def pfns_of(pages: Addresses, prog: drgn.Program, layout: PageLayout) -> Pfns:
    """Convert addresses of struct pages to pfns."""
    return (pages - np.uint64(vmemmap_base(prog))) // np.uint64(layout.size)


# --- The data that is read before the memmap is scanned.


class ScanContext(Struct, frozen=True):
    """Data that the scan and its views share."""

    reader: Reader
    layout: PageLayout
    ranges: Sequence[MemmapRange]
    """Ranges to scan, in pfn order."""

    zones: Mapping[tuple[int, int], Zone]
    """Populated zones by node and zone number."""

    owners: Owners
    losses: LossLog
    page_size: int
    read_all: bool = False
    """Whether to read the inside of free blocks: see :mod:`msatools.memory.stream`."""

    verbose: bool = False
    """Whether views also list owners without pages."""

    @property
    def prog(self) -> drgn.Program:
        return self.reader.prog
