# SPDX-License-Identifier: LGPL-2.1-or-later

"""The break-downs of the classes that there are, by their names in ``--by``.

Those by node and zone are not here: the table itself is counted by both.
"""

from collections.abc import Callable

from msatools.memory.by.cgroup import CgroupView
from msatools.memory.by.file import FileSystemView, FileView
from msatools.memory.by.order import OrderView
from msatools.memory.by.process import ProcessView
from msatools.memory.by.section import SectionView
from msatools.memory.by.slab import SlabView
from msatools.memory.by.vmalloc import VmallocView
from msatools.memory.views import ScanContext, View

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
"""Each makes a view before the scan begins."""
