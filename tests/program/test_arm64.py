# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page tables of arm64 and riscv64 by hand, and as drgn walks those of a kernel.

The lab has no guests of riscv64.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.mm import follow_phys, for_each_vmap_area

from fixtures import lab
from msatools.program import TargetSpec, open_target
from msatools.program.arch import (
    Arm64,
    Riscv64,
    TableFormat,
    arm64_format,
    riscv64_format,
)
from msatools.program.linear import VmallocTables, map_linear, page_tables

DUMPS = ("memory-6.12arm64", "memory-6.1arm64")
RISCV = riscv64_format(48)
RISCV_LINES = {"NUMBER(VA_BITS)": "48"}


@pytest.mark.parametrize(
    ("form", "shifts", "top"),
    [
        (arm64_format(12, 39, 39), (30, 21, 12), 512),
        (arm64_format(12, 48, 48), (39, 30, 21, 12), 512),
        (arm64_format(12, 52, 52), (48, 39, 30, 21, 12), 16),
        # Built for 52 bits on a CPU without FEAT_LPA2.
        (arm64_format(12, 48, 52), (39, 30, 21, 12), 512),
        (arm64_format(14, 47, 47), (36, 25, 14), 2048),
        (arm64_format(14, 48, 48), (47, 36, 25, 14), 2),
        (arm64_format(14, 52, 52), (47, 36, 25, 14), 32),
        (arm64_format(14, 47, 52), (36, 25, 14), 2048),
        (arm64_format(16, 42, 42), (29, 16), 8192),
        (arm64_format(16, 48, 48), (42, 29, 16), 64),
        (arm64_format(16, 52, 52), (42, 29, 16), 1024),
        # Without FEAT_LVA the table keeps its size (PTRS_PER_PGD).
        (arm64_format(16, 48, 52), (42, 29, 16), 1024),
        (riscv64_format(39), (30, 21, 12), 512),
        (RISCV, (39, 30, 21, 12), 512),
        (riscv64_format(57), (48, 39, 30, 21, 12), 512),
    ],
)
def test_levels(form: TableFormat, shifts: tuple[int, ...], top: int) -> None:
    assert form.shifts == shifts
    assert form.top_entries == top


@pytest.mark.parametrize(
    ("form", "entry", "address"),
    [
        (arm64_format(12, 48, 48), 0x0060_1234_5678_9F03, 0x1234_5678_9000),
        # Without FEAT_LPA2 these two bits are the shareability.
        (arm64_format(12, 48, 48), 0x0060_1234_5678_9303, 0x1234_5678_9000),
        (arm64_format(12, 52, 52), 0x0060_1234_5678_9303, 0xC_1234_5678_9000),
        (arm64_format(12, 52, 52), 0x0063_1234_5678_9003, 0x3_1234_5678_9000),
        (arm64_format(14, 47, 47), 0x0060_1234_5678_C303, 0x1234_5678_C000),
        (arm64_format(14, 52, 52), 0x0060_1234_5678_C303, 0xC_1234_5678_C000),
        (arm64_format(16, 48, 48), 0x0060_1234_5678_0303, 0x1234_5678_0000),
        (arm64_format(16, 52, 52), 0x0060_1234_5678_A303, 0xA_1234_5678_0000),
        # A table, and a page of memory that is read and written.
        (RISCV, 0x2142_1401, 0x8508_5000),
        (RISCV, 0x2142_14E7, 0x8508_5000),
        # Bits of Svnapot and Svpbmt are not of the address.
        (RISCV, 0xE000_0000_2142_14E7, 0x8508_5000),
        (RISCV, 0x003F_FFFF_FFFF_FC01, 0x00FF_FFFF_FFFF_F000),
    ],
)
def test_address_in_an_entry(form: TableFormat, entry: int, address: int) -> None:
    assert form.address(entry) == address


ARM64_BITS = {"table": 3, "page": 3, "block": 1, "absent": 0}
READ, WRITE, EXECUTE = 2, 4, 8


def riscv_bits(rights: int) -> dict[str, int]:
    return {"table": 1, "page": 1 | rights, "block": 1 | rights, "absent": rights}


