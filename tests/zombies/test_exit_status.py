# SPDX-License-Identifier: LGPL-2.1-or-later

import os

import pytest

from msatools.zombies.model import ending


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
