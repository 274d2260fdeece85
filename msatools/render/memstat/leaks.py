# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders what modules have of the kernel's memory as a table."""

from collections.abc import Iterator, Sequence

from msatools.memory.model import Leak
from msatools.render.blocks import Block, Cell, Column, Span, Table, free_text, text
from msatools.reports.units import size


def blocks(leaks: Sequence[Leak], top: int | None) -> Iterator[Block]:
    """Yield the blocks that ``--leaks`` adds to a report.

    :param top: Maximum number of rows.
    """
    yield text()
    yield text(Span("What modules have", "title"))
    if not leaks:
        yield text("No allocation is known to be a module's.")
        return
    columns = (
        Column("SIZE", "right"),
        Column("OBJECTS", "right"),
        Column("MODULE"),
        Column("WHAT"),
        Column("SURE", worth=1),
        free_text("POINTS TO", least=20),
    )
    rows = [_row(leak) for leak in leaks[:top]]
    if rest := leaks[len(rows) :]:
        rows.append((size(sum(leak.bytes for leak in rest)), f"{len(rest):,} more"))
    yield Table(columns, rows)


def _row(leak: Leak) -> tuple[Cell, ...]:
    if leak.cache is not None:
        what = f"objects of {leak.cache}"
    elif leak.area is not None:
        what = f"areas by {leak.area}"
    else:
        what = "pages" if leak.order is None else f"blocks of order {leak.order}"
    objects = "-" if leak.objects is None else f"{leak.objects:,}"
    holds = ", ".join(leak.holds)
    return size(leak.bytes), objects, leak.module, what, leak.confidence, holds
