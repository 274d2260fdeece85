# SPDX-License-Identifier: LGPL-2.1-or-later

"""Legends of the page of a report: what the marks and codes that a section uses mean.

A section has the entries of :mod:`msatools.legends` that it shows, and no others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from msatools.legends import (
    Group,
    common,
    cpus,
    locks,
    memstat,
    prstat,
    report,
    zombies,
)
from msatools.prstat.column_docs import FIELDS, why
from msatools.prstat.model import PrstatReport
from msatools.render.memstat.rows import GROUPS, REST
from msatools.render.report.html_blocks import PageBlock, PageTable, texts
from msatools.report.model import TriageVerdict
from msatools.report.parts import ReportParts
from msatools.report.words import DOUBTS


def _meanings(*groups: Group) -> Mapping[str, str]:
    """Map names to their meanings; of a name in several groups, the first counts."""
    found: dict[str, str] = {}
    for group in groups:
        for entry in group.entries:
            found.setdefault(entry.name, entry.meaning)
    return found


SEVERITIES = _meanings(report.SEVERITIES)
DOUBT_WORDS = _meanings(report.CONFIDENCE)
TASK_STATES = _meanings(common.STATES)
TASK_CLASSES = _meanings(prstat.CLASSES)
VALUE_MARKS = _meanings(common.BOUNDS)
OWNER_MARKS = {**_meanings(common.OWNERS), "-": common.KEPT.meaning}
LOCK_WORDS = _meanings(locks.LINES, locks.MODES)
CPU_STATES = _meanings(cpus.STATES)
CPU_COLUMNS = _meanings(cpus.COLUMNS, cpus.SET_COLUMNS)
MEMORY_COLUMNS = _meanings(memstat.COLUMNS, memstat.DIFFS)
MEMORY_CLASSES = {
    entry.key: entry.meaning for entry in memstat.CLASSES.entries if entry.key
}
ZOMBIE_COLUMNS = _meanings(zombies.COLUMNS, zombies.LIMIT_COLUMNS)


class PageLegend(Struct, frozen=True):
    """Entries under a title: a mark, code or header, and what it means."""

    title: str
    entries: Sequence[tuple[str, str]]


def verdict_legend(verdicts: Sequence[TriageVerdict]) -> list[PageLegend]:
    """Return the legend of how bad, and how sure, verdicts are."""
    severities = {verdict.severity for verdict in verdicts}
    doubts = {DOUBTS[verdict.confidence] for verdict in verdicts}
    return _legends(
        ("Severity", _chosen(SEVERITIES, severities)),
        (
            "How sure it is, if the kernel itself does not record it",
            _chosen(DOUBT_WORDS, doubts),
        ),
    )


def section_legend(
    name: str, blocks: Sequence[PageBlock], parts: ReportParts | None
) -> list[PageLegend]:
    """Return the legend of a section, by the name of its command."""
    headers = {
        column.header
        for block in blocks
        if isinstance(block, PageTable)
        for column in block.columns
    }
    shown = [*texts(blocks)]
    if parts is None:
        return []
    if name == "memstat" and parts.memstat is not None:
        used = {count.name for count in parts.memstat.classes if count.pages}
        odd = {word for word in ("UNEXPLAINED",) if any(word in text for text in shown)}
        return _legends(
            ("Columns", _chosen(MEMORY_COLUMNS, headers | odd)),
            ("Classes", [*_memory_classes(used)]),
        )
    if name == "prstat" and parts.prstat is not None:
        return _legends(
            ("Columns", [*_prstat_columns(parts.prstat, headers)]),
            ("Marks before a value", _marks(VALUE_MARKS, shown)),
            ("States", _chosen(TASK_STATES, parts.prstat.totals.states)),
        )
    if name == "locks" and parts.locks is not None:
        waits, roots = parts.locks.waits, parts.locks.roots
        states = {wait.state for wait in waits} | {root.state or "" for root in roots}
        modes = {wait.mode[0].upper() for wait in waits if wait.mode}
        words = {word for word in LOCK_WORDS if len(word) > 1}
        used = {word for word in words if any(_has(word, text) for text in shown)}
        return _legends(
            (
                "Words, and letters before a task",
                _chosen(LOCK_WORDS, used | modes),
            ),
            ("Marks before a lock or its owner", _marks(OWNER_MARKS, shown)),
            ("States, after a task", _chosen(TASK_STATES, states)),
        )
    if name == "zombies":
        return _legends(
            ("Columns", _chosen(ZOMBIE_COLUMNS, headers)),
            (
                "Marks before a value",
                _marks(VALUE_MARKS, shown) if headers else [],
            ),
        )
    if name == "cpus" and parts.cpus is not None:
        states = {state for cpu in parts.cpus.cpus for state in cpu.state}
        seen = {state for state in CPU_STATES if any(_has(state, t) for t in shown)}
        return _legends(
            ("Columns", _chosen(CPU_COLUMNS, headers)),
            ("States", _chosen(CPU_STATES, states & seen | seen & {"panicked"})),
        )
    return []


def _legends(*found: tuple[str, Sequence[tuple[str, str]]]) -> list[PageLegend]:
    return [PageLegend(title, entries) for title, entries in found if entries]


def _chosen(known: Mapping[str, str], used: Iterable[str]) -> Sequence[tuple[str, str]]:
    """Return the entries that are used, in the order of what is known."""
    wanted = frozenset(used)
    return [(code, words) for code, words in known.items() if code in wanted]


def _memory_classes(used: set[str]) -> Iterator[tuple[str, str]]:
    for row in (*(row for _, rows in GROUPS for row in rows), *REST):
        if row.name in used and row.name in MEMORY_CLASSES:
            yield row.label, MEMORY_CLASSES[row.name]


def _prstat_columns(
    report: PrstatReport, headers: set[str]
) -> Iterator[tuple[str, str]]:
    for name in FIELDS:
        if name in headers:
            # No column of the page has a bound that depends on the kernel's latency.
            yield name, why(name, report.accounting, latency_is_bound=False).text


def _marks(known: Mapping[str, str], shown: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (mark, words)
        for mark, words in known.items()
        if any(_has_mark(mark, text) for text in shown)
    ]


def _has_mark(mark: str, text: str) -> bool:
    """Return whether a mark stands before a word, or alone."""
    if mark == "-":
        return text.strip() == "-" or bool(re.search(r"\bowner -(?!\S)|^\s*- ", text))
    return bool(re.search(rf"(?<![^\s(,]){re.escape(mark)}(?=[\w/\s])", text))


def _has(word: str, text: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text))
