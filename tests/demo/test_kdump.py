# SPDX-License-Identifier: LGPL-2.1-or-later

"""Write a small core; libkdumpfile, through drgn, has to read what was written."""

import io
import os
import struct
from pathlib import Path

import pytest
from drgn import FaultError, Program

from fixtures.demo import kdump
from msatools.program import formats as reading
from msatools.program.dumpfile import read_dump_file

PAGE = 4096
VMCOREINFO = b"""\
OSRELEASE=6.12.0-test
PAGESIZE=4096
SYMBOL(swapper_pg_dir)=ffffffff81000000
SYMBOL(mem_section)=0
LENGTH(mem_section)=0
KERNELOFFSET=0
NUMBER(phys_base)=0
NUMBER(pgtable_l5_enabled)=0
"""


def note(name: bytes, kind: int, data: bytes) -> bytes:
    parts = (name + b"\0", data)
    padded = b"".join(part.ljust(-(-len(part) // 4) * 4, b"\0") for part in parts)
    return struct.pack("<3I", len(name) + 1, len(data), kind) + padded


MACHINE = kdump.Machine(
    utsname=b"".join(
        field.ljust(65, b"\0")
        for field in (b"Linux", b"host", b"6.12.0-test", b"#1", b"x86_64", b"")
    ),
    notes=note(b"CORE", 1, bytes(336)) + note(b"VMCOREINFO", 0, VMCOREINFO),
    vmcoreinfo=VMCOREINFO,
    cpus=1,
    phys_base=-0x1000000,
)
MEMORY = [range(64), range(100, 40_000)]
NOISE = os.urandom(PAGE)
PAGES = {
    3: b"3" * PAGE,
    4: bytes(PAGE),
    63: NOISE,
    101: bytes(PAGE),
    39_999: bytes(range(256)) * 16,
}


def write(pages: dict[int, bytes]) -> bytes:
    out = io.BytesIO()
    kdump.write(out, MACHINE, MEMORY, pages, pages.__getitem__, dump_level=31)
    return out.getvalue()


@pytest.fixture
def core(tmp_path: Path) -> Path:
    path = tmp_path / "core"
    path.write_bytes(write(PAGES))
    return path


@pytest.fixture
def prog(core: Path) -> Program:
    prog = Program()
    prog.set_core_dump(core)
    return prog


def test_header_says_what_it_is(core: Path) -> None:
    dump = read_dump_file(str(core))
    assert dump.format == "kdump zlib"
    assert (dump.machine, dump.release) == ("x86_64", "6.12.0-test")
    assert (dump.dump_level, dump.truncated) == (31, False)


def test_pages_come_back(prog: Program) -> None:
    for frame, page in PAGES.items():
        assert prog.read(frame * PAGE, PAGE, physical=True) == page
    assert prog["UTS_RELEASE"].string_() == b"6.12.0-test"


@pytest.mark.parametrize("frame", [0, 2, 5, 62, 64, 99, 100, 39_998, 40_000, 1 << 30])
def test_other_pages_are_no_zeros(prog: Program, frame: int) -> None:
    with pytest.raises(FaultError, match=r"Excluded page|Out-of-bounds PFN"):
        prog.read(frame * PAGE, 8, physical=True)


def test_same_pages_are_stored_once() -> None:
    one, two = write({4: bytes(PAGE)}), write({4: bytes(PAGE), 101: bytes(PAGE)})
    assert len(two) == len(one) + kdump.DESCRIPTOR.size


def test_page_that_does_not_shrink_is_stored_as_it_is() -> None:
    assert write(PAGES).count(NOISE) == 1


def test_order_of_frames_does_not_matter() -> None:
    assert write(dict(reversed(PAGES.items()))) == write(PAGES)


def test_bitmaps() -> None:
    data = write(PAGES)
    header = reading.parse_kdump(lambda offset, size: data[offset : offset + size])
    half = header.bitmap_size // 2
    maps = [
        int.from_bytes(data[at : at + half], "little")
        for at in (header.bitmap_offset, header.bitmap_offset + half)
    ]
    assert maps[0].bit_count() == 64 + 39_900
    assert maps[1] == sum(1 << frame for frame in PAGES)


def test_end_of_memory_and_notes() -> None:
    data = write(PAGES)
    sub_header = kdump.SUB_HEADER.unpack_from(data, PAGE)
    phys_base, _, _, _, _, info_at, info_size, notes_at, notes_size = sub_header[:9]
    assert phys_base == 2**64 - 0x1000000
    assert data[info_at : info_at + info_size] == VMCOREINFO
    assert data[notes_at : notes_at + notes_size] == MACHINE.notes
    assert sub_header[-1] == 40_000
