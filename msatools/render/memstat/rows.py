# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rows of memstat's tables: what the classes are called, and their order."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table for one class."""

    name: str
    label: str
    counter: str = ""
    """What to call the counter of the check of the same name, if not its name."""

    always: bool = True
    """Whether the line is there without pages, too."""


GROUPS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "Free",
        (
            Row("free.buddy", "buddy"),
            Row("free.pcp", "per-CPU lists", "sum of pcp->count"),
            Row("free.hugetlb", "hugetlb pool", always=False),
            Row("free.unaccepted", "unaccepted", always=False),
        ),
    ),
    (
        "User",
        (
            Row("user.anon", "anon"),
            Row("user.ksm", "KSM", always=False),
            Row("user.hugetlb", "hugetlb", "nr_huge_pages, with free", always=False),
        ),
    ),
    (
        "Cache",
        (
            Row("cache.file", "file"),
            Row("cache.exec", "exec and libs"),
            Row("cache.shmem", "shmem"),
            Row("cache.blockdev", "block devices", "Buffers"),
        ),
    ),
    (
        "Kernel",
        (
            Row("kernel.slab", "slab", "NR_SLAB_*, with large kmalloc"),
            Row("kernel.large_kmalloc", "large kmalloc"),
            Row("kernel.page_tables", "page tables"),
            Row("kernel.page_tables_own", "page tables, own"),
            Row("kernel.stacks", "stacks"),
            Row("kernel.vmalloc", "vmalloc", "nr_vmalloc_pages, with stacks"),
            Row("kernel.percpu", "percpu", "pcpu_nr_populated"),
            Row("kernel.pipes", "pipe buffers", always=False),
            Row("kernel.sockets", "socket buffers", always=False),
            Row("kernel.memmap", "memmap, hot-plugged", always=False),
            Row("kernel.huge_zero", "huge zero page", always=False),
            Row("kernel.zsmalloc", "zsmalloc", always=False),
            Row("kernel.movable", "movable", always=False),
            Row("kernel.unattributed", "unattributed"),
        ),
    ),
)

REST = (
    Row("reserved", "Reserved"),
    Row("offline", "Balloon"),
    Row("hwpoison", "Hardware-poisoned", always=False),
    Row("device", "Device memory", always=False),
    Row("excluded", "Not in the dump", always=False),
    Row("unreadable", "Unreadable", always=False),
)
