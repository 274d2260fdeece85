# SPDX-License-Identifier: LGPL-2.1-or-later

"""Linear mappings are read without page tables, with the same results."""

import random

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.mm import follow_phys

from msatools.kernel.reader import Reader, fault_reason
from msatools.program import arch
from msatools.program.linear import map_linear
from msatools.selfdesc import find
from tests.program.plain import open_plain
from tests.support.overlay import lay_over

DUMPS = [
    *((name, "elf") for name in ("memory-5.10", "memory-6.1", "memory-6.12")),
    ("memory-6.12", "qemu-kdump-zlib"),
]


@pytest.mark.parametrize(("name", "format"), DUMPS)
def test_pieces_agree_with_the_page_tables(name: str, format: str) -> None:
    plain, mapped = open_plain(name, format), open_plain(name, format)
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
                # A hole in physical memory, which can be mapped or not.
                continue
            assert mapped.read(address, 4096) == expected
            physical = follow_phys(space, address).value_()
            assert physical == piece.physical + offset
            read += 1
    assert read > 400


def test_piece_that_does_not_match_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong address in VMCOREINFO costs speed, not correctness."""
    number = find.vmcoreinfo_number

    def shifted(prog: Program, name: str) -> int | None:
        return (number(prog, name) or 0) + (2 << 20)

    monkeypatch.setattr(arch, "vmcoreinfo_number", shifted)
    prog = open_plain("memory-6.12")
    assert [piece.physical for piece in map_linear(prog)] == [0]


def test_fault_in_a_hole_has_the_virtual_address() -> None:
    prog = open_plain("memory-6.12")
    memory = map_linear(prog)[0]
    last = memory.start + memory.size - 4096
    assert len(prog.read(last, 4096)) == 4096
    # PCI devices are mapped below 4 GiB, so there is no memory.
    hole = memory.start + (3 << 30)
    assert memory.size > 4 << 30
    with pytest.raises(FaultError) as caught:
        prog.read(hole, 8)
    assert caught.value.address == hole


def test_readers_fault_at_the_virtual_address() -> None:
    prog = open_plain("memory-6.12")
    hole = map_linear(prog)[0].start + (3 << 30)
    with pytest.raises(FaultError) as caught:
        Reader(prog).read(hole, 8)
    assert caught.value.address == hole
    assert fault_reason(caught.value) == "excluded"


def test_readers_see_overlays() -> None:
    prog = open_plain("memory-6.12")
    map_linear(prog)
    reader = Reader(prog)
    address = prog["init_task"].tasks.next.value_()
    lay_over(prog, address, 8, lambda *_: b"laid one")
    assert reader.read(address, 8) == b"laid one"
    assert reader.read(address + 8, 8) == prog.read(address + 8, 8)
