# SPDX-License-Identifier: LGPL-2.1-or-later

"""Requests of tasks for events (completions, wait queues, folios, bits)."""

from functools import lru_cache

from msatools.locks.context import BlockedTask, LockContext
from msatools.locks.lock_types import holders_of, queue_of, requests_of, what_of
from msatools.locks.report import Lock, Request
from tests.locks.seen import Seen

TYPES = ("completion", "wait_queue", "folio", "bit_wait")


def event_of(context: LockContext, case: BlockedTask) -> Request | None:
    """Return the event that a task waits for; ``None`` if it waits for no event."""
    requests = requests_of(context, case)
    return next((r for r in requests if r.lock.type in TYPES), None)


class Waits:
    """The events that some tasks wait for."""

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
