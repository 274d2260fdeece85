# SPDX-License-Identifier: LGPL-2.1-or-later

"""Takes the paths of the machine that a report was made on out of it.

Who reads a page has the dump somewhere else: names of files without their directories
are left, so that the command lines can be copied where the dump lies. Pure.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import TypeVar

from msgspec.structs import replace

from msatools.kernel.report import Note, Report
from msatools.report.model import ReportSection, TriageReport
from msatools.report.parts import ReportParts
from msatools.target.model import Target

R = TypeVar("R", bound=Report)

_KERNEL = "vmcore"
"""The name of a dump whose path has none."""


def portable(report: TriageReport) -> TriageReport:
    """Return a report with names of files instead of paths."""
    names = _names(report.target)
    parts = report.parts

    def command(line: str) -> str:
        for path, name in names.items():
            line = _replaced(line, shlex.quote(path), shlex.quote(name))
        return line

    def words(text: str) -> str:
        for path, name in names.items():
            text = _replaced(text, path, name)
            # What lies beside the dump, such as another part of a split one.
            folder = str(PurePath(path).parent)
            if folder not in ("/", "."):
                text = re.sub(rf"(?<![\w./-]){re.escape(folder)}/", "", text)
        return text

    def section(found: ReportSection) -> ReportSection:
        return (
            found if found.error is None else replace(found, error=words(found.error))
        )

    return replace(
        _portable_part(report, names),
        verdicts=tuple(
            replace(verdict, see=command(verdict.see)) for verdict in report.verdicts
        ),
        next=tuple(
            replace(step, command=command(step.command)) for step in report.next
        ),
        notes=tuple(Note(note.code, words(note.text)) for note in report.notes),
        sections={name: section(each) for name, each in report.sections.items()},
        parts=None if parts is None else _portable_parts(parts, names),
    )


def _names(target: Target) -> Mapping[str, str]:
    """Return the names to show for paths: of the dump, and of files with debug info."""
    if target.kind == "kcore":
        return {}
    paths = [target.path, *(each.path for each in target.sources if each.path)]
    names = {path: PurePath(path).name or _KERNEL for path in paths}
    dump = names[target.path]
    if dump.startswith("-") or dump.replace(".", "", 1).isdecimal():
        # It would be an option, or an interval.
        names[target.path] = f"./{dump}"
    return {path: name for path, name in names.items() if path != name}


def _replaced(text: str, path: str, name: str) -> str:
    """Return a text with a name for a path, where that stands by itself."""
    return re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])", lambda _: name, text)


def _portable_parts(parts: ReportParts, names: Mapping[str, str]) -> ReportParts:
    def part(report: R | None) -> R | None:
        return None if report is None else _portable_part(report, names)

    return replace(
        parts,
        target=_portable_target(parts.target, names),
        memstat=part(parts.memstat),
        prstat=part(parts.prstat),
        locks=part(parts.locks),
        zombies=part(parts.zombies),
        cpus=part(parts.cpus),
    )


def _portable_part(report: R, names: Mapping[str, str]) -> R:
    return replace(report, target=_portable_target(report.target, names))


def _portable_target(target: Target, names: Mapping[str, str]) -> Target:
    return replace(
        target,
        path=names.get(target.path, target.path),
        sources=tuple(
            replace(source, path=source.path and names.get(source.path, source.path))
            for source in target.sources
        ),
    )
