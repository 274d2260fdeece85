# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make reports of memstat by hand."""

from collections.abc import Mapping
from typing import Any

from msatools.memory.model import Check, ClassCount, MemstatReport, PageGroup
from msatools.program.model import Target

PAGE = 4096
SECOND = 10**9

TARGET = Target(
    path="vmcore",
    kind="elf",
    live=False,
    release="6.12.1",
    arch="x86_64",
    page_size=PAGE,
    types="btf",
    dump_level=None,
    truncated=False,
    crash=None,
    format="ELF",
)


def check(name: str, walk: int, kernel: int, why: str | None = None) -> Check:
    return Check(name, walk, name.upper(), kernel, walk - kernel, why)


def report(
    pages: Mapping[str, int], page_size: int = PAGE, **more: Any
) -> MemstatReport:
    """Return a report with these numbers of pages by class."""
    counts = (ClassCount(n, count, count * page_size) for n, count in pages.items())
    made: dict[str, Any] = {
        "target": TARGET,
        "taken_at_ns": 100 * SECOND,
        "interval_ns": None,
        "coverage": {"excluded_pages": 0, "unreadable_pages": 0},
        "notes": (),
        "pages": sum(pages.values()),
        "classes": tuple(counts),
        "checks": (),
        "managed_pages": sum(pages.values()),
        "physical_pages": sum(pages.values()),
    }
    return MemstatReport(**made | more)


def group(key: str, name: str = "", **pages: int) -> PageGroup:
    """Return a group with these numbers of pages; class names have _ for the dot."""
    classes = {name.replace("_", ".", 1): count for name, count in pages.items()}
    return PageGroup(key, name or key, sum(classes.values()), classes)
