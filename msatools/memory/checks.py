# SPDX-License-Identifier: LGPL-2.1-or-later

"""Compares the scan's sums with the kernel's own counters, and explains differences.

On a running kernel, the drift measured during the scan explains some differences.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.hugetlb import for_each_hstate
from drgn.helpers.linux.mm import totalram_pages
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.mm import PAGES_FREED, pages_allocated, vm_counters, vm_events
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.classes import PageClass as C
from msatools.memory.classify import Block, classify, no_far_head, where
from msatools.memory.memmap import MemmapRange
from msatools.memory.model import Check, ScanChanges
from msatools.memory.owners import Owners
from msatools.memory.refine import PcpLists, blockdev_pages
from msatools.memory.sums import ScanResult
from msatools.selfdesc.find import ask, ask_each, drgn_lookups, find_variable

# --- Explains why a sum of the scan and the kernel's counter differ.
#
# A reason must have been counted independently. On a dump, data that could not be read
# or followed is a loss and explains nothing: a broken list leaves a failed check. On a
# running kernel, pages and counters change during the scan, by amounts that the kernel
# counts as well.


_MAX_CPU_DELTA = 127
"""Largest value of a CPU's part of a counter, a signed byte (vm_stat_diff)."""

_DIFFERENCES_VMALLOC = (
    "a list of vmalloc areas",
    "vmalloc",
    "vmalloc_areas_unreadable",
)

_LOSSES = {
    "kernel.vmalloc": _DIFFERENCES_VMALLOC,
    "kernel.stacks": _DIFFERENCES_VMALLOC,
    "kernel.percpu": ("a list of percpu chunks", "percpu", "page_tables_unreadable"),
    "free.pcp": ("pcp_lists_broken",),
}
"""Maps a check to losses that, on a running kernel, explain why its sum is too low."""

_SLAB_LOSSES = (
    "lists_broken",
    "tasks_unreadable",
    "a socket's queue",
    "pipes and sockets",
    "file_tables_unreadable",
    "files_unreadable",
    "sockets_unreadable",
    "skbs_unreadable",
)
"""Losses that make socket data count as large kmalloc."""

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
"""Checks against counters that have a per-CPU part."""

_PASSING = _PER_CPU | {"cache.blockdev", "kernel.vmalloc"}
"""Checks of pages that may be freed and reused during a scan."""


class Reason(Struct, frozen=True):
    """A known cause of a difference between a sum and a counter, and its pages."""

    pages: int
    text: str


class Difference(Struct, frozen=True):
    """A sum and the counter that differs from it, in pages."""

    name: str
    """Name of the check."""

    walk: int
    kernel: int
    before: int | None = None
    """The counter before the scan; ``None`` on a dump or if it is unreadable."""

    reason: Reason | None = None

    @property
    def unreasoned(self) -> int:
        """Pages of the difference that the reason does not cover."""
        covered = 0 if self.reason is None else self.reason.pages
        return self.walk - self.kernel - covered

    def is_within(self, slack: int = 0) -> bool:
        """Return whether the counter may have had the sum's value, give or take *slack*
        pages, during the scan."""
        if self.before is None:
            return False
        low, high = sorted((self.before, self.kernel))
        return low - slack <= self.walk <= high + slack

    def after_reason(self, text: str) -> str:
        """Return *text*, after the reason's text if that covers any page."""
        if self.reason is None or not self.reason.pages:
            return text
        return f"{self.reason.text}; {text}"


class Meanwhile(Struct, frozen=True):
    """Pages that a running kernel moved, allocated and freed during the scan."""

    moved: int = 0
    allocated: int = 0
    freed: int = 0


def explain(
    difference: Difference,
    meanwhile: Meanwhile | None,
    missing: int,
    losses: LossLog,
) -> str | None:
    """
    Explain a difference.

    :param meanwhile: Changes during the scan; ``None`` on a dump.
    :param missing: Struct pages that could not be read.
    :return: ``None`` if no counted reason explains it: a failed check.
    """
    if difference.reason is not None and not difference.unreasoned:
        return difference.reason.text
    if meanwhile is not None:
        text = _explain_by_changes(difference, meanwhile)
        if text is not None:
            return text
    if 0 < -difference.unreasoned <= missing:
        text = f"{missing:,} struct pages could not be read"
        return difference.after_reason(text)
    if difference.unreasoned < 0 and losses.coverage[Loss.SECTION_TABLE.value]:
        return difference.after_reason("not all sections of memory are left")
    cpus = losses.coverage["vmstat_cpus_unreadable"]
    held = cpus * _MAX_CPU_DELTA if difference.name in _PER_CPU else 0
    if 0 < abs(difference.unreasoned) <= held:
        text = f"{cpus} per-CPU parts of counters could not be read"
        return difference.after_reason(text)
    if meanwhile is not None:
        return _explain_by_losses(difference, losses)
    return None


