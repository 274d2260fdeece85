# SPDX-License-Identifier: LGPL-2.1-or-later

"""File locks: waiters in order, modes and owners."""

import struct

import pytest

from msatools.errors import DamagedDataError
from msatools.locks import file_locks
from msatools.locks.context import LockContext
from msatools.locks.report import Lock, Request
from tests.locks.seen import STOCK, TASKS, Seen, Truth, damaged, seen
from tests.support.overlay import put

FILE_LOCKS = ("posix_lock", "flock")


@pytest.fixture(params=[*TASKS, *STOCK])
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(request.param)


def request_of(dump: Seen, context: LockContext, name: str) -> Request:
    found = file_locks.request(context, dump.case(name, context))
    assert found is not None, name
    return found


def owner_of(task: Truth) -> int:
    on = task["on"]
    owner: int = on["owners"][0]["pid"] if "owners" in on else on["owner"]
    return owner


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_every_lock_and_its_owner(dump: Seen, alone: bool) -> None:
    context = dump.context(alone)
    named = dump.waits(*FILE_LOCKS)
    assert len(named) >= 3
    for name, task in named.items():
        request = request_of(dump, context, name)
        assert request.lock.type == task["on"]["kind"], name
        assert request.mode == task.get("mode", request.mode), name
        (holder,) = file_locks.holders(context, request.lock)
        assert dump.pids([holder.task]) == [owner_of(task)], name
        # A lock of an open file can belong to any process that has the file open.
        of_process = request.lock.type == "posix_lock" and "ofd" not in name
        assert holder.confidence == ("exact" if of_process else "likely"), name
        assert dict(queue(dump, context, request))[task["tid"]] == request.mode, name
    assert not context.losses.lost


def queue(
    dump: Seen, context: LockContext, request: Request
) -> list[tuple[int, object]]:
    """Return the waiters of a lock and their modes."""
    found = file_locks.queue(context, request.lock) or ()
    pids = dump.pids(waiter.task for waiter in found)
    return list(zip(pids, [waiter.mode for waiter in found], strict=True))


def test_task_without_a_file_lock_request(dump: Seen) -> None:
    context = dump.context()
    case = dump.case("flock-owner", context)
    assert file_locks.request(context, case) is None
    assert file_locks.file_lock(context, case) is None


def test_lock_of_another_type_has_no_owner(dump: Seen) -> None:
    """Freed memory can have been reused for a lock of another type."""
    context = dump.context()
    for name, task in dump.waits(*FILE_LOCKS).items():
        lock = request_of(dump, context, name).lock
        other = "flock" if task["on"]["kind"] == "posix_lock" else "posix_lock"
        assert file_locks.holders(context, Lock(other, lock.address)) == []


def member(context: LockContext, name: str) -> int:
    """Return the offset of a member; since v6.9 they are in struct file_lock_core."""
    if context.layout.has("file_lock", "c.flc_wait"):
        return context.layout.offset("file_lock_core", f"flc_{name}")
    return context.layout.offset("file_lock", f"fl_{name}")


def test_damaged_blockers(tasks: Seen) -> None:
    """A blocker that is its own blocker, or an invalid address, is a fault."""
    dump = damaged(tasks.run.name)
    context = dump.context()
    case = dump.case("flock", context)
    lock = request_of(tasks, tasks.context(), "flock").lock.address
    assert lock
    for blocker in (lock, 8):
        put(dump.prog, lock + member(context, "blocker"), struct.pack("<Q", blocker))
        with pytest.raises(DamagedDataError):
            file_locks.request(context, case)
    put(dump.prog, lock + member(context, "blocker"), bytes(8))
    assert file_locks.request(context, case) is not None


def test_woken_waiter_is_no_owner(tasks: Seen) -> None:
    """Its own waiters still refer to it, but it has no blocker and owns nothing."""
    dump = damaged(tasks.run.name)
    context = dump.context()
    lock = request_of(tasks, tasks.context(), "flock").lock
    address = (lock.address or 0) + member(context, "list")
    assert file_locks.holders(context, lock)
    put(dump.prog, address, struct.pack("<Q", address))
    assert file_locks.holders(dump.context(), lock) == []
    on = file_locks.file_lock(dump.context(), dump.case("flock", dump.context()))
    assert on is not None
    assert on.owner is None


def test_owner_of_a_chain_is_its_root(tasks: Seen) -> None:
    """A waiter for a waiter waits for the holder."""
    dump = damaged(tasks.run.name)
    context = dump.context()
    held = request_of(tasks, tasks.context(), "flock").lock.address or 0
    other = request_of(tasks, tasks.context(), "posix-lock").lock.address or 0
    on = file_locks.file_lock(
        tasks.context(), tasks.case("posix-lock", tasks.context())
    )
    assert on is not None
    put(dump.prog, held + member(context, "blocker"), struct.pack("<Q", other))
    found = file_locks.file_lock(dump.context(), dump.case("flock", dump.context()))
    assert found is not None
    assert (found.kind, found.owner) == ("posix_lock", on.owner)


def test_damaged_queue(tasks: Seen) -> None:
    dump = damaged(tasks.run.name)
    context = dump.context()
    lock = request_of(tasks, tasks.context(), "flock").lock
    address = (lock.address or 0) + member(context, "blocked_requests")
    (first,) = dump.reader.words(address, 1).tolist()
    # Its only waiter points to itself.
    put(dump.prog, first, struct.pack("<Q", first))
    assert file_locks.queue(context, lock) is None
    assert context.losses.lost["waiters_unreadable"] == 1
