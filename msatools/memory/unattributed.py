# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages without a known owner, in groups of the blocks they were allocated as.

page_owner and the stack depot record who allocated them, if the kernel has both.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mmzone import pfn_to_section
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.reader import Reader, bit, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Numbers
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.classify import Block, node_zone_keys, where
from msatools.memory.content_hints import Contents, Hints, SymbolNames, distinct_hints
from msatools.memory.memmap import pages_per_section
from msatools.memory.model import Allocator, UnattributedGroup
from msatools.memory.owners import ScanContext
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Reads stack traces from the kernel's stack depot (lib/stackdepot.c).
#
# drgn's stack_depot_fetch() does not know the pools of 7.0. Without debug info the type
# of the pools is unknown: 6.3 renamed them, and later kernels allocate their array.


_ALIGN_SHIFT = 4
"""DEPOT_STACK_ALIGN: offsets in a pool are multiples of 16 bytes."""

_MAX_FRAMES = 64
"""Maximum number of frames of a stack: CONFIG_STACKDEPOT_MAX_FRAMES is 64."""


class _DepotLayout(Struct, frozen=True):
    """Address of the pools of records, and layout of a record."""

    pools: int
    """Address of the array of pools."""

    size: int
    entries: int
    """Offset of the first frame in ``struct stack_record``; ``size`` is the offset of
    the number of frames."""


class StackDepot:
    """Looks up stack traces by their handles."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._layout: _DepotLayout | None = None

    @cached_property
    def _symbols(self) -> SymbolNames:
        return SymbolNames(self._reader, self._losses)

    def stack(self, handle: int) -> tuple[str, ...] | None:
        """Return the function names of a stack, innermost first; ``None`` if lost."""
        try:
            with drgn_lookups:
                return tuple(map(self._name, self._addresses(handle)))
        except LOST as error:
            self._losses.lose(
                Loss.STACKS, f"cannot read a stack of page_owner: {error}"
            )
            return None

    def _addresses(self, handle: int) -> list[int]:
        if self._layout is None:
            self._layout = _stackdepot_layout(self._reader)
        reader, layout = self._reader, self._layout
        index, offset = _parts(reader.prog, handle)
        pool = reader.words(layout.pools + 8 * index, 1)[0].item() if index >= 0 else 0
        if not pool:
            raise DamagedDataError(f"no pool of stack {handle:#x}", 0)
        record = pool + (offset << _ALIGN_SHIFT)
        frames = int.from_bytes(reader.read(record + layout.size, 4), "little")
        count = min(frames, _MAX_FRAMES)
        found: list[int] = reader.words(record + layout.entries, count).tolist()
        return found

    def _name(self, address: int) -> str:
        # A return address is after the call, which may be its function's last
        # instruction.
        symbol = self._symbols.name(address - 1)
        if symbol is None:
            return hex(address)
        if symbol.symbol is None or symbol.module is None:
            return symbol.symbol or symbol.name
        return f"{symbol.symbol} [{symbol.module}]"


def _parts(prog: drgn.Program, handle: int) -> tuple[int, int]:
    """Return a handle's pool index, and its offset there in units of 16 bytes."""
    data = handle.to_bytes(4, "little")
    parts = drgn.Object.from_bytes_(prog, "union handle_parts", data)
    offset = parts.offset.value_()
    # a6c1d9cb9a68 ("stackdepot: rename pool_index to pool_index_plus_1") (in v6.9)
    if parts.type_.has_member("pool_index_plus_1"):
        return parts.pool_index_plus_1.value_() - 1, offset
    # 961c949b012f ("lib/stackdepot: rename slab to pool") (in v6.3)
    if parts.type_.has_member("pool_index"):
        return parts.pool_index.value_(), offset
    return parts.slabindex.value_(), offset


def _stackdepot_layout(reader: Reader) -> _DepotLayout:
    prog = reader.prog
    record = find_type(prog, "struct stack_record")
    return _DepotLayout(
        pools=_pools(reader),
        size=offset_of(record, "size"),
        entries=offset_of(record, "entries"),
    )


