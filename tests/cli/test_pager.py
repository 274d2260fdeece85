# SPDX-License-Identifier: LGPL-2.1-or-later

"""The pager for reports that are longer than the screen."""

import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.calls import CORE
from tests.support.probe import DUMP, GUEST, on_terminal
from tests.support.terminal import Terminal
from tests.support.tools import need

PAGER = "sed s/^/paged:/"
SCRIPT = Path(sys.executable).with_name("msa")
ENVIRON = {"MSA_PAGER": PAGER}


def lines(terminal: Terminal) -> list[str]:
    return [line for line in terminal.seen.split("\r\n") if line.startswith("paged:")]


@pytest.mark.parametrize(("count", "is_paged"), [(9, False), (10, True), (11, True)])
def test_only_what_is_longer_than_the_screen(count: int, is_paged: bool) -> None:
    """The prompt takes the last line."""
    terminal = on_terminal(DUMP, "--lines", str(count), size=(80, 10), **ENVIRON)
    assert terminal.end() == 0
    assert len(lines(terminal)) == (count if is_paged else 0)
    assert f"line {count - 1} of report 1" in terminal.seen


@pytest.mark.parametrize(
    "words",
    [
        (DUMP, "--no-pager"),
        (DUMP, "--json"),
        (*GUEST, "0.05", "1", "--no-redraw"),
        (*GUEST, "0.05", "1"),
    ],
)
def test_there_is_none(words: tuple[str, ...]) -> None:
    terminal = on_terminal(*words, "--lines", "50", size=(80, 10), **ENVIRON)
    assert terminal.end() == 0
    assert lines(terminal) == []


@pytest.mark.parametrize(
    ("environ", "is_paged"),
    [
        ({"MSA_PAGER": "cat"}, False),
        ({"MSA_PAGER": " "}, False),
        ({"MSA_PAGER": PAGER, "PAGER": "cat"}, True),
        ({"MSA_PAGER": PAGER, "TERM": "dumb"}, False),
    ],
)
def test_which_one(environ: dict[str, str], is_paged: bool) -> None:
    terminal = on_terminal(DUMP, "--lines", "50", **environ)
    assert terminal.end() == 0
    assert bool(lines(terminal)) == is_paged
    assert "line 49 of report 1" in terminal.seen


def program(*words: str, before: str = "", **environ: str) -> Terminal:
    """Start msa-probe as a program, whose signals are those of a shell's."""
    code = (
        f"import os; {before}\n"
        "from unittest.mock import patch\n"
        "from tests.support.probe import COMMAND, open_nothing\n"
        "from msatools.cli.main import run_console\n"
        "with patch('msatools.cli.execution.open_target', open_nothing):\n"
        f"    raise SystemExit(run_console(COMMAND, {words!r}))"
    )
    return Terminal([sys.executable, "-c", code], size=(80, 10), **environ)


def test_less_by_default() -> None:
    """It shows a screen, and waits: q ends it, and the exit status is the report's."""
    need("less")
    terminal = program(
        *(DUMP, "--lines", "5000", "--lose-at", "1", "--strict"),
        before="[os.environ.pop(n, None) for n in ('MSA_PAGER', 'PAGER', 'LESS')]",
    )
    terminal.read_until("line 8 of report 1")
    assert "line 4000" not in terminal.seen
    # Ctrl-C is less's own: it goes on.
    terminal.press("\x03")
    for _ in range(30):
        # What is pressed before less has dealt with Ctrl-C is lost.
        terminal.press("G")
        with suppress(AssertionError):
            terminal.read_until("line 4999 of report 1", timeout=1.0)
            break
    assert "line 4999 of report 1" in terminal.seen
    terminal.press("q")
    assert terminal.end() == 3
    assert "Traceback" not in terminal.seen


def test_pager_that_ends_early_is_quiet() -> None:
    terminal = program(DUMP, "--lines", "9000", MSA_PAGER="head -n 1")
    assert terminal.end() == 0
    assert terminal.seen.replace("collecting\r\n", "") == "line 0 of report 1\r\n"


def test_pager_that_cannot_be_run() -> None:
    terminal = program(DUMP, "--lines", "50", MSA_PAGER="/nowhere/pager")
    assert terminal.end() == 0
    assert "\r\nline 49 of report 1" in terminal.seen


@pytest.mark.parametrize(
    ("pager", "ready"),
    [
        ("less", "line 8 of report 1"),
        ("sed s/^/paged:/ | less", "paged:line 8 of report 1"),
        # It ignores SIGTERM, and has the terminal raw.
        ("trap '' TERM; stty raw -echo; echo ready; sleep 600", "ready"),
    ],
)
def test_terminated_meanwhile(pager: str, ready: str) -> None:
    """The pager ends with the command, and the terminal is as it was."""
    need("less")
    terminal = program(DUMP, "--lines", "5000", MSA_PAGER=pager)
    modes = terminal.modes
    terminal.read_until(ready)
    terminal.send(signal.SIGTERM)
    # Nothing has the terminal any more, or it would not end.
    assert terminal.end() == -signal.SIGTERM
    assert terminal.modes == modes


def test_in_the_sandbox() -> None:
    """The parent has the terminal, and so the pager."""
    words = ["report", "--types", "btf", "--sandbox", CORE]
    terminal = Terminal([SCRIPT, *words], size=(80, 12), **ENVIRON)
    assert terminal.end() == 0
    assert len(lines(terminal)) > 12
    assert lines(terminal)[0].startswith("paged:")


@pytest.mark.parametrize(
    "words", [["prstat", "--help"], ["help", "it-hangs"], ["help"], ["--help"]]
)
def test_help_and_guides(words: list[str]) -> None:
    terminal = Terminal([SCRIPT, *words], size=(80, 12), **ENVIRON)
    assert terminal.end() == 0
    assert len(lines(terminal)) > 12


def test_guide_that_is_piped() -> None:
    """It has no pager, and a reader that ends early is quiet."""
    shell = f"{SCRIPT} help columns | head -n 1"
    terminal = Terminal(["sh", "-c", shell], **ENVIRON)
    assert terminal.end() == 0
    assert terminal.seen == "msa-cpus\r\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json",), "--no-pager: no effect with --json, which is never paged"),
        ((*GUEST, "1"), "--no-pager: samples are never paged"),
    ],
)
def test_no_effect(words: tuple[str, ...], message: str) -> None:
    from tests.support.probe import run

    ran = run(*words, "--no-pager")
    assert ran.status == 2
    assert message in ran.err
