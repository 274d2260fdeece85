# SPDX-License-Identifier: LGPL-2.1-or-later

"""Folios and bits that tasks wait for."""

from msgspec.structs import replace

from msatools.locks import wait_queues as bitwaits
from msatools.locks import wait_queues as folios
from msatools.locks.wait_queues import wait_queues
from tests.locks.events.waits import waits
from tests.locks.seen import Seen


def test_bit_of_a_folio(tasks: Seen) -> None:
    found = waits(tasks)
    for task, bit in {
        **dict.fromkeys(("disk-read", "file-read", "swap-in", "fault-text"), "locked"),
        "disk-fsync": "writeback",
    }.items():
        tid = tasks.tid(task)
        lock = found.requests[tid].lock
        assert (lock.type, found.what(tid)) == ("folio", bit), task
        assert found.queue(lock) == [tid]


def test_others_in_the_same_bucket_are_left_out(tasks: Seen) -> None:
    """The queue of another folio or bit in the same hash bucket is empty."""
    found = waits(tasks)
    buckets = wait_queues(found.context).buckets
    for task, queue in (
        ("file-read", folios.folio_queue),
        ("journal-thread", bitwaits.bit_queue),
    ):
        lock = found.requests[tasks.tid(task)].lock
        assert isinstance(lock.key, int)
        for other in (
            replace(lock, address=(lock.address or 0) + 64),
            replace(lock, key=lock.key + 1),
        ):
            buckets[other] = buckets[lock]
            assert queue(found.context, other) == []
            del buckets[other]
            assert queue(found.context, other) is None
