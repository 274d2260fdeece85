# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classes that depend on free lists are resolved during the scan."""

import numpy as np
import pytest
from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.memory.classes import PageClass, page_layout
from msatools.memory.classify import where
from msatools.memory.refine import FinalClasses, ListedPages
from msatools.memory.sums import ScanResult

from .madepages import Pages

PFN = 4096
PAGES = 2048


@pytest.mark.parametrize(("in_use", "found"), [(PAGES, 512), (1024, 512), (1023, 0)])
def test_huge_page_on_a_per_cpu_list(prog: Program, in_use: int, found: int) -> None:
    """A block on the list is free only if none of its pages is in use."""
    made = Pages(page_layout(prog), PAGES)
    made.put(slice(in_use), "refcount", 0)
    block = made.block(PFN)
    orphans = where(block.codes == PageClass.UNATTRIBUTED)
    orphans = orphans[block.references(orphans) == 0]
    assert len(orphans) == in_use
    listed = ListedPages(np.array([PFN + 512], np.uint64), np.array([9], np.uint8), 0)
    FinalClasses(Reader(prog), LossLog(), listed).settle(block, orphans)
    pages = where(block.codes == PageClass.FREE_PCP)
    assert pages.tolist() == [*range(512, 512 + found)]


def test_losses_of_parts_add_up_by_mapping() -> None:
    """Two parts have pages of one file: the second one's losses replace none."""
    first, second = ScanResult(), ScanResult()
    first.losses = {0x10: LossLog(), 0x20: LossLog()}
    first.losses[0x10].lose(Loss.TREES, count=2)
    first.losses[0x20].lose(Loss.INODES)
    second.losses = {0x10: LossLog()}
    second.losses[0x10].lose(Loss.INODES)
    first.merge(second)
    assert first.losses[0x10].lost == {Loss.TREES.value: 2, Loss.INODES.value: 1}
    assert first.losses[0x20].lost == {Loss.INODES.value: 1}
