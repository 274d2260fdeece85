# SPDX-License-Identifier: LGPL-2.1-or-later

"""Bulk reads of memory with holes return what is readable, with few reads."""

import errno
import os
import random

import numpy as np
import pytest
from drgn import Architecture, FaultError, Platform, Program, ProgramFlags

from msatools.errors import MissingError
from msatools.kernel.reader import Reader, fault_reason
from msatools.kernel.structs import struct_layout
from tests.support.calls import demo

from .memory import BASE, reader_of


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


LARGE = random.Random(1).randbytes(1 << 21)
"""Memory for more than one span and one batch."""


@pytest.mark.parametrize("seed", range(8))
def test_records_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice((1, 8, 24, 700, 9000))
    count = chance.choice((4, 5, 50, 2000))
    near = chance.choice((1 << 12, 1 << 16, len(LARGE)))
    holes = {chance.randrange(near >> 12) for _ in range(seed)}
    reader = reader_of(LARGE, holes, granule=4096)
    offsets = [chance.randrange(near - size + 1) for _ in range(count)]
    records, readable = reader.read_records(np.array(offsets, np.uint64) + BASE, size)
    for offset, record, is_readable in zip(offsets, records, readable, strict=True):
        whole = not holes & {*range(offset >> 12, (offset + size - 1 >> 12) + 1)}
        expected = LARGE[offset : offset + size] if whole else bytes(size)
        assert is_readable == whole
        assert bytes(record) == expected


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
        np.array([BASE + offset for offset, _ in arrays], np.uint64),
        np.array([length for _, length in arrays], np.uint64),
    )
    for row, (offset, length) in enumerate(arrays):
        pages = range(offset >> 12, (offset + 8 * length - 1 >> 12) + 1)
        assert readable[row] == (not length or not holes & {*pages})
        expected = LARGE[offset : offset + 8 * length] if readable[row] else b""
        assert words[rows == row].tobytes() == expected


def test_array_of_an_absurd_length_affects_no_other() -> None:
    reader = reader_of(LARGE)
    addresses = np.array([0, 64, 128, 1 << 20, (1 << 20) + 64], np.uint64) + BASE
    counts = np.array([4, 1 << 60, 4, (1 << 64) - 1, 4], np.uint64)
    _, _, readable = reader.read_arrays(addresses, counts)
    assert readable.tolist() == [True, False, True, False, True]
    assert reader.bytes < 1 << 10


TOP = 0xFFFF_FFFF_F000_0000


def at_the_top() -> Reader:
    """Return a reader of memory up to the last address."""
    prog = Program(Platform(Architecture.X86_64))
    prog.add_memory_segment(TOP, 1 << 20, lambda at, count, *_: bytes(count))
    prog.add_memory_segment((1 << 64) - 4096, 4096, lambda at, count, *_: bytes(count))
    return Reader(prog)


@pytest.mark.parametrize("count", [1 << 25, 1 << 15, 1 << 61, (1 << 64) - 1])
def test_array_past_the_last_address_affects_no_other(count: int) -> None:
    addresses = np.array([TOP, TOP + 4096, TOP + 0x8_0000], np.uint64)
    counts = np.array([8, count, 1], np.uint64)
    words, rows, readable = at_the_top().read_arrays(addresses, counts)
    fits = count == 1 << 15
    assert readable.tolist() == [True, fits, True]
    assert len(words) == len(rows) == 9 + count * fits


@pytest.mark.parametrize("hole", [None, 1])
@pytest.mark.parametrize("step", [8, 1])
def test_words_near(hole: int | None, step: int) -> None:
    holes = () if hole is None else (hole,)
    reader = reader_of(LARGE, holes, granule=4096)
    offsets = [index * step for index in (1, 2, 1, 700, 701, 5000)]
    words, readable = reader.words_near(np.array(offsets, np.uint64) + BASE)
    for offset, word, is_readable in zip(
        offsets, words.tolist(), readable, strict=True
    ):
        assert is_readable == (offset >> 12 != hole)
        data = LARGE[offset : offset + 8] if is_readable else b""
        assert word == int.from_bytes(data, "little")


def failing(prog: Program, number: int) -> Reader:
    """Return a reader whose reads all fail with an errno."""

    def fail(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise OSError(number, os.strerror(number))

    prog.add_memory_segment(BASE, 4096, fail)
    return Reader(prog)


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EIO, errno.ENOMEM])
def test_error_of_a_system_call_is_a_fault(number: int) -> None:
    """Reads of /proc/kcore or of the dump's disk can fail."""
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
        # QEMU unmapped the memory: the guest may still run.
        (errno.EFAULT, FaultError),
    ],
)
def test_end_of_a_guest_is_not_a_fault(number: int, error: type[Exception]) -> None:
    prog = Program(Platform(Architecture.X86_64))
    prog.set_linux_kernel_custom(
        "OSRELEASE=6.1\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=ffffffff81000000\n",
        is_live=True,
    )
    assert prog.flags & ProgramFlags.IS_LIVE
    with pytest.raises(error):
        failing(prog, number).read(BASE, 8)


def test_bit_field_is_refused() -> None:
    """Its column would have other members' bits."""
    with pytest.raises(MissingError, match="bit field"):
        struct_layout(
            Reader(demo().prog), "struct task_struct", {"waits": ("in_iowait",)}
        )
