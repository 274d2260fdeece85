# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of ``--self-check``."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from msatools.render.blocks import (
    NOT_KEPT,
    Block,
    Column,
    Span,
    Style,
    Table,
    free_text,
    line,
    plural,
)
from msatools.render.header import header, notes, taken_from
from msatools.selfcheck.model import KernelFacts, SelfCheck, SelfCheckReport, Verdict

_ORDER: tuple[Verdict, ...] = ("differs", "unknown", "moved", "ok", "not-applicable")
_WORDS: dict[Verdict, str] = {"not-applicable": "not applicable"}
_STYLES: dict[Verdict, Style] = {
    "differs": "bad",
    "unknown": "bad",
    "moved": "warn",
    "ok": "good",
    "not-applicable": "dim",
}
_COLUMNS = (
    Column("CHECK"),
    Column("LEFT", "right", worth=2),
    Column("RIGHT", "right", worth=1),
    Column("DIFF", "right"),
    Column("ALLOWED", "right", worth=0),
    Column("VERDICT"),
    free_text("WHAT", least=24),
)
_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)
_BEGIN = "-- for a bug report: no names of hosts, tasks or files, and no addresses --"
_END = "-- end --"


def selfcheck_blocks(
    report: SelfCheckReport, *, verbose: bool = False
) -> Iterator[Block]:
    """Yield the blocks of a report: failed checks first, the paste block last.

    :param verbose: Whether to list checks that do not apply, too.
    """
    yield from header(
        report.target, plural(report.readings, "reading"), verbose=verbose
    )
    checks = _sorted(report.checks)
    shown = [c for c in checks if verbose or c.verdict != "not-applicable"]
    yield Table(_COLUMNS, [_row(check) for check in shown])
    yield from notes(report)
    yield line(_summary(report))
    yield line()
    yield line(_BEGIN)
    yield from map(line, paste_lines(report))
    yield line(_END)


def paste_lines(report: SelfCheckReport) -> Iterator[str]:
    """Yield the lines for a bug report, without names of hosts, tasks or files."""
    target, own = report.target, report.software
    yield (
        f"msa-{report.command} --self-check: msatools {own.msatools}, "
        f"drgn {own.drgn}, Python {own.python}"
    )
    yield (
        f"kernel {target.release} {target.arch}, {taken_from(target)}, "
        f"types {target.types}, pages of {target.page_size}"
        f"{', truncated' if target.truncated else ''}"
    )
    yield from _facts(report.kernel)
    for check in _sorted(report.checks):
        if check.verdict not in ("ok", "not-applicable"):
            yield _ADDRESS.sub("0x...", _line(check))
    yield str(_summary(report).text)
    absent = [c.name for c in report.checks if c.verdict == "not-applicable"]
    yield from _list("not applicable", absent)
    lost = (f"{key} {count}" for key, count in report.coverage.items() if _is_loss(key))
    yield from _list("losses", lost)
    yield from _list("variables missing", report.kernel.variables_missing)
    yield from _list("members missing", report.kernel.members_missing)
    older = report.kernel.members_older.items()
    yield from _list("members by older names", (f"{new}={old}" for new, old in older))


def _is_loss(key: str) -> bool:
    return key not in ("reads", "bytes_read")


def _facts(kernel: KernelFacts) -> Iterator[str]:
    levels = kernel.paging_levels or NOT_KEPT
    yield (
        f"page tables of {levels} levels, stacks by {kernel.unwinder} unwinder, "
        f"CPUs {kernel.cpus_online}/{kernel.cpus_possible}, "
        f"nodes {kernel.nodes_possible or NOT_KEPT}"
    )
    for words, has in (("with", True), ("without", False)):
        yield from _list(
            words, (n for n, is_in in kernel.features.items() if is_in is has)
        )


def _list(words: str, names: Iterable[str]) -> Iterator[str]:
    joined = ", ".join(names)
    if joined:
        yield f"{words}: {joined}"


def _sorted(checks: Iterable[SelfCheck]) -> list[SelfCheck]:
    return sorted(checks, key=lambda check: _ORDER.index(check.verdict))


def _summary(report: SelfCheckReport) -> Span:
    counts = Counter(check.verdict for check in report.checks)
    parts = [f"{counts[v]} {_WORDS.get(v, v)}" for v in _ORDER if counts[v]]
    words = f"{len(report.checks)} checks: {', '.join(parts)}"
    return Span(words, "bad" if report.has_failed else "good")


def _row(check: SelfCheck) -> tuple[str | Span, ...]:
    return (
        check.name,
        _number(check.left_value),
        _number(check.right_value),
        _signed(check.difference),
        _allowed(check),
        Span(_WORDS.get(check.verdict, check.verdict), _STYLES[check.verdict]),
        _what(check),
    )


def _what(check: SelfCheck) -> str:
    words = f"{check.left} / {check.right}" if check.right else check.left
    return f"{words} ({check.reason})" if check.reason else words


def _line(check: SelfCheck) -> str:
    numbers = f"{_number(check.left_value)} / {_number(check.right_value)}"
    return f"{check.verdict.upper()} {check.name}: {numbers}: {_what(check)}"


def _number(value: int | None) -> str:
    return NOT_KEPT if value is None else f"{value:,}"


def _signed(value: int | None) -> str:
    return NOT_KEPT if value is None else f"{value:+,}" if value else "0"


def _allowed(check: SelfCheck) -> str:
    if not check.allowed_least and check.allowed_most == 0:
        return "0"
    most = "" if check.allowed_most is None else f"{check.allowed_most:,}"
    return f"{check.allowed_least:,}..{most}"
