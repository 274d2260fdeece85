# SPDX-License-Identifier: LGPL-2.1-or-later

"""The walk's sums held against the counters that the kernel itself keeps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import drgn
from drgn.helpers.linux.hugetlb import for_each_hstate
from drgn.helpers.linux.mm import totalram_pages

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.vmstat import vm_counters
from msatools.memory.classes import PageClass as C
from msatools.memory.freelists import PcpLists
from msatools.memory.model import Check
from msatools.memory.owners import Owners
from msatools.memory.pagecache import blockdev_pages
from msatools.memory.scan import ScanResult


@dataclass(frozen=True)
class Reason:
    """A known cause for which a sum and a counter differ, and by how much."""

    pages: int
    text: str


@dataclass(frozen=True)
class Counters:
    """The kernel's figures at one moment, in pages; ``None`` if not kept."""

    values: Mapping[str, int | None]

    def kept(self, *names: str) -> tuple[str, ...]:
        """Pick those of the counters that this kernel keeps."""
        return tuple(name for name in names if self.values.get(name) is not None)

    def get(self, *names: str) -> int | None:
        """Sum counters; ``None`` unless at least one of them is kept."""
        kept = self.kept(*names)
        return sum(self.values[name] or 0 for name in kept) if kept else None


def read_counters(
    reader: Reader, nodes: list[drgn.Object], pcp: PcpLists, findings: Findings
) -> Counters:
    """Read every counter that a check needs."""
    prog = reader.prog
    values: dict[str, int | None] = dict(vm_counters(reader, nodes, findings))
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
        except (LookupError, AttributeError, drgn.FaultError):
            values[name] = None
    return Counters(values)


def _hugetlb_pages(prog: drgn.Program, member: str) -> int:
    return sum(
        hstate.member_(member).value_() << hstate.order.value_()
        for hstate in for_each_hstate(prog)
    )


def make_checks(
    result: ScanResult,
    owners: Owners,
    before: Counters,
    after: Counters,
    coverage: Mapping[str, int],
) -> tuple[Check, ...]:
    """
    Compare all sums that have a counter.

    :param before: The counters before the scan; on a dump the same object as
        *after*.
    :param coverage: What could not be read explains a difference, too.
    """
    totals = result.totals()

    def pages(*classes: int) -> int:
        return int(sum(totals[c] for c in classes))

    losses = _Losses(
        pages=pages(C.EXCLUDED, C.UNREADABLE),
        sections=bool(coverage.get("section_table_lost")),
        cpus=coverage.get("vmstat_cpus_unreadable", 0),
        owners=sum(coverage.get(key, 0) for key in _OWNER_LOSSES),
    )

    def check(
        name: str, walk: int, *counters: str, reason: Reason | None = None
    ) -> Iterator[Check]:
        kernel = after.get(*counters)
        if kernel is None:
            return
        difference = walk - kernel
        yield Check(
            name=name,
            walk_pages=walk,
            counter=" + ".join(after.kept(*counters)),
            kernel_pages=kernel,
            difference=difference,
            explained_by=_explain(
                name, walk, kernel, before.get(*counters), reason, losses
            ),
        )

    stack_pages = len(owners.stacks[0].pages) if owners.stacks else 0
    cache = pages(C.FILE, C.EXEC, C.BLOCKDEV, C.SHMEM)
    examined = result.pages() - pages(C.DEVICE)
    return (
        *check("managed", examined - pages(C.RESERVED, C.OFFLINE), "totalram_pages"),
        *check("free.buddy", pages(C.FREE_BUDDY, C.FREE_UNACCEPTED), "NR_FREE_PAGES"),
        *check("free.pcp", pages(C.FREE_PCP), "pcp->count"),
        *check(
            "user.anon", pages(C.ANON, C.KSM) - result.anon_unmapped, "NR_ANON_MAPPED"
        ),
        *check("user.ksm", pages(C.KSM), "ksm_pages_shared"),
        *check("user.hugetlb", pages(C.USER_HUGETLB, C.FREE_HUGETLB), "nr_huge_pages"),
        *check("free.hugetlb", pages(C.FREE_HUGETLB), "free_huge_pages"),
        *check("cache", cache + result.anon_swapcache, "NR_FILE_PAGES"),
        *check("cache.shmem", pages(C.SHMEM) - result.shmem_swapcache, "NR_SHMEM"),
        *check("cache.blockdev", pages(C.BLOCKDEV), "bdev nrpages"),
        *check(
            "swapcache", result.anon_swapcache + result.shmem_swapcache, "NR_SWAPCACHE"
        ),
        *check(
            "kernel.slab",
            pages(C.SLAB, C.LARGE_KMALLOC),
            "NR_SLAB_RECLAIMABLE_B",
            "NR_SLAB_UNRECLAIMABLE_B",
        ),
        *check("kernel.page_tables", pages(C.PAGE_TABLES), "NR_PAGETABLE"),
        *check(
            "kernel.vmalloc",
            pages(C.VMALLOC, C.STACKS),
            "nr_vmalloc_pages",
            "NR_VMALLOC",  # in its place since v6.19
        ),
        *check(
            "kernel.stacks",
            pages(C.STACKS),
            "NR_KERNEL_STACK_KB",
            reason=Reason(
                owners.cached_stacks * stack_pages,
                f"{owners.cached_stacks} cached stacks",
            ),
        ),
        *check(
            "kernel.percpu",
            pages(C.PERCPU),
            "pcpu_nr_populated",
            reason=Reason(
                -owners.percpu_boot_pages,
                f"{owners.percpu_boot_pages:,} in reserved boot memory",
            ),
        ),
        *check("kernel.zsmalloc", pages(C.ZSMALLOC), "NR_ZSPAGES"),
        *check("hwpoison", pages(C.HWPOISON), "num_poisoned_pages"),
    )


_OWNER_LOSSES = (
    "files_unreadable",
    "file_tables_unreadable",
    "lists_broken",
    "owners_unreadable",
    "page_tables_unreadable",
    "pipes_unreadable",
    "skbs_unreadable",
    "sockets_unreadable",
    "vmalloc_areas_unreadable",
)
"""Coverage keys of structures that say what pages are used for."""

_OWNED = ("kernel.percpu", "kernel.slab", "kernel.stacks", "kernel.vmalloc")
"""Checks whose sum depends on them."""

_MAX_CPU_DELTA = 127
"""A CPU keeps its part of a counter in a signed byte."""


@dataclass(frozen=True)
class _Losses:
    """What a damaged or filtered dump lacks."""

    pages: int
    sections: bool
    """Whether there may be pages that are not even known to be missing."""

    cpus: int
    owners: int


def _explain(
    name: str,
    walk: int,
    kernel: int,
    before: int | None,
    reason: Reason | None,
    losses: _Losses,
) -> str | None:
    difference = walk - kernel
    if not difference:
        return None
    if reason is not None and reason.pages == difference:
        return reason.text
    if before is not None and min(before, kernel) <= walk <= max(before, kernel):
        return f"went from {before:,} to {kernel:,} during the scan"
    if difference < 0 and losses.sections:
        return "the dump lacks struct pages"
    if 0 < -difference <= losses.pages:
        return f"the dump lacks {losses.pages:,} struct pages"
    if losses.owners and name in _OWNED:
        return "the dump lacks some of what tells their use"
    if abs(difference) <= losses.cpus * _MAX_CPU_DELTA:
        return f"the dump lacks {losses.cpus} per-CPU parts of counters"
    return None
