# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a run with an interval writes to a terminal.

How a real terminal shows it is tested in a guest: tests/live/test_terminal.py.
"""

import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from msatools.cli.arguments import rows
from msatools.cli.screen import footer
from msatools.errors import EXIT_FAULT
from msatools.kernel.report import Cost
from msatools.render.blocks import Block, Tree, line
from tests.support.probe import COMMAND, GUEST, ProbeReport, on_terminal
from tests.support.terminal import Terminal

ENTER, LEAVE, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def frames(terminal: Terminal) -> list[list[str]]:
    """Return the lines of each frame, without escape codes."""
    on_screen = terminal.seen.split(LEAVE)[0]
    parts = [CODE.sub("", part) for part in on_screen.split(HOME)[1:]]
    return [lines_of(part) for part in parts if part]


def lines_of(frame: str) -> list[str]:
    """Return the lines of a frame, without the blanks that clear what was there."""
    return [line.rstrip() for line in frame.replace("\r", "").split("\n")]


def left(terminal: Terminal) -> list[str]:
    """Return the lines on the screen after the end of the run."""
    return CODE.sub("", terminal.seen.split(LEAVE)[-1]).split("\r\n")


def test_each_sample_replaces_the_one_before() -> None:
    terminal = on_terminal(*GUEST, "0.1", "3", size=(70, 10))
    assert terminal.end() == 0
    first, *samples = frames(terminal)
    assert "msa-probe: the first sample comes after 0.1 s  q quits" in first[9]
    # Report 1 was taken before the first interval, and is not shown.
    for lines, number in zip(samples, (2, 3, 4), strict=True):
        # Lines after the last row announce the probe's next sample.
        del lines[10:]
        assert len(lines) == 10
        assert lines[0] == f"line 0 of report {number}"
        assert lines[1:-1] == [""] * 8
        assert re.match(r"\d\d:\d\d:\d\d; msa-probe: \d+\.\d\d s CPU, ", lines[-1])
    # After the end, the last sample stays on the normal screen.
    assert left(terminal)[:1] == samples[-1][:1]
    assert "q quits" not in "".join(left(terminal))
    assert terminal.seen.index(ENTER) < terminal.seen.index(LEAVE)


@pytest.mark.parametrize("size", [(20, 12), (0, 0)])
def test_what_does_not_fit_is_cut(size: tuple[int, int]) -> None:
    """A terminal of unknown size has 80 columns and 24 lines."""
    command = replace(COMMAND, blocks=long_lines)
    environ = {"COLUMNS": "7", "LINES": "7"}
    terminal = on_terminal(*GUEST, "0.05", "1", command=command, size=size, **environ)
    assert terminal.end() == 0
    columns, height = size if all(size) else (80, 24)
    _, lines = frames(terminal)
    assert len(lines) == height
    assert max(map(len, lines)) == columns
    assert lines[0] == "x" * (columns - 1) + "…"
    assert re.search(r"  q quits(  \? keys|, \?)$", lines[-1])
    final = left(terminal)
    assert len(final) == height
    assert final[-1] == ""
    assert "q quits" not in final[-2]


def long_lines(report: ProbeReport, args: Namespace) -> Iterator[Block]:
    yield Tree("x" * 99, tuple(Tree(str(n)) for n in range(50)))


def test_lines_that_are_left_out_are_counted() -> None:
    for lines, end in (("9", "; 1 more line"), ("50", "; 42 more lines")):
        terminal = on_terminal(*GUEST, "0.05", "1", "--lines", lines, size=(99, 9))
        assert terminal.end() == 0
        assert frames(terminal)[-1][-1].partition("  ")[0].endswith(end)


def test_resize() -> None:
    """The screen is redrawn at once, long before the next sample."""
    terminal = on_terminal(*GUEST, "1000", "--lines", "50", size=(80, 24))
    terminal.read_until("first sample")
    for columns, lines in ((60, 9), (140, 50), (3, 1)):
        seen = len(terminal.seen)
        terminal.resize(columns, lines)
        # Only the last line is dim.
        terminal.read_until(r"(?s)\x1b\[H.*\x1b\[2m[^\x1b]*\x1b\[0m *$", seen)
        assert len(frames(terminal)[-1]) == lines
        assert max(map(len, frames(terminal)[-1])) <= columns
    terminal.press("q")
    assert terminal.end() == 0


def test_rows_for_a_screen() -> None:
    """Without ``-n``, no more rows are made than a screen can have."""
    command = replace(
        COMMAND,
        arguments=(*COMMAND.arguments, rows("rows")),
        blocks=lambda _, args: [line(f"rows {args.rows}")],
    )
    for words, shown in (((), "rows 10000"), (("-n", "7"), "rows 7")):
        terminal = on_terminal(*GUEST, "0.05", "1", *words, command=command)
        assert terminal.end() == 0
        assert left(terminal)[0] == shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(number: int) -> None:
    terminal = on_terminal(*GUEST, "0.05")
    terminal.read_until("line 0")
    terminal.send(number)
    assert terminal.end() == 0
    assert terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    assert left(terminal)[0].startswith("line 0 ")


def test_stopped_and_continued() -> None:
    terminal = on_terminal(*GUEST, "0.05")
    terminal.read_until("line 0")
    terminal.press("\x1a")
    terminal.read_until(re.escape(LEAVE))
    terminal.wait_until_stopped()
    seen = len(terminal.seen)
    terminal.send(signal.SIGCONT)
    terminal.read_until(re.escape(ENTER), seen)
    terminal.read_until("line 0", seen)
    terminal.press("q")
    assert terminal.end() == 0


def test_stopped_while_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write completes before the stop: none of it comes afterwards."""

    class Out:
        def write(self, data: str) -> None:
            if "line 0" in data:
                os.kill(os.getpid(), signal.SIGTSTP)
            sys.stdout.write(data)
            sys.stdout.flush()

    monkeypatch.setattr("msatools.cli.screen.output", lambda: nullcontext(Out()))
    terminal = on_terminal(*GUEST, "0.05", "1")
    terminal.read_until(re.escape(LEAVE))
    assert terminal.seen.index("line 0") < terminal.seen.index(LEAVE)
    terminal.wait_until_stopped()
    terminal.send(signal.SIGKILL)
    assert terminal.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "environ"),
    [(["--no-redraw"], {}), ([], {"TERM": "dumb"}), (["--json"], {})],
)
def test_samples_are_appended_without_redraw(
    words: list[str], environ: dict[str, str]
) -> None:
    terminal = on_terminal(*GUEST, "0.05", "2", *words, **environ)
    assert terminal.end() == 0
    assert ENTER not in terminal.seen
    assert terminal.seen.count('"since": ' if "--json" in words else "line 0") == 2


