# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory whose owner has no page of it is found by the kernel's own lists."""

import re
from itertools import islice

import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.slab import (
    find_slab_cache,
    slab_cache_for_each_allocated_object,
)

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import (
    CgroupGroup,
    FileSystemGroup,
    MemstatReport,
    ProcessGroup,
    SlabGroup,
)
from tests.support.prompt import reported

from .sums import pages_of, view

SCENARIO = "fieldmemory"
PAGE = 4096
DELETED = " (deleted)"
BY = ("cgroup", "fs", "process", "slab")
LEAKED = 350_000


@pytest.fixture(scope="module")
def report(field_prog: Program) -> MemstatReport:
    return collect_memstat(field_prog, by=BY)


@pytest.fixture(scope="module")
def cgroups(report: MemstatReport) -> dict[str, CgroupGroup]:
    groups = view(report, "cgroup")
    return {g.name: g for g in groups if isinstance(g, CgroupGroup) and g.mem_cgroup}


def number(field_run: lab.Run, file: str, pattern: str) -> int:
    found = re.search(pattern, field_run.truth(file).decode(), re.MULTILINE)
    assert found, (file, pattern)
    return int(found[1])


def test_removed_groups_are_those_of_the_kernel(
    field_run: lab.Run, report: MemstatReport, cgroups: dict[str, CgroupGroup]
) -> None:
    dying = [group for group in cgroups.values() if group.dying]
    pattern = r"^nr_dying_descendants (\d+)"
    assert len(dying) == number(field_run, "sys/fs/cgroup/cgroup.stat", pattern)
    removed = len(field_run.workload["removed"])
    # From v7.0 on pages move to the parent, and those that have one alone are gone.
    assert len(dying) in (removed, removed + field_run.workload["many"])
    (note,) = [note.text for note in report.notes if note.code == "removed-cgroups"]
    assert note.startswith(f"{len(dying):,} removed control groups still exist")
    assert "on swap" in note


def test_removed_groups_have_what_they_have_on_swap(
    field_run: lab.Run, cgroups: dict[str, CgroupGroup]
) -> None:
    for removed in field_run.workload["removed"]:
        group = cgroups[f"/{removed['path']}{DELETED}"]
        assert group.dying
        assert group.key == str(removed["inode"])
        assert group.pages == 0
        assert group.swap_pages == removed["swap"] // PAGE > 0


def test_groups_on_swap(field_run: lab.Run, cgroups: dict[str, CgroupGroup]) -> None:
    for path in field_run.workload["cgroups"]:
        text = field_run.truth(f"sys/fs/cgroup/{path}/memory.swap.current")
        below = [g for name, g in cgroups.items() if name.startswith(f"/{path}")]
        assert sum(g.swap_pages or 0 for g in below) * PAGE == int(text), path
        current = int(field_run.truth(f"sys/fs/cgroup/{path}/memory.current"))
        assert sum(g.charged_pages or 0 for g in below) * PAGE == current, path
    assert cgroups["/"].swap_pages is None


def test_slab_objects_and_percpu_memory_of_groups(
    field_run: lab.Run, report: MemstatReport, cgroups: dict[str, CgroupGroup]
) -> None:
    """Objects of a removed group are its parent's: they do not keep the group."""
    for path in field_run.workload["cgroups"]:
        stat = f"sys/fs/cgroup/{path}/memory.stat"
        below = [g for name, g in cgroups.items() if name.startswith(f"/{path}")]
        for name in ("slab", "percpu"):
            own = [getattr(group, f"{name}_bytes") for group in below]
            expected = number(field_run, stat, rf"^{name} (\d+)")
            assert sum(filter(None, own)) == expected, (path, name)
    assert cgroups["/leaving"].percpu_bytes or cgroups["/many"].slab_bytes
    for group in cgroups.values():
        is_known = not group.dying and group.name != "/"
        assert (group.slab_bytes is not None) == is_known, group.name
        assert (group.percpu_bytes is not None) == is_known, group.name
    (note,) = [note.text for note in report.notes if note.code == "removed-cgroups"]
    assert "charged to their parents" in note


def test_swap_by_device_and_kind(field_run: lab.Run, report: MemstatReport) -> None:
    """As in /proc/swaps and meminfo; files by what their file systems say."""
    swap = report.swap
    assert swap is not None
    (device,) = swap.devices
    name, _, size, used, _ = (
        field_run.truth("proc/swaps").decode().splitlines()[1].split()
    )
    assert device.name == name
    assert (device.pages * 4, device.used * 4) == (int(size), int(used))
    for pages, line in (
        *((swap.total_pages, "SwapTotal"), (report.swap_pages, "SwapTotal")),
        *((swap.free_pages, "SwapFree"), (report.swap_free_pages, "SwapFree")),
        (swap.cached_pages, "SwapCached"),
    ):
        assert pages == number(field_run, "proc/meminfo", rf"^{line}: +(\d+) kB") // 4
    files = sum(getattr(g, "swap_pages", None) or 0 for g in view(report, "fs"))
    assert swap.shmem_pages == files
    assert swap.anon_pages == device.used - files


