# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports that ``msa-memstat --json`` has printed, read again."""

from typing import Annotated

import msgspec

from msatools.memory.model import Check, ClassCount, MemstatReport, PageGroup
from msatools.reports.json_file import Reports, SnapshotError, head_of

__all__ = ["SnapshotError", "load_snapshot"]

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
