# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders memstat's break-downs of the classes (``--by``) as tables."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from msatools.memory.by.groups import CgroupGroup, PageGroup
from msatools.model import hints, marks, names
from msatools.render.blocks import Block, Cell, Column, Span, Table, free_text, text
from msatools.reports.units import size

_ACROSS = frozenset(("node", "zone"))
"""Break-downs with few groups, which are columns rather than rows."""

_MOST = 3
"""Maximum number of items to list in a cell, such as the largest classes."""

_NUMBERS = frozenset(("pid", "node"))
"""Numbers that identify rather than count."""

_COMMON = frozenset(names(PageGroup))


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
    rows = [_row(group, extra, page_size) for group in shown]
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
        *(_extra_column(*field, -n) for n, field in enumerate(extra.items())),
        free_text("CLASSES", worth=-3),
        Column(by.upper(), least=24, keeps="end", is_key=True),
    )
    return Table(columns, rows)


def _has_nothing(group: PageGroup) -> bool:
    """Return whether it is a control group that only JSON lists."""
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


def _row(group: PageGroup, extra: Iterable[str], page_size: int) -> tuple[Cell, ...]:
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
    """Yield the fields beyond those of all groups that any group has a value for.

    :return: Names and types.
    """
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
    Yield the table of removed groups, if there are any.

    :param top: Maximum number of groups.
    :param verbose: Whether to show more than the largest file of each.
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
    yield text()
    yield text(Span("Removed control groups, by the files charged to them", "title"))
    yield Table(columns, rows)


def _pin_rows(group: CgroupGroup, most: int | None) -> Iterator[Sequence[Cell]]:
    pins = (group.pinned_by or ())[:most]
    for pin in pins:
        yield (f"{pin.pages:,}", group.name, pin.name)
    others = (group.files or 0) - len(pins)
    if others > 0:
        yield ("", group.name, f"{others:,} more")
