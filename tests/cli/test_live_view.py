# SPDX-License-Identifier: LGPL-2.1-or-later

"""The keys of the live screen: sort, filter, scroll, pause, columns, help."""

import re
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from msatools.cli.live_view import KEYS, LiveView, split_keys
from msatools.cli.main import run_console
from msatools.legends import legend_of
from msatools.registry import load
from msatools.render.blocks import Block, Column, Table, Text, line
from tests.support.calls import GUEST, open_demo
from tests.support.terminal import PATIENCE_SECONDS, Terminal

UP, DOWN, RIGHT, LEFT = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D"
PGDN, HOME, END, ESC = "\x1b[6~", "\x1b[H", "\x1b[F", "\x1b"


def test_keys_of_one_read() -> None:
    keys = f"a{UP}{PGDN}{ESC}q\x1bOAé"
    assert [*split_keys(keys)] == ["a", UP, PGDN, ESC, "q", "\x1bOA", "é"]


# --- blocks

TABLE = Table(
    (Column("PID"), Column("RSS"), Column("COMMAND")),
    [("1", "2.0M", "init"), ("7", "-", "idle"), ("12", "900K", "sshd"),
     ("30", "1.1G", "Java")],
    notes={3: [line("    a note")]},
)  # fmt: skip
SMALL = Table((Column("SET"),), [("default",)])


def pids(view: LiveView) -> list[str]:
    blocks, has_rows = view.shown([line("head"), SMALL, TABLE])
    assert has_rows
    assert blocks[1] is SMALL
    (table,) = (b for b in blocks if isinstance(b, Table) and b is not SMALL)
    return [str(row[0]) for row in table.rows]


def pressed(view: LiveView, *keys: str) -> list[str]:
    """Return the PIDs of the rows after some keys."""
    pids(view)
    for key in keys:
        assert not view.press(key)
    return pids(view)


def test_sort_and_reverse() -> None:
    view = LiveView()
    assert pressed(view) == ["1", "7", "12", "30"]
    assert pressed(view, RIGHT) == ["30", "12", "7", "1"]
    assert view.status == "by PID"
    assert pressed(view, RIGHT) == ["30", "1", "12", "7"]
    assert pressed(view, "r") == ["12", "1", "30", "7"]
    assert view.status == "by RSS reversed"
    assert pressed(view, "r", RIGHT) == ["30", "7", "1", "12"]
    assert pressed(view, RIGHT) == ["30", "12", "7", "1"]
    assert pressed(view, LEFT, ">", "<") == ["30", "7", "1", "12"]
    assert pressed(view, ESC) == ["1", "7", "12", "30"]
    assert pressed(view, "r") == ["30", "12", "7", "1"]


def test_filter() -> None:
    view = LiveView()
    assert pressed(view, "f", "J", "x", "\x7f", "A") == ["1", "7", "12", "30"]
    assert view.status == "rows with: JA_"
    assert pressed(view, "\r") == ["30"]
    assert view.status == "rows with 'JA'"
    # It begins with what there is.
    assert pressed(view, "/", "\x7f", "\x7f", "i", "\r") == ["1", "7"]
    assert pressed(view, "f", "q", ESC) == ["1", "7"]
    assert pressed(view, "f", "\x7f", "\r") == ["1", "7", "12", "30"]


def test_scroll() -> None:
    view = LiveView()
    view.page = 2
    assert pressed(view, DOWN) == ["7", "12", "30"]
    assert view.status == "from row 2"
    assert pressed(view, PGDN) == ["30"]
    assert pressed(view, DOWN, "j") == ["30"]
    assert pressed(view, "k", UP) == ["7", "12", "30"]
    assert pressed(view, HOME) == ["1", "7", "12", "30"]
    assert pressed(view, END, UP) == ["12", "30"]


def test_columns_of_the_table() -> None:
    view = LiveView()
    pressed(view, "c", *"command,Pid", "\r")
    blocks, _ = view.shown([TABLE])
    (table,) = blocks
    assert isinstance(table, Table)
    assert [column.header for column in table.columns] == ["COMMAND", "PID"]
    assert table.rows[0] == ["init", "1"]
    pressed(view, ESC, "c", *"what", "\r")
    assert view.status == "unknown column 'what'; choose from PID, RSS, COMMAND"
    assert pressed(view, DOWN) == ["7", "12", "30"]
    assert "unknown" not in view.status


