# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the differences between two snapshots of memory as tables."""

from collections.abc import Iterable, Iterator, Sequence

from msatools.memory.diff import Change, CheckPair, GroupChange, MemstatDiff
from msatools.memory.model import Check
from msatools.render.blocks import Block, Cell, Column, Span, Table, free_text, line
from msatools.render.diff import heading
from msatools.render.memstat.report import GROUPS, REST
from msatools.reports.units import size

_CLASSES = 3
"""Maximum number of changed classes to list for each group."""


def memstat_diff_blocks(diff: MemstatDiff, rows: int | None) -> Iterator[Block]:
    """
    Yield the blocks of ``msa-memstat --diff``.

    :param rows: Maximum groups of each breakdown; None for all.
    """
    pages = [f"{side.pages:,}" for side in (diff.before, diff.after)]
    column = Column("PAGES", "right", worth=2)
    sides = diff.before, diff.after
    yield from heading("SNAPSHOT", sides, diff.elapsed_ns, diff.notes, (column, pages))
    amounts = _Amounts(diff)
    yield _classes(diff, amounts)
    yield from _checks(diff.checks)
    for name, groups in (diff.by or {}).items():
        yield line()
        yield line(Span(f"Changes by {name}", "title"))
        yield from _groups(groups, amounts, rows)


class _Amounts:
    """Formats amounts in pages, or in bytes if the page sizes differ."""

    def __init__(self, diff: MemstatDiff) -> None:
        self._before = diff.before.target.page_size
        self._after = diff.after.target.page_size
        self.in_pages = self._before == self._after

    def columns(self) -> tuple[Column, ...]:
        worths = {"BEFORE": 2, "AFTER": 3, "CHANGE": None}
        if self.in_pages:
            worths["SIZE"] = 4
        return tuple(Column(name, "right", worth) for name, worth in worths.items())

    def cells(self, had: int | None, has: int | None) -> tuple[Cell, ...]:
        """Return the cells for pages before and after; ``None``: no such class."""
        change = (has or 0) * self._after - (had or 0) * self._before
        before, after = self._pages(had, self._before), self._pages(has, self._after)
        if self.in_pages:
            return before, after, _signed(change // self._after), _size(change)
        return before, after, _size(change) or "0"

    def _pages(self, pages: int | None, page_size: int) -> str:
        if pages is None:
            return "-"
        return f"{pages:,}" if self.in_pages else size(pages * page_size)

    def change(self, change: Change) -> str:
        """Return a change as a short text."""
        if change.delta_pages is None:
            return _size(change.delta_bytes)
        return _signed(change.delta_pages)


def _signed(number: int) -> str:
    return f"{number:+,}" if number else "0"


def _size(amount: int) -> str:
    return f"{'+' if amount > 0 else ''}{size(amount)}" if amount else ""


def _classes(diff: MemstatDiff, amounts: _Amounts) -> Table:
    return Table(
        (Column("CLASS"), *amounts.columns()), tuple(_class_rows(diff, amounts))
    )


def _class_rows(diff: MemstatDiff, amounts: _Amounts) -> Iterator[Sequence[Cell]]:
    changes = {change.name: change for change in diff.classes}

    def line(label: Cell, names: Iterable[str]) -> Sequence[Cell]:
        named = [changes[name] for name in names if name in changes]
        had = [c.before_pages for c in named if c.before_pages is not None]
        has = [c.after_pages for c in named if c.after_pages is not None]
        return (
            label,
            *amounts.cells(sum(had) if had else None, sum(has) if has else None),
        )

    def is_shown(name: str, always: bool) -> bool:
        change = changes.get(name)
        pages = bool(change and (change.before_pages or change.after_pages))
        return pages or (always and change is not None)

    for title, rows in GROUPS:
        yield line(Span(title, "title"), [row.name for row in rows])
        for row in rows:
            if is_shown(row.name, row.always):
                yield line(f"  {row.label}", [row.name])
    managed = [row.name for _, rows in GROUPS for row in rows]
    yield line(Span("Managed", "title"), managed)
    for row in REST:
        if is_shown(row.name, row.always):
            yield line(row.label, [row.name])
    known = {*managed, *(row.name for row in REST)}
    # A newer msatools may have classes that this one does not know.
    for name in changes:
        if name not in known:
            yield line(name, [name])
    total = diff.pages
    label = Span("Total", "title")
    yield (label, *amounts.cells(total.before_pages, total.after_pages))


def _checks(pairs: Sequence[CheckPair]) -> Iterator[Block]:
    differing = [
        pair
        for pair in pairs
        if any(c is not None and c.difference != 0 for c in (pair.before, pair.after))
    ]
    yield line(f"{len(pairs)} checks: {len(pairs) - len(differing)} exact")
    if not differing:
        return
    rows = [(p.name, _check(p.before), _check(p.after)) for p in differing]
    yield Table((Column("CHECK"), free_text("BEFORE"), free_text("AFTER")), rows)


def _check(check: Check | None) -> Cell:
    if check is None:
        return "-"
    if check.difference is None:
        return Span("- (lost)", "warn")
    if not check.difference:
        return Span("ok", "good")
    amount = _signed(check.difference)
    if check.explained_by is not None:
        return f"{amount}  {check.explained_by}"
    return Span(f"{amount}  UNEXPLAINED", "bad")


def _groups(
    groups: Sequence[GroupChange], amounts: _Amounts, rows: int | None
) -> Iterator[Block]:
    changed = [group for group in groups if group.delta_bytes or group.classes]
    shown = changed[:rows]
    name = free_text("NAME", least=24, keeps="end")
    columns = (name, *amounts.columns(), free_text("MOST OF IT", worth=0))
    table = [_group(group, amounts) for group in shown]
    if table:
        yield Table(columns, table)
    left, same = len(changed) - len(shown), len(groups) - len(changed)
    words = [f"{left:,} more that changed"] if left else []
    words += [f"{same:,} that did not"] if same else []
    if words:
        yield line(", ".join(words))


def _group(group: GroupChange, amounts: _Amounts) -> Sequence[Cell]:
    name = group.name
    if group.name_before is not None:
        name += f" (was {group.name_before})"
    if group.before_pages is None:
        name += " (new)"
    elif group.after_pages is None:
        name += " (gone)"
    named = [f"{c.name} {amounts.change(c)}" for c in group.classes[:_CLASSES]]
    return name, *amounts.cells(group.before_pages, group.after_pages), ", ".join(named)
