# SPDX-License-Identifier: LGPL-2.1-or-later

"""The walk's sums held against the counters that the kernel itself keeps."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import drgn
from drgn.helpers.linux.hugetlb import for_each_hstate
from drgn.helpers.linux.mm import totalram_pages

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.vmstat import (
    PAGES_FREED,
    pages_allocated,
    vm_counters,
    vm_events,
)
from msatools.memory.classes import PageClass as C
from msatools.memory.freelists import PcpLists
from msatools.memory.layout import PageLayout
from msatools.memory.model import Check
from msatools.memory.owners import Owners
from msatools.memory.pagecache import blockdev_pages
from msatools.memory.scanresult import ScanResult

_MAX_HUGE_ORDER = 30


@dataclass(frozen=True)
class Reason:
    """A known cause for which a sum and a counter differ, and by how much."""

    pages: int
    text: str


@dataclass(frozen=True)
class Counters:
    """The kernel's figures at one moment, in pages."""

    values: Mapping[str, int | None]
    """Those that this kernel keeps; ``None`` for one that could not be read."""

    def kept(self, *names: str) -> tuple[str, ...]:
        """Pick those of the counters that this kernel keeps."""
        return tuple(name for name in names if name in self.values)

    def get(self, *names: str) -> int | None:
        """Sum counters, those that this kernel does not keep as nothing."""
        total = 0
        for name in self.kept(*names):
            value = self.values[name]
            if value is None:
                return None
            total += value
        return total


def read_counters(
    reader: Reader, nodes: list[drgn.Object], pcp: PcpLists, findings: Findings
) -> Counters:
    """Read every counter that a check needs."""
    prog = reader.prog
    values = vm_counters(reader, nodes, findings)
    stack_kb = values.get("NR_KERNEL_STACK_KB")
    if stack_kb is not None:
        page_kb = prog["PAGE_SIZE"].value_() // 1024
        values["NR_KERNEL_STACK_KB"] = stack_kb // page_kb
    sources: dict[str, Callable[[], int | None]] = {
        "totalram_pages": lambda: totalram_pages(prog),
        "pcp->count": lambda: pcp.count,
        "nr_vmalloc_pages": lambda: prog["nr_vmalloc_pages"].counter.value_(),
        "ksm_pages_shared": lambda: prog["ksm_pages_shared"].value_(),
        "num_poisoned_pages": lambda: prog["num_poisoned_pages"].counter.value_(),
        "bdev nrpages": lambda: blockdev_pages(reader, findings),
        "nr_huge_pages": lambda: _hugetlb_pages(prog, "nr_huge_pages"),
        "free_huge_pages": lambda: _hugetlb_pages(prog, "free_huge_pages"),
        "pcpu_nr_populated": lambda: (
            prog["pcpu_nr_populated"].value_() * prog["pcpu_nr_units"].value_()
        ),
    }
    for name, source in sources.items():
        try:
            values[name] = source()
        except drgn.FaultError as error:
            values[name] = None
            findings.lose(name, f"the kernel's {name} is lost: {error}")
        except (LookupError, AttributeError):
            continue  # not configured, or not in this version
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        with contextlib.suppress(LookupError, drgn.FaultError):
            values.update(_passing_pages(reader, findings))
    return Counters(values)


_MOVED, _ALLOCATED, _FREED = "moved", "allocated", "freed"
_COLLAPSED, _MIGRATED = "THP_COLLAPSE_ALLOC", "PGMIGRATE_SUCCESS"
_ENTRY_BYTES = 8


