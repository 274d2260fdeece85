# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of memstat that are read again: recorded, or printed by ``--json``."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import msgspec

from msatools.kernel.report import ADDED
from msatools.memory.by.groups import (
    CgroupGroup,
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
from msatools.reports.codec import convert
from msatools.reports.json_file import Reports, head_of

_GROUPS: Mapping[str, type[PageGroup]] = {
    "cgroup": CgroupGroup,
    "file": FileGroup,
    "fs": FileSystemGroup,
    "order": OrderGroup,
    "process": ProcessGroup,
    "section": SectionGroup,
    "slab": SlabGroup,
    "vmalloc": VmallocGroup,
}
"""Types of the groups by break-down; the others are plain :class:`PageGroup`."""


@dataclass(frozen=True, kw_only=True)
class RecordedMemstat(MemstatReport):
    """A report as it is decoded: what its groups are depends on the break-down."""

    by: Mapping[str, tuple[dict[str, Any], ...]] | None = field(  # type: ignore[assignment]
        default=None, metadata=ADDED
    )
    map: None = None


def whole(found: RecordedMemstat) -> MemstatReport:
    """
    Return the report that was recorded.

    :raises ValueError: if a group is none of its break-down
    """
    values = {each.name: getattr(found, each.name) for each in fields(found)}
    by = found.by
    if by is not None:
        values["by"] = {name: _groups(name, groups) for name, groups in by.items()}
    return MemstatReport(**values)


def _groups(name: str, groups: Collection[dict[str, Any]]) -> tuple[PageGroup, ...]:
    kind = _GROUPS.get(name, PageGroup)
    return tuple(convert(group, kind) for group in groups)


def lacking(
    report: MemstatReport, by: Collection[str], asked: Mapping[str, str]
) -> str | None:
    """
    Return the option that asks for what a report does not have, if one does.

    :param asked: Options by the name of the field that has what each asks for.
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
    Return a report with some of its break-downs and lists, and no others.

    :param asked: As of :func:`lacking`.
    """
    chosen = {name: report.by[name] for name in by} if report.by else {}
    return replace(
        report,
        by=chosen or None,
        sections=report.sections if "sections" in asked else None,
        unattributed=report.unattributed if "unattributed" in asked else None,
        frag=report.frag if "frag" in asked else None,
        vmalloc=report.vmalloc if "vmalloc" in asked else None,
    )


_REPORTS = Reports("memstat", MemstatReport.schema)

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Pages(msgspec.Struct):
    """What is compared of the payload."""

    pages: _Count
    classes: tuple[ClassCount, ...]
    checks: tuple[Check, ...]
    managed_pages: int | None
    physical_pages: int | None
    by: dict[str, tuple[PageGroup, ...]] | None = None


def load_snapshot(path: str) -> MemstatReport:
    """
    Read the last report in a file of one, or of one a line (JSON Lines).

    Of its payload it has the pages, classes, checks, and what ``--by`` added.

    :param path: A file, or ``-`` for standard input.
    :raises SnapshotError: if it cannot be read, or is no such report
    """
    found = _REPORTS.load(path)
    head, payload = head_of(found), found.read(_Pages)
    counts = [each.pages for each in payload.classes]
    counts += [each.pages for view in (payload.by or {}).values() for each in view]
    if min(counts, default=0) < 0:
        raise found.damaged("a count of pages is below zero")
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
