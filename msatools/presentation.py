# SPDX-License-Identifier: LGPL-2.1-or-later

"""Render a report as its command prints it, for rich, prompts and notebooks.

:class:`msatools.model.Presented` calls it.
"""

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from msatools.render import plain
from msatools.render.blocks import Block, Style

if TYPE_CHECKING:
    from rich.console import Group

_CSS: dict[Style, str] = {
    "title": "font-weight: bold",
    "good": "color: green",
    "warn": "color: #b58900",
    "bad": "color: #c00000; font-weight: bold",
    "dim": "opacity: 0.6",
}


def rich_text(report: Any) -> "Group":
    """Return a report as styled text, whose lines rich cuts to its width."""
    from rich.console import Group
    from rich.text import Text

    from msatools.render.terminal import STYLES

    rows = []
    for line in _lines(report):
        pieces = ((span.text, STYLES[span.style] or "") for span in line)
        row = Text.assemble(*pieces, no_wrap=True, overflow="ignore")
        row.rstrip()
        rows.append(row)
    return Group(*rows)


def text(report: Any) -> str:
    """Return a report as lines of plain text."""
    lines = ("".join(span.text for span in line) for line in _lines(report))
    return "\n".join(line.rstrip() for line in lines)


def html(report: Any) -> str:
    """Return a report as preformatted text in HTML."""
    lines = ("".join(_spans(line)) for line in _lines(report))
    text = "\n".join(line.rstrip() for line in lines)
    return f'<pre style="white-space: pre">{text}</pre>'


def _spans(line: plain.Line) -> Iterator[str]:
    for span in line:
        text = escape(span.text)
        yield (
            text
            if span.style is None
            else (f'<span style="{_CSS[span.style]}">{text}</span>')
        )


def _lines(report: Any) -> Iterator[plain.Line]:
    """Yield the lines of a report; unprintable characters are escaped."""
    for block in blocks(report):
        yield from plain.lines(block)


def blocks(report: Any) -> Iterable[Block]:
    """Return the blocks that the report's command prints without options."""
    from msatools.memory.diff import MemstatDiff
    from msatools.render.diff import diff_blocks
    from msatools.render.memstat.diff import memstat_diff_blocks
    from msatools.render.selfcheck import selfcheck_blocks
    from msatools.reports.diff import ReportDiff
    from msatools.selfcheck.model import SelfCheckReport

    if isinstance(report, ReportDiff):
        return diff_blocks(report, None)
    if isinstance(report, MemstatDiff):
        return memstat_diff_blocks(report, None)
    if isinstance(report, SelfCheckReport):
        return selfcheck_blocks(report, verbose=False)
    from msatools.cli.arguments import make_parser
    from msatools.registry import load

    family, _, _ = report.schema.rpartition("/")
    command = load(family.removeprefix("msatools."))
    args = make_parser(command, in_drgn=True).parse_intermixed_args([])
    return command.blocks(report, args)
