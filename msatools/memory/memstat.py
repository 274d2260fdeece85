# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts a machine's memory by class: every struct page is in exactly one class."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import drgn
import numpy as np
from drgn.helpers.linux.timekeeping import ktime_get_coarse_ns
from msgspec.structs import replace

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import monotonic_offset
from msatools.kernel.mm import (
    DEVICE_ZONE,
    Zone,
    online_nodes,
    populated_zones,
    read_swap,
)
from msatools.kernel.reader import Reader
from msatools.kernel.report import (
    Loss,
    LossLog,
    Progress,
    Session,
    log_of,
    noting_refusals,
    ns_between,
)
from msatools.memory.checks import make_checks, read_counters
from msatools.memory.classes import (
    CLASSES,
    NCLASSES,
    PageClass,
    PageLayout,
    page_layout,
)
from msatools.memory.classify import node_and_zone
from msatools.memory.memmap import MemmapRange, memmap_ranges, pages_per_section
from msatools.memory.model import (
    ClassCount,
    Leak,
    MemstatReport,
    PageGroup,
    Section,
    UnattributedGroup,
    VmallocCaller,
)
from msatools.memory.owners import Owners, ScanContext, collect_owners
from msatools.memory.refine import pcp_lists
from msatools.memory.scan import (
    can_share,
    scan_and_settle,
    scan_finally,
    workers_by_default,
)
from msatools.memory.sums import ScanResult
from msatools.memory.swapuse import read_swap_use
from msatools.program.description import describe
from msatools.program.model import Target
from msatools.selfdesc.find import ask, drgn_lookups, find_variable

if TYPE_CHECKING:
    from msatools.memory.breakdowns import SectionZones, View
    from msatools.memory.fragmentation import FragView
    from msatools.memory.map import MapView
    from msatools.memory.unattributed import UnattributedView

_COVERAGE = (
    "sections",
    "offline_pages",
    "excluded_pages",
    "unreadable_pages",
    "memmap_reads",
    "reads",
    "bytes_read",
    "cgroup_names_unreadable",
    "file_tables_unreadable",
    "files_unreadable",
    "inodes_unreadable",
    "lists_broken",
    "lists_resumed",
    "heads_unreadable",
    "names_unreadable",
    "owners_unreadable",
    "page_tables_unreadable",
    "pageblocks_unreadable",
    "pcp_lists_broken",
    "pcp_lists_changed",
    "pcp_lists_unreadable",
    "pipes_unreadable",
    "section_table_lost",
    "skbs_unreadable",
    "sockets_unreadable",
    "tasks_unreadable",
    "user_table_entries_broken",
    "user_tables_unreadable",
    "vmalloc_areas_unreadable",
    "vmstat_cpus_unreadable",
)
"""Keys that every report has: pages, reads and bytes, then losses."""

_LOSSES = {
    "file_tables_unreadable": "tables of open files cannot be read: pipes and sockets "
    "are missing",
    "files_unreadable": "open files cannot be read: pipes and sockets are missing",
    "heads_unreadable": "heads of compound pages cannot be read: their tails are "
    "unattributed",
    "inodes_unreadable": "inodes cannot be read: their pages count as plain files",
    "names_unreadable": "files, file systems, control groups or slab caches cannot be "
    "read: they go by their address, or together",
    "page_tables_unreadable": "page tables cannot be read: they, and percpu pages "
    "that they map, are unattributed",
    "pageblocks_unreadable": "page blocks have a migrate type that cannot be read",
    "pcp_lists_broken": "per-CPU free lists break off: what follows is unattributed",
    "pcp_lists_changed": "per-CPU free lists changed as they were followed: some of "
    "their pages may be unattributed",
    "pcp_lists_unreadable": "sets of per-CPU free lists cannot be read: their pages "
    "are unattributed",
    "pipes_unreadable": "pipes cannot be read: their pages are unattributed",
    "skbs_unreadable": "socket buffers cannot be read: their pages are not sockets'",
    "sockets_unreadable": "sockets cannot be read: their pages are not sockets'",
    "tasks_unreadable": "tasks cannot be read: what only they map is no process's",
    "user_table_entries_broken": "entries of processes' page tables name no memory: "
    "what they map is no process's",
    "user_tables_unreadable": "page tables of processes cannot be read: what they map "
    "is no process's",
    "vmalloc_areas_unreadable": "vmalloc areas cannot be read: their pages are "
    "unattributed",
    "vmstat_cpus_unreadable": "per-CPU parts of the kernel's counters cannot be read",
}
"""Maps each loss to the text of its note, which follows the count."""


