# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of large folios in the page cache are read, with and without struct folio."""

import drgn
import pytest

from msatools.kernel.words import PAGE
from msatools.locks.user import filepages
from msatools.locks.user.filepages import FilePages
from tests.locks.madememory import BASE, MadeMemory

VMEMMAP, PAGE_STRUCT = BASE + 0x1000, 64
FILE, MAPPING, VMEMMAP_BASE = BASE + 0x100, BASE + 0x200, BASE + 0x300

HEAD_PFN, HEAD_INDEX, PAGES = 8, 512, 4
"""The large folio: pfn and index of its head page, and its number of pages."""


@pytest.fixture
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeMemory:
    """A kernel in which all XArray slots of a large folio have its head page."""
    made = MadeMemory()
    memory = b"".join(bytes([pfn]) * PAGE for pfn in range(HEAD_PFN + PAGES))
    made.prog.add_memory_segment(
        0,
        len(memory),
        lambda address, count, offset, physical: memory[offset : offset + count],
        True,
    )
    for name in request.param:
        made.struct(name, PAGE_STRUCT, index=(made.u64, 32))
    array = made.struct("xarray", 8, xa_head=(made.pointer, 0))
    made.struct("address_space", 8, i_pages=(array, 0))
    made.struct("file", 8, f_mapping=(made.pointer, 0))
    made.write(FILE, MAPPING)
    made.variable("vmemmap_base", made.u64, VMEMMAP_BASE)
    made.write(VMEMMAP_BASE, VMEMMAP)
    head = VMEMMAP + HEAD_PFN * PAGE_STRUCT
    made.write(head + 32, HEAD_INDEX)
    # The index of a tail page is not set.
    made.write(head + PAGE_STRUCT + 32, 0xDEAD)

    def xa_load(pages: object, index: int) -> drgn.Object:
        entry = head if 0 <= index - HEAD_INDEX < PAGES else 0
        return drgn.Object(made.prog, made.pointer, entry)

    monkeypatch.setattr(filepages, "xa_load", xa_load)
    return made


@pytest.mark.parametrize(
    "made", [("page",), ("page", "folio")], ids=["v5.4", "v5.16"], indirect=True
)
def test_pages_of_a_large_folio_are_read_by_its_head(made: MadeMemory) -> None:
    files = FilePages(made.layout)
    for index in range(PAGES):
        offset = (HEAD_INDEX + index) * PAGE
        assert files.read(FILE, offset + 8, 8) == bytes([HEAD_PFN + index]) * 8
    past = (HEAD_INDEX + PAGES) * PAGE
    around = files.read_around_gaps(FILE, past - 4, 8)
    assert around == bytes([HEAD_PFN + PAGES - 1]) * 4 + bytes(4)
