# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page tables of riscv64, of which the lab has no guests."""

from types import SimpleNamespace

import pytest

from msatools.program.arch import Riscv64, riscv64_format
from msatools.program.linear import VmallocTables

VALID, READ, WRITE, EXECUTE = 1, 2, 4, 8
LINES = {"NUMBER(VA_BITS)": "48"}


@pytest.mark.parametrize(
    ("bits", "shifts"),
    [
        (39, (30, 21, 12)),
        (48, (39, 30, 21, 12)),
        (57, (48, 39, 30, 21, 12)),
    ],
)
def test_levels(bits: int, shifts: tuple[int, ...]) -> None:
    assert riscv64_format(bits).shifts == shifts


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        # A table, and a page of memory that is read and written.
        (0x2142_1401, 0x8508_5000),
        (0x2142_14E7, 0x8508_5000),
        # Bits of Svnapot and Svpbmt are not of the address.
        (0xE000_0000_2142_14E7, 0x8508_5000),
        (0x003F_FFFF_FFFF_FC01, 0x00FF_FFFF_FFFF_F000),
    ],
)
def test_address_in_an_entry(entry: int, address: int) -> None:
    assert riscv64_format(48).address(entry) == address


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("rights", [READ, READ | WRITE, EXECUTE])
def test_walk(level: int, rights: int) -> None:
    """To a page, to memory that one entry above maps, and to nothing."""
    form = riscv64_format(48)
    address = 0xFFFF_8D80_1234_5678
    memory: dict[int, bytearray] = {}

    def put(table: int, shift: int, physical: int, bits: int) -> None:
        page = memory.setdefault(table, bytearray(4096))
        entry = physical >> 12 << 10 | bits
        index = address >> shift & 511
        page[8 * index : 8 * index + 8] = entry.to_bytes(8, "little")

    def read(at: int, count: int, physical: bool) -> bytes:
        assert physical
        return bytes(memory[at][:count])

    def find() -> tuple[int, int] | None:
        prog = SimpleNamespace(read=read)
        return VmallocTables(prog, 0, form).find(address)  # type: ignore[arg-type]

    for number, shift in enumerate(form.shifts[:-1]):
        put(number << 12, shift, (number + 1) << 12, VALID)
    put(3 << 12, 12, 77 << 12, VALID | rights)
    assert find() == (77 << 12 | 0x678, 4096 - 0x678)
    shift = form.shifts[level]
    put(level << 12, shift, 9 << shift, VALID | rights)
    within = address & (1 << shift) - 1
    assert find() == ((9 << shift) + within, (1 << shift) - within)
    put(level << 12, shift, 9 << shift, rights)
    assert find() is None


def test_addresses() -> None:
    arch = Riscv64()
    assert arch.address_bits(LINES) == 47
    # Modules (MODULES_VADDR) are above; the direct map is below.
    assert 0xFFFF_AF80_0000_0000 < arch.code_start(LINES) < 0xFFFF_FFFF_023A_0000