def collect_memstat(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    by: Collection[str] = (),
    sections: bool = False,
    workers: int | None = None,
    unattributed: bool = False,
    leaks: bool = False,
    frag: bool = False,
    memory_map: bool = False,
    verbose: bool = False,
    read_all: bool = False,
    progress: Progress | None = None,
) -> MemstatReport:
    """
    Read all struct pages of a kernel and count its pages by class.

    >>> report = collect_memstat(prog)
    >>> {count.name: count.pages for count in report.classes}["free.buddy"]
    222536

    Nothing is written, and nothing but *prog* is read. On a running kernel the
    pages change while they are read; each is counted as it was when it was read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: Description of the target; read from *prog* if not given.
    :param by: Breakdowns to add: ``"node"``, ``"zone"``, or any of
        :data:`msatools.memory.breakdowns.VIEWS`.
    :param sections: Whether to list the memory sections.
    :param workers: Number of processes that scan at the same time. If not given, one
        for each CPU on a dump, or fewer where more would not be faster, and one on a
        running kernel. QMP allows only one.
    :param unattributed: Whether to list the pages that no owner explains.
    :param leaks: Whether to list the memory that modules own.
    :param frag: Whether to report the pages that keep blocks of memory from being free.
    :param memory_map: Whether to make a map of memory.
    :param verbose: Whether to list the callers of vmalloc, and slab caches without
        slabs.
    :param read_all: Whether to read the struct pages inside large free blocks of a
        complete dump, too: they are free pages, unless damaged.
    :param progress: Called repeatedly with the pages done and the number of all pages.
    :raises MissingError: if the types lack what describes physical memory
    :raises TargetError: if the program is not a kernel, or has no types
    :raises ValueError: if several workers are requested over QMP
    """
    if (workers or 1) > 1 and not can_share(prog):
        raise ValueError(f"{workers} workers, and one at a time reads over QMP")
    target = target or describe(prog)
    reader, losses = Reader(prog), log_of(target)
    live = bool(prog.flags & drgn.ProgramFlags.IS_LIVE)
    with noting_refusals(prog, losses):
        layout = page_layout(prog)
        ranges = memmap_ranges(reader, layout, losses)
        nodes = online_nodes(prog, losses)
        populated = list(populated_zones(nodes))
        owners = collect_owners(reader, layout, ranges, losses)
        pcp = pcp_lists(reader, populated, losses)
        counters = read_counters(reader, nodes, pcp, losses)
        zones = {(zone.node, zone.number): zone for zone in populated}
        context = ScanContext(
            reader=reader,
            layout=layout,
            ranges=[part for part in ranges if part.state != "offline"],
            zones=zones,
            owners=owners,
            losses=losses,
            page_size=find_variable(prog, "PAGE_SIZE").value_(),
            read_all=read_all,
            verbose=verbose,
        )
        needed = dict.fromkeys((*by, *(("slab", "vmalloc") if leaks else ())))
        views = _views(needed, context) if needed else {}
        explains = unattributed or leaks
        unattributed_view = _unattributed_view(context) if explains else None
        frag_view = _frag_view(context) if frag else None
        map_view = _map_view(context) if memory_map else None
        sections_seen = _section_zones(prog) if sections else None
        requested = (*views.values(), unattributed_view, frag_view, map_view)
        observers = [view.observer for view in requested if view is not None]
        scan = scan_finally if observers else scan_and_settle
        if sections_seen is not None:
            observers.append(sections_seen)
        workers = workers or workers_by_default(prog, context.ranges)
        result, pcp = scan(context, pcp, observers, workers, progress)
        after = read_counters(reader, nodes, pcp, losses) if live else counters
        taken_at_ns = _now(reader, losses)
        groups = {
            name: views[name].groups()
            if name in views
            else _group(result, layout, name, zones)
            for name in needed
        }
        allocations = None if unattributed_view is None else unattributed_view.groups()
        found_leaks = None
        if leaks:
            kinds = groups["slab"], groups["vmalloc"], allocations or ()
            found_leaks = _leaks(*kinds, context.page_size)
        checks = make_checks(result, owners, counters, after, layout, losses)
        swap = read_swap(prog)
        cached = result.anon_swapcache + result.shmem_swapcache
        swap_use = read_swap_use(reader, swap, cached, losses)
    losses.lose(Loss.HEADS, count=result.heads_unreadable)
    _set_coverage(losses, reader, ranges, result)
    _note_losses(losses)
    if not result.pages():
        losses.note(
            "no-struct-pages",
            "no struct page is left: only the kernel's own counters are left",
        )
    if live and losses.coverage["excluded_pages"]:
        gone = losses.coverage["excluded_pages"]
        losses.note(
            "zero-pages",
            f"{gone:,} struct pages read as zeros: memory that went away meanwhile",
        )
    return MemstatReport(
        target=target,
        taken_at_ns=taken_at_ns,
        interval_ns=None,
        coverage={
            **{key: losses.coverage[key] for key in _COVERAGE},
            **losses.lost,
        },
        notes=tuple(losses.notes.values()),
        pages=result.pages(),
        classes=_classes(result, context.page_size),
        checks=checks,
        managed_pages=after.get("totalram_pages"),
        physical_pages=None
        if losses.lost[Loss.NODES.value]
        else sum(zone.present_pages for zone in populated),
        swap_pages=swap.pages,
        swap_free_pages=swap.free_pages,
        swap=swap_use,
        by={name: groups[name] for name in dict.fromkeys(by)} or None,
        unattributed=allocations if unattributed else None,
        leaks=found_leaks,
        frag=None if frag_view is None else frag_view.result(),
        map=None if map_view is None else map_view.result(),
        sections=None
        if sections_seen is None
        else _sections(context, ranges, sections_seen),
        vmalloc=_vmalloc_callers(reader, owners, losses) if verbose else None,
        scan_ns=result.scan_ns,
        changes=result.changes,
    )


