# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The break-downs of the classes by their names in ``--by``.

A view passes an observer to the scan, and makes groups of what the observer counted. It
may read the kernel before the scan, in its constructor, and after it, in ``groups()``.
Node and zone need no view: the scan itself counts by both.
"""

from collections.abc import Callable
from typing import Protocol

from msatools.memory.by.cgroup import CgroupView
from msatools.memory.by.file import FileSystemView, FileView
from msatools.memory.by.groups import PageGroup
from msatools.memory.by.order import OrderView
from msatools.memory.by.process import ProcessView
from msatools.memory.by.section import SectionView
from msatools.memory.by.slab import SlabView
from msatools.memory.by.vmalloc import VmallocView
from msatools.memory.pages.observer import Observer
from msatools.memory.scan.context import ScanContext


class View(Protocol):
    """One break-down of the classes."""

    @property
    def observer(self) -> Observer:
        """The observer that the scan passes each block to; always the same object."""

    def groups(self) -> tuple[PageGroup, ...]:
        """Return the groups after the scan, the largest first."""


VIEWS: dict[str, Callable[[ScanContext], View]] = {
    "file": FileView,
    "fs": FileSystemView,
    "order": OrderView,
    "process": ProcessView,
    "section": SectionView,
    "cgroup": CgroupView,
    "slab": SlabView,
    "vmalloc": VmallocView,
}
"""Maps a name to the constructor of its view."""
