# SPDX-License-Identifier: LGPL-2.1-or-later

"""Bulk reads of memory with holes."""

import errno
import os
import random

import numpy as np
import pytest
from drgn import Architecture, FaultError, Platform, Program, ProgramFlags

from msatools.kernel.reader import Gap, Reader, column, distinct, fault_reason

from .memory import BASE, reader_of

DATA = bytes(i * 7 & 0xFF for i in range(1024))


def test_one_read_where_nothing_is_missing() -> None:
    reader = reader_of(DATA)
    assert reader.read_around_gaps(BASE, len(DATA), 64) == (DATA, [])
    assert (reader.reads, reader.bytes) == (1, len(DATA))


@pytest.mark.parametrize("holes", [{0}, {15}, {3, 4}, {0, 7, 15}, set(range(16))])
def test_every_hole_is_found_and_nothing_else_lost(holes: set[int]) -> None:
    reader = reader_of(DATA, holes)
    data, gaps = reader.read_around_gaps(BASE, len(DATA), 64)
    assert sorted(gap.offset for gap in gaps) == [64 * hole for hole in sorted(holes)]
    for block in range(16):
        here = slice(64 * block, 64 * (block + 1))
        assert data[here] == (bytes(64) if block in holes else DATA[here])
    # A binary search: a few reads for each hole, and one for each block at most.
    assert reader.reads <= 2 * 16


def test_range_that_is_no_multiple_of_the_granule() -> None:
    reader = reader_of(DATA, {1})
    data, gaps = reader.read_around_gaps(BASE, 200, 64)
    assert gaps == [Gap(64, 64, "unreadable")]
    assert bytes(data) == DATA[:64] + bytes(64) + DATA[128:200]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("could not read memory from kdump: Excluded page", "excluded"),
        ("could not find memory segment", "excluded"),
        ("short read from memory file", "unreadable"),
    ],
)
def test_reason(text: str, reason: str) -> None:
    assert fault_reason(FaultError(text, 0)) == reason


def test_records_near_each_other_come_with_one_read() -> None:
    reader = reader_of(DATA)
    addresses = np.array([BASE, BASE + 100, BASE + 500, BASE + 1000], np.uint64)
    _, readable = reader.read_records(addresses, 16)
    assert readable.all()
    assert reader.reads == 1


LARGE = random.Random(1).randbytes(1 << 21)
"""Of more than one span and one batch."""


@pytest.mark.parametrize("seed", range(8))
def test_records_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice((1, 8, 24, 700, 9000))
    count = chance.choice((4, 5, 50, 2000))
    near = chance.choice((1 << 12, 1 << 16, len(LARGE)))
    holes = {chance.randrange(near >> 12) for _ in range(seed)}
    reader = reader_of(LARGE, holes, granule=4096)
    places = [chance.randrange(near - size + 1) for _ in range(count)]
    records, readable = reader.read_records(np.array(places, np.uint64) + BASE, size)
    for place, record, is_there in zip(places, records, readable, strict=True):
        whole = not holes & {*range(place >> 12, (place + size - 1 >> 12) + 1)}
        assert is_there == whole
        assert bytes(record) == (LARGE[place : place + size] if whole else bytes(size))


@pytest.mark.parametrize("seed", range(8))
def test_arrays_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    holes = {chance.randrange(len(LARGE) >> 12) for _ in range(seed * 8)}
    reader = reader_of(LARGE, holes, granule=4096)
    arrays = []
    for _ in range(chance.choice((0, 1, 300))):
        length = chance.choice((0, 1, 4, 64, 65, 5000))
        arrays.append((chance.randrange(len(LARGE) - 8 * length), length))
    words, rows, readable = reader.read_arrays(
        np.array([BASE + place for place, _ in arrays], np.uint64),
        np.array([length for _, length in arrays], np.uint64),
    )
    for row, (place, length) in enumerate(arrays):
        pages = range(place >> 12, (place + 8 * length - 1 >> 12) + 1)
        assert readable[row] == (not length or not holes & {*pages})
        expected = LARGE[place : place + 8 * length] if readable[row] else b""
        assert words[rows == row].tobytes() == expected


def test_array_of_an_absurd_length_costs_no_other() -> None:
    reader = reader_of(LARGE)
    places = np.array([0, 64, 128, 1 << 20, (1 << 20) + 64], np.uint64) + BASE
    counts = np.array([4, 1 << 60, 4, (1 << 64) - 1, 4], np.uint64)
    _, _, readable = reader.read_arrays(places, counts)
    assert readable.tolist() == [True, False, True, False, True]
    assert reader.bytes < 1 << 10


