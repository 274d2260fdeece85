# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the guest of the owners scenario said of files, groups, slabs, as numbers."""

import re
from typing import Any

from fixtures.lab import Run

from .truth import cached_pages

PAGE = 4096


def process(run: Run, name: str) -> dict[str, Any]:
    """What the workload said of one of its processes."""
    found: dict[str, Any]
    (found,) = (p for p in run.workload["processes"] if p["name"] == name)
    return found


def open_file_pages(run: Run, name: str) -> dict[str, int]:
    """Count the cached pages of the files that a process holds, by their names."""
    holder = process(run, name)
    return {
        file: cached_pages(run, f"/proc/{holder['pid']}/fd/{descriptor}")
        for file, descriptor in holder["files"].items()
    }


def region_pages(run: Run, region: str) -> int:
    """Count the pages of a region that are there."""
    return sum(pfn is not None for pfn in run.pfns(region))


def files_by_path(run: Run) -> dict[str, int]:
    """Count the cached pages of all files that have a path, and that were asked for."""
    prefix = "mincore/"
    paths = (
        name.removeprefix("mincore")
        for name in run.truth_names()
        if name.startswith(prefix)
    )
    return {
        path: cached_pages(run, path)
        for path in paths
        if not path.startswith(("/dev/", "/proc/"))
    }


def memory_stat(run: Run, cgroup: str) -> dict[str, int]:
    """Read a group's memory.stat, as it is: bytes, and counts of events."""
    text = run.truth(f"sys/fs/cgroup/{cgroup}/memory.stat").decode()
    return {name: int(value) for name, value in map(str.split, text.splitlines())}


def slabinfo(run: Run) -> dict[str, tuple[int, int, int, int]]:
    """By cache: active objects, objects, slabs, pages a slab; read last of all."""
    found = {}
    for line in run.truth("last/slabinfo.again").decode().splitlines():
        match = re.match(
            r"(\S+) +(\d+) +(\d+) +\d+ +\d+ +(\d+) : .* : slabdata +\d+ +(\d+)", line
        )
        if match:
            name, active, objects, pages, slabs = match.groups()
            found[name] = int(active), int(objects), int(slabs), int(pages)
    assert found
    return found


def vmalloc_callers(run: Run) -> dict[str, tuple[int, int]]:
    """By caller: areas that have pages, and the pages of those."""
    found: dict[str, tuple[int, int]] = {}
    for line in run.truth("proc/vmallocinfo").decode().splitlines():
        match = re.match(r"\S+ +\d+ (\w+)[+.\w/]* .*\bpages=(\d+)", line)
        if match:
            areas, pages = found.get(match[1], (0, 0))
            found[match[1]] = areas + 1, pages + int(match[2])
    return found