def test_columns_of_the_command() -> None:
    asked = []

    def choose(names: str) -> str | None:
        asked.append(names)
        return "no column 'X'" if names == "X" else None

    view = LiveView(choose_columns=choose)
    pressed(view, "c", "X", "\r")
    assert view.status == "no column 'X'"
    pressed(view, "c", *"PID, RSS", "\r", ESC)
    assert asked == ["X", "PID,RSS", ""]


def test_pause_quit_and_help() -> None:
    view = LiveView(legend_of("prstat"))
    assert not view.press("p")
    assert view.is_paused
    assert view.status == "paused"
    assert not view.press(" ")
    assert not view.is_paused
    assert not view.press("?")
    assert view.shows_help
    lines = [
        "".join(map(str, block.spans))
        for block in view.help_blocks()
        if isinstance(block, Text)
    ]
    assert all(any(key in line for line in lines) for key, _ in KEYS)
    assert any("  KLK " in line for line in lines)
    assert all(view.press(key) for key in ("q", "Q", ""))


def test_page_without_a_table() -> None:
    view = LiveView()
    blocks: list[Block] = [line("one"), line("two")]
    assert view.shown(blocks) == (blocks, False)
    assert not view.press(RIGHT)
    assert view.shown(blocks) == (blocks, False)


# --- on a terminal

CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Live:
    """A command on a terminal, whose target is the demo core as a running guest."""

    def __init__(self, name: str, *words: str, size: tuple[int, int]) -> None:
        command: Any = load(name)
        given = (*GUEST, "0.2", *words)

        def work() -> int:
            with patch("msatools.cli.execution.open_target", open_demo):
                return run_console(command, given)

        self.terminal = Terminal(work, size=size)
        self._height = size[1]

    def screen(self, fits: Callable[[list[str]], bool]) -> list[str]:
        """Read until a screen fits, and return its lines."""
        found: list[list[str]] = []

        def is_there() -> bool:
            parts = self.terminal.seen.split("\x1b[H")[1:]
            texts = (CODE.sub("", part).replace("\r", "") for part in parts)
            frames = [[*map(str.rstrip, text.split("\n"))] for text in texts]
            found[:] = [f for f in frames if len(f) == self._height and fits(f)]
            return bool(found)

        deadline = time.monotonic() + PATIENCE_SECONDS
        start = len(self.terminal.seen)
        while not is_there():
            assert time.monotonic() < deadline, self.terminal.seen[-2000:]
            self.terminal.read_until(".", start)
            start = len(self.terminal.seen)
        return found[-1]

    def press(self, keys: str) -> None:
        self.terminal.press(keys)

    def end(self) -> None:
        self.press("q")
        assert self.terminal.end() == 0


def rows(lines: list[str], header: str) -> list[list[str]]:
    at = next(n for n, line in enumerate(lines) if header in line)
    found = (line.split() for line in lines[at + 1 :])
    return [words for words in found if words and words[0].isdecimal()]


def test_prstat() -> None:
    live = Live("prstat", size=(120, 20))
    live.screen(lambda lines: "PID " in str(lines))
    live.press(RIGHT)
    lines = live.screen(lambda lines: lines[-1].startswith("by PID; "))
    shown = [int(words[0]) for words in rows(lines, "PID ")]
    assert len(shown) > 5
    assert shown == sorted(shown, reverse=True)
    live.press("r")
    lines = live.screen(lambda lines: lines[-1].startswith("by PID reversed; "))
    assert [int(words[0]) for words in rows(lines, "PID ")][:2] == [1, 2]
    live.press(DOWN)
    lines = live.screen(lambda lines: "from row 2" in lines[-1])
    assert int(rows(lines, "PID ")[0][0]) == 2
    live.press(f"{HOME}fkworker\r")
    lines = live.screen(lambda lines: "rows with 'kworker'" in lines[-1])
    assert all("kworker" in words[-1] for words in rows(lines, "PID "))
    # Columns that the table did not have.
    live.press(f"{ESC}cpid,maj,command\r")
    lines = live.screen(lambda lines: "MAJ" in str(lines))
    assert any(line.split() == ["PID", "MAJ", "COMMAND"] for line in lines)
    live.press("cpid,what\r")
    live.screen(lambda lines: "unknown column 'what'" in lines[-1].lower())
    live.press("?")
    lines = live.screen(lambda lines: lines[0] == "Keys")
    live.press(END)
    live.screen(lambda lines: lines[0] != "Keys" and "not recorded" in str(lines))
    live.press("?")
    live.screen(lambda lines: "MAJ" in str(lines))
    live.end()
