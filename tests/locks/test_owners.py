# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who has a lock: what it says of itself, and what stacks say."""

from msatools.locks.lock import Lock, OwnerConfidence
from msatools.locks.owners import MAX_TOLD, Owned, owners

RWSEM = Lock("rwsem", 0xFFFF888000001000)
MUTEX = Lock("mutex", 0xFFFF888000001000)


def told(
    lock: Lock = RWSEM,
    named: list[tuple[int, OwnerConfidence]] | None = None,
    readers: int | None = 1,
    seen: tuple[int, ...] = (),
    waiting: tuple[int, ...] = (),
) -> tuple[Owned, ...]:
    return owners(lock, named or [], readers, seen, waiting)


def test_exact_owner_is_the_only_one() -> None:
    """Others may have had it, or have passed its address on."""
    expected = (Owned(1, "exact", False, True),)
    assert told(MUTEX, [(1, "exact")], None, seen=(5, 6)) == expected
    assert told(RWSEM, [(1, "exact")], 0, seen=(5,)) == expected


def test_last_reader_that_is_seen() -> None:
    named: list[tuple[int, OwnerConfidence]] = [(1, "likely")]
    expected = (Owned(1, "likely", True, True),)
    assert told(named=named, seen=(1, 7), waiting=(7,)) == expected


def test_last_reader_that_is_not_seen_may_close_no_cycle() -> None:
    expected = (Owned(1, "likely", False, False),)
    assert told(named=[(1, "likely")]) == expected


def test_last_reader_has_left_when_another_is_the_only_one() -> None:
    expected = (Owned(5, "evidence", True, True),)
    assert told(named=[(1, "likely")], seen=(5,)) == expected


def test_two_readers() -> None:
    found = told(named=[(1, "likely")], readers=2, seen=(1, 5))
    assert found == (Owned(1, "likely", True, True), Owned(5, "evidence", True, True))
    # The last one may be the second that is not seen.
    found = told(named=[(1, "likely")], readers=2, seen=(5,))
    assert found == (Owned(1, "likely", False, False), Owned(5, "evidence", True, True))


def test_more_seen_than_there_are() -> None:
    """The lock's own word is left, which closes no cycle."""
    found = told(named=[(1, "likely")], seen=(1, 5))
    assert found == (Owned(1, "likely", True, False),)
    assert told(seen=(5, 6)) == ()


def test_writer_that_waits_for_readers() -> None:
    """It is first in the queue, and not its own owner."""
    lock = Lock("percpu_rwsem", 0xFFFF888000001000)
    expected = (Owned(5, "evidence", True, True),)
    assert told(lock, [(1, "exact")], 1, seen=(1, 5), waiting=(1, 2)) == expected
    # Who has it and wants it again waits for itself.
    assert told(lock, [(1, "exact")], 0, waiting=(1,)) == (
        Owned(1, "exact", False, True),
    )


def test_last_reader_where_others_were_not_looked_at() -> None:
    """It is told only if its own stack says so, too."""
    named: list[tuple[int, OwnerConfidence]] = [(1, "likely")]
    assert owners(RWSEM, named, 1, (), (), searched=False) == ()
    found = owners(RWSEM, named, 1, (1,), (), searched=False)
    assert [own.row for own in found] == [1]


def test_a_thousand_readers() -> None:
    assert len(told(readers=1000, seen=tuple(range(1000)))) == MAX_TOLD


def test_semaphore() -> None:
    lock = Lock("semaphore", 0xFFFF888000001000)
    assert told(lock, readers=None, seen=(5,)) == (Owned(5, "evidence", True, True),)
    found = told(lock, readers=None, seen=(5, 6))
    assert found == (
        Owned(5, "evidence", True, False),
        Owned(6, "evidence", True, False),
    )


def test_word_of_the_c_library() -> None:
    lock = Lock("futex", 0x4C1520)
    found = told(lock, [(3, "likely")], None)
    assert found == (Owned(3, "likely", False, True),)


def test_nobody() -> None:
    assert told() == told(MUTEX, readers=None, seen=(5,)) == ()
