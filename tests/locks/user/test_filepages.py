# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of large folios in the page cache are read, with and without struct folio."""

from collections.abc import Callable

import pytest

from msatools.errors import DamagedDataError
from msatools.kernel.reader import PAGE
from msatools.locks.user_memory import FilePages
from tests.locks.madememory import BASE, MadeMemory

VMEMMAP, PAGE_STRUCT = BASE + 0x1000, 64
FILE, MAPPING, VMEMMAP_BASE = BASE + 0x100, BASE + 0x200, BASE + 0x300

HEAD_PFN, HEAD_INDEX, PAGES = 8, 512, 4
"""The large folio: pfn and index of its head page, and its number of pages."""

TOP_NODE, LEAF_NODE, SLOTS, NODE_SLOTS = BASE + 0x3000, BASE + 0x4000, 8, 64


def put_node(made: MadeMemory, address: int, shift: int, *slots: int) -> int:
    """Write a node of an XArray, and return the entry that points to it."""
    made.write(address, shift, *slots)
    return address + 2


def same_in_all(head: int) -> list[int]:
    """Return what is behind the head of a folio if all slots have it."""
    return [head] * (PAGES - 1)


def siblings(head: int) -> list[int]:
    """Return entries that say which slot they belong to: here the first."""
    return [0 << 2 | 2] * (PAGES - 1)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> MadeMemory:
    """A kernel with a large folio in the page cache."""
    types: tuple[str, ...]
    behind: Callable[[int], list[int]]
    types, behind = request.param
    made = MadeMemory()
    memory = b"".join(bytes([pfn]) * PAGE for pfn in range(HEAD_PFN + PAGES))
    made.prog.add_memory_segment(
        0,
        len(memory),
        lambda address, count, offset, physical: memory[offset : offset + count],
        True,
    )
    for name in types:
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

    slots = made.prog.array_type(made.pointer, NODE_SLOTS)
    size = SLOTS + 8 * NODE_SLOTS
    made.struct("xa_node", size, shift=(made.u64, 0), slots=(slots, SLOTS))
    leaf = put_node(made, LEAF_NODE, 0, head, *behind(head))
    before = [0] * (HEAD_INDEX // NODE_SLOTS)
    made.write(MAPPING, put_node(made, TOP_NODE, 6, *before, leaf))
    return made


@pytest.mark.parametrize(
    "made",
    [
        (("page",), same_in_all),
        (("page", "folio"), same_in_all),
        (("page", "folio"), siblings),
    ],
    ids=["v5.4", "v5.16", "siblings"],
    indirect=True,
)
def test_pages_of_a_large_folio_are_read_by_its_head(made: MadeMemory) -> None:
    files = FilePages(made.layout)
    for index in range(PAGES):
        offset = (HEAD_INDEX + index) * PAGE
        assert files.read(FILE, offset + 8, 8) == bytes([HEAD_PFN + index]) * 8
    past = (HEAD_INDEX + PAGES) * PAGE
    around = files.read_around_gaps(FILE, past - 4, 8)
    assert around == bytes([HEAD_PFN + PAGES - 1]) * 4 + bytes(4)


@pytest.mark.parametrize("made", [(("page", "folio"), same_in_all)], indirect=True)
def test_a_tree_that_leads_to_itself_ends(made: MadeMemory) -> None:
    """drgn's own walk of it never ended."""
    made.write(TOP_NODE + SLOTS, *[TOP_NODE + 2] * NODE_SLOTS)
    with pytest.raises(DamagedDataError, match="another level"):
        FilePages(made.layout).read(FILE, HEAD_INDEX * PAGE, 8)
