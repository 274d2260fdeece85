# SPDX-License-Identifier: LGPL-2.1-or-later

"""The scan in C gives the same as the scan in numpy, which is the reference."""

import ctypes
import importlib.util
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from io import FileIO
from pathlib import Path
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
import pytest
from drgn import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fixtures import lab
from fixtures.demo import DEMOS
from msatools import native
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory import compiled, memmap, stream
from msatools.memory.classes import HugetlbMark, PageClass, PageLayout, page_layout
from msatools.memory.classify import Block, classify
from msatools.memory.memmap import MemmapRange, chunk_pages, memmap_ranges
from msatools.memory.owners import OwnedPages, collect_owners
from msatools.memory.scan import FarHeadReader, scan
from msatools.memory.sums import ScanResult, add_block
from msatools.model import values
from msatools.program import linear
from msatools.program.linear import DirectMap
from msatools.selfdesc.find import find_symbol
from tests.support.dumps import open_dump

from .madepages import ADDRESS, Pages, open_demo, type_word

FIRST_PFN = (1 << 16) + 32
"""A pfn at which no free block of more than order 5 is aligned."""

MANY = settings(max_examples=400)
"""Each run has the same examples and no deadline (profile in tests/conftest.py)."""

NOBODY = OwnedPages(np.empty(0, np.uint64), np.empty(0, np.uint8))
COLUMNS = ("flags", "mapping", "counts", "codes", "tails", "tail_heads", "words")
COLUMNS += ("fakes", "notable")


@dataclass
class Digests:
    """Records checksums of each block's columns."""

    blocks: list[dict[str, int]] = field(default_factory=list)
    classes: set[int] = field(default_factory=set)

    def observe(self, block: Block) -> None:
        digests = {"pfn": block.pfn, "pages": len(block)}
        for name in COLUMNS:
            column = np.ascontiguousarray(getattr(block, name))
            digests[name] = zlib.crc32(column.tobytes())
        self.blocks.append(digests)
        self.classes.update(np.unique(block.codes).tolist())

    def merge(self, later: "Digests") -> None:
        raise NotImplementedError


def comparable(result: ScanResult) -> dict[str, Any]:
    """Return all results of a scan, independent of how they are split."""

    def joined(parts: list[Any]) -> list[int]:
        return [int(number) for part in parts for number in part]

    found = {
        name: value for name, value in values(result).items() if np.isscalar(value)
    }
    return found | {
        "counts": {key: row.tolist() for key, row in result.counts.items()},
        "cache": [column.tolist() for column in result.cache.sum()],
        "candidates": [joined(parts) for parts in values(result.candidates).values()],
        "swap": (joined(result.swap_entries), joined(result.swap_keys)),
    }


Scan = Callable[[], tuple[ScanResult, Digests]]


def assert_same(do_scan: Scan) -> tuple[ScanResult, Digests]:
    """Scan both ways, check that the results are equal, and return them."""
    if compiled.library() is None:
        pytest.skip("it is not compiled: see test_it_is_built()")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.SWITCH, "no")
        expected, by_numpy = do_scan()
        patch.delenv(native.SWITCH)
        found, by_compiled = do_scan()
    for one, other in zip(by_numpy.blocks, by_compiled.blocks, strict=True):
        assert {n for n in one if one[n] != other[n]} == set(), one["pfn"]
    assert comparable(found) == comparable(expected)
    return found, by_compiled


def both_scans(prog: Program) -> Digests:
    """Scan a dump both ways."""
    reader, losses = Reader(prog), LossLog()
    layout = page_layout(prog)
    ranges = memmap_ranges(reader, layout, losses)
    owned = collect_owners(reader, layout, ranges, losses).pages()

    def do_scan() -> tuple[ScanResult, Digests]:
        seen = Digests()
        return scan(Reader(prog), layout, ranges, owned, observers=[seen]), seen

    return assert_same(do_scan)[1]


