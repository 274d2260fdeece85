# SPDX-License-Identifier: LGPL-2.1-or-later

"""Compares two snapshots of memory: two memstat reports."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar

from msgspec import Struct

from msatools.kernel.report import ADDED, Note
from msatools.memory.by.groups import PageGroup
from msatools.memory.model import Check, MemstatReport
from msatools.reports.diff import earlier, elapsed, other_kernel
from msatools.reports.presented import Presented
from msatools.target.model import Target


class PagesSide(Struct, frozen=True):
    """One of the two snapshots."""

    file: str
    """Path of the file that the snapshot was read from."""

    target: Target
    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the kernel."""

    pages: int
    """Struct pages examined."""

    lost_pages: int
    """Struct pages that were excluded or unreadable."""

    physical_pages: int | None
    notes: tuple[Note, ...]
    """Notes of the snapshot's own report."""


class Change(Struct, frozen=True):
    """The pages of one class in both snapshots."""

    name: str
    before_pages: int | None
    """``None`` if the snapshot has no such class or group."""

    after_pages: int | None
    delta_pages: int | None
    """``None`` if the snapshots have different page sizes."""

    delta_bytes: int


class GroupChange(Change, frozen=True):
    """The pages of one node, process, file or the like in both snapshots."""

    key: str
    """Key by which the groups of both snapshots were matched."""

    name_before: str | None
    """Name in the first report, if different."""

    classes: tuple[Change, ...]
    """Classes that changed, the largest change first."""


class CheckPair(Struct, frozen=True):
    """One check in both snapshots; ``None`` in a snapshot that lacks it."""

    name: str
    before: Check | None
    after: Check | None


class MemstatDiff(Presented, Struct, frozen=True, kw_only=True):
    """The change in the pages of each class from one snapshot to another."""

    schema: ClassVar[str] = "msatools.memstat-diff/1"

    before: PagesSide
    after: PagesSide

    elapsed_ns: int | None
    """Kernel time from one to the other; ``None`` if unknown, for example between
    different kernels."""

    notes: tuple[Note, ...]
    """Reasons why the two may not be the same machine at two times."""

    pages: Change
    """All struct pages examined."""

    classes: tuple[Change, ...]
    """Changes in the order of the table."""

    checks: tuple[CheckPair, ...]

    by: Annotated[Mapping[str, tuple[GroupChange, ...]] | None, ADDED] = None
    """Breakdowns that both have; the group with the largest change first."""


def compare(
    before: MemstatReport, after: MemstatReport, files: tuple[str, str] = ("", "")
) -> MemstatDiff:
    """
    Compare two reports, of the same machine or of two machines.

    >>> diff = compare(load_snapshot("a.json"), load_snapshot("b.json"))
    >>> max(diff.classes, key=lambda change: change.delta_bytes).name
    'cache.file'

    :param files: Paths of the reports; empty if not read from files.
    """
    sizes = _PageSizes(before.target.page_size, after.target.page_size)
    first, second = _side(before, files[0]), _side(after, files[1])
    counts = [{count.name: count.pages for count in r.classes} for r in (before, after)]
    return MemstatDiff(
        before=first,
        after=second,
        elapsed_ns=elapsed(first, second),
        notes=tuple(_notes(first, second, before.by or {}, after.by or {})),
        pages=sizes.change("total", before.pages, after.pages),
        classes=tuple(sizes.changes(*counts)),
        checks=tuple(_checks(before.checks, after.checks)),
        by=_by(before.by or {}, after.by or {}, sizes),
    )


class _PageSizes(Struct, frozen=True):
    """The page sizes of both snapshots, in bytes."""

    before: int
    after: int

    def change(self, name: str, before: int | None, after: int | None) -> Change:
        return Change(name, before, after, *self.deltas(before, after))

    def changes(
        self, before: Mapping[str, int], after: Mapping[str, int]
    ) -> Iterator[Change]:
        for name in dict.fromkeys((*after, *before)):
            yield self.change(name, before.get(name), after.get(name))

    def deltas(self, before: int | None, after: int | None) -> tuple[int | None, int]:
        """Return the change in pages and in bytes; a missing group counts as 0."""
        had, has = before or 0, after or 0
        pages = has - had if self.before == self.after else None
        return pages, has * self.after - had * self.before


