# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders break-downs, fragmentation, leaks and pages without a known owner."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from msatools.memory.model import (
    BlockSize,
    CgroupGroup,
    Frag,
    FreeList,
    Leak,
    PageGroup,
    UnattributedGroup,
)
from msatools.model import hints, marks, names
from msatools.render.blocks import Block, Cell, Column, Span, Table, free_text, line
from msatools.reports.units import size

# --- Renders memstat's break-downs of the classes (--by) as tables.


_ACROSS = frozenset(("node", "zone"))
"""Break-downs with few groups, which are columns rather than rows."""

_MOST = 3
"""Maximum number of items to list in a cell, such as the largest classes."""

_NUMBERS = frozenset(("pid", "node"))
"""Fields whose numbers identify rather than count."""

_COMMON = frozenset(names(PageGroup))

_BESIDE = ("hugetlb_pages", "swap_pages", "page_table_bytes")
"""Fields of memory that RSS does not include."""

_MUCH_BESIDE = 1 << 20
_SHARE_BESIDE = 1 / 4
"""A column of :data:`_BESIDE` is worth most if a row has at least so many bytes of it,
and at least this ratio to the RSS (or pages) of the row."""


def groups_table(
    by: str, groups: Sequence[PageGroup], page_size: int, top: int | None
) -> Table:
    """
    Return the table of one break-down.

    :param top: Maximum number of rows, if each group is a row.
    """
    if by in _ACROSS:
        return _across(groups)
    groups = [group for group in groups if not _has_nothing(group)]
    shown = groups[:top]
    extra = dict(_extra_fields(groups))
    beside = {name for name in _BESIDE if _is_much(groups, name, page_size)}
    rows = [_group_row(group, extra, page_size) for group in shown]
    rest = groups[len(shown) :]
    if rest:
        pages = sum(group.pages for group in rest)
        label = f"{len(rest):,} more"
        rows.append(
            (f"{pages:,}", size(pages * page_size), *("" for _ in extra), "", label)
        )
    columns = (
        Column("PAGES", "right"),
        Column("SIZE", "right", worth=1),
        *(
            _extra_column(name, hint, 0 if name in beside else -n)
            for n, (name, hint) in enumerate(extra.items())
        ),
        free_text("CLASSES", worth=-3),
        Column(by.upper(), least=24, keeps="end", is_key=True),
    )
    return Table(columns, rows)


def _is_much(groups: Iterable[PageGroup], name: str, page_size: int) -> bool:
    """Return whether a group has much memory in *name*, a field of _BESIDE."""
    unit = page_size if name.endswith("_pages") else 1
    for group in groups:
        amount = (getattr(group, name, None) or 0) * unit
        present = (getattr(group, "rss_pages", None) or group.pages) * page_size
        if amount >= max(_MUCH_BESIDE, _SHARE_BESIDE * present):
            return True
    return False


def _has_nothing(group: PageGroup) -> bool:
    """Return whether a group is a live cgroup without pages, which only JSON lists."""
    return (
        isinstance(group, CgroupGroup)
        and not group.dying
        and not any((group.pages, group.swap_pages))
    )


def _extra_column(name: str, hint: object, worth: int) -> Column:
    if _align(hint) == "left":
        return free_text(_header(name), worth, least=12)
    is_key = name in _NUMBERS
    return Column(_header(name), "right", None if is_key else worth)


def _across(groups: Sequence[PageGroup]) -> Table:
    columns = (Column("CLASS"), *(Column(group.name, "right") for group in groups))
    names = list(groups[0].classes) if groups else []
    rows: list[Sequence[Cell]] = [
        (name, *(f"{group.classes[name]:,}" for group in groups))
        for name in names
        if any(group.classes[name] for group in groups)
    ]
    rows.append((Span("total", "title"), *(f"{group.pages:,}" for group in groups)))
    return Table(columns, rows, keeps_all=True)


def _group_row(
    group: PageGroup, extra: Iterable[str], page_size: int
) -> tuple[Cell, ...]:
    return (
        f"{group.pages:,}",
        size(group.pages * page_size),
        *(_value_text(name, getattr(group, name, None), page_size) for name in extra),
        _largest(group),
        group.name,
    )


def _largest(group: PageGroup) -> str:
    classes = [(name, pages) for name, pages in group.classes.items() if pages]
    classes.sort(key=lambda item: -item[1])
    shown = ", ".join(f"{name} {pages:,}" for name, pages in classes[:_MOST])
    return f"{shown}, ..." if len(classes) > _MOST else shown


