# SPDX-License-Identifier: LGPL-2.1-or-later

"""External waits: FUSE servers, suspended disks, frozen file systems."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from drgn import FaultError
from msgspec.structs import replace

from msatools.locks.context import BlockedTask, LockContext
from msatools.locks.externals import External, external
from msatools.locks.lock_types import requests_of
from msatools.locks.report import Request
from msatools.locks.servers import fuse_mounts
from tests.locks.seen import Seen, Truth


class Outside:
    """The external waits of one dump."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.context = seen.context()

    def case(self, of: str | int) -> BlockedTask:
        return self.seen.case(of, self.context)

    def of(self, of: str | int, context: LockContext | None = None) -> External | None:
        context, case = context or self.context, self.case(of)
        return external(context, case, requests_of(context, case))

    def waiters(self, *types: str) -> Iterator[tuple[Truth, int]]:
        """Yield locks of some types, with the thread ID of each waiter."""
        for lock in self.seen.locks(*types):
            for waiter in lock["waiters"]:
                yield lock, waiter["pid"]

    def clients(self, *types: str, context: LockContext | None = None) -> Iterator[Any]:
        """Yield locks that wait for a FUSE server, and the external wait found."""
        for lock, pid in self.waiters(*types):
            if "fuse_server" in lock:
                found = self.of(pid, context)
                assert found is not None, lock["name"]
                yield lock, found

    @property
    def busy(self) -> int:
        """A task that waits for a server that does not read requests."""
        (pid,) = (pid for lock, pid in self.waiters("folio") if "busy" in lock["name"])
        return pid


@lru_cache(maxsize=1)
def outside_of(seen: Seen) -> Outside:
    return Outside(seen)


@pytest.fixture
def dump(stock: Seen) -> Outside:
    return outside_of(stock)


def test_confidence_of_a_server(dump: Outside) -> None:
    """A server that reads requests is exact; one that only has the device is likely."""
    by_mount = {
        lock["mount"]: found for lock, found in dump.clients("folio", "wait_queue")
    }
    texts = {
        "/mnt/fuse": (
            "exact",
            "FUSE server {} fuse-server (/mnt/fuse), asleep in read of /dev/fuse",
        ),
        "/mnt/fuse-busy": (
            "likely",
            "FUSE server ~{} fuse-busy-serve (/mnt/fuse-busy)",
        ),
        "/mnt/fuse-locked": (
            "likely",
            "FUSE server ~{} fuse-locked-ser (/mnt/fuse-locked)",
        ),
    }
    assert by_mount.keys() == texts.keys()
    for mount, (confidence, text) in texts.items():
        found = by_mount[mount]
        (server,) = found.servers
        assert dump.context.pid(server.task) == found.pid
        assert server.confidence == confidence
        assert found.text == text.format(found.pid)


def test_damaged_list_of_file_systems_is_noted(
    dump: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = dump.seen.context()

    def fails(*_: object) -> None:
        raise FaultError("not in the dump", 0)

    monkeypatch.setattr(fuse_mounts(context), "_mount", fails)
    assert dump.of(dump.busy, context) is None
    assert context.losses.lost["file_systems_unreadable"] == 1


def test_unreadable_devices_are_noted(
    dump: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = dump.seen.context()
    assert fuse_mounts(context).mounts

    def fails(*_: object) -> None:
        raise FaultError("not in the dump", 0)

    monkeypatch.setattr(fuse_mounts(context), "_object", fails)
    assert fuse_mounts(context)._openers == {}
    assert context.losses.lost["servers_unreadable"] >= 3


def test_lock_outside_a_file_system_is_not_frozen(dump: Outside) -> None:
    _, pid = next(dump.waiters("percpu_rwsem"))
    case = dump.case(pid)
    (request,) = requests_of(dump.context, case)
    assert request.lock.address
    other = replace(request.lock, address=request.lock.address + 8)
    assert external(dump.context, case, [Request(other)]) is None


def test_suspended_disks(dump: Outside) -> None:
    named, compared = dump.seen.named, set()
    waits = {
        pid: lock["device"]
        for lock, pid in dump.waiters("folio", "bit_wait", "completion")
        if lock.get("device") and "fuse_server" not in lock
    }
    for name in ("disk-write", "direct-reader"):
        waits[named[name]["tid"]] = named[name]["on"]["device"]
    for pid, device in waits.items():
        found = dump.of(pid)
        assert found is not None, pid
        assert (found.kind, found.identity) == ("device", ("device", device))
        assert found.text == f"I/O on {found.device} (suspended)"
        compared.add(device)
    assert len(waits) >= 6
    assert len(compared) == 2


def test_locks_with_owners_are_not_external(dump: Outside) -> None:
    """This includes locks of files on FUSE or on a suspended disk."""
    types = ("rwsem", "mutex", "futex", "pi_futex", "posix_lock", "flock")
    waiters = list(dump.waiters(*types))
    assert {lock["type"] for lock, _ in waiters} == set(types)
    assert [lock["name"] for lock, pid in waiters if dump.of(pid)] == []


def test_journals_and_swap(tasks: Seen) -> None:
    dump = Outside(tasks)
    thread = dump.of("journal-thread")
    assert thread is not None
    assert thread.text == "I/O on dm-1 254:1 (suspended)"
    swap = dump.of("swap-in")
    assert swap is not None
    assert (swap.kind, swap.text) == ("swap", "swap on dm-2 254:2 (suspended)")
    # A task that waits for a commit waits for the journal's thread.
    assert dump.of("file-fsync") is None
