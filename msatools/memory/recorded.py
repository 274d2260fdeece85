# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of memstat that are read again: recorded, or printed by ``--json``."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

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
from msatools.reports.json_file import (
    Object,
    Reports,
    head_of,
)

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


def load_snapshot(path: str) -> MemstatReport:
    """
    Read the last report in a file of one, or of one a line (JSON Lines).

    Of its payload it has the pages, classes, checks, and what ``--by`` added.

    :param path: A file, or ``-`` for standard input.
    :raises SnapshotError: if it cannot be read, or is no such report
    """
    return _report(_REPORTS.load(path))


def _report(found: Object) -> MemstatReport:
    by = found.object_or_none("by")
    return MemstatReport(
        **vars(head_of(found)),
        pages=found.count("pages"),
        classes=tuple(
            ClassCount(each.text("name"), each.count("pages"), each.count("bytes"))
            for each in found.objects("classes")
        ),
        checks=tuple(_check(each) for each in found.objects("checks")),
        managed_pages=found.number_or_none("managed_pages"),
        physical_pages=found.number_or_none("physical_pages"),
        by=None
        if by is None
        else {
            name: tuple(_json_group(each) for each in by.objects(name))
            for name in by.keys
        },
    )


def _check(found: Object) -> Check:
    return Check(
        name=found.text("name"),
        walk_pages=found.number("walk_pages"),
        counter=found.text("counter"),
        kernel_pages=found.number_or_none("kernel_pages"),
        difference=found.number_or_none("difference"),
        explained_by=found.text_or_none("explained_by"),
    )


def _json_group(found: Object) -> PageGroup:
    return PageGroup(
        key=found.text("key"),
        name=found.text("name"),
        pages=found.count("pages"),
        classes=found.object("classes").counts(),
    )
