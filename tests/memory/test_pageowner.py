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
from msatools.memory import unattributed
from msatools.memory.content_hints import SymbolName
from msatools.memory.memstat import collect_memstat
from msatools.memory.unattributed import PageOwners, StackDepot, gfp_names
from msatools.selfdesc.find import find_symbol
from tests.support.dumps import open_dump
from tests.support.madetypes import made_program, serve, struct
from tests.support.overlay import put

EXT, POOL, TEXT, TABLE = 0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000
"""Addresses of struct page_ext, a stack pool, functions, and the section table."""

POOLS, ALLOCATED_POOLS = 0x5000_0000, 0x6000_0000
"""Where the addresses of pools are, and where if they are allocated."""

SECTION_PAGES = 64
SECTIONS = 4
OFFSET = 8
"""Offset of struct page_owner from its ``struct page_ext``."""

EACH = 64
OWNER, ALLOCATED = 1 << 0, 1 << 1
FUNCTIONS = ("post_alloc_hook", "__alloc_pages", "driver_probe")


class Kernel:
    """A kernel that records page owners; with *ops_offset* 0, one that does not."""

    def __init__(self, ops_offset: int = OFFSET, max_pools: bool = False) -> None:
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
        put(prog, POOLS, pack("<QQ", ALLOCATED_POOLS if max_pools else POOL, 0))
        put(prog, ALLOCATED_POOLS, pack("<QQ", POOL, 0))
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
        comm = prog.array_type(prog.int_type("char", 1, True), 16)
        pid = prog.int_type("int", 4, True)
        ops = struct(prog, "page_ext_operations", 40, offset=(u64, 0))
        types = [
            handle,
            ops,
            prog.union_type("handle_parts", 4, parts),
            struct(prog, "stack_record", 544, size=(u32, 20), entries=(entries, 32)),
            struct(prog, "page_ext", 8, flags=(u64, 0)),
            struct(
                prog,
                "page_owner",
                56,
                order=(u16, 0),
                gfp_mask=(u32, 4),
                handle=(handle, 8),
                comm=(comm, 32),
                pid=(pid, 48),
            ),
        ]
        bits = ("PAGE_EXT_OWNER", "PAGE_EXT_OWNER_ALLOCATED")
        values = [TypeEnumerator(name, bit) for bit, name in enumerate(bits)]
        flags = prog.enum_type("page_ext_flags", u32, values)
        names = ("DMA", "IO", "FS", "ZERO", "DIRECT_RECLAIM", "KSWAPD_RECLAIM")
        gfp = prog.enum_type(
            None,
            u32,
            [
                TypeEnumerator(f"___GFP_{name}_BIT", bit)
                for bit, name in enumerate(names)
            ],
        )
        self.section = struct(prog, "mem_section", 8, page_ext=(u64, 0))
        objects = {
            "page_owner_ops": Object(prog, ops, value={"offset": ops_offset}),
            "page_ext_size": Object(prog, u64, value=EACH),
            "PAGE_EXT_OWNER_ALLOCATED": Object(prog, flags, value=1),
            "___GFP_DMA_BIT": Object(prog, gfp, value=0),
        }
        serve(prog, types, objects)
        symbols = [
            Symbol(name, TEXT + 256 * i, 256, SymbolBinding.GLOBAL, SymbolKind.FUNC)
            for i, name in enumerate(FUNCTIONS)
        ]
        marks = {"stack_pools": POOLS}
        if max_pools:
            marks["stack_max_pools"] = POOLS + 64
        symbols += [
            Symbol(name, at, 0, SymbolBinding.GLOBAL, SymbolKind.UNKNOWN)
            for name, at in marks.items()
        ]
        prog.register_symbol_finder("made", SymbolIndex(symbols), enable_index=0)

    def set_base(self, section: int, base: int) -> None:
        self.sections[8 * section : 8 * section + 8] = pack("<Q", base)

    def own(self, pfn: int, handle: int, flags: int = OWNER | ALLOCATED) -> None:
        start = EACH * pfn
        record = pack("<QHxxII20x16si", flags, 3, 0xE, handle, b"insmod", 77)
        self.ext[start : start + len(record)] = record

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

    monkeypatch.setattr(unattributed, "pfn_to_section", section)
    monkeypatch.setattr(unattributed, "pages_per_section", lambda _: SECTION_PAGES)
    return made


