# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses that drgn identifies with debug info: without, msa-whatis says the same."""

import io
import json
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from random import Random
from typing import Any

import numpy as np
import pytest
from drgn import Program
from msatools.commands.whatis import COMMAND

from msatools.cli.drgn_prompt import run_in_drgn
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import CLASSES, PageClass, page_layout
from msatools.memory.classify import Block
from msatools.memory.memmap import memmap_ranges
from msatools.memory.memstat import collect_memstat
from msatools.whatis.processes import MAX_MAPPERS
from tests.support.dumps import open_dump
from tests.whatis import identities
from tests.whatis.identities import PAGE

SEED = 7
COUNT = 100

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
    def asked(words: Iterable[str]) -> list[Any]:
        out = io.StringIO()
        with redirect_stdout(out):
            run_in_drgn(COMMAND, plain, ["--json", *words])
        found: list[Any] = json.loads(out.getvalue())["answers"]
        return found

    return asked


@pytest.fixture
def chance() -> Random:
    return Random(SEED)


def test_slab_objects(prog: Program, ask: Ask, chance: Random) -> None:
    objects = identities.slab_objects(prog, chance, COUNT)
    assert {each.allocated for each in objects} == {True, False}
    assert len(objects) > COUNT // 2
    # The smallest objects have 8 bytes.
    answers = ask(f"{each.address + chance.randrange(8):#x}" for each in objects)
    for known, answer in zip(objects, answers, strict=True):
        slab = answer["slab"]
        found = int(slab["object"], 16), slab["cache"], slab["allocated"]
        assert found == known, answer


def test_tasks(prog: Program, ask: Ask, chance: Random) -> None:
    tasks = identities.tasks(prog)
    assert len(tasks) > 100
    answers = ask(f"{task.address + chance.randrange(2000):#x}" for task in tasks)
    for task, answer in zip(tasks, answers, strict=True):
        assert answer["kind"] == "task"
        assert answer["type"] == "struct task_struct"
        assert answer["task"] == {
            "pid": task.pid,
            "comm": task.comm,
            "address": f"{task.address:#x}",
        }


def test_stacks(prog: Program, ask: Ask, chance: Random) -> None:
    tasks = [task for task in identities.tasks(prog) if task.stack]
    size = prog["THREAD_SIZE"].value_()
    answers = ask(f"{task.stack + chance.randrange(size):x}" for task in tasks)
    for task, answer in zip(tasks, answers, strict=True):
        assert answer["kind"] == "stack"
        assert (answer["stack"]["pid"], answer["stack"]["bytes"]) == (task.pid, size)


def test_frames(prog: Program, ask: Ask, chance: Random, name: str) -> None:
    frames = list(identities.frames(prog, identities.tasks(prog)))
    frames = chance.sample(frames, 2 * COUNT)
    answers = ask(f"{frame.address:#x}" for frame in frames)
    for frame, answer in zip(frames, answers, strict=True):
        stack = answer["stack"]
        assert (stack["pid"], stack["where"]) == (frame.pid, "frame")
        # Without debug info, it is one of two on arm64.
        assert frame.function in (stack["function"], stack["next_function"]), answer
        assert name.endswith("arm64") or stack["next_function"] is None


def test_guard_pages_of_stacks(prog: Program, ask: Ask, chance: Random) -> None:
    tasks = [task for task in identities.tasks(prog) if task.stack]
    answers = ask(f"{task.stack - 1 - chance.randrange(PAGE):x}" for task in tasks)
    for task, answer in zip(tasks, answers, strict=True):
        assert answer["kind"] == "stack"
        stack = answer["stack"]
        assert (stack["pid"], stack["where"]) == (task.pid, "guard"), answer


def test_pages_of_stacks(prog: Program, ask: Ask, chance: Random) -> None:
    """A physical address leads to where vmalloc maps the page."""
    tasks = chance.sample(identities.tasks(prog), 50)
    tasks = [task for task in tasks if task.stack]
    places = [task.stack + chance.randrange(4 * PAGE) for task in tasks]
    pfns = [identities.pfn_at(prog, place) for place in places]
    words = (
        f"phys:{pfn * PAGE + place % PAGE:x}"
        for pfn, place in zip(pfns, places, strict=True)
    )
    for task, place, answer in zip(tasks, places, ask(words), strict=True):
        assert answer["kind"] == "stack", answer
        assert answer["stack"]["pid"] == task.pid
        assert answer["stack"]["offset"] == place - task.stack


