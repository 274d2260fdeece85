# SPDX-License-Identifier: LGPL-2.1-or-later

"""Compares the scan's sums with the counters that the kernel keeps itself."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import drgn
from drgn.helpers.linux.hugetlb import for_each_hstate
from drgn.helpers.linux.mm import totalram_pages
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.vmstat import (
    PAGES_FREED,
    pages_allocated,
    vm_counters,
    vm_events,
)
from msatools.memory.differences import Difference, Meanwhile, Reason, explain
from msatools.memory.model import Check
from msatools.memory.owners.owners import Owners
from msatools.memory.pages.classes import PageClass as C
from msatools.memory.pages.layout import PageLayout
from msatools.memory.scan.freelists import PcpLists
from msatools.memory.scan.pagecache import blockdev_pages
from msatools.memory.scan.result import ScanResult
from msatools.selfdesc.find import ask, ask_each, drgn_lookups, find_variable

_MAX_HUGE_ORDER = 30


class MemoryCounters(Struct, frozen=True):
    """The kernel's counters at one moment, in pages."""

    values: Mapping[str, int | None]
    """Maps each counter of this kernel to its value; ``None`` if it is unreadable."""

    def kept(self, *names: str) -> tuple[str, ...]:
        """Return the names of those counters that this kernel keeps."""
        return tuple(name for name in names if name in self.values)

    def get(self, *names: str) -> int | None:
        """Sum the counters that this kernel keeps; ``None`` if one is unreadable."""
        total = 0
        for name in self.kept(*names):
            value = self.values[name]
            if value is None:
                return None
            total += value
        return total


def read_counters(
    reader: Reader, nodes: list[drgn.Object], pcp: PcpLists, losses: LossLog
) -> MemoryCounters:
    """Read every counter that a check needs."""
    prog = reader.prog
    values = vm_counters(reader, nodes, losses)
    stack_kb = values.get("NR_KERNEL_STACK_KB")
    if stack_kb is not None:
        page_kb = find_variable(prog, "PAGE_SIZE").value_() // 1024
        values["NR_KERNEL_STACK_KB"] = stack_kb // page_kb
    variable = partial(find_variable, prog)
    sources: dict[str, Callable[[], int | None]] = {
        "totalram_pages": lambda: ask(totalram_pages, prog),
        "pcp->count": lambda: pcp.count,
        "nr_vmalloc_pages": lambda: variable("nr_vmalloc_pages").counter.value_(),
        "ksm_pages_shared": lambda: variable("ksm_pages_shared").value_(),
        "num_poisoned_pages": lambda: variable("num_poisoned_pages").counter.value_(),
        "bdev nrpages": lambda: blockdev_pages(reader, losses),
        "nr_huge_pages": lambda: _hugetlb_pages(prog, "nr_huge_pages"),
        "free_huge_pages": lambda: _hugetlb_pages(prog, "free_huge_pages"),
        "pcpu_nr_populated": lambda: (
            variable("pcpu_nr_populated").value_() * variable("pcpu_nr_units").value_()
        ),
    }
    for name, source in sources.items():
        try:
            with drgn_lookups:
                values[name] = source()
        except UNREADABLE as error:
            values[name] = None
            text = f"cannot read the kernel's {name}: {error}"
            losses.lose(Loss.COUNTERS, text, about=name)
        except MissingError:
            continue  # not configured, or not in this version
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        with contextlib.suppress(*LOST):
            values.update(_page_events(reader, losses))
    return MemoryCounters(values)


_MOVED, _ALLOCATED, _FREED = "moved", "allocated", "freed"
_COLLAPSED, _MIGRATED = "THP_COLLAPSE_ALLOC", "PGMIGRATE_SUCCESS"
_ENTRY_BYTES = 8


