# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is read of a kernel's memory before its memmap is scanned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import drgn

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.zones import Zone
from msatools.memory.owners.owners import Owners
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange


@dataclass(frozen=True)
class ScanContext:
    """What the scan and its views share."""

    reader: Reader
    layout: PageLayout
    ranges: Sequence[MemmapRange]
    """Those that are scanned, in pfn order."""

    zones: Mapping[tuple[int, int], Zone]
    """The populated ones, by node and zone number."""

    owners: Owners
    losses: LossLog
    page_size: int
    verbose: bool = False
    """Whether views list what has no pages, too."""

    @property
    def prog(self) -> drgn.Program:
        return self.reader.prog
