# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rows of memstat's tables: labels and order of the classes."""

from msgspec import Struct


class ClassRow(Struct, frozen=True):
    """A line of the table for one class."""

    name: str
    label: str
    counter: str = ""
    """Label of the counter that the class is checked against, if not its name."""

    always: bool = True
    """Whether the line is shown even without pages."""


GROUPS: tuple[tuple[str, tuple[ClassRow, ...]], ...] = (
    (
        "Free",
        (
            ClassRow("free.buddy", "buddy"),
            ClassRow("free.pcp", "per-CPU lists", "sum of pcp->count"),
            ClassRow("free.hugetlb", "hugetlb pool", always=False),
            ClassRow("free.unaccepted", "unaccepted", always=False),
        ),
    ),
    (
        "User",
        (
            ClassRow("user.anon", "anon"),
            ClassRow("user.ksm", "KSM", always=False),
            ClassRow(
                "user.hugetlb", "hugetlb", "nr_huge_pages, with free", always=False
            ),
        ),
    ),
    (
        "Cache",
        (
            ClassRow("cache.file", "file"),
            ClassRow("cache.exec", "exec and libs"),
            ClassRow("cache.shmem", "shmem"),
            ClassRow("cache.blockdev", "block devices", "Buffers"),
        ),
    ),
    (
        "Kernel",
        (
            ClassRow("kernel.slab", "slab", "NR_SLAB_*, with large kmalloc"),
            ClassRow("kernel.large_kmalloc", "large kmalloc"),
            ClassRow("kernel.page_tables", "page tables"),
            ClassRow("kernel.page_tables_own", "kernel's tables"),
            ClassRow("kernel.stacks", "stacks"),
            ClassRow("kernel.vmalloc", "vmalloc", "nr_vmalloc_pages, with stacks"),
            ClassRow("kernel.vmap", "mapped pages (vmap)", always=False),
            ClassRow("kernel.percpu", "percpu", "pcpu_nr_populated"),
            ClassRow("kernel.pipes", "pipe buffers", always=False),
            ClassRow("kernel.sockets", "socket buffers", always=False),
            ClassRow("kernel.rings", "rings (perf, io_uring, packets)", always=False),
            ClassRow("kernel.requests", "requests of disks", always=False),
            ClassRow("kernel.dma", "queues of devices", always=False),
            ClassRow("kernel.dmabuf", "dma-bufs", always=False),
            ClassRow("kernel.mempools", "memory pools", always=False),
            ClassRow("kernel.tracing", "tracing", always=False),
            ClassRow("kernel.globals", "hash tables", always=False),
            ClassRow("kernel.memmap", "memmap, hot-plugged", always=False),
            ClassRow("kernel.huge_zero", "huge zero page", always=False),
            ClassRow("kernel.zsmalloc", "zsmalloc", always=False),
            ClassRow("kernel.movable", "movable", always=False),
            ClassRow("kernel.unattributed", "unattributed"),
        ),
    ),
)

REST = (
    ClassRow("reserved", "Reserved"),
    ClassRow("offline", "Balloon"),
    ClassRow("hwpoison", "Hardware-poisoned", always=False),
    ClassRow("device", "Device memory", always=False),
    ClassRow("excluded", "Not in the dump", always=False),
    ClassRow("unreadable", "Unreadable", always=False),
)
