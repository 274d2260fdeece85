# SPDX-License-Identifier: LGPL-2.1-or-later

import os
import signal

import pytest

from msatools.reports.units import signal_name
from msatools.zombies.model import ending


def test_signals_are_those_of_linux() -> None:
    names = {sig.value: sig.name for sig in signal.Signals if sig.value < 32}
    names |= {number: f"signal {number}" for number in (0, 32, 34, 64, 127)}
    assert {number: signal_name(number) for number in names} == names


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "0"),
        (1 << 8, "1"),
        (255 << 8, "255"),
        (9, "SIGKILL"),
        (11, "SIGSEGV"),
        (11 | 0x80, "SIGSEGV (core)"),
        (34, "signal 34"),
    ],
)
def test_ending(code: int, text: str) -> None:
    assert ending(code) == text
    # Compared with Python's decoding.
    assert os.WIFEXITED(code) == text.isdigit()
    assert os.WCOREDUMP(code) == text.endswith("(core)")


def test_ending_of_a_child() -> None:
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ending(os.waitpid(pid, 0)[1]) == "SIGTERM"
