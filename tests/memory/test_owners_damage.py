# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of damaged owners are still counted, and the damage is reported."""

from collections.abc import Callable

import numpy as np
import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.slab import slab_object_info
from msatools.commands.memstat import COMMAND
from msgspec.structs import replace

from fixtures import lab
from msatools.kernel.code import kernel_symbol
from msatools.memory.breakdowns import VIEWS
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import CgroupGroup, MemstatReport, SlabGroup
from tests.support.dumps import open_dump
from tests.support.overlay import lose, lose_page, overwrite, put

from . import truth
from .conftest import BY_OWNER
from .madepages import struct_page
from .sums import check_of, pages_of, summed, view

DUMP = "owners-6.12"
GARBAGE = 0x5A5A_0000_1234_5678


@pytest.fixture(scope="module")
def run() -> lab.Run:
    return lab.build(DUMP)


@pytest.fixture
def damaged() -> Program:
    return open_dump(DUMP, "btf")


@pytest.fixture(scope="module")
def whole() -> MemstatReport:
    return collect_memstat(open_dump(DUMP, "btf"), by=BY_OWNER)


def report_of(prog: Program) -> MemstatReport:
    report = collect_memstat(prog, by=BY_OWNER)
    for name in BY_OWNER:
        groups = view(report, name)
        assert sum(group.pages for group in groups) == report.pages
        assert len({group.key for group in groups}) == len(groups)
    return report


def by_key(report: MemstatReport, name: str) -> dict[str, int]:
    return {group.key: group.pages for group in view(report, name)}


def lose_only(object_: Object) -> None:
    """Make an object unreadable, but not what else is on its page.

    A type can have room for more than is allocated, as ``struct kmem_cache`` has for
    the nodes that the machine lacks: other objects lie there.
    """
    address = object_.address_
    assert address is not None
    found = slab_object_info(object_.prog_, address)
    assert found is not None
    end = found.address + found.slab_cache.object_size.value_()
    lose(object_.prog_, address, min(sizeof(object_), end - address))


LOST = {
    "a file's inode": ("file", "mapping", "/mnt/data/mapped"),
    "a file system": ("fs", "super_block", "/mnt/data"),
    "a control group": ("cgroup", "mem_cgroup", "/service/web"),
    "a slab cache": ("slab", "kmem_cache", "dentry"),
}

LOST_TYPES = {
    "mapping": "struct address_space",
    "super_block": "struct super_block",
    "mem_cgroup": "struct mem_cgroup",
    "kmem_cache": "struct kmem_cache",
}


@pytest.mark.parametrize("case", LOST)
def test_lost_owner(damaged: Program, whole: MemstatReport, case: str) -> None:
    kind, member, name = LOST[case]
    group = next(group for group in view(whole, kind) if group.name == name)
    type_ = LOST_TYPES[member]
    # Others on its page have owners of their own.
    lose_only(Object(damaged, type_, address=getattr(group, member)))
    report = report_of(damaged)
    assert report.classes == whole.classes
    assert report.coverage["names_unreadable"] > 0
    assert COMMAND.problems(report)
    left = view(report, kind)
    if kind == "slab":
        (_,) = [group for group in left if group.name.endswith("which is unreadable")]
        assert report.coverage["names_unreadable"] == 1
    assert name not in {group.name for group in left}
    assert group.pages in {group.pages for group in left} or kind == "cgroup"


def test_lost_names(damaged: Program, whole: MemstatReport) -> None:
    """A merged slab cache keeps the name of the first one."""
    lose_page(damaged, damaged["slab_kset"].kobj.sd.value_())
    report = report_of(damaged)
    assert "lost" in {note.code for note in report.notes}
    assert by_key(report, "slab").keys() == by_key(whole, "slab").keys()


def test_lost_name_of_a_slab_cache(damaged: Program, whole: MemstatReport) -> None:
    """It is counted once, and the cache itself is listed."""
    (cache,) = (group for group in view(whole, "slab") if group.name == "dentry")
    assert isinstance(cache, SlabGroup)
    assert cache.kmem_cache is not None
    object_ = Object(damaged, "struct kmem_cache", address=cache.kmem_cache)
    overwrite(object_.name, 8)
    report = report_of(damaged)
    assert report.coverage["names_unreadable"] == 1
    assert cache.pages in {group.pages for group in view(report, "slab")}
    assert "dentry" not in {group.name for group in view(report, "slab")}


def test_broken_list_of_free_objects(damaged: Program, whole: MemstatReport) -> None:
    """The objects in use are unknown for this cache only."""
    (cache,) = (group for group in view(whole, "slab") if group.name == "dentry")
    assert isinstance(cache, SlabGroup)
    assert cache.kmem_cache is not None
    object_ = Object(damaged, "struct kmem_cache", address=cache.kmem_cache)
    overwrite(per_cpu_ptr(object_.cpu_slab, 0).freelist, GARBAGE)
    report = report_of(damaged)
    assert report.coverage["slabs_unreadable"] == 1
    for before, after in zip(view(whole, "slab"), view(report, "slab"), strict=True):
        assert isinstance(before, SlabGroup)
        lost = {"objects_in_use": None} if before.key == "dentry" else {}
        assert after == replace(before, **lost)


