# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory by process agrees with each process's smaps_rollup."""

import numpy as np
import pytest
from drgn import Program
from drgn.helpers.linux.pid import find_task

from fixtures import lab
from msatools.memory.by_process import (
    _whole_pages,
    mapcounts,
)
from msatools.memory.classes import PageLayout
from msatools.memory.classify import Block
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport, ProcessGroup
from tests.support.dumps import open_dump
from tests.support.overlay import lose, lose_page, put

from .madepages import Pages
from .sums import check, view
from .truth import kib, recorded_processes

PAGE = 4096
ADDRESS = 0x000F_FFFF_FFFF_F000
BOTH = ["6.1", "6.12"]


@pytest.fixture(scope="module", params=["memory", "owners"])
def scenario(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=BOTH)
def its_run(request: pytest.FixtureRequest, scenario: str) -> lab.Run:
    return lab.build(f"{scenario}-{request.param}")


@pytest.fixture(scope="module")
def its_report(its_run: lab.Run) -> MemstatReport:
    prog = open_dump(its_run.name, "btf")
    return collect_memstat(prog, by=("process",), workers=1)


def processes(report: MemstatReport) -> dict[int, ProcessGroup]:
    found = view(report, "process")
    groups = [group for group in found if isinstance(group, ProcessGroup)]
    assert len(groups) == len(found)
    return {group.pid: group for group in groups if group.pid is not None}


TABLES = {"kernel.page_tables", "kernel.page_tables_own"}


def test_processes_sum_to_the_table(its_report: MemstatReport) -> None:
    (rest,) = (group for group in check(its_report, "process") if group.key == "-")
    # Kernel memory is mapped by no process; its page tables are counted as well.
    assert "kernel.slab" in rest.classes
    for group in processes(its_report).values():
        kernel = {name for name in group.classes if name.startswith("kernel.")}
        assert kernel <= TABLES
        assert group.pss_bytes is not None
        left_out = ("user.hugetlb", *TABLES)
        others = group.pages - sum(group.classes.get(name, 0) for name in left_out)
        # Each class is rounded to whole pages, up or down.
        assert abs(others * PAGE - group.pss_bytes) < len(group.classes) * PAGE


def test_nothing_is_lost(its_report: MemstatReport) -> None:
    tables = ("user_tables_unreadable", "user_table_entries_broken")
    assert not any(its_report.coverage[key] for key in (*tables, "tasks_unreadable"))
    assert its_report.notes == ()


def test_pages_mapped_twice_are_divided(owners_run: lab.Run) -> None:
    """One process maps a whole file, another one a part of it."""
    prog = open_dump(owners_run.name, "btf")
    found = processes(collect_memstat(prog, by=("process",)))
    pids = {p["name"]: p["pid"] for p in owners_run.workload["processes"]}
    whole, part = (
        {pfn for pfn in owners_run.pfns(region) if pfn is not None}
        for region in ("mapped-1", "mapped-2")
    )
    assert part < whole
    assert len(part) % 2 == 0
    half = len(part) // 2
    assert found[pids["mapper-2"]].classes["cache.file"] == half
    alone = len(whole - part)
    assert found[pids["mapper-1"]].classes["cache.file"] == alone + half


# --- Damage


Table = tuple[int, int]
"""Physical address of a table, and of its entry for the next level's table."""

LEVELS = 5
"""Page table levels of the lab's guests."""


def tables(prog: Program, pid: int) -> list[Table]:
    """Return a process's first table of each level, from the top."""
    task = find_task(prog, pid)
    found = []
    address = task.mm.pgd.value_() - prog["page_offset_base"].value_()
    for _ in range(LEVELS):
        words = np.frombuffer(prog.read(address, PAGE, True), "<u8")
        # Skip huge pages.
        present = np.flatnonzero((words & 1 != 0) & (words & 0x80 == 0))
        entry = address + 8 * int(present[0])
        found.append((address, entry))
        address = int(words[present[0]]) & ADDRESS
    return found


@pytest.fixture
def damaged(run_612: lab.Run) -> Program:
    return open_dump(run_612.name, "btf")


@pytest.fixture(scope="module")
def victim(run_612: lab.Run) -> int:
    """A process that shares no page tables with others."""
    (process,) = (p for p in run_612.workload["processes"] if p["name"] == "anon")
    return int(process["pid"])


