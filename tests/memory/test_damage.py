# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps with a page lost or a word overwritten: a report always, and no silence."""

from collections.abc import Callable
from itertools import product

import pytest
from drgn import FaultError, Object, Program, cast, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.fs import for_each_file
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import find_task, for_each_task
from msatools.commands.memstat import COMMAND

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.target import TargetSpec, open_target
from tests.support.overlay import lay_over

PAGE = 4096


@pytest.fixture
def damaged(run_612: lab.Run) -> Program:
    """A program of one's own to damage."""
    spec = TargetSpec(path=str(run_612.elf), vmlinux=str(run_612.vmlinux))
    return open_target(spec).prog


def lose(prog: Program, address: int) -> None:
    """Make the page of an address unreadable."""

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("lost in this test", address)

    lay_over(prog, address & -PAGE, PAGE, read)


def poke(prog: Program, address: int, value: int) -> None:
    """Overwrite the word at an address."""
    start = address & -PAGE
    page = bytearray(prog.read(start, PAGE))
    page[address - start : address - start + 8] = value.to_bytes(8, "little")
    data = bytes(page)

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return data[offset : offset + count]

    lay_over(prog, start, PAGE, read)


def struct_page(prog: Program, pfn: int, member: str) -> int:
    page = prog.type("struct page")
    base: int = prog["vmemmap_base"].value_()
    return base + pfn * sizeof(page) + page.member(member).offset


def silent(report: MemstatReport) -> bool:
    return not report.notes and not COMMAND.problems(report)


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


@pytest.mark.parametrize("what", LOST)
def test_lost_page(damaged: Program, what: str) -> None:
    lose(damaged, LOST[what](damaged))
    report = collect_memstat(damaged)
    assert sum(count.pages for count in report.classes) == report.pages > 0
    assert not silent(report)
    assert [c for c in report.checks if c.kernel_pages is not None]


POKED: dict[str, tuple[Callable[[Program], int], int]] = {
    "a tail without a head": (
        lambda prog: struct_page(prog, 0x110007, "compound_head"),
        0x1235,
    ),
    "a tail whose head is far off": (
        lambda prog: struct_page(prog, 0x110007, "compound_head"),
        0xFFFFFFFFFFFFFFF1,
    ),
    "a mapping that is none": (
        lambda prog: struct_page(prog, 0x110007, "mapping"),
        0x10,
    ),
    "a list of tables that leads nowhere": (
        lambda prog: prog["pgd_list"].address_,
        8,
    ),
    "a memmap beyond all addresses": (
        lambda prog: prog["vmemmap_base"].address_,
        (1 << 64) - 1,
    ),
    "a huge zero page that is none": (
        lambda prog: prog["huge_zero_folio"].address_,
        0x1000,
    ),
}


@pytest.mark.parametrize("what", POKED)
def test_overwritten_word(damaged: Program, what: str) -> None:
    where, value = POKED[what]
    poke(damaged, where(damaged), value)
    report = collect_memstat(damaged)
    assert sum(count.pages for count in report.classes) == report.pages == 524_288


def test_absurd_number_of_sections(damaged: Program) -> None:
    """The table cannot be trusted; the struct pages can still be found."""
    address = damaged["__highest_present_section_nr"].address_
    poke(damaged, address, 0x7FFFFFFF_FFFFFFFF)
    report = collect_memstat(damaged)
    assert report.coverage["section_table_lost"] == 1
    assert report.pages == 524_288
    assert COMMAND.problems(report)


def test_vmalloc_area_of_absurd_size(damaged: Program) -> None:
    area = damaged["init_task"].children.next
    from drgn import container_of

    task = container_of(area, damaged["init_task"].type_, "sibling")
    poke(damaged, task.stack_vm_area.nr_pages.address_of_().value_(), 0xFFFFFFFF)
    report = collect_memstat(damaged)
    assert report.coverage["vmalloc_areas_unreadable"] == 1
    assert COMMAND.problems(report)


