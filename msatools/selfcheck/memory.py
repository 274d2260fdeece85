# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of msa-memstat: its sums, and those of its breakdowns, against counters."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.nodemask import for_each_online_node
from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.kernel.reader import distinct
from msatools.kernel.report import LossLog
from msatools.kernel.slab import slab_caches
from msatools.kernel.structs import read_structs
from msatools.memory.model import CgroupGroup, FileGroup, ProcessGroup, SlabGroup
from msatools.selfcheck.model import Comparison
from msatools.selfcheck.selfcheck import ReportSet
from msatools.selfdesc.find import ask_each, drgn_lookups, find_variable

_UNATTRIBUTED_SHARE = 200
"""One of so many managed pages may be unattributed: 0.5 %."""

_BOOT_BYTES = 16 << 20
"""Memory that a kernel takes at boot, on machines of any size, for tables of ftrace or
requests of block devices (blk_mq_alloc_rqs()): 3 to 16 MiB in guests of 2 to 8 CPUs. It
is the greater of the two limits on machines of less than 3 GiB."""

_ARGUMENT_BYTES = 6 << 20
"""The most that the arguments of an execve() take: three quarters of ``_STK_LIM``
(fs/exec.c, prepare_arg_pages())."""

_MAX_STOCK_PAGES = 64
"""Pages that a CPU may have charged ahead (``MEMCG_CHARGE_BATCH``)."""


