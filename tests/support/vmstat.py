# SPDX-License-Identifier: LGPL-2.1-or-later

"""Compare memstat's classes with the counters in /proc/vmstat."""

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
"""Name -> classes, and the kernel's counters of the same pages.

Pages on per-CPU lists are included in "free": they move between these and the buddy
allocator by the hundred without being allocated."""

HUGE_PAGES = 512
"""Pages in a huge page that khugepaged makes."""

CACHED_STACKS = 2 * 2 * 4
"""Pages of cached stacks, which no counter includes: two stacks of four pages for each
of two CPUs."""

_PAGE_KB = 4


def counters(vmstat: str, zoneinfo: str) -> dict[str, int]:
    """Return the counters of /proc/vmstat in pages, and ``pcp``.

    ``pcp`` is the number of pages on per-CPU lists, which /proc/vmstat does not count.
    """
    pairs = (line.split() for line in vmstat.splitlines())
    values = {name: int(value) for name, value in pairs}
    values["nr_kernel_stack"] //= _PAGE_KB
    lists = re.findall(r"^ +count: +(\d+)$", zoneinfo, re.MULTILINE)
    values["pcp"] = sum(map(int, lists))
    return values


def held_back(zoneinfo: str) -> int:
    """Return the maximum error of a counter in /proc/vmstat, in pages.

    A CPU adds its difference to the counter only above a threshold, which depends on
    the zone (at most 125).
    """
    return sum(map(int, re.findall(r"vm stats threshold: (\d+)", zoneinfo)))


def counted(report: dict[str, Any], name: str) -> int:
    """Return the pages of *name* in a report of msa-memstat.

    A partially unmapped huge page stays allocated, and is reported as a whole, until
    memory is scarce; NR_ANON_MAPPED counts only its mapped pages.
    """
    if name == "anon":
        (check,) = [c for c in report["checks"] if c["name"] == "user.anon"]
        return int(check["walk_pages"])
    classes, _ = COUNTED[name]
    return sum(c["pages"] for c in report["classes"] if c["name"] in classes)