def _pools(reader: Reader) -> int:
    """Return the address of the array of pointers to pools."""
    prog = reader.prog
    try:
        pools = kernel_symbol(prog, "stack_pools")
    except MissingError:
        return kernel_symbol(prog, "stack_slabs")
    try:
        # Kernels whose maximum is a variable allocate the array (seen in 7.3).
        kernel_symbol(prog, "stack_max_pools")
    except MissingError:
        return pools
    return int(reader.words(pools, 1)[0])


# --- Reads which thread allocated a page (CONFIG_PAGE_OWNER and page_owner=on).
#
# mm/page_owner.c keeps a record for each page after the page's struct page_ext
# (mm/page_ext.c), with a handle of the stack trace (lib/stackdepot.c). Most kernels do
# not have it enabled.


_INVALID = 1
"""PAGE_EXT_INVALID: set in a section's pointer while it goes offline."""

_AT_ONCE = 1 << 16
"""Records read at once: some 5 MiB."""

_GFP_FLAG = "___GFP_"
_GFP_BIT = "_BIT"

_RECLAIM = ("DIRECT_RECLAIM", "KSWAPD_RECLAIM")
_COMPOUNDS = (
    ("GFP_KERNEL", (*_RECLAIM, "IO", "FS")),
    ("GFP_NOFS", (*_RECLAIM, "IO")),
    ("GFP_NOIO", _RECLAIM),
    ("GFP_ATOMIC", ("HIGH", "KSWAPD_RECLAIM")),
    ("GFP_NOWAIT", ("KSWAPD_RECLAIM",)),
)
"""Names for combinations of flags (linux/gfp_types.h), the largest first."""

Owners = npt.NDArray[np.void]

OWNER = np.dtype(
    [
        ("handle", "u4"),
        ("gfp", "u4"),
        ("pid", "i4"),
        ("order", "u2"),
        ("comm", "S16"),
    ]
)
"""Columns of a page's owner; all zero if unknown."""


class _OwnerLayout(Struct, frozen=True):
    """Layout of the records of page_owner."""

    stride: int
    """Bytes of a page's records (page_ext_size)."""

    allocated: int
    """Flag of a page that is allocated now (PAGE_EXT_OWNER_ALLOCATED)."""

    record: np.dtype[np.void]
    """The flags and the members of ``OWNER``, from the start of a page's records."""


