# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages that only their users know are attributed: fixtures/lab/guest/fieldpages.py."""

import re

import pytest
from drgn import Program

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport, VmallocGroup
from tests.support.dumps import open_dump
from tests.support.overlay import lose
from tests.support.prompt import printed, reported

from . import sums

SCENARIO = "fieldpages"
PAGE = 4096


@pytest.fixture(scope="module")
def report(field_prog: Program) -> MemstatReport:
    return collect_memstat(field_prog, by=("vmalloc",), leaks=True)


@pytest.fixture(scope="module")
def pages(report: MemstatReport) -> dict[str, int]:
    return sums.pages_of(report)


def mapped(field_run: lab.Run) -> dict[str, int]:
    """Return the pages that the module mapped, by way."""
    return {
        name: len(made["pfns"]) for name, made in field_run.workload["mapped"].items()
    }


def test_mapped_pages(field_run: lab.Run, report: MemstatReport) -> None:
    """All that the module mapped, by the function that did; nothing counts twice."""
    sums.check(report, "vmalloc")
    groups = {g.key: g for g in sums.view(report, "vmalloc")}
    ways = mapped(field_run)
    module = groups["vm_make"]
    assert isinstance(module, VmallocGroup)
    assert module.module == "vmapmodule"
    assert module.classes["kernel.vmap"] == ways["vmap"] + ways["put_pages"]
    assert module.areas == 2
    by_ram = groups["vm_map_ram"]
    assert by_ram.classes["kernel.vmap"] == ways["block"] + ways["map_ram"]


def test_what_a_module_mapped_is_what_it_has(
    field_run: lab.Run, report: MemstatReport
) -> None:
    ways = mapped(field_run)
    assert report.leaks is not None
    (leak,) = (leak for leak in report.leaks if leak.module == "vmapmodule")
    assert leak.bytes == (ways["vmap"] + ways["put_pages"]) * PAGE
    assert leak.confidence == "exact"


def test_bpf_ring(field_run: lab.Run, report: MemstatReport) -> None:
    """Three pages are before the data: of the kernel, of the consumer and producer."""
    (group,) = (g for g in sums.view(report, "vmalloc") if "ringbuf" in g.key)
    assert group.classes["kernel.vmap"] == 3 + field_run.workload["bpf"]


def test_areas_are_those_of_vmallocinfo(
    field_run: lab.Run, report: MemstatReport
) -> None:
    """Every mapping of the kernel's own list that has pages of memory is there."""
    text = field_run.truth("proc/vmallocinfo").decode()
    lines = [line.split() for line in text.splitlines()]
    callers = {
        re.sub(r"\+0x.*", "", line[2])
        for line in lines
        if "vmap" in line[2:] and "ioremap" not in line
    }
    assert callers
    assert callers <= {g.key for g in sums.view(report, "vmalloc")}


def test_pages_in_a_pipe_alone(field_run: lab.Run, pages: dict[str, int]) -> None:
    assert pages["kernel.pipes"] == field_run.workload["spliced"]


def test_trace_buffers(field_run: lab.Run, pages: dict[str, int]) -> None:
    """Besides them only records of functions and names of tasks."""
    buffers = field_run.workload["trace_kib"] * 1024 // PAGE
    assert buffers <= pages["kernel.tracing"] <= buffers + 600


def test_whatis_says_where_a_mapped_page_is(
    field_run: lab.Run, field_prog: Program
) -> None:
    mapped = field_run.workload["mapped"].values()
    words = (f"pfn:{made['pfns'][-1]}" for made in mapped)
    answers = reported(field_prog, "whatis", *words)["answers"]
    for made, answer in zip(mapped, answers, strict=True):
        assert answer["page"]["class"] == "kernel.vmap"
        area = answer["vmalloc"]
        start, end = int(area["start"], 16), made["address"] + len(made["pfns"]) * PAGE
        assert start <= made["address"] < end <= start + area["bytes"]


def test_reserves_of_pools(field_run: lab.Run, pages: dict[str, int]) -> None:
    """7.x reserves two blocks of 2 MiB for checksums (block/bio-integrity.c).

    Besides, a machine of up to 1 GiB has 128 KiB for each zone that DMA memory may have
    to be in (dma_atomic_pool_init()).
    """
    is_new = field_run.kernel.kernel.name == "7.x"
    rest = pages["kernel.mempools"] - (2 << 9 if is_new else 0)
    assert rest in (2 * 32, 3 * 32)


@pytest.mark.parametrize("name", ["fieldpages-7.x"])
def test_a_pool_that_cannot_be_read_is_lost(name: str) -> None:
    prog = open_dump(name, "btf")
    lose(prog, prog["integrity_buf_pool"].elements.value_(), 16)
    report = collect_memstat(prog)
    assert 0 < sums.pages_of(report)["kernel.mempools"] <= 3 * 32
    assert report.coverage["mempools_unreadable"] == 1


def test_what_is_in_zram(field_run: lab.Run, report: MemstatReport) -> None:
    """As the kernel says in mm_stat."""
    truth = field_run.workload["zram"]
    assert report.swap is not None
    zram = report.swap.zram
    assert zram is not None
    assert zram.stored_pages * PAGE == truth["orig_data_size"] > 20 << 20
    assert zram.compressed_bytes == truth["compr_data_size"]
    assert zram.pool_bytes == truth["mem_used_total"]
    assert zram.ratio == truth["orig_data_size"] / truth["mem_used_total"]
    (device,) = report.swap.devices
    assert device.name.endswith("zram0")


def test_the_table_says_what_swap_is_compressed_to(
    field_prog: Program, report: MemstatReport
) -> None:
    text = printed(field_prog, "memstat")
    assert report.swap is not None
    for name, behind in (("zram", report.swap.zram), ("zswap", report.swap.zswap)):
        line = re.search(rf"^\(in {name}\) +([0-9,]+) .*$", text, re.M)
        if behind is None or not behind.stored_pages:
            assert line is None
            continue
        assert line is not None
        assert line[1] == f"{behind.stored_pages:,}"
        assert "compressed to" in line[0]


def test_what_is_in_zswap(field_run: lab.Run, report: MemstatReport) -> None:
    """As in meminfo, of kernels that have it."""
    assert report.swap is not None
    zswap = report.swap.zswap
    meminfo = field_run.truth("proc/meminfo").decode()
    stored = re.search(r"^Zswapped: +(\d+) kB", meminfo, re.MULTILINE)
    pool = re.search(r"^Zswap: +(\d+) kB", meminfo, re.MULTILINE)
    if stored is None or pool is None:
        assert zswap is None
        return
    assert zswap is not None
    assert zswap.stored_pages * PAGE == int(stored[1]) << 10
    # What does not compress goes on to the disk.
    assert 0 < zswap.stored_pages <= field_run.workload["zswapped"]
    assert zswap.pool_bytes == int(pool[1]) << 10
    assert zswap.ratio == zswap.stored_pages * PAGE / zswap.pool_bytes