# Few reports need the modules that these functions import, which takes 10 ms.


def _views(names: Iterable[str], context: ScanContext) -> "dict[str, View]":
    from msatools.memory.breakdowns import VIEWS, make_view

    return {name: make_view(name, context) for name in names if name in VIEWS}


def _section_zones(prog: drgn.Program) -> "SectionZones":
    from msatools.memory.breakdowns import SectionZones

    return SectionZones(pages_per_section(prog))


def _sections(
    context: ScanContext, ranges: list[MemmapRange], seen: "SectionZones"
) -> tuple[Section, ...]:
    from msatools.memory.breakdowns import list_sections

    return list_sections(context, ranges, seen)


def _vmalloc_callers(
    reader: Reader, owners: Owners, losses: LossLog
) -> tuple[VmallocCaller, ...]:
    from msatools.memory.by_module import vmalloc_callers

    return vmalloc_callers(reader, owners, losses)


def _leaks(
    slabs: Sequence[PageGroup],
    areas: Sequence[PageGroup],
    blocks: Sequence[UnattributedGroup],
    page_size: int,
) -> tuple[Leak, ...]:
    from msatools.memory.by_module import module_memory

    return module_memory(slabs, areas, blocks, page_size)


def _unattributed_view(context: ScanContext) -> "UnattributedView":
    from msatools.memory.unattributed import UnattributedView

    return UnattributedView(context)


