# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classes that depend on free lists are resolved during the scan."""

import numpy as np
import pytest
from drgn import Program

from msatools.kernel.reader import Reader
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
    """A block on the list is free only if none of its pages is in use."""
    made = Pages(page_layout(prog), PAGES)
    made.put(slice(in_use), "refcount", 0)
    block = made.block(PFN)
    orphans = where(block.codes == PageClass.UNATTRIBUTED)
    orphans = orphans[block.unreferenced(orphans)]
    assert len(orphans) == in_use
    listed = ListedPages(np.array([PFN + 512], np.uint64), np.array([9], np.uint8), 0)
    FinalClasses(Reader(prog), listed).settle(block, orphans)
    pages = where(block.codes == PageClass.FREE_PCP)
    assert pages.tolist() == [*range(512, 512 + found)]
