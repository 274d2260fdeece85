# SPDX-License-Identifier: LGPL-2.1-or-later

"""Hash tables of the kernel are as the log says, queues of devices as their drivers."""

import re

import pytest

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.device_pages import hardware_queues
from msatools.memory.memstat import collect_memstat
from msatools.report.log import read_log
from tests.support.dumps import open_dump
from tests.support.overlay import lose

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
