# SPDX-License-Identifier: LGPL-2.1-or-later

"""Subsection bitmaps of hot-plugged memory sections."""

import pytest

from msatools.memory.memmap import DeviceRange, _runs, pieces

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


def test_runs_are_split_where_devices_begin_and_are_set() -> None:
    """A namespace whose struct pages lie on itself, within a section."""
    device = DeviceRange(pfn=0x9000, end=0xA000, first_set=0x9200)
    other = DeviceRange(pfn=0xA000, end=0xB000, first_set=0xA000)
    assert pieces(0x8000, 0x8000, [device, other]) == [
        (0x8000, 0x1000, None),
        (0x9000, 0x200, device),
        (0x9200, 0xE00, device),
        (0xA000, 0x1000, other),
        (0xB000, 0x5000, None),
    ]
    assert pieces(0x10, 0x20, [device]) == [(0x10, 0x20, None)]
    assert pieces(0x9100, 0x10, [device]) == [(0x9100, 0x10, device)]
