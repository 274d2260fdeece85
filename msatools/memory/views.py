# SPDX-License-Identifier: LGPL-2.1-or-later

"""
What a break-down of the classes (``--by``) is made of.

A view gives the scan an observer, and makes groups of what that saw. It may read the
kernel before the scan, when it is made, and after it, in ``groups()``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import drgn

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.zones import Zone
from msatools.memory.layout import PageLayout
from msatools.memory.memmap import MemmapRange
from msatools.memory.model import PageGroup
from msatools.memory.observer import Observer
from msatools.memory.owners import Owners

__all__ = ["Observer", "ScanContext", "View"]


@dataclass(frozen=True)
class ScanContext:
    """What is known of a kernel's memory before its memmap is scanned."""

    reader: Reader
    layout: PageLayout
    ranges: Sequence[MemmapRange]
    """Those that are scanned, in pfn order."""

    zones: Mapping[tuple[int, int], Zone]
    """The populated ones, by node and zone number."""

    owners: Owners
    findings: LossLog
    page_size: int

    @property
    def prog(self) -> drgn.Program:
        return self.reader.prog


class View(Protocol):
    """One break-down of the classes."""

    @property
    def observer(self) -> Observer:
        """Who is to look on; the same each time."""

    def groups(self) -> tuple[PageGroup, ...]:
        """Give the groups once the scan is done, the largest first."""