def _explain_by_changes(difference: Difference, meanwhile: Meanwhile) -> str | None:
    name, before, reason = difference.name, difference.before, difference.reason
    if before is None:
        return None
    changed = f"went from {before:,} to {difference.kernel:,} during the scan"
    if difference.is_within():
        return changed
    if reason is not None:
        # Both: the counter changed, and it never includes the reason's pages.
        walk = difference.walk - reason.pages
        rest = Difference(name, walk, difference.kernel, before)
        if rest.is_within():
            return difference.after_reason(changed)
    # A page that migrates to a pfn already scanned is missed, and one that migrates
    # the other way is counted twice. The counters do not show it.
    if name in _PER_CPU and difference.is_within(meanwhile.moved):
        return f"up to {meanwhile.moved:,} pages moved to others during the scan"
    if name == "free.pcp":
        # A page that was on a list when it was scanned may have been allocated since,
        # and the list refilled from the buddy allocator; or it was freed just now.
        passed = meanwhile.allocated + meanwhile.freed
        if difference.is_within(passed):
            return f"up to {passed:,} pages were taken or freed during the scan"
    # A counter that has its old value again may have had another in between: extra
    # pages were freed after they were scanned, missing ones before.
    if name in _PASSING and difference.is_within(meanwhile.freed):
        freed = meanwhile.freed
        return f"up to {freed:,} pages were freed during the scan, and used anew"
    return None


def _explain_by_losses(difference: Difference, losses: LossLog) -> str | None:
    """Explain a difference by lists and tables that changed while they were read."""
    unreasoned = difference.unreasoned
    keys = _LOSSES.get(difference.name, ()) if unreasoned < 0 else ()
    if difference.name == "kernel.slab" and unreasoned > 0:
        keys = _SLAB_LOSSES
    if any(losses.about[key] or losses.coverage[key] for key in keys):
        text = "some data on their use could not be read during the scan"
        return difference.after_reason(text)
    return None


# --- Compares the scan's sums with the counters that the kernel keeps itself.


_MAX_HUGE_ORDER = 30


class MemoryCounters(Struct, frozen=True):
    """The kernel's counters at one moment, in pages."""

    values: Mapping[str, int | None]
    """Maps each counter of this kernel to its value; ``None`` if it is unreadable."""

    def kept(self, *names: str) -> tuple[str, ...]:
        """Return the counters in *names* that this kernel keeps."""
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
    Compare the pages of classes with the kernel's own counters of them.

    :param result: The pages by class, as the scan found them.
    :param owners: The owners of pages, which explain some differences.
    :param before: The counters before the scan; on a dump, the same object as
        *after*.
    :param layout: Layout of ``struct page``.
    :param losses: What could not be read so far, which may explain a difference.
    :return: A check for each counter.
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
        *check("kernel.vmalloc", vmalloc, *_CHECKS_VMALLOC),
        *check("kernel.stacks", pages(C.STACKS), "NR_KERNEL_STACK_KB", reason=stacks),
        *check("kernel.percpu", pages(C.PERCPU), "pcpu_nr_populated", reason=percpu),
        *check("kernel.zsmalloc", pages(C.ZSMALLOC), *zsmalloc),
        *check("hwpoison", pages(C.HWPOISON), "num_poisoned_pages"),
    )


_SLAB = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")

_CHECKS_VMALLOC = ("nr_vmalloc_pages", "NR_VMALLOC")
"""Names of the counter in older and in newer kernels."""


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
        :param reason: A reason why the sum and the counter may differ.
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
    """Return the pages of cached stacks, which the kernel's counter does not include.

    If *surplus* is larger, stacks that wait for an RCU grace period are added.

    :param surplus: Pages of stacks in excess of the kernel's counter.
    """
    count = owners.cached_stacks
    text = f"{count} cached stack{'s' * (count != 1)}"
    if surplus > count * owners.stack_pages and (freed := owners.freed_stacks()):
        count += freed
        text += f", {freed} to be freed after a grace period of RCU"
    return Reason(count * owners.stack_pages, text)


def _uncounted_percpu(owners: Owners) -> Reason:
    """Return the pages that ``pcpu_nr_populated`` counts, but that are in reserved boot
    memory or in units without a CPU."""
    text = f"{owners.percpu.uncounted:,} in reserved boot memory"
    if owners.percpu.spare_units:
        text += " or of units without a CPU"
    return Reason(-owners.percpu.uncounted, text)


def _wrong_guesses(slab: int, large_kmalloc: int, counted: int | None) -> Reason | None:
    """Return the pages that were wrongly classified as large kmalloc.

    Older kernels do not mark large kmalloc, and drivers' own compound pages look the
    same. The counter is the true sum of slab and large kmalloc.
    """
    surplus = 0 if counted is None else slab + large_kmalloc - counted
    if not 0 < surplus <= large_kmalloc:
        return None
    return Reason(surplus, "drivers' compound pages look like large kmalloc")


# --- Measures how much a running kernel changed its pages during the scan.
#
# There are two measures. The kernel counts the pages that it allocates and frees: these
# counts are exact, but include pages that were both allocated and freed during the
# scan. And a sample of the struct pages is read again after the scan: a page that
# changed had another class when the scan ended than the one counted.


