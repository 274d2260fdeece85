# SPDX-License-Identifier: LGPL-2.1-or-later

"""A dump with a missing page or a wrong word gives a report that says so."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from drgn import Object, Program, cast, container_of, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.fs import for_each_file
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import find_task, for_each_task
from msatools.commands.memstat import COMMAND

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory import memmap
from msatools.memory.classes import page_layout
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.render.blocks import Table
from msatools.render.memstat.report import memstat_blocks as blocks
from tests.support.dumps import open_dump
from tests.support.overlay import lose, lose_page, overwrite, put

from .madepages import struct_page
from .sums import check_of, pages_of


@pytest.fixture
def damaged() -> Program:
    return open_dump("memory-6.12", "btf")


def damaged_report(damaged: Program, **options: Any) -> MemstatReport:
    """Return the report after checking that it has all pages and fails ``--strict``."""
    report = collect_memstat(damaged, **options)
    assert_whole(report)
    assert COMMAND.problems(report)
    return report


def assert_whole(report: MemstatReport) -> None:
    assert sum(pages_of(report).values()) == report.pages == 524_288


LOST: dict[str, Callable[[Program], int]] = {
    "a counter": lambda prog: prog["nr_vmalloc_pages"].address_,
    "node counters": lambda prog: prog["vm_node_stat"].address_,
    "zone counters": lambda prog: prog["vm_zone_stat"].address_,
    "the nodes": lambda prog: prog["node_data"].address_,
    "a per-CPU list": lambda prog: (
        prog["node_data"][0].node_zones[2].per_cpu_pageset.value_()
        + prog["__per_cpu_offset"][1].value_()
    ),
    "percpu lists": lambda prog: prog["pcpu_chunk_lists"].value_(),
    "the first task": lambda prog: prog["init_task"].tasks.address_of_().value_(),
    "a struct page": lambda prog: struct_page(prog, 0x110000, "flags"),
    "part of the section table": lambda prog: prog["mem_section"][0].value_(),
    "the list of top-level tables": lambda prog: prog["pgd_list"].next.value_(),
    "a vmalloc area": lambda prog: prog["vmap_nodes"][0].busy.head.next.value_(),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_page(damaged: Program, case: str) -> None:
    lose_page(damaged, LOST[case](damaged))
    report = collect_memstat(damaged)
    assert sum(pages_of(report).values()) == report.pages > 0
    assert report.notes or COMMAND.problems(report)
    assert [c for c in report.checks if c.kernel_pages is not None]


POKED = {
    # A member of a struct page, or a variable, and its new value.
    "a tail without a head": ("compound_head", 0x1235),
    "a tail whose head is far off": ("compound_head", 0xFFFFFFFFFFFFFFF1),
    "an invalid mapping": ("mapping", 0x10),
    "a list of tables that leads nowhere": ("pgd_list", 8),
    "a memmap past the last address": ("vmemmap_base", (1 << 64) - 1),
    "an invalid huge zero page": ("huge_zero_folio", 0x1000),
}


@pytest.mark.parametrize("case", POKED)
def test_overwritten_word(damaged: Program, case: str) -> None:
    name, value = POKED[case]
    if name in ("compound_head", "mapping"):
        word = value.to_bytes(8, "little")
        put(damaged, struct_page(damaged, 0x110007, name), word)
    else:
        overwrite(damaged[name], value)
    assert_whole(collect_memstat(damaged))


def init_process(prog: Program) -> Object:
    init = prog["init_task"]
    return container_of(init.children.next, init.type_, "sibling")


def a_pipe(prog: Program) -> Object:
    fops = prog["pipefifo_fops"].address_
    tasks = (task for task in for_each_task(prog) if task.files)
    files = (file for task in tasks for _, file in for_each_file(task))
    file = next(file for file in files if file.f_op.value_() == fops)
    return cast("struct pipe_inode_info *", file.private_data)


def test_without_any_struct_page_the_kernel_has_its_counters(damaged: Program) -> None:
    prog = damaged
    whole = collect_memstat(prog)
    for part in memmap.memmap_ranges(Reader(prog), page_layout(prog), LossLog()):
        lose(damaged, part.address, part.pages * sizeof(prog.type("struct page")))
    lose_page(damaged, prog["mem_section"].value_())
    found = collect_memstat(prog)
    assert found.pages == 0
    assert "no-struct-pages" in {note.code for note in found.notes}
    assert COMMAND.problems(found)
    expected = {check.name: check.kernel_pages for check in whole.checks}
    assert {check.name: check.kernel_pages for check in found.checks} == expected
    assert all(check.explained_by for check in found.checks if check.difference)
    (shown,) = [block for block in blocks(found) if isinstance(block, Table)]
    rows = {row[1]: row[2] for row in shown.rows}
    assert rows["totalram_pages"] == f"{found.managed_pages:,}"


ABSURD: dict[str, tuple[Callable[[Program], Object], int, str]] = {
    # The table cannot be trusted; the struct pages can still be found.
    "number of sections": (
        lambda prog: prog["__highest_present_section_nr"],
        *(0x7FFFFFFF_FFFFFFFF, "section_table_lost"),
    ),
    "size of a vmalloc area": (
        lambda prog: init_process(prog).stack_vm_area.nr_pages,
        *(0xFFFFFFFF, "vmalloc_areas_unreadable"),
    ),
    # Memory past the end of a table is not read as files.
    "number of open files": (
        lambda prog: find_task(prog, 1).files.fdt.max_fds,
        *(1 << 20, "file_tables_unreadable"),
    ),
    **{
        f"size of a pipe: {size}": (
            lambda prog: a_pipe(prog).ring_size,
            *(size, "pipes_unreadable"),
        )
        for size in (0, 3, 0xFFFFFFFF)
    },
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd(damaged: Program, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    find, value, counted = ABSURD[case]
    # The guest's 5 GiB of addresses, and as many without memory.
    monkeypatch.setattr(memmap, "_MAX_PROBED_SECTIONS", 80)
    overwrite(find(damaged), value)
    coverage = damaged_report(damaged).coverage
    assert (coverage[counted], coverage["files_unreadable"]) == (1, 0)


@pytest.mark.parametrize("name", ["nr_vmap_nodes", "pcpu_nr_slots"])
@pytest.mark.parametrize("count", [0, 0x7FFFFFFF])
def test_absurd_number_of_lists(damaged: Program, name: str, count: int) -> None:
    overwrite(damaged[name], count)
    report = damaged_report(damaged)
    assert any("there cannot be" in note.text for note in report.notes)


@pytest.mark.parametrize("views", [(), ("order", "zone")])
@pytest.mark.parametrize("order", [2, 9])
def test_list_of_blocks_with_single_pages(
    damaged: Program, order: int, views: tuple[str, ...]
) -> None:
    """Single pages are not taken for blocks of the list's order."""
    prog = damaged
    whole = collect_memstat(prog)
    zones = [prog["node_data"][0].node_zones[i] for i in (1, 2)]
    for zone, cpu in product(zones, for_each_possible_cpu(prog)):
        lists = per_cpu_ptr(zone.per_cpu_pageset, cpu).lists
        singles, blocks = lists[0], lists[3 * min(order, 4)]
        first, last = singles.next.value_(), singles.prev.value_()
        overwrite(singles.next, 0)
        overwrite(blocks.next, first)
        overwrite(blocks.prev, last)
    report = damaged_report(damaged, by=views)
    before, after = map(pages_of, (whole, report))
    assert after["free.pcp"] < before["free.pcp"]
    moved = ("free.pcp", "kernel.unattributed")
    assert sum(after[name] for name in moved) == sum(before[name] for name in moved)
    assert all(after[name] == before[name] for name in before.keys() - {*moved})
    for groups in (report.by or {}).values():
        assert sum(group.pages for group in groups) == report.pages


def test_pageblock_bitmap_past_the_last_address(damaged: Program) -> None:
    table = damaged["mem_section"][0].value_()
    usage = damaged.type("struct mem_section").member("usage").offset
    put(damaged, table + usage, b"\xf8" + b"\xff" * 7)
    assert damaged_report(damaged, frag=True).coverage["pageblocks_unreadable"] > 0


def test_incomplete_sum_of_block_devices_is_null(damaged: Program) -> None:
    overwrite(damaged["blockdev_superblock"].s_inodes.next, 8)
    check = check_of(damaged_report(damaged), "cache.blockdev")
    assert check.walk_pages > 0
    assert check.kernel_pages is None
