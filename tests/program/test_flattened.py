# SPDX-License-Identifier: LGPL-2.1-or-later

import random
import struct

import pytest

from msatools.errors import DamagedDataError
from msatools.program.formats import FlatFile, unflattened
from tests.support.madeelf import reader

CONTENT = bytes(range(256)) * 40


def flatten(pieces: list[tuple[int, bytes]], end: bool = True) -> bytes:
    head = (b"makedumpfile\0\0\0\0" + struct.pack(">qq", 1, 1)).ljust(4096, b"\0")
    body = b"".join(struct.pack(">qq", at, len(data)) + data for at, data in pieces)
    return head + body + (b"\xff" * 16 if end else b"")


def opened(pieces: list[tuple[int, bytes]]) -> FlatFile:
    return FlatFile(reader(flatten(pieces)))


def test_pieces_in_any_order() -> None:
    flat = opened([(600, CONTENT[600:]), (0, CONTENT[:200]), (200, CONTENT[200:600])])
    assert flat.is_complete
    assert flat.size == len(CONTENT)
    assert flat.is_whole(0, len(CONTENT))
    assert flat.read(0, len(CONTENT) + 5) == CONTENT
    assert flat.read(150, 500) == CONTENT[150:650]


def test_later_pieces_replace_earlier_ones() -> None:
    """As where makedumpfile writes its header again, once it knows all counts."""
    chance = random.Random(1)
    expected = bytearray(CONTENT)
    pieces = [(0, CONTENT)]
    for _ in range(200):
        start = chance.randrange(len(CONTENT))
        data = chance.randbytes(chance.randrange(1, 900))[: len(CONTENT) - start]
        expected[start : start + len(data)] = data
        pieces.append((start, data))
    flat = opened(pieces)
    assert flat.read(0, len(CONTENT)) == expected
    for _ in range(100):
        start = chance.randrange(len(CONTENT))
        assert flat.read(start, 300) == expected[start : start + 300]
    assert flat.is_whole(0, len(CONTENT))


@pytest.mark.parametrize("cut", [1, 16, 17, 5000])
def test_cut_file_is_incomplete(cut: int) -> None:
    data = flatten([(0, CONTENT)])
    flat = FlatFile(reader(data[:-cut]))
    assert not flat.is_complete
    assert flat.read(0, 100) == CONTENT[:100]
    assert flat.read(len(CONTENT) - 100, 100) == CONTENT[-100:][: max(0, 116 - cut)]


def test_last_piece_is_as_long_as_the_file_has_it() -> None:
    """What is missing of it is a hole, and no zeros that a page could have."""
    data = flatten([(0, CONTENT), (len(CONTENT), CONTENT)], end=False)
    flat = FlatFile(reader(data[:-3000]))
    assert flat.is_cut
    assert flat.size == 2 * len(CONTENT) - 3000
    assert flat.read(flat.size - 10, 100) == CONTENT[-3010:-3000]
    opened = unflattened(reader(data[:-3000]), len(data))
    assert opened.pages(flat.size, 100) == b""


def test_pieces_backwards() -> None:
    """libkdumpfile moves all others with each: half a minute for 200,000 of them."""
    piece = bytes(4096)
    count = (1 << 16) + 2

    def read(offset: int, size: int) -> bytes:
        row, at = divmod(offset - 4096, 16 + len(piece))
        if row >= count:
            return b"\xff" * size
        header = struct.pack(">qq", (count - row) * len(piece), len(piece))
        return (header + piece)[at : at + size]

    with pytest.raises(DamagedDataError, match="impossible piece"):
        FlatFile(read)
