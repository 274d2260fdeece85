# SPDX-License-Identifier: LGPL-2.1-or-later

"""vmalloc memory is read with cached page tables as by drgn's page walks."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import follow_phys

from fixtures.demo import DEMOS
from msatools.kernel.reader import Reader
from msatools.program import TargetSpec, linear, open_target
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


def open_demo() -> Program:
    path = str(DEMOS["6.12"].core)
    return open_target(TargetSpec(path=path, types="btf")).prog


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


def test_frames_by_tables_of_five_levels() -> None:
    """A 4 KiB page, a 2 MiB page and unmapped addresses below a 5-level table."""
    present, large = 1, 1 << 7
    address = 0xFF_12_3456_789A_B000 | 0xFF << 56
    entries = [address >> shift & 511 for shift in (48, 39, 30, 21, 12)]
    memory = np.zeros((5, 512), np.uint64)
    for level, index in enumerate(entries[:-1]):
        memory[level, index] = (level + 1) * PAGE | present
    memory[4] = (np.arange(512, dtype=np.uint64) + np.uint64(7000)) * np.uint64(PAGE)
    memory[4, entries[4] :] |= np.uint64(present)
    memory[3, entries[3] + 1] = (5 << 21) | present | large

    def read(address: int, size: int, physical: bool) -> bytes:
        assert physical
        assert size == PAGE
        return memory[address // PAGE].tobytes()

    tables = VmallocTables(
        SimpleNamespace(read=read), 0, x86_format((48, 39, 30, 21, 12))
    )
    first = address - 3 * PAGE
    left = 512 - entries[4]
    expected = [-1] * 3
    expected += [7000 + entries[4] + i for i in range(left)]
    expected += [(5 << 9) + i for i in range(512)]
    expected += [-1] * 10
    assert tables.frames(first, len(expected)).tolist() == expected
    assert tables.translate(address)[0] == (7000 + entries[4]) * PAGE
    many = first + PAGE * np.arange(len(expected), dtype=np.uint64) + np.uint64(24)
    assert found_one_by_one(tables, many[::-1]) == found_at_once(tables, many[::-1])


def found_one_by_one(
    tables: VmallocTables, addresses: npt.NDArray[np.uint64]
) -> list[tuple[int, int]]:
    return [tables.find(address) or (0, 0) for address in addresses.tolist()]


def found_at_once(
    tables: VmallocTables, addresses: npt.NDArray[np.uint64]
) -> list[tuple[int, int]]:
    physical, room = tables.find_each(addresses)
    return list(zip(physical.tolist(), room.tolist(), strict=True))


def test_stacks_are_read_at_once_as_one_by_one() -> None:
    """By a dump's own tables: used parts of stacks, and guard pages.

    Parts that were never used are not in the demo core, which is a fault as well.
    """
    prog = open_demo()
    reader = Reader(prog)
    bases = np.array(list(stacks(prog)), np.uint64)
    assert len(bases) > 20
    addresses = np.concatenate(
        [bases + np.uint64(at) for at in (0, PAGE - 8, STACK_BYTES - 64, STACK_BYTES)]
    )
    tables = page_tables(prog)
    assert tables
    assert found_one_by_one(tables, addresses) == found_at_once(tables, addresses)
    sizes = np.full(len(addresses), 64, np.uint64)
    each = list(reader.read_each(addresses, sizes))
    for address, data in zip(addresses.tolist(), each, strict=True):
        expected = read(prog, address, 64)
        assert expected == (data if isinstance(data, bytes) else None)
    assert {type(data) for data in each} == {bytes, FaultError}


def test_frames_by_an_unreadable_table() -> None:
    def read(address: int, size: int, physical: bool) -> bytes:
        raise FaultError("gone", address)

    tables = VmallocTables(SimpleNamespace(read=read), 0, x86_format())
    assert tables.frames(0xFFFF_8000_0000_0000, 3).tolist() == [-1] * 3
    addresses = np.array([0xFFFF_8000_0000_0000], np.uint64)
    assert found_at_once(tables, addresses) == [(0, 0)]
