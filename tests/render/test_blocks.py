# SPDX-License-Identifier: LGPL-2.1-or-later

import io
import re

import pytest

from msatools.render.blocks import Block, Column, Span, Table, Text, Tree, escape, line
from msatools.render.device import show
from tests.render.screens import check_screens
from tests.support.golden import Golden

EVIL = "a\x1b[31mb\x07\r\nc\x9bd\u202ee\ud800[bold]f[/bold]\\[red]"
ESCAPED = r"a\x1b[31mb\x07\x0d\x0ac\x9bd\u202ee\ud800[bold]f[/bold]\[red]"

TABLE = Table(
    columns=(Column("NAME"), Column("PAGES", "right"), Column("WHY")),
    rows=[
        ["slab", "3,775", Span("ok", "good")],
        ["a longer name", Span("1", "warn")],
        ["", "12,345,678", "because"],
    ],
)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*blocks: Block) -> str:
    out = io.StringIO()
    show(blocks, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("raw", "escaped"),
    [
        ("", ""),
        ("plain text, 100 % [x]", "plain text, 100 % [x]"),
        ("naïve 日本 é", "naïve 日本 é"),
        (EVIL, ESCAPED),
        ("\x00\x7f\x80", r"\x00\x7f\x80"),
        ("\U000e0001", r"\U000e0001"),
        ("\u2028", r"\u2028"),
    ],
)
def test_escape(raw: str, escaped: str) -> None:
    assert escape(raw) == escaped


def test_golden(golden: Golden) -> None:
    tree = Tree("root", (Tree("a", (Tree("b"), Tree("c"))), Tree("d", (Tree("e"),))))
    screens: dict[str, list[Block]] = {
        "a table": [TABLE],
        "without rows": [Table(TABLE.columns, [])],
        "text": [line("a ", Span("b", "bad")), line(), Text(("c",))],
        "a tree": [tree],
    }
    check_screens(golden, "blocks", screens)


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an environment in which terminals have colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def without_styles(out: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


@pytest.mark.usefixtures("colours")
@pytest.mark.parametrize(
    "block", [line(EVIL), Table((Column("X"),), [[EVIL]]), Tree(EVIL, (Tree(EVIL),))]
)
def test_data_cannot_reach_the_terminal(block: Block) -> None:
    for out in (io.StringIO(), FakeTerminal()):
        show([block], out)
        assert ESCAPED in without_styles(out)
        assert without_styles(out).replace("\n", "").isprintable()
