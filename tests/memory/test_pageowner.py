# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who allocated a page, in a kernel made by hand: no stock kernel keeps it.

Its structures are those of v6.12 (mm/page_owner.c, lib/stackdepot.c).
"""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from drgn import (
    Architecture,
    Object,
    Platform,
    Program,
    Symbol,
    SymbolBinding,
    SymbolIndex,
    SymbolKind,
    Type,
    TypeEnumerator,
    TypeKind,
    TypeMember,
)

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.memory.unattributed import pageowner
from msatools.memory.unattributed.pageowner import PageOwners

EXT, POOL, TEXT, TABLE = 0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000
"""Where the records of pages are, a pool of stacks, functions, and the sections."""

SECTION_PAGES = 64
SECTIONS = 4
OFFSET = 8
"""Of page_owner's record behind a ``struct page_ext``."""

EACH = 64
OWNER, ALLOCATED = 1 << 0, 1 << 1
FUNCTIONS = ("post_alloc_hook", "__alloc_pages", "driver_probe")


class Kernel:
    """One that keeps page owners, unless told otherwise."""

    def __init__(self, ops_offset: int = OFFSET) -> None:
        self.ext = bytearray(EACH * SECTION_PAGES * SECTIONS)
        self.pool = bytearray(1 << 14)
        self.sections = bytearray(8 * SECTIONS)
        for number in range(SECTIONS):
            # (void *)base - page_ext_size * pfn
            self.set_base(number, EXT)
        self.prog = prog = Program(Platform(Architecture.X86_64))
        for address, memory in (
            *((EXT, self.ext), (POOL, self.pool), (TABLE, self.sections)),
        ):
            prog.add_memory_segment(address, len(memory), _reading(memory))
        u16, u32, u64 = (
            prog.int_type(name, size, False)
            for name, size in (
                ("unsigned short", 2),
                ("unsigned int", 4),
                ("unsigned long", 8),
            )
        )
        handle = prog.typedef_type("depot_stack_handle_t", u32)
        parts = [
            TypeMember(Object(prog, u32, bit_field_size=size), name, offset)
            for name, size, offset in (
                ("pool_index_plus_1", 17, 0),
                ("offset", 10, 17),
                ("extra", 5, 27),
            )
        ]
        record = prog.struct_type(
            "stack_record",
            32 + 8 * 64,
            [
                TypeMember(u32, "size", 20 * 8),
                TypeMember(prog.array_type(u64, 64), "entries", 32 * 8),
            ],
        )
        ops = prog.struct_type(
            "page_ext_operations", 40, [TypeMember(u64, "offset", 0)]
        )
        types = [
            handle,
            record,
            ops,
            prog.union_type("handle_parts", 4, parts),
            prog.struct_type("page_ext", 8, [TypeMember(u64, "flags", 0)]),
            prog.struct_type(
                "page_owner",
                56,
                [TypeMember(u16, "order", 0), TypeMember(handle, "handle", 8 * 8)],
            ),
        ]
        flags = prog.enum_type(
            "page_ext_flags",
            u32,
            [
                TypeEnumerator("PAGE_EXT_OWNER", 0),
                TypeEnumerator("PAGE_EXT_OWNER_ALLOCATED", 1),
            ],
        )
        pointer = prog.pointer_type(prog.void_type())
        self.section = prog.struct_type(
            "mem_section", 8, [TypeMember(u64, "page_ext", 0)]
        )
        objects = {
            "page_owner_ops": Object(prog, ops, value={"offset": ops_offset}),
            "page_ext_size": Object(prog, u64, value=EACH),
            "PAGES_PER_SECTION": Object(prog, u64, value=SECTION_PAGES),
            "PAGE_EXT_OWNER_ALLOCATED": Object(prog, flags, value=1),
            "stack_pools": Object(prog, prog.array_type(pointer, 2), value=[POOL, 0]),
        }
        _serve(prog, types, objects)

    def set_base(self, section: int, base: int) -> None:
        self.sections[8 * section : 8 * section + 8] = struct.pack("<Q", base)

    def own(self, pfn: int, handle: int, flags: int = OWNER | ALLOCATED) -> None:
        at = EACH * pfn
        self.ext[at : at + 8] = struct.pack("<Q", flags)
        at += OFFSET + 8
        self.ext[at : at + 4] = struct.pack("<I", handle)

    def put_stack(self, offset: int, *addresses: int) -> int:
        """Put a stack into the first pool.

        :return: Its handle.
        """
        data = struct.pack(f"<20xI8x{len(addresses)}Q", len(addresses), *addresses)
        self.pool[offset : offset + len(data)] = data
        return 1 | offset >> 4 << 17

    def owners(self, findings: Findings | None = None) -> PageOwners | None:
        return PageOwners.of(Reader(self.prog), findings or Findings())


