# SPDX-License-Identifier: LGPL-2.1-or-later

"""What /proc/vmstat of a running kernel counts, and memstat counts as well."""

import re
from typing import Any

COUNTED = {
    "free": (("free.buddy", "free.pcp"), ("nr_free_pages", "pcp")),
    "anon": (("user.anon", "user.ksm"), ("nr_anon_pages",)),
    "cache": (
        ("cache.file", "cache.exec", "cache.shmem", "cache.blockdev"),
        ("nr_file_pages",),
    ),
    "shmem": (("cache.shmem",), ("nr_shmem",)),
    "slab": (
        ("kernel.slab", "kernel.large_kmalloc"),
        ("nr_slab_reclaimable", "nr_slab_unreclaimable"),
    ),
    "page tables": (("kernel.page_tables",), ("nr_page_table_pages",)),
    "stacks": (("kernel.stacks",), ("nr_kernel_stack",)),
}
"""Classes, and what the kernel calls their pages. Pages go from the buddy allocator to
per-CPU lists and back by the hundred, without being used in between."""

HUGE_PAGES = 512
"""In one that khugepaged makes."""

CACHED_STACKS = 2 * 2 * 4
"""Two of four pages for each of two CPUs are kept for the next threads, and in no
counter."""

_PAGE_KB = 4


def counters(vmstat: str, zoneinfo: str) -> dict[str, int]:
    """Read the counters of /proc/vmstat in pages, and ``pcp``, pages on per-CPU lists.

    These are in no counter of /proc/vmstat.
    """
    pairs = (line.split() for line in vmstat.splitlines())
    values = {name: int(value) for name, value in pairs}
    values["nr_kernel_stack"] //= _PAGE_KB
    lists = re.findall(r"^ +count: +(\d+)$", zoneinfo, re.MULTILINE)
    values["pcp"] = sum(map(int, lists))
    return values


def held_back(zoneinfo: str) -> int:
    """Return how many pages a counter in /proc/vmstat may be off.

    A CPU passes on what it has counted only above a threshold, which depends on the
    zone (at most 125).
    """
    return sum(map(int, re.findall(r"vm stats threshold: (\d+)", zoneinfo)))


def counted(report: dict[str, Any], name: str) -> int:
    """Return what a report of msa-memstat has of the classes that are counted.

    A huge page of which a part was unmapped is kept, and reported, as a whole until
    memory is scarce; NR_ANON_MAPPED has no more than is mapped of it.
    """
    if name == "anon":
        (check,) = [each for each in report["checks"] if each["name"] == "user.anon"]
        return int(check["walk_pages"])
    classes, _ = COUNTED[name]
    return sum(each["pages"] for each in report["classes"] if each["name"] in classes)
