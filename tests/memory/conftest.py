# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of each kernel's dump, shared by all tests."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from drgn import Program

from fixtures import lab
from fixtures.demo import DEMOS
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import PageClass, PageLayout, page_layout
from msatools.memory.classify import Block
from msatools.memory.memmap import memmap_ranges
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.memory.owners import collect_owners
from msatools.memory.scan import scan
from tests.support.dumps import open_dump

from .madepages import demo_layout
from .sums import pages_of

FLAGS = ("uptodate", "dirty", "lru", "active", "swapbacked", "unevictable")
FLAGS += ("reserved", "mlocked")
BY_OWNER = ("file", "fs", "cgroup", "slab", "vmalloc")
FIELD_KERNELS = ("6.1", "6.12", "7.x")


@dataclass
class PagesByPfn:
    """Class and flags of every pfn, as the scan read them."""

    codes: npt.NDArray[np.uint8]
    """Classes before per-CPU lists and files are resolved; 255 for no page."""

    tails: npt.NDArray[np.bool_]
    heads: npt.NDArray[np.intp]
    """The pfn of each page's head, or its own."""

    flags: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """Name -> whether the page itself has the flag."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=pytest.mark.kernels) for name in DEMOS],
)
def layout(request: pytest.FixtureRequest) -> PageLayout:
    """The layout of struct page, which differs by kernel; no dump is needed."""
    return demo_layout(request.param)


@pytest.fixture(scope="session")
def prog(run: lab.Run) -> Program:
    return open_dump(run.name, "dwarf")


@pytest.fixture(scope="session")
def report(prog: Program) -> MemstatReport:
    return collect_memstat(prog, by=("node", "zone"), sections=True, verbose=True)


@pytest.fixture(scope="session")
def cut_up(prog: Program) -> MemstatReport:
    """The same memory by order and section, with its fragmentation and map."""
    return collect_memstat(prog, by=("order", "section"), frag=True, memory_map=True)


@pytest.fixture(scope="session")
def pages(report: MemstatReport) -> dict[str, int]:
    """Pages by class."""
    return pages_of(report)


@pytest.fixture(scope="session")
def by_owner(prog: Program) -> MemstatReport:
    """The memory scenario by every kind of owner except processes."""
    return collect_memstat(prog, by=BY_OWNER)


@pytest.fixture(scope="session", params=["6.1", "6.12"])
def owners_run(request: pytest.FixtureRequest) -> lab.Run:
    """The owners scenario, on each kernel."""
    return lab.build(f"owners-{request.param}")


@pytest.fixture(scope="session")
def owners_prog(owners_run: lab.Run) -> Program:
    return open_dump(owners_run.name, "dwarf")


@pytest.fixture(scope="session")
def owners_report(owners_prog: Program) -> MemstatReport:
    return collect_memstat(owners_prog, by=BY_OWNER)


@pytest.fixture(scope="module", params=FIELD_KERNELS)
def field_run(request: pytest.FixtureRequest) -> lab.Run:
    """The guest that the module names as ``SCENARIO``, on each kernel."""
    return lab.build(f"{request.module.SCENARIO}-{request.param}")


@pytest.fixture(scope="module")
def field_prog(field_run: lab.Run) -> Program:
    return open_dump(field_run.name, "btf")


@dataclass
class BlockObserver:
    """Calls a function with each block of a scan, in one process."""

    observe: Callable[[Block], None]

    def merge(self, later: "BlockObserver") -> None:
        raise NotImplementedError


@pytest.fixture(scope="session")
def by_pfn(prog: Program) -> PagesByPfn:
    reader, losses = Reader(prog), LossLog()
    layout = page_layout(prog)
    ranges = memmap_ranges(reader, layout, losses)
    end = max(part.pfn + part.pages for part in ranges)
    seen = PagesByPfn(
        np.full(end, 255, np.uint8), np.zeros(end, np.bool_), np.arange(end)
    )
    bits = {name: np.uint64(layout.bits[name]) for name in FLAGS}
    for name in FLAGS:
        seen.flags[name] = np.zeros(end, np.bool_)

    def observe(block: Block) -> None:
        pfns = slice(block.pfn, block.pfn + len(block))
        seen.codes[pfns] = block.codes
        seen.tails[block.pfn + block.tails] = True
        seen.heads[block.pfn + block.tails] = block.pfn + block.tail_heads
        for name, bit in bits.items():
            seen.flags[name][pfns] = block.flags & bit != 0

    owners = collect_owners(reader, layout, ranges, losses)
    scan(reader, layout, ranges, owners.pages(), observers=[BlockObserver(observe)])
    assert PageClass.EXCLUDED not in seen.codes
    return seen
