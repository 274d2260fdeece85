# SPDX-License-Identifier: LGPL-2.1-or-later

import struct

import pytest

from msatools.target import elf
from msatools.target.reading import ReadAt

BUILD_ID = bytes(range(20))


def reader(data: bytes) -> ReadAt:
    return lambda offset, size: data[offset : offset + size]


def note(order: str, name: bytes, kind: int, description: bytes) -> bytes:
    def pad(data: bytes) -> bytes:
        return data + bytes(-len(data) % 4)

    sizes = struct.pack(order + "III", len(name) + 1, len(description), kind)
    return sizes + pad(name + b"\0") + pad(description)


def image(order: str = "<", bits: int = 64, kind: int = 4, many: bool = False) -> bytes:
    """An ELF file with a note segment and one of 100 bytes at its end.

    ``many``: the number of segments is where it goes when the header is too small.
    """
    notes = note(order, b"CORE", 1, b"abcde") + note(order, b"GNU", 3, BUILD_ID)
    ident = b"\x7fELF" + bytes([bits // 32, 1 if order == "<" else 2, 1]) + bytes(9)
    phnum = 0xFFFF if many else 2
    if bits == 64:
        ehdr, phdr, shdr = 64, 56, 64
        word, head = "Q", "HHIQQQIHHHHHH"
    else:
        ehdr, phdr, shdr = 52, 32, 40
        word, head = "I", "HHIIIIIHHHHHH"
    shoff = ehdr if many else 0
    phoff = ehdr + (shdr if many else 0)
    notes_at = phoff + 2 * phdr
    data_at = notes_at + len(notes)
    header = struct.pack(
        order + head, kind, 62, 1, 0, phoff, shoff, 0, ehdr, phdr, phnum, shdr, 0, 0
    )
    section = b""
    if many:
        first = struct.pack(order + f"II4{word}II", 0, 0, 0, 0, 0, 1, 0, 2)
        section = first + bytes(shdr - len(first))

    def segment(p_type: int, offset: int, size: int) -> bytes:
        if bits == 64:
            return struct.pack(
                order + "IIQQQQQQ", p_type, 0, offset, 0, 0, size, size, 0
            )
        return struct.pack(order + "IIIIIIII", p_type, offset, 0, 0, size, size, 0, 0)

    table = segment(4, notes_at, len(notes)) + segment(1, data_at, 100)
    return ident + header + section + table + notes + bytes(100)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("many", [False, True])
def test_headers(order: str, bits: int, many: bool) -> None:
    data = image(order, bits, many=many)
    headers = elf.parse(reader(data))
    assert headers.is_core
    assert headers.end == len(data)
    assert [segment.kind for segment in headers.segments] == [4, 1]
    assert elf.build_id(reader(data), headers) == BUILD_ID
    assert [n.name for n in elf.notes(reader(data), headers)] == [b"CORE", b"GNU"]
    assert next(elf.notes(reader(data), headers)).description == b"abcde"


def test_end_of_cut_file_is_that_of_whole() -> None:
    whole = image()
    assert elf.parse(reader(whole[:-50])).end == len(whole)


def test_program_is_no_core() -> None:
    assert not elf.parse(reader(image(kind=2))).is_core


@pytest.mark.parametrize("size", [0, 10, 40, 100])
def test_file_cut_off_within_its_headers(size: int) -> None:
    with pytest.raises(EOFError):
        elf.parse(reader(image()[:size]))


@pytest.mark.parametrize(
    ("offset", "garbage"),
    [
        (0, b"ELF?"),
        (4, b"\x07"),  # class
        (5, b"\x07"),  # byte order
        (54, b"\x01\0"),  # bytes in a program header
    ],
)
def test_garbage_in_the_header(offset: int, garbage: bytes) -> None:
    data = bytearray(image())
    data[offset : offset + len(garbage)] = garbage
    with pytest.raises(ValueError, match="ELF"):
        elf.parse(reader(bytes(data)))


def test_absurd_table_is_not_read() -> None:
    data = bytearray(image(many=True))
    struct.pack_into("<I", data, 64 + 44, 0xFFFFFFFF)  # number of segments
    with pytest.raises(ValueError, match="table"):
        elf.parse(reader(bytes(data)))