def test_error_after_a_sample() -> None:
    """The terminal is restored, and shows the last sample and the error."""
    terminal = on_terminal(*GUEST, "0.05", "--fail-at", "3")
    assert terminal.end() == EXIT_FAULT
    assert left(terminal)[0].startswith("line 0 ")
    assert "msa-probe: a fault of msatools" in left(terminal)[2]


def test_terminal_that_is_gone() -> None:
    terminal = on_terminal(*GUEST, "0.05")
    terminal.read_until("line 0")
    os.close(terminal.fd)
    assert terminal.wait() in (-signal.SIGHUP, 1)


@pytest.mark.parametrize(
    ("cost", "share", "expected"),
    [
        (Cost(cpu_ns=25 * 10**7, wall_ns=10**9, elapsed_ns=1, peak_bytes=3 << 30), 0.5,
         "0.25 s CPU, 25.0 % of one CPU of 50 % that it may, 3.00 GiB"),
        (Cost(cpu_ns=5 * 10**6, wall_ns=0, elapsed_ns=1, peak_bytes=None), None,
         "0.01 s CPU, 0.0 % of one CPU, -"),
    ],
)  # fmt: skip
def test_footer(cost: Cost, share: float | None, expected: str) -> None:
    assert footer("probe", cost, share) == f"msa-probe: {expected}"
