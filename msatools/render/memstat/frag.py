# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the fragmentation of memory as tables."""

from collections.abc import Iterator, Sequence

from msatools.memory.frag.model import BlockSize, Frag, FreeList
from msatools.render.blocks import Block, Cell, Column, Span, Table, free_text, text
from msatools.reports.units import size

_STATES = (
    ("free", "free_blocks"),
    ("one huge page", "whole_blocks"),
    ("movable pages only", "movable_blocks"),
    ("blocked by others", "blocked_blocks"),
    ("not all memory, or not read", "partial_blocks"),
)


def blocks(frag: Frag, page_size: int) -> Iterator[Block]:
    """Yield the blocks that ``--frag`` adds to a report."""
    yield text()
    yield text(Span("Free blocks by order", "title"))
    yield _free(frag.free, size(page_size << frag.huge_order))
    yield text()
    pageblock = size(page_size << frag.pageblock_order)
    yield text(Span(f"Page blocks of {pageblock} by migrate type", "title"))
    yield _pageblocks(frag)
    yield text()
    yield text(Span("What keeps blocks from being free", "title"))
    yield _states(frag.sizes)
    for block_size in frag.sizes:
        if block_size.blocked_blocks:
            yield text()
            count, block = block_size.blocked_blocks, size(block_size.bytes)
            title = f"What is in the {count:,} blocked ones of {block}"
            yield text(Span(title, "title"))
            yield _blockers(block_size)
    if any(block_size.needed for block_size in frag.sizes):
        yield text()
        yield text(Span("Blocks that would be free but for so many pages", "title"))
        yield _needed(frag.sizes)


def _free(rows: Sequence[FreeList], huge: str) -> Table:
    orders = max((len(row.blocks) for row in rows), default=0)
    columns = (
        Column("NODE", "right", is_key=True),
        Column("ZONE", is_key=True),
        # Huge pages depend on the large ones.
        *(Column(str(order), "right", worth=order) for order in range(orders)),
        Column("PAGES", "right", worth=-2),
        Column(f"NO {huge}", "right"),
        Column("FRAGMENTATION", "right", worth=-1),
        free_text("KERNEL SAYS", least=11),
    )
    return Table(
        columns,
        [
            (
                str(row.node),
                row.zone,
                *(f"{count:,}" for count in row.blocks),
                f"{row.pages:,}",
                _percent(row.unusable_permille),
                _index(row.fragmentation_permille),
                _verdict(row),
            )
            for row in rows
        ],
    )


def _percent(permille: int | None) -> str:
    return "-" if permille is None else f"{permille / 10:.1f} %"


def _index(permille: int | None) -> str:
    return "-" if permille is None else f"{permille / 1000:.3f}"


def _verdict(row: FreeList) -> Cell:
    if row.kernel_blocks is None:
        return Span("- (lost)", "warn")
    if row.kernel_blocks == row.blocks:
        return Span("ok", "good")
    pairs = zip(row.blocks, row.kernel_blocks, strict=True)
    off = [f"{order}: {has - says:+,}" for order, (has, says) in enumerate(pairs)]
    differing = [word for word in off if not word.endswith("+0")]
    return Span(", ".join(differing), "warn")


def _pageblocks(frag: Frag) -> Table:
    columns = (
        Column("NODE", "right", is_key=True),
        Column("ZONE", is_key=True),
        Column("TYPE", is_key=True),
        Column("BLOCKS", "right"),
        Column("FREE PAGES", "right"),
        Column("MOVABLE", "right", worth=1),
        Column("UNMOVABLE", "right", worth=2),
        Column("BLOCKS WITH UNMOVABLE", "right"),
        Column("WITH BOTH", "right", worth=0),
    )
    return Table(
        columns,
        [
            (
                str(row.node),
                row.zone,
                row.type,
                f"{row.blocks:,}",
                f"{row.free_pages:,}",
                f"{row.movable_pages:,}",
                f"{row.unmovable_pages:,}",
                _polluted(row.type, row.polluted_blocks),
                f"{row.mixed_blocks:,}",
            )
            for row in frag.pageblocks
        ],
    )


def _polluted(type_: str, blocks: int) -> Cell:
    label = f"{blocks:,}"
    return Span(label, "warn") if blocks and type_ == "movable" else label


def _states(sizes: Sequence[BlockSize]) -> Table:
    columns = (
        Column("BLOCKS OF"),
        *(Column(size(block_size.bytes), "right") for block_size in sizes),
    )
    rows: list[Sequence[Cell]] = [
        (label, *(f"{getattr(block_size, name):,}" for block_size in sizes))
        for label, name in _STATES
        if name != "partial_blocks"
        or any(block_size.partial_blocks for block_size in sizes)
    ]
    total = Span("all", "title")
    rows.append((total, *(f"{block_size.blocks:,}" for block_size in sizes)))
    moves = (f"{block_size.movable_pages:,}" for block_size in sizes)
    rows.append((Span("pages to move in movable ones", "dim"), *moves))
    return Table(columns, rows)


def _blockers(block_size: BlockSize) -> Table:
    columns = (
        Column("CLASS"),
        Column("BLOCKS", "right"),
        Column("ALONE", "right"),
        Column("PAGES", "right"),
    )
    return Table(
        columns,
        [
            (row.name, f"{row.blocks:,}", f"{row.alone_blocks:,}", f"{row.pages:,}")
            for row in block_size.blockers
        ],
    )


def _needed(sizes: Sequence[BlockSize]) -> Table:
    columns = (
        Column("PAGES", "right"),
        *(Column(size(block_size.bytes), "right") for block_size in sizes),
    )
    counts = [
        {row.pages: row.blocks for row in block_size.needed} for block_size in sizes
    ]
    limits = sorted(set().union(*counts))
    return Table(
        columns,
        [
            (_range(limit), *(f"{count.get(limit, 0):,}" for count in counts))
            for limit in limits
        ],
    )


def _range(limit: int) -> str:
    """
    Return the range of numbers that ends with a power of two.

    >>> _range(1), _range(2), _range(8)
    ('1', '2', '5-8')
    """
    first = limit // 2 + 1
    return f"{limit:,}" if first >= limit else f"{first:,}-{limit:,}"
