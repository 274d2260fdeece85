# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page tables of arm64: in each shape by hand, and as drgn walks those of a kernel."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.mm import follow_phys, for_each_vmap_area

from fixtures import lab
from msatools.program import TargetSpec, open_target
from msatools.program.arch import Arm64, arm64_format
from msatools.program.linear import VmallocTables, map_linear, page_tables

VALID, TABLE = 1, 2
DUMPS = ("memory-6.12arm64", "memory-6.1arm64")


@pytest.mark.parametrize(
    ("page_shift", "bits", "built", "shifts", "top"),
    [
        (12, 39, 39, (30, 21, 12), 512),
        (12, 48, 48, (39, 30, 21, 12), 512),
        (12, 52, 52, (48, 39, 30, 21, 12), 16),
        # Built for 52 bits on a CPU without FEAT_LPA2.
        (12, 48, 52, (39, 30, 21, 12), 512),
        (14, 47, 47, (36, 25, 14), 2048),
        (14, 48, 48, (47, 36, 25, 14), 2),
        (14, 52, 52, (47, 36, 25, 14), 32),
        (14, 47, 52, (36, 25, 14), 2048),
        (16, 42, 42, (29, 16), 8192),
        (16, 48, 48, (42, 29, 16), 64),
        (16, 52, 52, (42, 29, 16), 1024),
        # Without FEAT_LVA the table keeps its size (PTRS_PER_PGD).
        (16, 48, 52, (42, 29, 16), 1024),
    ],
)
def test_levels(
    page_shift: int, bits: int, built: int, shifts: tuple[int, ...], top: int
) -> None:
    form = arm64_format(page_shift, bits, built)
    assert form.shifts == shifts
    assert form.top_entries == top


@pytest.mark.parametrize(
    ("page_shift", "bits", "entry", "address"),
    [
        (12, 48, 0x0060_1234_5678_9F03, 0x1234_5678_9000),
        # Without FEAT_LPA2 these two bits are the shareability.
        (12, 48, 0x0060_1234_5678_9303, 0x1234_5678_9000),
        (12, 52, 0x0060_1234_5678_9303, 0xC_1234_5678_9000),
        (12, 52, 0x0063_1234_5678_9003, 0x3_1234_5678_9000),
        (14, 47, 0x0060_1234_5678_C303, 0x1234_5678_C000),
        (14, 52, 0x0060_1234_5678_C303, 0xC_1234_5678_C000),
        (16, 48, 0x0060_1234_5678_0303, 0x1234_5678_0000),
        (16, 52, 0x0060_1234_5678_A303, 0xA_1234_5678_0000),
    ],
)
def test_address_in_an_entry(
    page_shift: int, bits: int, entry: int, address: int
) -> None:
    assert arm64_format(page_shift, bits, bits).address(entry) == address


@pytest.mark.parametrize(
    ("page_shift", "bits", "level"),
    [(12, 48, 1), (12, 48, 2), (12, 52, 1), (14, 47, 1), (16, 48, 1), (16, 42, 0)],
)
def test_walk(page_shift: int, bits: int, level: int) -> None:
    """To a page, to memory that one entry above maps, and to nothing."""
    form = arm64_format(page_shift, bits, bits)
    size = form.table_bytes
    first = -(1 << bits) & (1 << 64) - 1
    address = first + (1 << form.shifts[level]) * 3 + 5 * size + 0x123
    memory: dict[int, bytearray] = {}

    def put(table: int, shift: int, entry: int) -> None:
        count = form.top_entries if shift == form.shifts[0] else form.entries
        index = (address >> shift) % count
        page = memory.setdefault(table, bytearray(size))
        page[8 * index : 8 * index + 8] = entry.to_bytes(8, "little")

    for number, shift in enumerate(form.shifts[:-1]):
        put(number * size, shift, (number + 1) * size | VALID | TABLE)
    put((form.levels - 1) * size, form.page_shift, 77 * size | VALID | TABLE)

    def read(at: int, count: int, physical: bool) -> bytes:
        assert physical
        return bytes(memory[at][:count])

    def find() -> tuple[int, int] | None:
        prog = SimpleNamespace(read=read)
        return VmallocTables(prog, 0, form).find(address)  # type: ignore[arg-type]

    assert find() == (77 * size + 0x123, size - 0x123)
    shift = form.shifts[level]
    put(level * size, shift, 9 << shift | VALID)
    within = address & (1 << shift) - 1
    assert find() == ((9 << shift) + within, (1 << shift) - within)
    put(level * size, shift, 9 << shift)
    assert find() is None


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