def test_guard_pages_of_areas(prog: Program, ask: Ask) -> None:
    callers = ("load_module", "execmem_alloc", "bpf_prog_alloc_no_stats")
    areas = [area for area in identities.areas(prog) if area.caller in callers]
    assert areas
    for area, answer in zip(areas, ask(f"{a.end - 1:x}" for a in areas), strict=True):
        assert answer["vmalloc"]["guard"] is True
        assert int(answer["vmalloc"]["start"], 16) == area.start


def test_linked_per_cpu_variables(prog: Program, ask: Ask) -> None:
    """What is in the kernel's image was copied for each CPU, and is none's."""
    address = prog.symbol("runqueues").address
    (answer,) = ask([f"{address + 8:#x}"])
    assert answer["kind"] == "percpu"
    place = answer["percpu"]
    assert (place["variable"], place["cpu"], place["offset"]) == ("runqueues", None, 8)


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


def test_areas(prog: Program, ask: Ask, chance: Random) -> None:
    image = prog.symbol("_text").address
    # On arm64 the parts of the kernel's image are areas, too.
    areas = [area for area in identities.areas(prog) if area.caller != "paging_init"]
    assert len(areas) > 100
    assert not any(area.start <= image < area.end for area in areas)
    areas = chance.sample(areas, min(COUNT, len(areas)))
    answers = ask(f"{chance.randrange(area.start, area.end):x}" for area in areas)
    for area, answer in zip(areas, answers, strict=True):
        found = answer["vmalloc"]
        assert int(found["start"], 16) == area.start
        assert found["bytes"] == area.end - area.start
        assert found["caller"] == area.caller


def test_per_cpu_variables(prog: Program, ask: Ask, chance: Random) -> None:
    variables = identities.percpu_variables(prog, chance, COUNT)
    answers = ask(f"{variable.address:#x}" for variable in variables)
    for variable, answer in zip(variables, answers, strict=True):
        place = answer["percpu"]
        assert place["cpu"] == variable.cpu
        # Several may share an address.
        names = {variable.name, *variable.others}
        assert place["variable"] in names, answer
        assert place["offset"] == 0


def test_per_cpu_allocations(prog: Program, ask: Ask, chance: Random) -> None:
    known = identities.percpu_allocations(prog, chance, COUNT)
    answers = ask(f"{each.address:#x}" for each in known)
    for each, answer in zip(known, answers, strict=True):
        place = answer["percpu"]
        assert place["cpu"] == each.cpu
        assert int(place["pointer"], 16) == each.pointer
        assert (place["offset"], place["allocated"]) == (0, True)
        assert place["bytes"] >= each.least


def test_pages_of_files(prog: Program, ask: Ask, chance: Random) -> None:
    pages = identities.file_pages(prog, chance, COUNT)
    answers = ask(f"pfn:{page.pfn}" for page in pages)
    for page, answer in zip(pages, answers, strict=True):
        file = answer["page"]["file"]
        assert (file["inode"], file["offset"]) == (page.inode, page.offset)
        # drgn's path is that within the file system.
        assert page.path is None or file["name"].endswith(page.path)


def test_memory_of_processes(prog: Program, ask: Ask, chance: Random) -> None:
    pages = identities.mapped_pages(prog, chance, COUNT)
    answers = ask(f"{page.pid}:{page.address:x}" for page in pages)
    for page, answer in zip(pages, answers, strict=True):
        assert answer["user"]["state"] == "mapped"
        # drgn does not name these mappings of arm64.
        assert answer["user"]["mapping"] in (page.mapping, "[vdso]", "[vvar]")
        assert answer["page"]["pfn"] == page.pfn
        if page.anonymous:
            mappers = answer["page"]["mappers"]
            places = {int(each["address"], 16) for each in mappers}
            assert page.address & -PAGE in places or len(mappers) == MAX_MAPPERS


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
