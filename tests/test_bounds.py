# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damaged counts and lists cost a loss, and no more time or memory than the machine."""

import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drgn import Program, offsetof, sizeof
from drgn.helpers.linux.list import list_for_each_entry

from fixtures.demo.catalog import DEMOS
from msatools.program import Opened, TargetSpec, open_target
from tests.contract.table import CPUS, LOCKS, MEMSTAT, PRSTAT, ZOMBIES, Row
from tests.support.calls import Ran, call
from tests.support.overlay import lay_over, put

FAR = 0xFFFF_F000_0000_0000
"""Addresses that no kernel uses."""

PEAK_BYTES = 512 << 20
SECONDS = 60.0
"""Bounds of a run on a damaged dump of this size."""


def damaged(row: Row, words: str, damage: Callable[[Program], None]) -> Ran:
    """Run a command on a demo core with damage."""

    def opening(_: TargetSpec) -> Opened:
        opened = open_target(TargetSpec(path=str(DEMOS["6.12"].core), types="btf"))
        damage(opened.prog)
        return opened

    return call(
        row.command, "dump", "--json", "--strict", *words.split(), opening=opening
    )


MOST_PAGES = (1 << 24) - 1
ARRAY_BYTES = 8 * MOST_PAGES


def all_share_one_array(prog: Program) -> None:
    """Give all areas of vmalloc the largest number of pages, and one large array."""
    page = prog.type("struct page")
    array = np.full(MOST_PAGES, prog["vmemmap_base"].value_() + sizeof(page), np.uint64)
    put(prog, FAR, array.tobytes())
    nodes = prog["vmap_nodes"]
    for i in range(prog["nr_vmap_nodes"].value_()):
        head = nodes[i].busy.head.address_of_()
        for area in list_for_each_entry("struct vmap_area", head, "list"):
            if area.vm and area.vm.nr_pages:
                put(prog, area.vm.nr_pages.address_, struct.pack("<I", MOST_PAGES))
                put(prog, area.vm.pages.address_, struct.pack("<Q", FAR))
                put(prog, area.vm.member_("size").address_, struct.pack("<Q", 1 << 40))


def test_areas_that_share_an_array_of_pages() -> None:
    before = memory("VmRSS")
    # The peak is that from now on.
    Path("/proc/self/clear_refs").write_text("5")
    ran = damaged(MEMSTAT, "", all_share_one_array)
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["coverage"]["vmalloc_areas_unreadable"] > 30
    # This test itself has the array, and once more while it is made.
    assert memory("VmHWM") - before < PEAK_BYTES + 2 * ARRAY_BYTES


def memory(key: str) -> int:
    """Return a size of this process in bytes."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) << 10


def endless_tasks(prog: Program) -> None:
    """Make the list of tasks one of eight million, 16 bytes apart."""
    tasks = offsetof(prog.type("struct task_struct"), "tasks")
    count = 8 << 20

    def read(address: int, size: int, offset: int, physical: bool) -> bytes:
        first = (address - FAR) // 16
        nodes = np.arange(first, first + size // 16 + 2, dtype=np.int64) * 16
        links = np.stack((nodes + 16, nodes - 16), axis=1).astype(np.uint64)
        start = (address - FAR) % 16
        return (links + np.uint64(FAR)).tobytes()[start : start + size]

    lay_over(prog, FAR, 16 * count, read)
    head = prog["init_task"].tasks.address_of_().value_()
    put(prog, head, struct.pack("<Q", FAR + (-(-tasks // 16) + 1) * 16))


@pytest.mark.parametrize(
    ("row", "words"),
    [(PRSTAT, ""), (LOCKS, ""), (CPUS, "-v"), (MEMSTAT, "")],
    ids=["prstat", "locks", "cpus", "memstat"],
)
def test_more_tasks_than_there_can_be(row: Row, words: str) -> None:
    began = time.process_time()
    ran = damaged(row, words, endless_tasks)
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["coverage"]["lists_broken"] > 0
    assert time.process_time() - began < SECONDS


def test_no_zombies_can_be_found_without_tasks() -> None:
    ran = damaged(ZOMBIES, "", endless_tasks)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "no task can be read" in ran.err
