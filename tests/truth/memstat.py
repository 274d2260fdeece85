# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-memstat: counts in /proc, /sys and mincore(2)."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from drgn.helpers.linux.pid import for_each_task

from fixtures.lab import Run
from tests.memory import ownertruth, truth
from tests.support.dumps import open_dump
from tests.truth.fact import Fact, Figures

VIEWS = "node,zone,process,file,cgroup,slab,vmalloc"
WORDS = ("--by", VIEWS, "--frag", "--sections", "-v")
"""Options without which the report lacks figures."""


def classes(report: Any) -> dict[str, int]:
    return {one["name"]: one["pages"] for one in report["classes"]}


def checks(report: Any, member: str) -> dict[str, int]:
    return {check["name"]: check[member] for check in report["checks"]}


walked = partial(checks, member="walk_pages")
counted = partial(checks, member="kernel_pages")


def by(view: str, *members: str) -> Callable[[Any], Figures]:
    """Return a function that returns members of a view's groups, by group name."""

    def found(report: Any) -> Figures:
        return {
            group["name"]: tuple(group[member] for member in members)
            for group in report["by"][view]
        }

    return found


# --- Counters


def twice_held_back(run: Run) -> int:
    return 2 * truth.held_back(run)


HELD_BACK = "a CPU adds its part to a counter of /proc/vmstat only above a threshold"
COUNTERS = {
    "free.buddy": "nr_free_pages",
    "user.anon": "nr_anon_pages",
    "cache": "nr_file_pages",
    "cache.shmem": "nr_shmem",
    "swapcache": "nr_swapcached",
    "kernel.page_tables": "nr_page_table_pages",
}
"""Check -> counter of /proc/vmstat."""
SINCE_5_12 = ("nr_swapcached",)


def vmstat(run: Run) -> Figures:
    recorded = truth.vmstat(run)
    return {
        name: recorded[counter]
        for name, counter in COUNTERS.items()
        if counter not in SINCE_5_12 or counter in recorded
    }


def slabs(run: Run) -> Figures:
    """Return slab pages and a module's compound pages (like large kmallocs)."""
    recorded = truth.vmstat(run)
    taken = sum(
        len(made["pfns"]) << made["order"]
        for made in run.workload.get("sets", ())
        if made.get("compound")
    )
    counters = recorded["nr_slab_reclaimable"] + recorded["nr_slab_unreclaimable"]
    return {"kernel.slab": counters + taken}


def exact_counters(run: Run) -> Figures:
    huge = truth.hugetlb_pages(run, "nr_hugepages")
    return {
        "managed": truth.zone_sum(run, "managed"),
        "free.pcp": truth.pcp_pages(run),
        "user.ksm": int(run.truth("sys/kernel/mm/ksm/pages_shared")),
        "user.hugetlb": huge,
        "free.hugetlb": truth.hugetlb_pages(run, "free_hugepages"),
        "cache.blockdev": truth.meminfo_pages(run, "Buffers"),
        "kernel.vmalloc": truth.meminfo_pages(run, "VmallocUsed"),
    }


def poisoned(run: Run) -> Figures:
    return {"hwpoison": truth.meminfo_pages(run, "HardwareCorrupted")}


def totals(report: Any) -> Figures:
    reserved = report["pages"] - classes(report)["reserved"]
    return {
        "managed": (report["managed_pages"], reserved),
        "physical": report["physical_pages"],
    }


def recorded_totals(run: Run) -> Figures:
    managed = truth.zone_sum(run, "managed")
    total = truth.meminfo_pages(run, "MemTotal")
    return {
        "managed": (total, managed),
        "physical": truth.zone_sum(run, "present"),
    }


# --- Flags of each page

FLAGS = {
    "SLAB": ("kernel.slab",),
    "PGTABLE": ("kernel.page_tables",),
    "OFFLINE": ("offline",),
    "HWPOISON": ("hwpoison",),
    "HUGE": ("user.hugetlb", "free.hugetlb"),
    "RESERVED": ("reserved",),
}


def free_flag(run: Run) -> Figures:
    free = truth.having(truth.page_flags(run), "BUDDY")
    return {"free.buddy": int(np.count_nonzero(free))}


def batches(run: Run) -> int:
    """Return the pages that CPUs take to their lists at once (``batch``), one each."""
    text = run.truth("proc/zoneinfo").decode()
    found = re.findall(r"cpu: (\d+)\n +count:.*\n(?: +high:.*\n)? +batch: +(\d+)", text)
    largest: dict[str, int] = {}
    for cpu, batch in found:
        largest[cpu] = max(largest.get(cpu, 0), int(batch))
    return sum(largest.values())


def of_flags(report: Any) -> Figures:
    pages = classes(report)
    return {flag: sum(map(pages.get, names)) for flag, names in FLAGS.items()}


def flags(run: Run) -> Figures:
    words = truth.page_flags(run)
    return {flag: int(np.count_nonzero(truth.having(words, flag))) for flag in FLAGS}


def cached_files(report: Any) -> Figures:
    pages = classes(report)
    return {"cache.exec": pages["cache.exec"]}


