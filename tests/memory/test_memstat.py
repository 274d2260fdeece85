# SPDX-License-Identifier: LGPL-2.1-or-later

"""memstat on real dumps, held against what the guest said of itself."""

import re
from pathlib import Path

import numpy as np
import pytest

from fixtures import lab
from msatools import kernel, memory
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.model import MemstatReport

from . import truth
from .conftest import PagesByPfn

Pages = dict[str, int]


def test_classes_sum_to_the_pages_examined(report: MemstatReport, pages: Pages) -> None:
    assert list(pages) == list(CLASSES.values())
    assert sum(pages.values()) == report.pages
    assert report.by is not None
    for groups in report.by.values():
        for name, count in pages.items():
            assert sum(group.classes[name] for group in groups) == count
    assert report.coverage["excluded_pages"] == 0
    assert report.coverage["unreadable_pages"] == 0
    assert report.notes == ()


def test_every_check_is_exact_or_explained(report: MemstatReport) -> None:
    assert len(report.checks) >= 15
    assert [c for c in report.checks if c.difference and not c.explained_by] == []
    # On a dump at rest nothing but these two has a reason to differ.
    differing = {check.name for check in report.checks if check.difference}
    assert differing <= {"kernel.stacks", "kernel.percpu"}


# Free pages and slab are held against each pfn's flags further down, exactly.
# /proc/vmstat shows counters without what CPUs hold back of them; a guest at rest
# mostly holds nothing back, and never more than the thresholds it names.


def test_free_pages(run: lab.Run, pages: Pages) -> None:
    flags = truth.page_flags(run)
    assert pages["free.buddy"] == np.count_nonzero(truth.having(flags, "BUDDY"))
    said = truth.vmstat(run)["nr_free_pages"]
    assert abs(pages["free.buddy"] - said) <= truth.held_back(run)
    assert pages["free.pcp"] == truth.pcp_pages(run)


def test_user_pages(run: lab.Run, report: MemstatReport, pages: Pages) -> None:
    check = next(check for check in report.checks if check.name == "user.anon")
    said = truth.vmstat(run)["nr_anon_pages"]
    assert abs(check.walk_pages - said) <= truth.held_back(run)
    assert pages["user.ksm"] == int(run.truth("sys/kernel/mm/ksm/pages_shared")) > 0


def test_hugetlb_pages(run: lab.Run, pages: Pages) -> None:
    free = truth.hugetlb_pages(run, "free_hugepages")
    assert pages["free.hugetlb"] == free > 0
    used = truth.hugetlb_pages(run, "nr_hugepages") - free
    assert pages["user.hugetlb"] == used > 0


def test_cache_pages(run: lab.Run, report: MemstatReport, pages: Pages) -> None:
    checks = {check.name: check.walk_pages for check in report.checks}
    said = truth.vmstat(run)["nr_file_pages"]
    assert abs(checks["cache"] - said) <= truth.held_back(run)
    assert pages["cache.blockdev"] == truth.meminfo_pages(run, "Buffers") > 4000
    executed = truth.executed_files(run) | {"/lab/truth"}
    assert pages["cache.exec"] == sum(truth.cached_pages(run, f) for f in executed)
    files = set(run.workload["files"]) - executed
    assert pages["cache.file"] >= sum(truth.cached_pages(run, f) for f in files)


def test_shmem_pages(run: lab.Run, report: MemstatReport, pages: Pages) -> None:
    vmstat, held_back = truth.vmstat(run), truth.held_back(run)
    checks = {check.name: check.walk_pages for check in report.checks}
    assert abs(checks["cache.shmem"] - vmstat["nr_shmem"]) <= held_back
    assert abs(checks["swapcache"] - vmstat["nr_swapcached"]) <= held_back
    assert vmstat["nr_swapcached"] > held_back
    assert pages["cache.shmem"] > vmstat["nr_shmem"] + held_back, "some is in swap"