def handles(kernel: Kernel, *pfns: int, losses: LossLog | None = None) -> list[int]:
    found = kernel.owners(losses).owners(np.array(pfns, np.int64))
    return found["handle"].tolist()  # type: ignore[no-any-return]


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


def test_owner(kernel: Kernel) -> None:
    kernel.own(3, 0x1234)
    (owner,) = kernel.owners().owners(np.array([3])).tolist()
    assert owner == (0x1234, 0xE, 77, 3, b"insmod")


def test_more_pages_than_are_read_one_by_one(kernel: Kernel) -> None:
    pfns = range(0, SECTION_PAGES * SECTIONS, 3)
    for pfn in pfns:
        kernel.own(pfn, pfn + 1)
    wanted = [pfn + 1 if pfn in pfns else 0 for pfn in range(SECTION_PAGES * SECTIONS)]
    assert handles(kernel, *range(SECTION_PAGES * SECTIONS)) == wanted


def test_flags_by_name(kernel: Kernel) -> None:
    assert gfp_names(kernel.prog, 0b111110) == ("GFP_KERNEL", "__GFP_ZERO")
    assert gfp_names(kernel.prog, 0b110011) == ("GFP_NOFS", "__GFP_DMA")
    assert gfp_names(kernel.prog, 0) == ()
    assert gfp_names(made_program(), 0b111110) is None, "before 6.10"


class Names:
    """The kernel's functions, of a program that has no modules."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._prog = reader.prog

    def name(self, address: int) -> SymbolName:
        symbol = self._prog.symbol(address)
        offset = address - symbol.address
        return SymbolName(f"{symbol.name}+{offset:#x}", symbol.name, None)


@pytest.mark.parametrize("max_pools", [False, True])
def test_stack(max_pools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(max_pools=max_pools)
    monkeypatch.setattr(unattributed, "SymbolNames", Names)
    monkeypatch.setattr(
        unattributed,
        "kernel_symbol",
        lambda prog, name: find_symbol(prog, name).address,
    )
    addresses = [TEXT + 256 * i + 16 for i in range(len(FUNCTIONS))]
    # After a call that is the last instruction of its function.
    addresses[0] = TEXT + 256
    handle = kernel.put_stack(0x80, *addresses)
    losses = LossLog()
    depot = StackDepot(Reader(kernel.prog), losses)
    assert depot.stack(handle) == FUNCTIONS
    assert not losses.notes
    assert depot.stack(2) is None, "it names no pool"
    assert depot.stack(0) is None, "nor does this"
    assert losses.coverage["stacks_unreadable"] == 2


@pytest.mark.parametrize("prog", [Kernel(ops_offset=0).prog, made_program()])
def test_kernel_without_page_owners(prog: Program) -> None:
    """Page owner is not enabled, or not built in."""
    losses = LossLog()
    assert PageOwners.of(Reader(prog), losses) is None
    assert not losses.notes


@pytest.mark.parametrize("name", ["memory-6.12debug"])
def test_a_kernel_that_keeps_them(name: str) -> None:
    """Stacks of the guest's own workload, as msa-memstat reports them."""
    report = collect_memstat(open_dump(name, "btf"), unattributed=True)
    assert report.unattributed is not None
    known = [group for group in report.unattributed if group.stack]
    # Large kmalloc of pipes, which the process "slab" has enlarged to 256 pages each.
    (pipes,) = (group for group in known if "pipe_resize_ring" in (group.stack or ()))
    assert (pipes.order, pipes.blocks, pipes.pages) == (2, 32, 128)
    assert [thread.comm for thread in pipes.allocators or ()] == ["slab"]
    assert "GFP_KERNEL" in (pipes.gfp_names or ())
    pages = sum(group.pages for group in known)
    assert pages > 0.9 * sum(group.pages for group in report.unattributed)
    assert not report.coverage.get("page_owner_unreadable")
