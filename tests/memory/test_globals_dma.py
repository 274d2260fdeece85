# SPDX-License-Identifier: LGPL-2.1-or-later

"""Hash tables of the kernel are as the log says, queues of devices as their drivers."""

import re

import pytest
from drgn import Object, Program

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory import device_pages
from msatools.memory.device_pages import hardware_queues
from msatools.memory.memstat import collect_memstat
from msatools.report.log import read_log
from tests.support.dumps import open_dump
from tests.support.overlay import lose, overwrite

from . import sums

PAGE = 4096
SINGLE = 7
"""Most pages that a variable has by itself."""

ZERO_PAGE = 16
KERNELS = ("6.1", "6.12", "7.x")


@pytest.fixture(params=KERNELS)
def name(request: pytest.FixtureRequest) -> str:
    name = f"fielddmabuf-{request.param}"
    lab.build(name)
    return name


def log(name: str) -> str:
    reader = Reader(open_dump(name, "btf"))
    return "\n".join(str(record.text) for record in read_log(reader, LossLog()))


def test_tables_are_those_of_the_log(name: str) -> None:
    """All that were made after the page allocator was there, by their exact size."""
    line = r"^(\S.*) hash table entries: \d+ \(order: -?\d+, (\d+) bytes, linear\)"
    found = dict(re.findall(line, log(name), re.MULTILINE))
    early = {"Dentry cache", "Inode-cache"}
    assert found.keys() > early
    tables = sum(-(-int(found[title]) // PAGE) for title in found.keys() - early)
    pages = sums.pages_of(collect_memstat(open_dump(name, "btf")))["kernel.globals"]
    zero = ZERO_PAGE if name.endswith("6.12") else 0
    assert 0 < pages - tables - zero <= SINGLE


def test_queues_are_those_of_the_driver(name: str) -> None:
    """One for administration, and those that the log has, by their depths."""
    (number,) = re.findall(r"nvme0: (\d+)/0/0 default/read/poll queues", log(name))
    prog = open_dump(name, "btf")
    (device,) = hardware_queues(Reader(prog), LossLog()).nvme
    depth = int(device.q_depth)
    assert depth == 1024
    # Commands of 64 bytes and completions of 16; 32 entries for administration.
    queues = int(number) * (64 + 16) * depth // PAGE + 2
    pages = sums.pages_of(collect_memstat(prog))["kernel.dma"]
    # Besides them the pools of lists of pages: one page each at least, when used.
    assert queues <= pages <= queues + 4


@pytest.mark.parametrize("lost", ["queues", "udp_table"])
def test_what_cannot_be_read_is_lost(lost: str) -> None:
    name = "fielddmabuf-6.12"
    lab.build(name)
    prog = open_dump(name, "btf")
    before = sums.pages_of(collect_memstat(prog))
    if lost == "queues":
        (device,) = hardware_queues(Reader(prog), LossLog()).nvme
        address, key, kind = int(device.queues), "dma_pages_lost", "kernel.dma"
    else:
        address, kind = prog.symbol(lost).address, "kernel.globals"
        key = "tables_pages_lost"
    lose(prog, address, 8)
    report = collect_memstat(prog)
    assert report.coverage[key] > 0
    after = sums.pages_of(report)
    assert after[kind] < before[kind]
    assert after["kernel.unattributed"] > before["kernel.unattributed"]


def nvme(prog: Program) -> Object:
    (device,) = hardware_queues(Reader(prog), LossLog()).nvme
    return device


def test_freed_queues_have_no_pages(name: str) -> None:
    """nvme_free_queues() leaves the pointers: the memory may be anybody's by now."""
    prog = open_dump(name, "btf")
    device = nvme(prog)
    before = sums.pages_of(collect_memstat(prog))["kernel.dma"]
    number = int(device.ctrl.queue_count)
    assert number == int(device.nr_allocated_queues)
    overwrite(device.ctrl.queue_count, number - 1)
    report = collect_memstat(prog)
    freed = (64 + 16) * int(device.queues[number - 1].q_depth) // PAGE
    assert before - sums.pages_of(report)["kernel.dma"] == freed > 0
    assert "dma_pages_lost" not in report.coverage


def test_absurd_number_of_queues_is_lost() -> None:
    """Pages of the queues that the controller has are still claimed."""
    prog = open_dump("fielddmabuf-6.12", "btf")
    before = sums.pages_of(collect_memstat(prog))["kernel.dma"]
    overwrite(nvme(prog).tagset.nr_hw_queues, (1 << 32) - 1)
    report = collect_memstat(prog)
    assert report.coverage["requests_pages_lost"] == 1
    assert sums.pages_of(report)["kernel.dma"] == before


@pytest.mark.parametrize("value", [(1 << 16) + 1, (1 << 32) - 1])
def test_absurd_depth_of_a_queue_is_lost(value: int) -> None:
    prog = open_dump("fielddmabuf-6.12", "btf")
    queue = nvme(prog).queues[1]
    depth = int(queue.q_depth)
    before = sums.pages_of(collect_memstat(prog))["kernel.dma"]
    overwrite(queue.q_depth, value)
    report = collect_memstat(prog)
    lost = (64 + 16) * depth // PAGE
    assert before - sums.pages_of(report)["kernel.dma"] == lost
    assert report.coverage["dma_pages_lost"] == 1


@pytest.mark.parametrize("mask", [(1 << 32) - 1, (1 << 25) - 1])
def test_table_that_memory_cannot_hold_is_lost(mask: int) -> None:
    prog = open_dump("fielddmabuf-6.12", "btf")
    before = sums.pages_of(collect_memstat(prog))["kernel.globals"]
    address = prog.symbol("udp_table").address
    overwrite(Object(prog, "struct udp_table", address=address).mask, mask)
    report = collect_memstat(prog)
    assert report.coverage["tables_pages_lost"] >= 2
    assert 0 < sums.pages_of(report)["kernel.globals"] < before


VIRTIO = ("fieldballoon-6.12", "fieldballoon-7.x")


@pytest.mark.parametrize("name", VIRTIO)
@pytest.mark.parametrize("size", [0, 1 << 14, 1 << 50, (1 << 64) - 1])
def test_absurd_size_of_a_virtqueue_is_lost(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.build(name)
    prog = open_dump(name, "btf")
    queues = virtqueues(prog, monkeypatch)
    before = sums.pages_of(collect_memstat(prog))["kernel.dma"]
    assert int(queues[0].split.queue_size_in_bytes) <= PAGE
    overwrite(queues[0].split.queue_size_in_bytes, size)
    report = collect_memstat(prog)
    assert report.coverage["dma_pages_lost"] == 1
    assert before - sums.pages_of(report)["kernel.dma"] == 1


def test_absurd_number_of_entries_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    prog = open_dump(VIRTIO[0], "btf")
    (queue, *_) = virtqueues(prog, monkeypatch)
    overwrite(queue.split.vring.num, (1 << 32) - 1)
    assert collect_memstat(prog).coverage["dma_pages_lost"] == 1


def virtqueues(prog: Program, monkeypatch: pytest.MonkeyPatch) -> list[Object]:
    """Return the ``struct vring_virtqueue`` that the collector finds."""
    found: list[Object] = []
    read = device_pages._virtqueue

    def note(reader: Reader, queue: Object, losses: LossLog) -> object:
        found.append(queue)
        return read(reader, queue, losses)

    with monkeypatch.context() as patch:
        patch.setattr(device_pages, "_virtqueue", note)
        collect_memstat(prog)
    return found
