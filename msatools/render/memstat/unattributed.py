# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the pages without a known owner as tables."""

from collections.abc import Iterator, Sequence

from msatools.memory.unattributed.model import UnattributedGroup
from msatools.render.blocks import Block, Cell, Column, Span, Table, free_text, text
from msatools.reports.units import size

_WORDS = 3
_TITLES = {
    "kernel.unattributed": "Pages that no owner explains",
    "kernel.large_kmalloc": "Counted as large kmalloc; a driver's own compound pages "
    "look the same",
}


def blocks(
    groups: Sequence[UnattributedGroup], page_size: int, top: int | None
) -> Iterator[Block]:
    """
    Yield the blocks that ``--unattributed`` adds to a report.

    :param top: Maximum rows of each class.
    """
    for name in dict.fromkeys(group.class_name for group in groups):
        mine = [group for group in groups if group.class_name == name]
        yield text()
        yield text(Span(_TITLES.get(name, name), "title"))
        yield _table(mine, page_size, top)
        for number, group in enumerate(mine[:top], 1):
            yield from _allocation(group, number)


def _allocation(group: UnattributedGroup, number: int) -> Iterator[Block]:
    """Yield who allocated a group, where the kernel keeps that."""
    if group.allocators is None:
        return
    threads = ", ".join(
        f"{thread.pid} {thread.comm or '-'} ({thread.blocks:,})"
        for thread in group.allocators
    )
    names = "" if group.gfp_names is None else f" ({'|'.join(group.gfp_names)})"
    yield text(Span(f"Row {number} was allocated by {threads}", "title"))
    yield text(f"  gfp {group.gfp_mask:#x}{names}")
    yield text("  " + " < ".join(group.stack or ("its stack is lost",)))


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
    rows = [_row(group, page_size) for group in shown]
    rest = groups[len(shown) :]
    if rest:
        pages = sum(group.pages for group in rest)
        rows.append((f"{pages:,}", size(pages * page_size), f"{len(rest):,} more"))
    return Table(columns, rows)


def _row(group: UnattributedGroup, page_size: int) -> tuple[Cell, ...]:
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
