# SPDX-License-Identifier: LGPL-2.1-or-later

"""Buffers of devices, and rings that are only mapped: guest/fielddmabuf.py."""

import re
import time
from collections.abc import Iterator

import pytest
from drgn import Object, Program

from fixtures import lab
from msatools.kernel.files import OpenFiles
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import page_layout
from msatools.memory.dma_bufs import DmaBuf, dma_bufs
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import DmaBufGroup, MemstatReport
from msatools.memory.owned_pages import _captures, driver_type
from msatools.selfdesc.find import drgn_lookups, find_type
from tests.support.dumps import open_dump
from tests.support.overlay import overwrite
from tests.support.prompt import printed

from . import sums

SCENARIO = "fielddmabuf"
PAGE = 4096


@pytest.fixture(scope="module")
def report(field_prog: Program) -> MemstatReport:
    return collect_memstat(field_prog, by=("dmabuf",))


@pytest.fixture(scope="module")
def buffers(report: MemstatReport) -> dict[str, DmaBufGroup]:
    """Return the dma-bufs by the names that the guest gave them."""
    groups = sums.view(report, "dmabuf")
    assert all(isinstance(group, DmaBufGroup) for group in groups)
    return {g.label: g for g in groups if isinstance(g, DmaBufGroup) and g.label}


def bufinfo(field_run: lab.Run) -> dict[str, tuple[int, int, str, str]]:
    """Return size, references, exporter and inode of each dma-buf by its name."""
    line = re.compile(r"^(\d{8,})\t\w+\t\w+\t(\d+)\t(\S+)\t(\d+)\t(\S*)", re.M)
    return {
        name: (int(size), int(count), exporter, str(int(inode)))
        for size, count, exporter, inode, name in line.findall(
            field_run.workload["bufinfo"]
        )
    }


