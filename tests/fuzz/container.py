# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damage of a dump's file: its headers, bitmaps, descriptors, pages and length."""

import struct
from random import Random

from tests.fuzz.change import Change, flipped, integers
from tests.fuzz.dumps import METHODS, PAGE, Dump
from tests.support.kdumpfile import DESCRIPTOR


def change(dump: Dump, chance: Random) -> list[Change]:
    """Return changes to a file."""
    return chance.choice(KINDS)(dump, chance)


def _in_headers(dump: Dump, chance: Random) -> list[Change]:
    offset = _near_front(dump, chance)
    return [Change(offset, integers(chance))]


def _near_front(dump: Dump, chance: Random) -> int:
    """Return an offset, more often one where fields of headers are."""
    if dump.format == "elf":
        return chance.randrange(min(len(dump.headers), 64 + 56 * 3))
    places = (range(8), range(8, 12), range(400, 480), range(4096, 4096 + 104))
    shift = 4096 + 16 if dump.format == "flattened" else 0
    if shift and chance.random() < 0.3:
        return chance.randrange(4096 + 16)
    return shift + chance.choice(chance.choice(places))


def _shape(dump: Dump, chance: Random) -> list[Change]:
    """Change what the layout of all other headers depends on."""
    if dump.format in ("elf", "flattened"):
        return _in_headers(dump, chance)
    covered = (dump.table.start - dump.headers.stop) // 2 * 8
    most = struct.pack("<Q", covered + chance.choice((1, covered, covered + 1)))
    order = chance.choice("<>")
    shape = chance.choice(
        (
            Change(8, struct.pack("<i", chance.choice((-1, 2, 3, 5, 7)))),
            Change(PAGE + 96, most),
            Change(416, struct.pack(order + "I", 1 << chance.randrange(8, 22))),
            Change(PAGE + 12, struct.pack("<i", chance.choice((-1, 1, 2)))),
        )
    )
    return [shape, *chance.choice((_descriptors, _bitmap, _in_headers))(dump, chance)]


def _bits(dump: Dump, chance: Random) -> list[Change]:
    """Flip bits anywhere, most often in tables."""
    area = chance.choice((dump.headers, dump.table, range(len(dump.data))))
    offsets = [chance.choice(area) for _ in range(chance.choice((1, 1, 2, 10, 100)))]
    return [flipped(dump.data, offset, chance) for offset in offsets]


def _bitmap(dump: Dump, chance: Random) -> list[Change]:
    area = range(dump.headers.stop, dump.table.start) or dump.headers
    return [
        flipped(dump.data, chance.choice(area), chance)
        for _ in range(chance.choice((1, 2, 50)))
    ]


def _descriptors(dump: Dump, chance: Random) -> list[Change]:
    if dump.format == "elf":
        return _segments(dump, chance)
    count = len(dump.table) // DESCRIPTOR.size
    changes = []
    for _ in range(chance.choice((1, 1, 5, 200))):
        offset = dump.table.start + chance.randrange(count) * DESCRIPTOR.size
        field, size = chance.choice(((0, 8), (8, 4), (12, 4)))
        changes.append(Change(offset + field, integers(chance, size)))
    return changes


def _segments(dump: Dump, chance: Random) -> list[Change]:
    count = len(dump.table) // 56
    field = chance.choice((0, 8, 16, 24, 32, 40))
    offset = dump.table.start + chance.randrange(count) * 56 + field
    return [Change(offset, integers(chance, 8))]


def _bombs(dump: Dump, chance: Random) -> list[Change]:
    """Many pages are one block that expands to much more than a page."""
    method = METHODS.get(dump.format, METHODS["zlib"])
    block = method.pack(bytes(chance.choice((2, 100, 180)) * PAGE))
    if not dump.pages or dump.format == "elf" or len(block) > PAGE:
        return _descriptors(dump, chance)
    end = len(dump.data)
    descriptor = DESCRIPTOR.pack(end, len(block), method.flag, 0)
    places = sorted(dump.pages.values())
    first = chance.randrange(len(places))
    bombs = places[first : first + chance.choice((1, 100, len(places)))]
    return [*(Change(place, descriptor) for place in bombs), Change(end, block)]


def _cut(dump: Dump, chance: Random) -> list[Change]:
    size = len(dump.data)
    left = chance.choice(
        (
            size - chance.randrange(1, 10_000),
            chance.randrange(size),
            chance.choice(dump.table),
            chance.choice(dump.headers),
        )
    )
    return [Change(max(left, 0), None)]


def _lost_range(dump: Dump, chance: Random) -> list[Change]:
    """A part of the file is zeros, as after a copy that failed."""
    size = chance.choice((512, 4096, 65536, 1 << 20))
    start = chance.randrange(len(dump.data))
    return [Change(start, bytes(min(size, len(dump.data) - start)))]


def _repeated(dump: Dump, chance: Random) -> list[Change]:
    """A part of the file is another one."""
    size = chance.choice((24, 512, 4096))
    source = chance.randrange(len(dump.data) - size)
    start = chance.randrange(len(dump.data) - size)
    return [Change(start, dump.data[source : source + size])]


KINDS = (
    _in_headers,
    _shape,
    _bits,
    _bitmap,
    _descriptors,
    _descriptors,
    _bombs,
    _cut,
    _cut,
    _lost_range,
    _repeated,
)
