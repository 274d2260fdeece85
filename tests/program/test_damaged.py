# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kdumps with pages that are not in the file, where libkdumpfile gets SIGBUS."""

import os
import random
import struct
from pathlib import Path

import pytest
from drgn import FaultError
from drgn.helpers.linux.mm import follow_phys

from fixtures import lab
from fixtures.demo.catalog import DEMOS
from msatools.program import TargetSpec, open_target
from msatools.program.model import DamagedDumpError
from tests.contract.table import MEMSTAT, ROWS, Row
from tests.support.calls import call
from tests.support.kdumpfile import DESCRIPTOR, Layout, copied

PAGE = 4096
FORMATS = ("kdump-zlib", "kdump-lzo", "kdump-snappy", "kdump-zstd", "kdump-raw")
DEMO = DEMOS["6.12"].core
MIB = 1 << 20


def described(layout: Layout, row: int, **fields: int) -> dict[int, bytes]:
    """The change that gives a page another size, offset or flags."""
    offset, size, flags, page_flags = layout.descriptors[row]
    new = DESCRIPTOR.pack(
        fields.get("offset", offset),
        fields.get("size", size),
        fields.get("flags", flags),
        page_flags,
    )
    return {layout.table_offset + row * DESCRIPTOR.size: new}


def cut(path: Path, directory: Path, less: int) -> Path:
    copy = copied(path, directory, {})
    os.truncate(copy, copy.stat().st_size - less)
    return copy


@pytest.mark.parametrize(
    ("format", "row"),
    [*((FORMATS[0], row) for row in ROWS), *((name, MEMSTAT) for name in FORMATS[1:])],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_cut_dump_is_never_whole(format: str, row: Row, tmp_path: Path) -> None:
    """The end of the last page is missing: it was zeros, or the process was killed."""
    dump = cut(lab.build("barepages-6.12").dump(format), tmp_path, 3000)
    words = (str(dump), "--json", "--strict")
    ran = call(row.command, *words, opening=open_target)
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["target"]["truncated"]
    assert ran.json["coverage"]["descriptors_bad"] > 0


@pytest.mark.parametrize("format", FORMATS)
def test_pages_are_lost_by_themselves(format: str, tmp_path: Path) -> None:
    """All other pages are as in the undamaged dump."""
    path = lab.build("barepages-6.12").dump(format)
    layout = Layout(path)
    chance = random.Random(format)
    rows = sorted(chance.sample(range(len(layout.kept) // 2, len(layout.kept)), 100))
    changes: dict[int, bytes] = {}
    for row in rows:
        changes |= described(layout, row, size=chance.choice((0, PAGE + 1, 4 * MIB)))
    vmlinux = str(lab.build("barepages-6.12").vmlinux)
    damaged = copied(path, tmp_path, changes)
    prog, target = open_target(TargetSpec(path=str(damaged), vmlinux=vmlinux))
    assert target.bad_descriptors == len(rows)
    assert not target.truncated
    whole = open_target(TargetSpec(path=str(path), vmlinux=vmlinux)).prog
    for row in rows:
        address = int(layout.kept[row]) * PAGE
        with pytest.raises(FaultError, match="damaged page"):
            prog.read(address + 5, 10, True)
        for near in (row - 1, row + 1):
            if near in rows or near == len(layout.kept):
                continue
            address = int(layout.kept[near]) * PAGE
            assert prog.read(address, PAGE, True) == whole.read(address, PAGE, True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_lost_page_of_symbols(row: Row, tmp_path: Path) -> None:
    """It took all types and symbols with it."""
    prog = open_target(TargetSpec(path=str(DEMO), types="btf")).prog
    names = prog.symbol("kallsyms_names").address
    pfn = follow_phys(prog["init_mm"].address_of_(), names + 9 * PAGE).value_() // PAGE
    layout = Layout(DEMO)
    lost = described(layout, layout.kept.tolist().index(pfn), size=0)
    copy = copied(DEMO, tmp_path, lost)
    ran = call(row.command, str(copy), "--json", "--strict", opening=open_target)
    assert (ran.status, ran.err) == (3, "")
    coverage, notes = ran.json["coverage"], ran.json["notes"]
    assert coverage["descriptors_bad"] == 1
    # The names on the page, and up to 256 behind it.
    assert 256 < coverage["symbols_unreadable"] < 1000
    assert any("of the kernel's symbols are lost" in note["text"] for note in notes)


def test_reads_of_a_damaged_dump(tmp_path: Path) -> None:
    layout = Layout(DEMO)
    last = len(layout.kept) - 1
    copy = copied(DEMO, tmp_path, described(layout, last, offset=1 << 40))
    prog = open_target(TargetSpec(path=str(copy))).prog
    whole = open_target(TargetSpec(path=str(DEMO))).prog
    first = next(
        pfn
        for pfn, after in zip(layout.kept[:-2], layout.kept[1:-1], strict=True)
        if after == pfn + 1
    )
    for offset, size in ((0, 1), (4090, 12), (100, 5000), (0, 2 * PAGE)):
        address = int(first) * PAGE + offset
        assert prog.read(address, size, True) == whole.read(address, size, True)
    version = whole["linux_banner"].address_of_().value_()
    assert prog.read(version, 64) == whole.read(version, 64)
    for beyond in (int(layout.left_out()[0]) * PAGE, 1 << 50, (1 << 64) - PAGE):
        with pytest.raises(FaultError, match="Excluded page"):
            prog.read(beyond, 8, True)


def test_one_descriptor_does_not_end_the_process(tmp_path: Path) -> None:
    """libkdumpfile maps 4 MiB at a time, and what is beyond the file's end, too."""
    layout = Layout(DEMO)
    changes: dict[int, bytes] = {}
    for row in range(len(layout.kept)):
        changes |= described(layout, row, size=64 * MIB)
    copy = copied(DEMO, tmp_path, changes)
    with pytest.raises(DamagedDumpError, match=r"pages of the file are damaged"):
        open_target(TargetSpec(path=str(copy)))


@pytest.mark.parametrize(
    "sizes", [(2**31 - 1, 64 * MIB), (64 * MIB, 0), (1000, 64 * MIB)]
)
def test_notes_beyond_the_end(sizes: tuple[int, int], tmp_path: Path) -> None:
    notes, vmcoreinfo = sizes
    changes = {
        PAGE + 40: struct.pack("<Q", vmcoreinfo or 1),
        PAGE + 56: struct.pack("<Q", notes),
    }
    copy = copied(DEMO, tmp_path, changes)
    with pytest.raises(DamagedDumpError, match=r"notes (lie|have an imp)"):
        open_target(TargetSpec(path=str(copy)))
