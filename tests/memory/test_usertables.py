# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page tables made by hand are walked: entries are decoded, damage is counted."""

from itertools import pairwise

import numpy as np
import pytest
from drgn import FaultError, Object

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.by_process import Mapped, UserTables
from tests.support.madetypes import made_program, serve

PAGE = 4096
LINEAR = 0xFFFF_8880_0000_0000
ADDRESS = 0x000F_FFFF_FFFF_F000
END = 1 << 20
"""Number of pages of memory; the tables are in the first ones."""

PRESENT, HUGE, PROTNONE, SPECIAL = 1 << 0, 1 << 7, 1 << 8, 1 << 9
DIRTY = 1 << 6
PAT_OF_HUGE = 1 << 12


class Memory:
    """Memory with page tables, in a program with as few objects as possible."""

    def __init__(self, info: str = "") -> None:
        self.pages: dict[int, bytearray] = {}
        self.reads: list[int] = []
        self.prog = made_program()
        self.prog.add_memory_segment(0, END * PAGE, self._read, True)
        self.prog.add_memory_segment(LINEAR, END * PAGE, self._read)
        char = self.prog.int_type("char", 1, True)
        text = self.prog.array_type(char, len(info) + 1)
        unsigned = self.prog.int_type("unsigned int", 4, False)
        objects = {
            "VMCOREINFO": Object(self.prog, text, value=info.encode()),
            "nr_swapfiles": Object(self.prog, unsigned, value=2),
        }
        serve(self.prog, (), objects)

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        pfn = offset // PAGE
        self.reads.append(pfn)
        if pfn not in self.pages:
            raise FaultError("nothing there", address)
        return bytes(self.pages[pfn][offset % PAGE :][:count])

    def put(self, pfn: int, *entries: int) -> None:
        words = np.zeros(512, np.uint64)
        words[: len(entries)] = entries
        self.pages[pfn] = bytearray(words.tobytes())

    def put_chain(self, *pfns: int, flags: int = 0) -> "Memory":
        """Make the first entry of each table point to the next table."""
        for pfn, following in pairwise(pfns):
            self.put(pfn, names(following, PRESENT | flags))
        return self

    def walk(self, *tops: int) -> tuple[Mapped, LossLog]:
        losses = LossLog()
        tables = UserTables(Reader(self.prog), losses, END)
        addresses = [LINEAR + top * PAGE for top in tops]
        return tables.walk(np.array(addresses, np.uint64)), losses


def names(pfn: int, flags: int = PRESENT) -> int:
    return pfn * PAGE | flags


def absent(pfn: int, flags: int) -> int:
    """Return a non-present entry with an inverted address (L1TF)."""
    return ~(pfn * PAGE) & ADDRESS | flags


def small(*entries: int) -> tuple[Mapped, LossLog]:
    """Walk an address space with these entries in a lowest-level table."""
    memory = Memory().put_chain(1, 2, 3, 4)
    memory.put(4, *entries)
    return memory.walk(1)


def pages(mapped: Mapped) -> list[tuple[int, int]]:
    """Return pfn and address space of each small page."""
    found, spaces = mapped.small_within(0, END)
    return list(zip(found.tolist(), spaces.tolist(), strict=True))


@pytest.mark.parametrize(
    ("entry", "pfn"),
    [
        (names(1000), 1000),
        (names(1000, PRESENT | DIRTY | 1 << 63), 1000),
        (names(1000, PRESENT | SPECIAL), None),
        (absent(1000, PROTNONE), 1000),
        (absent(1000, PROTNONE | DIRTY | 1 << 63), 1000),
        (absent(1000, PROTNONE | SPECIAL), None),
        (names(END - 1), END - 1),
        (0, None),
        (DIRTY, None),
    ],
)
def test_entry_of_the_lowest_level(entry: int, pfn: int | None) -> None:
    mapped, losses = small(entry)
    assert pages(mapped) == ([] if pfn is None else [(pfn, 0)])
    assert mapped.swapped is not None
    assert mapped.swapped.tolist() == [0]
    assert not +losses.coverage


def test_only_entries_of_a_swap_device_are_swap() -> None:
    types = (0, 1, 2, 31)  # there are two devices; 31 is a marker or a migration entry
    offset = ~(5 << 9) & ((1 << 59) - 1) & ~0x1FF
    mapped, _ = small(*(type_ << 59 | offset for type_ in types))
    assert pages(mapped) == []
    assert mapped.swapped is not None
    assert mapped.swapped.tolist() == [2]


@pytest.mark.parametrize(
    ("flags", "mapped"),
    [
        (PRESENT | HUGE, True),
        (PRESENT | HUGE | PAT_OF_HUGE, True),
        (PRESENT | HUGE | SPECIAL, False),
    ],
)
@pytest.mark.parametrize("level", [2, 3])
def test_huge_page(level: int, flags: int, mapped: bool) -> None:
    memory = Memory().put_chain(1, 2, 3)
    length = 512 if level == 2 else 512 * 512
    memory.put(3 if level == 2 else 2, names(2 * length, flags))
    found, losses = memory.walk(1)
    first, end, spaces = found.large_within(0, END)
    expected = ([2 * length], [3 * length], [0]) if mapped else ([], [], [])
    assert (first.tolist(), end.tolist(), spaces.tolist()) == expected
    assert not +losses.coverage


@pytest.mark.parametrize(
    ("info", "tables", "flags"),
    [
        ("NUMBER(pgtable_l5_enabled)=1\n", (1, 2, 3, 4, 5, 1000), 0),
        # The encryption bit is not part of an address.
        (f"NUMBER(sme_mask)={1 << 47}\n", (1, 2, 3, 4, 1000), 1 << 47),
    ],
)
def test_levels_and_encryption_from_vmcoreinfo(
    info: str, tables: tuple[int, ...], flags: int
) -> None:
    memory = Memory(info).put_chain(*tables, flags=flags)
    assert pages(memory.walk(1)[0]) == [(1000, 0)]
