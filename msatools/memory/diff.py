# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads back and compares reports of msa-memstat, and makes gauges of them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from msatools.kernel.report import ADDED, Note
from msatools.memory.breakdowns import OrderGroup, SectionGroup
from msatools.memory.model import (
    CgroupGroup,
    Check,
    ClassCount,
    DmaBufGroup,
    FileGroup,
    FileSystemGroup,
    MemstatReport,
    PageGroup,
    ProcessGroup,
    SlabGroup,
    VmallocGroup,
)
from msatools.model import Gauge, Presented, single, values
from msatools.program.model import Target
from msatools.reports.diff import Reports, earlier, elapsed, head_of, other_kernel
from msatools.reports.forms import convert

# --- Reads memstat reports back: recorded ones, and the output of --json.


GROUPS: Mapping[str, type[PageGroup]] = {
    "cgroup": CgroupGroup,
    "dmabuf": DmaBufGroup,
    "file": FileGroup,
    "fs": FileSystemGroup,
    "node": PageGroup,
    "order": OrderGroup,
    "process": ProcessGroup,
    "section": SectionGroup,
    "slab": SlabGroup,
    "vmalloc": VmallocGroup,
    "zone": PageGroup,
}
"""Maps a break-down to the type of its groups."""


class RecordedMemstat(MemstatReport, frozen=True, kw_only=True):
    """A decoded report whose groups are not yet converted to their types."""

    by: Mapping[str, tuple[dict[str, Any], ...]] | None = None  # type: ignore[assignment]
    map: None = None


def whole(recorded: RecordedMemstat) -> MemstatReport:
    """
    Convert the groups of a decoded report to their types.

    :raises ValueError: if a group does not match its break-down
    """
    parts = values(recorded)
    by = recorded.by
    if by is not None:
        parts["by"] = {
            name: _recorded_groups(name, groups) for name, groups in by.items()
        }
    return MemstatReport(**parts)


def _recorded_groups(
    name: str, groups: Collection[dict[str, Any]]
) -> tuple[PageGroup, ...]:
    kind = GROUPS.get(name, PageGroup)
    return tuple(convert(group, kind) for group in groups)


def lacking(
    report: MemstatReport, by: Collection[str], asked: Mapping[str, str]
) -> str | None:
    """
    Return the first option whose data a report lacks; ``None`` if it has all.

    :param asked: Maps a field of the report to the option that requests it.
    """
    for name in by:
        if name not in (report.by or {}):
            return f"--by {name}"
    for name, option in asked.items():
        if getattr(report, name) is None:
            return option
    return None


def choose(
    report: MemstatReport, by: Collection[str], asked: Mapping[str, str]
) -> MemstatReport:
    """
    Return a report with only the requested break-downs and lists.

    :param asked: As for :func:`lacking`.
    """
    chosen = {name: report.by[name] for name in by} if report.by else {}
    return replace(
        report,
        by=chosen or None,
        sections=report.sections if "sections" in asked else None,
        unattributed=report.unattributed if "unattributed" in asked else None,
        frag=report.frag if "frag" in asked else None,
        vmalloc=report.vmalloc if "vmalloc" in asked else None,
        leaks=report.leaks if "leaks" in asked else None,
    )


_REPORTS = Reports("memstat", MemstatReport.schema)

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Pages(msgspec.Struct):
    """The part of the payload that is compared."""

    pages: _Count
    classes: tuple[ClassCount, ...]
    checks: tuple[Check, ...]
    managed_pages: int | None
    physical_pages: int | None
    by: dict[str, tuple[PageGroup, ...]] | None = None


def load_snapshot(path: str) -> MemstatReport:
    """
    Read the last report of a file: one report, or one a line (JSON Lines).

    Only the pages, classes, checks and break-downs of the payload are read.

    :param path: A file, or ``-`` for standard input.
    :raises SnapshotError: if it cannot be read, or is not a memstat report
    """
    file = _REPORTS.load(path)
    head, payload = head_of(file), file.read(_Pages)
    counts = [count.pages for count in payload.classes]
    counts += [group.pages for view in (payload.by or {}).values() for group in view]
    if min(counts, default=0) < 0:
        raise file.damaged("a count of pages is negative")
    return MemstatReport(
        target=head.target,
        taken_at_ns=head.taken_at_ns,
        interval_ns=head.interval_ns,
        coverage=head.coverage,
        notes=head.notes,
        pages=payload.pages,
        classes=payload.classes,
        checks=payload.checks,
        managed_pages=payload.managed_pages,
        physical_pages=payload.physical_pages,
        by=payload.by,
    )


# --- Compares two snapshots of memory: two memstat reports.


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
    """Kernel time between the snapshots; ``None`` if unknown, for example between
    different kernels."""

    notes: tuple[Note, ...]
    """Reasons why the snapshots may not be of one machine at two times."""

    pages: Change
    """All struct pages examined."""

    classes: tuple[Change, ...]
    """Changes in the order of the table."""

    checks: tuple[CheckPair, ...]

    by: Annotated[Mapping[str, tuple[GroupChange, ...]] | None, ADDED] = None
    """Break-downs in both snapshots; the group with the largest change first."""


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
        name: tuple(sorted(_diff_groups(groups, after[name], sizes), key=_rank))
        for name, groups in before.items()
        if name in after
    }
    return changes or None


def _rank(change: GroupChange) -> tuple[int, str]:
    return -abs(change.delta_bytes), change.key


def _diff_groups(
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
    """Index groups by key; merge groups with the same key, which should not occur."""
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


# --- Makes the gauges of msa-memstat.


def gauges(report: MemstatReport) -> Iterator[Gauge]:
    """Yield the gauges of a report: every page in one class, and the checks."""
    page_size = report.target.page_size
    yield Gauge(
        name="msatools_memory_class_bytes",
        help="Memory by class: the classes are disjoint.",
        labels=("class",),
        values={(each.name,): each.bytes for each in report.classes},
    )
    yield single(
        "msatools_memory_examined_bytes",
        "Memory that was examined: the sum of the classes.",
        report.pages * page_size,
    )
    managed = report.managed_pages
    yield single(
        "msatools_memory_managed_bytes",
        "Memory that the kernel's page allocator manages.",
        None if managed is None else managed * page_size,
    )
    yield Gauge(
        name="msatools_memory_check_difference_bytes",
        help="What was found less what the kernel's own counter says.",
        labels=("check",),
        values={
            (each.name,): each.difference * page_size
            for each in report.checks
            if each.difference is not None
        },
    )
    yield single(
        "msatools_memory_unexplained_checks",
        "Checks with a difference that nothing explains.",
        sum(bool(each.difference) and not each.explained_by for each in report.checks),
    )
    yield single(
        "msatools_memory_scan_seconds",
        "Time to read and classify all pages.",
        None if report.scan_ns is None else report.scan_ns / 1e9,
    )
