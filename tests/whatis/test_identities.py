# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses that drgn identifies with debug info: without, msa-whatis says the same."""

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import CLASSES, PageClass, page_layout
from msatools.memory.classify import Block
from msatools.memory.memmap import memmap_ranges
from msatools.memory.memstat import collect_memstat
from tests.support.dumps import open_dump
from tests.support.prompt import reported
from tests.whatis import identities
from tests.whatis.identities import PAGE

SEED = 7

pytestmark = pytest.mark.kernels

Ask = Callable[[Iterable[str]], list[Any]]


DUMPS = ["memory-6.1", "memory-6.12", "memory-6.12arm64", "memory-7.x"]


@pytest.fixture(scope="module", params=DUMPS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def prog(name: str) -> Program:
    """The dump with debug info, for drgn."""
    return open_dump(name, "dwarf")


@pytest.fixture(scope="module")
def plain(name: str) -> Program:
    """The dump without debug info, for msa-whatis."""
    return open_dump(name, "btf")


@pytest.fixture(scope="module")
def ask(plain: Program) -> Ask:
    return lambda words: reported(plain, "whatis", *words)["answers"]


@pytest.fixture
def chance() -> Random:
    return Random(SEED)


def fits(known: Any, answer: Any) -> bool:
    """Return whether an answer has what is known: see :data:`identities.Known`."""
    if callable(known):
        return bool(known(answer))
    if isinstance(known, dict):
        return all(key in answer and fits(known[key], answer[key]) for key in known)
    if isinstance(known, (set, range)):
        return answer in known
    return bool(answer == known)


KINDS = (
    *(identities.slab_objects, identities.tasks, identities.stacks, identities.frames),
    *(identities.areas, identities.percpu_variables, identities.percpu_allocations),
    *(identities.file_pages, identities.mapped_pages),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_identities(
    prog: Program,
    ask: Ask,
    chance: Random,
    kind: Callable[[Program, Random], Iterator[identities.Known]],
) -> None:
    found = [*kind(prog, chance)]
    assert len(found) > 50
    answers = ask(word for word, _ in found)
    for (_, known), answer in zip(found, answers, strict=True):
        assert fits(known, answer), (known, answer)


def test_freed_parts_of_the_image(prog: Program, ask: Ask) -> None:
    """Boot code has no symbol that is worth a first line: it is something else now."""
    start, end = (prog.symbol(name).address for name in ("__init_begin", "__init_end"))
    answers = ask(f"{address + 8:x}" for address in range(start, end, 16 * PAGE))
    named = [answer for answer in answers if "symbol" in answer]
    assert named
    for answer in named:
        assert answer["symbol"]["freed"], answer
        assert answer["kind"] != "symbol" or "page" not in answer, answer
    kept = ("schedule", "jiffies", "init_uts_ns")
    for answer in ask(f"{name}+1" for name in kept):
        assert answer["kind"] == "symbol"
        assert not answer["symbol"]["freed"]


class Classes:
    """Keeps the class of each page that a scan found."""

    def __init__(self, pages: int) -> None:
        self.codes = np.full(pages, 255, np.uint8)

    def observe(self, block: Block) -> None:
        self.codes[block.pfn : block.pfn + len(block)] = block.codes


def test_classes_are_those_of_memstat(
    plain: Program, ask: Ask, chance: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each class that the dump has, some pages."""
    ranges = memmap_ranges(Reader(plain), page_layout(plain), LossLog())
    kept = Classes(max(part.pfn + part.pages for part in ranges))

    class View:
        observer = kept

        def groups(self) -> tuple[object, ...]:
            return ()

    # With a view, the final classes are known while the scan is under way.
    monkeypatch.setattr("msatools.memory.breakdowns.make_view", lambda *_: View())
    collect_memstat(plain, by=("order",), workers=1)
    wanted = []
    for code in CLASSES:
        pfns = np.flatnonzero(kept.codes == code).tolist()
        wanted += chance.sample(pfns, min(20, len(pfns)))
    assert len({kept.codes[pfn] for pfn in wanted}) > 12
    answers = ask(f"pfn:{pfn}" for pfn in wanted)
    for pfn, answer in zip(wanted, answers, strict=True):
        code = int(kept.codes[pfn])
        assert answer["page"]["class"] == CLASSES[code], answer
        # These kernels do not mark it.
        is_guess = code == PageClass.LARGE_KMALLOC
        assert answer["page"].get("is_guess", False) == is_guess, answer
        assert ("does not distinguish them" in answer["text"]) == is_guess
    size = page_layout(plain).size
    part = ranges[0]
    some = [pfn for pfn in wanted if part.pfn <= pfn < part.pfn + part.pages]
    answers = ask(
        f"{part.address + (pfn - part.pfn) * size + chance.randrange(size):#x}"
        for pfn in some
    )
    for pfn, answer in zip(some, answers, strict=True):
        assert answer["kind"] == "page"
        assert answer["page_struct"]["pfn"] == pfn
        assert answer["page"]["class"] == CLASSES[int(kept.codes[pfn])]
