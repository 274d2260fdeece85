# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory whose owner has no page of it is found by the kernel's own lists."""

import io
import json
import re
from contextlib import redirect_stdout
from itertools import islice

import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.slab import (
    find_slab_cache,
    slab_cache_for_each_allocated_object,
)
from msatools.commands.whatis import COMMAND

from fixtures import lab
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import (
    CgroupGroup,
    FileSystemGroup,
    MemstatReport,
    ProcessGroup,
    SlabGroup,
)
from msatools.program import TargetSpec, open_target
from tests.report.expected import OBSERVED
from tests.report.judged import report_of

from .sums import pages_of, view

PAGE = 4096
DELETED = " (deleted)"
BY = ("cgroup", "fs", "process", "slab")
LEAKED = 350_000
KERNELS = ("6.1", "6.12", "7.x")


@pytest.fixture(scope="module", params=KERNELS)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"fieldmemory-{request.param}")


@pytest.fixture(scope="module")
def report(run: lab.Run) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    return collect_memstat(opened.prog, target=opened.target, by=BY)


@pytest.fixture(scope="module")
def cgroups(report: MemstatReport) -> dict[str, CgroupGroup]:
    groups = view(report, "cgroup")
    return {g.name: g for g in groups if isinstance(g, CgroupGroup) and g.mem_cgroup}


def number(run: lab.Run, file: str, pattern: str) -> int:
    found = re.search(pattern, run.truth(file).decode(), re.MULTILINE)
    assert found, (file, pattern)
    return int(found[1])


def test_removed_groups_are_those_of_the_kernel(
    run: lab.Run, report: MemstatReport, cgroups: dict[str, CgroupGroup]
) -> None:
    dying = [group for group in cgroups.values() if group.dying]
    pattern = r"^nr_dying_descendants (\d+)"
    assert len(dying) == number(run, "sys/fs/cgroup/cgroup.stat", pattern)
    removed = len(run.workload["removed"])
    # From v7.0 on pages move to the parent, and those that have one alone are gone.
    assert len(dying) in (removed, removed + run.workload["many"])
    (note,) = [note.text for note in report.notes if note.code == "removed-cgroups"]
    assert note.startswith(f"{len(dying):,} removed control groups still exist")
    assert "on swap" in note


def test_removed_groups_have_what_they_have_on_swap(
    run: lab.Run, cgroups: dict[str, CgroupGroup]
) -> None:
    for removed in run.workload["removed"]:
        group = cgroups[f"/{removed['path']}{DELETED}"]
        assert group.dying
        assert group.key == str(removed["inode"])
        assert group.pages == 0
        assert group.swap_pages == removed["swap"] // PAGE > 0


def test_groups_on_swap(run: lab.Run, cgroups: dict[str, CgroupGroup]) -> None:
    for path in run.workload["cgroups"]:
        text = run.truth(f"sys/fs/cgroup/{path}/memory.swap.current")
        below = [g for name, g in cgroups.items() if name.startswith(f"/{path}")]
        assert sum(g.swap_pages or 0 for g in below) * PAGE == int(text), path
        current = int(run.truth(f"sys/fs/cgroup/{path}/memory.current"))
        assert sum(g.charged_pages or 0 for g in below) * PAGE == current, path
    assert cgroups["/"].swap_pages is None


def test_slab_objects_and_percpu_memory_of_groups(
    run: lab.Run, report: MemstatReport, cgroups: dict[str, CgroupGroup]
) -> None:
    """Objects of a removed group are its parent's: they do not keep the group."""
    for path in run.workload["cgroups"]:
        stat = f"sys/fs/cgroup/{path}/memory.stat"
        below = [g for name, g in cgroups.items() if name.startswith(f"/{path}")]
        for name in ("slab", "percpu"):
            own = [getattr(group, f"{name}_bytes") for group in below]
            expected = number(run, stat, rf"^{name} (\d+)")
            assert sum(filter(None, own)) == expected, (path, name)
    assert cgroups["/leaving"].percpu_bytes or cgroups["/many"].slab_bytes
    for group in cgroups.values():
        is_known = not group.dying and group.name != "/"
        assert (group.slab_bytes is not None) == is_known, group.name
        assert (group.percpu_bytes is not None) == is_known, group.name
    (note,) = [note.text for note in report.notes if note.code == "removed-cgroups"]
    assert "charged to their parents" in note


def test_swap_as_a_whole(run: lab.Run, report: MemstatReport) -> None:
    assert report.swap_pages is not None
    assert report.swap_free_pages is not None
    for pages, name in (
        (report.swap_pages, "SwapTotal"),
        (report.swap_free_pages, "SwapFree"),
    ):
        found = number(run, "proc/meminfo", rf"^{name}: +(\d+) kB")
        assert pages * PAGE // 1024 == found


def test_swap_by_device_and_kind(run: lab.Run, report: MemstatReport) -> None:
    """As in /proc/swaps and meminfo; files by what their file systems say."""
    swap = report.swap
    assert swap is not None
    (device,) = swap.devices
    name, _, size, used, _ = run.truth("proc/swaps").decode().splitlines()[1].split()
    assert device.name == name
    assert (device.pages * 4, device.used * 4) == (int(size), int(used))
    assert swap.total_pages == report.swap_pages
    assert swap.free_pages == report.swap_free_pages
    cached = number(run, "proc/meminfo", r"^SwapCached: +(\d+) kB")
    assert swap.cached_pages == cached // 4
    files = sum(getattr(g, "swap_pages", None) or 0 for g in view(report, "fs"))
    assert swap.shmem_pages == files
    assert swap.anon_pages == device.used - files


