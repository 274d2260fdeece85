# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damage of the notes: VMCOREINFO and the registers of CPUs."""

import re
from random import Random

from tests.fuzz.change import Change, flipped, integers
from tests.fuzz.dumps import Dump

_LINE = re.compile(rb"[A-Z_-]+(?:\([^)\n]*\))?=[^\n]*\n")


def change(dump: Dump, chance: Random) -> list[Change]:
    """Return changes to the notes."""
    return chance.choice(KINDS)(dump, chance)


def _line(dump: Dump, chance: Random) -> list[Change]:
    """Change the value of a line, and keep its length."""
    text = dump.data[dump.notes.start : dump.notes.stop]
    line = chance.choice(list(_LINE.finditer(text)))
    key, _, value = line[0][:-1].partition(b"=")
    new = chance.choice(
        (
            b"../../../../../../tmp/x",
            b"-1",
            b"0",
            b"18446744073709551615",
            b"ffffffffffffffff",
            b"99999999999999999999999999",
            b"\x1b[31m\xff\xfe",
            b"[bold]x[/bold]",
            chance.randbytes(len(value)).replace(b"\n", b"\r"),
        )
    )
    new = new[: len(value)].ljust(len(value), chance.choice((b" ", b"0", b"\0")))
    return [Change(dump.notes.start + line.start() + len(key) + 1, new)]


def _lines(dump: Dump, chance: Random) -> list[Change]:
    """Give two lines each other's keys, or lose some."""
    text = dump.data[dump.notes.start : dump.notes.stop]
    lines = list(_LINE.finditer(text))
    return [
        Change(dump.notes.start + line.start(), b"X")
        for line in chance.sample(lines, chance.choice((1, 3, len(lines))))
    ]


def _bits(dump: Dump, chance: Random) -> list[Change]:
    return [
        flipped(dump.data, chance.choice(dump.notes), chance)
        for _ in range(chance.choice((1, 5, 100)))
    ]


def _sizes(dump: Dump, chance: Random) -> list[Change]:
    """Change a word near the start of a note, where its sizes are."""
    offset = dump.notes.start + chance.choice((0, 4, 8, 12, 20, 356, 360, 364))
    return [Change(min(offset, dump.notes.stop - 4), integers(chance, 4))]


KINDS = (_line, _line, _line, _lines, _bits, _sizes)