def _side(report: MemstatReport, file: str) -> PagesSide:
    coverage = report.coverage
    return PagesSide(
        file=file,
        target=report.target,
        taken_at_ns=report.taken_at_ns,
        pages=report.pages,
        lost_pages=sum(
            coverage.get(key, 0) for key in ("excluded_pages", "unreadable_pages")
        ),
        physical_pages=report.physical_pages,
        notes=report.notes,
    )


_Groups = Mapping[str, tuple[PageGroup, ...]]


def _notes(
    before: PagesSide, after: PagesSide, by_before: _Groups, by_after: _Groups
) -> Iterator[Note]:
    yield from other_kernel(before, after)
    yield from _other_memory(before, after)
    yield from earlier(before, after)
    for which, side in (("first", before), ("second", after)):
        if side.lost_pages:
            text = f"the {which} lacks {side.lost_pages:,} struct pages"
            yield Note("pages-lost", text)
    for name in dict.fromkeys((*by_before, *by_after)):
        if name not in by_before or name not in by_after:
            which = "first" if name in by_before else "second"
            yield Note("one-has-groups", f"only the {which} has pages by {name}")


def _other_memory(before: PagesSide, after: PagesSide) -> Iterator[Note]:
    one, other = before.target, after.target
    if one.page_size != other.page_size:
        sizes = f"{one.page_size:,} bytes, then {other.page_size:,}"
        text = f"pages of different sizes, {sizes}: changes are in bytes"
        yield Note("other-page-size", text)
    had, has = before.physical_pages, after.physical_pages
    if None not in (had, has) and had != has and one.page_size == other.page_size:
        text = f"physical memory went from {had:,} pages to {has:,}"
        yield Note("other-memory", f"{text}: another machine, or some came or went")


def _checks(before: Iterable[Check], after: Iterable[Check]) -> Iterator[CheckPair]:
    first = {check.name: check for check in before}
    second = {check.name: check for check in after}
    for name in dict.fromkeys((*second, *first)):
        yield CheckPair(name, first.get(name), second.get(name))


def _by(
    before: _Groups, after: _Groups, sizes: _PageSizes
) -> dict[str, tuple[GroupChange, ...]] | None:
    changes = {
        name: tuple(sorted(_groups(groups, after[name], sizes), key=_rank))
        for name, groups in before.items()
        if name in after
    }
    return changes or None


def _rank(change: GroupChange) -> tuple[int, str]:
    return -abs(change.delta_bytes), change.key


def _groups(
    before: Iterable[PageGroup], after: Iterable[PageGroup], sizes: _PageSizes
) -> Iterator[GroupChange]:
    first, second = _by_key(before), _by_key(after)
    for key in dict.fromkeys((*second, *first)):
        had, has = first.get(key), second.get(key)
        either = has or had
        assert either is not None
        counts = [dict(group.classes) if group else {} for group in (had, has)]
        # Classes without pages may be left out.
        zeros = dict.fromkeys((*counts[1], *counts[0]), 0)
        changes = sizes.changes(zeros | counts[0], zeros | counts[1])
        changed = [change for change in changes if change.delta_bytes]
        pages = had.pages if had else None, has.pages if has else None
        yield GroupChange(
            either.name,
            *pages,
            *sizes.deltas(*pages),
            key=key,
            name_before=had.name if had and had.name != either.name else None,
            classes=tuple(sorted(changed, key=lambda change: -abs(change.delta_bytes))),
        )


def _by_key(groups: Iterable[PageGroup]) -> dict[str, PageGroup]:
    """Index groups by key; merge groups that share a key, which none should."""
    by_key: dict[str, PageGroup] = {}
    for group in groups:
        known = by_key.get(group.key)
        if known is not None:
            names = dict.fromkeys((*known.classes, *group.classes))
            classes = {
                name: known.classes.get(name, 0) + group.classes.get(name, 0)
                for name in names
            }
            group = PageGroup(group.key, known.name, known.pages + group.pages, classes)
        by_key[group.key] = group
    return by_key
