# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory that reclaim cannot free, by what it is and whose it is."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.memory.by.groups import SlabGroup
from msatools.memory.model import MemstatReport
from msatools.report.parts import ReportParts
from msatools.reports.units import size

SHOWN = 4


class Kind(Struct, frozen=True):
    """Memory of one kind."""

    name: str
    pages: int
    is_kernel: bool
    """Whether the kernel has it, and not processes."""

    view: tuple[str, ...] = ()
    """Options of msa-memstat that show whose it is."""


_MORE, _BARE = ("-v",), ("--unattributed",)
_KERNEL: dict[str, tuple[str, tuple[str, ...]]] = {
    "kernel.page_tables": ("page tables", ("--by", "process")),
    "kernel.stacks": ("kernel stacks", _MORE),
    "kernel.vmalloc": ("vmalloc", ("--by", "vmalloc")),
    "kernel.vmap": ("pages mapped by vmap", ("--by", "vmalloc")),
    "kernel.rings": ("rings of perf, io_uring and packets", _MORE),
    "kernel.requests": ("requests of disks", _MORE),
    "kernel.dma": ("queues of devices", _MORE),
    "kernel.dmabuf": ("dma-bufs", ("--by", "dmabuf")),
    "kernel.mempools": ("memory pools", _MORE),
    "kernel.tracing": ("tracing", _MORE),
    "kernel.globals": ("hash tables", _MORE),
    "kernel.percpu": ("per-CPU memory", _MORE),
    "kernel.large_kmalloc": ("large kmalloc", _BARE),
    "kernel.unattributed": (
        "pages that no owner explains (a driver's, or a leak)",
        _BARE,
    ),
}
"""Classes of memory, none of which can be reclaimed: the name of each, and options of
msa-memstat that show whose it is."""


def unreclaimable(parts: ReportParts) -> list[Kind]:
    """Return what reclaim cannot free, the largest first; empty if unknown."""
    memory, memstat = parts.memory, parts.memstat
    if memory is None or memstat is None:
        return []
    classes = {each.name: each.pages for each in memstat.classes}
    has_swap = bool(memory.swap_free_pages)
    locked = memory.sum("NR_MLOCK") or 0
    kinds = [Kind("locked (mlock)", locked, False)]
    if not has_swap:
        # What is locked is mostly anonymous, else shared; no page counts twice.
        anon, shmem = classes.get("user.anon", 0), classes.get("cache.shmem", 0)
        shmem -= min(max(locked - anon, 0), shmem)
        anon -= min(locked, anon)
        kinds.append(Kind("anonymous, without swap", anon, False))
        kinds.append(Kind("tmpfs and shared memory, without swap", shmem, False))
    slab = memory.slab("NR_SLAB_UNRECLAIMABLE")
    name = f"unreclaimable slab{_largest_cache(parts)}"
    kinds.append(Kind(name, slab or 0, True, ("--by", "slab")))
    huge = classes.get("user.hugetlb", 0) + classes.get("free.hugetlb", 0)
    kinds.append(Kind("hugetlb pool", huge, False))
    kinds += (
        Kind(text, classes.get(name, 0), True, view)
        for name, (text, view) in _KERNEL.items()
    )
    return sorted((each for each in kinds if each.pages), key=lambda each: -each.pages)


def slab_groups(report: MemstatReport | None) -> dict[int, SlabGroup]:
    """Return the caches that a report has, by the address of each."""
    by = (report.by if report else None) or {}
    groups = (group for group in by.get("slab", ()) if isinstance(group, SlabGroup))
    return {group.kmem_cache: group for group in groups if group.kmem_cache is not None}


def _largest_cache(parts: ReportParts) -> str:
    caches = (
        group
        for address, group in slab_groups(parts.memstat).items()
        if address not in parts.reclaimable_caches
    )
    largest = max(caches, key=lambda group: group.pages, default=None)
    if largest is None:
        return ""
    amount = size(largest.pages * parts.target.page_size)
    return f" (of which {largest.name} {amount})"


def kinds_text(parts: ReportParts) -> Iterator[str]:
    """Yield lines on the largest kinds, with who has it."""
    kinds = unreclaimable(parts)
    if not kinds:
        return
    page = parts.target.page_size
    text = "; ".join(f"{size(k.pages * page)} {k.name}" for k in kinds[:SHOWN])
    yield f"reclaim cannot free: {text}"
    if parts.prstat is not None:
        tasks = parts.prstat.tasks
        largest = sorted(tasks, key=lambda task: -(task.rss_bytes or 0))
        named = (
            f"pid {task.pid} {task.comm} {size(task.rss_bytes or 0)}"
            for task in largest[:3]
            if task.rss_bytes
        )
        if text := ", ".join(named):
            yield f"largest processes: {text}"
