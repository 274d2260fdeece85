# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks on files: who waits for them, in what order, and who has them."""

import struct

import pytest
from drgn import FaultError

from msatools.locks.base.lock import Lock, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.user import filelocks
from tests.locks.seen import STOCK, TASKS, Seen, Truth, damaged, seen
from tests.support.overlay import put

FILE_LOCKS = ("posix_lock", "flock")


@pytest.fixture(params=[*TASKS, *STOCK])
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(request.param)


def request_of(dump: Seen, context: LockContext, name: str) -> Request:
    found = filelocks.request(context, dump.case(name, context))
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
        (holder,) = filelocks.holders(context, request.lock)
        assert dump.pids([holder.task]) == [owner_of(task)], name
        # What an open file has any process may have that has it open.
        of_process = request.lock.type == "posix_lock" and "ofd" not in name
        assert holder.confidence == ("exact" if of_process else "likely"), name
        assert dict(queue(dump, context, request))[task["tid"]] == request.mode, name
    assert not context.losses.lost


def queue(
    dump: Seen, context: LockContext, request: Request
) -> list[tuple[int, object]]:
    """Return who waits for a lock, and how."""
    found = filelocks.queue(context, request.lock) or ()
    pids = dump.pids(each.task for each in found)
    return list(zip(pids, [each.mode for each in found], strict=True))


def test_modes(dump: Seen) -> None:
    context = dump.context()
    if dump.run.name.startswith("tasks"):
        modes = {"flock": "read", "posix-lock": "write", "ofd-lock": "write"}
    else:
        modes = {"flock-read": "read", "flock-write": "write", "ofd": "write"}
    for name, mode in modes.items():
        assert request_of(dump, context, name).mode == mode


def test_who_waits_for_no_lock(dump: Seen) -> None:
    context = dump.context()
    case = dump.case("flock-owner", context)
    assert filelocks.request(context, case) is None
    assert filelocks.file_lock(context, case) is None


def test_another_type_has_no_owner(dump: Seen) -> None:
    """What is freed may be used again."""
    context = dump.context()
    for name, task in dump.waits(*FILE_LOCKS).items():
        lock = request_of(dump, context, name).lock
        other = "flock" if task["on"]["kind"] == "posix_lock" else "posix_lock"
        assert filelocks.holders(context, Lock(other, lock.address)) == []


def member(context: LockContext, name: str) -> int:
    """Return where a lock has a member, which lies in a part of its own since v6.9."""
    if context.layout.has("file_lock", "c.flc_wait"):
        return context.layout.offset("file_lock_core", f"flc_{name}")
    return context.layout.offset("file_lock", f"fl_{name}")


def test_blockers_that_are_damaged(tasks: Seen) -> None:
    """The lock in the way says that another is in its own way."""
    dump = damaged(tasks.run.name)
    context = dump.context()
    case = dump.case("flock", context)
    lock = request_of(tasks, tasks.context(), "flock").lock.address
    assert lock
    for blocker in (lock, 8):
        put(dump.prog, lock + member(context, "blocker"), struct.pack("<Q", blocker))
        with pytest.raises(FaultError):
            filelocks.request(context, case)
    put(dump.prog, lock + member(context, "blocker"), bytes(8))
    assert filelocks.request(context, case) is not None


def test_woken_waiter_is_no_owner(tasks: Seen) -> None:
    """Its own waiters still name it: it has no blocker any more, and holds nothing."""
    dump = damaged(tasks.run.name)
    context = dump.context()
    lock = request_of(tasks, tasks.context(), "flock").lock
    place = (lock.address or 0) + member(context, "list")
    assert filelocks.holders(context, lock)
    put(dump.prog, place, struct.pack("<Q", place))
    assert filelocks.holders(dump.context(), lock) == []
    on = filelocks.file_lock(dump.context(), dump.case("flock", dump.context()))
    assert on is not None
    assert on.owner is None


def test_owner_of_a_chain_is_its_root(tasks: Seen) -> None:
    """A waiter for a waiter waits for the holder."""
    dump = damaged(tasks.run.name)
    context = dump.context()
    held = request_of(tasks, tasks.context(), "flock").lock.address or 0
    other = request_of(tasks, tasks.context(), "posix-lock").lock.address or 0
    on = filelocks.file_lock(tasks.context(), tasks.case("posix-lock", tasks.context()))
    assert on is not None
    put(dump.prog, held + member(context, "blocker"), struct.pack("<Q", other))
    found = filelocks.file_lock(dump.context(), dump.case("flock", dump.context()))
    assert found is not None
    assert (found.kind, found.owner) == ("posix_lock", on.owner)


def test_a_queue_that_is_damaged(tasks: Seen) -> None:
    dump = damaged(tasks.run.name)
    context = dump.context()
    lock = request_of(tasks, tasks.context(), "flock").lock
    place = (lock.address or 0) + member(context, "blocked_requests")
    (first,) = dump.reader.words(place, 1).tolist()
    # Its only waiter comes after itself.
    put(dump.prog, first, struct.pack("<Q", first))
    assert filelocks.queue(context, lock) is None
    assert context.losses.lost["waiters_unreadable"] == 1
