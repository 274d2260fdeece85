# SPDX-License-Identifier: LGPL-2.1-or-later

"""memstat on real dumps agrees with the guest's own records."""

from collections.abc import Callable

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.structs import Booleans
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from tests.support.dumps import open_dump

from . import truth
from .conftest import FLAGS, PagesByPfn
from .sums import summed, view

Pages = dict[str, int]


def test_classes_sum_to_the_pages_examined(report: MemstatReport, pages: Pages) -> None:
    assert list(pages) == list(CLASSES.values())
    assert sum(pages.values()) == report.pages
    for name in ("node", "zone"):
        assert summed(view(report, name)) == pages
    assert report.coverage["excluded_pages"] == 0
    assert report.coverage["unreadable_pages"] == 0
    assert report.notes == ()


def test_every_check_is_exact_or_explained(report: MemstatReport) -> None:
    assert len(report.checks) >= 15
    assert [c for c in report.checks if c.difference and not c.explained_by] == []
    # On a dump at rest, only these two can differ.
    differing = {check.name for check in report.checks if check.difference}
    assert differing <= {"kernel.stacks", "kernel.percpu"}


def test_pipes_and_sockets(run: lab.Run, pages: Pages) -> None:
    slab = next(p for p in run.workload["processes"] if p["name"] == "slab")
    assert pages["kernel.pipes"] == slab["pipe_pages"] > 0
    assert pages["kernel.sockets"] > 0


def test_little_is_unattributed(report: MemstatReport, pages: Pages) -> None:
    assert report.managed_pages is not None
    assert pages["kernel.unattributed"] <= 0.005 * report.managed_pages


@pytest.fixture
def recorded(run: lab.Run, by_pfn: PagesByPfn) -> Callable[[str], Booleans]:
    """A function that returns whether each existing page had a flag in kpageflags."""
    flags = truth.page_flags(run)[: len(by_pfn.codes)]
    exists = by_pfn.codes != 255
    return lambda flag: truth.having(flags, flag)[exists]


@pytest.mark.parametrize(
    ("flag", "classes"),
    [
        ("BUDDY", [PageClass.FREE_BUDDY]),
        ("SLAB", [PageClass.SLAB]),
        ("PGTABLE", [PageClass.PAGE_TABLES]),
        ("OFFLINE", [PageClass.OFFLINE]),
        ("HWPOISON", [PageClass.HWPOISON]),
        ("HUGE", [PageClass.USER_HUGETLB, PageClass.FREE_HUGETLB]),
    ],
)
def test_class_of_each_pfn(
    recorded: Callable[[str], Booleans],
    by_pfn: PagesByPfn,
    flag: str,
    classes: list[PageClass],
) -> None:
    codes = by_pfn.codes[by_pfn.codes != 255]
    assert np.array_equal(np.isin(codes, classes), recorded(flag))


def test_anon_of_each_pfn(run: lab.Run, by_pfn: PagesByPfn) -> None:
    """hugetlb pages are not anon; pages of swap readahead are anon or shmem."""
    flags = truth.page_flags(run)[: len(by_pfn.codes)]
    anon = np.isin(by_pfn.codes, [PageClass.ANON, PageClass.KSM])
    recorded = truth.having(flags, "ANON") & ~truth.having(flags, "HUGE")
    # Since v6.10 the kernel derives ANON from the mapping word alone, which has
    # another meaning in slab pages.
    recorded &= ~truth.having(flags, "SLAB")
    assert not np.any(recorded & ~anon)
    extra = anon & ~recorded
    heads = by_pfn.heads[extra]
    assert np.all(truth.having(flags, "SWAPCACHE")[heads])


@pytest.mark.parametrize("name", FLAGS)
def test_flag_of_each_pfn(
    run: lab.Run, recorded: Callable[[str], Booleans], by_pfn: PagesByPfn, name: str
) -> None:
    # Up to v6.9 kpageflags has the page's own flags, later its folio's.
    mine = by_pfn.flags[name]
    if not run.release.startswith("6.1."):
        mine = mine[by_pfn.heads]
    assert np.array_equal(mine[by_pfn.codes != 255], recorded(name.upper()))


def test_two_reads_per_section(report: MemstatReport) -> None:
    assert report.coverage["memmap_reads"] == 2 * report.coverage["sections"]


@pytest.mark.parametrize("name", ["memory-6.12debug", "memory-6.12small"])
def test_stacks_that_are_not_mapped(name: str) -> None:
    """Without CONFIG_VMAP_STACK they are in the direct map, in no area of vmalloc."""
    report = collect_memstat(open_dump(name, "btf" if "debug" in name else "dwarf"))
    checks = {check.name: check for check in report.checks}
    assert checks["kernel.stacks"].walk_pages > 100
    assert checks["kernel.stacks"].difference == 0
    assert checks["kernel.vmalloc"].difference == 0
