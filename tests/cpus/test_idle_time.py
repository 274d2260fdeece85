# SPDX-License-Identifier: LGPL-2.1-or-later

"""Idle times of CPUs, including the current idle period."""

from collections.abc import Sequence

import numpy as np
import pytest
from drgn import Architecture, Platform, Program

from msatools.cpus.times import (
    Counts,
    IdleState,
    Ticks,
    _read_steady,
    awake,
    counts,
    idle_times,
    naps_of_ticks,
)
from msatools.kernel.reader import Reader

YES = np.ones(3, np.bool_)
NO = np.zeros(3, np.bool_)


def numbers(*values: int) -> Counts:
    return counts(np.array(values), np.ones(len(values), np.bool_))


def naps(
    since: Sequence[int],
    stolen: Sequence[int] = (0, 0, 0),
    stolen_iowait: Sequence[int] = (0, 0, 0),
) -> IdleState:
    return IdleState(
        numbers(100, 200, 300),
        numbers(10, 20, 30),
        np.array(since),
        (np.array(stolen), np.array(stolen_iowait)),
    )


def as_list(column: Counts) -> list[int | None]:
    return [column.at(row) for row in range(3)]


def test_stolen_time_is_subtracted() -> None:
    """It is subtracted from idle or iowait, down to 0."""
    waits = np.array([False, False, True])
    idle, iowait = idle_times(
        naps((50, 60, 70), stolen=(15, 99, 99), stolen_iowait=(99, 99, 5)),
        waits,
        YES,
        90,
    )
    assert as_list(idle) == [125, 200, 300]
    assert as_list(iowait) == [10, 20, 45]


def test_offline_cpus_keep_their_counts() -> None:
    ticks = Ticks(
        idle_ns=np.array([5, 6, 7]),
        iowait_ns=np.array([1, 2, 3]),
        since_ns=np.array([50, 60, 70]),
        idle=np.array([True, True, False]),
        readable=np.array([True, True, False]),
        latest_ns=70,
    )
    online = np.array([True, False, True])
    found = naps_of_ticks(ticks, online, numbers(100, 200, 300), numbers(10, 20, 30))
    assert as_list(found.idle) == [5, 200, None]
    assert as_list(found.iowait) == [1, 20, None]
    assert found.since.tolist() == [50, 0, 0]


@pytest.mark.parametrize("live", [False, True])
def test_record_that_changes_while_it_is_read(live: bool) -> None:
    """On a running kernel it is read again until it is stable."""
    prog = Program(Platform(Architecture.X86_64))
    reads = {0x1000: 0, 0x9000: 0}

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        start = address - offset
        reads[start] += 1
        number = min(reads[start], 3) if start == 0x1000 else 7
        return bytes([number] * count)

    for start in reads:
        prog.add_memory_segment(start, 16, read)
    addresses = np.array(list(reads), np.uint64)
    records, readable = _read_steady(Reader(prog), addresses, 16, live)
    assert records[:, 0].tolist() == [3 if live else 1, 7]
    assert readable.all()
    assert list(reads.values()) == ([4, 2] if live else [1, 1])


def test_awake() -> None:
    idle, iowait = idle_times(awake(numbers(1, 2, 3), numbers(4, 5, 6)), NO, NO, None)
    assert as_list(idle) == [1, 2, 3]
    assert as_list(iowait) == [4, 5, 6]
