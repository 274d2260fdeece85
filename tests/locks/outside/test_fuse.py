# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait for outside of all tasks: FUSE servers, disks, frozen files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from drgn import FaultError

from msatools.kernel.report import Findings
from msatools.locks.cases import read_cases
from msatools.locks.kinds import requests_of
from msatools.locks.layout import Layout
from msatools.locks.lock import Lock, Request
from msatools.locks.look import Case, Look
from msatools.locks.outside import fuse as fuse_module
from msatools.locks.outside.externals import External, external
from msatools.tasks.stackmemory import stack_bytes
from tests.locks.conftest import Seen, seen

DUMPS = ("locks-6.1", "locks-6.12")
TYPES = ("btf", "dwarf")


@dataclass
class Outside:
    """What the waiters of one dump are said to wait for."""

    seen: Seen
    look: Look
    cases: dict[int, Case]
    """By thread ID."""

    def of(self, pid: int, look: Look | None = None) -> External | None:
        look, case = look or self.look, self.cases[pid]
        return external(look, case, requests_of(look, case))

    def waiters(self, *types: str) -> Iterator[tuple[dict[str, Any], int]]:
        """Locks of some types, and the thread ID of each that waits for one."""
        for lock in self.seen.run.workload["locks"]:
            for waiter in lock["waiters"]:
                if lock["type"] in types:
                    yield lock, waiter["pid"]

    def pid(self, task: int) -> int:
        pid = self.look.pid(task)
        assert pid is not None
        return pid


def look_at(dump: Seen, alone: bool = False) -> Look:
    return Look(Layout(dump.reader), dump.table, Findings(), dump.clocks, alone=alone)


@lru_cache(maxsize=1)
def outside_of(name: str, types: str) -> Outside:
    dump = seen(name, types)
    look = look_at(dump)
    rows = np.arange(len(dump.table))
    cases = read_cases(look, dump.now, rows, stack_bytes(dump.reader.prog))
    by_pid = dict(zip(dump.table["pid"].tolist(), cases, strict=True))
    return Outside(dump, look, by_pid)


@pytest.fixture(
    scope="module", params=[(name, types) for name in DUMPS for types in TYPES], ids=str
)
def dump(request: pytest.FixtureRequest) -> Outside:
    return outside_of(*request.param)


def test_who_waits_for_which_server(dump: Outside) -> None:
    connections: dict[str, set[object]] = {}
    for lock, pid in dump.waiters("folio", "wait_queue"):
        if "fuse_server" not in lock:
            continue
        found = dump.of(pid)
        assert found is not None, lock["name"]
        assert found.kind == "fuse"
        assert found.path == lock["mount"]
        assert found.pid == lock["fuse_server"], lock["name"]
        connections.setdefault(lock["mount"], set()).add(found.identity)
    # Each is one thing, and each is another.
    assert {len(identities) for identities in connections.values()} == {1}
    assert len(set.union(*connections.values())) == len(connections) == 3


def test_how_sure_a_server_is(dump: Outside) -> None:
    """Who reads requests is sure; who only has the device open is likely."""
    told = {}
    for lock, pid in dump.waiters("folio", "wait_queue"):
        if "fuse_server" in lock:
            found = dump.of(pid)
            assert found is not None
            told[lock["mount"]] = found
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
    assert told.keys() == texts.keys()
    for mount, (confidence, text) in texts.items():
        found = told[mount]
        (server,) = found.servers
        assert dump.pid(server.task) == found.pid
        assert server.confidence == confidence
        assert found.text == text.format(found.pid)


def test_a_look_at_one_task_does_not_search_all(dump: Outside) -> None:
    """Then only who reads is told: it is on the connection's own queue."""
    look = look_at(dump.seen, alone=True)
    told = {}
    for lock, pid in dump.waiters("folio"):
        if "fuse_server" in lock:
            found = dump.of(pid, look)
            assert found is not None
            told[lock["mount"]] = found.text.partition(",")[0], found.pid
    server = told["/mnt/fuse"][1]
    assert told == {
        "/mnt/fuse": (f"FUSE server {server} fuse-server (/mnt/fuse)", server),
        "/mnt/fuse-busy": ("FUSE /mnt/fuse-busy", None),
        "/mnt/fuse-locked": ("FUSE /mnt/fuse-locked", None),
    }


