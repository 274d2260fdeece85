# SPDX-License-Identifier: LGPL-2.1-or-later

"""What text is written to, by its stream, the environment and ``--color``."""

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from msatools.render.blocks import Span, line
from msatools.render.device import Colour, Colours, Device, device_of, show


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which terminals have colours."""
    for name in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """A terminal of 100 columns and 30 lines."""
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    with os.fdopen(follower, "w", encoding="utf-8") as out:
        yield out
    os.close(leader)


@pytest.mark.parametrize(
    ("name", "value", "colours"),
    [
        ("TERM", "xterm-256color", "256"),
        ("TERM", "linux", "standard"),
        ("TERM", "xterm-direct", "truecolor"),
        ("COLORTERM", "truecolor", "truecolor"),
        ("TERM", "dumb", None),
        ("NO_COLOR", "1", None),
        ("NO_COLOR", "", "256"),
    ],
)
def test_terminal(
    terminal: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    colours: Colours | None,
) -> None:
    monkeypatch.setenv(name, value)
    # The size is that of the terminal now.
    monkeypatch.setenv("COLUMNS", "7")
    assert device_of(terminal) == Device(100, 30, colours, has_signs=True)


@pytest.mark.parametrize(
    ("colour", "colours"), [("always", "standard"), ("never", None)]
)
def test_the_option_is_stronger_than_the_environment(
    terminal: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    colour: Colour,
    colours: Colours | None,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert device_of(terminal, colour).colours == colours
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    assert device_of(terminal, colour).colours == colours


def test_pipe_has_no_width_unless_it_is_coloured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.StringIO()
    assert device_of(pipe) == Device()
    assert device_of(pipe, "always") == Device(colours="256")
    monkeypatch.setenv("COLUMNS", "90")
    assert device_of(pipe) == device_of(pipe, "never") == Device()
    assert device_of(pipe, "always") == Device(90, None, "256")
    for wrong in ("", "0", "wide", "-3"):
        monkeypatch.setenv("COLUMNS", wrong)
        assert device_of(pipe, "always").width is None


@pytest.mark.parametrize(
    ("colours", "printed"),
    [
        (None, "a b\n"),
        ("standard", "\x1b[1;31ma\x1b[0m b\n"),
        ("truecolor", "\x1b[1;31ma\x1b[0m b\n"),
    ],
)
def test_styles(colours: Colours | None, printed: str) -> None:
    out = io.StringIO()
    blanks = Span("  ", "title")
    show([line(Span("a", "bad"), " b ", blanks)], out, Device(colours=colours))
    assert out.getvalue() == printed
