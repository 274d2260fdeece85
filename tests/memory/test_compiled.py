# SPDX-License-Identifier: LGPL-2.1-or-later

"""The scan in C against the one in numpy, which is right by definition."""

import ctypes
import importlib.util
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
import pytest
from drgn import Program

from fixtures.demo import DEMOS
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.memory import compiled
from msatools.memory.classes import PageClass
from msatools.memory.classify import Block
from msatools.memory.layout import HugetlbMark, PageLayout, page_layout
from msatools.memory.memmap import MemmapRange, memmap_ranges
from msatools.memory.owners import collect_owners
from msatools.memory.scan import scan
from msatools.memory.scanresult import OwnedPages, ScanResult
from msatools.target import TargetSpec, open_target

ADDRESS = 0xFFFFEA0000000000
FIRST_PFN = (1 << 16) + 256
"""No free block of more than order 8 fits to it."""

Words = npt.NDArray[np.uint64]
NOBODY = OwnedPages(np.empty(0, np.uint64), np.empty(0, np.uint8))
COLUMNS = (
    "flags",
    "mapping",
    "counts",
    "codes",
    "tails",
    "tail_heads",
    "words",
    "fakes",
    "notable",
)


@dataclass
class Digests:
    """Remembers what was in each block."""

    blocks: list[tuple[int, ...]] = field(default_factory=list)
    classes: set[int] = field(default_factory=set)

    def observe(self, block: Block) -> None:
        columns = (np.ascontiguousarray(getattr(block, name)) for name in COLUMNS)
        sums = (zlib.crc32(column.tobytes()) for column in columns)
        self.blocks.append((block.pfn, len(block), *sums))
        self.classes.update(np.unique(block.codes).tolist())

    def merge(self, later: "Digests") -> None:
        raise NotImplementedError


def comparable(result: ScanResult) -> dict[str, Any]:
    """All that a scan found, however it came in pieces."""

    def joined(parts: list[Any]) -> list[int]:
        return [int(number) for part in parts for number in part]

    found = {name: value for name, value in vars(result).items() if np.isscalar(value)}
    return found | {
        "counts": {key: row.tolist() for key, row in result.counts.items()},
        "cache": [column.tolist() for column in result.cache.sum()],
        "candidates": [joined(parts) for parts in vars(result.candidates).values()],
        "swap": (joined(result.swap_entries), joined(result.swap_keys)),
    }


Scan = Callable[[], tuple[ScanResult, Digests]]


def assert_same(monkeypatch: pytest.MonkeyPatch, do_scan: Scan) -> Digests:
    """Scan both ways, and give what was seen."""
    if compiled.library() is None:
        pytest.skip("it is not compiled: see test_it_is_built()")
    monkeypatch.setenv(compiled.SWITCH, "numpy")
    expected, by_numpy = do_scan()
    monkeypatch.setattr(
        compiled.Compiled, "classify", counting := Counting(compiled.Compiled.classify)
    )
    monkeypatch.delenv(compiled.SWITCH)
    found, by_compiled = do_scan()
    assert counting.calls == len(by_compiled.blocks) > 0
    differing = [
        (pair[0][0], [pair[0][2 + at] == pair[1][2 + at] for at in range(len(COLUMNS))])
        for pair in zip(by_numpy.blocks, by_compiled.blocks, strict=True)
        if pair[0] != pair[1]
    ]
    assert differing == []
    assert comparable(found) == comparable(expected)
    return by_compiled


class Counting:
    """A method that counts its calls."""

    def __init__(self, method: Callable[..., Block]) -> None:
        self.calls = 0
        self._method = method

    def __get__(self, instance: object, owner: type) -> Callable[..., Block]:
        def call(*args: Any) -> Block:
            self.calls += 1
            return self._method(instance, *args)

        return call


def both_scans(prog: Program, monkeypatch: pytest.MonkeyPatch) -> Digests:
    """Scan a dump both ways."""
    reader, findings = Reader(prog), Findings()
    layout = page_layout(prog)
    ranges = memmap_ranges(reader, layout, findings)
    owned = collect_owners(reader, layout, ranges, findings).pages()

    def do_scan() -> tuple[ScanResult, Digests]:
        seen = Digests()
        return scan(Reader(prog), layout, ranges, owned, observers=[seen]), seen

    return assert_same(monkeypatch, do_scan)


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no compiler"
)


@needs_compiler
def test_it_is_built() -> None:
    assert compiled.library() is not None