def test_rings_whose_files_are_closed(
    field_run: lab.Run, report: MemstatReport
) -> None:
    made = field_run.workload
    uring = made["io_uring"]
    queue = 1 << (-(-uring["queue_bytes"] // PAGE) - 1).bit_length()
    rings = made["perf"] + made["packet"]
    compound = uring["entries_pages"] + queue
    # From v6.14 on the queues may be mapped anew instead.
    assert sums.pages_of(report)["kernel.rings"] in (rings, rings + compound)


def test_dma_bufs_are_those_of_bufinfo(
    field_run: lab.Run, report: MemstatReport, buffers: dict[str, DmaBufGroup]
) -> None:
    sums.check(report, "dmabuf")
    told = bufinfo(field_run)
    made = {
        **field_run.workload.get("heap", {}),
        **field_run.workload.get("udmabuf", {}),
    }
    assert {name: size for name, (size, *_) in told.items()} == made
    assert told == {
        name: (group.size_bytes, group.references, group.exporter, group.key)
        for name, group in buffers.items()
    }


def test_who_holds_them(field_run: lab.Run, buffers: dict[str, DmaBufGroup]) -> None:
    """One is an open file, one is mapped and no open file, one a part of a memfd."""
    pids = {made["name"]: made["pid"] for made in field_run.workload["processes"]}
    makers = {"open": "heap_open", "mapped": "heap_mapped", "pinned": "pinned"}
    for name, group in buffers.items():
        assert group.holders is not None
        (holder,) = group.holders
        assert (holder.pid, holder.comm) == (pids[makers[name]], makers[name])
        assert (holder.how == "mapped") == (name == "mapped")


def test_all_their_pages_are_known(
    field_run: lab.Run, report: MemstatReport, buffers: dict[str, DmaBufGroup]
) -> None:
    heap = field_run.workload.get("heap", {})
    for name, size in heap.items():
        assert buffers[name].classes == {"kernel.dmabuf": size // PAGE}
    for name, size in field_run.workload.get("udmabuf", {}).items():
        assert buffers[name].classes == {"cache.shmem": size // PAGE}
    assert sums.pages_of(report)["kernel.dmabuf"] == sum(heap.values()) // PAGE


def test_the_table_and_the_view_name_them(
    field_run: lab.Run, field_prog: Program
) -> None:
    by = printed(field_prog, "memstat", "--by", "dmabuf")
    for name in field_run.workload.get("heap", {}):
        assert re.search(rf"^ .* system .*system {name}$", by, re.M)
    shown = printed(field_prog, "memstat")
    assert ("dma-bufs" in shown) == ("heap" in field_run.workload)


def test_each_page_is_the_buffer_s(field_run: lab.Run, field_prog: Program) -> None:
    """By what the guest wrote to them, and by its page tables."""
    losses = LossLog()
    found = {name: b.pages.tolist() for name, b in named(field_prog, losses).items()}
    assert not losses.lost
    if "heap" in field_run.workload:
        words = [
            int(Reader(field_prog).words(pfn * PAGE, 1, physical=True)[0])
            for pfn in found["mapped"]
        ]
        mark = field_run.workload["mark"]
        assert words == [mark | number for number in range(len(words))]
    if "udmabuf" in field_run.workload:
        assert found["pinned"] == field_run.pfns("pinned")


DAMAGED = ("6.12", "7.x")
"""Kernels with the system heap and udmabuf."""

SECONDS = 60
"""Far more CPU time than a bounded read takes."""


@pytest.fixture(params=DAMAGED)
def prog(request: pytest.FixtureRequest) -> Program:
    name = f"fielddmabuf-{request.param}"
    lab.build(name)
    return open_dump(name, "btf")


def named(prog: Program, losses: LossLog) -> dict[str | None, DmaBuf]:
    reader = Reader(prog)
    files, layout = OpenFiles(reader, losses), page_layout(prog)
    return {b.name: b for b in dma_bufs(reader, layout, files, losses)}


def private(prog: Program, buffer: DmaBuf, tag: str, module: str) -> Object:
    """Return what the exporter keeps of a buffer."""
    with drgn_lookups:
        made = Object(prog, "struct dma_buf", address=buffer.address)
        return Object(prog, driver_type(prog, tag, module), address=int(made.priv))


@pytest.fixture
def quick() -> Iterator[None]:
    """Fail a test that takes as long as a read without bounds, on any machine."""
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("at", [0, 1])
def test_pages_stop_at_the_size_of_the_buffer(
    prog: Program, quick: None, at: int
) -> None:
    whole = named(prog, LossLog())["open"]
    heap = private(prog, whole, "system_heap_buffer", "system_heap")
    before = int(heap.sg_table.sgl[0].length) // PAGE * at
    overwrite(heap.sg_table.sgl[at].length, (1 << 32) - 1)
    losses = LossLog()
    found = named(prog, losses)["open"]
    assert len(found.pages) == whole.bytes // PAGE
    assert found.pages[: before + 1].tolist() == whole.pages[: before + 1].tolist()
    assert losses.lost == {"dmabufs_unreadable": 1}


def test_entries_stop_at_the_size_of_the_buffer(prog: Program, quick: None) -> None:
    whole = named(prog, LossLog())["open"]
    heap = private(prog, whole, "system_heap_buffer", "system_heap")
    overwrite(heap.sg_table.orig_nents, (1 << 32) - 1)
    losses = LossLog()
    assert named(prog, losses).keys() >= {"pinned", "mapped"}
    assert losses.lost["dmabufs_unreadable"] >= 1


def test_a_buffer_is_no_larger_than_memory(prog: Program, quick: None) -> None:
    whole = named(prog, LossLog())["open"]
    heap = private(prog, whole, "system_heap_buffer", "system_heap")
    with drgn_lookups:
        made = Object(prog, "struct dma_buf", address=whole.address)
    overwrite(made.size, 1 << 60)
    # A length of 4 GiB: the machine has less.
    overwrite(heap.sg_table.sgl[0].length, (1 << 32) - 1)
    losses = LossLog()
    found = named(prog, losses)["open"]
    assert len(found.pages) == Reader(prog).most(PAGE)
    assert losses.lost == {"dmabufs_unreadable": 1}


def test_pinned_pages_stop_at_the_size_of_the_buffer(
    prog: Program, quick: None
) -> None:
    whole = named(prog, LossLog())["pinned"]
    overwrite(private(prog, whole, "udmabuf", "udmabuf").pagecount, 1 << 40)
    losses = LossLog()
    assert named(prog, losses)["pinned"].pages.tolist() == whole.pages.tolist()
    assert losses.lost == {"dmabufs_unreadable": 1}


@pytest.mark.parametrize("order", [16, 20, 255])
def test_absurd_blocks_of_a_packet_ring_are_lost(
    prog: Program, quick: None, order: int
) -> None:
    before = sums.pages_of(collect_memstat(prog))["kernel.rings"]
    reader = Reader(prog)
    with drgn_lookups:
        packet = find_type(prog, "struct packet_sock")
        captures = [
            Object(prog, packet, address=a) for a in _captures(reader, LossLog())
        ]
        (ring,) = (
            ring for c in captures for ring in (c.rx_ring, c.tx_ring) if ring.pg_vec
        )
        count = int(ring.pg_vec_len)
    overwrite(ring.pg_vec_order, order)
    report = collect_memstat(prog)
    room = Reader(prog).most(PAGE) >> order
    assert report.coverage["rings_unreadable"] == count - room > 0
    assert sums.pages_of(report)["kernel.rings"] <= before + (room << order)
