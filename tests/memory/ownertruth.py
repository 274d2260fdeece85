# SPDX-License-Identifier: LGPL-2.1-or-later

"""Figures of files, control groups and slabs that the owners guest recorded."""

import re
from typing import Any

from fixtures.lab import Run

from .truth import cached_pages

PAGE = 4096


def process(run: Run, name: str) -> dict[str, Any]:
    """Return the workload's record of one of its processes."""
    found: dict[str, Any]
    (found,) = (p for p in run.workload["processes"] if p["name"] == name)
    return found


def open_file_pages(run: Run, name: str) -> dict[str, int]:
    """Count the cached pages of each file that a process holds open."""
    holder = process(run, name)
    return {
        file: cached_pages(run, f"/proc/{holder['pid']}/fd/{descriptor}")
        for file, descriptor in holder["files"].items()
    }


def region_pages(run: Run, region: str) -> int:
    """Count the present pages of a region."""
    return sum(pfn is not None for pfn in run.pfns(region))


def files_by_path(run: Run) -> dict[str, int]:
    """Count the cached pages of each file whose mincore() was recorded."""
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
    """Return a control group's memory.stat: bytes, and counts of events."""
    text = run.truth(f"sys/fs/cgroup/{cgroup}/memory.stat").decode()
    return {name: int(value) for name, value in map(str.split, text.splitlines())}


def slabinfo(run: Run) -> dict[str, tuple[int, int, int, int]]:
    """Return for each cache: active objects, objects, slabs, pages per slab.

    /proc/slabinfo was read after everything else.
    """
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
    """Return for each caller: vmalloc areas with pages, and their pages."""
    found: dict[str, tuple[int, int]] = {}
    for line in run.truth("proc/vmallocinfo").decode().splitlines():
        match = re.match(r"\S+ +\d+ (\w+)[+.\w/]* .*\bpages=(\d+)", line)
        if match:
            areas, pages = found.get(match[1], (0, 0))
            found[match[1]] = areas + 1, pages + int(match[2])
    return found
