# SPDX-License-Identifier: LGPL-2.1-or-later

"""Folios and bits that tasks wait for."""

from msgspec.structs import replace

from msatools.locks import wait_queues as bitwaits
from msatools.locks import wait_queues as folios
from msatools.locks.report import Lock
from msatools.locks.wait_queues import wait_queues
from tests.locks.events.waits import Waits, check_locks, waits
from tests.locks.seen import Seen, Truth


def test_folios_and_their_files(stock: Seen) -> None:
    found = waits(stock)

    def check(truth: Truth, lock: Lock) -> None:
        assert found.holders(lock) == []
        assert lock.address is not None
        inode = found.context.storage.host_of_folio(lock.address)
        assert inode is not None
        index = found.context.layout.member(lock.address, "page", "index")
        assert truth.get("inode") in (None, inode.number)
        assert truth.get("index") in (None, index)
        for waiter in truth["waiters"]:
            assert found.what(waiter["pid"]) == "locked"

    assert check_locks(found, "folio", check) >= 5


def test_bits(locks: Seen) -> None:
    found = waits(locks)

    def check(truth: Truth, lock: Lock) -> None:
        # The kernel does not record the owner of a bit.
        assert found.holders(lock) == []
        assert truth.get("bit", lock.key) == lock.key

    assert check_locks(found, "bit_wait", check) >= 1


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


def test_device_of_a_buffer(tasks: Seen) -> None:
    """A buffer's device is known by its page, except for a journal's own buffers."""
    found = waits(tasks)
    for task, known in {"directory-lookup": True, "journal-thread": False}.items():
        tid = tasks.tid(task)
        lock = found.requests[tid].lock
        # BH_Lock
        assert (lock.type, lock.key) == ("bit_wait", 2)
        device = found.context.storage.device_of_buffer(lock.address or 0)
        assert (device is not None) == known
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


def test_single_task_without_the_others(tasks: Seen) -> None:
    for task in ("disk-read", "fault-data", "directory-lookup", "file-fsync"):
        tid = tasks.tid(task)
        found = Waits(tasks.only(tid))
        assert found.requests == {tid: waits(tasks).requests[tid]}
        assert found.queue(found.requests[tid].lock) == [tid]
        assert not found.losses.notes
