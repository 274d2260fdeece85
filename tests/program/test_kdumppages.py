# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of kdumps read in bulk are the same, byte for byte, as libkdumpfile's."""

import errno
import os
import random
import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from drgn import FaultError, Program
from lzallright import LZOCompressor, LZOError

from fixtures import lab
from fixtures.demo.catalog import DEMOS
from msatools import native
from msatools.errors import DamagedDataError
from msatools.program import kdump_pages
from msatools.program.kdump_pages import (
    CUT_OFF,
    KdumpPages,
    LeftToDrgnError,
    Pfns,
    find_codec,
)
from tests.support.kdumpfile import DESCRIPTOR, Layout, copied

PAGE = 4096
FORMATS = (
    "kdump-zlib",
    "kdump-lzo",
    "kdump-snappy",
    "kdump-zstd",
    "kdump-raw",
    "kdump-filtered",
    "flattened",
)
DEMO = DEMOS["6.12"].core

# Offsets of header fields.
VERSION, STATUS, BITMAP_BLOCKS = 8, 424, 436
SPLIT, MAX_PFN = PAGE + 12, PAGE + 96


class Library:
    """A dump read by libkdumpfile."""

    def __init__(self, path: Path) -> None:
        self.prog = Program()
        self.prog.set_core_dump(path)
        # The first read makes libkdumpfile set up address translation, which can fail.
        self.page(0)

    def page(self, pfn: int) -> bytes | None:
        try:
            data: bytes = self.prog.read(pfn * PAGE, PAGE, True)
        except FaultError:
            return None
        return data


def compare(path: Path, pfns: Pfns) -> int:
    """Compare pages with libkdumpfile's; return how many are in the dump."""
    library = Library(path)
    pages = KdumpPages(str(path)).read(pfns)
    assert len(pages) == len(pfns)
    for pfn, page in zip(pfns.tolist(), pages, strict=True):
        assert page == library.page(pfn), hex(pfn)
    return len(pages) - pages.count(None)


@pytest.fixture(params=["in C", "in Python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decompress by the part in C if it was built, or by Python's libraries."""
    by: str = request.param
    if by == "in Python":
        monkeypatch.setenv(native.SWITCH, "no")
    return by


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format: str) -> None:
    path = lab.build("barepages-6.12").dump(format)
    layout = Layout(path)
    chance = np.random.default_rng(0)
    # Runs of pages, single pages, excluded pages, and pages past the end of memory.
    first = chance.integers(0, len(layout.kept) - 300, 5)
    pfns = np.concatenate(
        [
            *(layout.kept[start : start + 300] for start in first),
            chance.choice(layout.kept, 500),
            chance.integers(0, layout.max_pfn + 1000, 500),
        ]
    )
    assert 2000 <= compare(path, pfns) < len(pfns)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("name", DEMOS)
def test_every_page_of_the_demos(name: str) -> None:
    layout = Layout(DEMOS[name].core)
    assert compare(DEMOS[name].core, layout.kept) == len(layout.kept)
    # Identical pages share their data.
    assert len({offset for offset, *_ in layout.descriptors}) < len(layout.kept)


def test_pages_are_the_same_in_a_forked_process() -> None:
    kept = Layout(DEMO).kept
    pages = KdumpPages(str(DEMO))
    expected = pages.read(kept)
    pid = os.fork()
    if not pid:
        # An exception in the child must not continue the tests.
        try:
            os._exit(pages.read(kept) != expected)
        finally:
            os._exit(2)
    assert pages.read(kept) == expected
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("offset", "new"),
    [
        (0, b"KDUMB   "),
        (VERSION, struct.pack("<i", 7)),
        (VERSION, struct.pack("<i", 0)),
        # Part of no pages.
        (SPLIT, struct.pack("<i", 1)),
        (MAX_PFN, struct.pack("<Q", 1 << 40)),
        (MAX_PFN, struct.pack("<Q", 0)),
        # Block sizes at the offsets of other byte orders and word sizes.
        (STATUS, struct.pack(">II", 1, PAGE)),
        (STATUS - 12, struct.pack("<II", 1, PAGE)),
    ],
)
def test_headers_that_are_left_to_libkdumpfile(
    offset: int, new: bytes, tmp_path: Path
) -> None:
    changes = {offset: new}
    if offset == STATUS - 12:
        changes[STATUS] = bytes(8)
    with pytest.raises((DamagedDataError, LeftToDrgnError), match="kdump"):
        KdumpPages(str(copied(DEMO, tmp_path, changes)))


