# SPDX-License-Identifier: LGPL-2.1-or-later

"""The scan, and what other structures than struct pages tell of the classes."""

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
    scene: ScanContext,
    pcp: PcpLists,
    observers: Sequence[Observer],
    workers: int,
    progress: Progress | None,
) -> tuple[ScanResult, PcpLists]:
    """Scan the memmap, then put the sums right by what other structures tell."""
    reader, findings = scene.reader, scene.findings
    links = free_links(reader, scene.layout, scene.ranges)
    result = _scan(scene, observers, None, workers, progress)
    if reader.is_live:
        pcp = pcp_lists(reader, list(scene.zones.values()), findings)
    _, broken = settle_pcp(result, pcp, links)
    _count_broken(broken, links, findings)
    settle_cache(reader, result, findings)
    settle_swapcache(reader, result, findings)
    return result, pcp


def scan_finally(
    scene: ScanContext,
    pcp: PcpLists,
    observers: Sequence[Observer],
    workers: int,
    progress: Progress | None,
) -> tuple[ScanResult, PcpLists]:
    """Scan the memmap so that observers see the classes that the table has."""
    reader, findings = scene.reader, scene.findings
    listed = listed_pages(reader, scene.layout, pcp)
    links = free_links(reader, scene.layout, scene.ranges)
    _count_broken(listed.broken, links, findings)
    finals = FinalClasses(reader, listed, links)
    result = _scan(scene, observers, finals, workers, progress)
    for losses in result.losses.values():
        findings.add(losses)
    if not finals.know_swap:
        settle_swapcache(reader, result, findings)
    if reader.is_live:
        pcp = pcp_lists(reader, list(scene.zones.values()), findings)
    return result, pcp


def _count_broken(broken: int, links: FreeLinks | None, findings: LossLog) -> None:
    """Count the lists that break off, of which links still tell most pages."""
    if links is None:
        findings.lose(Loss.PCP_LISTS_CUT, count=broken)
    else:
        findings.coverage["pcp_lists_changed"] += broken


def _scan(
    scene: ScanContext,
    observers: Sequence[Observer],
    finals: FinalClasses | None,
    workers: int,
    progress: Progress | None,
) -> ScanResult:
    """Scan the memmap; what it takes, and what changes meanwhile, is in the result."""
    watch = None
    if scene.reader.is_live:
        watch = Watch(scene.reader, scene.layout, scene.ranges, scene.findings)
        observers = (*observers, watch.sample)
    began_ns = time.monotonic_ns()
    scanned = scan_parts(
        scene.reader,
        scene.layout,
        scene.ranges,
        scene.owners.pages(),
        progress,
        observers,
        finals,
        workers,
    )
    scanned.result.scan_ns = time.monotonic_ns() - began_ns
    if watch is not None:
        scanned.result.changes = watch.end()
    scene.findings.coverage["memmap_reads"] = scanned.result.memmap_reads
    if scanned.redone:
        text = f"workers ended early, and {scanned.redone} parts of the memmap were "
        scene.findings.note("workers-ended", text + "scanned by one process alone")
    return scanned.result
