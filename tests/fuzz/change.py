# SPDX-License-Identifier: LGPL-2.1-or-later

"""Changes to the bytes of a file."""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from random import Random

INTERESTING = (
    *(0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0xFFFF),
    *(1 << 20, 1 << 22, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40),
    *((1 << 52) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096),
)
"""Numbers at which sizes, counts and addresses go wrong."""


@dataclass(frozen=True)
class Change:
    """Bytes that replace others."""

    offset: int
    data: bytes | None
    """``None`` cuts the file off."""


def applied(data: bytes, changes: Iterable[Change]) -> bytes:
    """Return the changed contents of a file."""
    changed = bytearray(data)
    for change in changes:
        if change.data is None:
            del changed[change.offset :]
            continue
        if change.offset > len(changed):
            continue
        changed[change.offset : change.offset + len(change.data)] = change.data
    return bytes(changed)


def apply_to_file(path: Path, changes: Iterable[Change]) -> None:
    """Change a file in place, as :func:`applied` does its contents."""
    with path.open("r+b") as file:
        for change in changes:
            if change.data is None:
                file.truncate(min(change.offset, file.seek(0, os.SEEK_END)))
            elif change.offset <= file.seek(0, os.SEEK_END):
                file.seek(change.offset)
                file.write(change.data)


def flipped(data: bytes | mmap, offset: int, chance: Random) -> Change:
    """Return the change of one bit."""
    offset = min(offset, len(data) - 1)
    return Change(offset, bytes([data[offset] ^ 1 << chance.randrange(8)]))


def integers(chance: Random, size: int | None = None) -> bytes:
    """Return an integer that is likely to do harm, or any."""
    size = size or chance.choice((1, 2, 4, 4, 8))
    number = chance.choice((chance.getrandbits(64), *INTERESTING, *INTERESTING))
    return struct.pack("<Q", number)[:size]
