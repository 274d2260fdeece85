# SPDX-License-Identifier: LGPL-2.1-or-later

"""Scans the memmap: classifies all struct pages of some ranges."""

from collections.abc import Callable, Sequence

from msatools import native
from msatools.errors import UNREADABLE
from msatools.kernel.reader import Reader
from msatools.memory.owners.owners import OwnedPages
from msatools.memory.pages.bulk import BulkReader
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import FarHead, classify
from msatools.memory.pages.compiled import Compiled, compiled_classifier
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange, read_chunks
from msatools.memory.pages.observer import Observer
from msatools.memory.scan.result import ScanResult
from msatools.memory.scan.sums import Finals, add_block

_MAX_FAR_HEADS = 1 << 16

_CLASSIFIER = "msatools.classifier"
"""Key in the program's cache."""


def scan(
    reader: Reader,
    layout: PageLayout,
    ranges: Sequence[MemmapRange],
    owned: OwnedPages,
    progress: Callable[[int, int], None] | None = None,
    observers: Sequence[Observer] = (),
    finals: Finals | None = None,
    result: ScanResult | None = None,
) -> ScanResult:
    """
    Classify every struct page of the ranges.

    :param owned: Pages with known owners; these set the class of pages whose struct
        page has none.
    :param progress: Called with the pages done and their total.
    :param observers: Called with each block after it is classified.
    :param finals: Resolves the final classes before pages are counted and observed; the
        result then has no candidates and no mappings.
    :param result: Result of the ranges before: these are added to it.
    """
    total = sum(part.pages for part in ranges)
    done = 0
    before = reader.reads - (finals.reads if finals is not None else 0)
    far_heads = FarHeadReader(reader, layout)
    result = ScanResult() if result is None else result
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
        result.add_losses(finals.take_losses())
    return result


def prepare(reader: Reader, layout: PageLayout) -> None:
    """Make the caches that all parts of a scan share, before workers are forked."""
    BulkReader.of(reader)
    _compiled(reader, layout)


def _compiled(reader: Reader, layout: PageLayout) -> Compiled | None:
    if not native.is_wanted():
        return None
    # Cached: making it takes as long as scanning some blocks, and a scan may have many
    # parts, and a program many scans.
    cache = reader.prog.cache
    cached: tuple[PageLayout, Compiled | None] | None = cache.get(_CLASSIFIER)
    if cached is None or cached[0] is not layout:
        cached = cache[_CLASSIFIER] = layout, compiled_classifier(layout)
    return cached[1]


class FarHeadReader:
    """Reads heads of compound pages that begin in an earlier block."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        self._reader = reader
        self._layout = layout
        self._known: dict[int, FarHead] = {}
        self.unreadable = 0

    def __call__(self, address: int) -> FarHead:
        head = self._known.get(address)
        if head is None:
            # Real heads are few; a damaged dump may have one for each page.
            if len(self._known) >= _MAX_FAR_HEADS:
                self.unreadable += 1
                return FarHead(PageClass.UNATTRIBUTED, 0)
            head = self._known[address] = self._read(address)
        return head

    def _read(self, address: int) -> FarHead:
        try:
            data = self._reader.read(address, 2 * self._layout.size)
        except UNREADABLE:
            self.unreadable += 1
            return FarHead(PageClass.UNATTRIBUTED, 0)
        # If damage makes this head a tail of another one, that is not followed.
        block = classify(data, 0, address, self._layout, _no_further)
        return FarHead(int(block.codes[0]), int(block.mapping[0]))


def _no_further(address: int) -> FarHead:
    return FarHead(PageClass.UNATTRIBUTED, 0)