@cache
def scanned_from_file(name: str) -> tuple[Program, OwnedPages, list[MemmapRange]]:
    """Open an ELF dump whose memmap can be read from the file, in blocks."""
    prog = open_dump(name, "dwarf")
    reader, losses = Reader(prog), LossLog()
    layout = page_layout(prog)
    ranges = memmap_ranges(reader, layout, losses)
    owned = collect_owners(reader, layout, ranges, losses).pages()
    step = chunk_pages(layout)
    blocks = [
        part._replace(
            pfn=part.pfn + first,
            pages=min(step, part.pages - first),
            address=part.address + first * layout.size,
        )
        for part in ranges
        for first in range(0, part.pages, step)
    ]
    return prog, owned, blocks


def test_each_block_from_the_file(run: lab.Run) -> None:
    """Blocks scanned in one call are as numpy has them, read wholly or not."""
    if compiled.library() is None:
        pytest.skip("it is not compiled: see test_it_is_built()")
    prog, owned, blocks = scanned_from_file(run.name)
    reader, layout = Reader(prog), page_layout(prog)
    file = stream.dump_file(reader)
    assert file is not None
    assert file.least_order
    bytes_read = []
    for block in blocks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SWITCH, "no")
            expected = comparable(scan(Reader(prog), layout, [block], owned))
        for read_all in (True, False):
            before = reader.bytes
            found = scan(reader, layout, [block], owned, read_all=read_all)
            bytes_read.append(reader.bytes - before)
            reads = {"memmap_reads": expected["memmap_reads"]}
            assert comparable(found) | reads == expected, block
    # Most memory of this machine is free.
    assert sum(bytes_read[::2]) > 2 * sum(bytes_read[1::2])


def test_all_blocks_from_the_file(run: lab.Run) -> None:
    """One call has several blocks, and ends where a zone does."""
    prog, owned, blocks = scanned_from_file(run.name)
    layout, reader = page_layout(prog), Reader(prog)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.SWITCH, "no")
        expected = comparable(scan(Reader(prog), layout, blocks, owned))
    done: list[int] = []
    found = scan(
        reader, layout, blocks, owned, progress=lambda pages, total: done.append(pages)
    )
    reads = {"memmap_reads": expected["memmap_reads"]}
    assert comparable(found) | reads == expected
    assert done == sorted(done)
    assert done[-1] == sum(block.pages for block in blocks)


