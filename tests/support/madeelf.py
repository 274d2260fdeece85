# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make ELF files without sections, of either byte order and word size."""

import struct

from msatools.program.formats import ReadAt

BUILD_ID = bytes(range(20))


def reader(data: bytes) -> ReadAt:
    return lambda offset, size: data[offset : offset + size]


def note(order: str, name: bytes, kind: int, description: bytes) -> bytes:
    def pad(data: bytes) -> bytes:
        return data + bytes(-len(data) % 4)

    sizes = struct.pack(order + "III", len(name) + 1, len(description), kind)
    return sizes + pad(name + b"\0") + pad(description)


def image(
    order: str = "<",
    bits: int = 64,
    kind: int = 4,
    many: bool = False,
    build_id: bytes = BUILD_ID,
) -> bytes:
    """Return an ELF file with a note segment and a segment of 100 bytes at its end.

    :param many: Store the number of segments in section header 0 (PN_XNUM).
    """
    notes = note(order, b"CORE", 1, b"abcde") + note(order, b"GNU", 3, build_id)
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
    notes_offset = phoff + 2 * phdr
    data_offset = notes_offset + len(notes)
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

    table = segment(4, notes_offset, len(notes)) + segment(1, data_offset, 100)
    return ident + header + section + table + notes + bytes(100)
