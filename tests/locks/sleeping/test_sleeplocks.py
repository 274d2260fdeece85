# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sleeping locks of the lab's module are found for exactly their waiters."""

from functools import lru_cache

import pytest

from msatools.locks import sleeping_locks
from msatools.locks.context import LockContext
from msatools.locks.lock_types import holders_of, queue_of
from msatools.locks.report import Request
from msatools.locks.sleeping_locks import PERCPU_RWSEM, SLEEPING_LOCK
from tests.locks.seen import Seen, lock_of

TYPES = SLEEPING_LOCK.names | PERCPU_RWSEM.names


@lru_cache(maxsize=2)
def requests_of(seen: Seen) -> tuple[LockContext, dict[int, Request]]:
    context = seen.context()
    return context, seen.requests(context, sleeping_locks.sleeping_request)


@pytest.fixture
def context(module: Seen) -> LockContext:
    return requests_of(module)[0]


@pytest.fixture
def requests(module: Seen) -> dict[int, Request]:
    return requests_of(module)[1]


def test_lock_of_every_waiter(
    module: Seen, context: LockContext, requests: dict[int, Request]
) -> None:
    """All waiters have requests, and no other threads.

    The order of waiters and the owners are facts in ``tests/truth/locks.py``.
    """
    assert not context.losses.lost
    assert not context.losses.notes
    expected = {
        waiter["pid"]: Request(lock_of(lock), waiter["mode"])
        for lock in module.locks(*TYPES)
        for waiter in lock["waiters"]
    }
    assert requests == expected
    assert len(expected) > 30
    assert {request.lock.type for request in expected.values()} == TYPES


def test_one_thread_alone(
    module: Seen, context: LockContext, requests: dict[int, Request]
) -> None:
    """The other threads need not be in the table of tasks."""
    for tid, request in requests.items():
        one = module.only(tid)
        alone = one.context()
        assert sleeping_locks.sleeping_request(alone, one.case(tid, alone)) == request
        for find in (queue_of, holders_of):
            assert find(alone, request.lock) == find(context, request.lock)
        assert not alone.losses.lost
