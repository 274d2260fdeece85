# SPDX-License-Identifier: LGPL-2.1-or-later

import struct
from pathlib import Path

import pytest

from fixtures.demo.memory import ElfMemory
from tests.demo.test_kdump import note

PAGE = 4096
PGD, PUD, PMD, PTE = 0x2000, 0x3000, 0x5000, 0x6000
USER = 0x4000
VMCOREINFO = b"""\
OSRELEASE=6.12.0-test
SYMBOL(swapper_pg_dir)=ffffffff81002000
NUMBER(phys_base)=-16777216
NUMBER(pgtable_l5_enabled)=0
OFFSET(uts_namespace.name)=4
"""


def table(entries: dict[int, int]) -> bytes:
    words = [entries.get(number, 0) for number in range(512)]
    return struct.pack("<512Q", *words)


def elf(segments: list[tuple[int, bytes]]) -> bytes:
    """An ELF dump as QEMU writes it: notes, then memory by physical address."""
    notes = note(b"CORE", 1, bytes(336)) * 2 + note(b"VMCOREINFO", 0, VMCOREINFO)
    count = len(segments) + 1
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack(
        "<HHIQQQIHHHHHH", 4, 62, 1, 0, 64, 0, 0, 64, 56, count, 0, 0, 0
    )
    at = 64 + 56 * count
    headers = struct.pack("<2I6Q", 4, 0, at, 0, 0, len(notes), len(notes), 0)
    body = notes
    for address, data in segments:
        where = at + len(body)
        headers += struct.pack(
            "<2I6Q", 1, 0, where, 0, address, len(data), len(data), 0
        )
        body += data
    return ident + header + headers + body


@pytest.fixture
def memory(tmp_path: Path) -> ElfMemory:
    pages = {
        PGD: table({0: USER | 7, 300: PUD | 7, 511: PUD | 7}),
        PUD: table({5: PMD | 7, 6: 0x9000 | 0x87, 7: 0x9000}),
        PMD: table({0: PTE | 0x8000000000000007, 1: 0x200000 | 0x87}),
        PTE: table({0: 0x9000 | 7}),
    }
    low = b"".join(pages.get(at, bytes(PAGE)) for at in range(0, 0x7000, PAGE))
    path = tmp_path / "vmcore"
    path.write_bytes(elf([(0, low), (0x7000, b"7" * PAGE), (0x100000, b"x" * PAGE)]))
    return ElfMemory(path)


def test_notes(memory: ElfMemory) -> None:
    assert memory.cpus == 2
    assert memory.vmcoreinfo == VMCOREINFO
    assert memory.symbol("swapper_pg_dir") == 0xFFFFFFFF81002000
    assert memory.number("NUMBER", "phys_base") == -0x1000000
    assert memory.number("OFFSET", "uts_namespace.name") == 4
    with pytest.raises(LookupError, match=r"SYMBOL\(init_uts_ns\)"):
        memory.symbol("init_uts_ns")


def test_memory(memory: ElfMemory) -> None:
    assert memory.pfns == [range(7), range(7, 8), range(0x100, 0x101)]
    assert memory.page(0x100) == b"x" * PAGE
    assert memory.read(0x6FF8, 16) == bytes(8) + b"7" * 8
    for address, size in ((0x7FF8, 16), (0x8000, 1), (0x101000, 1)):
        with pytest.raises(LookupError):
            memory.read(address, size)


def test_page_tables_of_the_kernel(memory: ElfMemory) -> None:
    """Not those of user addresses, nor huge pages or what is not present."""
    frames = {at // PAGE for at in (PGD, PUD, PMD, PTE)}
    assert set(memory.kernel_page_tables()) == frames