class PageOwners:
    """Looks up the threads and stacks that allocated pages."""

    def __init__(self, reader: Reader, losses: LossLog, layout: _OwnerLayout) -> None:
        self._reader = reader
        self._losses = losses
        self._layout = layout
        self._bases: dict[int, int | None] = {}
        self._per_section = pages_per_section(reader.prog)

    @classmethod
    def of(cls, reader: Reader, losses: LossLog) -> "PageOwners | None":
        """Return the page owners; ``None`` if this kernel does not record them."""
        try:
            with drgn_lookups:
                layout = _pageowner_layout(reader.prog)
                return None if layout is None else cls(reader, losses, layout)
        except MissingError:
            return None
        except UNREADABLE as error:
            losses.lose(
                Loss.PAGE_OWNER, f"cannot determine who allocated pages: {error}"
            )
            return None

    def owners(self, pfns: npt.NDArray[np.int64]) -> Owners:
        """Return the owner of each page, one row of :data:`OWNER` each."""
        owners = np.zeros(len(pfns), OWNER)
        lost = 0
        for first in range(0, len(pfns), _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            lost += self._read_some(pfns[rows], owners[rows])
        if lost:
            text = f"who allocated {lost:,} blocks cannot be read"
            self._losses.lose(Loss.PAGE_OWNER, text)
        return owners

    def _read_some(self, pfns: npt.NDArray[np.int64], owners: Owners) -> int:
        """Fill in the owners of some pages; return how many cannot be read."""
        layout = self._layout
        numbers, index = np.unique(pfns // self._per_section, return_inverse=True)
        bases = [self._base(number) for number in numbers.tolist()]
        base = np.array([found or 0 for found in bases], np.uint64)[index]
        unreadable = np.array([found is None for found in bases])[index]
        known = np.flatnonzero(base)
        # A base may lie below 0: as in the kernel, 64-bit addition wraps round.
        at = base[known] + np.uint64(layout.stride) * pfns[known].astype(np.uint64)
        data, readable = self._reader.read_records(at, layout.record.itemsize)
        records = np.ascontiguousarray(data).view(layout.record)[:, 0]
        flags = records["flags"].astype(np.uint64)
        taken = readable & (flags & np.uint64(layout.allocated) != 0)
        for name in OWNER.names or ():
            owners[name][known[taken]] = records[name][taken]
        return int(np.count_nonzero(unreadable) + np.count_nonzero(~readable))

    def _base(self, number: int) -> int | None:
        """
        Return ``page_ext`` of a section: the address where pfn 0's records would be.

        :return: 0 if the section has no records; ``None`` if it cannot be read.
        """
        if number not in self._bases:
            try:
                section = ask(
                    pfn_to_section, self._reader.prog, number * self._per_section
                )
                base = section.page_ext.value_() if section else 0
                self._bases[number] = 0 if base & _INVALID else base
            except UNREADABLE:
                self._bases[number] = None
        return self._bases[number]


def gfp_names(prog: drgn.Program, mask: int) -> tuple[str, ...] | None:
    """
    Return the names of the flags of an allocation.

    :return: ``None`` if the kernel's types do not have them: they are enumerators since
        "mm: enumerate all gfp flags" (in v6.10).
    """
    try:
        enumerators = find_constant(prog, f"{_GFP_FLAG}DMA{_GFP_BIT}").type_.enumerators
    except MissingError:
        return None
    left = {
        name.removeprefix(_GFP_FLAG).removesuffix(_GFP_BIT)
        for name, bit in enumerators or ()
        if name.startswith(_GFP_FLAG) and name.endswith(_GFP_BIT) and mask >> bit & 1
    }
    names = []
    for name, flags in _COMPOUNDS:
        if left >= set(flags):
            names.append(name)
            left -= set(flags)
    return (*names, *(f"__GFP_{flag}" for flag in sorted(left)))


def _pageowner_layout(prog: drgn.Program) -> _OwnerLayout | None:
    """
    Read the layout of the records.

    :return: ``None`` if page_owner is not enabled.
    :raises MissingError: if the kernel has none (CONFIG_PAGE_OWNER=n)
    """
    offset = find_variable(prog, "page_owner_ops").offset.value_()
    # The record follows struct page_ext: an offset of 0 means it is not enabled.
    if not offset:
        return None
    stride = find_variable(prog, "page_ext_size").value_()
    owner = find_type(prog, "struct page_owner")
    members = {
        "handle": ("handle", "u4"),
        "gfp": ("gfp_mask", "u4"),
        "pid": ("pid", "i4"),
        "order": ("order", "u2"),
        "comm": ("comm", "S16"),
    }
    # "mm/page_owner: record task command name" (in v5.18)
    there = {
        name: (offset + offset_of(owner, member), format_)
        for name, (member, format_) in members.items()
        if owner.has_member(member)
    }
    flags = drgn.sizeof(member_of(find_type(prog, "struct page_ext"), "flags").type)
    # Linux kernel commit fdf3bf809162 ("mm, page_owner: rename flag indicating that
    # page is allocated") (in v5.4)
    flag = find_constant(prog, "PAGE_EXT_OWNER_ALLOCATED").value_()
    return _OwnerLayout(
        stride=stride,
        allocated=bit(flag),
        record=np.dtype(
            {
                "names": ["flags", *there],
                "formats": [f"<u{flags}", *(format_ for _, format_ in there.values())],
                "offsets": [0, *(at for at, _ in there.values())],
                "itemsize": offset + drgn.sizeof(owner),
            }
        ),
    )


# --- Groups pages without a known owner by the blocks they were allocated as.
#
# This finds leaks of drivers that take pages directly from the page allocator.


MAX_KEPT = 1 << 22
"""Maximum number of pages to keep, 16 GiB: 18 bytes each, and some 60 while they are
grouped."""

MAX_LOOKED_INTO = 1 << 15
"""Maximum number of blocks whose first page is read: 128 MiB."""

MAX_ORDER = 20
"""Above every MAX_PAGE_ORDER."""

NOT_COMPOUND = -1
TAIL = -2
"""Values in place of a compound page's order: for pages not in a compound page, and for
tail pages."""

NO_ORDER = -1
"""Order of pages that are not a whole block, but only part of one."""

_EXAMPLES = 5
_ALLOCATORS = 5
"""Maximum number of threads that are listed for a stack."""

_PAGE = np.dtype(
    [
        ("pfn", "u8"),
        ("refcount", "u4"),
        ("node", "i4"),
        ("order", "i1"),
        ("code", "u1"),
    ]
)
"""Columns of a page; ``order`` is the compound order, at the head."""


class UnattributedPages(Struct):
    """Collects the pages of some classes, in pfn order."""

    codes: tuple[int, ...]
    most: int
    """Maximum number of pages to keep."""

    parts: list[npt.NDArray[np.void]] = field(default_factory=list)
    kept: int = 0
    left_out: dict[int, int] = field(default_factory=dict)
    """Pages that exceed the maximum, by class."""

    def observe(self, block: Block) -> None:
        chosen = where(np.isin(block.codes, self.codes))
        if not len(chosen):
            return
        pages = np.empty(len(chosen), _PAGE)
        pages["pfn"] = block.pfn + chosen
        pages["refcount"] = block.counts[chosen] >> np.uint64(32)
        keys = node_zone_keys(block)
        keys = keys if isinstance(keys, int) else keys[chosen]
        pages["node"] = keys >> block.layout.zone_bits
        pages["order"] = _compound_orders(block)[chosen]
        pages["code"] = block.codes[chosen]
        self._keep(pages)

    def merge(self, later: "UnattributedPages") -> None:
        for part in later.parts:
            self._keep(part)
        for code, pages in later.left_out.items():
            self.left_out[code] = self.left_out.get(code, 0) + pages

    def _keep(self, pages: npt.NDArray[np.void]) -> None:
        room = self.most - self.kept
        for code in self.codes if len(pages) > room else ():
            over = int(np.count_nonzero(pages["code"][room:] == code))
            if over:
                self.left_out[code] = self.left_out.get(code, 0) + over
        self.parts.append(pages[:room])
        self.kept += len(pages[:room])

    def pages(self) -> npt.NDArray[np.void]:
        return np.concatenate([np.empty(0, _PAGE), *self.parts])


def _compound_orders(block: Block) -> npt.NDArray[np.int8]:
    """Return the order of each compound page at its head, and :data:`TAIL` or
    :data:`NOT_COMPOUND` at other pages."""
    orders = np.full(len(block), NOT_COMPOUND, np.int8)
    near = (block.tail_heads >= 0) & (block.tail_heads < len(block))
    tails = np.bincount(block.tail_heads[near], minlength=len(block))
    heads = where(tails)
    orders[heads] = np.log2(tails[heads] + 1).astype(np.int8)
    orders[block.tails] = TAIL
    return orders


class Allocations(Struct, frozen=True):
    """Blocks of pages as they were allocated, and remaining runs: one row each."""

    pfn: Numbers
    pages: Numbers
    order: Numbers
    """Order of the block; :data:`NO_ORDER` for pages that are not a block."""

    refcount: Numbers
    """Reference count of the first page."""

    node: Numbers
    code: Numbers

    def __len__(self) -> int:
        return len(self.pfn)


def allocations(pages: npt.NDArray[np.void]) -> Allocations:
    """
    Group pages into the blocks that they were probably allocated as.

    Compound pages record their order. In any other block of 2^n pages, only the first
    page has references (mm/page_alloc.c, prep_new_page()), and it is aligned to 2^n. So
    such a page and the unreferenced ones after it form the largest block that fits.
    """
    pfn = pages["pfn"].astype(np.int64)
    follows = np.zeros(len(pages), np.bool_)
    follows[1:] = np.diff(pfn) == 1
    for name in ("node", "code"):
        follows[1:] &= pages[name][1:] == pages[name][:-1]
    in_compound = pages["order"] != NOT_COMPOUND
    follows &= (pages["order"] == TAIL) | ((pages["refcount"] == 0) & ~in_compound)
    # A page that is not a tail does not continue a compound page.
    follows[1:] &= in_compound[1:] == in_compound[:-1]
    first = where(~follows)
    length = np.diff(first, append=len(pages))
    order, taken = _fit(pages[first], pfn[first], length)
    rest = where(taken < length)
    starts = np.concatenate((first, first[rest] + taken[rest]))
    counts = np.concatenate((taken, (length - taken)[rest]))
    orders = np.concatenate((order, np.full(len(rest), NO_ORDER)))
    kept = where(counts > 0)
    kept = kept[np.argsort(starts[kept], kind="stable")]
    starts = starts[kept]
    return Allocations(
        pfn=pfn[starts],
        pages=counts[kept],
        order=orders[kept],
        refcount=pages["refcount"][starts].astype(np.int64),
        node=pages["node"][starts].astype(np.int64),
        code=pages["code"][starts].astype(np.int64),
    )


def _fit(
    heads: npt.NDArray[np.void], pfn: Numbers, length: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the order and the pages of the block at the start of each run."""
    order = np.log2(np.maximum(length, 1)).astype(np.int64)
    aligned = np.log2(np.maximum(pfn & -pfn, 1)).astype(np.int64)
    aligned[pfn == 0] = MAX_ORDER
    order = np.minimum(np.minimum(order, aligned), MAX_ORDER)
    compound = heads["order"] >= 0
    order[compound] = heads["order"][compound]
    no_block = (heads["order"] == TAIL) | (~compound & (heads["refcount"] == 0))
    order[no_block] = NO_ORDER
    taken = np.where(no_block, length, np.left_shift(1, np.maximum(order, 0)))
    return order, np.minimum(taken, length)


class UnattributedView:
    """Pages without a known owner, and large kmalloc if that class is a guess."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        codes: tuple[int, ...] = (PageClass.UNATTRIBUTED,)
        if not context.layout.types.has("large_kmalloc"):
            # Large kmalloc is a guess then: drivers allocate compound pages as well.
            codes = (PageClass.UNATTRIBUTED, PageClass.LARGE_KMALLOC)
        self.observer = UnattributedPages(codes, MAX_KEPT)

    def groups(self) -> tuple[UnattributedGroup, ...]:
        """Return groups of similar blocks, largest first; they sum to their classes."""
        blocks = allocations(self.observer.pages())
        contents = Contents(self._context)
        chosen = self._chosen(blocks)
        examined = contents.look_into(blocks.pfn[chosen])
        rows = np.full(len(blocks), -1)
        rows[chosen] = np.arange(len(chosen))
        hints, hint_indices = distinct_hints(examined)
        content = np.full(len(blocks), len(hints))
        content[chosen] = hint_indices
        hints.append(Hints("not looked into"))
        owners = self._owners(blocks)
        stacks = StackDepot(self._context.reader, self._context.losses)
        groups = list(self._left_out())
        for members in _alike(blocks, content, owners):
            first, pages = members[0], blocks.pages[members]
            hint = hints[_most(content[members], pages)]
            examined_rows = rows[members][rows[members] >= 0].tolist()
            handle, mask = int(owners["handle"][first]), int(owners["gfp"][first])
            group = UnattributedGroup(
                class_name=CLASSES[int(blocks.code[first])],
                order=_order(int(blocks.order[first])),
                pages=int(pages.sum()),
                blocks=len(members),
                runs=_runs(blocks.pfn[members], pages),
                node=_same(blocks.node[members]),
                refcount=_same(blocks.refcount[members]),
                content=hint.content,
                owner=hint.owner,
                examples=tuple(blocks.pfn[members[:_EXAMPLES]].tolist()),
                words=contents.words(examined[row] for row in examined_rows),
                stack=stacks.stack(handle) if handle else None,
            )
            if handle:
                order = int(owners["order"][first])
                group = replace(
                    group,
                    order=order,
                    blocks=len(distinct(blocks.pfn[members] >> order)),
                    gfp_mask=mask,
                    gfp_names=gfp_names(self._context.prog, mask),
                    allocators=_allocators(owners[members], pages),
                )
            groups.append(group)
        return tuple(sorted(groups, key=_largest_first))

    def _owners(self, blocks: Allocations) -> Owners:
        """Return the owner of each block's first page; a row is zeros if unknown."""
        known = PageOwners.of(self._context.reader, self._context.losses)
        if known is None:
            return np.zeros(len(blocks), OWNER)
        return known.owners(blocks.pfn)

    def _chosen(self, blocks: Allocations) -> Numbers:
        """Return the indices of the blocks to examine, unattributed ones first."""
        chosen = []
        left = MAX_LOOKED_INTO
        for code in self.observer.codes:
            mine = where(blocks.code == code)
            if len(mine) > left:
                text = f"{left:,} of {len(mine):,} blocks were examined"
                self._context.losses.note(
                    "not-all-contents", f"{CLASSES[code]}: {text}"
                )
                mine = mine[np.linspace(0, len(mine) - 1, left).astype(np.intp)]
            left -= len(mine)
            chosen.append(mine)
        return np.concatenate(chosen)

    def _left_out(self) -> Iterator[UnattributedGroup]:
        for code, pages in self.observer.left_out.items():
            yield UnattributedGroup(
                class_name=CLASSES[code],
                order=None,
                pages=pages,
                blocks=None,
                runs=None,
                node=None,
                refcount=None,
                content="not looked into",
                owner=None,
                examples=(),
                words=(),
                stack=None,
            )


def _alike(
    blocks: Allocations, content: Numbers, owners: Owners
) -> Iterator[npt.NDArray[np.intp]]:
    """
    Yield the indices of similar blocks, in pfn order.

    Blocks that page_owner knows are similar if their class, order, flags and stack are
    equal; others, if their class, order, node, reference count and contents are.
    """
    columns = [
        blocks.code,
        *(
            np.where(owners["handle"] == 0, column, 0)
            for column in (blocks.order, blocks.node, blocks.refcount, content)
        ),
        *(owners[name].astype(np.int64) for name in ("order", "gfp", "handle")),
    ]
    order = np.lexsort(columns)
    if not len(order):
        return
    differ = np.zeros(len(order) - 1, np.bool_)
    for column in columns:
        differ |= np.diff(column[order]) != 0
    yield from np.split(order, np.flatnonzero(differ) + 1)


def _allocators(owners: Owners, pages: Numbers) -> tuple[Allocator, ...]:
    """Return the threads that allocated the most pages of these blocks."""
    blocks: Counter[tuple[int, bytes]] = Counter()
    sums: Counter[tuple[int, bytes]] = Counter()
    for pid, comm, count in zip(
        owners["pid"].tolist(), owners["comm"].tolist(), pages.tolist(), strict=True
    ):
        # The bytes after the terminator may be of an earlier, longer name.
        thread = pid, comm.partition(b"\0")[0]
        blocks[thread] += 1
        sums[thread] += count
    return tuple(
        Allocator(
            pid=thread[0],
            comm=thread[1].decode(errors="replace") or None,
            blocks=blocks[thread],
            pages=count,
        )
        for thread, count in sums.most_common(_ALLOCATORS)
    )


def _most(values: Numbers, pages: Numbers) -> int:
    """Return the value that most pages have."""
    return int(np.argmax(np.bincount(values, weights=pages)))


def _same(values: Numbers) -> int | None:
    return int(values[0]) if (values == values[0]).all() else None


def _order(order: int) -> int | None:
    return None if order == NO_ORDER else order


def _largest_first(group: UnattributedGroup) -> tuple[bool, int, tuple[int, ...]]:
    guessed = group.class_name != CLASSES[PageClass.UNATTRIBUTED]
    return guessed, -group.pages, group.examples


def _runs(pfns: Numbers, pages: Numbers) -> int:
    """Return the number of runs of consecutive pages that blocks form."""
    return 1 + int(np.count_nonzero(pfns[1:] != pfns[:-1] + pages[:-1]))
