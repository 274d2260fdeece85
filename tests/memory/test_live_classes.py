# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classes that others than the struct page tell, where it is made by hand."""

import numpy as np
import pytest
from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import where
from msatools.memory.pages.layout import page_layout
from msatools.memory.scan.freelists import ListedPages
from msatools.memory.scan.live_classes import FinalClasses

from .madepages import Pages

PFN = 4096
PAGES = 2048


@pytest.mark.parametrize(("in_use", "found"), [(PAGES, 512), (1024, 512), (1023, 0)])
def test_huge_page_on_a_per_cpu_list(prog: Program, in_use: int, found: int) -> None:
    """All of it is free; one of which a page is in use is none."""
    made = Pages(page_layout(prog), PAGES)
    made.put(slice(in_use), "refcount", 0)
    block = made.block(PFN)
    orphans = where(block.codes == PageClass.UNATTRIBUTED)
    orphans = orphans[block.unreferenced(orphans)]
    assert len(orphans) == in_use
    listed = ListedPages(np.array([PFN + 512], np.uint64), np.array([9], np.uint8), 0)
    FinalClasses(Reader(prog), LossLog(), listed).settle(block, orphans)
    pages = where(block.codes == PageClass.FREE_PCP)
    assert pages.tolist() == [*range(512, 512 + found)]