def _frag_view(context: ScanContext) -> "FragView":
    from msatools.memory.fragmentation import FragView

    return FragView(context)


def _map_view(context: ScanContext) -> "MapView":
    from msatools.memory.map import MapView

    return MapView(context)


def delta(previous: MemstatReport, current: MemstatReport) -> MemstatReport:
    """Return the current report with the change of each class since the previous."""
    before = {count.name: count.pages for count in previous.classes}
    return replace(
        current,
        interval_ns=ns_between(previous, current),
        classes=tuple(
            replace(count, delta_pages=count.pages - before[count.name])
            for count in current.classes
        ),
    )


def _classes(result: ScanResult, page_size: int) -> tuple[ClassCount, ...]:
    totals = result.totals()
    return tuple(
        ClassCount(name, int(totals[code]), int(totals[code]) * page_size)
        for code, name in CLASSES.items()
    )


def _set_coverage(
    losses: LossLog, reader: Reader, ranges: list[MemmapRange], result: ScanResult
) -> None:
    totals = result.totals()
    losses.coverage["sections"] = len({part.section for part in ranges})
    losses.coverage["offline_pages"] = sum(
        part.pages for part in ranges if part.state == "offline"
    )
    losses.coverage["excluded_pages"] = int(totals[PageClass.EXCLUDED])
    losses.coverage["unreadable_pages"] = int(totals[PageClass.UNREADABLE])
    losses.coverage["reads"] = reader.reads
    losses.coverage["bytes_read"] = reader.bytes


def _note_losses(losses: LossLog) -> None:
    for key, what in _LOSSES.items():
        count = losses.coverage[key]
        if count:
            losses.note(key.replace("_", "-"), f"{count:,} {what}")


def _now(reader: Reader, losses: LossLog) -> int | None:
    # Reports on tasks use CLOCK_MONOTONIC: its offset makes the times comparable.
    monotonic_offset(reader, losses)
    try:
        with drgn_lookups:
            return int(ask(ktime_get_coarse_ns, reader.prog))
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.lose(Loss.CLOCKS, f"the time cannot be read: {error}", about="now")
        return None


_Zones = dict[tuple[int, int], Zone]
"""Zones by node and zone number."""


def _group(
    result: ScanResult, layout: PageLayout, by: str, zones: _Zones
) -> tuple[PageGroup, ...]:
    sums: dict[tuple[str, str], np.ndarray] = defaultdict(
        lambda: np.zeros(NCLASSES, np.int64)
    )
    for key in sorted(result.counts):
        sums[_label(key, layout, by, zones)] += result.counts[key]
    return tuple(
        PageGroup(
            key=label[0],
            name=label[1],
            pages=int(counts.sum()),
            classes={name: int(counts[code]) for code, name in CLASSES.items()},
        )
        for label, counts in sums.items()
        if counts.any()
    )


def _label(key: int, layout: PageLayout, by: str, zones: _Zones) -> tuple[str, str]:
    location = node_and_zone(key, layout)
    if location is None:
        return "-", "no struct page"
    node, zone = location
    if by == "node":
        return str(node), f"Node {node}"
    if location in zones:
        name = zones[location].name
    elif zone == layout.device_zone:
        name = DEVICE_ZONE
    else:
        # Struct pages of a hole at the end of memory (init_unavailable_range()).
        return f"{node}:-", f"Node {node}, in no zone"
    return f"{node}:{name}", f"Node {node}, zone {name}"


# --- Runs of msa-memstat: each report is of one moment.


class MemstatSession(Session[MemstatReport]):
    """A run of reports on one kernel.

    :param collect: Returns a report of the present use of memory.
    """

    def __init__(self, collect: Callable[[Progress], MemstatReport]) -> None:
        self._collect = collect

    def report(self, progress: Progress) -> MemstatReport:
        """Return a report of the present use of memory."""
        return self._collect(progress)

    def delta(self, previous: MemstatReport, current: MemstatReport) -> MemstatReport:
        """Return the current report with the change of each class."""
        return delta(previous, current)