def _reading(memory: bytearray) -> Callable[[int, int, int, bool], bytes]:
    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return bytes(memory[offset : offset + count])

    return read


def _serve(prog: Program, types: list[Type], objects: dict[str, Object]) -> None:
    by_name = {}
    for type_ in types:
        name = type_.name if type_.kind == TypeKind.TYPEDEF else type_.tag
        by_name[type_.kind, name] = type_

    def find_type(
        prog: Program, kinds: object, name: str, filename: str | None
    ) -> Type | None:
        for (kind, known), type_ in by_name.items():
            if known == name and kind in kinds:  # type: ignore[operator]
                return type_
        return None

    def find_object(
        prog: Program, name: str, flags: object, filename: str | None
    ) -> Object | None:
        return objects.get(name)

    symbols = [
        Symbol(name, TEXT + 256 * i, 256, SymbolBinding.GLOBAL, SymbolKind.FUNC)
        for i, name in enumerate(FUNCTIONS)
    ]
    prog.register_type_finder("test", find_type, enable_index=0)
    prog.register_object_finder("test", find_object, enable_index=0)
    prog.register_symbol_finder("test", SymbolIndex(symbols), enable_index=0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()

    def section(prog: Program, pfn: int) -> Object:
        address = TABLE + 8 * (pfn // SECTION_PAGES)
        return Object(prog, prog.pointer_type(made.section), value=address)

    monkeypatch.setattr(pageowner, "pfn_to_section", section)
    return made


def handles(kernel: Kernel, *pfns: int) -> list[int]:
    owners = kernel.owners()
    assert owners is not None
    return owners.handles(np.array(pfns, np.int64)).tolist()  # type: ignore[no-any-return]


def test_handles(kernel: Kernel) -> None:
    kernel.own(3, 0x1234)
    kernel.own(SECTION_PAGES + 5, 0x5678)
    assert handles(kernel, 3, 4, SECTION_PAGES + 5) == [0x1234, 0, 0x5678]


def test_page_that_is_free_has_no_owner(kernel: Kernel) -> None:
    kernel.own(3, 0x1234, OWNER)
    assert handles(kernel, 3) == [0]


@pytest.mark.parametrize("base", [0, EXT | 1])
def test_section_without_records(kernel: Kernel, base: int) -> None:
    """Of memory that was just plugged in, or is about to go."""
    kernel.own(3, 0x1234)
    kernel.own(SECTION_PAGES, 0x5678)
    kernel.set_base(0, base)
    assert handles(kernel, 3, SECTION_PAGES) == [0, 0x5678]


def test_lost_records_are_noted(kernel: Kernel) -> None:
    kernel.own(SECTION_PAGES, 0x5678)
    kernel.set_base(0, 0x7000_0000)
    findings = Findings()
    owners = kernel.owners(findings)
    assert owners is not None
    found = owners.handles(np.array([3, 4, SECTION_PAGES], np.int64))
    assert found.tolist() == [0, 0, 0x5678]
    (note,) = findings.notes.values()
    assert "2 blocks" in note.text


def test_stack(kernel: Kernel) -> None:
    addresses = [TEXT + 256 * i + 16 for i in range(len(FUNCTIONS))]
    handle = kernel.put_stack(0x80, *addresses)
    owners = kernel.owners()
    assert owners is not None
    assert owners.stack(handle) == FUNCTIONS


def test_stack_of_a_handle_that_names_no_pool(kernel: Kernel) -> None:
    findings = Findings()
    owners = kernel.owners(findings)
    assert owners is not None
    assert owners.stack(2) is None


def test_kernel_that_was_not_told_to_keep_owners() -> None:
    assert Kernel(ops_offset=0).owners() is None


def test_kernel_that_cannot() -> None:
    reader = Reader(Program(Platform(Architecture.X86_64)))
    findings = Findings()
    assert PageOwners.of(reader, findings) is None
    assert not findings.notes
