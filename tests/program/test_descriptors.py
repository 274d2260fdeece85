# SPDX-License-Identifier: LGPL-2.1-or-later

import struct

import numpy as np
import pytest

from msatools.program import formats
from msatools.program.kdump_pages import DescriptorCheck, check_descriptors, kept_pages
from tests.program.test_kdump import BLOCK, image
from tests.support.madeelf import reader

DATA = 4 * BLOCK + 3 * 24


def check(data: bytes) -> DescriptorCheck:
    read = reader(data)
    return check_descriptors(read, formats.parse_kdump(read), len(data))


def changed(row: int, *fields: int, order: str = "<") -> bytes:
    data = bytearray(image(order))
    struct.pack_into(order + "QIIQ", data, 4 * BLOCK + row * 24, *fields, 0)
    return bytes(data)


@pytest.mark.parametrize("size", [2 * BLOCK, 3 * BLOCK, 4 * BLOCK + 30])
def test_file_cut_off_within_its_tables(size: int) -> None:
    with pytest.raises(EOFError):
        check(image()[:size])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("fields", "is_bad"),
    [
        ((DATA, 100, 1), False),
        ((DATA, 100, 0x20), False),
        ((DATA, 150, 0), False),
        ((DATA, 0, 1), True),
        ((DATA, BLOCK + 1, 1), True),
        ((DATA, 4 << 20, 1), True),
        ((DATA, 100, 0x40), True),
        ((DATA - 1, 100, 1), True),
        ((0, 100, 1), True),
        ((1 << 40, 100, 1), True),
        (((1 << 64) - 10, 100, 1), True),
        (((1 << 63) - 1, 0xFFFFFFFF, 1), True),
    ],
)
def test_one_descriptor(order: str, fields: tuple[int, ...], is_bad: bool) -> None:
    assert check(changed(1, *fields, order=order)) == (int(is_bad), False)


def test_parts_have_descriptors_of_their_own_pages() -> None:
    read = reader(image(split=1))
    header = formats.parse_kdump(read)
    # Pages 0, 2 and 4 are kept; the part has 3 to 6.
    assert header.part == range(3, 7)
    assert kept_pages(read, header) == 1


def test_bits_are_counted_as_numpy_counts_them() -> None:
    chance = np.random.default_rng(1)
    bits = chance.integers(0, 256, BLOCK, np.uint8)
    data = bytearray(image(split=1))
    data[3 * BLOCK : 4 * BLOCK] = bits.tobytes()
    for first, last in ((0, 8), (3, 5), (7, 30001), (16, 32768), (9, 1 << 40)):
        struct.pack_into("<QQ", data, BLOCK + 80, first, last)
        read = reader(bytes(data))
        expected = np.unpackbits(bits, bitorder="little")[first:last].sum()
        assert kept_pages(read, formats.parse_kdump(read)) == expected
