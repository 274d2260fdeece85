# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports that ``msa-memstat --json`` has printed, read again."""

from msatools.memory.by.groups import PageGroup
from msatools.memory.model import Check, ClassCount, MemstatReport
from msatools.reports.json_file import (
    Object,
    Reports,
    SnapshotError,
    notes_of,
    target_of,
)

__all__ = ["SnapshotError", "load_snapshot"]

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
        target=target_of(found.object("target")),
        taken_at_ns=found.number_or_none("taken_at_ns"),
        interval_ns=found.number_or_none("interval_ns"),
        coverage=found.object("coverage").counts(),
        notes=notes_of(found),
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
            name: tuple(_group(each) for each in by.objects(name)) for name in by.keys
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


def _group(found: Object) -> PageGroup:
    return PageGroup(
        key=found.text("key"),
        name=found.text("name"),
        pages=found.count("pages"),
        classes=found.object("classes").counts(),
    )
