# SPDX-License-Identifier: LGPL-2.1-or-later

"""The classes of physical pages: each page is in exactly one."""


class PageClass:
    """
    Codes of the classes in arrays of one byte a page.

    Plain integers, not an enum: numpy looks up an enum's attributes at each use, which
    took a twentieth of a scan.
    """

    UNATTRIBUTED = 0
    FREE_BUDDY = 1
    FREE_PCP = 2
    FREE_HUGETLB = 3
    FREE_UNACCEPTED = 4
    ANON = 5
    KSM = 6
    USER_HUGETLB = 7
    FILE = 8
    EXEC = 9
    SHMEM = 10
    BLOCKDEV = 11
    SLAB = 12
    LARGE_KMALLOC = 13
    PAGE_TABLES = 14
    PAGE_TABLES_OWN = 15
    STACKS = 16
    VMALLOC = 17
    PERCPU = 18
    PIPES = 19
    SOCKETS = 20
    HUGE_ZERO = 21
    ZSMALLOC = 22
    MOVABLE = 23
    RESERVED = 24
    OFFLINE = 25
    HWPOISON = 26
    DEVICE = 27
    MEMMAP = 28
    VMAP = 29
    RINGS = 30
    REQUESTS = 31
    MEMPOOLS = 32
    TRACING = 33
    GLOBALS = 34
    DMA = 35
    DMABUF = 36
    # The classes from here on have no struct page that records node and zone.
    EXCLUDED = 37
    UNREADABLE = 38


CLASSES: dict[int, str] = {
    PageClass.FREE_BUDDY: "free.buddy",
    PageClass.FREE_PCP: "free.pcp",
    PageClass.FREE_HUGETLB: "free.hugetlb",
    PageClass.FREE_UNACCEPTED: "free.unaccepted",
    PageClass.ANON: "user.anon",
    PageClass.KSM: "user.ksm",
    PageClass.USER_HUGETLB: "user.hugetlb",
    PageClass.FILE: "cache.file",
    PageClass.EXEC: "cache.exec",
    PageClass.SHMEM: "cache.shmem",
    PageClass.BLOCKDEV: "cache.blockdev",
    PageClass.SLAB: "kernel.slab",
    PageClass.LARGE_KMALLOC: "kernel.large_kmalloc",
    PageClass.PAGE_TABLES: "kernel.page_tables",
    PageClass.PAGE_TABLES_OWN: "kernel.page_tables_own",
    PageClass.STACKS: "kernel.stacks",
    PageClass.VMALLOC: "kernel.vmalloc",
    PageClass.VMAP: "kernel.vmap",
    PageClass.PERCPU: "kernel.percpu",
    PageClass.PIPES: "kernel.pipes",
    PageClass.SOCKETS: "kernel.sockets",
    PageClass.RINGS: "kernel.rings",
    PageClass.REQUESTS: "kernel.requests",
    PageClass.DMA: "kernel.dma",
    PageClass.DMABUF: "kernel.dmabuf",
    PageClass.MEMPOOLS: "kernel.mempools",
    PageClass.TRACING: "kernel.tracing",
    PageClass.GLOBALS: "kernel.globals",
    PageClass.MEMMAP: "kernel.memmap",
    PageClass.HUGE_ZERO: "kernel.huge_zero",
    PageClass.ZSMALLOC: "kernel.zsmalloc",
    PageClass.MOVABLE: "kernel.movable",
    PageClass.UNATTRIBUTED: "kernel.unattributed",
    PageClass.RESERVED: "reserved",
    PageClass.OFFLINE: "offline",
    PageClass.HWPOISON: "hwpoison",
    PageClass.DEVICE: "device",
    PageClass.EXCLUDED: "excluded",
    PageClass.UNREADABLE: "unreadable",
}
"""Maps class codes to their names in reports, in the order of reports."""

NCLASSES = max(CLASSES) + 1
"""Length of an array with an element for each class."""
