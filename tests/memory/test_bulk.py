# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memmap read in bulk is the same as read by drgn."""

from pathlib import Path

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.reader import Gap, Reader
from msatools.kernel.report import LossLog
from msatools.memory import memmap
from msatools.memory.classes import page_layout
from msatools.memory.memmap import CHUNK_BYTES, BulkReader, memmap_ranges
from msatools.program import TargetSpec, open_target
from msatools.program.kdump_pages import CUT, LEFT, KdumpPages, PageData, Pfns
from msatools.program.linear import VmallocTables, page_tables
from tests.support.kdumpfile import DESCRIPTOR, Layout, copied

PAGE = 4096
IN_BULK = ("kdump-zlib", "kdump-lzo", "kdump-snappy", "kdump-zstd", "kdump-raw")


def open_dump(path: Path) -> Reader:
    return Reader(open_target(TargetSpec(path=str(path), types="btf")).prog)


def pieces(reader: Reader) -> list[tuple[int, int]]:
    """Return address and size of each piece in which the memmap is read."""
    layout = page_layout(reader.prog)
    return [
        (start, min(CHUNK_BYTES, part.address_end(layout.size) - start))
        for part in memmap_ranges(reader, layout, LossLog())
        for start in range(part.address, part.address_end(layout.size), CHUNK_BYTES)
    ]


@pytest.fixture(scope="module")
def small() -> lab.Run:
    """A small dump: only its format matters."""
    return lab.build("barepages-6.12")


@pytest.fixture
def reader(small: lab.Run) -> Reader:
    return open_dump(small.dump("kdump-lzo"))


def assert_same(reader: Reader) -> None:
    whole = pieces(reader)
    found = BulkReader.of(reader)
    assert BulkReader.of(reader) is found
    before = reader.reads, reader.bytes
    data = [found.read_around_gaps(address, size, PAGE) for address, size in whole]
    assert found.in_bulk
    assert reader.reads == before[0] + len(whole)
    assert reader.bytes == before[1] + sum(size for _, size in whole)
    assert data == [
        reader.read_around_gaps(address, size, PAGE) for address, size in whole
    ]


@pytest.mark.parametrize("format", IN_BULK)
def test_memmap_is_the_same(small: lab.Run, format: str) -> None:
    assert_same(open_dump(small.dump(format)))


@pytest.mark.parametrize("format", ["elf", "elf-filtered"])
def test_formats_that_are_left_to_drgn(small: lab.Run, format: str) -> None:
    reader = open_dump(small.dump(format))
    address, size = pieces(reader)[0]
    found = BulkReader.of(reader)
    assert not found.in_bulk
    assert found.read_around_gaps(address, size, PAGE) == (
        reader.read(address, size),
        [],
    )


class Holes:
    """Pages of a dump without some.

    :param lost: index in the pages read -> state
    """

    def __init__(self, pages: KdumpPages, lost: dict[int, int]) -> None:
        self.page_size = pages.page_size
        self._pages = pages
        self._lost = lost

    def read_together(self, pfns: Pfns) -> PageData:
        found = self._pages.read_together(pfns)
        for index, state in self._lost.items():
            found.states[index] = state
            found.data[index * PAGE : (index + 1) * PAGE] = bytes(PAGE)
        return found


def test_pages_that_drgn_must_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, size = pieces(reader)[0]
    expected = reader.read(address, size)
    left_to_drgn = dict.fromkeys([0, 1, 5, size // PAGE - 1], LEFT)
    monkeypatch.setattr(
        memmap, "KdumpPages", lambda path: Holes(KdumpPages(path), {**left_to_drgn})
    )
    before = reader.reads, reader.bytes
    data, gaps = BulkReader.of(reader).read_around_gaps(address, size, PAGE)
    assert (bytes(data), gaps) == (expected, [])
    # One read for all other pages, and one for each run of these.
    assert (reader.reads, reader.bytes) == (before[0] + 4, before[1] + size)


def test_gaps_are_in_order(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are cut off are unreadable; drgn has the reason for missing ones."""
    start, size = pieces(reader)[0]
    vmemmap = start - (1 << 30)
    lost = {2: CUT, 3: CUT, 9: LEFT}
    monkeypatch.setattr(
        memmap, "KdumpPages", lambda path: Holes(KdumpPages(path), lost)
    )
    expected = bytearray(reader.read(start, size))
    data, gaps = BulkReader.of(reader).read_around_gaps(start, size, PAGE)
    expected[2 * PAGE : 4 * PAGE] = bytes(2 * PAGE)
    assert data == expected
    assert gaps == [Gap(i * PAGE, PAGE, "unreadable") for i in (2, 3)]
    # Memory that is not mapped address all.
    found = BulkReader.of(reader).read_around_gaps(vmemmap, 4 * PAGE, PAGE)
    assert found == reader.read_around_gaps(vmemmap, 4 * PAGE, PAGE)
    assert len(found[1]) == 4


def test_wrong_page_tables_are_noticed(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = VmallocTables.frames

    def shifted(self: VmallocTables, address: int, count: int) -> Pfns:
        found: Pfns = frames(self, address, count) + 1
        return found

    monkeypatch.setattr(VmallocTables, "frames", shifted)
    address, size = pieces(reader)[0]
    found = BulkReader.of(reader)
    assert found.in_bulk
    assert found.read_around_gaps(address, size, PAGE) == (
        reader.read(address, size),
        [],
    )
    assert not found.in_bulk


def test_memmap_of_a_cut_dump(small: lab.Run, tmp_path: Path) -> None:
    """Existing pages are right, and missing pages are gaps, not zeros.

    The memmap's position in the dump varies, so instead of cutting the file, the test
    changes the descriptors of every other page to point past its end.
    """
    whole = small.dump("kdump-lzo")
    intact, layout = open_dump(whole), Layout(whole)
    tables = page_tables(intact.prog)
    assert tables is not None
    frames = [
        tables.frames(address, size // PAGE)[1::2] for address, size in pieces(intact)
    ]
    gone = np.flatnonzero(np.isin(layout.kept, np.concatenate(frames))).tolist()
    end = whole.stat().st_size
    changes = {
        layout.table_offset + row * DESCRIPTOR.size: DESCRIPTOR.pack(
            end, *layout.descriptors[row][1:]
        )
        for row in gone
    }
    reader = open_dump(copied(whole, tmp_path, changes))
    lost = 0
    for address, size in pieces(intact):
        data, gaps = BulkReader.of(reader).read_around_gaps(address, size, PAGE)
        expected = bytearray(intact.read(address, size))
        for gap in gaps:
            assert gap.reason == "unreadable"
            expected[gap.offset : gap.offset + gap.size] = bytes(gap.size)
            lost += gap.size
        assert data == expected
    # With HVO, a page of the memmap can be mapped more than once.
    assert (
        (1 << 20) < len(gone) * PAGE <= lost < sum(size for _, size in pieces(intact))
    )
