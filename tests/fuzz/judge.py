# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a run on a damaged dump may do, and what it must not."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msatools.errors import EXIT_FAULT
from tests.fuzz.cases import Case
from tests.fuzz.dumps import ELF_SEGMENT, Dump

PEAK_BYTES = 512 << 20
"""Memory that a run may use, besides a KiB for each task."""

SECONDS = 60.0

_FAULT = "a fault of msatools "
_LINE = re.compile(r"msa-\w+: .+\n")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]")
_OF_THE_FILE = ("path", "format", "kind", "dump_level")
_PLACES = range(8, 32)
"""Offsets of p_offset, p_vaddr and p_paddr in a program header."""

_COSTS = (
    *("reads", "bytes_read", "read_bytes", "memmap_reads", "reads_saved"),
    *("scan_ns", "elapsed_ns"),
)

GOOD = ("same", "lossy", "refused", "damaged", "other")
"""Outcomes that are no failures. ``damaged``: one line that the data are, from a place
that found that out; it could have been a loss of a part of the report. ``other``: a
different answer, without a loss, where the contents of memory were changed, which
nothing can show. Of the failures, ``fault`` is an error that msatools takes for its
own, be it of the whole or of a part."""


@dataclass(frozen=True)
class Run:
    """How a run ended."""

    status: int | None
    """As of :func:`os.waitstatus_to_exitcode`; ``None`` if it had to be killed."""

    out: str
    err: str
    peak_bytes: int


def judge(case: Case, run: Run, expected: Iterable[Run]) -> str:
    """Return the outcome of a run.

    :param expected: Runs of the same words on undamaged dumps; more are made if the
        answer of the first is another.
    """
    if run.status is None:
        return "hung"
    if run.status < 0:
        return "killed"
    if run.peak_bytes > PEAK_BYTES:
        return "memory"
    if "Traceback" in run.err:
        return "traceback"
    if run.status == EXIT_FAULT or _FAULT in run.err or _FAULT in run.out:
        return "fault"
    if _CONTROL.search(run.out) or _CONTROL.search(run.err):
        return "controls"
    if run.status == 1 and "its data are damaged (" in run.err:
        return "damaged"
    if run.status == 1:
        return "refused" if _LINE.fullmatch(run.err) and not run.out else "unclear"
    if run.status == 3:
        return "lossy" if not run.err else "unclear"
    if run.status != 0 or run.err:
        return "unclear"
    if not case.is_json:
        return "same"
    answer = _answer(run.out)
    if any(answer == _answer(each.out) for each in expected):
        return "same"
    return "other" if changes_contents(case) else "silent"


def changes_contents(case: Case) -> bool:
    """Return whether contents of memory were changed, rather than what describes it."""
    start = data_start(case.dump)
    return case.layer != "container" or any(
        change.data is not None
        and (
            change.offset + len(change.data) > start
            or moves_contents(case.dump, change.offset, len(change.data))
        )
        for change in case.changes
    )


def moves_contents(dump: Dump, offset: int, size: int) -> bool:
    """Return whether bytes of an ELF file say where the contents of memory belong.

    Segments may overlap, and begin anywhere.
    """
    if dump.format != "elf":
        return False
    return any(
        (place - dump.table.start) % ELF_SEGMENT.size in _PLACES
        for place in range(max(offset, dump.table.start), offset + size)
        if place in dump.table
    )


def data_start(dump: Dump) -> int:
    """Return the offset of the first page in a file."""
    return dump.notes.stop if dump.format == "elf" else dump.table.stop


def _answer(text: str) -> Any:
    """Return what a report says of the kernel; command lines in it name no file."""
    path = json.loads(text)["target"]["path"]
    report = json.loads(text.replace(path, "vmcore"))
    for key in _COSTS:
        report.pop(key, None)
    for key in _OF_THE_FILE:
        report.get("target", {}).pop(key, None)
    for key in _COSTS:
        report.get("coverage", {}).pop(key, None)
    return report
