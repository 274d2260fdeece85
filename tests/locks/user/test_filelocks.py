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


def request_of(dump: Seen, look: LockContext, name: str) -> Request:
    found = filelocks.request(look, dump.case(name, look))
    assert found is not None, name
    return found


def owner_of(task: Truth) -> int:
    on = task["on"]
    owner: int = on["owners"][0]["pid"] if "owners" in on else on["owner"]
    return owner


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_every_lock_and_its_owner(dump: Seen, alone: bool) -> None:
    look = dump.look(alone)
    named = dump.waits(*FILE_LOCKS)
    assert len(named) >= 3
    for name, task in named.items():
        request = request_of(dump, look, name)
        assert request.lock.type == task["on"]["kind"], name
        assert request.mode == task.get("mode", request.mode), name
        (holder,) = filelocks.holders(look, request.lock)
        assert dump.pids([holder.task]) == [owner_of(task)], name
        # What an open file has any process may have that has it open.
        of_process = request.lock.type == "posix_lock" and "ofd" not in name
        assert holder.confidence == ("exact" if of_process else "likely"), name
        assert dict(queue(dump, look, request))[task["tid"]] == request.mode, name
    assert not look.findings.lost


def queue(dump: Seen, look: LockContext, request: Request) -> list[tuple[int, object]]:
    """Return who waits for a lock, and how."""
    found = filelocks.queue(look, request.lock) or ()
    pids = dump.pids(each.task for each in found)
    return list(zip(pids, [each.mode for each in found], strict=True))


def test_modes(dump: Seen) -> None:
    look = dump.look()
    if dump.run.name.startswith("tasks"):
        modes = {"flock": "read", "posix-lock": "write", "ofd-lock": "write"}
    else:
        modes = {"flock-read": "read", "flock-write": "write", "ofd": "write"}
    for name, mode in modes.items():
        assert request_of(dump, look, name).mode == mode


def test_who_waits_for_no_lock(dump: Seen) -> None:
    look = dump.look()
    case = dump.case("flock-owner", look)
    assert filelocks.request(look, case) is None
    assert filelocks.file_lock(look, case) is None


def test_another_type_has_no_owner(dump: Seen) -> None:
    """What is freed may be used again."""
    look = dump.look()
    for name, task in dump.waits(*FILE_LOCKS).items():
        lock = request_of(dump, look, name).lock
        other = "flock" if task["on"]["kind"] == "posix_lock" else "posix_lock"
        assert filelocks.holders(look, Lock(other, lock.address)) == []


def member(look: LockContext, name: str) -> int:
    """Return where a lock has a member, which lies in a part of its own since v6.9."""
    if look.layout.has("file_lock", "c.flc_wait"):
        return look.layout.offset("file_lock_core", f"flc_{name}")
    return look.layout.offset("file_lock", f"fl_{name}")


def test_blockers_that_are_damaged(tasks: Seen) -> None:
    """The lock in the way says that another is in its own way."""
    dump = damaged(tasks.run.name)
    look = dump.look()
    case = dump.case("flock", look)
    lock = request_of(tasks, tasks.look(), "flock").lock.address
    assert lock
    for blocker in (lock, 8):
        put(dump.prog, lock + member(look, "blocker"), struct.pack("<Q", blocker))
        with pytest.raises(FaultError):
            filelocks.request(look, case)
    put(dump.prog, lock + member(look, "blocker"), bytes(8))
    assert filelocks.request(look, case) is not None


def test_a_queue_that_is_damaged(tasks: Seen) -> None:
    dump = damaged(tasks.run.name)
    look = dump.look()
    lock = request_of(tasks, tasks.look(), "flock").lock
    place = (lock.address or 0) + member(look, "blocked_requests")
    (first,) = dump.reader.words(place, 1).tolist()
    # Its only waiter comes after itself.
    put(dump.prog, first, struct.pack("<Q", first))
    assert filelocks.queue(look, lock) is None
    assert look.findings.lost["waiters_unreadable"] == 1
