# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who has a lock: what it says of itself, and what stacks say."""

import pytest

from msatools.locks.base.lock import Lock, OwnerConfidence
from msatools.locks.owners import MAX_BY_STACK, Owned, owners

RWSEM = Lock("rwsem", 0xFFFF888000001000)
MUTEX = Lock("mutex", 0xFFFF888000001000)
PERCPU = Lock("percpu_rwsem", 0xFFFF888000001000)
SEMAPHORE = Lock("semaphore", 0xFFFF888000001000)
FUTEX = Lock("futex", 0x4C1520)


def told(
    lock: Lock = RWSEM,
    named: list[tuple[int, OwnerConfidence]] | None = None,
    readers: int | None = 1,
    seen: tuple[int, ...] = (),
    waiting: tuple[int, ...] = (),
) -> tuple[Owned, ...]:
    return owners(lock, named or [], readers, seen, waiting)


def exact(row: int) -> Owned:
    return Owned(row, "exact", False, True)


def seen(row: int, firm: bool = True) -> Owned:
    """Make one whose stack says that it has the lock."""
    return Owned(row, "evidence", True, firm)


LAST: list[tuple[int, OwnerConfidence]] = [(1, "likely")]
FIRST: list[tuple[int, OwnerConfidence]] = [(1, "exact")]
LIKELY = Owned(1, "likely", True, True)
# Not seen, it may close no cycle.
UNSEEN = Owned(1, "likely", False, False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # An exact owner is the only one: others may have had it, or have passed its
        # address on.
        (told(MUTEX, FIRST, None, seen=(5, 6)), [exact(1)]),
        (told(RWSEM, FIRST, 0, seen=(5,)), [exact(1)]),
        # The last reader.
        (told(named=LAST, seen=(1, 7), waiting=(7,)), [LIKELY]),
        (told(named=LAST), [UNSEEN]),
        # It has left when another is the only one.
        (told(named=LAST, seen=(5,)), [seen(5)]),
        (told(named=LAST, readers=2, seen=(1, 5)), [LIKELY, seen(5)]),
        # It may be the second that is not seen.
        (told(named=LAST, readers=2, seen=(5,)), [UNSEEN, seen(5)]),
        # More are seen than there are: the lock's own word is left.
        (told(named=LAST, seen=(1, 5)), [Owned(1, "likely", True, False)]),
        (told(seen=(5, 6)), []),
        # A writer that waits for readers is first in the queue, and no owner.
        (told(PERCPU, FIRST, 1, seen=(1, 5), waiting=(1, 2)), [seen(5)]),
        # Who has it and wants it again waits for itself.
        (told(PERCPU, FIRST, 0, waiting=(1,)), [exact(1)]),
        (told(SEMAPHORE, readers=None, seen=(5,)), [seen(5)]),
        (
            told(SEMAPHORE, readers=None, seen=(5, 6)),
            [seen(5, firm=False), seen(6, firm=False)],
        ),
        # A word of the C library.
        (told(FUTEX, LAST, None), [Owned(1, "likely", False, True)]),
        (told(), []),
        (told(MUTEX, readers=None, seen=(5,)), []),
    ],
)
def test_owners(found: tuple[Owned, ...], expected: list[Owned]) -> None:
    assert [*found] == expected


def test_last_reader_where_others_were_not_looked_at() -> None:
    """It is told only if its own stack says so, too."""
    assert owners(RWSEM, LAST, 1, (), (), searched=False) == ()
    found = owners(RWSEM, LAST, 1, (1,), (), searched=False)
    assert [own.row for own in found] == [1]


def test_a_thousand_readers() -> None:
    assert len(told(readers=1000, seen=tuple(range(1000)))) == MAX_BY_STACK
