# SPDX-License-Identifier: LGPL-2.1-or-later

"""vmalloc memory is read with cached page tables as by drgn's page walks."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import follow_phys

from msatools.program import linear
from msatools.program.arch import x86_format
from msatools.program.linear import VmallocTables, map_vmalloc, page_tables
from tests.program.plain import open_plain

STACK_BYTES = 16384
PAGE = 4096


def read(prog: Program, address: int, size: int) -> bytes | None:
    try:
        data: bytes = prog.read(address, size)
    except FaultError:
        return None
    return data


def stacks(prog: Program) -> Iterator[int]:
    tasks = prog["init_task"].tasks.address_of_()
    for task in list_for_each_entry("struct task_struct", tasks, "tasks"):
        if stack := task.stack.value_():
            yield stack


def modules(prog: Program) -> Iterator[int]:
    loaded = prog["modules"].address_of_()
    for module in list_for_each_entry("struct module", loaded, "list"):
        yield module.value_()


@pytest.mark.parametrize("name", ["memory-5.10", "memory-6.1", "memory-6.12"])
def test_memory_is_as_drgn_reads_it(name: str) -> None:
    plain, mapped = open_plain(name), open_plain(name)
    assert map_vmalloc(mapped)
    # Stacks: whole, in part, across pages, and with the guard page before them.
    parts = [
        (stack + offset, size)
        for stack in stacks(plain)
        for offset, size in ((0, STACK_BYTES), (5000, 9000), (16, 8), (-PAGE, 2 * PAGE))
    ]
    parts += [(module, 512) for module in modules(plain)]
    parts += [(plain.symbol("_stext").address - 64, 5 << 20)]
    missing = 0
    for address, size in parts:
        expected = read(plain, address, size)
        assert read(mapped, address, size) == expected, hex(address)
        missing += expected is None
    assert 50 < missing < len(parts) / 2


def test_tables_are_read_once() -> None:
    plain, mapped = open_plain("memory-6.12"), open_plain("memory-6.12")
    assert map_vmalloc(mapped)
    stack = next(stacks(plain))
    data = read(plain, stack, 64)
    assert data
    assert read(mapped, stack, 64) == data
    root = follow_phys(plain["init_mm"].address_of_(), plain["init_mm"].pgd).value_()

    def fault(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("gone", address)

    for prog in (plain, mapped):
        prog.add_memory_segment(root, PAGE, fault, True)
    assert read(plain, stack, 64) is None
    assert read(mapped, stack, 64) == data


def test_fault_has_the_virtual_address() -> None:
    prog = open_plain("memory-6.12")
    assert map_vmalloc(prog)
    guard = next(stacks(prog)) - PAGE
    with pytest.raises(FaultError) as caught:
        prog.read(guard, 8)
    assert caught.value.address == guard


@pytest.mark.parametrize("case", ["root", "nowhere", "no number", "levels", "live"])
def test_tables_that_are_not_used(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prog = open_plain("memory-6.12")
    lines = linear.vmcoreinfo(prog)
    if case == "root":
        wrong = hex(int(lines["SYMBOL(swapper_pg_dir)"], 16) + PAGE)
        lines = {**lines, "SYMBOL(swapper_pg_dir)": wrong}
    elif case in ("nowhere", "no number"):
        damaged = {"nowhere": "8", "no number": "ffff$"}[case]
        lines = {**lines, "SYMBOL(swapper_pg_dir)": damaged}
    monkeypatch.setattr(linear, "vmcoreinfo", lambda prog: lines)
    if case == "levels":
        # This kernel has five levels.
        monkeypatch.setattr(linear, "table_format", lambda prog: x86_format())
    if case == "live":
        monkeypatch.setattr(linear, "ProgramFlags", SimpleNamespace(IS_LIVE=prog.flags))
    assert not map_vmalloc(prog)


@pytest.mark.parametrize("name", ["memory-5.10", "memory-6.1", "memory-6.12"])
def test_frames_are_those_that_drgn_finds(name: str) -> None:
    prog = open_plain(name)
    tables = page_tables(prog)
    assert tables
    space = prog["init_mm"].address_of_()
    memmap = prog["vmemmap_base"].value_()
    starts = [
        *list(stacks(prog))[:20],
        *list(modules(prog))[:20],
        prog.symbol("_stext").address & -PAGE,
        # Sections of the memmap, in which one page can be mapped many times (HVO).
        *range(memmap, memmap + (40 << 20), 2 << 20),
        prog["page_offset_base"].value_(),
    ]
    mapped = 0
    for start in starts:
        # Includes unmapped pages before it, and large pages.
        first, count = (start & -PAGE) - 8 * PAGE, 600
        found = tables.frames(first, count)
        chosen = [*range(16), *range(16, count, 37)]
        for index in chosen:
            try:
                pfn = follow_phys(space, first + index * PAGE).value_() // PAGE
            except FaultError:
                pfn = -1
            assert found[index] == pfn, hex(first + index * PAGE)
            mapped += pfn >= 0
    assert mapped > 500


def test_frames_by_an_unreadable_table() -> None:
    def read(address: int, size: int, physical: bool) -> bytes:
        raise FaultError("gone", address)

    tables = VmallocTables(SimpleNamespace(read=read), 0, x86_format())
    assert tables.frames(0xFFFF_8000_0000_0000, 3).tolist() == [-1] * 3
