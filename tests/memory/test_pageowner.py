# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stacks that allocated pages, in a kernel made by hand: no stock kernel records them.

The structures are those of v6.12 (mm/page_owner.c, lib/stackdepot.c).
"""

from struct import pack

import numpy as np
import pytest
from drgn import (
    Object,
    Program,
    Symbol,
    SymbolBinding,
    SymbolIndex,
    SymbolKind,
    TypeEnumerator,
    TypeMember,
)

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.unattributed import pageowner
from msatools.memory.unattributed.pageowner import PageOwners
from tests.support.madetypes import made_program, serve, struct
from tests.support.overlay import put

EXT, POOL, TEXT, TABLE = 0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000
"""Addresses of struct page_ext, a stack pool, functions, and the section table."""

SECTION_PAGES = 64
SECTIONS = 4
OFFSET = 8
"""Offset of struct page_owner from its ``struct page_ext``."""

EACH = 64
OWNER, ALLOCATED = 1 << 0, 1 << 1
FUNCTIONS = ("post_alloc_hook", "__alloc_pages", "driver_probe")


class Kernel:
    """A kernel that records page owners; with *ops_offset* 0, one that does not."""

    def __init__(self, ops_offset: int = OFFSET) -> None:
        self.ext = bytearray(EACH * SECTION_PAGES * SECTIONS)
        self.pool = bytearray(1 << 14)
        self.sections = bytearray(8 * SECTIONS)
        for number in range(SECTIONS):
            # (void *)base - page_ext_size * pfn
            self.set_base(number, EXT)
        self.prog = prog = made_program()
        put(prog, EXT, self.ext)
        put(prog, POOL, self.pool)
        put(prog, TABLE, self.sections)
        u16 = prog.int_type("unsigned short", 2, False)
        u32 = prog.int_type("unsigned int", 4, False)
        u64 = prog.int_type("unsigned long", 8, False)
        handle = prog.typedef_type("depot_stack_handle_t", u32)
        index, offset, extra = (
            Object(prog, u32, bit_field_size=size) for size in (17, 10, 5)
        )
        members = (("pool_index_plus_1", index, 0), ("offset", offset, 17))
        parts = [
            TypeMember(value, name, bit)
            for name, value, bit in (*members, ("extra", extra, 27))
        ]
        entries = prog.array_type(u64, 64)
        ops = struct(prog, "page_ext_operations", 40, offset=(u64, 0))
        types = [
            handle,
            ops,
            prog.union_type("handle_parts", 4, parts),
            struct(prog, "stack_record", 544, size=(u32, 20), entries=(entries, 32)),
            struct(prog, "page_ext", 8, flags=(u64, 0)),
            struct(prog, "page_owner", 56, order=(u16, 0), handle=(handle, 8)),
        ]
        bits = ("PAGE_EXT_OWNER", "PAGE_EXT_OWNER_ALLOCATED")
        values = [TypeEnumerator(name, bit) for bit, name in enumerate(bits)]
        flags = prog.enum_type("page_ext_flags", u32, values)
        pointer = prog.pointer_type(prog.void_type())
        self.section = struct(prog, "mem_section", 8, page_ext=(u64, 0))
        objects = {
            "page_owner_ops": Object(prog, ops, value={"offset": ops_offset}),
            "page_ext_size": Object(prog, u64, value=EACH),
            "PAGES_PER_SECTION": Object(prog, u64, value=SECTION_PAGES),
            "PAGE_EXT_OWNER_ALLOCATED": Object(prog, flags, value=1),
            "stack_pools": Object(prog, prog.array_type(pointer, 2), value=[POOL, 0]),
        }
        serve(prog, types, objects)
        symbols = [
            Symbol(name, TEXT + 256 * i, 256, SymbolBinding.GLOBAL, SymbolKind.FUNC)
            for i, name in enumerate(FUNCTIONS)
        ]
        prog.register_symbol_finder("made", SymbolIndex(symbols), enable_index=0)

    def set_base(self, section: int, base: int) -> None:
        self.sections[8 * section : 8 * section + 8] = pack("<Q", base)

    def own(self, pfn: int, handle: int, flags: int = OWNER | ALLOCATED) -> None:
        start = EACH * pfn
        self.ext[start : start + 8] = pack("<Q", flags)
        start += OFFSET + 8
        self.ext[start : start + 4] = pack("<I", handle)

    def put_stack(self, offset: int, *addresses: int) -> int:
        """Store a stack in the first pool.

        :return: the stack's handle
        """
        data = pack(f"<20xI8x{len(addresses)}Q", len(addresses), *addresses)
        self.pool[offset : offset + len(data)] = data
        return 1 | offset >> 4 << 17

    def owners(self, losses: LossLog | None = None) -> PageOwners:
        found = PageOwners.of(Reader(self.prog), losses or LossLog())
        assert found is not None
        return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()

    def section(prog: Program, pfn: int) -> Object:
        address = TABLE + 8 * (pfn // SECTION_PAGES)
        return Object(prog, prog.pointer_type(made.section), value=address)

    monkeypatch.setattr(pageowner, "pfn_to_section", section)
    return made


def handles(kernel: Kernel, *pfns: int, losses: LossLog | None = None) -> list[int]:
    found = kernel.owners(losses).handles(np.array(pfns, np.int64))
    return found.tolist()  # type: ignore[no-any-return]


def test_handles(kernel: Kernel) -> None:
    kernel.own(3, 0x1234)
    kernel.own(SECTION_PAGES + 5, 0x5678)
    assert handles(kernel, 3, 4, SECTION_PAGES + 5) == [0x1234, 0, 0x5678]


def test_free_page_has_no_owner(kernel: Kernel) -> None:
    kernel.own(3, 0x1234, OWNER)
    assert handles(kernel, 3) == [0]


@pytest.mark.parametrize("base", [0, EXT | 1])
def test_section_without_records(kernel: Kernel, base: int) -> None:
    """The section was just added, or is about to be removed."""
    kernel.own(3, 0x1234)
    kernel.own(SECTION_PAGES, 0x5678)
    kernel.set_base(0, base)
    assert handles(kernel, 3, SECTION_PAGES) == [0, 0x5678]


def test_lost_records_are_noted(kernel: Kernel) -> None:
    kernel.own(SECTION_PAGES, 0x5678)
    kernel.set_base(0, 0x7000_0000)
    losses = LossLog()
    assert handles(kernel, 3, 4, SECTION_PAGES, losses=losses) == [0, 0, 0x5678]
    (note,) = losses.notes.values()
    assert "2 blocks" in note.text


def test_stack(kernel: Kernel) -> None:
    addresses = [TEXT + 256 * i + 16 for i in range(len(FUNCTIONS))]
    handle = kernel.put_stack(0x80, *addresses)
    assert kernel.owners().stack(handle) == FUNCTIONS
    assert kernel.owners().stack(2) is None, "it names no pool"


@pytest.mark.parametrize("prog", [Kernel(ops_offset=0).prog, made_program()])
def test_kernel_without_page_owners(prog: Program) -> None:
    """Page owner is not enabled, or not built in."""
    losses = LossLog()
    assert PageOwners.of(Reader(prog), losses) is None
    assert not losses.notes