def test_what_a_module_leaks(run: lab.Run) -> None:
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    report = collect_memstat(opened.prog, target=opened.target, leaks=True)
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


def test_files_of_a_tmpfs_on_swap(run: lab.Run, report: MemstatReport) -> None:
    systems = view(report, "fs")
    (tmpfs,) = (g for g in systems if g.name == run.workload["tmpfs"])
    assert isinstance(tmpfs, FileSystemGroup)
    assert tmpfs.swap_pages == sum(g["swap"] for g in run.workload["removed"]) // PAGE
    assert tmpfs.pages == run.workload["many"]


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


def test_swap_is_of_processes_and_files(run: lab.Run, report: MemstatReport) -> None:
    """The swap cache is empty."""
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    groups = [*view(report, "process"), *view(report, "fs")]
    swapped = sum(getattr(group, "swap_pages", None) or 0 for group in groups)
    assert pages_of(report)["user.anon"]
    assert report.swap_pages is not None
    assert report.swap_free_pages is not None
    used = report.swap_pages - report.swap_free_pages
    assert swapped == used - kept_by_cpus(prog)


def test_swap_of_processes(run: lab.Run, report: MemstatReport) -> None:
    groups = [g for g in view(report, "process") if isinstance(g, ProcessGroup)]
    swap = {group.pid: group.swap_pages for group in groups}
    found = {}
    for process in run.workload["processes"]:
        pid = process["pid"]
        kib = number(run, f"proc/{pid}/status", r"^VmSwap:\s+(\d+) kB")
        assert (swap[pid] or 0) * PAGE == kib * 1024, process["name"]
        found[process["name"]] = kib
    assert found["swapped"] > 0


def test_page_tables_of_processes(run: lab.Run, report: MemstatReport) -> None:
    groups = [g for g in view(report, "process") if isinstance(g, ProcessGroup)]
    tables = {group.pid: group.page_table_bytes for group in groups}
    for process in run.workload["processes"]:
        pid = process["pid"]
        kib = number(run, f"proc/{pid}/status", r"^VmPTE:\s+(\d+) kB")
        assert tables[pid] == kib * 1024, process["name"]
    # All pages of tables are there, each once, and the rest are of no process. With
    # five levels there is one more, which VmPTE does not count.
    own = ("kernel.page_tables", "kernel.page_tables_own")
    pages = {
        g.pid: sum(g.classes.get(name, 0) for name in own) for g in groups if g.pid
    }
    uncounted = {pages[pid] - (tables[pid] or 0) // PAGE for pid in pages}
    assert uncounted in ({0}, {1})
    counted = number(run, "proc/meminfo", r"^PageTables:\s+(\d+) kB") // 4
    told = sum(group.classes.get("kernel.page_tables", 0) for group in groups)
    assert told == counted == pages_of(report)["kernel.page_tables"]
    large = [tables[pid] or 0 for pid in run.workload["tables"]]
    assert min(large) > 16 << 20


def test_objects_of_a_module(run: lab.Run, report: MemstatReport) -> None:
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
    run: lab.Run, report: MemstatReport
) -> None:
    (cache,) = (g for g in view(report, "slab") if getattr(g, "module", None))
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    objects = slab_cache_for_each_allocated_object(
        find_slab_cache(prog, cache.name), "void"
    )
    # Most of the cache's objects are of the module.
    some = [f"{found.value_():#x}" for found in islice(objects, 20_000, 20_020)]
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, prog, ["--json", *some])
    answers = json.loads(out.getvalue())["answers"]
    told = [answer["slab"]["points_to"] for answer in answers]
    assert sum(names[:1] == ["hm_done [heapmodule]"] for names in told) > len(some) / 2


def test_verdicts(run: lab.Run, report: MemstatReport) -> None:
    pattern = r"^nr_dying_descendants (\d+)"
    removed = number(run, "sys/fs/cgroup/cgroup.stat", pattern)
    expected = {"memory-leak", "out-of-memory", "swap-full", "page-tables"}
    if removed >= 1000:
        expected.add("dying-cgroups")
    if run.workload["poisoned"]:
        expected.add("memory-poisoned")
    found = {x["code"]: x for x in report_of(run.name)["verdicts"]}
    assert {*found} - OBSERVED == expected
    said = {code: x["text"] + " ".join(x["evidence"]) for code, x in found.items()}
    assert f"{run.workload['tables'][0]} tables-0 16.1 MiB" in said["page-tables"]
    assert "module heapmodule" in said["memory-leak"]
    assert "targets: hm_done [heapmodule]" in said["memory-leak"]
    assert "control group /limited ran out of memory" in said["out-of-memory"]
    victim = f"killed pid {run.workload['victim']} victim"
    assert victim in said["out-of-memory"]
    assert "was then 30.0 MiB tmpfs and shared memory, " in said["out-of-memory"]
    if "dying-cgroups" in said:
        assert f"{removed:,} removed control groups" in said["dying-cgroups"]
    if "memory-poisoned" in said:
        corrupted = number(run, "proc/meminfo", r"^HardwareCorrupted: +(\d+) kB")
        assert f"{corrupted * 1024 // PAGE} pages" in said["memory-poisoned"]
        assert f"{run.workload['killed']} poison" in said["memory-poisoned"]
