# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks as styled text, as far as the terminal has colours."""

from collections.abc import Iterable
from itertools import islice
from typing import TextIO

from rich.console import Console
from rich.text import Text

from msatools.render import plain
from msatools.render.blocks import Block, Style

# rich takes about a millisecond a line; a longer block is not read for its colours.
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
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    for block in blocks:
        lines = plain.lines(block)
        for line in islice(lines, _STYLED_LINES):
            text = Text.assemble(*((span.text, _STYLES[span.style]) for span in line))
            text.rstrip()
            # The terminal folds what is too long for it; nothing is cut.
            console.print(text, soft_wrap=True)
        plain.write(lines, out)
