# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads memstat reports back: recorded ones, and the output of ``--json``."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from msatools.memory.by.groups import (
    CgroupGroup,
    DmaBufGroup,
    FileGroup,
    FileSystemGroup,
    PageGroup,
    ProcessGroup,
    SlabGroup,
    VmallocGroup,
)
from msatools.memory.by.order import OrderGroup
from msatools.memory.by.section import SectionGroup
from msatools.memory.model import Check, ClassCount, MemstatReport
from msatools.model import values
from msatools.reports.codec import convert
from msatools.reports.json_file import Reports, head_of

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
        parts["by"] = {name: _groups(name, groups) for name, groups in by.items()}
    return MemstatReport(**parts)


def _groups(name: str, groups: Collection[dict[str, Any]]) -> tuple[PageGroup, ...]:
    kind = GROUPS.get(name, PageGroup)
    return tuple(convert(group, kind) for group in groups)


def lacking(
    report: MemstatReport, by: Collection[str], asked: Mapping[str, str]
) -> str | None:
    """
    Return the first option whose data a report lacks; ``None`` if it has all.

    :param asked: Options by the name of the report's field that each requests.
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