def _page_events(reader: Reader, losses: LossLog) -> dict[str, int]:
    """Count the pages allocated, freed and moved since boot.

    khugepaged moves at most one page table's worth of pages into a huge page.
    """
    allocated = pages_allocated(reader.prog)
    names = (*allocated, PAGES_FREED, _COLLAPSED, _MIGRATED)
    events = vm_events(reader, names, losses)
    page_size: int = find_variable(reader.prog, "PAGE_SIZE").value_()
    huge = events.get(_COLLAPSED, 0) * (page_size // _ENTRY_BYTES)
    return {
        _ALLOCATED: sum(events[name] for name in allocated),
        _FREED: events.get(PAGES_FREED, 0),
        _MOVED: huge + events.get(_MIGRATED, 0),
    }


def _events_between(name: str, before: MemoryCounters, after: MemoryCounters) -> int:
    """Count the events between two samples; 0 if either is unknown."""
    then, now = before.values.get(name), after.values.get(name)
    return 0 if then is None or now is None else now - then


def _hugetlb_pages(prog: drgn.Program, member: str) -> int:
    total = 0
    for hstate in ask_each(for_each_hstate, prog):
        order = hstate.order.value_()
        if order > _MAX_HUGE_ORDER:
            raise DamagedDataError("a huge page of impossible size", hstate.value_())
        total += hstate.member_(member).value_() << order
    return total


def make_checks(
    result: ScanResult,
    owners: Owners,
    before: MemoryCounters,
    after: MemoryCounters,
    layout: PageLayout,
    losses: LossLog,
) -> tuple[Check, ...]:
    """
    Compare every sum that has a counter.

    :param before: The counters before the scan; on a dump, the same object as
        *after*.
    :param losses: What could not be read.
    """
    totals = result.totals()

    def pages(*classes: int) -> int:
        return int(sum(totals[c] for c in classes))

    check = _Counted(before, after, pages(C.EXCLUDED, C.UNREADABLE), losses).check
    managed = result.pages() - pages(C.DEVICE, C.RESERVED, C.OFFLINE)
    # Pages of a balloon that deflates on OOM stay managed.
    ballooned = Reason(-pages(C.OFFLINE), "a balloon's pages, still managed")
    anon = pages(C.ANON, C.KSM) - result.anon_unmapped
    hugetlb = pages(C.USER_HUGETLB, C.FREE_HUGETLB)
    cache = pages(C.FILE, C.EXEC, C.BLOCKDEV, C.SHMEM) + result.anon_swapcache
    swapcache = result.anon_swapcache + result.shmem_swapcache
    slab = pages(C.SLAB, C.LARGE_KMALLOC)
    guessed = None
    if before is after and not layout.types.has("large_kmalloc"):
        counted = after.get(*_SLAB)
        guessed = _wrong_guesses(pages(C.SLAB), pages(C.LARGE_KMALLOC), counted)
    vmalloc = pages(C.VMALLOC) + (0 if owners.direct_stacks else pages(C.STACKS))
    counted_stacks = after.get("NR_KERNEL_STACK_KB")
    stacks = _other_stacks(owners, pages(C.STACKS) - (counted_stacks or 0))
    percpu = _uncounted_percpu(owners)
    # zsmalloc pages have no page type before v6.11.
    zsmalloc = ("NR_ZSPAGES",) if layout.types.has("zsmalloc") else ()
    return (
        *check("managed", managed, "totalram_pages", reason=ballooned),
        *check("free.buddy", pages(C.FREE_BUDDY, C.FREE_UNACCEPTED), "NR_FREE_PAGES"),
        *check("free.pcp", pages(C.FREE_PCP), "pcp->count"),
        *check("user.anon", anon, "NR_ANON_MAPPED"),
        *check("user.ksm", pages(C.KSM), "ksm_pages_shared"),
        *check("user.hugetlb", hugetlb, "nr_huge_pages"),
        *check("free.hugetlb", pages(C.FREE_HUGETLB), "free_huge_pages"),
        *check("cache", cache, "NR_FILE_PAGES"),
        *check("cache.shmem", pages(C.SHMEM) - result.shmem_swapcache, "NR_SHMEM"),
        *check("cache.blockdev", pages(C.BLOCKDEV), "bdev nrpages"),
        *check("swapcache", swapcache, "NR_SWAPCACHE"),
        *check("kernel.slab", slab, *_SLAB, reason=guessed),
        *check("kernel.page_tables", pages(C.PAGE_TABLES), "NR_PAGETABLE"),
        *check("kernel.vmalloc", vmalloc, *_VMALLOC),
        *check("kernel.stacks", pages(C.STACKS), "NR_KERNEL_STACK_KB", reason=stacks),
        *check("kernel.percpu", pages(C.PERCPU), "pcpu_nr_populated", reason=percpu),
        *check("kernel.zsmalloc", pages(C.ZSMALLOC), *zsmalloc),
        *check("hwpoison", pages(C.HWPOISON), "num_poisoned_pages"),
    )


_SLAB = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")

_VMALLOC = ("nr_vmalloc_pages", "NR_VMALLOC")
"""The counter of older kernels, and that of newer ones."""


class _Counted:
    """Compares sums with the kernel's counters."""

    def __init__(
        self,
        before: MemoryCounters,
        after: MemoryCounters,
        missing: int,
        losses: LossLog,
    ) -> None:
        """
        :param before: The counters before the scan; on a dump, the same object as
            *after*.
        :param missing: Number of pages that were not read.
        """
        self._before, self._after = before, after
        self._missing = missing
        self._losses = losses
        self._meanwhile = None
        if before is not after:
            self._meanwhile = Meanwhile(
                moved=_events_between(_MOVED, before, after),
                allocated=_events_between(_ALLOCATED, before, after),
                freed=_events_between(_FREED, before, after),
            )

    def check(
        self, name: str, walk: int, *counters: str, reason: Reason | None = None
    ) -> Iterator[Check]:
        """Yield the check of a sum, if this kernel has one of its counters.

        :param walk: Number of pages that the scan has found.
        :param reason: A reason why they may differ.
        """
        kept = self._after.kept(*counters)
        if not kept:
            return
        kernel = self._after.get(*kept)
        explanation = None
        if kernel is not None and walk != kernel:
            before = self._before.get(*kept)
            difference = Difference(name, walk, kernel, before, reason)
            explanation = explain(
                difference, self._meanwhile, self._missing, self._losses
            )
        yield Check(
            name=name,
            walk_pages=walk,
            counter=" + ".join(kept),
            kernel_pages=kernel,
            difference=None if kernel is None else walk - kernel,
            explained_by=explanation,
        )


def _other_stacks(owners: Owners, surplus: int) -> Reason:
    """Return how many pages are stacks that await new tasks, or are freed soon.

    :param surplus: Pages of stacks that the kernel does not count.
    """
    count = owners.cached_stacks
    text = f"{count} cached stack{'s' * (count != 1)}"
    if surplus > count * owners.stack_pages and (freed := owners.freed_stacks()):
        count += freed
        text += f", {freed} to be freed after a grace period of RCU"
    return Reason(count * owners.stack_pages, text)


def _uncounted_percpu(owners: Owners) -> Reason:
    """Return how many pages of per-CPU memory are no pages of their own."""
    text = f"{owners.percpu.uncounted:,} in reserved boot memory"
    if owners.percpu.spare_units:
        text += " or of units without a CPU"
    return Reason(-owners.percpu.uncounted, text)


def _wrong_guesses(slab: int, large_kmalloc: int, counted: int | None) -> Reason | None:
    """Return how many compound pages were wrongly taken for large kmalloc.

    Older kernels do not mark large kmalloc, and drivers' own compound pages look the
    same. The counter has the true number of both.
    """
    surplus = 0 if counted is None else slab + large_kmalloc - counted
    if not 0 < surplus <= large_kmalloc:
        return None
    return Reason(surplus, "drivers' compound pages look like large kmalloc")
