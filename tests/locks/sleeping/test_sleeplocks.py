# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sleeping locks of the lab's module: waiters, order, modes, owners, addresses."""

from functools import lru_cache

import pytest

from msatools.locks.lock import Request
from msatools.locks.look import Look
from msatools.locks.sleeping import sleeplocks
from tests.locks.seen import Seen, lock_of

# Whom no word of the lock names: readers but the last, who has a semaphore, who is
# inside a percpu_rwsem, and a last reader that has gone.
NOT_NAMED = {"semaphore", "semaphore-of-two", "percpu-written"}


@lru_cache(maxsize=2)
def requests_of(seen: Seen) -> tuple[Look, dict[int, Request]]:
    look = seen.look()
    return look, seen.requests(look, sleeplocks.request)


@pytest.fixture
def look(module: Seen) -> Look:
    return requests_of(module)[0]


@pytest.fixture
def requests(module: Seen) -> dict[int, Request]:
    return requests_of(module)[1]


def test_what_every_thread_waits_for(
    module: Seen, requests: dict[int, Request]
) -> None:
    """All that wait for one, and no others."""
    expected = {
        waiter["pid"]: Request(lock_of(lock), waiter["mode"])
        for lock in module.locks(*sleeplocks.TYPES)
        for waiter in lock["waiters"]
    }
    assert requests == expected
    assert len(expected) > 30
    assert {request.lock.type for request in expected.values()} == sleeplocks.TYPES


def test_the_order_of_waiters(module: Seen, look: Look) -> None:
    for lock in module.locks(*sleeplocks.TYPES):
        queue = sleeplocks.queue(look, lock_of(lock))
        assert queue is not None, lock["name"]
        found = [(look.pid(waiter.task), waiter.mode) for waiter in queue]
        should = [(waiter["pid"], waiter["mode"]) for waiter in lock["waiters"]]
        assert found == should, lock["name"]


def test_owners(module: Seen, look: Look) -> None:
    """Those that have a lock for themselves are exact; the last reader is likely."""
    for lock in module.locks(*sleeplocks.TYPES):
        name = lock["name"]
        held = sleeplocks.holders(look, lock_of(lock))
        found = [(look.pid(holder.task), holder.confidence) for holder in held]
        if name == "percpu-read":
            # The writer keeps all others out while it waits for the reader.
            assert found == [(lock["waiters"][0]["pid"], "exact")]
        elif name == "stale-rwsem":
            # It names the last that came, which has gone; who stays is not named.
            assert lock["owners"][0]["pid"] not in dict(found)
            assert [confidence for _, confidence in found] == ["likely"]
        elif name in NOT_NAMED:
            assert found == []
        elif lock["readers"]:
            assert found == [(lock["owners"][-1]["pid"], "likely")], name
        else:
            assert found == [(lock["owners"][0]["pid"], "exact")], name


def test_readers(module: Seen, look: Look) -> None:
    counted = 0
    for lock in module.locks(*sleeplocks.TYPES):
        found = sleeplocks.readers(look, lock_of(lock))
        if lock["type"] in ("rwsem", "percpu_rwsem"):
            assert found == lock["readers"], lock["name"]
            counted += found or 0
        else:
            assert found is None
    assert counted > 5
    assert not look.findings.lost
    assert not look.findings.notes


def test_one_thread_alone(
    module: Seen, look: Look, requests: dict[int, Request]
) -> None:
    """Others than it need not be in the table of tasks."""
    for tid, request in requests.items():
        one = module.only(tid)
        alone = one.look()
        assert sleeplocks.request(alone, one.case(tid, alone)) == request
        for asked in (sleeplocks.queue, sleeplocks.holders):
            assert asked(alone, request.lock) == asked(look, request.lock)
        assert not alone.findings.lost
