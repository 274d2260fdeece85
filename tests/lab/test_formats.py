# SPDX-License-Identifier: LGPL-2.1-or-later
import io
import struct
from pathlib import Path

from fixtures.lab import formats

PROGRAM_HEADERS = [bytes([n]) * 56 for n in (1, 2, 3)]
NOTES = b"the notes"


def elf(program_headers_at: int, sections_at: int = 0) -> io.BytesIO:
    """An ELF64 file with three program headers, and notes right behind them."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<QQ", header, 32, program_headers_at, sections_at)
    struct.pack_into("<HHHHH", header, 54, 56, 3, 64, 2 if sections_at else 0, 1)
    file = io.BytesIO()
    file.write(header)
    file.seek(program_headers_at)
    file.write(b"".join(PROGRAM_HEADERS) + NOTES)
    return file


def test_headers_move_behind_the_elf_header() -> None:
    file = elf(192, sections_at=64)
    size = len(file.getvalue())
    formats.move_program_headers(file)
    moved = file.getvalue()
    assert struct.unpack_from("<QQ", moved, 32) == (64, 0)
    assert struct.unpack_from("<HHHHH", moved, 54) == (56, 3, 0, 0, 0)
    assert moved[64 : 64 + 3 * 56] == b"".join(PROGRAM_HEADERS)
    assert moved.endswith(NOTES)
    assert len(moved) == size


def test_cut_keeps_the_start(tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.write_bytes(bytes(range(256)) * 64)
    formats.cut(whole, half, sixteenths=8)
    assert half.read_bytes() == whole.read_bytes()[: 128 * 64]