def test_removed_groups_without_pages(run: lab.Run, damaged: Program) -> None:
    """They are counted; the guest has two, both with pages."""
    words = run.truth("sys/fs/cgroup/cgroup.stat").decode().split()
    assert words[words.index("nr_dying_descendants") + 1] == "2"
    overwrite(damaged["cgrp_dfl_root"].cgrp.nr_dying_descendants, 7)
    (note,) = (n for n in report_of(damaged).notes if n.code == "removed-cgroups")
    assert note.text.startswith("7 removed control groups still exist; 5 of them")


def test_counts_of_a_group_that_are_lost(
    damaged: Program, whole: MemstatReport
) -> None:
    """What slabs and per-CPU memory it has is unknown, and what those above it have."""

    def charged(report: MemstatReport) -> dict[str, tuple[int | None, int | None]]:
        groups = [g for g in view(report, "cgroup") if isinstance(g, CgroupGroup)]
        return {g.name: (g.slab_bytes, g.percpu_bytes) for g in groups if g.mem_cgroup}

    (web,) = (g for g in view(whole, "cgroup") if g.name == "/service/web")
    assert isinstance(web, CgroupGroup)
    assert web.mem_cgroup is not None
    group = Object(damaged, "struct mem_cgroup", address=web.mem_cgroup)
    lose_only(group.vmstats.state)
    before, report = charged(whole), report_of(damaged)
    after = charged(report)
    assert report.coverage["memcg_vmstats_unreadable"] == 1
    lost = {"/service/web", "/service"}
    assert None not in {before[name][0] for name in lost}
    assert {name for name in before if before[name] != after[name]} == lost
    assert {after[name] for name in lost} == {(None, None)}


@pytest.mark.parametrize("byte", [0, 0xFF])
def test_impossible_indices_of_counts(damaged: Program, byte: int) -> None:
    """No count of a group is known, and the report goes on."""
    table = kernel_symbol(damaged, "mem_cgroup_stats_index")
    for place in range(1 if byte else 256):
        put(damaged, table + place, bytes([byte]))
    report = report_of(damaged)
    groups = [g for g in view(report, "cgroup") if isinstance(g, CgroupGroup)]
    assert {(g.slab_bytes, g.percpu_bytes) for g in groups} == {(None, None)}
    assert any("impossible indices" in note.text for note in report.notes)


def first_slab(run: lab.Run) -> int:
    flags = truth.page_flags(run)
    head = truth.having(flags, "SLAB") & ~truth.having(flags, "COMPOUND_TAIL")
    return int(np.flatnonzero(head)[0])


POKED: dict[str, tuple[Callable[[lab.Run], int | None], str, str]] = {
    "mapping": (lambda run: run.pfns("mapped-1")[5], "mapping", "file"),
    "charge": (lambda run: run.pfns("anon")[5], "memcg_data", "cgroup"),
    "cache": (first_slab, "compound_head", "slab"),
}


@pytest.mark.parametrize("case", POKED)
def test_overwritten_owner(
    run: lab.Run, damaged: Program, whole: MemstatReport, case: str
) -> None:
    """Only that page moves to another group."""
    find, member, kind = POKED[case]
    pfn = find(run)
    assert pfn is not None
    put(damaged, struct_page(damaged, pfn, member), GARBAGE.to_bytes(8, "little"))
    report = report_of(damaged)
    assert report.coverage["names_unreadable"] > 0
    before, after = by_key(whole, kind), by_key(report, kind)
    (new,) = after.keys() - before.keys()
    (loser,) = {key for key in before if after[key] != before[key]}
    assert before[loser] - after[loser] == after[new] > 0


def test_unreadable_stack_is_not_explained_by_cached_ones(
    damaged: Program, whole: MemstatReport
) -> None:
    """A loss does not explain the difference, so the check fails."""
    area = find_task(damaged, 1).stack_vm_area
    overwrite(area.pages, (1 << 64) - 8)
    report = collect_memstat(damaged)
    before, check = (check_of(r, "kernel.stacks") for r in (whole, report))
    assert check.walk_pages == before.walk_pages - area.nr_pages.value_()
    assert check.explained_by is None
    assert report.coverage["vmalloc_areas_unreadable"] == 1


@pytest.mark.parametrize("offset", [0, 0x1000000, 0x8000000])
def test_section_without_struct_pages(damaged: Program, offset: int) -> None:
    """With garbage as struct pages, each view still has each page once."""
    memory = damaged["page_offset_base"].value_() + offset
    word = (memory | 0xF).to_bytes(8, "little")
    put(damaged, damaged["mem_section"][0].value_(), word)
    report = collect_memstat(damaged, by=VIEWS)
    for name in VIEWS:
        sums = {**dict.fromkeys(pages_of(report), 0), **summed(view(report, name))}
        assert sums == pages_of(report)
        assert min(sums.values()) >= 0
