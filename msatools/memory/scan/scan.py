# SPDX-License-Identifier: LGPL-2.1-or-later

"""One pass over the memmap."""

from collections.abc import Callable, Sequence

import drgn

from msatools.kernel.reader import Reader
from msatools.memory.owners.owners import OwnedPages
from msatools.memory.pages.bulk import BulkReader
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import FarHead, classify
from msatools.memory.pages.compiled import Compiled, compiled_classifier, is_wanted
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange, read_chunks
from msatools.memory.pages.observer import Observer
from msatools.memory.scan.result import ScanResult
from msatools.memory.scan.sums import Finals, add_block

_MAX_FAR_HEADS = 1 << 16

_CLASSIFIER = "msatools.classifier"
"""Key of the program's cache."""


def scan(
    reader: Reader,
    layout: PageLayout,
    ranges: Sequence[MemmapRange],
    owned: OwnedPages,
    progress: Callable[[int, int], None] | None = None,
    observers: Sequence[Observer] = (),
    finals: Finals | None = None,
    found: ScanResult | None = None,
) -> ScanResult:
    """
    Classify every struct page of the ranges.

    :param owned: Pages to give an owner's class where their struct page tells
        none.
    :param progress: Called with pages done and pages in all.
    :param observers: Observers of each block once it is classified.
    :param finals: What makes the classes final before they are counted and looked
        at; the result then has no candidates and no mappings.
    :param found: What was found before these ranges: it is added to, and returned.
    """
    total = sum(part.pages for part in ranges)
    done = 0
    before = reader.reads - (finals.reads if finals is not None else 0)
    far_heads = _FarHeads(reader, layout)
    result = ScanResult() if found is None else found
    compiled = _compiled(reader, layout)
    for chunk in read_chunks(reader, layout, ranges):
        block = (compiled.classify if compiled else classify)(
            chunk.data, chunk.pfn, chunk.address, layout, far_heads, chunk.gaps
        )
        add_block(result, block, owned, finals, compiled)
        for observer in observers:
            observer.observe(block)
        done += len(block)
        if progress is not None:
            progress(done, total)
    result.heads_unreadable += far_heads.unreadable
    result.memmap_reads += reader.reads - before
    if finals is not None:
        result.memmap_reads -= finals.reads
        # What is lost of one inode is lost for its pages anywhere.
        result.losses.update(finals.take_losses())
    return result


def prepare(reader: Reader, layout: PageLayout) -> None:
    """Make what all parts of a scan need, before other processes have it as well."""
    BulkReader.of(reader)
    _compiled(reader, layout)


def _compiled(reader: Reader, layout: PageLayout) -> Compiled | None:
    if not is_wanted():
        return None
    # It takes as long to make as some blocks do, and its memory as long to get; a scan
    # may have many parts, and a program many scans.
    cache = reader.prog.cache
    known: tuple[PageLayout, Compiled | None] | None = cache.get(_CLASSIFIER)
    if known is None or known[0] is not layout:
        known = cache[_CLASSIFIER] = layout, compiled_classifier(layout)
    return known[1]


class _FarHeads:
    """Reads the heads of compound pages that began in an earlier block."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        self._reader = reader
        self._layout = layout
        self._known: dict[int, FarHead] = {}
        self.unreadable = 0

    def __call__(self, address: int) -> FarHead:
        head = self._known.get(address)
        if head is None:
            # Each large compound page has one; garbage has one a page.
            if len(self._known) >= _MAX_FAR_HEADS:
                self.unreadable += 1
                return FarHead(PageClass.UNATTRIBUTED, 0)
            head = self._known[address] = self._read(address)
        return head

    def _read(self, address: int) -> FarHead:
        try:
            data = self._reader.read(address, 2 * self._layout.size)
        except drgn.FaultError:
            self.unreadable += 1
            return FarHead(PageClass.UNATTRIBUTED, 0)
        # Should the damage be such that this head names a head of its own, the
        # search ends here.
        block = classify(data, 0, address, self._layout, _no_further)
        return FarHead(int(block.codes[0]), int(block.mapping[0]))


def _no_further(address: int) -> FarHead:
    return FarHead(PageClass.UNATTRIBUTED, 0)
