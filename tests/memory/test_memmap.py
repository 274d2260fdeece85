# SPDX-License-Identifier: LGPL-2.1-or-later

"""Subsection bitmaps of hot-plugged memory sections."""

import pytest

from msatools.memory.memmap import _runs


@pytest.mark.parametrize(
    ("bitmap", "pages", "runs"),
    [
        (b"\x00", 4096, []),
        (b"\x01", 4096, [(0, 512)]),
        (b"\x06", 4096, [(512, 1024)]),
        (b"\x80\x01", 8192, [(3584, 1024)]),
        (b"\xff" * 8, 32768, [(0, 32768)]),
        (b"\x05", 4096, [(0, 512), (1024, 512)]),
    ],
)
def test_runs(bitmap: bytes, pages: int, runs: list[tuple[int, int]]) -> None:
    assert _runs(bitmap, pages) == runs