def scanned_alone(
    prog: Program, block: MemmapRange, path: Path, owned: OwnedPages, *, read_all: bool
) -> tuple[ScanResult, int]:
    """Scan a block as if its struct pages in the dump were those of a file.

    :return: the result, and the number of blocks that are left to Python
    """
    layout = page_layout(prog)
    native_scan = compiled.compiled_classifier(layout)
    whole = stream.dump_file(Reader(prog))
    assert native_scan is not None
    assert whole is not None
    first = int(whole.tables.frames(block.address, 1)[0])
    with path.open("rb", buffering=0) as file:
        assert isinstance(file, FileIO)
        dump = whole._replace(
            file=file,
            starts=np.array([first]),
            ends=np.array([first + block.pages * layout.size // 4096]),
            shifts=np.array([-first * 4096]),
        )
        scan_of = stream.FileScan(Reader(prog), layout, [block], native_scan, dump)
        found = ScanResult()
        rest = scan_of.rest(owned, found, lambda count: None, read_all=read_all)
        return found, len(list(rest))


def test_damaged_block_from_a_file(run: lab.Run, tmp_path: Path) -> None:
    """Also damaged struct pages are as numpy has them, if all are read."""
    if compiled.library() is None:
        pytest.skip("it is not compiled: see test_it_is_built()")
    prog, owned, blocks = scanned_from_file(run.name)
    layout = page_layout(prog)

    path = tmp_path / "block"

    def classes(block: MemmapRange) -> int:
        path.write_bytes(Reader(prog).read(block.address, block.pages * layout.size))
        _, left = scanned_alone(prog, block, path, owned, read_all=True)
        # Some are left to Python, such as one of several zones, wherever they lie.
        result = scan(Reader(prog), layout, [block], owned)
        return 0 if left else int(np.count_nonzero(result.totals()))

    block = max((part._replace(pages=2048) for part in blocks), key=classes)
    sound = Reader(prog).read(block.address, block.pages * layout.size)
    added = 0

    @settings(max_examples=100)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal added
        pages = bytearray(sound)
        for _ in range(data.draw(st.integers(1, 12))):
            at = data.draw(st.integers(0, block.pages - 1)) * layout.size
            member = data.draw(st.sampled_from(MEMBERS))
            words = st.integers(0, (1 << 64) - 1) | st.integers(0, 21) | st.just(0)
            near = st.integers(0, block.pages - 1).map(
                lambda page: block.address + page * layout.size | 1
            )
            word = data.draw(words | near).to_bytes(8, "little")
            if member == "flags":
                # The upper half has the zone: a block of several is left to Python.
                word = word[:4]
            at += getattr(layout, member)
            pages[at : at + len(word)] = word
        path.write_bytes(pages)
        found, left = scanned_alone(prog, block, path, owned, read_all=True)
        if left:
            return  # left to Python, which reads the dump
        added += 1
        expected = ScanResult()
        far = FarHeadReader(Reader(prog), layout)
        args = bytes(pages), block.pfn, block.address, layout, far
        add_block(expected, classify(*args), owned, None, None)
        assert comparable(found) == comparable(expected)

    check()
    assert added > 20, added


def test_tail_within_a_free_block(run: lab.Run, tmp_path: Path) -> None:
    """A page that names one there as its head has the block read; a head elsewhere that
    is found then is left to Python."""
    if compiled.library() is None:
        pytest.skip("it is not compiled: see test_it_is_built()")
    prog, _, blocks = scanned_from_file(run.name)
    layout = page_layout(prog)
    block = next(part._replace(pages=2048) for part in blocks if part.pages >= 2048)

    def scanned(head: int) -> tuple[ScanResult, int]:
        """Scan the block with a tail of *head* within its free block of 512 pages."""
        pages = Pages(layout, block.pages, flags=0)
        pages.free(0, 9)
        pages.put(slice(512), "refcount", 0)
        pages.put(88, "compound_head", block.address + head * layout.size | 1)
        pages.put(1000, "compound_head", block.address + 88 * layout.size | 1)
        path = tmp_path / "block"
        path.write_bytes(pages.data())
        return scanned_alone(prog, block, path, NOBODY, read_all=False)

    near, left = scanned(head=999)
    assert (near.pages(), left) == (block.pages, 0)
    elsewhere, left = scanned(head=-(1 << 40))
    assert (elsewhere.pages(), left) == (0, 1)


MEMBERS = ("flags", "compound_head", "mapping", "private", "mapcount", "lru")


def test_file_is_not_read(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is laid over the dump's memory is not in its file."""
    assert stream.dump_file(Reader(prog)) is not None
    nowhere = DirectMap()
    monkeypatch.setitem(prog.cache, linear._DIRECT_MAP, nowhere)
    assert stream.dump_file(Reader(prog)) is None


@pytest.mark.parametrize("types", ["dwarf", "btf"])
def test_poisoned_pages(run: lab.Run, types: str) -> None:
    """Then the inside of free blocks is read, too."""
    prog = open_dump(run.name, types)
    assert stream._least_order(prog)
    poisoned = find_symbol(prog, "num_poisoned_pages").address
    copy = Program(prog.platform)
    copy.add_memory_segment(poisoned, 8, lambda *_: (1).to_bytes(8, "little"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "find_symbol", lambda *_: find_symbol(prog, *_[1:]))
        assert not stream._least_order(copy)


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no compiler"
)


@needs_compiler
def test_it_is_built() -> None:
    assert compiled.library() is not None


@needs_compiler
def test_switch(demo_prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C code is used unless the environment asks for numpy."""
    classified: list[int] = []
    original = compiled.Compiled.classify

    def classify(self: compiled.Compiled, data: bytes, pfn: int, *more: Any) -> Block:
        classified.append(pfn)
        return original(self, data, pfn, *more)

    monkeypatch.setattr(compiled.Compiled, "classify", classify)
    seen = both_scans(demo_prog)
    # Only one of the two scans uses it.
    assert classified == [block["pfn"] for block in seen.blocks]
    assert len(classified) >= 12


@pytest.fixture(scope="module", params=list(DEMOS))
def demo_prog(request: pytest.FixtureRequest) -> Program:
    return open_demo(request.param)


class Memory(Reader):
    """Memory with struct pages only, some of which cannot be read."""

    def __init__(self, data: bytes, missing: frozenset[int]) -> None:
        super().__init__(Program())
        self._data = data
        self._missing = missing

    def read(self, address: int, size: int, *, physical: bool = False) -> bytes:
        start = address - ADDRESS
        if start < 0 or start + size > len(self._data):
            raise drgn.FaultError("could not find memory segment", address)
        for lost in range(start // 4096, (start + size - 1) // 4096 + 1):
            if lost in self._missing:
                why = "Excluded page" if lost % 2 else "Read error"
                raise drgn.FaultError(why, address)
        return self._data[start : start + size]


@dataclass(frozen=True)
class Made:
    """A memmap made by hand."""

    layout: PageLayout
    data: bytes
    owned: OwnedPages = NOBODY
    missing: frozenset[int] = frozenset()
    """Indices of 4096-byte pages that cannot be read."""

    step: int = 512
    """Pages per block."""

    def scan(self) -> tuple[ScanResult, Digests]:
        seen = Digests()
        pages = len(self.data) // self.layout.size
        part = MemmapRange(0, "online", True, FIRST_PFN, pages, ADDRESS)
        memory = Memory(self.data, self.missing)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memmap, "CHUNK_BYTES", self.step * self.layout.size)
            found = scan(memory, self.layout, [part], self.owned, observers=[seen])
        return found, seen


@cache
def layouts(name: str) -> dict[str, PageLayout]:
    """Return a kernel's layout and variations of it."""
    layout = page_layout(open_demo(name))
    types = replace(layout.types, names=layout.types.names | {"large_kmalloc"})
    mark = HugetlbMark(layout.flags, 8, layout.bits["active"], layout.bits["active"])
    refcount, private = layout.private, layout.refcount - 4
    return {
        "real": layout,
        "mask": replace(layout, types=types, compound_mask=True, fake_heads=False),
        "wide": replace(layout, size=layout.size + 24),
        "apart": replace(layout, refcount=refcount, private=private),
        "flag": replace(layout, hugetlb=mark, zone_shift=50, device_zone=4),
    }


@cache
def real_words(name: str) -> npt.NDArray[np.uint64]:
    """Return the struct pages at the start of a demo's first node, a row each."""
    prog = open_demo(name)
    layout = page_layout(prog)
    part = memmap_ranges(Reader(prog), layout, LossLog())[0]
    data = Reader(prog).read(part.address, PAGES * layout.size)
    return np.frombuffer(data, "<u8").reshape(PAGES, -1)


PAGES = 1 << 14
OWNERS = (PageClass.VMALLOC, PageClass.PIPES, PageClass.FILE)


@st.composite
def memmaps(draw: st.DrawFn) -> Made:
    """Generate memmaps of a real kernel with other words in places."""
    kernel = draw(st.sampled_from(list(DEMOS)))
    layout = layouts(kernel)[draw(st.sampled_from(sorted(layouts(kernel))))]
    step = draw(st.sampled_from([64, 128, 512]))
    count = draw(st.integers(1, 3 * step))
    pages = Pages(layout, count)
    real = real_words(kernel)
    first = draw(st.integers(0, PAGES // 64 - 25)) * 64
    pages.words[:, : real.shape[1]] = real[first : first + count]
    bits = (*layout.bits.values(), layout.slab_bit, layout.swapcache_bits)
    typed = [type_word(layout, code) for code in {*layout.types.classes.tolist()} - {0}]
    near = st.integers(-3, count + 3).map(pages.address)
    masks = st.integers(6, 20).map(lambda shift: -(1 << shift))
    anywhere = st.integers(0, (1 << 64) - 1)
    counts = st.sampled_from([-1, 0, 4, -2, 1 << 31])
    zones = st.integers(0, 5).map(lambda zone: zone << layout.zone_shift)
    members = {
        "flags": st.builds(int.__or__, zones, st.sets(st.sampled_from(bits)).map(sum)),
        "mapping": st.integers(1 << 40, (1 << 40) + 12) | st.just(0) | anywhere,
        "compound_head": (near | masks).map(lambda word: word | 1) | anywhere,
        "private": st.integers(0, 22) | anywhere,
        "lru": near | st.just(0xFFFF_8880_0000_0000) | anywhere,
        "mapcount": counts | st.sampled_from(typed),
        "refcount": st.sampled_from([0, 1, 7]),
        "entire_mapcount": counts,
    }
    places, lengths = st.integers(0, count - 1), st.sampled_from([1, 2, 5, 16, 64, 300])
    for name in draw(st.lists(st.sampled_from(sorted(members)), max_size=24)):
        place = draw(places)
        pages.put(slice(place, place + draw(lengths)), name, draw(members[name]))
    # A page of the swap cache, anonymous or of shared memory, and one on no list.
    swapped, bare = draw(places), Pages(layout, 1, flags=1 << layout.zone_shift)
    pages.anon(swapped, draw(st.sampled_from([0, 1 << 40, (1 << 40) + 1])))
    pages.flag_bits(swapped, layout.swapcache_bits)
    bare.put(0, "refcount", 0)
    bare.put(0, "lru", draw(members["lru"]))
    pages.words[draw(places)] = bare.words[0]
    pfns = st.integers(FIRST_PFN - 3, FIRST_PFN + count + 3)
    owners = sorted(draw(st.dictionaries(pfns, st.sampled_from(OWNERS))).items())
    claimed = np.array(owners, np.uint64).reshape(-1, 2)
    owned = OwnedPages(claimed[:, 0].copy(), claimed[:, 1].astype(np.uint8))
    lost = st.frozensets(st.integers(0, count * layout.size // 4096), max_size=3)
    return Made(layout, pages.data(), owned, draw(lost), step)


def test_any_memmap() -> None:
    classes: set[int] = set()
    found = ScanResult()

    @MANY
    @given(memmaps())
    def check(made: Made) -> None:
        result, seen = assert_same(made.scan)
        classes.update(seen.classes)
        found.merge(result)

    check()
    # The examples have many kinds of pages. They depend on the text of the test, so a
    # rare one of the 20 or so classes can be in none of them.
    assert len(classes) > 12
    for name in ("anon_swapcache", "shmem_swapcache", "anon_unmapped"):
        assert getattr(found, name), name
    assert found.swap_entries
    assert found.heads_unreadable
    assert found.candidates.nodes


def test_block_of_one_page(layout: PageLayout) -> None:
    """There is no next page to read."""
    pages = Pages(layout, 1)
    pages.anon(0)
    pages.flag(0, "head")
    pages.flag_bits(0, layout.swapcache_bits)
    result, _ = assert_same(Made(layout, pages.data()).scan)
    assert result.anon_swapcache == result.anon_unmapped == 1


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Forget a loaded library, as in a new process."""
    compiled.library.cache_clear()
    yield
    compiled.library.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_without_a_library(demo_prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    layout = page_layout(demo_prog)
    assert compiled.compiled_classifier(layout) is None
    result, _ = Made(layout, Pages(layout, 512).data()).scan()
    assert result.pages() == 512


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("what", ["text", "another library"])
def test_file_that_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "_classify.abi3.so"
    path.write_text("text")
    other = importlib.util.find_spec("_ctypes")
    assert other
    origin = str(path) if what == "text" else other.origin
    spec = ModuleSpec("_classify", None, origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert compiled.library() is None


@pytest.mark.usefixtures("unloaded")
def test_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation can have an old library."""
    longer = type("longer", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_int64)]})
    monkeypatch.setattr(compiled, "_Layout", longer)
    assert compiled.library() is None


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        {"size": 48},
        {"flags": -8},
        {"refcount": 61},
        {"lru": 56},
        {"hugetlb": HugetlbMark(60, 8, 1, 1)},
        {"hugetlb": HugetlbMark(0, 4, 1, 1)},
    ],
)
def test_invalid_layout(demo_prog: Program, change: dict[str, Any]) -> None:
    layout = page_layout(demo_prog)
    assert compiled.compiled_classifier(layout) is not None
    assert compiled.compiled_classifier(replace(layout, **change)) is None
