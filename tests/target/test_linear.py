# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory that is mapped in one piece, with the page tables and without."""

import random

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.mm import follow_phys

from fixtures import lab
from msatools.selfdesc import vmcoreinfo
from msatools.target import linear
from msatools.target.linear import map_linear
from tests.target.plain import open_plain

DUMPS = [
    *((name, "elf") for name in ("memory-5.10", "memory-6.1", "memory-6.12")),
    ("memory-6.12", "qemu-kdump-zlib"),
]


def open_dump(name: str, format: str = "elf") -> Program:
    return open_plain(lab.build(name).dump(format))


@pytest.mark.parametrize(("name", "format"), DUMPS)
def test_pieces_are_where_the_page_tables_have_them(name: str, format: str) -> None:
    plain, mapped = open_dump(name, format), open_dump(name, format)
    pieces = map_linear(mapped)
    assert len(pieces) == 5
    chance = random.Random(0)
    space = plain["init_mm"].address_of_()
    read = 0
    for piece in pieces:
        for _ in range(100):
            offset = chance.randrange(piece.size - 4096)
            address = piece.start + offset
            try:
                expected = plain.read(address, 4096)
            except FaultError:
                # A hole in physical memory may be mapped, and may be not.
                continue
            assert mapped.read(address, 4096) == expected
            physical = follow_phys(space, address).value_()
            assert physical == piece.physical + offset
            read += 1
    assert read > 400


def test_names_and_types_are_the_same() -> None:
    mapped = open_dump("memory-6.12")
    map_linear(mapped)
    for prog in (open_dump("memory-6.12"), mapped):
        assert prog["init_task"].comm.string_() == b"swapper/0"
        assert (
            prog["init_task"].tasks.next.prev == prog["init_task"].tasks.address_of_()
        )


def test_piece_that_is_elsewhere_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong address in VMCOREINFO costs speed, not truth."""
    number = vmcoreinfo.vmcoreinfo_number

    def shifted(prog: Program, name: str) -> int | None:
        return (number(prog, name) or 0) + (2 << 20)

    monkeypatch.setattr(linear, "vmcoreinfo_number", shifted)
    prog = open_dump("memory-6.12")
    assert [piece.physical for piece in map_linear(prog)] == [0]


def test_hole_in_memory_is_a_fault_of_the_address_asked() -> None:
    prog = open_dump("memory-6.12")
    memory = map_linear(prog)[0]
    last = memory.start + memory.size - 4096
    assert len(prog.read(last, 4096)) == 4096
    # Below 4 GiB are PCI devices, and no memory.
    hole = memory.start + (3 << 30)
    assert memory.size > 4 << 30
    with pytest.raises(FaultError) as caught:
        prog.read(hole, 8)
    assert caught.value.address == hole
