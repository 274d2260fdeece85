# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completions that tasks wait for, and who is to complete them."""

from itertools import product
from typing import Any

import pytest
from drgn import FaultError, Program

from msatools.locks.lock import Lock
from tests.locks.events.waits import (
    MODULE,
    STOCK,
    TASKS,
    TYPES,
    check_locks,
    look_for,
    waits,
)
from tests.support.dumps import open_dump
from tests.support.overlay import lay_over

KINDS = ("btf", "dwarf")
ALL = [*MODULE, *STOCK]
ALL_KINDS = list(product(ALL, KINDS))


@pytest.mark.parametrize(("name", "types"), ALL_KINDS)
def test_waiters_and_who_completes(name: str, types: str) -> None:
    seen = waits(name, types)

    def check(said: dict[str, Any], lock: Lock) -> None:
        owners = [(owner["pid"], "exact") for owner in said["owners"]]
        assert seen.holders(lock) == owners, said["name"]

    assert check_locks(seen, "completion", check) >= 2
    assert not seen.findings.lost


@pytest.mark.parametrize("name", ALL)
def test_only_waiters_wait(name: str) -> None:
    """Of all tasks, those that the guest names; threads of its own wait for work."""
    seen = waits(name)
    said = {
        (waiter["pid"], lock["type"])
        for lock in seen.locks(*TYPES)
        for waiter in lock["waiters"]
    }
    ours = {
        waiter["pid"]
        for lock in seen.run.workload["locks"]
        for waiter in lock["waiters"]
    }
    found = {
        (pid, request.lock.type)
        for pid, request in seen.requests.items()
        if pid in ours
    }
    assert found == said


@pytest.mark.parametrize(("name", "types"), list(product(MODULE, KINDS)))
def test_what_a_completion_stands_for(name: str, types: str) -> None:
    seen = waits(name, types)
    words = {}
    for lock in seen.locks("completion"):
        for waiter in lock["waiters"]:
            words[lock["name"]] = seen.what(waiter["pid"])
    (worker,), (thread,) = (
        [owner["pid"] for owner in lock["owners"]]
        for wanted in ("flush-work", "kthread-stop")
        for lock in seen.locks("completion")
        if lock["name"] == wanted
    )
    assert words == {
        "completion": None,
        "flush-work": f"work lm_work of thread {worker}",
        "kthread-stop": f"thread {thread} to stop",
    }


@pytest.mark.parametrize("name", TASKS)
def test_a_child_that_has_yet_to_execute(name: str) -> None:
    seen = waits(name)
    parent, child = seen.named("vfork"), seen.named("execute")
    lock = seen.requests[parent].lock
    assert lock.type == "completion"
    assert seen.queue(lock) == [parent]
    assert seen.holders(lock) == [(child, "exact")]
    assert seen.what(parent) == f"child {child} to exec"


@pytest.mark.parametrize("name", TASKS)
def test_a_child_is_found_by_who_looks_at_its_parent_only(name: str) -> None:
    seen = look_for(open_dump(name, "btf"), name, alone="vfork")
    (lock,) = (request.lock for request in seen.requests.values())
    child = waits(name).named("execute")
    assert seen.holders(lock) == [(child, "exact")]
    assert not seen.findings.notes


@pytest.mark.parametrize("name", TASKS)
def test_input_and_output_is_nobodys(name: str) -> None:
    seen = waits(name)
    for task in ("disk-direct-read", "disk-direct-write"):
        pid = seen.named(task)
        lock = seen.requests[pid].lock
        assert lock.type == "completion"
        assert seen.queue(lock) == [pid]
        assert seen.holders(lock) == []
        assert seen.what(pid) == "block I/O"


def lose(prog: Program, address: int) -> None:
    """Make the page of an address unreadable."""

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("lost in this test", address)

    lay_over(prog, address & -4096, 4096, read)


@pytest.mark.parametrize("name", TASKS)
def test_a_child_that_is_lost(name: str) -> None:
    """Then nobody is told, and that is noted; who waits and for what is still known."""
    whole = waits(name)
    parent = whole.named("vfork")
    child = whole.cases[whole.named("execute")].address
    prog = open_dump(name, "btf")
    member = whole.look.layout.offset("task_struct", "vfork_done")
    lose(prog, child + member)
    damaged = look_for(prog, name)
    lock = damaged.requests[parent].lock
    assert lock == whole.requests[parent].lock
    assert damaged.queue(lock) == [parent]
    assert damaged.holders(lock) == []
    assert damaged.findings.lost["completions"] > 0
