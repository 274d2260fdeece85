# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The break-downs of the classes by their names in ``--by``.

A view passes an observer to the scan, and makes groups of what the observer counted. It
may read the kernel before the scan, in its constructor, and after it, in ``groups()``.
Node and zone need no view: the scan itself counts by both.
"""

from importlib import import_module
from typing import Protocol, cast

from msatools.memory.by.groups import PageGroup
from msatools.memory.pages.observer import Observer
from msatools.memory.scan.context import ScanContext


class View(Protocol):
    """One break-down of the classes."""

    @property
    def observer(self) -> Observer:
        """The observer that the scan passes each block to; always the same object."""

    def groups(self) -> tuple[PageGroup, ...]:
        """Return the groups after the scan, the largest first."""


VIEWS = {
    "cgroup": "cgroup.CgroupView",
    "dmabuf": "dmabuf.DmaBufView",
    "file": "file.FileView",
    "fs": "file.FileSystemView",
    "order": "order.OrderView",
    "process": "process.ProcessView",
    "section": "section.SectionView",
    "slab": "slab.SlabView",
    "vmalloc": "vmalloc.VmallocView",
}
"""Maps a name to the class of its view: most reports have none, and need no import."""


def make_view(name: str, context: ScanContext) -> View:
    """Make the view of a name in :data:`VIEWS`."""
    module, _, view = VIEWS[name].partition(".")
    found = getattr(import_module(f"msatools.memory.by.{module}"), view)
    return cast(View, found(context))
