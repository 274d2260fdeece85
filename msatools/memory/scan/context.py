# SPDX-License-Identifier: LGPL-2.1-or-later

"""The data that is read before the memmap is scanned."""

from collections.abc import Mapping, Sequence

import drgn
from msgspec import Struct

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.zones import Zone
from msatools.memory.owners.owners import Owners
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange


class ScanContext(Struct, frozen=True):
    """Data that the scan and its views share."""

    reader: Reader
    layout: PageLayout
    ranges: Sequence[MemmapRange]
    """Ranges to scan, in pfn order."""

    zones: Mapping[tuple[int, int], Zone]
    """Populated zones by node and zone number."""

    owners: Owners
    losses: LossLog
    page_size: int
    verbose: bool = False
    """Whether views list what has no pages, too."""

    @property
    def prog(self) -> drgn.Program:
        return self.reader.prog