RUN_PAGES = 512
"""Pages of a run, which is sampled and read again as a whole: 2 MiB on x86-64."""

_RUNS = 32
"""Number of runs to read again: 1 MiB of struct pages; 4 GiB of memory has 64 MiB."""


class DriftSample(Struct):
    """A sample of struct pages as the scan read them."""

    starts: npt.NDArray[np.uint64]
    """First pfn of each run, ascending."""

    seen: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Address and data of each run's struct pages, by first pfn."""

    def observe(self, block: Block) -> None:
        # searchsorted() would convert the whole array if the types differed.
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.starts, ends)
        size = block.layout.size
        for pfn in self.starts[first:last].tolist():
            begin = (pfn - block.pfn) * size
            data = bytes(block.data[begin : begin + RUN_PAGES * size])
            self.seen[pfn] = block.address + begin, data

    def merge(self, later: "DriftSample") -> None:
        self.seen.update(later.seen)


def sample_of(ranges: Sequence[MemmapRange]) -> DriftSample:
    """Choose runs at random with equal probability."""
    ends = np.cumsum([0, *(part.pages // RUN_PAGES for part in ranges)])
    runs = int(ends[-1])
    chosen = np.array(sorted(random.sample(range(runs), min(_RUNS, runs))), np.int64)
    parts = np.searchsorted(ends, chosen, side="right") - 1
    firsts = np.array([part.pfn for part in ranges], np.uint64)
    within = (chosen - ends[parts]).astype(np.uint64)
    return DriftSample(firsts[parts] + within * np.uint64(RUN_PAGES))


class Watch:
    """Measures the changes of a running kernel, from construction to :meth:`end`."""

    def __init__(
        self,
        reader: Reader,
        layout: PageLayout,
        ranges: Sequence[MemmapRange],
        losses: LossLog,
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._pages = sum(part.pages for part in ranges)
        self._losses = losses
        self.sample = sample_of(ranges)
        """Observer to pass to the scan."""
        self._before = self._events()

    def end(self) -> ScanChanges:
        """Return the changes, after the scan."""
        after = self._events()
        pages = changed = folios = 0
        for pfn, (address, data) in self.sample.seen.items():
            try:
                now = self._reader.read(address, len(data))
            except UNREADABLE:
                # The memory was removed during the scan.
                continue
            pages += len(data) // self._layout.size
            if now == data:
                # Usually so; this skips classifying, which takes longer than reading.
                continue
            heads = changed_pages(data, now, pfn, address, self._layout)
            changed += len(heads)
            folios += len(distinct(heads))
        return ScanChanges(
            allocated_pages=_difference(self._before, after, 0),
            freed_pages=_difference(self._before, after, 1),
            reread_pages=pages,
            changed_pages=changed,
            changed_folios=folios,
            about_folios=round(folios * self._pages / pages) if pages else None,
        )

    def _events(self) -> tuple[int, int] | None:
        """Return pages allocated and freed since boot; ``None`` if not counted."""
        prog = self._reader.prog
        try:
            allocated = pages_allocated(prog)
            names = (*allocated, PAGES_FREED)
            counts = vm_events(self._reader, names, self._losses)
        except LOST:
            return None
        return sum(counts[name] for name in allocated), counts[PAGES_FREED]


def _difference(
    before: tuple[int, int] | None, after: tuple[int, int] | None, which: int
) -> int | None:
    if before is None or after is None:
        return None
    return after[which] - before[which]


def changed_pages(
    before: bytes, after: bytes, pfn: int, address: int, layout: PageLayout
) -> npt.NDArray[np.intp]:
    """
    Find the pages of a run whose class, owner or folio changed.

    :param before: The run's struct pages; *pfn* and *address* belong to the first one.
    :return: Index in the run of the head of each changed page's folio; negative or too
        large if outside. It is the new folio if the page is in one, else the old one,
        or the page itself.
    """
    # Heads outside a run are compared only by index.
    then, now = (
        classify(data, pfn, address, layout, no_far_head) for data in (before, after)
    )
    had, has = _heads(then), _heads(now)
    changed = (then.codes != now.codes) | (had != has)
    changed |= _referenced(then) != _referenced(now)
    changed |= np.isin(now.codes, _MAPPED) & (then.mapping != now.mapping)
    folios = np.where(has != np.arange(len(now)), has, had)
    heads: npt.NDArray[np.intp] = folios[where(changed)]
    return heads


_MAPPED = (PageClass.ANON, PageClass.KSM, PageClass.FILE, PageClass.SHMEM)
"""Classes whose ``mapping`` identifies the owner; others keep other data there."""


def _heads(block: Block) -> npt.NDArray[np.intp]:
    heads = np.arange(len(block))
    heads[block.tails] = block.tail_heads
    return heads


def _referenced(block: Block) -> npt.NDArray[np.bool_]:
    """Return which pages have references; tails never have."""
    return block.counts >= np.uint64(1 << 32)