def test_dump(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = both_scans(prog, monkeypatch)
    assert {
        PageClass.FREE_BUDDY,
        PageClass.ANON,
        PageClass.FILE,
        PageClass.SHMEM,
        PageClass.USER_HUGETLB,
        PageClass.SLAB,
        PageClass.RESERVED,
    } <= seen.classes


@cache
def open_demo(name: str) -> Program:
    """Open it once: pytest would for each layout that is made of its own."""
    return open_target(TargetSpec(path=str(DEMOS[name].core), types="btf")).prog


@pytest.fixture(scope="module", params=list(DEMOS))
def demo_prog(request: pytest.FixtureRequest) -> Program:
    return open_demo(request.param)


@cache
def layout_of(name: str) -> PageLayout:
    return page_layout(open_demo(name))


def test_demo(demo_prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(both_scans(demo_prog, monkeypatch).blocks) >= 12


class Memory(Reader):
    """Nothing but struct pages, of which some cannot be read."""

    def __init__(self, data: bytes, missing: set[int]) -> None:
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
    """A memmap that no kernel made."""

    layout: PageLayout
    pages: int
    data: bytes
    owned: OwnedPages = NOBODY
    missing: frozenset[int] = frozenset()
    """Which 4096 bytes each."""

    def scan(self) -> tuple[ScanResult, Digests]:
        seen = Digests()
        part = MemmapRange(0, "online", True, FIRST_PFN, self.pages, ADDRESS)
        memory = Memory(self.data, set(self.missing))
        return scan(memory, self.layout, [part], self.owned, observers=[seen]), seen


def layouts(layout: PageLayout) -> Iterator[tuple[str, PageLayout]]:
    """Give a kernel's layout, and others that kernels have or could have."""
    yield "real", layout
    names = layout.types.names | {"large_kmalloc"}
    types = replace(layout.types, names=names)
    yield "mask", replace(layout, types=types, compound_mask=True, fake_heads=False)
    yield "wide", replace(layout, size=layout.size + 24)
    apart = replace(layout, refcount=layout.private, private=layout.refcount - 4)
    yield "apart", apart
    mark = HugetlbMark(layout.flags, 8, layout.bits["active"], layout.bits["active"])
    yield "flag", replace(layout, hugetlb=mark, zone_shift=50, device_zone=4)


LAYOUTS = ("real", "mask", "wide", "apart", "flag")


@pytest.fixture(
    params=[(name, made) for name in DEMOS for made in LAYOUTS], ids="-".join
)
def made_layout(request: pytest.FixtureRequest) -> PageLayout:
    name, made = request.param
    return dict(layouts(layout_of(name)))[made]


def likely_pages(
    rng: np.random.Generator, layout: PageLayout, pages: int, one_zone: bool = False
) -> bytes:
    """Make struct pages of words that mean something, in no order that does."""
    words = np.zeros((pages, layout.size // 8), "<u8")
    data = words.view(np.uint8)

    def put(offset: int, size: int, values: list[int], weights: list[int]) -> None:
        odds = np.array(weights) / sum(weights)
        pool = np.array([value & ((1 << 8 * size) - 1) for value in values], np.uint64)
        column = pool[rng.choice(len(values), pages, p=odds)].astype(f"<u{size}")
        data[:, offset : offset + size] = column.view(np.uint8).reshape(pages, size)

    near = [ADDRESS + layout.size * int(i) + 1 for i in rng.integers(0, pages, 12)]
    far = [ADDRESS - 640 + 1, ADDRESS + 3 * pages * layout.size + 1, 5]
    masks = [(-(1 << shift) | 1) & ((1 << 64) - 1) for shift in (9, 13, 15)]
    bits = layout.bits
    zone = int(rng.integers(1, 3)) << layout.zone_shift
    device = (layout.device_zone or 0) << layout.zone_shift
    flags = [bits[name] for name in ("head", "reserved", "swapbacked", "active")]
    flags += [bits.get("hwpoison", 0), layout.slab_bit, layout.swapcache_bits]
    flags += [0, bits["head"] | layout.swapcache_bits]
    flags = [*(zone | flag for flag in flags), 0, device]
    words_of_types = [
        (value << layout.types.shift)
        | (0xFFFFFFFF & ~(layout.types.mask << layout.types.shift))
        for value in np.flatnonzero(layout.types.classes).tolist()
    ]
    put(layout.mapping, 8, [0, *range(1 << 40, (1 << 40) + 8)], [12] + [1] * 8)
    put(layout.private, 8, [*range(13), 20, 21, 1 << 63], [400] + [2] * 15)
    put(layout.compound_head, 8, [0, *near, *far, *masks], [150] + [2] * 18)
    others = [0, 0] if one_zone else [3, 1]
    put(layout.flags, 8, flags, [4] * 6 + [12, 90, 6, *others])
    lru = [ADDRESS + 64, ADDRESS + 8, 0xDEAD000000000100]
    if layout.lru != layout.compound_head:
        put(layout.lru, 8, lru, [1, 1, 1])
    entire = layout.entire_mapcount
    if entire not in (layout.flags, layout.mapping, layout.compound_head):
        put(entire, 4, [-1, 0, 3], [2, 1, 1])
    if layout.hugetlb is not None and layout.hugetlb.size == 1:
        put(layout.hugetlb.offset, 1, [layout.hugetlb.value, 0], [1, 3])
    types = [3] * len(words_of_types)
    put(layout.mapcount, 4, [-1, 0, 4, -2, *words_of_types], [60, 20, 1, 1, *types])
    put(layout.refcount, 4, [0, 1, 7], [2, 3, 1])
    # Runs of the same, and of nothing at all.
    for start in rng.integers(0, pages - 64, pages // 128).tolist():
        words[start : start + 40] = words[start] if start % 3 or one_zone else 0
    # The last ones may be heads; nothing is after them to be read.
    words[-2:, layout.flags // 8] |= np.uint64(bits["head"])
    return words.tobytes()


def claims(rng: np.random.Generator, pages: int) -> OwnedPages:
    pfns = np.unique(rng.integers(FIRST_PFN - 99, FIRST_PFN + pages + 99, pages // 20))
    codes = rng.choice([PageClass.VMALLOC, PageClass.PIPES, PageClass.FILE], len(pfns))
    return OwnedPages(pfns.astype(np.uint64), codes.astype(np.uint8))


@pytest.mark.parametrize("seed", range(3))
def test_pages_of_likely_words(
    made_layout: PageLayout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    pages = (8192, 3 * 512, 999)[seed]
    data = likely_pages(rng, made_layout, pages)
    missing = frozenset(rng.integers(0, len(data) // 4096 + 1, 3).tolist())
    made = Made(made_layout, pages, data, claims(rng, pages), missing)
    seen = assert_same(monkeypatch, made.scan)
    assert len(seen.classes) > 8


@pytest.mark.parametrize("seed", range(3))
def test_likely_words_in_one_zone(
    made_layout: PageLayout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then sums are made in C, too."""
    rng = np.random.default_rng(seed)
    data = likely_pages(rng, made_layout, 6144, one_zone=True)
    made = Made(made_layout, 6144, data, claims(rng, 6144))
    seen = assert_same(monkeypatch, made.scan)
    assert len(seen.classes) > 8
    result, _ = made.scan()
    assert len(result.counts) == 1
    assert result.anon_swapcache
    assert result.anon_unmapped


def test_blocks_that_share_compound_pages(
    made_layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigantic page, of which later blocks have tails only."""
    pages = 3 << 14
    words = np.zeros((pages, made_layout.size // 8), "<u8")
    words[:, made_layout.flags // 8] = 1 << 54
    words[:, made_layout.mapcount // 8] |= np.uint64(0xFFFFFFFF)
    words[0, made_layout.flags // 8] |= np.uint64(made_layout.bits["head"])
    words[0, made_layout.mapping // 8] = 0xFFFF888000000000
    words[1:, made_layout.compound_head // 8] = ADDRESS + 1
    if made_layout.compound_mask:
        words[1:, made_layout.compound_head // 8] = (-(1 << 24)) & ((1 << 64) - 1) | 1
    seen = assert_same(monkeypatch, Made(made_layout, pages, words.tobytes()).scan)
    assert len(seen.blocks) > 2
    assert seen.classes == {PageClass.FILE}


@pytest.mark.parametrize("seed", range(2))
def test_garbage(
    made_layout: PageLayout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    pages = (512, 300)[seed]
    data = rng.bytes(pages * made_layout.size)
    assert_same(monkeypatch, Made(made_layout, pages, data, claims(rng, pages)).scan)


def test_real_pages_in_any_order(
    demo_prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, layout = Reader(demo_prog), page_layout(demo_prog)
    parts = memmap_ranges(reader, layout, Findings())
    pages = 8192
    rows = [
        np.frombuffer(reader.read(part.address, pages * layout.size), np.uint8)
        for part in parts
    ]
    rng = np.random.default_rng(6)
    shuffled = rng.permutation(np.concatenate(rows).reshape(-1, layout.size))[:pages]
    assert_same(monkeypatch, Made(layout, pages, shuffled.tobytes()).scan)


@pytest.fixture
def unloaded() -> Iterator[None]:
    """As in a process that has not looked for the library."""
    compiled.library.cache_clear()
    yield
    compiled.library.cache_clear()


def spec_of(origin: Path) -> Callable[[str], ModuleSpec]:
    return lambda name: ModuleSpec(name, None, origin=str(origin))


@pytest.mark.usefixtures("unloaded")
def test_without_a_library(demo_prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    layout = page_layout(demo_prog)
    assert compiled.compiled_classifier(layout) is None
    data = likely_pages(np.random.default_rng(1), layout, 512)
    result, _ = Made(layout, 512, data).scan()
    assert result.pages() == 512


@pytest.mark.usefixtures("unloaded")
def test_file_that_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "_classify.abi3.so"
    path.write_text("text")
    monkeypatch.setattr(importlib.util, "find_spec", spec_of(path))
    assert compiled.library() is None


@pytest.mark.usefixtures("unloaded")
def test_library_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(importlib.util.find_spec("_ctypes").origin)  # type: ignore[union-attr, arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", spec_of(path))
    assert compiled.library() is None


@pytest.mark.usefixtures("unloaded")
def test_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation keeps what it was built with."""
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
        {"hugetlb": HugetlbMark(60, 8, 1, 1)},
        {"hugetlb": HugetlbMark(0, 4, 1, 1)},
    ],
)
def test_layout_that_cannot_be(demo_prog: Program, change: dict[str, Any]) -> None:
    layout = page_layout(demo_prog)
    assert compiled.compiled_classifier(layout) is not None
    assert compiled.compiled_classifier(replace(layout, **change)) is None
