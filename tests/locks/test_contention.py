# SPDX-License-Identifier: LGPL-2.1-or-later

"""What looks within an interval have met of locks, summed up."""

import math

import pytest

from msatools.locks import locks
from msatools.locks.base.lock import Lock
from msatools.locks.contention import MAX_OWNERS, Contention, Met, SeenOwner
from msatools.locks.locks import Locks
from msatools.locks.options import LocksOptions
from msatools.target.describe import describe
from tests.locks.seen import STOCK
from tests.support.dumps import open_dump

SECOND = 10**9
HOT, COLD = Lock("mutex", 0xFF10), Lock("rwsem", 0xFF20)
ONE, OTHER = SeenOwner(7, "one", "CPU"), SeenOwner(8, "other", "DSK folio_wait_bit")


def looks(*all_met: list[Met]) -> Contention:
    found = Contention()
    for met in all_met:
        found.add(met)
    return found


def test_a_lock_that_each_look_met_otherwise() -> None:
    found = looks(
        [Met(HOT, 3, [ONE]), Met(COLD, 1, [])],
        [],
        [Met(HOT, 5, [ONE, OTHER])],
        [],
    )
    told = found.contended(HOT, "mutex 0xff10", "i_rwsem", 10 * SECOND)
    assert (told.lock, told.type, told.name) == ("mutex 0xff10", "mutex", "i_rwsem")
    assert (told.looks, told.share) == (4, 0.5)
    assert (told.mean_queue, told.max_queue) == (2.0, 5)
    # Two waiters at any time wait for twice as long as the interval.
    assert told.wait_ns == 20 * SECOND
    deviation = math.sqrt((1 + 4 + 9 + 4) / 3)
    assert told.error_ns == round(deviation / math.sqrt(4) * 10 * SECOND)
    assert [(o.pid, o.comm, o.looks, o.where) for o in told.owners] == [
        (7, "one", 2, "CPU"),
        (8, "other", 1, "DSK folio_wait_bit"),
    ]
    cold = found.contended(COLD, "rwsem 0xff20", None, 10 * SECOND)
    assert (cold.share, cold.mean_queue, cold.owners) == (0.25, 0.25, ())


def test_one_look_is_no_certainty() -> None:
    told = looks([Met(HOT, 3, [])]).contended(HOT, "", None, SECOND)
    assert told.wait_ns == told.error_ns == 3 * SECOND


@pytest.mark.parametrize("count", [1, 9])
def test_looks_that_agree(count: int) -> None:
    """All that is known of it is that it did not change."""
    found = looks(*[[Met(HOT, 2, [])]] * (count + 1))
    assert found.looks == count + 1
    assert found.contended(HOT, "", None, SECOND).error_ns == 0


def test_most_waited_for_is_first() -> None:
    assert looks([Met(COLD, 1, []), Met(HOT, 2, [])], []).ranked() == [HOT, COLD]
    assert looks().ranked() == []


def test_owners_met_most_often_are_told() -> None:
    owners = [SeenOwner(pid, "", "") for pid in range(MAX_OWNERS + 1)]
    found = looks([Met(HOT, 1, owners)], [Met(HOT, 1, owners[1:])])
    told = found.contended(HOT, "", None, SECOND).owners
    assert [each.pid for each in told] == list(range(1, MAX_OWNERS + 1))


@pytest.mark.parametrize("most", [0, 5, 1000])
@pytest.mark.parametrize("run", STOCK)
def test_all_locks_are_told(
    run: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are not named: by where they are, and with a note."""
    monkeypatch.setattr(locks, "MAX_NAMED", most)
    prog = open_dump(run, "btf")
    session = Locks(prog, describe(prog), LocksOptions())
    session.begin(lambda done, total: None)
    session.sample()
    report = session.advance(lambda done, total: None)
    assert report.contention is not None
    known = {lock.id: lock for lock in report.locks}
    told = {each.lock: each for each in report.contention}
    # Those in files are known by another number there than by the inode's.
    by_place = {id_ for id_ in known if " inode " not in id_}
    assert by_place <= told.keys()
    assert len(told) == len(report.contention)
    unnamed = report.coverage["locks_unnamed"]
    assert unnamed == max(len(told) - most, 0)
    notes = [note for note in report.notes if note.code == "locks-unnamed"]
    assert len(notes) == (unnamed > 0)
    for id_ in by_place:
        assert told[id_].max_queue >= len(known[id_].waiters) > 0
        assert told[id_].name in (known[id_].name, None)
    named = [each for each in report.contention if each.name]
    assert len(named) <= most
