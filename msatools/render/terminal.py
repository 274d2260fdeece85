# SPDX-License-Identifier: LGPL-2.1-or-later

"""Prints blocks as styled text, in the colours that the terminal supports."""

import sys
from collections.abc import Iterable
from itertools import islice
from typing import TextIO

from rich.console import Console
from rich.text import Text

from msatools.render import plain
from msatools.render.blocks import Block, Mark, Span, Style

# rich takes about a millisecond a line; the rest of a longer block is not styled.
_STYLED_LINES = 1000

_STYLES: dict[Style | None, str] = {
    None: "",
    "title": "bold",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "dim",
}


def show(blocks: Iterable[Block], out: TextIO) -> None:
    """Print blocks; the lines are those of :func:`msatools.render.plain.show`."""
    console = _console(out)
    for block in blocks:
        lines = plain.lines(block)
        for line in islice(lines, _STYLED_LINES):
            # The terminal wraps long lines; nothing is cut.
            console.print(_styled(line, console), soft_wrap=True)
        plain.write(lines, out)


class Styler:
    """Styles lines for the current standard output."""

    def __init__(self) -> None:
        self._console = _console(sys.stdout)

    def styled(self, lines: Iterable[plain.Line], width: int) -> list[str]:
        """Return lines with terminal codes, cut to *width* columns."""
        self._console.width = width
        with self._console.capture() as captured:
            for line in lines:
                styled = _styled(line, self._console)
                self._console.print(styled, no_wrap=True, overflow="crop")
        return captured.get().splitlines()


def _console(out: TextIO) -> Console:
    return Console(file=out, highlight=False, markup=False, emoji=False)


def _styled(line: plain.Line, console: Console) -> Text:
    has_signs = not console.no_color and console.encoding.startswith("utf")
    text = Text.assemble(*(_piece(span, has_signs) for span in line))
    text.rstrip()
    return text


def _piece(span: Span, has_signs: bool) -> tuple[str, str]:
    if isinstance(span, Mark):
        signs = span.signs if has_signs else span.text
        return signs, span.colour or _STYLES[span.style]
    return span.text, _STYLES[span.style]