def by_process(prog: Program) -> tuple[dict[int, ProcessGroup], MemstatReport]:
    report = collect_memstat(prog, by=("process",), workers=1)
    assert sum(group.pages for group in view(report, "process")) == report.pages
    return processes(report), report


@pytest.mark.parametrize("level", range(LEVELS))
def test_lost_table(
    damaged: Program, run_612: lab.Run, victim: int, level: int
) -> None:
    table, _ = tables(damaged, victim)[level]
    lose(damaged, table, PAGE, physical=True)
    found, report = by_process(damaged)
    assert report.coverage["user_tables_unreadable"] == 1
    assert any(note.code == "user-tables-unreadable" for note in report.notes)
    for pid in recorded_processes(run_612):
        kib_recorded = kib(run_612, pid, "smaps_rollup")["Rss"]
        expected = None if pid == victim else kib_recorded // 4
        assert found[pid].rss_pages == expected
    # The first entry of the second level covers all addresses below 256 TiB.
    assert bool(found[victim].classes.keys() - TABLES) == (level > 1)


@pytest.fixture(scope="module")
def whole(run_612: lab.Run) -> dict[int, ProcessGroup]:
    return by_process(open_dump(run_612.name, "btf"))[0]


@pytest.mark.parametrize("level", range(LEVELS))
def test_entry_without_memory_or_for_its_own_table(
    damaged: Program, whole: dict[int, ProcessGroup], victim: int, level: int
) -> None:
    """The walk ends, and the figures of other processes are unchanged."""
    table, entry = tables(damaged, victim)[level]
    for target, broken in ((ADDRESS, 1), (table, None)):
        put(damaged, entry, (target | 1).to_bytes(8, "little"), physical=True)
        after, report = by_process(damaged)
        assert broken in (report.coverage["user_table_entries_broken"], None)
        for pid, group in whole.items():
            assert pid == victim or after[pid].rss_pages == group.rss_pages


def test_lost_address_space(damaged: Program, victim: int) -> None:
    """A process whose mm_struct cannot be read is not listed."""
    start = find_task(damaged, victim).mm.value_()
    lose_page(damaged, start)
    lose_page(damaged, start + PAGE)
    found, report = by_process(damaged)
    assert victim not in found
    assert any("mm_struct" in note.text for note in report.notes)


# --- Pure functions


HUGE_PAGES = 512
ANON_MAPPING = 0xFFFF_8880_0000_1001
FILE_MAPPING = 0xFFFF_8880_0000_1000


def huge_page(
    layout: PageLayout, mapping: int, own: list[int], entire: int, both: bool
) -> Block:
    """Make a huge page.

    :param own: mapcount of each page
    :param entire: mapcount of the huge page as a whole
    :param both: whether it has PG_double_map
    """
    pages = Pages(layout, HUGE_PAGES)
    pages.compound(0, HUGE_PAGES)
    pages.put(0, "mapping", mapping)
    pages.put(1, "entire_mapcount", entire - 1)
    for page, count in enumerate(own):
        pages.put(page, "mapcount", count - 1)
    if both:
        pages.flag(1, "double_map")
    return pages.block(HUGE_PAGES)


@pytest.mark.parametrize("mapping", [ANON_MAPPING, FILE_MAPPING])
def test_mapcounts_of_a_huge_page(layout: PageLayout, mapping: int) -> None:
    """It is mapped twice as a whole, and one of its pages once more."""
    doubled = "double_map" in layout.bits
    of_file = mapping == FILE_MAPPING
    # Up to v6.1 each page also counts the mappings of a file's huge page, and one more
    # if an anonymous huge page is mapped both as a whole and by page.
    more = (2 if of_file else 1) if doubled else 0
    own = [more] * HUGE_PAGES
    own[7] += 1
    block = huge_page(layout, mapping, own, 2, doubled and not of_file)
    counts = mapcounts(block).tolist()
    assert counts.pop(7) == 3
    assert set(counts) == {2}


def test_rounding_keeps_the_sum() -> None:
    codes = np.array([5, 5, 5, 8, 8])
    shares = np.array([667, 667, 666, 2500, 100])
    pages = _whole_pages(codes, shares, 1000)
    # The shares of the first class sum to 2 pages, those of the second to 2.6.
    assert pages[:3].sum() == 2
    assert pages.tolist()[3:] == [3, 0]
    assert (np.abs(pages * 1000 - shares) < 1000).all()