def counters(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the scan's sums with the kernel's counters, as msa-memstat does."""
    for check in reports.memstat.checks:
        difference = check.difference if check.explained_by is not None else 0
        yield Comparison(
            name=f"memstat.{check.name}",
            left="pages by the scan",
            right=check.counter,
            left_value=check.walk_pages,
            right_value=check.kernel_pages,
            least=min(difference or 0, 0),
            most=max(difference or 0, 0),
            reason=check.explained_by,
            lost="the counter could not be read",
        )


def classes(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the sum of the classes with the pages examined."""
    report = reports.memstat
    yield Comparison(
        name="memory.classes",
        left="pages of all classes",
        right="struct pages examined",
        left_value=sum(each.pages for each in report.classes),
        right_value=report.pages,
    )


def breakdowns(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the sums of each breakdown with the classes."""
    report = reports.memstat
    scanned = {each.name: each.pages for each in report.classes if each.pages}
    for by, groups in (report.by or {}).items():
        sums: Counter[str] = Counter()
        for group in groups:
            sums.update(group.classes)
        differ = {name for name in {*scanned, *sums} if sums[name] != scanned.get(name)}
        differ -= {name for name in differ if not sums[name] and name not in scanned}
        yield Comparison(
            name=f"memory.by-{by}",
            left=f"classes with another sum by {by}",
            right="none",
            left_value=len(differ),
            right_value=0,
        )


def unattributed(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the pages that no owner explains with what is usual."""
    report = reports.memstat
    pages = {each.name: each.pages for each in report.classes}
    managed, page_size = report.managed_pages, report.target.page_size
    yield Comparison(
        name="memory.unattributed",
        left="pages without a known owner",
        right="none",
        left_value=pages["kernel.unattributed"],
        right_value=0 if managed is not None else None,
        most=max((managed or 0) // _UNATTRIBUTED_SHARE, _BOOT_BYTES // page_size)
        + _page_ext_pages(reports),
        reason="drivers' own pages: 0.5 % of managed memory, or what they take at "
        "boot on a small machine: 16 MiB; and struct page_ext, if the kernel has it",
        lost="the number of managed pages could not be read",
    )


def _page_ext_pages(reports: ReportSet) -> int:
    """Return the pages that tables of struct page_ext take (mm/page_ext.c).

    Each section has a table, for the data that debugging options add to each page.
    """
    try:
        size = find_variable(reports.prog, "page_ext_size").value_()
    except MissingError:
        return 0
    return int(size) * reports.memstat.pages // reports.target.page_size


def _mapping(reports: ReportSet) -> list[ProcessGroup]:
    groups = (reports.memstat.by or {}).get("process", ())
    return [g for g in groups if isinstance(g, ProcessGroup) and g.pid is not None]


def _argument_pages(reports: ReportSet) -> int:
    """Return the most pages that hold arguments of an execve() under way.

    They are in an address space that no task has yet, and count for that of the caller
    (fs/exec.c, acct_arg_size()).
    """
    callers = sum(
        len(stack.pids)
        for stack in reports.prstat.stacks or ()
        if any(frame.startswith("do_execveat_common") for frame in stack.frames)
    )
    return callers * (_ARGUMENT_BYTES // reports.target.page_size)


_ARGUMENTS = "arguments of programs that are being executed: in no process yet"


def resident(reports: ReportSet) -> Iterator[Comparison]:
    """Compare pages that page tables map with ``mm_struct.rss_stat``, of processes."""
    base = Comparison(
        name="memory.resident",
        left="pages that the page tables of processes map",
        right="sum of their counters of resident pages",
    )
    groups = _mapping(reports)
    if not groups:
        yield replace(base, absent="page tables of processes are not read here")
        return
    rows = {task.pid: task.rss_bytes for task in reports.prstat.tasks}
    page_size = reports.target.page_size
    pairs = [
        (group.rss_pages, rss // page_size)
        for group in groups
        if group.rss_pages is not None
        and group.pid is not None
        and (rss := rows.get(group.pid)) is not None
    ]
    yield replace(
        base,
        left_value=sum(mapped for mapped, _ in pairs) if pairs else None,
        right_value=sum(counted for _, counted in pairs) if pairs else None,
        least=-_argument_pages(reports),
        reason=_ARGUMENTS,
        lost="no process has both",
    )


def anonymous(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the processes' shares of anonymous pages with those that are mapped."""
    base = Comparison(
        name="memory.anon",
        left="anonymous pages, by the processes that map them",
        right="mapped anonymous pages of the scan",
    )
    groups = _mapping(reports)
    checks = {check.name: check for check in reports.memstat.checks}
    if not groups:
        yield replace(base, absent="page tables of processes are not read here")
        return
    if any(group.rss_pages is None for group in groups):
        yield replace(base, lost="some page tables could not be read")
        return
    if "user.anon" not in checks:
        yield replace(base, absent="the kernel does not count them")
        return
    kinds = ("user.anon", "user.ksm")
    yield replace(
        base,
        left_value=sum(g.classes.get(kind, 0) for g in groups for kind in kinds),
        right_value=checks["user.anon"].walk_pages,
        least=-_argument_pages(reports),
        reason=_ARGUMENTS,
    )


def slabs(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the slabs of the scan, and their objects, with the caches' counters."""
    groups = [
        group
        for group in (reports.memstat.by or {})["slab"]
        if isinstance(group, SlabGroup) and group.kmem_cache is not None
    ]
    counted = _slab_counters(reports, [group.kmem_cache for group in groups])
    for what in ("slabs", "objects"):
        found = [getattr(group, what) for group in groups]
        known = bool(counted) and None not in found
        yield Comparison(
            name=f"memory.{what}",
            left=f"{what} of all caches by the scan",
            right=f"sum of the caches' own counts of {what}",
            left_value=sum(found) if known else None,
            right_value=counted.get(what),
            absent=None if known else "this kernel's caches do not count them",
        )


def _slab_counters(reports: ReportSet, known: Iterable[int | None]) -> dict[str, int]:
    """
    Sum the counts of all caches on all nodes.

    mm/slub.c, with CONFIG_SLUB_DEBUG: inc_slabs_node().

    :param known: Caches that the scan found; those of the kernel's list are added.
    :return: Sums of ``slabs`` and ``objects``; empty if they are not kept.
    :raises drgn.FaultError: if some of them cannot be read
    """
    reader, losses = reports.reader, LossLog()
    nodes = {
        # The member was renamed when sheaves got a pointer beside it (in v7.1).
        str(node): (f"per_node[{node}].node", f"node[{node}]")
        for node in ask_each(for_each_online_node, reports.prog)
    }
    listed = (cache.address for cache in slab_caches(reader, losses))
    at = np.array(sorted({*listed, *filter(None, known)}), np.uint64)
    found = read_structs(reader, "struct kmem_cache", nodes, at, losses)
    columns = [column.astype(np.uint64) for column in found.columns.values()]
    if not columns:
        return {}
    pointers = np.concatenate(columns)
    # A node without memory has none (slab_nodes in mm/slub.c).
    pointers = pointers[pointers != 0]
    members = {"slabs": ("nr_slabs",), "objects": ("total_objects",)}
    counts = read_structs(reader, "struct kmem_cache_node", members, pointers, losses)
    if not (counts.has("slabs") and counts.has("objects")):
        return {}
    for address in pointers[~counts.readable].tolist():
        # Read it again to raise the error, which states why.
        reader.read(address, 1)
    return {what: int(counts[what].sum()) for what in members}


def files(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the page cache of each file with the count of its mapping."""
    groups = [
        group
        for group in (reports.memstat.by or {})["file"]
        # Up to v6.5 a huge page of hugetlbfs counted as one.
        if isinstance(group, FileGroup)
        and group.mapping is not None
        and group.kind != "hugetlbfs"
    ]
    at = np.array([group.mapping for group in groups], np.uint64)
    read = read_structs(
        reports.reader,
        "struct address_space",
        {"pages": ("nrpages",)},
        at,
        reports.losses,
    )
    yield Comparison(
        name="memory.files",
        left="pages of the page cache, by file",
        right="sum of the files' own counts (nrpages)",
        left_value=sum(group.pages for group in groups),
        right_value=int(read["pages"].sum()) if read.has("pages") else None,
        absent=None if read.has("pages") else "files do not count their pages",
    )


def control_groups(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the pages charged to control groups with the root's own count."""
    base = Comparison(
        name="memory.cgroups",
        left="pages charged to control groups below the root",
        right="pages that the root counts",
    )
    try:
        with drgn_lookups:
            root = find_variable(reports.prog, "root_mem_cgroup")
            usage = root.memory.usage.counter.value_()
    except MissingError:
        yield replace(base, absent="the kernel has no control groups for memory")
        return
    groups = [
        group
        for group in (reports.memstat.by or {})["cgroup"]
        if isinstance(group, CgroupGroup)
    ]
    address = root.value_()
    below = (g.pages for g in groups if g.mem_cgroup not in (None, address))
    pages = {each.name: each.pages for each in reports.memstat.classes}
    ahead = (
        pages["kernel.slab"]
        + pages["kernel.percpu"]
        + _MAX_STOCK_PAGES * len(reports.percpu.cpus)
    )
    yield replace(
        base,
        left_value=sum(below),
        right_value=usage,
        least=-ahead,
        reason="objects of slabs and per-CPU memory are charged by the byte, and CPUs "
        "charge up to 64 pages ahead",
        absent=None if usage else "no hierarchy of control groups is in use",
    )


def page_tables(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the page tables of the scan with the counters of address spaces."""
    mms: npt.NDArray[np.uint64] = distinct(reports.tasks["mm"].astype(np.uint64))
    members = {"bytes": ("pgtables_bytes",)}
    read = read_structs(
        reports.reader, "struct mm_struct", members, mms[mms != 0], reports.losses
    )
    pages = {each.name: each.pages for each in reports.memstat.classes}
    known = read.has("bytes")
    size = reports.target.page_size
    yield Comparison(
        name="memory.page-tables",
        left="pages of page tables by the scan",
        right="page tables that address spaces count",
        left_value=pages["kernel.page_tables"] + pages["kernel.page_tables_own"],
        right_value=int(read["bytes"].sum()) // size if known else None,
        most=None,
        reason="the kernel's own and top-level tables count for no address space",
        absent=None if known else "address spaces do not count them",
    )


CHECKS = (
    counters,
    classes,
    breakdowns,
    unattributed,
    resident,
    anonymous,
    slabs,
    files,
    control_groups,
    page_tables,
)
