# SPDX-License-Identifier: LGPL-2.1-or-later

"""Owners of a lock, from its own record and from stacks."""

import pytest
from msgspec.structs import replace

from msatools.locks.graph import MAX_BY_STACK, Owned, owners
from msatools.locks.report import Lock, OwnerConfidence

RWSEM = Lock("rwsem", 0xFFFF888000001000)
MUTEX = Lock("mutex", 0xFFFF888000001000)
PERCPU = Lock("percpu_rwsem", 0xFFFF888000001000)
SEMAPHORE = Lock("semaphore", 0xFFFF888000001000)
FUTEX = Lock("futex", 0x4C1520)


def owners_of(
    lock: Lock = RWSEM,
    named: list[tuple[int, OwnerConfidence]] | None = None,
    readers: int | None = 1,
    seen: tuple[int, ...] = (),
    waiting: tuple[int, ...] = (),
    implied: tuple[int, ...] = (),
    refuted: tuple[int, ...] = (),
    others: tuple[int, ...] = (),
) -> tuple[Owned, ...]:
    def against(row: int) -> tuple[str, ...]:
        return ("it sleeps",) if row in refuted else ()

    return owners(
        *(lock, named or [], readers, seen, waiting),
        implied=implied,
        against=against,
        handles=lambda row: row not in others,
    )


def exact(row: int) -> Owned:
    return Owned(row, "exact", False, True)


def seen(row: int, firm: bool = True) -> Owned:
    """Make an owner with evidence on its stack."""
    return Owned(row, "evidence", True, firm)


LAST: list[tuple[int, OwnerConfidence]] = [(1, "likely")]
FIRST: list[tuple[int, OwnerConfidence]] = [(1, "exact")]
LIKELY = Owned(1, "likely", True, True)
IMPLIED = Owned(1, "likely", False, True)
REFUTED = Owned(1, "evidence", False, False, ("it sleeps",))
# Without evidence on its stack, it cannot close a cycle.
UNSEEN = Owned(1, "likely", False, False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # An exact owner is the only one: other stacks can be of former owners, or have
        # passed on the lock's address.
        (owners_of(MUTEX, FIRST, None, seen=(5, 6)), [exact(1)]),
        (owners_of(RWSEM, FIRST, 0, seen=(5,)), [exact(1)]),
        # The last reader.
        (owners_of(named=LAST, seen=(1, 7), waiting=(7,)), [LIKELY]),
        (owners_of(named=LAST), [UNSEEN]),
        # It has released the lock if another task is the only reader.
        (owners_of(named=LAST, seen=(5,)), [seen(5)]),
        # But a slot of a function that takes no such lock is left over.
        (owners_of(named=LAST, seen=(5,), others=(5,)), [UNSEEN]),
        (owners_of(named=LAST, seen=(5, 6)), [replace(UNSEEN, others=(5, 6))]),
        # Where a reader is goes before both, for as many as there are.
        (owners_of(implied=(3,)), [Owned(3, "likely", False, True)]),
        (owners_of(named=LAST, implied=(1,), seen=(5,)), [IMPLIED]),
        (owners_of(named=LAST, implied=(1,), seen=(5,), readers=2), [IMPLIED, seen(5)]),
        # A hint that is refuted is none, a word that is refuted is no owner.
        (owners_of(named=LAST, seen=(5,), refuted=(1,)), [seen(5)]),
        (owners_of(seen=(5,), refuted=(5,)), []),
        (owners_of(MUTEX, FIRST, None, refuted=(1,)), [REFUTED]),
        (owners_of(named=LAST, readers=2, seen=(1, 5)), [LIKELY, seen(5)]),
        # It can be the second reader, which has no evidence.
        (owners_of(named=LAST, readers=2, seen=(5,)), [UNSEEN, seen(5)]),
        # More tasks have evidence than there are readers: only the recorded one counts.
        (owners_of(named=LAST, seen=(1, 5)), [Owned(1, "likely", True, False)]),
        (owners_of(seen=(5, 6)), []),
        # A writer that waits for readers is first in the queue and not an owner.
        (owners_of(PERCPU, FIRST, 1, seen=(1, 5), waiting=(1, 2)), [seen(5)]),
        # An owner that acquires it again waits for itself.
        (owners_of(PERCPU, FIRST, 0, waiting=(1,)), [exact(1)]),
        (owners_of(SEMAPHORE, readers=None, seen=(5,)), [seen(5)]),
        (
            owners_of(SEMAPHORE, readers=None, seen=(5, 6)),
            [seen(5, firm=False), seen(6, firm=False)],
        ),
        # A lock word of the C library.
        (owners_of(FUTEX, LAST, None), [Owned(1, "likely", False, True)]),
        (owners_of(), []),
        (owners_of(MUTEX, readers=None, seen=(5,)), []),
    ],
)
def test_owners(found: tuple[Owned, ...], expected: list[Owned]) -> None:
    assert [*found] == expected


def test_last_reader_if_stacks_were_not_searched() -> None:
    """It is an owner only with evidence on its own stack."""
    assert owners(RWSEM, LAST, 1, (), (), searched=False) == ()
    found = owners(RWSEM, LAST, 1, (1,), (), searched=False)
    assert [own.row for own in found] == [1]


def test_a_thousand_readers() -> None:
    assert len(owners_of(readers=1000, seen=tuple(range(1000)))) == MAX_BY_STACK
