# SPDX-License-Identifier: LGPL-2.1-or-later

"""What rich draws, and when it does not: in pipes, and of tables of very many rows."""

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from msatools.render.blocks import (
    Block,
    Column,
    Span,
    Table,
    Tree,
    cut_line,
    free_text,
    line,
)
from msatools.render.device import Colours, Device
from msatools.render.plain import columns_of
from msatools.render.terminal import Drawing, drawn
from tests.support.calls import CORE

HOSTILE = (
    "[red]name[/red]",
    "[/]",
    ":smile: [link=http://a]x[/link]",
    "\\[bold]",
    "日本語の名前",
    "e\u0301e\u0301e\u0301",
    "\u0301",
    "👩\u200d👩\u200d👧",
    "❤\ufe0f",
    "שלום",
    "a\u202eb\x1b[2J\x9b1m\tc\r\nd",
    "\ud800",
)
"""Names that a dump may have."""

COLUMNS = (
    Column("PID", "right", is_key=True),
    Column("USER", worth=1),
    Column("RSS", "right", worth=2),
    free_text("PATH", worth=3, least=6, keeps="end"),
    free_text("COMMAND", least=8),
)
TABLE = Table(
    COLUMNS,
    [
        *((str(n), name, Span("1.0G", "warn"), name * 3, name)
          for n, name in enumerate(HOSTILE)),
        ("123", "root", "12K", "/usr/lib/a/path/of/some/length", "words of any length"),
        ("7",),
    ],
    notes={2: [line("  a note")]},
)  # fmt: skip
CODE = re.compile(r"\x1b\[[0-9;]*m")


def shown(block: Block, width: int, full: bool, colours: Colours | None) -> list[str]:
    device = Device(width, colours=colours, full=full, has_signs=True)
    return list(drawn([block], device))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("width", [5, 24, 40, 60, 80, 120, 200])
def test_rich_draws_a_table_as_it_is_laid_out_beyond_some_rows(
    width: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rich = shown(TABLE, width, full, None)
    coloured = [CODE.sub("", line) for line in shown(TABLE, width, full, "256")]
    assert [line.rstrip() for line in coloured] == by_rich
    monkeypatch.setattr(Drawing, "_drawn", None)
    drawing = Drawing(Device(width, full=full, has_signs=True), most_drawn=0)
    assert [*map(drawing.styled, drawing.lines(TABLE))] == by_rich


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("width", [8, 30, 80])
def test_hostile_names(name: str, width: int) -> None:
    """They are text, not markup, and no line is wider than the terminal."""
    table = Table((free_text("NAME"), Column("N")), [[name, "1"]])
    for block in (table, Tree(name, (Tree(name),)), line(name), cut_line(name)):
        lines = shown(block, width, False, "truecolor")
        plain = [CODE.sub("", line) for line in lines]
        assert all(line.isprintable() for line in plain)
        assert max(map(columns_of, plain)) <= width
        if name.isprintable() and columns_of(name) + 4 <= width:
            assert name in "".join(plain)


def test_tree() -> None:
    tree = Tree("root", (Tree("a", (Tree("b"),)), Tree(Span("long " * 5, "bad"))))
    assert shown(tree, 12, False, None) == [
        "root",
        "├── a",
        "│   └── b",
        "└── long lo…",
    ]
    assert shown(tree, 12, True, None)[3:] == [
        "└── long",
        "    long",
        "    long",
        "    long",
        "    long",
    ]
    ascii_lines = list(drawn([tree], Device(80)))
    assert ascii_lines[1] == "+-- a"
    assert ascii_lines[3].startswith("`-- long")


IMPORTED = """
import sys
from msatools.console import run
status = run("memstat", sys.argv[1:])
print(status, *(name for name in sys.modules if name.partition(".")[0] == "rich"))
"""


def imported(*words: str) -> Sequence[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1].split()


def test_a_pipe_does_without_rich() -> None:
    """Which would take 20 ms to import."""
    assert imported(CORE) == ["0"]
    assert "rich.style" in imported(CORE, "--color", "always")