def _passing_pages(reader: Reader, findings: Findings) -> dict[str, int]:
    """Count the pages, since boot, that were handed out, given back, and moved.

    khugepaged makes huge pages of small ones, by a page table's worth of them at most.
    """
    allocated = pages_allocated(reader.prog)
    names = (*allocated, PAGES_FREED, _COLLAPSED, _MIGRATED)
    events = vm_events(reader, names, findings)
    page_size: int = reader.prog["PAGE_SIZE"].value_()
    huge = events.get(_COLLAPSED, 0) * (page_size // _ENTRY_BYTES)
    return {
        _ALLOCATED: sum(events[name] for name in allocated),
        _FREED: events.get(PAGES_FREED, 0),
        _MOVED: huge + events.get(_MIGRATED, 0),
    }


def _passed(what: str, before: Counters, after: Counters) -> int:
    """Tell how many pages *what* became of from one moment to the other."""
    then, now = before.values.get(what), after.values.get(what)
    return 0 if then is None or now is None else now - then


def _hugetlb_pages(prog: drgn.Program, member: str) -> int:
    total = 0
    for hstate in for_each_hstate(prog):
        order = hstate.order.value_()
        if order > _MAX_HUGE_ORDER:
            raise drgn.FaultError("a huge page of absurd size", hstate.value_())
        total += hstate.member_(member).value_() << order
    return total


def make_checks(
    result: ScanResult,
    owners: Owners,
    before: Counters,
    after: Counters,
    layout: PageLayout,
    findings: Findings,
) -> tuple[Check, ...]:
    """
    Compare all sums that have a counter.

    :param before: The counters before the scan; on a dump the same object as
        *after*.
    :param findings: What could not be read explains a difference, too.
    """
    totals = result.totals()

    def pages(*classes: int) -> int:
        return int(sum(totals[c] for c in classes))

    missing = pages(C.EXCLUDED, C.UNREADABLE)
    became = (_MOVED, _ALLOCATED, _FREED)
    meanwhile = _Meanwhile(*(_passed(what, before, after) for what in became))

    def check(
        name: str, walk: int, *counters: str, reason: Reason | None = None
    ) -> Iterator[Check]:
        kept = after.kept(*counters)
        if not kept:
            return
        kernel = after.get(*kept)
        pair = _Pair(name, walk, before.get(*kept), kernel, reason)
        yield Check(
            name=name,
            walk_pages=walk,
            counter=" + ".join(kept),
            kernel_pages=kernel,
            difference=None if kernel is None else walk - kernel,
            explained_by=_explain(pair, meanwhile, missing, findings),
        )

    cache = pages(C.FILE, C.EXEC, C.BLOCKDEV, C.SHMEM)
    examined = result.pages() - pages(C.DEVICE)
    slab = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")
    cached_stacks = Reason(
        owners.cached_stacks * owners.stack_pages,
        f"{owners.cached_stacks} cached stack{'s' * (owners.cached_stacks != 1)}",
    )
    text = f"{owners.percpu.uncounted:,} in reserved boot memory"
    if owners.percpu.spare_units:
        text += " or of units without a CPU"
    percpu = Reason(-owners.percpu.uncounted, text)
    # A balloon that deflates by itself when memory runs out stays managed.
    ballooned = Reason(-pages(C.OFFLINE), "a balloon's pages, still managed")
    anon = pages(C.ANON, C.KSM) - result.anon_unmapped
    swapcache = result.anon_swapcache + result.shmem_swapcache
    hugetlb = pages(C.USER_HUGETLB, C.FREE_HUGETLB)
    # In the place of nr_vmalloc_pages, newer kernels have NR_VMALLOC.
    vmalloc = ("nr_vmalloc_pages", "NR_VMALLOC")
    return (
        *check(
            "managed",
            examined - pages(C.RESERVED, C.OFFLINE),
            "totalram_pages",
            reason=ballooned,
        ),
        *check("free.buddy", pages(C.FREE_BUDDY, C.FREE_UNACCEPTED), "NR_FREE_PAGES"),
        *check("free.pcp", pages(C.FREE_PCP), "pcp->count"),
        *check("user.anon", anon, "NR_ANON_MAPPED"),
        *check("user.ksm", pages(C.KSM), "ksm_pages_shared"),
        *check("user.hugetlb", hugetlb, "nr_huge_pages"),
        *check("free.hugetlb", pages(C.FREE_HUGETLB), "free_huge_pages"),
        *check("cache", cache + result.anon_swapcache, "NR_FILE_PAGES"),
        *check("cache.shmem", pages(C.SHMEM) - result.shmem_swapcache, "NR_SHMEM"),
        *check("cache.blockdev", pages(C.BLOCKDEV), "bdev nrpages"),
        *check("swapcache", swapcache, "NR_SWAPCACHE"),
        *check("kernel.slab", pages(C.SLAB, C.LARGE_KMALLOC), *slab),
        *check("kernel.page_tables", pages(C.PAGE_TABLES), "NR_PAGETABLE"),
        *check("kernel.vmalloc", pages(C.VMALLOC, C.STACKS), *vmalloc),
        *check(
            "kernel.stacks",
            pages(C.STACKS),
            "NR_KERNEL_STACK_KB",
            reason=cached_stacks,
        ),
        *check("kernel.percpu", pages(C.PERCPU), "pcpu_nr_populated", reason=percpu),
        # Before it was a page type (v6.11) nothing marks the pages of zsmalloc.
        *(
            check("kernel.zsmalloc", pages(C.ZSMALLOC), "NR_ZSPAGES")
            if layout.types.has("zsmalloc")
            else ()
        ),
        *check("hwpoison", pages(C.HWPOISON), "num_poisoned_pages"),
    )


_MAX_CPU_DELTA = 127
"""A CPU keeps its part of a counter in a signed byte."""

_VMALLOC = ("a list of vmalloc areas", "vmalloc", "vmalloc_areas_unreadable")

_LOSSES = {
    "kernel.vmalloc": _VMALLOC,
    "kernel.stacks": _VMALLOC,
    "kernel.percpu": ("a list of percpu chunks", "percpu", "page_tables_unreadable"),
}
"""What tells of the pages of a class, as findings name its loss."""

_SLAB_LOSSES = (
    "tasks",
    "a socket's queue",
    "pipes and sockets",
    "file_tables_unreadable",
    "files_unreadable",
    "sockets_unreadable",
    "skbs_unreadable",
)
"""What tells that compound pages are data of sockets and not of kmalloc()."""


@dataclass(frozen=True)
class _Pair:
    """A sum and the counter that it is held against, in pages."""

    name: str
    walk: int
    before: int | None
    """The counter before the scan, if all of it could be read."""

    kernel: int | None
    reason: Reason | None


@dataclass(frozen=True)
class _Meanwhile:
    """What became of pages while they were counted."""

    moved: int = 0
    allocated: int = 0
    freed: int = 0


def _explain(
    pair: _Pair, meanwhile: _Meanwhile, missing: int, findings: Findings
) -> str | None:
    """Tell why a sum and its counter differ, ``None`` if nothing tells it.

    :param missing: Struct pages that the dump lacks.
    """
    name, walk, before = pair.name, pair.walk, pair.before
    kernel, reason = pair.kernel, pair.reason
    if kernel is None or walk == kernel:
        return None
    difference = walk - kernel
    if reason is not None and reason.pages == difference:
        return reason.text
    if before is not None and min(before, kernel) <= walk <= max(before, kernel):
        return f"went from {before:,} to {kernel:,} during the scan"
    if before is not None and reason is not None:
        # Both at once: the counter went on, and never has what the reason names.
        low, high = min(before, kernel), max(before, kernel)
        if low <= walk - reason.pages <= high:
            return f"{reason.text}; went from {before:,} to {kernel:,} during the scan"
    if before is not None and name in _PER_CPU:
        # What moves from a page that is still to be looked at to one that has been is
        # missed, and met twice the other way round. The counters do not show it.
        low, high = min(before, kernel), max(before, kernel)
        if low - meanwhile.moved <= walk <= high + meanwhile.moved:
            return f"up to {meanwhile.moved:,} pages moved to others during the scan"
    # What is lost comes on top of what the reason names.
    first = "" if reason is None or not reason.pages else f"{reason.text}; "
    beyond = difference if reason is None else difference - reason.pages
    if beyond < 0 and findings.lost["section table"]:
        return f"{first}the dump lacks struct pages"
    if 0 < -beyond <= missing:
        return f"{first}the dump lacks {missing:,} struct pages"
    tellers: tuple[str, ...] = _LOSSES.get(name, ()) if beyond < 0 else ()
    if name == "kernel.slab" and beyond > 0:
        tellers = _SLAB_LOSSES
    if any(findings.lost[what] or findings.coverage[what] for what in tellers):
        return f"{first}the dump lacks some of what tells their use"
    broken = findings.coverage["pcp_lists_broken"]
    if name == "free.pcp" and difference < 0 and broken:
        return f"{broken} of the lists could not be followed to their end"
    if before is not None and name == "free.pcp":
        # Others take their place, of which the lists have no less then: those are of
        # the buddy allocator, which gives many at a time, or were freed just now.
        low, high = min(before, kernel), max(before, kernel)
        passed = meanwhile.allocated + meanwhile.freed
        if low - passed <= walk <= high + passed:
            return f"up to {passed:,} pages were taken or freed during the scan"
    cpus = findings.coverage["vmstat_cpus_unreadable"]
    if name in _PER_CPU and abs(difference) <= cpus * _MAX_CPU_DELTA:
        return f"the dump lacks {cpus} per-CPU parts of counters"
    if before is not None and name in _PASSING:
        # A counter that is what it was may have been another meanwhile. What is too
        # many was met and freed then, what is missing was freed before it was met.
        low, high = min(before, kernel), max(before, kernel)
        freed = meanwhile.freed
        if low - freed <= walk <= high + freed:
            return f"up to {freed:,} pages were freed during the scan, and used anew"
    return None


_PER_CPU = frozenset(
    {
        "free.buddy",
        "user.anon",
        "cache",
        "cache.shmem",
        "swapcache",
        "kernel.slab",
        "kernel.page_tables",
        "kernel.stacks",
        "kernel.zsmalloc",
    }
)
"""Checks against counters of which each CPU keeps a part."""

_PASSING = _PER_CPU | {"cache.blockdev", "kernel.vmalloc"}
"""Checks of pages that come to be used, and are freed, in the course of a moment."""
