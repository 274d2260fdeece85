# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs the scan, and refines the classes by other structures than struct page."""

import time
from collections.abc import Sequence

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.session import Progress
from msatools.memory.pages.freelinks import FreeLinks, free_links
from msatools.memory.pages.observer import Observer
from msatools.memory.scan.context import ScanContext
from msatools.memory.scan.drift import Watch
from msatools.memory.scan.freelists import PcpLists, listed_pages, pcp_lists, settle_pcp
from msatools.memory.scan.live_classes import FinalClasses
from msatools.memory.scan.pagecache import settle_cache
from msatools.memory.scan.parallel import scan_parts
from msatools.memory.scan.result import ScanResult
from msatools.memory.scan.swapcache import settle_swapcache


def scan_and_settle(
    context: ScanContext,
    pcp: PcpLists,
    observers: Sequence[Observer],
    workers: int,
    progress: Progress | None,
) -> tuple[ScanResult, PcpLists]:
    """Scan the memmap, then correct the sums by other structures."""
    reader, losses = context.reader, context.losses
    links = free_links(reader, context.layout, context.ranges)
    result = _scan(context, observers, None, workers, progress)
    if reader.is_live:
        pcp = pcp_lists(reader, list(context.zones.values()), losses)
    _, broken = settle_pcp(result, pcp, links)
    _count_broken(broken, links, losses)
    settle_cache(reader, result, losses)
    settle_swapcache(reader, result, losses)
    return result, pcp


def scan_finally(
    context: ScanContext,
    pcp: PcpLists,
    observers: Sequence[Observer],
    workers: int,
    progress: Progress | None,
) -> tuple[ScanResult, PcpLists]:
    """Scan the memmap so that observers get the final classes."""
    reader, losses = context.reader, context.losses
    listed = listed_pages(reader, context.layout, pcp)
    links = free_links(reader, context.layout, context.ranges)
    _count_broken(listed.broken, links, losses)
    finals = FinalClasses(reader, losses, listed, links)
    result = _scan(context, observers, finals, workers, progress)
    for inode_losses in result.losses.values():
        losses.add(inode_losses)
    if not finals.know_swap:
        settle_swapcache(reader, result, losses)
    if reader.is_live:
        pcp = pcp_lists(reader, list(context.zones.values()), losses)
    return result, pcp


def _count_broken(broken: int, links: FreeLinks | None, losses: LossLog) -> None:
    """Count broken lists; links still identify most of their pages on a live kernel."""
    if links is None:
        losses.lose(Loss.PCP_LISTS_CUT, count=broken)
    else:
        losses.coverage["pcp_lists_changed"] += broken


def _scan(
    context: ScanContext,
    observers: Sequence[Observer],
    finals: FinalClasses | None,
    workers: int,
    progress: Progress | None,
) -> ScanResult:
    """Scan the memmap; the result includes the time and the changes meanwhile."""
    watch = None
    if context.reader.is_live:
        watch = Watch(context.reader, context.layout, context.ranges, context.losses)
        observers = (*observers, watch.sample)
    began_ns = time.monotonic_ns()
    scanned = scan_parts(
        context.reader,
        context.layout,
        context.ranges,
        context.owners.pages(),
        progress,
        observers,
        finals,
        workers,
    )
    scanned.result.scan_ns = time.monotonic_ns() - began_ns
    if watch is not None:
        scanned.result.changes = watch.end()
    context.losses.coverage["memmap_reads"] = scanned.result.memmap_reads
    if scanned.redone:
        text = f"workers ended early, and {scanned.redone} parts of the memmap were "
        context.losses.note("workers-ended", text + "scanned by one process alone")
    return scanned.result
