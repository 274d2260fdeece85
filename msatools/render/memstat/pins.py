# SPDX-License-Identifier: LGPL-2.1-or-later

"""The files that keep removed control groups alive, as a table."""

from collections.abc import Iterator, Sequence

from msatools.memory.by.groups import CgroupGroup, PageGroup
from msatools.render.blocks import Block, Cell, Column, Span, Table, text


def blocks(groups: Sequence[PageGroup], top: int | None) -> Iterator[Block]:
    """
    Yield what is shown of removed groups, if there are any.

    :param top: Groups to show at most.
    """
    pinned = [g for g in groups if isinstance(g, CgroupGroup) and g.pinned_by]
    if not pinned:
        return
    rows: list[Sequence[Cell]] = []
    for group in pinned[:top]:
        rows += _rows(group)
    rest = pinned[len(pinned[:top]) :]
    if rest:
        pages = sum(group.pages for group in rest)
        rows.append((f"{pages:,}", f"{len(rest):,} more"))
    columns = (Column("PAGES", "right"), Column("REMOVED CGROUP"), Column("FILE"))
    yield text()
    yield text(Span("Removed control groups, by the files charged to them", "title"))
    yield Table(columns, rows)


def _rows(group: CgroupGroup) -> Iterator[Sequence[Cell]]:
    pins = group.pinned_by or ()
    for pin in pins:
        yield (f"{pin.pages:,}", group.name, pin.name)
    others = (group.files or 0) - len(pins)
    if others > 0:
        yield ("", group.name, f"{others:,} more")