def test_kernel_pages(run: lab.Run, report: MemstatReport, pages: Pages) -> None:
    vmstat, held_back = truth.vmstat(run), truth.held_back(run)
    slab = vmstat["nr_slab_reclaimable"] + vmstat["nr_slab_unreclaimable"]
    mine = pages["kernel.slab"] + pages["kernel.large_kmalloc"]
    assert abs(mine - slab) <= 2 * held_back
    flags = truth.page_flags(run)
    tables = np.count_nonzero(truth.having(flags, "PGTABLE"))
    assert pages["kernel.page_tables"] == tables > 0
    assert abs(tables - vmstat["nr_page_table_pages"]) <= held_back
    checks = {check.name: check for check in report.checks}
    stacks = checks["kernel.stacks"].kernel_pages
    assert stacks is not None
    # This one is held back in KiB.
    assert abs(stacks * 4 - vmstat["nr_kernel_stack"]) <= held_back
    assert checks["kernel.percpu"].kernel_pages == truth.meminfo_pages(run, "Percpu")
    vmalloc = pages["kernel.vmalloc"] + pages["kernel.stacks"]
    assert vmalloc == truth.meminfo_pages(run, "VmallocUsed")


def test_vmalloc_callers_equal_vmallocinfo(run: lab.Run, report: MemstatReport) -> None:
    expected: dict[str, int] = {}
    for line in run.truth("proc/vmallocinfo").decode().splitlines():
        match = re.match(r"\S+ +\d+ (\w+)[+.\w/]* .*\bpages=(\d+)", line)
        if match:
            expected[match[1]] = expected.get(match[1], 0) + int(match[2])
    assert report.vmalloc is not None
    assert {caller.caller: caller.pages for caller in report.vmalloc} == expected


def test_pipes_and_sockets(run: lab.Run, pages: Pages) -> None:
    slab = next(p for p in run.workload["processes"] if p["name"] == "slab")
    assert pages["kernel.pipes"] == slab["pipe_pages"] > 0
    assert pages["kernel.sockets"] > 0


def test_reserved_and_managed(
    run: lab.Run, report: MemstatReport, pages: Pages
) -> None:
    managed = truth.zone_sum(run, "managed")
    assert report.managed_pages == managed == truth.meminfo_pages(run, "MemTotal")
    assert report.physical_pages == truth.zone_sum(run, "present")
    assert pages["reserved"] == report.pages - managed


def test_little_is_unattributed(report: MemstatReport, pages: Pages) -> None:
    assert report.managed_pages is not None
    assert pages["kernel.unattributed"] <= 0.005 * report.managed_pages


@pytest.mark.parametrize(
    ("flag", "classes"),
    [
        ("BUDDY", {PageClass.FREE_BUDDY}),
        ("SLAB", {PageClass.SLAB}),
        ("PGTABLE", {PageClass.PAGE_TABLES}),
        ("OFFLINE", {PageClass.OFFLINE}),
        ("HWPOISON", {PageClass.HWPOISON}),
        ("HUGE", {PageClass.USER_HUGETLB, PageClass.FREE_HUGETLB}),
    ],
)
def test_class_of_each_pfn(
    run: lab.Run, by_pfn: PagesByPfn, flag: str, classes: set[PageClass]
) -> None:
    flags = truth.page_flags(run)[: len(by_pfn.codes)]
    here = by_pfn.codes != 255
    assert np.array_equal(
        np.isin(by_pfn.codes, list(classes))[here], truth.having(flags, flag)[here]
    )


