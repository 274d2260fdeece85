# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damage of a file with memory and no note: its ranges, and what finds the kernel."""

import re
from random import Random

from tests.fuzz.change import Change, flipped, integers
from tests.fuzz.dumps import LIME_HEADER, PAGE, Dump


def change(dump: Dump, chance: Random) -> list[Change]:
    """Return changes to a file."""
    return chance.choice(KINDS)(dump, chance)


def _headers(dump: Dump) -> list[int]:
    """Return the offset of the header of each range."""
    starts = sorted(dump.pages.values())
    ends = {0, *(start + PAGE for start in starts)}
    return [start - LIME_HEADER.size for start in starts if start not in ends]


def _in_headers(dump: Dump, chance: Random) -> list[Change]:
    changes = []
    for _ in range(chance.choice((1, 1, 5))):
        field, size = chance.choice(((0, 4), (4, 4), (8, 8), (16, 8), (24, 8)))
        place = chance.choice(_headers(dump)) + field
        changes.append(Change(place, integers(chance, size)))
    return changes


def _numbers(dump: Dump, chance: Random) -> list[Change]:
    """Change numbers in VMCOREINFO."""
    text = bytes(dump.data[dump.notes.start : dump.notes.stop])
    found = list(re.finditer(rb"=(-?(?:0x)?[0-9a-f]+)\n", text))
    changes = []
    for _ in range(chance.choice((1, 1, 3, 20))):
        number = chance.choice(found)
        size = len(number[1])
        digits = b"0123456789abcdef-x\n\0"
        data = bytes(chance.choice(digits) for _ in range(size))
        changes.append(Change(dump.notes.start + number.start(1), data))
    return changes


def _text(dump: Dump, chance: Random) -> list[Change]:
    count = chance.choice((1, 2, 20))
    return [flipped(dump.data, chance.choice(dump.notes), chance) for _ in range(count)]


def _copies(dump: Dump, chance: Random) -> list[Change]:
    """Write other copies of VMCOREINFO to pages of the kernel."""
    text = bytes(dump.data[dump.notes.start : dump.notes.stop])
    changes = []
    for _ in range(chance.choice((1, 10, 100))):
        line = b"BUILD-ID=%d\n" % chance.randrange(1 << 30)
        moved = re.sub(rb"BUILD-ID=.*\n", line, text).ljust(PAGE, b"\0")[:PAGE]
        changes.append(Change(chance.choice(list(dump.pages.values())), moved))
    return changes


def _bits(dump: Dump, chance: Random) -> list[Change]:
    count = chance.choice((1, 10, 100))
    places = range(len(dump.data))
    return [flipped(dump.data, chance.choice(places), chance) for _ in range(count)]


def _cut(dump: Dump, chance: Random) -> list[Change]:
    size = len(dump.data)
    return [Change(chance.choice((chance.randrange(size), size - 100, 16, 40)), None)]


KINDS = (_in_headers, _in_headers, _numbers, _numbers, _text, _copies, _bits, _cut)