def test_records_at_the_end_of_all_addresses() -> None:
    reader = reader_of(DATA)
    last = (1 << 64) - 8
    places = np.array([BASE, BASE + 8, last, last - 64, 0], np.uint64)
    _, readable = reader.read_records(places, 16)
    assert readable.tolist() == [True, True, False, False, False]


TOP = 0xFFFF_FFFF_F000_0000


def at_the_top() -> Reader:
    """A reader of the last addresses that there are, all of which can be read."""
    prog = Program(Platform(Architecture.X86_64))
    prog.add_memory_segment(TOP, 1 << 20, lambda at, count, *_: bytes(count))
    prog.add_memory_segment((1 << 64) - 4096, 4096, lambda at, count, *_: bytes(count))
    return Reader(prog)


@pytest.mark.parametrize("count", [1 << 25, 1 << 15, 1 << 61, (1 << 64) - 1])
def test_array_beyond_all_addresses_costs_no_other(count: int) -> None:
    places = np.array([TOP, TOP + 4096, TOP + 0x8_0000], np.uint64)
    counts = np.array([8, count, 1], np.uint64)
    words, rows, readable = at_the_top().read_arrays(places, counts)
    there = count == 1 << 15
    assert readable.tolist() == [True, there, True]
    assert len(words) == len(rows) == 9 + count * there


@pytest.mark.parametrize("size", [8, 16, 24])
def test_records_up_to_the_last_address_and_beyond(size: int) -> None:
    last = (1 << 64) - 16
    places = np.array([TOP, last - 64, last - 32, last, last], np.uint64)
    records, readable = at_the_top().read_records(places, size)
    assert records.shape == (5, size)
    assert readable.tolist() == [True, True, True, size <= 16, size <= 16]


def test_neighbours_come_with_one_read_however_long() -> None:
    reader = reader_of(LARGE)
    places = np.array([BASE, BASE + 800, BASE + 900], np.uint64)
    _, _, readable = reader.read_arrays(places, np.array([100, 2, 1], np.uint64))
    assert readable.all()
    assert reader.reads == 1


@pytest.mark.parametrize("hole", [None, 1])
@pytest.mark.parametrize("step", [8, 1])
def test_words_near(hole: int | None, step: int) -> None:
    holes = () if hole is None else (hole,)
    reader = reader_of(LARGE, holes, granule=4096)
    places = [place * step for place in (1, 2, 1, 700, 701, 5000)]
    words, readable = reader.words_near(np.array(places, np.uint64) + BASE)
    for place, word, is_there in zip(places, words.tolist(), readable, strict=True):
        assert is_there == (place >> 12 != hole)
        there = LARGE[place : place + 8] if is_there else b""
        assert word == int.from_bytes(there, "little")


@pytest.mark.parametrize("words", [[], [3], [5, 3, 5, 5, 4, 3], [(1 << 64) - 1, 0]])
def test_distinct(words: list[int]) -> None:
    assert distinct(np.array(words, np.uint64)).tolist() == sorted({*words})


def test_no_records() -> None:
    records, readable = reader_of(DATA).read_records(np.empty(0, np.uint64), 8)
    assert records.shape == (0, 8)
    assert len(readable) == 0
    assert len(column(records, 0)) == 0


def test_column() -> None:
    records = np.frombuffer(DATA[:32], np.uint8).reshape(2, 16)
    assert column(records, 3, 2).tolist() == [
        int.from_bytes(DATA[at : at + 2], "little") for at in (3, 19)
    ]


def failing(prog: Program, number: int) -> Reader:
    """A reader whose program's reads all fail with an error of the system."""

    def fail(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise OSError(number, os.strerror(number))

    prog.add_memory_segment(BASE, 4096, fail)
    return Reader(prog)


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EIO, errno.ENOMEM])
def test_what_the_system_refuses_is_a_fault(number: int) -> None:
    """As /proc/kcore may, and the disk that holds a dump."""
    reader = failing(Program(Platform(Architecture.X86_64)), number)
    with pytest.raises(FaultError, match=os.strerror(number)):
        reader.read(BASE, 8)
    _, (gap,) = reader.read_around_gaps(BASE, 4096, 4096)
    assert gap.reason == "unreadable"


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ESRCH, ProcessLookupError),
        (errno.EPIPE, BrokenPipeError),
        # That QEMU has no memory there any more tells nothing of the guest.
        (errno.EFAULT, FaultError),
    ],
)
def test_a_guest_that_is_gone_is_no_fault(number: int, error: type[Exception]) -> None:
    prog = Program(Platform(Architecture.X86_64))
    prog.set_linux_kernel_custom(
        "OSRELEASE=6.1\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=ffffffff81000000\n",
        is_live=True,
    )
    assert prog.flags & ProgramFlags.IS_LIVE
    with pytest.raises(error):
        failing(prog, number).read(BASE, 8)
