# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Pages that no owner explains, put together to the blocks they were allocated as.

Drivers that take pages straight from the allocator, and forget them, are found there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import CLASSES, PageClass
from msatools.memory.pages.classify import Block, where
from msatools.memory.pages.zonekeys import node_zone_keys
from msatools.memory.scan.context import ScanContext
from msatools.memory.unattributed.content_hints import Contents, Hints
from msatools.memory.unattributed.model import UnattributedGroup
from msatools.memory.unattributed.pageowner import PageOwners

Numbers = npt.NDArray[np.int64]

MAX_KEPT = 1 << 22
"""Pages that are remembered, 16 GiB: 18 bytes each, and some 60 while they are put
together."""

MAX_LOOKED_INTO = 1 << 15
"""Blocks of which the first page is read: 128 MiB."""

MAX_ORDER = 20
"""Above every MAX_PAGE_ORDER."""

NOT_COMPOUND = -1
TAIL = -2
"""In place of a compound page's order: in none, and not its first page."""

NO_ORDER = -1
"""Of pages that are no whole block: what is left of one, or of what was taken apart."""

_EXAMPLES = 5

_PAGE = np.dtype(
    [
        ("pfn", "u8"),
        ("refcount", "u4"),
        ("node", "i4"),
        ("order", "i1"),
        ("code", "u1"),
    ]
)
"""Columns kept of a page; the order is that of a compound page's head."""


@dataclass
class UnattributedPages:
    """Remembers the pages of some classes, in pfn order."""

    codes: tuple[int, ...]
    most: int
    """Pages to remember."""

    parts: list[npt.NDArray[np.void]] = field(default_factory=list)
    kept: int = 0
    left_out: dict[int, int] = field(default_factory=dict)
    """Pages by class that are more than could be remembered."""

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


@dataclass(frozen=True)
class Allocations:
    """Pages that were allocated as one block, and others: one row each."""

    pfn: Numbers
    pages: Numbers
    order: Numbers
    """:data:`NO_ORDER` for pages that are no block."""

    refcount: Numbers
    """Of the first page."""

    node: Numbers
    code: Numbers

    def __len__(self) -> int:
        return len(self.pfn)


def allocations(pages: npt.NDArray[np.void]) -> Allocations:
    """
    Put pages together to the blocks that they probably were allocated as.

    Compound pages say what they are. Of any other block of 2^n pages only the first has
    references (mm/page_alloc.c, prep_new_page()), and it is aligned to 2^n: so such a
    page and the unreferenced ones after it are the largest block that fits.
    """
    pfn = pages["pfn"].astype(np.int64)
    follows = np.zeros(len(pages), np.bool_)
    follows[1:] = np.diff(pfn) == 1
    for name in ("node", "code"):
        follows[1:] &= pages[name][1:] == pages[name][:-1]
    in_compound = pages["order"] != NOT_COMPOUND
    follows &= (pages["order"] == TAIL) | ((pages["refcount"] == 0) & ~in_compound)
    # A page that is no tail does not go on what a compound page began.
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
    """Find the order of the block that each run begins with, and its pages there."""
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
    """The pages that no owner explains, and those that may just look like kmalloc's."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        codes: tuple[int, ...] = (PageClass.UNATTRIBUTED,)
        if not context.layout.types.has("large_kmalloc"):
            # It is a guess then: drivers take compound pages as well.
            codes = (PageClass.UNATTRIBUTED, PageClass.LARGE_KMALLOC)
        self.observer = UnattributedPages(codes, MAX_KEPT)

    def groups(self) -> tuple[UnattributedGroup, ...]:
        """Return groups of like blocks, largest first; they sum to their classes."""
        found = allocations(self.observer.pages())
        contents = Contents(self._context)
        chosen = self._chosen(found)
        hints, of_chosen = contents.look_into(found.pfn[chosen])
        rows = np.full(len(found), -1)
        rows[chosen] = np.arange(len(chosen))
        content = np.full(len(found), len(hints))
        content[chosen] = of_chosen
        hints.append(Hints("not looked into"))
        owners = PageOwners.of(self._context.reader, self._context.losses)
        handles = np.zeros(len(found), np.int64)
        if owners is not None:
            handles = owners.handles(found.pfn)
        groups = list(self._left_out())
        for members in _alike(found, content, handles):
            first, pages = members[0], found.pages[members]
            handle = int(handles[first])
            its_rows = rows[members]
            groups.append(
                UnattributedGroup(
                    class_name=CLASSES[int(found.code[first])],
                    order=_order(int(found.order[first])),
                    pages=int(pages.sum()),
                    blocks=len(members),
                    runs=_runs(found.pfn[members], pages),
                    node=int(found.node[first]),
                    refcount=int(found.refcount[first]),
                    content=hints[content[first]].content,
                    owner=hints[content[first]].owner,
                    examples=tuple(found.pfn[members[:_EXAMPLES]].tolist()),
                    words=contents.words(its_rows[its_rows >= 0].tolist()),
                    stack=owners.stack(handle) if owners and handle else None,
                )
            )
        return tuple(sorted(groups, key=_largest_first))

    def _chosen(self, found: Allocations) -> Numbers:
        """Choose the blocks to look into, those that no owner explains first."""
        chosen = []
        left = MAX_LOOKED_INTO
        for code in self.observer.codes:
            mine = where(found.code == code)
            if len(mine) > left:
                text = f"{left:,} of {len(mine):,} blocks were looked into"
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
    found: Allocations, content: Numbers, handles: Numbers
) -> Iterator[npt.NDArray[np.intp]]:
    """Yield the places of blocks that agree in all columns, in pfn order."""
    columns = (found.code, found.order, found.node, found.refcount, content, handles)
    order = np.lexsort(columns)
    if not len(order):
        return
    differ = np.zeros(len(order) - 1, np.bool_)
    for column in columns:
        differ |= np.diff(column[order]) != 0
    yield from np.split(order, np.flatnonzero(differ) + 1)


def _order(order: int) -> int | None:
    return None if order == NO_ORDER else order


def _largest_first(group: UnattributedGroup) -> tuple[bool, int, tuple[int, ...]]:
    guessed = group.class_name != CLASSES[PageClass.UNATTRIBUTED]
    return guessed, -group.pages, group.examples


def _runs(pfns: Numbers, pages: Numbers) -> int:
    """Count the runs of consecutive pages that blocks make up."""
    return 1 + int(np.count_nonzero(pfns[1:] != pfns[:-1] + pages[:-1]))