def test_a_server_is_no_client(dump: Outside) -> None:
    server = dump.seen.named()["fuse-server"]["tid"]
    case = dump.cases[server]
    assert case.is_in("fuse_dev_do_read")
    assert external(dump.look, case, ()) is None


def test_without_a_server_nobody_is_told(
    dump: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_module, "_DEVICE", 0)
    look = look_at(dump.seen)
    (pid,) = (pid for lock, pid in dump.waiters("folio") if "busy" in lock["name"])
    found = dump.of(pid, look)
    assert found is not None
    assert found.pid is None
    assert found.servers == ()
    assert found.text == "FUSE /mnt/fuse-busy: nobody reads its requests"


def test_a_list_of_file_systems_that_is_damaged_costs_a_note(
    dump: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = look_at(dump.seen)

    def fails(*_: object) -> None:
        raise FaultError("not in the dump", 0)

    monkeypatch.setattr(look.fuse, "_mount", fails)
    (pid,) = (pid for lock, pid in dump.waiters("folio") if "busy" in lock["name"])
    assert dump.of(pid, look) is None
    assert look.findings.lost["super blocks"] == 1


def test_frozen_file_systems(dump: Outside) -> None:
    identities = set()
    waiters = list(dump.waiters("percpu_rwsem"))
    for lock, pid in waiters:
        found = dump.of(pid)
        assert found is not None, lock["name"]
        assert (found.kind, found.path) == ("frozen", lock["path"])
        assert found.text == f"frozen file system {lock['path']}"
        assert found.pid is None
        identities.add(found.identity)
    # Whatever they want to do: a write and a fault wait for different locks of it.
    assert len({lock["name"] for lock, _ in waiters}) == 2
    assert len(identities) == 1


def test_a_lock_that_is_in_no_file_system_is_not_frozen(dump: Outside) -> None:
    _, pid = next(dump.waiters("percpu_rwsem"))
    case = dump.cases[pid]
    (request,) = requests_of(dump.look, case)
    assert request.lock.address
    other = replace(request.lock, address=request.lock.address + 8)
    assert external(dump.look, case, [Request(other)]) is None


def test_disks_and_that_they_are_suspended(dump: Outside) -> None:
    named, compared = dump.seen.named(), set()
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


def test_only_disks_that_are_suspended_are(dump: Outside) -> None:
    """The frozen file system is on a disk that answers."""
    suspended = dump.look.mapper.suspended
    assert suspended == {"254:0", "254:1", "254:2"}


def test_who_waits_for_a_lock_that_tasks_have_waits_for_those(dump: Outside) -> None:
    """Also if the lock is of a file on FUSE, or of a disk that answers no more."""
    types = ("rwsem", "mutex", "futex", "pi_futex", "posix_lock", "flock")
    waiters = list(dump.waiters(*types))
    assert {lock["type"] for lock, _ in waiters} == set(types)
    assert [lock["name"] for lock, pid in waiters if dump.of(pid)] == []


@pytest.mark.parametrize("name", ["tasks-6.1", "tasks-6.12"])
def test_journals_and_swap(name: str) -> None:
    dump = outside_of(name, "btf")
    named = dump.seen.named()
    thread = dump.of(named["journal-thread"]["tid"])
    assert thread is not None
    assert thread.text == "I/O on dm-1 254:1 (suspended)"
    swap = dump.of(named["swap-in"]["tid"])
    assert swap is not None
    assert (swap.kind, swap.text) == ("swap", "swap on dm-2 254:2 (suspended)")
    # Who waits for the thread to commit waits for the thread.
    assert dump.of(named["file-fsync"]["tid"]) is None


def test_pages_of_no_file_are_of_nothing_outside(dump: Outside) -> None:
    case = next(iter(dump.cases.values()))
    stack = np.zeros(0, np.uint64)
    bare = replace(case, names=(), stack=replace_words(case, stack), file=None)
    assert external(dump.look, bare, [Request(Lock("folio", None, 0))]) is None


def replace_words(case: Case, words: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
    layout = case.stack._layout
    return type(case.stack)(layout, case.address, case.stack.base, words)