def executed(run: Run) -> Figures:
    files = truth.executed_files(run) | {"/lab/truth"}
    return {"cache.exec": sum(truth.cached_pages(run, file) for file in files)}


# --- Zones, blocks and sections


def zones(report: Any) -> Figures:
    """Return managed pages and pages on per-CPU lists of each zone."""
    return {
        group["key"]: (
            group["pages"] - group["classes"]["reserved"],
            group["classes"]["free.pcp"],
        )
        for group in report["by"]["zone"]
    }


def zoneinfo(run: Run) -> Figures:
    found = {}
    text = run.truth("proc/zoneinfo").decode()
    for part in re.split(r"^(?=Node)", text, flags=re.M)[1:]:
        node, zone = re.match(r"Node (\d+), zone +(\w+)", part).groups()  # type: ignore[union-attr]
        (managed,) = map(int, re.findall(r"^ +managed +(\d+)$", part, re.M))
        lists = map(int, re.findall(r"cpu: \d+\n +count: +(\d+)", part))
        if managed:
            found[f"{node}:{zone}"] = managed, sum(lists)
    return found


def free_blocks(report: Any, member: str = "blocks") -> Figures:
    rows = report["frag"]["free"]
    return {(row["node"], row["zone"]): tuple(row[member]) for row in rows}


def buddyinfo(run: Run) -> Figures:
    lines = run.truth("proc/buddyinfo").decode().splitlines()
    words = [line.replace(",", "").split() for line in lines]
    return {(int(w[1]), w[3]): tuple(map(int, w[4:])) for w in words}


def page_blocks(report: Any) -> Figures:
    rows = report["frag"]["pageblocks"]
    return {(row["node"], row["zone"], row["type"]): row["blocks"] for row in rows}


def pagetypeinfo(run: Run) -> Figures:
    found = {}
    text = run.truth("proc/pagetypeinfo").decode()
    for part in re.findall(r"Number of blocks type(.*\n(?:Node.*\n)+)", text):
        names, *lines = part.splitlines()
        for line in lines:
            node, zone, counts = re.match(  # type: ignore[union-attr]
                r"Node (\d+), zone +(\w+) +(.*)", line
            ).groups()
            for name, count in zip(names.split(), counts.split(), strict=True):
                if int(count):
                    found[int(node), zone, name.lower()] = int(count)
    return found


def sections(report: Any) -> Figures:
    return {section["nr"]: section["state"] for section in report["sections"]}


def memory_blocks(run: Run) -> Figures:
    name = re.compile(r"sys/devices/system/memory/memory(\d+)/state")
    return {
        int(match[1]): run.truth(match[0]).decode().strip()
        for match in map(name.fullmatch, run.truth_names())
        if match
    }


# --- Owners

OF_PROCESS = ("name", "rss_pages", "anon_pages", "private_pages", "hugetlb_pages")


def processes(report: Any) -> Figures:
    """Return figures of each process; Pss in KiB, as the kernel prints it."""
    return {
        group["pid"]: (
            *(group[member] for member in (*OF_PROCESS, "swap_pages")),
            group["pss_bytes"] and group["pss_bytes"] >> 10,
        )
        for group in report["by"]["process"]
        if group["pid"] is not None
    }


def smaps(run: Run) -> Figures:
    found = {}
    page_kib = truth.page_kib(run)
    for pid in truth.recorded_processes(run):
        recorded = truth.kib(run, pid, "smaps_rollup")
        status = run.truth(f"proc/{pid}/status").decode(errors="replace")
        found[pid] = (
            status.splitlines()[0].removeprefix("Name:\t"),
            recorded["Rss"] // page_kib,
            recorded["Anonymous"] // page_kib,
            (recorded["Private_Clean"] + recorded["Private_Dirty"]) // page_kib,
            (recorded["Private_Hugetlb"] + recorded["Shared_Hugetlb"]) // page_kib,
            truth.kib(run, pid, "status")["VmSwap"] // page_kib,
            recorded["Pss"],
        )
    return found


def cached(report: Any) -> Figures:
    return {path: pages for path, (pages,) in by("file", "pages")(report).items()}


def files(run: Run) -> Figures:
    recorded = ownertruth.files_by_path(run)
    return {path: pages for path, pages in recorded.items() if pages}


def beyond_the_end(run: Run) -> int:
    return 1 if run.kernel.kernel.name == "5.10" else 0


IN_MEMORY_STAT = {
    "anon": ("user.anon", "user.ksm"),
    "file": ("cache.file", "cache.exec", "cache.shmem", "cache.blockdev"),
    "shmem": ("cache.shmem",),
    "pagetables": ("kernel.page_tables",),
    "kernel_stack": ("kernel.stacks",),
    "vmalloc": ("kernel.vmalloc",),
}


def cgroups(report: Any) -> Figures:
    """Return pages of each control group including its children, even removed ones."""
    found: dict[tuple[str, str], int] = {}
    for group in report["by"]["cgroup"]:
        path = group["name"]
        above = [path[:end] for end in range(2, len(path)) if path[end] == "/"]
        for name in (path, *above):
            for row, row_classes in IN_MEMORY_STAT.items():
                pages = sum(group["classes"].get(cls, 0) for cls in row_classes)
                key = name.removeprefix("/"), row
                found[key] = found.get(key, 0) + pages
    return found