@pytest.mark.parametrize(
    ("form", "bits", "level"),
    [
        *((arm64_format(12, 48, 48), ARM64_BITS, level) for level in (1, 2)),
        (arm64_format(12, 52, 52), ARM64_BITS, 1),
        (arm64_format(14, 47, 47), ARM64_BITS, 1),
        (arm64_format(16, 48, 48), ARM64_BITS, 1),
        (arm64_format(16, 42, 42), ARM64_BITS, 0),
        (RISCV, riscv_bits(READ), 0),
        (RISCV, riscv_bits(READ | WRITE), 1),
        (RISCV, riscv_bits(EXECUTE), 2),
    ],
)
def test_walk(form: TableFormat, bits: dict[str, int], level: int) -> None:
    """To a page, to memory that one entry above maps, and to nothing."""
    size = form.table_bytes
    first = -form.top_entries << form.shifts[0] & (1 << 64) - 1
    address = first + (1 << form.shifts[level]) * 3 + 5 * size + 0x123
    memory: dict[int, bytearray] = {}

    def put(table: int, shift: int, physical: int, kind: str) -> None:
        count = form.top_entries if shift == form.shifts[0] else form.entries
        index = (address >> shift) % count
        page = memory.setdefault(table, bytearray(size))
        entry = (physical >> 2 if form is RISCV else physical) | bits[kind]
        page[8 * index : 8 * index + 8] = entry.to_bytes(8, "little")

    for number, shift in enumerate(form.shifts[:-1]):
        put(number * size, shift, (number + 1) * size, "table")
    put((form.levels - 1) * size, form.page_shift, 77 * size, "page")

    def read(at: int, count: int, physical: bool) -> bytes:
        assert physical
        return bytes(memory[at][:count])

    def find() -> tuple[int, int] | None:
        prog = SimpleNamespace(read=read)
        return VmallocTables(prog, 0, form).find(address)  # type: ignore[arg-type]

    assert find() == (77 * size + 0x123, size - 0x123)
    shift = form.shifts[level]
    put(level * size, shift, 9 << shift, "block")
    within = address & (1 << shift) - 1
    assert find() == ((9 << shift) + within, (1 << shift) - within)
    put(level * size, shift, 9 << shift, "absent")
    assert find() is None


def test_addresses_of_riscv64() -> None:
    arch = Riscv64()
    assert arch.address_bits(RISCV_LINES) == 47
    # Modules (MODULES_VADDR) are above; the direct map is below.
    start = arch.code_start(RISCV_LINES)
    assert 0xFFFF_AF80_0000_0000 < start < 0xFFFF_FFFF_023A_0000


@pytest.mark.parametrize(
    ("lines", "start"),
    [
        ({"PAGESIZE": "4096", "NUMBER(VA_BITS)": "48"}, 0xFFFF_8000_0000_0000),
        ({"PAGESIZE": "4096", "NUMBER(VA_BITS)": "52"}, 0xFFFF_8000_0000_0000),
        ({"PAGESIZE": "4096", "NUMBER(VA_BITS)": "39"}, 0xFFFF_FFC0_0000_0000),
        ({"PAGESIZE": "16384", "NUMBER(VA_BITS)": "52"}, 0xFFFF_C000_0000_0000),
    ],
)
def test_code_is_in_the_upper_half(lines: dict[str, str], start: int) -> None:
    assert Arm64().code_start(lines) == start


def opened(name: str) -> Program:
    run = lab.build(name)
    spec = TargetSpec(path=str(run.elf), types="dwarf", vmlinux=str(run.vmlinux))
    return open_target(spec).prog


def addresses(prog: Program, page: int) -> Iterator[int]:
    """Of vmalloc() memory, of the image, of the direct map, and what is around."""
    areas = [area.va_start.value_() for area in for_each_vmap_area(prog)]
    image = [prog.symbol(name).address for name in ("_stext", "swapper_pg_dir")]
    data = prog["init_task"].tasks.next.value_()
    for start in (*areas[::7], *image, data):
        yield from range((start & -page) - 3 * page, start + 60 * page, 7 * page)


@pytest.mark.parametrize("name", DUMPS)
def test_tables_map_as_drgn_finds(name: str) -> None:
    prog = opened(name)
    tables = page_tables(prog)
    assert tables
    page, space = tables.form.table_bytes, prog["init_mm"].address_of_()
    mapped = 0
    for address in addresses(prog, page):
        try:
            expected: int | None = follow_phys(space, address).value_()
        except FaultError:
            expected = None
        found = tables.find(address)
        assert (found and found[0]) == expected, hex(address)
        mapped += found is not None
    assert mapped > 100
    # All memory, and the four parts of the image.
    assert len(map_linear(prog)) == 4