def test_anon_of_each_pfn(run: lab.Run, by_pfn: PagesByPfn) -> None:
    """Anonymous pages of hugetlb are hugetlb; swap read ahead is anon, or shmem."""
    flags = truth.page_flags(run)[: len(by_pfn.codes)]
    anon = np.isin(by_pfn.codes, [PageClass.ANON, PageClass.KSM])
    said = truth.having(flags, "ANON") & ~truth.having(flags, "HUGE")
    # From v6.10 on the kernel says ANON by the mapping word alone, in which slab
    # pages keep something else.
    said &= ~truth.having(flags, "SLAB")
    assert not np.any(said & ~anon)
    extra = anon & ~said
    heads = by_pfn.heads[extra]
    assert np.all(truth.having(flags, "SWAPCACHE")[heads])


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("UPTODATE", "uptodate"),
        ("DIRTY", "dirty"),
        ("LRU", "lru"),
        ("ACTIVE", "active"),
        ("SWAPBACKED", "swapbacked"),
        ("UNEVICTABLE", "unevictable"),
        ("RESERVED", "reserved"),
        ("MLOCKED", "mlocked"),
    ],
)
def test_flag_of_each_pfn(
    run: lab.Run, by_pfn: PagesByPfn, flag: str, name: str
) -> None:
    flags = truth.page_flags(run)[: len(by_pfn.codes)]
    here = by_pfn.codes != 255
    # Up to v6.9 the kernel says what is in the page's own word, then its folio's.
    mine = by_pfn.flags[name]
    if not run.release.startswith("6.1."):
        mine = mine[by_pfn.heads]
    assert np.count_nonzero((mine != truth.having(flags, flag)) & here) == 0


def test_tails_of_each_pfn(run: lab.Run, by_pfn: PagesByPfn) -> None:
    flags = truth.page_flags(run)[: len(by_pfn.codes)]
    here = by_pfn.codes != 255
    said = truth.having(flags, "COMPOUND_TAIL")
    assert np.array_equal(by_pfn.tails[here], said[here])


@pytest.mark.parametrize(
    ("region", "classes"),
    [
        ("anon", {PageClass.ANON}),
        ("thp", {PageClass.ANON}),
        ("mlock", {PageClass.ANON}),
        ("file", {PageClass.FILE}),
        ("shmem-tmpfs", {PageClass.SHMEM}),
        ("shmem-anonymous", {PageClass.SHMEM}),
        ("shmem-sysv", {PageClass.SHMEM}),
        ("shmem-memfd", {PageClass.SHMEM}),
        ("hugetlb", {PageClass.USER_HUGETLB}),
        ("hugetlb-shared", {PageClass.USER_HUGETLB}),
        ("ksm-0", {PageClass.KSM}),
    ],
)
def test_class_of_what_the_workload_mapped(
    run: lab.Run, by_pfn: PagesByPfn, region: str, classes: set[PageClass]
) -> None:
    pfns = [pfn for pfn in run.pfns(region) if pfn]
    assert pfns
    assert set(by_pfn.codes[pfns].tolist()) == {int(code) for code in classes}


def test_sections(run: lab.Run, report: MemstatReport) -> None:
    assert report.sections is not None
    root = "sys/devices/system/memory/memory"
    blocks = {
        int(match[1])
        for name in run.truth_names()
        if (match := re.fullmatch(rf"{root}(\d+)/state", name))
    }
    assert {section.nr for section in report.sections} == blocks
    for section in report.sections:
        assert section.pages == 32768
        assert section.pfn == section.nr * 32768
        assert (section.state, section.early) == ("online", True)
        assert section.memmap_end == section.memmap + 64 * (section.pages - 1)
        zones = run.truth(f"{root}{section.nr}/valid_zones").decode().split()
        # A block that spans zones says "none".
        assert zones == ["none"] or set(zones) == set(section.zones)
    assert {section.node for section in report.sections} == {0, 1}


def test_reads_are_two_a_section(report: MemstatReport) -> None:
    assert report.coverage["memmap_reads"] == 2 * report.coverage["sections"]


def sources(*todo: Path) -> set[Path]:
    """Modules, and what they import of msatools.kernel, and so on."""
    found: set[Path] = set()
    names = list(todo)
    while names:
        path = names.pop()
        if path not in found:
            found.add(path)
            imported = re.findall(r"from msatools\.kernel\.(\w+) ", path.read_text())
            names += [Path(kernel.__path__[0], f"{name}.py") for name in imported]
    return found


def test_coverage_has_every_key_that_is_ever_counted(report: MemstatReport) -> None:
    counted: set[str] = set()
    for path in sources(*Path(memory.__path__[0]).glob("*.py")):
        counted |= set(re.findall(r'coverage\["(\w+)"\]', path.read_text()))
    assert len(counted) > 10
    assert counted <= set(report.coverage)
