# SPDX-License-Identifier: LGPL-2.1-or-later

"""Figures of its own memory that a guest recorded."""

import re

from fixtures.lab import Run
from fixtures.lab.pageflags import having, page_flags

__all__ = ["having", "page_flags"]


def page_kib(run: Run) -> int:
    """Return the size of a page in KiB."""
    return 16 if run.kernel.kernel.flavour.endswith("-16k") else 4


def vmstat(run: Run) -> dict[str, int]:
    lines = run.truth("proc/vmstat").decode().splitlines()
    return {name: int(value) for name, value in map(str.split, lines)}


def held_back(run: Run) -> int:
    """
    Return the maximum error of a counter in /proc/vmstat, in pages.

    A CPU adds its part to the counter only above a threshold, which /proc/zoneinfo has
    for each CPU and zone.
    """
    text = run.truth("proc/zoneinfo").decode()
    return sum(map(int, re.findall(r"vm stats threshold: (\d+)", text)))


def meminfo_pages(run: Run, name: str) -> int:
    match = re.search(rf"^{name}: +(\d+) kB", run.truth("proc/meminfo").decode(), re.M)
    if match is None:
        raise LookupError(f"/proc/meminfo has no {name}")
    return int(match[1]) // page_kib(run)


def recorded_processes(run: Run) -> list[int]:
    """Return the processes whose smaps_rollup was recorded."""
    names = "\n".join(run.truth_names())
    return [int(pid) for pid in re.findall(r"^proc/(\d+)/smaps_rollup$", names, re.M)]


def kib(run: Run, pid: int, file: str) -> dict[str, int]:
    """Return the sizes in KiB in a file of a process."""
    text = run.truth(f"proc/{pid}/{file}").decode(errors="replace")
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)
    return {name: int(value) for name, value in lines}


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
            total += int(run.truth(name)) * int(match[1]) // page_kib(run)
    return total


def cached_pages(run: Run, path: str) -> int:
    """Count the pages of a file in the page cache."""
    return sum(byte & 1 for byte in run.truth(f"mincore{path}"))


def executed_files(run: Run) -> set[str]:
    """Return the files that processes mapped executable."""
    found: set[str] = set()
    for name in run.truth_names():
        if re.fullmatch(r"proc/\d+/maps", name):
            text = run.truth(name).decode()
            found |= set(re.findall(r"^\S+ ..x. .* (/\S+)$", text, re.M))
    return found
