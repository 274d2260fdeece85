# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-memstat counts, and /proc/vmstat, /proc/zoneinfo and /proc/meminfo."""

from typing import Any

from fixtures.lab import Run
from tests.memory import truth
from tests.truth.fact import Fact, Figures


def classes(report: Any, *names: str) -> int:
    """Sum the pages of classes."""
    pages = {one["name"]: one["pages"] for one in report["classes"]}
    return sum(pages[name] for name in names)


def counted(name: str, classes_of: tuple[str, ...], *counters: str) -> Fact:
    """Make the fact that classes have as many pages as counters of /proc/vmstat."""

    def recorded(run: Run) -> Figures:
        said = truth.vmstat(run)
        return {name: sum(said[counter] for counter in counters)}

    return Fact(
        name=f"{name} pages",
        reported=lambda report: {name: classes(report, *classes_of)},
        recorded=recorded,
        tolerance=truth.held_back,
        cause="a CPU keeps its part of a counter from /proc/vmstat up to a threshold",
    )


FACTS = (
    Fact(
        name="pages on per-CPU lists",
        reported=lambda report: {"pages": classes(report, "free.pcp")},
        recorded=lambda run: {"pages": truth.pcp_pages(run)},
    ),
    counted("free", ("free.buddy",), "nr_free_pages"),
    counted(
        "slab",
        ("kernel.slab", "kernel.large_kmalloc"),
        *("nr_slab_reclaimable", "nr_slab_unreclaimable"),
    ),
    counted("page table", ("kernel.page_tables",), "nr_page_table_pages"),
)
