# SPDX-License-Identifier: LGPL-2.1-or-later

"""The redrawn screen of a run with an interval, as a terminal is told to show it.

What a real terminal makes of it is looked at in a guest: tests/live/test_terminal.py.
"""

import os
import re
import signal
import sys
import time

import pytest

from fixtures import lab
from tests.support.terminal import Terminal

PROBE = [sys.executable, "-m", "tests.support.probe"]
ENTER, LEAVE, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def guest(live_qmp: str, run_612: lab.Run) -> list[str]:
    """The words that name a guest that runs."""
    return ["--qemu", live_qmp, "-s", str(run_612.vmlinux)]


def frames(terminal: Terminal) -> list[list[str]]:
    """Give the lines of each frame, without what styles them."""
    on_screen = terminal.seen.split(LEAVE)[0]
    parts = [CODE.sub("", part) for part in on_screen.split(HOME)[1:]]
    return [part.split("\r\n") for part in parts if part]


def left(terminal: Terminal) -> list[str]:
    """Give the lines that are there in the end."""
    return CODE.sub("", terminal.seen.split(LEAVE)[-1]).split("\r\n")


def test_each_sample_takes_the_place_of_the_one_before(guest: list[str]) -> None:
    terminal = Terminal([*PROBE, *guest, "0.3", "3"], size=(70, 10))
    assert terminal.end() == 0
    first, *samples = frames(terminal)
    assert len(samples) == 3
    assert "msa-probe: the first sample comes after 0.3 s  q quits" in first[9]
    for lines in samples:
        # After it the probe tells of its next look.
        del lines[10:]
        assert len(lines) == 10
        assert lines[0].startswith("line 0 jiffies ")
        assert lines[1:-1] == [""] * 8
        assert re.match(r"\d\d:\d\d:\d\d; msa-probe: \d+\.\d\d s CPU, ", lines[-1])
    # The first look is at what was before the first interval.
    assert [lines[0].split()[-1] for lines in samples] == ["2", "3", "4"]
    # The last sample stays, after what was there before.
    assert left(terminal)[:1] == samples[-1][:1]
    assert "q quits" not in "".join(left(terminal))
    assert terminal.seen.index(ENTER) < terminal.seen.index(LEAVE)


def test_what_does_not_fit_is_cut(guest: list[str]) -> None:
    words = ("0.2", "1", "--lines", "50")
    terminal = Terminal([*PROBE, *guest, *words], size=(20, 12))
    assert terminal.end() == 0
    _, lines = frames(terminal)
    assert len(lines) == 12
    assert max(map(len, lines)) == 20
    assert lines[10].startswith("line 10 ")
    assert len(left(terminal)) == 12


def test_resize(guest: list[str]) -> None:
    terminal = Terminal([*PROBE, *guest, "30", "--lines", "50"], size=(80, 24))
    terminal.read_until("first sample")
    for columns, lines in ((60, 9), (140, 50), (3, 1)):
        seen = len(terminal.seen)
        began = time.monotonic()
        terminal.resize(columns, lines)
        terminal.read_until(re.escape(HOME), seen, timeout=5)
        # Long before the next sample.
        assert time.monotonic() - began < 2
        time.sleep(0.1)
        terminal.read_until("m", seen)
        assert len(frames(terminal)[-1]) == lines
        assert max(map(len, frames(terminal)[-1])) <= columns
    terminal.press("q")
    assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(guest: list[str], number: int) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2"])
    terminal.read_until("line 0")
    terminal.send(number)
    assert terminal.end() == 0
    assert terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    assert left(terminal)[0].startswith("line 0 ")


def test_stopped_and_continued(guest: list[str]) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2"])
    terminal.read_until("line 0")
    terminal.press("\x1a")
    terminal.read_until(re.escape(LEAVE))
    time.sleep(0.5)
    seen = len(terminal.seen)
    terminal.send(signal.SIGCONT)
    terminal.read_until(re.escape(ENTER), seen)
    terminal.read_until("line 0", seen)
    terminal.press("q")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("words", "environ"), [(["--no-redraw"], {}), ([], {"TERM": "dumb"})]
)
def test_appended(guest: list[str], words: list[str], environ: dict[str, str]) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2", "2", *words], **environ)
    assert terminal.end() == 0
    assert ENTER not in terminal.seen
    assert terminal.seen.count("line 0") == 2


def test_error_after_a_sample(guest: list[str]) -> None:
    """The terminal is as it was, with the last sample and the error under it."""
    terminal = Terminal([*PROBE, *guest, "0.2", "--fail-at", "3"])
    assert terminal.end() == 1
    assert left(terminal)[0].startswith("line 0 ")
    assert "msa-probe: unexpected RuntimeError" in left(terminal)[2]


def test_terminal_that_is_gone(guest: list[str]) -> None:
    terminal = Terminal([*PROBE, *guest, "0.2"])
    terminal.read_until("line 0")
    os.close(terminal.fd)
    assert terminal.wait() in (-signal.SIGHUP, 1)