def _extra_fields(groups: Sequence[PageGroup]) -> Iterator[tuple[str, Any]]:
    """Yield the name and type of each field beyond PageGroup's with a value."""
    models = dict.fromkeys(type(group) for group in groups)
    extra = {
        name: hint
        for model in models
        for name, hint in hints(model).items()
        if name not in _COMMON and not marks(model)[name].get("detail")
    }
    for name, hint in extra.items():
        if any(getattr(group, name, None) is not None for group in groups):
            yield name, hint


_UNITS = ("_pages", "_bytes")


def _header(name: str) -> str:
    for unit in _UNITS:
        name = name.removesuffix(unit)
    return name.replace("_", " ").upper()


def _align(hint: object) -> Literal["left", "right"]:
    return "right" if hint in (int, int | None) else "left"


def _value_text(name: str, value: object, page_size: int) -> str:
    """Return the text of a cell; memory is a size, as in the column SIZE."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _NUMBERS:
        return str(value)
    if isinstance(value, int):
        if name.endswith("_pages"):
            return size(value * page_size)
        return size(value) if name.endswith("_bytes") else f"{value:,}"
    if isinstance(value, (tuple, list)):
        shown = ", ".join(str(item) for item in value[:_MOST])
        return f"{shown}, ..." if len(value) > _MOST else shown
    return str(value)


def pins_table(
    groups: Sequence[PageGroup], top: int | None, *, verbose: bool = False
) -> Iterator[Block]:
    """
    Yield the table of removed control groups that files pin, if there are any.

    :param top: Maximum number of groups.
    :param verbose: Whether to show more than the largest file of each group.
    """
    pinned = [g for g in groups if isinstance(g, CgroupGroup) and g.pinned_by]
    if not pinned:
        return
    rows: list[Sequence[Cell]] = []
    for group in pinned[:top]:
        rows += _pin_rows(group, None if verbose else 1)
    rest = pinned[len(pinned[:top]) :]
    if rest:
        pages = sum(group.pages for group in rest)
        rows.append((f"{pages:,}", f"{len(rest):,} more"))
    columns = (
        Column("PAGES", "right"),
        free_text("REMOVED CGROUP", keeps="end"),
        free_text("FILE", keeps="end"),
    )
    yield line()
    yield line(Span("Removed control groups, by the files charged to them", "title"))
    yield Table(columns, rows)


def _pin_rows(group: CgroupGroup, most: int | None) -> Iterator[Sequence[Cell]]:
    pins = (group.pinned_by or ())[:most]
    for pin in pins:
        yield (f"{pin.pages:,}", group.name, pin.name)
    others = (group.files or 0) - len(pins)
    if others > 0:
        yield ("", group.name, f"{others:,} more")


# --- Renders the fragmentation of memory as tables.


_STATES = (
    ("free", "free_blocks"),
    ("one huge page", "whole_blocks"),
    ("movable pages only", "movable_blocks"),
    ("blocked by others", "blocked_blocks"),
    ("not all memory, or not read", "partial_blocks"),
)


def frag_blocks(frag: Frag, page_size: int) -> Iterator[Block]:
    """Yield the blocks that ``--frag`` adds to a report."""
    yield line()
    yield line(Span("Free blocks by order", "title"))
    yield _free(frag.free, size(page_size << frag.huge_order))
    yield line()
    pageblock = size(page_size << frag.pageblock_order)
    yield line(Span(f"Page blocks of {pageblock} by migrate type", "title"))
    yield _pageblocks(frag)
    yield line()
    yield line(Span("What keeps blocks from being free", "title"))
    yield _states(frag.sizes)
    for block_size in frag.sizes:
        if block_size.blocked_blocks:
            yield line()
            count, block = block_size.blocked_blocks, size(block_size.bytes)
            title = f"What is in the {count:,} blocked ones of {block}"
            yield line(Span(title, "title"))
            yield _blockers(block_size)
    if any(block_size.needed for block_size in frag.sizes):
        yield line()
        yield line(Span("Blocks that would be free but for so many pages", "title"))
        yield _needed(frag.sizes)


def _free(rows: Sequence[FreeList], huge: str) -> Table:
    orders = max((len(row.blocks) for row in rows), default=0)
    columns = (
        Column("NODE", "right", is_key=True),
        Column("ZONE", is_key=True),
        # Large orders are worth most, because huge pages need them.
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


# --- Renders the kernel memory allocated by modules, as a table.


def leak_blocks(leaks: Sequence[Leak], top: int | None) -> Iterator[Block]:
    """Yield the blocks that ``--leaks`` adds to a report.

    :param top: Maximum number of rows.
    """
    yield line()
    yield line(Span("What modules have", "title"))
    if not leaks:
        yield line("No allocation is known to be a module's.")
        return
    columns = (
        Column("SIZE", "right"),
        Column("OBJECTS", "right"),
        Column("MODULE"),
        Column("WHAT"),
        Column("SURE", worth=1),
        free_text("POINTS TO", least=20),
    )
    rows = [_leak_row(leak) for leak in leaks[:top]]
    if rest := leaks[len(rows) :]:
        rows.append((size(sum(leak.bytes for leak in rest)), f"{len(rest):,} more"))
    yield Table(columns, rows)


def _leak_row(leak: Leak) -> tuple[Cell, ...]:
    if leak.cache is not None:
        what = f"objects of {leak.cache}"
    elif leak.area is not None:
        what = f"areas by {leak.area}"
    else:
        what = "pages" if leak.order is None else f"blocks of order {leak.order}"
    objects = "-" if leak.objects is None else f"{leak.objects:,}"
    holds = ", ".join(leak.holds)
    return size(leak.bytes), objects, leak.module, what, leak.confidence, holds


# --- Renders the pages without a known owner as tables.


_WORDS = 3
_TITLES = {
    "kernel.unattributed": "Pages that no owner explains",
    "kernel.large_kmalloc": "Counted as large kmalloc; a driver's own compound pages "
    "look the same",
}


def unattributed_blocks(
    groups: Sequence[UnattributedGroup], page_size: int, top: int | None
) -> Iterator[Block]:
    """
    Yield the blocks that ``--unattributed`` adds to a report.

    :param top: Maximum rows of each class.
    """
    for name in dict.fromkeys(group.class_name for group in groups):
        mine = [group for group in groups if group.class_name == name]
        yield line()
        yield line(Span(_TITLES.get(name, name), "title"))
        yield _table(mine, page_size, top)
        for number, group in enumerate(mine[:top], 1):
            yield from _allocation(group, number)


def _allocation(group: UnattributedGroup, number: int) -> Iterator[Block]:
    """Yield the threads and stack that allocated a group, if recorded (page_owner)."""
    if group.allocators is None:
        return
    threads = ", ".join(
        f"{thread.pid} {thread.comm or '-'} ({thread.blocks:,})"
        for thread in group.allocators
    )
    names = "" if group.gfp_names is None else f" ({'|'.join(group.gfp_names)})"
    yield line(Span(f"Row {number} was allocated by {threads}", "title"))
    yield line(f"  gfp {group.gfp_mask:#x}{names}")
    yield line("  " + " < ".join(group.stack or ("its stack is lost",)))


def _table(
    groups: Sequence[UnattributedGroup], page_size: int, top: int | None
) -> Table:
    columns = (
        Column("PAGES", "right"),
        Column("SIZE", "right", worth=3),
        Column("ORDER", "right", worth=4),
        Column("BLOCKS", "right", worth=2),
        Column("RUNS", "right", worth=1),
        Column("NODE", "right", worth=0),
        Column("REFS", "right", worth=0),
        Column("PFN"),
        free_text("CONTENTS", least=20),
        free_text("MOST FREQUENT WORDS", least=20),
    )
    shown = groups[:top]
    rows = [_unattributed_row(group, page_size) for group in shown]
    rest = groups[len(shown) :]
    if rest:
        pages = sum(group.pages for group in rest)
        rows.append((f"{pages:,}", size(pages * page_size), f"{len(rest):,} more"))
    return Table(columns, rows)


def _unattributed_row(group: UnattributedGroup, page_size: int) -> tuple[Cell, ...]:
    return (
        f"{group.pages:,}",
        size(group.pages * page_size),
        _number(group.order),
        _number(group.blocks),
        _number(group.runs),
        _number(group.node),
        _number(group.refcount),
        hex(group.examples[0]) if group.examples else "-",
        _contents(group),
        ", ".join(f"{word.name} ({word.count:,})" for word in group.words[:_WORDS]),
    )


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _contents(group: UnattributedGroup) -> Cell:
    if group.owner is None:
        return group.content
    words = f"{group.content} {group.owner}"
    # A module that leaks pages is the usual reason to use this option.
    return Span(words, "warn") if group.content == "module" else words