def test_part_of_a_split_dump(tmp_path: Path) -> None:
    """It has the bitmaps of the whole, and descriptors from its first page on."""
    layout = Layout(DEMO)
    first, last = 1000, 3000
    table = b"".join(DESCRIPTOR.pack(*row) for row in layout.descriptors[first:last])
    part = struct.pack("<QQ", layout.kept[first], layout.kept[last])
    copy = copied(
        DEMO,
        tmp_path,
        {SPLIT: struct.pack("<i", 1), MAX_PFN - 16: part, layout.table_offset: table},
    )
    pages = KdumpPages(str(copy))
    assert pages.read(layout.kept[[0, first - 1, last]]) == [None] * 3
    expected = KdumpPages(str(DEMO)).read(layout.kept[first:last])
    assert pages.read(layout.kept[first:last]) == expected
    compare(copy, layout.kept[first:last])


def test_bitmaps_that_are_cut_off(tmp_path: Path) -> None:
    # For 32 TiB, and for more than there can be.
    for blocks, error in ((1 << 19, EOFError), (0x7FFFFFFE, DamagedDataError)):
        large = struct.pack("<I", blocks)
        with pytest.raises(error):
            KdumpPages(str(copied(DEMO, tmp_path, {BITMAP_BLOCKS: large})))


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("format", FORMATS[:5])
def test_pages_past_the_end_are_cut_off(format: str, tmp_path: Path) -> None:
    """Pages before the end are read. libkdumpfile returns zeros past it, or crashes."""
    path = lab.build("barepages-6.12").dump(format)
    layout = Layout(path)
    offset, size, *_ = layout.descriptors[len(layout.kept) // 2]
    end = offset + size // 2
    cut = tmp_path / "cut"
    with path.open("rb") as whole:
        cut.write_bytes(whole.read(end))
    middle = slice(len(layout.kept) // 2 - 200, len(layout.kept) // 2 + 200)
    library = Library(path)
    found = KdumpPages(str(cut)).read(layout.kept[middle])
    for pfn, (offset, size, *_), page in zip(
        layout.kept[middle].tolist(), layout.descriptors[middle], found, strict=True
    ):
        if offset + size <= end:
            assert page == library.page(pfn)
        else:
            assert page == CUT_OFF
    assert 0 < found.count(CUT_OFF) < len(found)


def test_descriptors_that_are_cut_off(tmp_path: Path) -> None:
    layout = Layout(DEMO)
    cut = tmp_path / "cut"
    cut.write_bytes(DEMO.read_bytes()[: layout.table_offset + 10 * DESCRIPTOR.size])
    found = KdumpPages(str(cut)).read(layout.kept)
    assert found[:10] == [CUT_OFF] * 10
    assert found[10:] == [None] * (len(found) - 10)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(
    ("descriptor", "found"),
    [
        # An offset past the end of any file.
        ((1 << 63, PAGE, 0, 0), CUT_OFF),
        (((1 << 64) - 1, 1, 1, 0), CUT_OFF),
        (((1 << 63) - 1, 0xFFFFFFFF, 1, 0), CUT_OFF),
        ((0, 0xFFFFFFFF, 1, 0), CUT_OFF),
        # Left to libkdumpfile: no data; too little and too much for a page; invalid
        # flags.
        ((0, 0, 0, 0), None),
        ((0, PAGE - 1, 0, 0), None),
        ((0, PAGE + 1, 0, 0), None),
        ((0, PAGE, 0x40, 0), None),
        ((0, PAGE, 0x80000000, 0), None),
        ((0, PAGE, 0x2, 0), None),
        ((0, 2 * PAGE, 1, 0), None),
    ],
)
def test_invalid_descriptor(
    descriptor: tuple[int, int, int, int], found: object, tmp_path: Path
) -> None:
    layout = Layout(DEMO)
    copy = copied(DEMO, tmp_path, {layout.table_offset: DESCRIPTOR.pack(*descriptor)})
    (second,) = KdumpPages(str(DEMO)).read(layout.kept[1:2])
    assert KdumpPages(str(copy)).read(layout.kept[:2]) == [found, second]


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("format", [*FORMATS[:5], "demo"])
def test_damage(format: str, tmp_path: Path) -> None:
    """With random bytes changed, a page is None, cut off, or as by libkdumpfile."""
    path = DEMO if format == "demo" else lab.build("barepages-6.12").dump(format)
    layout = Layout(path)
    chance = random.Random(format)
    first = len(layout.kept) // 3
    rows = range(first, first + 1500)
    copy = tmp_path / "damaged"
    copy.write_bytes(path.read_bytes())
    size = copy.stat().st_size
    with copy.open("r+b") as file:
        for row in rows:
            offset, length, *_ = layout.descriptors[row]
            for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
                file.seek(offset + chance.randrange(length))
                file.write(chance.randbytes(1))
            if chance.random() < 0.1:
                field = chance.randrange(DESCRIPTOR.size - 8)
                file.seek(layout.table_offset + row * DESCRIPTOR.size + field)
                file.write(chance.randbytes(1))
    damaged = Layout(copy)
    library = Library(copy)
    pfns = layout.kept[rows.start : rows.stop]
    same = lost = 0
    for row, pfn, page in zip(
        rows, pfns.tolist(), KdumpPages(str(copy)).read(pfns), strict=True
    ):
        offset, length, *_ = damaged.descriptors[row]
        if offset + length > size:
            # Here libkdumpfile would crash.
            assert page == CUT_OFF
            continue
        if page is None:
            lost += 1
            continue
        theirs = library.page(pfn)
        if theirs is None and format == "kdump-zstd":
            # libzstd 1.4.4 in drgn's wheel rejects some blocks that newer versions
            # decompress.
            continue
        assert page == theirs
        same += 1
    assert same > 100
    assert lost > 50 or format == "kdump-raw"


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("limit", [0, 1000])
@pytest.mark.parametrize("format", ["kdump-lzo", "kdump-raw"])
def test_disk_that_fails(
    format: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lab.build("barepages-6.12").dump(format)
    layout = Layout(path)
    pages = KdumpPages(str(path))
    row = len(layout.kept) // 2
    pfns = layout.kept[row : row + 1]
    assert pages.read(pfns)[0]
    pread = os.pread

    def fail(fd: int, size: int, offset: int) -> bytes:
        if offset < layout.descriptors[0][0]:
            return pread(fd, size, offset)
        if not limit:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, min(size, limit), offset)

    monkeypatch.setattr(os, "pread", fail)
    assert layout.descriptors[row][1] > limit
    assert pages.read(pfns) == [None]


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have none that decompresses installed, but zlib, which is in Python."""
    for name in ("zlib_ng", "lzallright", "cramjam", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(kdump_pages, "_ZSTD", "libnotthere.so.1")


def said_to_be(compression: str, tmp_path: Path) -> Path:
    """Return a dump whose header names a compression."""
    flag = {"zlib": 1, "lzo": 2, "snappy": 4, "zstd": 0x20}[compression]
    return copied(DEMO, tmp_path, {STATUS: struct.pack("<I", flag)})


@pytest.mark.usefixtures("no_libraries")
@pytest.mark.parametrize("compression", ["lzo", "snappy", "zstd"])
def test_missing_library(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump whose library is missing is left to libkdumpfile."""
    monkeypatch.setenv(native.SWITCH, "no")
    with pytest.raises(LeftToDrgnError, match=f"no library for {compression}"):
        KdumpPages(str(said_to_be(compression, tmp_path)))


@pytest.mark.usefixtures("no_libraries", "by")
def test_zlib_needs_no_library() -> None:
    kept = Layout(DEMO).kept
    assert compare(DEMO, kept) == len(kept)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.usefixtures("no_libraries")
@pytest.mark.parametrize("compression", ["lzo", "snappy", "zstd"])
def test_the_part_in_c_needs_no_library(compression: str, tmp_path: Path) -> None:
    """But libzstd, without which Python's is asked for."""
    if compression == "zstd":
        with pytest.raises(LeftToDrgnError, match="no library for zstd"):
            KdumpPages(str(said_to_be(compression, tmp_path)))
        return
    path = lab.build("barepages-6.12").dump(f"kdump-{compression}")
    kept = Layout(path).kept[:2000]
    assert compare(path, kept) == len(kept)


def test_descriptors_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages may lie anywhere in the file, also several at one place."""
    layout = Layout(DEMO)
    count = min(len(layout.kept), 2000)
    rows = random.Random(0).choices(range(count), k=count)
    table = b"".join(DESCRIPTOR.pack(*layout.descriptors[row]) for row in rows)
    copy = copied(DEMO, tmp_path, {layout.table_offset: table})
    pages = KdumpPages(str(DEMO)).read(layout.kept[:count])
    expected = [pages[row] for row in rows]
    assert KdumpPages(str(copy)).read(layout.kept[:count]) == expected
    monkeypatch.setenv(native.SWITCH, "no")
    assert KdumpPages(str(copy)).read(layout.kept[:count]) == expected


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(
    ("format", "block"),
    [
        # Headers with an uncompressed size of 1 GiB and of 4 GiB.
        ("kdump-zstd", b"\x28\xb5\x2f\xfd\xa0\0\0\0\x40" + bytes(50)),
        ("kdump-snappy", b"\xff\xff\xff\xff\x0f" + bytes(50)),
    ],
)
def test_block_that_asks_for_much_memory(
    format: str, block: bytes, tmp_path: Path
) -> None:
    path = lab.build("barepages-6.12").dump(format)
    layout = Layout(path)
    row = next(i for i, (_, size, *_) in enumerate(layout.descriptors) if size < PAGE)
    offset, *_ = layout.descriptors[row]
    copy = copied(path, tmp_path, {offset: block})
    assert KdumpPages(str(copy)).read(layout.kept[row : row + 1]) == [None]


def test_zlib_bombs() -> None:
    """No more of each is decompressed than tells that it is no page."""
    codec = find_codec("zlib", PAGE)
    assert codec is not None
    bomb = zlib.compress(bytes(PAGE << 10), 9)
    assert len(bomb) <= PAGE
    assert codec.decompress(bomb) == b""
    assert codec.decompress(zlib.compress(bytes(PAGE))) == bytes(PAGE)


def test_lzo_bombs() -> None:
    """After some that a dump must not have, no more are decompressed."""
    page, bomb = map(LZOCompressor().compress, (bytes(PAGE), bytes(PAGE * 180)))
    assert len(bomb) <= PAGE
    codec = find_codec("lzo", PAGE)
    assert codec is not None
    assert codec.decompress(page) == bytes(PAGE)
    # 64 MiB in all.
    for _ in range((64 << 20) // (PAGE * 179) + 1):
        codec.decompress(bomb)
    with pytest.raises(LZOError):
        codec.decompress(page)
