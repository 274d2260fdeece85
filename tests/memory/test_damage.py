# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps with a page lost or a word overwritten: a report always, and no silence."""

from collections.abc import Callable

import pytest
from drgn import FaultError, Program, sizeof
from msatools.commands.memstat import COMMAND

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.target import TargetSpec, open_target

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

    prog.add_memory_segment(address & -PAGE, PAGE, read)


def poke(prog: Program, address: int, value: int) -> None:
    """Overwrite the word at an address."""
    start = address & -PAGE
    page = bytearray(prog.read(start, PAGE))
    page[address - start : address - start + 8] = value.to_bytes(8, "little")
    data = bytes(page)

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return data[offset : offset + count]

    prog.add_memory_segment(start, PAGE, read)


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