def test_what_a_module_leaks(field_prog: Program) -> None:
    report = collect_memstat(field_prog, leaks=True)
    assert report.leaks is not None
    assert (report.by, report.unattributed) == (None, None)
    leak = report.leaks[0]
    assert (leak.module, leak.confidence) == ("heapmodule", "likely")
    assert leak.cache is not None
    assert leak.objects is not None
    assert leak.objects >= LEAKED
    assert leak.holds[0].endswith("[heapmodule]")
    sizes = [each.bytes for each in report.leaks]
    assert sizes == sorted(sizes, reverse=True)


def test_files_of_a_tmpfs_on_swap(field_run: lab.Run, report: MemstatReport) -> None:
    systems = view(report, "fs")
    (tmpfs,) = (g for g in systems if g.name == field_run.workload["tmpfs"])
    assert isinstance(tmpfs, FileSystemGroup)
    assert (
        tmpfs.swap_pages
        == sum(g["swap"] for g in field_run.workload["removed"]) // PAGE
    )
    assert tmpfs.pages == field_run.workload["many"]


def kept_by_cpus(prog: Program) -> int:
    """Count the free pages of swap that CPUs keep for themselves (mm/swap_slots.c).

    Until "mm, swap: remove swap slot cache" (in v6.15).
    """
    try:
        slots = prog["swp_slots"]
    except KeyError:
        return 0
    caches = [per_cpu(slots, cpu) for cpu in for_each_possible_cpu(prog)]
    return sum(cache.nr.value_() + _given_back(cache) for cache in caches)


def _given_back(cache: Object) -> int:
    has_list = cache.type_.has_member("n_ret")
    return int(cache.n_ret.value_()) if has_list else 0


def test_swap_is_of_processes_and_files(
    field_prog: Program, report: MemstatReport
) -> None:
    """The swap cache is empty."""
    groups = [*view(report, "process"), *view(report, "fs")]
    swapped = sum(getattr(group, "swap_pages", None) or 0 for group in groups)
    assert pages_of(report)["user.anon"]
    assert report.swap_pages is not None
    assert report.swap_free_pages is not None
    used = report.swap_pages - report.swap_free_pages
    assert swapped == used - kept_by_cpus(field_prog)


def test_swap_of_processes(field_run: lab.Run, report: MemstatReport) -> None:
    groups = [g for g in view(report, "process") if isinstance(g, ProcessGroup)]
    swap = {group.pid: group.swap_pages for group in groups}
    found = {}
    for process in field_run.workload["processes"]:
        pid = process["pid"]
        kib = number(field_run, f"proc/{pid}/status", r"^VmSwap:\s+(\d+) kB")
        assert (swap[pid] or 0) * PAGE == kib * 1024, process["name"]
        found[process["name"]] = kib
    assert found["swapped"] > 0


def test_page_tables_of_processes(field_run: lab.Run, report: MemstatReport) -> None:
    groups = [g for g in view(report, "process") if isinstance(g, ProcessGroup)]
    tables = {group.pid: group.page_table_bytes for group in groups}
    for process in field_run.workload["processes"]:
        pid = process["pid"]
        kib = number(field_run, f"proc/{pid}/status", r"^VmPTE:\s+(\d+) kB")
        assert tables[pid] == kib * 1024, process["name"]
    # All pages of tables are there, each once, and the rest are of no process. With
    # five levels there is one more, which VmPTE does not count.
    own = ("kernel.page_tables", "kernel.page_tables_own")
    pages = {
        g.pid: sum(g.classes.get(name, 0) for name in own) for g in groups if g.pid
    }
    uncounted = {pages[pid] - (tables[pid] or 0) // PAGE for pid in pages}
    assert uncounted in ({0}, {1})
    counted = number(field_run, "proc/meminfo", r"^PageTables:\s+(\d+) kB") // 4
    told = sum(group.classes.get("kernel.page_tables", 0) for group in groups)
    assert told == counted == pages_of(report)["kernel.page_tables"]
    large = [tables[pid] or 0 for pid in field_run.workload["tables"]]
    assert min(large) > 16 << 20


def test_objects_of_a_module(report: MemstatReport) -> None:
    """kmalloc-96, or what it was merged with, or one of its random copies."""
    (cache,) = (g for g in view(report, "slab") if getattr(g, "module", None))
    assert isinstance(cache, SlabGroup)
    assert cache.module == "heapmodule"
    assert cache.bytes_each == 96
    assert cache.objects_in_use is not None
    assert cache.objects_in_use >= LEAKED
    assert cache.module_share is not None
    # A few are of others, and of a slab that is not full some are free.
    assert cache.module_share > 0.9
    assert cache.words is not None
    assert cache.words[0].name == "hm_done [heapmodule]"


def test_whatis_names_the_module_of_an_object(
    field_prog: Program, report: MemstatReport
) -> None:
    (cache,) = (g for g in view(report, "slab") if getattr(g, "module", None))
    objects = slab_cache_for_each_allocated_object(
        find_slab_cache(field_prog, cache.name), "void"
    )
    # Most of the cache's objects are of the module.
    some = [f"{found.value_():#x}" for found in islice(objects, 20_000, 20_020)]
    answers = reported(field_prog, "whatis", *some)["answers"]
    told = [answer["slab"]["points_to"] for answer in answers]
    assert sum(names[:1] == ["hm_done [heapmodule]"] for names in told) > len(some) / 2
