# SPDX-License-Identifier: LGPL-2.1-or-later

"""Compare the views of reports made by hand with golden files."""

import io
from collections.abc import Iterable, Mapping

from msatools.locks.report import UserFrame
from msatools.render import plain
from msatools.render.blocks import Block, Span
from msatools.render.device import show
from tests.support.golden import Golden

Screens = Mapping[str, Iterable[Block]]
"""Blocks to show, by title."""

EVIL = "a\x1b[31m\u202eb\r\nc"
"""A name that a dump may contain; ``SAFE`` is how it has to be shown."""
SAFE = r"a\x1b[31m\u202eb\x0d\x0ac"

FRAMES = (
    UserFrame(function="wake\x1b", offset=28, module="herd\x1b", guess=False),
    UserFrame(function="main", offset=7, module=None, guess=True),
    UserFrame(function=None, offset=0x11C0, module="herd\x1b", guess=True),
)
"""Of a task that wakes others."""


def printed(blocks: Iterable[Block]) -> list[str]:
    """Return the lines of some blocks."""
    out = io.StringIO()
    show(blocks, out)
    return out.getvalue().splitlines()


def alarms(blocks: Iterable[Block]) -> list[Span]:
    """Return the spans in a style for good, bad or warning, each once."""
    spans = (span for each in blocks for line in plain.lines(each) for span in line)
    styled = (span for span in spans if span.style not in (None, "title", "dim"))
    return list(dict.fromkeys(styled))


def check_screens(golden: Golden, name: str, screens: Screens) -> None:
    """Compare screens, each followed by its styled spans, with a golden file."""
    lines = []
    for title, blocks in screens.items():
        shown = list(blocks)
        lines += [f"--- {title}", *printed(shown)]
        lines += [f"    ({span.style}: {span.text})" for span in alarms(shown)]
        lines += [""]
    golden(name, lines)


def check_escaped(blocks: Iterable[Block], at_least: int = 1) -> None:
    """Check that no name from a dump reaches the terminal as it is."""
    lines = printed(blocks)
    assert all(line.isprintable() for line in lines)
    assert sum(SAFE in line for line in lines) >= at_least
