# SPDX-License-Identifier: LGPL-2.1-or-later

"""What memory was full of when it ran out, by the kernel's log. Pure.

Of the machine: mm/show_mem.c, show_free_areas(). Of a control group: mm/memcontrol.c,
mem_cgroup_print_oom_meminfo(), whose lines are those of memory.stat.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

ANON, SHMEM, FILE = "anonymous", "tmpfs and shared memory", "page cache"
SLAB, TABLES, STACKS = "slab", "page tables", "kernel stacks"
HUGETLB, FREE = "hugetlb", "free"
OTHER = "in no counter (drivers, vmalloc)"

_KIB = 1024
_COUNT = re.compile(r"([a-z_]+)(?:\((\w+)\))?:(\d{1,18})(kB)?(?=\s|$)")
_NODE = re.compile(r"Node \d{1,4} active_anon:")
_HUGE = re.compile(
    r"(?:Node \d{1,4} )?hugepages_total=(\d{1,12}) .*hugepages_size=(\d{1,12})kB"
)
_TOTAL = re.compile(r"(\d{1,15}) pages (RAM|reserved)")
_STAT = re.compile(r"([a-z_0-9]+) (\d{1,18})")
_OF_GROUP = {
    # Version 1 has other names for the first two.
    "anon": ANON,
    "rss": ANON,
    "shmem": SHMEM,
    "slab": SLAB,
    "pagetables": TABLES,
    "kernel_stack": STACKS,
    "percpu": "per-CPU memory",
    "sock": "sockets",
    "vmalloc": "vmalloc",
}
_TOTAL_OF = "total_"
_WITH_SHMEM = ("file", "cache")
"""Names of a group's page cache, which has the files of tmpfs in it."""

Filled = Mapping[str, int]
"""Bytes of each kind of memory, the largest first; empty if the log does not say."""


def group_filled(lines: Iterable[str]) -> Filled:
    """Return what a control group's memory was, by the lines after its name."""
    stat = {
        found[1]: int(found[2]) for line in lines if (found := _STAT.fullmatch(line))
    }
    # Of version 1, these are with the groups below it.
    totals = {
        name.removeprefix(_TOTAL_OF): value
        for name, value in stat.items()
        if name.startswith(_TOTAL_OF)
    }
    stat |= totals
    kinds = {kind: stat[name] for name, kind in _OF_GROUP.items() if name in stat}
    for name in _WITH_SHMEM:
        if name in stat:
            kinds[FILE] = max(stat[name] - kinds.get(SHMEM, 0), 0)
    return _ranked(kinds)


def machine_filled(lines: Iterable[str], page_size: int) -> Filled:
    """Return what the machine's memory was, by the lines after ``Mem-Info:``."""
    pages: dict[str, int] = {}
    kib: dict[str, int] = {}
    huge = 0
    for line in lines:
        if found := _HUGE.match(line):
            huge += int(found[1]) * int(found[2]) * _KIB
        elif _NODE.match(line):
            for name, count in _counts(line, in_kib=True):
                kib[name] = kib.get(name, 0) + count
        elif found := _TOTAL.fullmatch(line):
            pages[found[2]] = int(found[1])
        elif line.startswith(("active_anon:", " ")):
            pages.update(_counts(line, in_kib=False))
    if "active_anon" not in pages:
        return {}

    def of(*names: str) -> int:
        return sum(pages.get(name, 0) for name in names) * page_size

    shmem = of("shmem")
    lists = of("active_anon", "inactive_anon", "isolated_anon", "unevictable")
    kinds = {
        # The pages of tmpfs are on the lists of anonymous ones, and what is locked of
        # either is on one of its own.
        ANON: max(lists - shmem, 0),
        SHMEM: shmem,
        FILE: of("active_file", "inactive_file", "isolated_file"),
        SLAB: of("slab_reclaimable", "slab_unreclaimable"),
        TABLES: of("pagetables"),
        STACKS: kib.get("kernel_stack", 0) * _KIB,
        HUGETLB: huge,
        FREE: of("free", "free_pcp"),
    }
    kinds[OTHER] = max(of("RAM") - of("reserved") - sum(kinds.values()), 0)
    return _ranked(kinds)


def _counts(line: str, in_kib: bool) -> Iterator[tuple[str, int]]:
    for name, _, count, unit in _COUNT.findall(line):
        if bool(unit) == in_kib:
            yield name, int(count)


def _ranked(kinds: Mapping[str, int]) -> Filled:
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    return {kind: amount for kind, amount in ranked if amount}