IN_VERSION_1 = {"anon": "total_rss", "file": "total_cache", "shmem": "total_shmem"}
"""What control groups of version 1 have of it."""


def memory_stat(run: Run) -> Figures:
    made: Iterable[str] = run.workload["cgroups"]
    removed = {group["path"] for group in run.workload["removed"]}
    page_bytes = truth.page_kib(run) << 10
    found = {}
    for path in sorted({*made} - removed):
        said = ownertruth.memory_stat(run, path)
        names = IN_VERSION_1 if "total_rss" in said else {n: n for n in IN_MEMORY_STAT}
        if not {*names.values()} <= said.keys():
            # In each group and on each CPU up to 32 pages, until commit 2d146aa3aa84
            # ("mm: memcontrol: switch to rstat") (in v5.13).
            raise LookupError("memory.stat lacks what CPUs hold back")
        if said.get("swapcached") or said.get("total_swap"):
            # To us such a page is anonymous or shared memory, wherever it is mapped.
            names = {
                row: name for row, name in names.items() if row not in IN_VERSION_1
            }
        pages = {row: said[name] // page_bytes for row, name in names.items()}
        # One that nothing is charged to is not listed.
        if any(pages.values()):
            found |= {(path, row): count for row, count in pages.items()}
    return found


def slabinfo(run: Run) -> Figures:
    return {
        name: (objects, count, count * pages)
        for name, (_, objects, count, pages) in ownertruth.slabinfo(run).items()
        if count
    }


STACKS = "kernel_clone"
"""Who allocates stacks of threads."""
RECORDER = b"truth"
"""The guest's last program."""


def areas(run: Run) -> Figures:
    found = ownertruth.vmalloc_callers(run)
    return {caller: found[caller] for caller in found if caller != STACKS}


def stack_areas(run: Run) -> Figures:
    found = ownertruth.vmalloc_callers(run)
    if STACKS not in found:
        raise LookupError("stacks are not in areas of that caller")
    return {STACKS: found[STACKS][1]}


def stacks_since(run: Run) -> int:
    """Return the pages of stacks of threads that are younger than the recorder."""
    tasks = [*for_each_task(open_dump(run.name, "dwarf"))]
    started = [
        task.start_time.value_() for task in tasks if task.comm.string_() == RECORDER
    ]
    return sum(
        task.stack_vm_area.nr_pages.value_()
        for task in tasks
        if started and task.start_time > started[0]
    )


FACTS = (
    Fact("pages in counters", walked, vmstat, truth.held_back, HELD_BACK),
    Fact("slab pages", walked, slabs, twice_held_back, HELD_BACK),
    Fact("counters", counted, vmstat, truth.held_back, HELD_BACK),
    Fact(
        "pages of stacks",
        lambda report: {"stacks": counted(report)["kernel.stacks"]},
        # A counter of KiB.
        lambda run: {
            "stacks": truth.vmstat(run)["nr_kernel_stack"] // truth.page_kib(run)
        },
        lambda run: truth.held_back(run) / truth.page_kib(run),
        HELD_BACK,
    ),
    Fact("pages in exact counters", walked, exact_counters),
    Fact("exact counters", counted, exact_counters),
    Fact("poisoned pages", walked, poisoned),
    Fact("counter of poisoned pages", counted, poisoned),
    Fact(
        "counter of percpu pages",
        counted,
        lambda run: {"kernel.percpu": truth.meminfo_pages(run, "Percpu")},
    ),
    Fact("managed and physical pages", totals, recorded_totals),
    Fact("pages with the flag", of_flags, flags),
    Fact(
        "free pages by their flag",
        classes,
        free_flag,
        batches,
        "after the flags are recorded, an allocation may bring a batch of pages to a "
        "CPU's list",
    ),
    Fact("pages of executed files", cached_files, executed),
    Fact("managed and per-CPU pages", zones, zoneinfo),
    Fact("free blocks", free_blocks, buddyinfo),
    Fact(
        "the kernel's free blocks",
        partial(free_blocks, member="kernel_blocks"),
        buddyinfo,
    ),
    Fact("page blocks", page_blocks, pagetypeinfo),
    Fact("section", sections, memory_blocks),
    Fact("process", processes, smaps),
    Fact(
        "cached pages",
        cached,
        files,
        beyond_the_end,
        "5.10 reads the page beyond the end of a file, which mincore(2) cannot see",
    ),
    Fact("pages of memory.stat", cgroups, memory_stat),
    Fact("objects, slabs and pages", by("slab", "objects", "slabs", "pages"), slabinfo),
    Fact("areas and pages", by("vmalloc", "areas", "pages"), areas),
    Fact(
        "pages of stacks in areas",
        lambda report: {
            caller: pages for caller, (pages,) in by("vmalloc", "pages")(report).items()
        },
        stack_areas,
        stacks_since,
        "the kernel starts a worker after the list of areas is recorded",
    ),
)
