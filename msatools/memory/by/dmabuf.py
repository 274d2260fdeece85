# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts pages by the dma-buf that has or pins them (``--by dmabuf``)."""

import numpy as np
from msgspec import Struct, field

from msatools.memory.by.groups import (
    NO_OWNER,
    DmaBufGroup,
    PageGroup,
    largest_first,
    unique_keys,
)
from msatools.memory.by.tally import Tally, rank
from msatools.memory.owners.dmabufs import DmaBuf, dma_bufs
from msatools.memory.pages.classify import Block, Words
from msatools.memory.scan.context import ScanContext


class OwnedTally(Struct):
    """Counts pages by class and by the number of their owner, from 1 on."""

    pfns: Words
    """Pages of all owners, ascending and unique."""

    owners: Words
    """Number of the owner, by page."""

    tally: Tally = field(default_factory=Tally)

    def observe(self, block: Block) -> None:
        owners = np.zeros(len(block), np.uint64)
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.pfns, ends)
        owners[self.pfns[first:last] - np.uint64(block.pfn)] = self.owners[first:last]
        self.tally.add(owners, block.codes)

    def merge(self, later: "OwnedTally") -> None:
        self.tally.merge(later.tally)


class DmaBufView:
    """Dma-bufs by their pages; a page that several have is the first one's."""

    def __init__(self, context: ScanContext) -> None:
        reader, losses = context.reader, context.losses
        files = context.owners.files(reader, losses)
        self._buffers = dma_bufs(reader, context.layout, files, losses)
        parts = [np.empty(0, np.uint64), *(each.pages for each in self._buffers)]
        lengths = [len(buffer.pages) for buffer in self._buffers]
        numbers = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.uint64), lengths)
        pfns, first = np.unique(np.concatenate(parts), return_index=True)
        self.observer = OwnedTally(pfns, numbers[first])

    def groups(self) -> tuple[PageGroup, ...]:
        ranking = rank(self.observer.tally.sums(), len(self._buffers) + 1)
        by_number = {int(owner.word): owner for owner in ranking.owners}
        groups: list[PageGroup] = []
        if rest := by_number.get(0):
            groups.append(
                DmaBufGroup(NO_OWNER, "in no dma-buf", rest.pages, rest.classes)
            )
        for number, buffer in enumerate(self._buffers, 1):
            owner = by_number.get(number)
            pages, classes = (0, {}) if owner is None else (owner.pages, owner.classes)
            groups.append(_group(buffer, pages, classes))
        return largest_first(unique_keys(groups))


def _group(buffer: DmaBuf, pages: int, classes: dict[str, int]) -> DmaBufGroup:
    words = buffer.exporter, buffer.name
    return DmaBufGroup(
        key=str(buffer.inode),
        name=" ".join(word for word in words if word),
        pages=pages,
        classes=classes,
        exporter=buffer.exporter,
        size_bytes=buffer.bytes,
        references=buffer.references,
        label=buffer.name,
        dma_buf=buffer.address,
    )
