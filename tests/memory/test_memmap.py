# SPDX-License-Identifier: LGPL-2.1-or-later

"""Subsection bitmaps of hot-plugged memory sections."""

import pytest

from msatools.memory.memmap import _runs

WORD = 8
"""A bitmap consists of whole longs, whatever its number of bits."""


@pytest.mark.parametrize(
    ("bitmap", "pages", "step", "runs"),
    [
        (b"\x00", 32768, 512, []),
        (b"\x01", 32768, 512, [(0, 512)]),
        (b"\x06", 32768, 512, [(512, 1024)]),
        (b"\x80\x01", 32768, 512, [(3584, 1024)]),
        (b"\xff" * 8, 32768, 512, [(0, 32768)]),
        (b"\x05", 32768, 512, [(0, 512), (1024, 512)]),
        # 16 MiB sections of 64 KiB pages: 8 bits of 64 are used.
        (b"\x02", 256, 32, [(32, 32)]),
        (b"\xff\xff", 256, 32, [(0, 256)]),
    ],
)
def test_runs(
    bitmap: bytes, pages: int, step: int, runs: list[tuple[int, int]]
) -> None:
    assert _runs(bitmap.ljust(WORD, b"\0"), pages, step) == runs