def poke_number(prog: Program, number: Object, value: int) -> None:
    """Overwrite 32 bits, and not what is beside them."""
    address = number.address_
    assert address is not None
    others = int.from_bytes(prog.read(address + 4, 4), "little")
    poke(prog, address, value | others << 32)


@pytest.mark.parametrize("name", ["nr_vmap_nodes", "pcpu_nr_slots"])
@pytest.mark.parametrize("count", [0, 0x7FFFFFFF])
def test_absurd_number_of_lists(damaged: Program, name: str, count: int) -> None:
    poke_number(damaged, damaged[name], count)
    report = collect_memstat(damaged)
    assert sum(count.pages for count in report.classes) == report.pages == 524_288
    assert any("there cannot be" in note.text for note in report.notes)
    assert COMMAND.problems(report)


def test_absurd_number_of_open_files(damaged: Program) -> None:
    """What is behind a table of files is not read as files, one read each."""
    table = find_task(damaged, 1).files.fdt
    poke_number(damaged, table.max_fds, 1 << 20)
    report = collect_memstat(damaged)
    assert report.coverage["file_tables_unreadable"] == 1
    assert report.coverage["files_unreadable"] == 0
    assert COMMAND.problems(report)


@pytest.mark.parametrize("views", [(), ("order", "zone")])
@pytest.mark.parametrize("order", [2, 9])
def test_list_of_blocks_that_has_single_pages(
    damaged: Program, order: int, views: tuple[str, ...]
) -> None:
    """They are not taken for blocks, with all that lies behind each."""
    whole = collect_memstat(damaged)
    number = 3 * min(order, 4)
    zones = [damaged["node_data"][0].node_zones[i] for i in (1, 2)]
    for zone, cpu in product(zones, for_each_possible_cpu(damaged)):
        lists = per_cpu_ptr(zone.per_cpu_pageset, cpu).lists
        address = lists[number].address_of_().value_()
        first, last = lists[0].next.value_(), lists[0].prev.value_()
        poke(damaged, lists[0].address_of_().value_(), 0)
        poke(damaged, address, first)
        poke(damaged, address + 8, last)
    report = collect_memstat(damaged, by=views)
    before, after = ({c.name: c.pages for c in r.classes} for r in (whole, report))
    assert sum(after.values()) == report.pages == 524_288
    assert after["free.pcp"] < before["free.pcp"]
    moved = ("free.pcp", "kernel.unattributed")
    assert sum(after[name] for name in moved) == sum(before[name] for name in moved)
    assert all(after[name] == before[name] for name in before.keys() - {*moved})
    for groups in (report.by or {}).values():
        assert sum(group.pages for group in groups) == report.pages


def test_bitmap_of_page_blocks_beyond_all_addresses(damaged: Program) -> None:
    table = damaged["mem_section"][0].value_()
    usage = damaged.type("struct mem_section").member("usage").offset
    poke(damaged, table + usage, (1 << 64) - 8)
    report = collect_memstat(damaged, frag=True)
    assert report.coverage["pageblocks_unreadable"] > 0
    assert COMMAND.problems(report)


@pytest.mark.parametrize("size", [0, 3, 0xFFFFFFFF])
def test_absurd_size_of_a_pipe(damaged: Program, size: int) -> None:
    fops = damaged["pipefifo_fops"].address_
    files = (
        file
        for task in for_each_task(damaged)
        if task.files
        for _, file in for_each_file(task)
    )
    file = next(file for file in files if file.f_op.value_() == fops)
    pipe = cast("struct pipe_inode_info *", file.private_data)
    poke_number(damaged, pipe.ring_size, size)
    report = collect_memstat(damaged)
    assert report.coverage["pipes_unreadable"] == 1
    assert COMMAND.problems(report)


def test_lost_block_devices_are_no_sum(damaged: Program) -> None:
    inodes = damaged["blockdev_superblock"].s_inodes.address_of_().value_()
    poke(damaged, inodes, 8)
    report = collect_memstat(damaged)
    (check,) = (c for c in report.checks if c.name == "cache.blockdev")
    assert check.walk_pages > 0
    assert check.kernel_pages is None
    assert COMMAND.problems(report)
