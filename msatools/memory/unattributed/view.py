# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Groups pages without a known owner by the blocks they were allocated as.

This finds leaks of drivers that take pages directly from the page allocator.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.kernel.reader import distinct
from msatools.memory.pages.classes import CLASSES, PageClass
from msatools.memory.pages.classify import Block, where
from msatools.memory.pages.zonekeys import node_zone_keys
from msatools.memory.scan.context import ScanContext
from msatools.memory.unattributed.content_hints import Contents, Hints, distinct_hints
from msatools.memory.unattributed.model import Allocator, UnattributedGroup
from msatools.memory.unattributed.pageowner import OWNER, Owners, PageOwners, gfp_names
from msatools.memory.unattributed.stackdepot import StackDepot

Numbers = npt.NDArray[np.int64]

MAX_KEPT = 1 << 22
"""Maximum number of pages to keep, 16 GiB: 18 bytes each, and some 60 while they are
grouped."""

MAX_LOOKED_INTO = 1 << 15
"""Maximum number of blocks whose first page is read: 128 MiB."""

MAX_ORDER = 20
"""Above every MAX_PAGE_ORDER."""

NOT_COMPOUND = -1
TAIL = -2
"""Instead of a compound page's order: not in a compound page; a tail page."""

NO_ORDER = -1
"""Order of pages that are not a whole block, but the rest of one or split up."""

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
    """Return the order of each compound page at its head."""
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
    """Return the order of the block that each run begins with, and its pages."""
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
    """Pages without a known owner, and those that may only look like large kmalloc."""

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
        """Return who allocated the first page of each block, as far as is known."""
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

    Blocks of one stack are alike wherever they are and whatever they contain; those of
    no known owner are equal in all that the blocks themselves say.
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
    """Return the threads that allocated the most of some blocks."""
    blocks: Counter[tuple[int, bytes]] = Counter()
    sums: Counter[tuple[int, bytes]] = Counter()
    for pid, comm, count in zip(
        owners["pid"].tolist(), owners["comm"].tolist(), pages.tolist(), strict=True
    ):
        # Behind the end is what a longer name left there.
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
    """Count the runs of consecutive pages that blocks form."""
    return 1 + int(np.count_nonzero(pfns[1:] != pfns[:-1] + pages[:-1]))
