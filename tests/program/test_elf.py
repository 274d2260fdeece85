# SPDX-License-Identifier: LGPL-2.1-or-later

"""ELF headers and notes are parsed; damaged ones raise errors."""

import struct

import pytest
from msgspec.structs import replace

from msatools.errors import DamagedDataError
from msatools.program import formats
from tests.support.madeelf import BUILD_ID, image, reader


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("many", [False, True])
def test_headers(order: str, bits: int, many: bool) -> None:
    data = image(order, bits, many=many)
    headers = formats.parse_elf(reader(data))
    assert headers.is_core
    assert headers.end == len(data)
    assert [segment.kind for segment in headers.segments] == [4, 1]
    assert formats.build_id(reader(data), headers) == BUILD_ID
    assert [n.name for n in formats.notes(reader(data), headers)] == [b"CORE", b"GNU"]
    assert next(formats.notes(reader(data), headers)).description == b"abcde"


def test_notes_of_a_separate_debug_file_are_in_its_sections() -> None:
    """Its program headers point at parts of the stripped file, which it lacks."""
    data = bytearray(image())
    note, other = formats.parse_elf(reader(data)).segments
    struct.pack_into("<Q", data, 40, len(data))  # e_shoff
    struct.pack_into("<HH", data, 58, 64, 1)  # e_shentsize, e_shnum
    data += struct.pack("<IIQQQQIIQQ", 0, 7, 0, 0, note.offset, note.size, *[0] * 4)
    struct.pack_into("<Q", data, 64 + 8, other.offset)
    assert (
        formats.build_id(reader(bytes(data)), formats.parse_elf(reader(data)))
        == BUILD_ID
    )


@pytest.mark.parametrize(
    ("offset", "garbage"),
    [
        (0, b"ELF?"),
        (4, b"\x07"),  # class
        (5, b"\x07"),  # byte order
        (54, b"\x01\0"),  # e_phentsize
    ],
)
def test_garbage_in_the_header(offset: int, garbage: bytes) -> None:
    data = bytearray(image())
    data[offset : offset + len(garbage)] = garbage
    with pytest.raises(DamagedDataError, match="ELF"):
        formats.parse_elf(reader(bytes(data)))


def test_absurd_table_is_not_read() -> None:
    data = bytearray(image(many=True))
    struct.pack_into("<I", data, 64 + 44, 0xFFFFFFFF)  # number of segments
    with pytest.raises(DamagedDataError, match="table"):
        formats.parse_elf(reader(bytes(data)))


def test_absurd_number_of_segments_in_a_large_file() -> None:
    """A table of a GiB, all of it in the file, took 4 GiB of memory."""
    data = bytearray(image(many=True))
    struct.pack_into("<I", data, 64 + 44, (1 << 20) + 1)
    data += bytes((1 << 20) * 56 + 56)
    with pytest.raises(DamagedDataError, match="a table of 1,048,577 entries"):
        formats.parse_elf(reader(bytes(data)))


def test_absurd_notes_are_not_read() -> None:
    """Many segments may say that all of a large file are notes."""
    headers = formats.parse_elf(reader(image()))
    notes = tuple(formats.Extent(4, 0, 1 << 20) for _ in range(65))
    with pytest.raises(DamagedDataError, match="notes of 68,157,440 bytes"):
        list(formats.notes(reader(image()), replace(headers, segments=notes)))
