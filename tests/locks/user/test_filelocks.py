# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks on files: who waits for them, in what order, and who has them."""

import struct
from typing import Any

import numpy as np
import pytest
from drgn import FaultError

from msatools.kernel.report import Findings
from msatools.locks.cases import read_cases
from msatools.locks.layout import Layout
from msatools.locks.lock import Lock, Request
from msatools.locks.look import Case, Look
from msatools.locks.user import filelocks
from msatools.tasks.stackmemory import stack_bytes
from tests.locks.conftest import Seen, look_at, seen
from tests.support.dumps import open_dump
from tests.support.overlay import lay_over

KERNELS = ("6.1", "6.12")
TYPES = ("btf", "dwarf")
FILE_LOCKS = ("posix_lock", "flock")


@pytest.fixture(
    scope="module",
    params=[
        (f"{scenario}-{kernel}", types)
        for scenario in ("tasks", "locks")
        for kernel in KERNELS
        for types in TYPES
    ],
    ids=lambda param: "-".join(param),
)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(*request.param)


def look_of(dump: Seen, alone: bool = False) -> Look:
    layout = Layout(dump.reader)
    return Look(layout, dump.table, Findings(), dump.clocks, alone=alone)


def case_of(dump: Seen, look: Look, name: str) -> Case:
    rows = np.array([dump.row(name)])
    (case,) = read_cases(look, dump.now, rows, stack_bytes(dump.reader.prog))
    return case


def request_of(dump: Seen, look: Look, name: str) -> Request:
    found = filelocks.request(look, case_of(dump, look, name))
    assert found is not None, name
    return found


def waits(dump: Seen) -> dict[str, dict[str, Any]]:
    """The named tasks that wait for locks on files."""
    return {
        name: task
        for name, task in dump.named().items()
        if (task["on"] or {}).get("kind") in FILE_LOCKS
    }


def pid_of(dump: Seen, task: int) -> int:
    rows = np.flatnonzero(dump.table["address"] == np.uint64(task))
    return int(dump.table["pid"][rows[0]])


def owner_of(task: dict[str, Any]) -> int:
    on = task["on"]
    owner: int = on["owners"][0]["pid"] if "owners" in on else on["owner"]
    return owner


@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
def test_every_lock_and_its_owner(dump: Seen, alone: bool) -> None:
    look = look_of(dump, alone)
    named = waits(dump)
    assert len(named) >= 3
    for name, task in named.items():
        request = request_of(dump, look, name)
        assert request.lock.type == task["on"]["kind"], name
        assert request.mode == task.get("mode", request.mode), name
        (holder,) = filelocks.holders(look, request.lock)
        assert pid_of(dump, holder.task) == owner_of(task), name
        # What an open file has any process may have that has it open.
        of_process = request.lock.type == "posix_lock" and "ofd" not in name
        assert holder.confidence == ("exact" if of_process else "likely"), name
        queue = filelocks.queue(look, request.lock) or []
        assert task["tid"] in [pid_of(dump, each.task) for each in queue], name
        modes = {pid_of(dump, each.task): each.mode for each in queue}
        assert modes[task["tid"]] == request.mode, name
    assert not look.findings.lost


@pytest.mark.parametrize("kernel", KERNELS)
def test_queues(kernel: str) -> None:
    """A writer that waits behind a reader waits for the same lock in the end."""
    dump = seen(f"locks-{kernel}")
    look = look_of(dump)
    known = {lock["name"]: lock for lock in dump.run.workload["locks"]}
    long = 0
    for name, task in waits(dump).items():
        request = request_of(dump, look, name)
        queue = filelocks.queue(look, request.lock)
        assert queue is not None
        truth = known[task["on"]["lock"]]["waiters"]
        told = [(pid_of(dump, each.task), each.mode) for each in queue]
        assert told == [(each["pid"], each["mode"]) for each in truth], name
        long += len(told) > 1
    assert long >= 8


def test_modes(dump: Seen) -> None:
    look = look_of(dump)
    if dump.run.name.startswith("tasks"):
        modes = {"flock": "read", "posix-lock": "write", "ofd-lock": "write"}
    else:
        modes = {"flock-read": "read", "flock-write": "write", "ofd": "write"}
    for name, mode in modes.items():
        assert request_of(dump, look, name).mode == mode


def test_who_waits_for_no_lock(dump: Seen) -> None:
    look = look_of(dump)
    name = "flock-owner"
    assert filelocks.request(look, case_of(dump, look, name)) is None
    assert filelocks.file_lock(look, case_of(dump, look, name)) is None


def test_another_type_has_no_owner(dump: Seen) -> None:
    """What is freed may be used again."""
    look = look_of(dump)
    for name, task in waits(dump).items():
        lock = request_of(dump, look, name).lock
        other = "flock" if task["on"]["kind"] == "posix_lock" else "posix_lock"
        assert filelocks.holders(look, Lock(other, lock.address)) == []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("blocker", ["itself", "nowhere", "none"])
def test_blockers_that_are_damaged(kernel: str, blocker: str) -> None:
    """The lock in the way says that another is in its own way."""
    name = f"tasks-{kernel}"
    dump = look_at(open_dump(name, "btf"), name)
    look = look_of(dump)
    case = case_of(dump, look, "flock")
    lock = request_of(dump, look_of(dump), "flock").lock.address
    assert lock
    new = look.layout.has("file_lock", "c.flc_wait")
    type_, member = (
        ("file_lock_core", "flc_blocker") if new else ("file_lock", "fl_blocker")
    )
    place = lock + look.layout.offset(type_, member)
    value = {"itself": lock, "nowhere": 8, "none": 0}[blocker]

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return struct.pack("<Q", value)[offset : offset + count]

    lay_over(dump.reader.prog, place, 8, read)
    if blocker == "none":
        assert filelocks.request(look, case) is not None
    else:
        with pytest.raises(FaultError):
            filelocks.request(look, case)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_queue_that_is_damaged(kernel: str) -> None:
    name = f"tasks-{kernel}"
    dump = look_at(open_dump(name, "btf"), name)
    look = look_of(dump)
    lock = request_of(dump, look, "flock").lock
    new = look.layout.has("file_lock", "c.flc_wait")
    type_, prefix = ("file_lock_core", "flc") if new else ("file_lock", "fl")
    head = look.layout.offset(type_, f"{prefix}_blocked_requests")
    place = (lock.address or 0) + head
    (first,) = dump.reader.words(place, 1).tolist()

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return struct.pack("<Q", first)[offset : offset + count]

    # Its only waiter comes after itself.
    lay_over(dump.reader.prog, first, 8, read)
    assert filelocks.queue(look, lock) is None
    assert look.findings.lost["waiters"] == 1
