# SPDX-License-Identifier: LGPL-2.1-or-later

"""Contention of locks, summed over the samples of an interval."""

import math

import pytest

from msatools.locks import locks
from msatools.locks.locks import MAX_OWNERS, Contention, Locks, Met
from msatools.locks.report import Lock, OwnerSeen
from msatools.locks.report_builder import LocksOptions
from msatools.program.description import describe
from tests.locks.seen import STOCK
from tests.support.dumps import open_dump

SECOND = 10**9


def seen(pid: int, comm: str, where: str) -> OwnerSeen:
    return OwnerSeen(pid=pid, comm=comm, looks=1, where=where)


HOT, COLD = Lock("mutex", 0xFF10), Lock("rwsem", 0xFF20)
ONE, OTHER = seen(7, "one", "CPU"), seen(8, "other", "DSK folio_wait_bit")


def looks(*all_met: list[Met]) -> Contention:
    found = Contention()
    for met in all_met:
        found.add(met)
    return found


def test_lock_with_different_queues_in_each_sample() -> None:
    found = looks(
        [Met(HOT, 3, [ONE]), Met(COLD, 1, [])],
        [],
        [Met(HOT, 5, [ONE, OTHER])],
        [],
    )
    hot = found.contended(HOT, "mutex 0xff10", "i_rwsem", 10 * SECOND)
    assert (hot.lock, hot.type, hot.name) == ("mutex 0xff10", "mutex", "i_rwsem")
    assert (hot.looks, hot.share) == (4, 0.5)
    assert (hot.mean_queue, hot.max_queue) == (2.0, 5)
    # Two waiters on average wait for twice the interval.
    assert hot.wait_ns == 20 * SECOND
    deviation = math.sqrt((1 + 4 + 9 + 4) / 3)
    assert hot.error_ns == round(deviation / math.sqrt(4) * 10 * SECOND)
    assert [(o.pid, o.comm, o.looks, o.where) for o in hot.owners] == [
        (7, "one", 2, "CPU"),
        (8, "other", 1, "DSK folio_wait_bit"),
    ]
    cold = found.contended(COLD, "rwsem 0xff20", None, 10 * SECOND)
    assert (cold.share, cold.mean_queue, cold.owners) == (0.25, 0.25, ())


def test_single_sample_has_the_maximum_error() -> None:
    found = looks([Met(HOT, 3, [])]).contended(HOT, "", None, SECOND)
    assert found.wait_ns == found.error_ns == 3 * SECOND


@pytest.mark.parametrize("count", [1, 9])
def test_equal_samples_have_no_error(count: int) -> None:
    """The standard error of equal samples is 0."""
    found = looks(*[[Met(HOT, 2, [])]] * (count + 1))
    assert found.looks == count + 1
    assert found.contended(HOT, "", None, SECOND).error_ns == 0


def test_most_waited_for_is_first() -> None:
    assert looks([Met(COLD, 1, []), Met(HOT, 2, [])], []).ranked() == [HOT, COLD]
    assert looks().ranked() == []


def test_most_frequent_owners_are_listed() -> None:
    owners = [seen(pid, "", "") for pid in range(MAX_OWNERS + 1)]
    found = looks([Met(HOT, 1, owners)], [Met(HOT, 1, owners[1:])])
    listed = found.contended(HOT, "", None, SECOND).owners
    assert [owner.pid for owner in listed] == list(range(1, MAX_OWNERS + 1))


@pytest.mark.parametrize("most", [0, 5, 1000])
@pytest.mark.parametrize("run", STOCK)
def test_all_locks_are_listed(
    run: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks without a name are listed by address, with a note."""
    monkeypatch.setattr(locks, "MAX_NAMED", most)
    prog = open_dump(run, "btf")
    session = Locks(prog, describe(prog), LocksOptions())
    session.begin(lambda done, total: None)
    session.sample()
    report = session.advance(lambda done, total: None)
    assert report.contention is not None
    known = {lock.id: lock for lock in report.locks}
    found = {row.lock: row for row in report.contention}
    # Contention identifies file locks by another ID than the inode.
    by_address = {id_ for id_ in known if " inode " not in id_}
    assert by_address <= found.keys()
    assert len(found) == len(report.contention)
    unnamed = report.coverage["locks_unnamed"]
    assert unnamed == max(len(found) - most, 0)
    notes = [note for note in report.notes if note.code == "locks-unnamed"]
    assert len(notes) == (unnamed > 0)
    for id_ in by_address:
        assert found[id_].max_queue >= len(known[id_].waiters) > 0
        assert found[id_].name in (known[id_].name, None)
    named = [row for row in report.contention if row.name]
    assert len(named) <= most
