# SPDX-License-Identifier: LGPL-2.1-or-later

"""Swap entries of shared memory, against what the kernel counts and marks itself."""

import numpy as np
import pytest
from drgn import Program, sizeof
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.swap import for_each_swap_info

from msatools.kernel.mm import read_swap
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.sums import SwappedShmem, swapped_files, swapped_shmem
from msatools.memory.swapuse import read_swap_use
from tests.support.dumps import open_dump
from tests.support.overlay import put

OF_SHMEM = 0xBF
"""SWAP_MAP_SHMEM, which swap maps had up to 6.12."""

CACHED = 0x40


def read(prog: Program, losses: LossLog) -> SwappedShmem:
    return swapped_files(Reader(prog), losses)


def entries(found: SwappedShmem) -> list[int]:
    pairs = zip(found.first.tolist(), found.last.tolist(), strict=True)
    return [entry for first, last in pairs for entry in range(first, last + 1)]


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["memory-5.10", "memory-6.1", "memory-6.12"])
def test_as_the_swap_map_marks_them(name: str) -> None:
    prog, losses = open_dump(name, "btf"), LossLog()
    (device,) = for_each_swap_info(prog)
    marks = prog.read(device.swap_map.value_(), device.max.value_())
    marked = [at for at, mark in enumerate(marks) if mark & ~CACHED == OF_SHMEM]
    assert entries(read(prog, losses)) == marked
    assert marked
    assert not losses.notes
    by_map = swapped_shmem(Reader(prog), losses)
    assert by_map is not None
    every = np.arange(device.max.value_(), dtype=np.uint64)
    assert np.flatnonzero(by_map.have(every)).tolist() == marked
    elsewhere = np.array([1 << 58 | entry for entry in marked], np.uint64)
    assert not by_map.have(elsewhere).any()


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["memory-6.12", "memory-7.x"])
def test_as_many_as_the_files_count(name: str) -> None:
    prog, losses = open_dump(name, "btf"), LossLog()
    found = read(prog, losses)
    files = list_for_each_entry(
        "struct shmem_inode_info",
        prog["shmem_swaplist"].address_of_(),
        "swaplist",
    )
    assert len(entries(found)) == sum(file.swapped.value_() for file in files)
    assert found.have(np.array(entries(found), np.uint64)).all()


def test_those_between_ranges_are_not_of_shmem() -> None:
    numbers = np.array([9, 10, 13, 14, 20, 21], np.uint64)
    ranges = np.array([[10, 13], [20, 20]], np.uint64)
    found = SwappedShmem(ranges[:, 0], ranges[:, 1])
    assert found.have(numbers).tolist() == [False, True, True, False, True, False]
    none = SwappedShmem(ranges[:0, 0], ranges[:0, 1])
    assert not none.have(numbers).any()


def test_a_damaged_list_is_noted() -> None:
    prog, losses = open_dump("memory-6.12", "btf"), LossLog()
    head = prog["shmem_swaplist"].address_of_().value_()
    put(prog, head, bytes(16))
    assert entries(read(prog, losses)) == []
    assert losses.coverage["lists_broken"] == 1


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "bit"),
    [("memory-6.12", 30), ("fieldmemory-7.x", 30), ("fieldmemory-7.x", 62)],
)
def test_device_that_is_full_or_swapped_off(name: str, bit: int) -> None:
    """A bit of the count says so, of kernels since v6.14."""
    prog = open_dump(name, "btf")

    def used() -> int:
        reader, losses = Reader(prog), LossLog()
        found = read_swap_use(reader, read_swap(prog), None, losses)
        assert found is not None
        (device,) = found.devices
        return device.used

    before = used()
    (device,) = for_each_swap_info(prog)
    data = prog.read(device.inuse_pages.address_, sizeof(device.inuse_pages))
    assert int.from_bytes(data, "little") == before
    marked = before | 1 << bit
    put(prog, device.inuse_pages.address_, marked.to_bytes(len(data), "little"))
    assert used() == before
