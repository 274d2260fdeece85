# SPDX-License-Identifier: LGPL-2.1-or-later

"""Buffers of devices, and rings that are only mapped: guest/fielddmabuf.py."""

import re

import pytest

from fixtures import lab
from msatools.kernel.files import OpenFiles
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import page_layout
from msatools.memory.device_pages import dma_bufs
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import DmaBufGroup, MemstatReport
from msatools.program import TargetSpec, open_target

from . import sums
from .asked import printed
from .shares import MOST, share_of

PAGE = 4096
KERNELS = ("6.1", "6.12", "7.x")


@pytest.fixture(scope="module", params=KERNELS)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"fielddmabuf-{request.param}")


@pytest.fixture(scope="module")
def report(run: lab.Run) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    return collect_memstat(opened.prog, target=opened.target, by=("dmabuf",))


@pytest.fixture(scope="module")
def buffers(report: MemstatReport) -> dict[str, DmaBufGroup]:
    """Return the dma-bufs by the names that the guest gave them."""
    groups = sums.view(report, "dmabuf")
    assert all(isinstance(group, DmaBufGroup) for group in groups)
    return {g.label: g for g in groups if isinstance(g, DmaBufGroup) and g.label}


def bufinfo(run: lab.Run) -> dict[str, tuple[int, int, str, str]]:
    """Return size, references, exporter and inode of each dma-buf by its name."""
    line = re.compile(r"^(\d{8,})\t\w+\t\w+\t(\d+)\t(\S+)\t(\d+)\t(\S*)", re.M)
    return {
        name: (int(size), int(count), exporter, str(int(inode)))
        for size, count, exporter, inode, name in line.findall(run.workload["bufinfo"])
    }


def test_every_sum_is_the_kernel_s(report: MemstatReport) -> None:
    assert not [c for c in report.checks if c.difference and c.explained_by is None]
    assert share_of(report) <= MOST
    sums.check(report, "dmabuf")


def test_rings_whose_files_are_closed(run: lab.Run, report: MemstatReport) -> None:
    made = run.workload
    uring = made["io_uring"]
    queue = 1 << (-(-uring["queue_bytes"] // PAGE) - 1).bit_length()
    rings = made["perf"] + made["packet"]
    compound = uring["entries_pages"] + queue
    # From v6.14 on the queues may be mapped anew instead.
    assert sums.pages_of(report)["kernel.rings"] in (rings, rings + compound)


def test_no_ring_is_an_open_file(run: lab.Run) -> None:
    """What the guest is to show: nothing leads to them by descriptors."""
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    files = OpenFiles(Reader(prog), LossLog())
    assert not len(files.private_data(("perf_fops", "io_uring_fops")))


def test_dma_bufs_are_those_of_bufinfo(
    run: lab.Run, buffers: dict[str, DmaBufGroup]
) -> None:
    told = bufinfo(run)
    made = {**run.workload.get("heap", {}), **run.workload.get("udmabuf", {})}
    assert {name: size for name, (size, *_) in told.items()} == made
    assert told == {
        name: (group.size_bytes, group.references, group.exporter, group.key)
        for name, group in buffers.items()
    }


def test_all_their_pages_are_known(
    run: lab.Run, report: MemstatReport, buffers: dict[str, DmaBufGroup]
) -> None:
    heap = run.workload.get("heap", {})
    for name, size in heap.items():
        assert buffers[name].classes == {"kernel.dmabuf": size // PAGE}
    for name, size in run.workload.get("udmabuf", {}).items():
        assert buffers[name].classes == {"cache.shmem": size // PAGE}
    assert sums.pages_of(report)["kernel.dmabuf"] == sum(heap.values()) // PAGE


def test_the_table_and_the_view_name_them(run: lab.Run) -> None:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    shown = printed(prog)
    by = printed(prog, "--by", "dmabuf")
    for name in run.workload.get("heap", {}):
        assert re.search(rf"^ .* system .*system {name}$", by, re.M)
    assert ("dma-bufs" in shown) == ("heap" in run.workload)


def test_each_page_is_the_buffer_s(run: lab.Run) -> None:
    """By what the guest wrote to them, and by its page tables."""
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    reader, losses = Reader(opened.prog), LossLog()
    files, layout = OpenFiles(reader, losses), page_layout(opened.prog)
    found = {
        buffer.name: buffer.pages.tolist()
        for buffer in dma_bufs(reader, layout, files, losses)
    }
    assert not losses.lost
    if "heap" in run.workload:
        words = [
            int(reader.words(pfn * PAGE, 1, physical=True)[0])
            for pfn in found["mapped"]
        ]
        mark = run.workload["mark"]
        assert words == [mark | number for number in range(len(words))]
    if "udmabuf" in run.workload:
        assert found["pinned"] == run.pfns("pinned")
