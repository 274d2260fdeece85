# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the guest said of its own memory, as numbers."""

import re

import numpy as np
import numpy.typing as npt
from drgn import Program
from drgn.helpers.linux.vmstat import (
    global_node_page_state,
    global_zone_page_state,
)

from fixtures.lab import Run
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.vmstat import vm_counters
from msatools.kernel.zones import online_nodes

# linux/kernel-page-flags.h and fs/proc/page.c.
KPF = {
    "UPTODATE": 3,
    "DIRTY": 4,
    "LRU": 5,
    "ACTIVE": 6,
    "SLAB": 7,
    "WRITEBACK": 8,
    "RECLAIM": 9,
    "BUDDY": 10,
    "ANON": 12,
    "SWAPCACHE": 13,
    "SWAPBACKED": 14,
    "COMPOUND_HEAD": 15,
    "COMPOUND_TAIL": 16,
    "HUGE": 17,
    "UNEVICTABLE": 18,
    "HWPOISON": 19,
    "NOPAGE": 20,
    "KSM": 21,
    "OFFLINE": 23,
    "PGTABLE": 26,
    "RESERVED": 32,
    "MLOCKED": 33,
}


def page_flags(run: Run) -> npt.NDArray[np.uint64]:
    """/proc/kpageflags: one word a pfn."""
    return np.frombuffer(run.truth("proc/kpageflags"), np.uint64)


def having(flags: npt.NDArray[np.uint64], name: str) -> npt.NDArray[np.bool_]:
    """Tell which pages have the flag KPF_*name*."""
    return flags >> np.uint64(KPF[name]) & np.uint64(1) != 0


_COUNTERS = {
    "nr_free_pages": "NR_FREE_PAGES",
    "nr_anon_pages": "NR_ANON_MAPPED",
    "nr_file_pages": "NR_FILE_PAGES",
    "nr_shmem": "NR_SHMEM",
    "nr_swapcached": "NR_SWAPCACHE",
    "nr_slab_reclaimable": "NR_SLAB_RECLAIMABLE_B",
    "nr_slab_unreclaimable": "NR_SLAB_UNRECLAIMABLE_B",
    "nr_page_table_pages": "NR_PAGETABLE",
    "nr_kernel_stack": "NR_KERNEL_STACK_KB",
}


def vmstat(run: Run, prog: Program) -> dict[str, int]:
    """
    /proc/vmstat, with what CPUs had not yet added to the counters.

    The file shows the sums alone; each must be the one in the dump, to the page.
    """
    lines = run.truth("proc/vmstat").decode().splitlines()
    said = {name: int(value) for name, value in map(str.split, lines)}
    findings = Findings()
    nodes = online_nodes(prog, findings)
    whole = vm_counters(Reader(prog), nodes, findings)
    found = {}
    for name, counter in _COUNTERS.items():
        try:
            alone = global_node_page_state(prog, prog.constant(counter))
            if counter not in dict(prog.type("enum node_stat_item").enumerators):
                alone = global_zone_page_state(prog, prog.constant(counter))
        except LookupError:
            continue
        assert said[name] == alone, name
        value = whole[counter]
        assert value is not None
        found[name] = value
    return found


def meminfo_pages(run: Run, name: str) -> int:
    match = re.search(rf"^{name}: +(\d+) kB", run.truth("proc/meminfo").decode(), re.M)
    assert match, name
    return int(match[1]) // 4


def pcp_pages(run: Run) -> int:
    """Sum the pages on all zones' per-CPU lists."""
    text = run.truth("proc/zoneinfo").decode()
    return sum(map(int, re.findall(r"cpu: \d+\n +count: +(\d+)", text)))


def zone_sum(run: Run, field: str) -> int:
    """Sum a field of /proc/zoneinfo, such as ``managed``, over all zones."""
    text = run.truth("proc/zoneinfo").decode()
    return sum(map(int, re.findall(rf"^ +{field} +(\d+)$", text, re.M)))


def hugetlb_pages(run: Run, field: str) -> int:
    """Sum a file of /sys/kernel/mm/hugepages over all sizes, in base pages."""
    total = 0
    for name in run.truth_names():
        match = re.fullmatch(
            rf"sys/kernel/mm/hugepages/hugepages-(\d+)kB/{field}", name
        )
        if match:
            total += int(run.truth(name)) * int(match[1]) // 4
    return total


def cached_pages(run: Run, path: str) -> int:
    """Count the pages of a file in the page cache."""
    return sum(byte & 1 for byte in run.truth(f"mincore{path}"))


def executed_files(run: Run) -> set[str]:
    """Name every file that some process mapped executable."""
    found: set[str] = set()
    for name in run.truth_names():
        if re.fullmatch(r"proc/\d+/maps", name):
            text = run.truth(name).decode()
            found |= set(re.findall(r"^\S+ ..x. .* (/\S+)$", text, re.M))
    return found
