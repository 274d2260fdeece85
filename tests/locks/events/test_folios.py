# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages and bits that tasks wait for."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from msatools.locks.events import bitwaits, folios
from msatools.locks.lock import Lock
from tests.locks.events.test_completions import ALL_KINDS, KINDS
from tests.locks.events.waits import STOCK, TASKS, check_locks, look_for, waits
from tests.support.dumps import open_dump


@pytest.mark.parametrize(("name", "types"), list(product(STOCK, KINDS)))
def test_pages_and_their_files(name: str, types: str) -> None:
    seen = waits(name, types)

    def check(said: dict[str, Any], lock: Lock) -> None:
        assert seen.holders(lock) == []
        assert lock.address is not None
        inode = seen.look.storage.host_of_folio(lock.address)
        assert inode is not None
        index = seen.look.layout.member(lock.address, "page", "index")
        assert said.get("inode") in (None, inode.number)
        assert said.get("index") in (None, index)
        for waiter in said["waiters"]:
            assert seen.what(waiter["pid"]) == "locked"

    assert check_locks(seen, "folio", check) >= 5
    assert not seen.findings.lost


@pytest.mark.parametrize(("name", "types"), ALL_KINDS)
def test_bits(name: str, types: str) -> None:
    seen = waits(name, types)

    def check(said: dict[str, Any], lock: Lock) -> None:
        # Who has set it is known to nobody but the guest.
        assert seen.holders(lock) == []
        assert said.get("bit", lock.key) == lock.key

    assert check_locks(seen, "bit_wait", check) >= 1


@pytest.mark.parametrize("name", TASKS)
def test_what_a_page_is_waited_for(name: str) -> None:
    seen = waits(name)
    for task, bit in {
        **dict.fromkeys(("disk-read", "file-read", "swap-in", "fault-text"), "locked"),
        "disk-fsync": "writeback",
    }.items():
        pid = seen.named(task)
        lock = seen.requests[pid].lock
        assert (lock.type, seen.what(pid)) == ("folio", bit), task
        assert seen.queue(lock) == [pid]


@pytest.mark.parametrize("name", TASKS)
def test_what_a_bit_is_of(name: str) -> None:
    """A page knows its buffers, but for those that a journal makes of its own."""
    seen = waits(name)
    for task, known in {"directory-lookup": True, "journal-thread": False}.items():
        pid = seen.named(task)
        lock = seen.requests[pid].lock
        # BH_Lock
        assert (lock.type, lock.key) == ("bit_wait", 2)
        device = seen.look.storage.device_of_buffer(lock.address or 0)
        assert (device is not None) == known
        assert seen.queue(lock) == [pid]


@pytest.mark.parametrize("name", TASKS)
def test_others_in_the_same_bucket_are_left_out(name: str) -> None:
    """Asked for another page or bit on the same queue, nobody is told."""
    seen = waits(name)
    for task, queue in (
        ("file-read", folios.queue),
        ("journal-thread", bitwaits.queue),
    ):
        lock = seen.requests[seen.named(task)].lock
        assert isinstance(lock.key, int)
        head = seen.look.queues.buckets[lock]
        for other in (
            replace(lock, address=(lock.address or 0) + 64),
            replace(lock, key=lock.key + 1),
        ):
            seen.look.queues.buckets[other] = head
            assert queue(seen.look, other) == []
            del seen.look.queues.buckets[other]
            assert queue(seen.look, other) is None


@pytest.mark.parametrize("name", TASKS)
def test_one_task_is_told_without_the_others(name: str) -> None:
    whole = waits(name)
    for task in ("disk-read", "fault-data", "directory-lookup", "file-fsync"):
        seen = look_for(open_dump(name, "btf"), name, alone=task)
        pid = whole.named(task)
        assert seen.requests == {pid: whole.requests[pid]}
        assert seen.queue(seen.requests[pid].lock) == [pid]
        assert not seen.findings.notes
