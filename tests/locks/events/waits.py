# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait for that nobody takes, and what the guest says of it."""

from collections.abc import Callable
from functools import lru_cache

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.lock_types import holders_of, queue_of, requests_of, what_of
from tests.locks.seen import Seen, Truth

TYPES = ("completion", "wait_queue", "folio", "bit_wait")


def event_of(context: LockContext, case: BlockedTask) -> Request | None:
    """Tell what a task waits for, if it is one of those."""
    found = [one for one in requests_of(context, case) if one.lock.type in TYPES]
    return found[0] if found else None


class Waits:
    """What some tasks wait for."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.context = seen.context()
        self.losses = self.context.losses
        self.requests = seen.requests(self.context, event_of)

    def queue(self, lock: Lock) -> list[int | None] | None:
        queued = queue_of(self.context, lock)
        return (
            None if queued is None else [self.context.pid(one.task) for one in queued]
        )

    def holders(self, lock: Lock) -> list[tuple[int | None, str]]:
        found = holders_of(self.context, lock)
        return [(self.context.pid(one.task), one.confidence) for one in found]

    def what(self, tid: int) -> str | None:
        case = self.seen.case(tid, self.context)
        return what_of(self.context, case, [self.requests[tid]])


@lru_cache(maxsize=4)
def waits(seen: Seen) -> Waits:
    return Waits(seen)


def check_locks(found: Waits, type_: str, check: Callable[[Truth, Lock], None]) -> int:
    """
    Hold all locks of a type against what the guest says: waiters and their order.

    :param check: Called with each lock as the guest has it and as it was found.
    :return: How many there are.
    """
    said = found.seen.locks(type_)
    for lock in said:
        pids = [waiter["pid"] for waiter in lock["waiters"]]
        (one,) = {found.requests[pid].lock for pid in pids}
        assert one.type == type_
        if lock["address"] is not None:
            assert one.address == int(lock["address"], 16)
        assert found.queue(one) == pids, lock["name"]
        check(lock, one)
    assert not found.losses.lost
    return len(said)
