# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import locks
from fixtures.lab.cache import Cache
from fixtures.lab.errors import LabError
from fixtures.lab.guest import fuse, lockcases
from fixtures.lab.guest.locks import locks_of, roots_of
from tests.lab.waiting import wait_until_in_class

NOT_HERE = {"pi", "inversion", "shared-file"}
"""Kinds that need root, or /data as guests have it."""
LOCK_TYPES = {
    *("mutex", "rwsem", "percpu_rwsem", "futex", "pi_futex", "completion", "folio"),
    *("bit_wait", "wait_queue", "posix_lock", "flock"),
}
"""Those in contract.md that stock kernels can be made to wait for."""
BOTH = ["6.1", "6.12"]

Task = dict[str, Any]


@pytest.fixture(scope="module")
def program(programs: Cache) -> Path:
    return locks.program(programs)


@pytest.fixture
def start(program: Path, spawn: Any) -> Any:
    """Runs a kind of the program here; what its tasks have said, by name."""

    def run(kind: str) -> dict[str, Task]:
        reading, writing = os.pipe()
        spawn(program, str(writing), kind, pass_fds=[writing])
        os.close(writing)
        with open(reading, "rb") as pipe:
            lines = [pipe.readline() for _ in range(lockcases.KINDS[kind])]
        said = [json.loads(line) for line in lines]
        return {task["name"]: task for task in said}

    return run


@pytest.fixture(scope="module", params=BOTH)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"locks-{request.param}")


def by_tid(run: lab.Run) -> dict[int, Task]:
    return {task["tid"]: task for task in run.workload["tasks"].values()}


# --- the program, and what is made of what tasks say


def test_program_knows_every_kind() -> None:
    table = re.search(r"kinds\[\] = \{(.*?)\n\};", locks.PROGRAM.read_text(), re.S)
    assert table
    known = re.findall(r'\{ "([a-z-]+)"', table[1])
    assert known == [*lockcases.KINDS, *lockcases.INVERSION]


@pytest.mark.parametrize("kind", [k for k in lockcases.KINDS if k not in NOT_HERE])
def test_tasks_wait_where_they_say(kind: str, start: Any) -> None:
    said = start(kind)
    assert len(said) == lockcases.KINDS[kind]
    for task in said.values():
        wait_until_in_class(task["pid"], task["tid"], task["class"])


def test_owners_are_who_took_the_locks(start: Any) -> None:
    said = start("normal")
    (lock,) = locks_of(said)
    owner = said.pop("normal-owner")["tid"]
    assert lock["owners"] == [{"pid": owner, "confidence": "likely"}]
    order = [said[f"normal-{number}"]["tid"] for number in (1, 2, 3)]
    assert [waiter["pid"] for waiter in lock["waiters"]] == order


def test_unknown_kind(program: Path) -> None:
    done = subprocess.run([program, "1", "nothing"], check=False, capture_output=True)
    assert done.returncode == 2


def task(tid: int, group: str = "LCK", /, **on: Any) -> Task:
    return {"pid": tid, "tid": tid, "class": group, "on": on or None, "start_ns": tid}


def owned(name: str, *owners: int) -> dict[str, Any]:
    known = [{"pid": pid, "confidence": "exact"} for pid in owners]
    return {"lock": name, "kind": "mutex", "owners": known}


def roots(*tasks: Task) -> list[dict[str, Any]]:
    named = {str(task["tid"]): task for task in tasks}
    return roots_of(named, locks_of(named))


def test_root_of_a_chain_is_its_end() -> None:
    (root,) = roots(task(1, "TMR"), task(2, **owned("a", 1)), task(3, **owned("b", 2)))
    assert (root["kind"], root["pid"], root["blocks"]) == ("task", 1, [2, 3])


def test_root_of_a_ring_is_the_ring() -> None:
    (root,) = roots(
        task(1, **owned("b", 2)), task(2, **owned("a", 1)), task(3, **owned("b", 2))
    )
    assert (root["kind"], root["pids"], root["blocks"]) == ("cycle", [1, 2], [3])


def test_server_that_waits_is_not_the_root() -> None:
    folio = {"lock": "f", "kind": "folio", "fuse_server": 2, "mount": "/m"}
    (root,) = roots(task(1, "DSK", **folio), task(2, **owned("a", 3)), task(3, "TMR"))
    assert (root["kind"], root["pid"], root["blocks"]) == ("task", 3, [1, 2])
    (root,) = roots(task(1, "DSK", **folio), task(2, "TMR"))
    assert (root["kind"], root["pid"], root["blocks"]) == ("external", 2, [1])


def test_structs_of_fuse_have_their_sizes() -> None:
    sizes = {fuse.REQUEST: 40, fuse.REPLY: 16, fuse.INITIAL: 64, fuse.ATTRIBUTES: 88}
    assert {layout: layout.size for layout in sizes} == sizes
    assert fuse.ENTRY.size + fuse.ATTRIBUTES.size == 128


# --- the truth of a dump


def test_there_are_locks_of_every_type(run: lab.Run) -> None:
    assert {lock["type"] for lock in run.workload["locks"]} == LOCK_TYPES
    names = [lock["name"] for lock in run.workload["locks"]]
    assert len(set(names)) == len(names)
    tasks = by_tid(run)
    for lock in run.workload["locks"]:
        for waiter in lock["waiters"]:
            assert waiter["mode"] == tasks[waiter["pid"]].get("mode")


def test_a_guest_that_is_not_as_it_says_is_built_anew(run: lab.Run) -> None:
    """Something left out, a task that waits unnamed, and one that does not wait."""
    locks.check(run)
    said = run.workload
    lock = next(each for each in said["locks"] if each["type"] == "flock")
    herd = next(each for each in said["locks"] if each["name"] == "herd")
    waiter = {"waiters": [*lock["waiters"], herd["waiters"][0]]}
    unnamed = [name for name in said["tasks"] if name.startswith("frozen-write")]
    named = {k: task for k, task in said["tasks"].items() if k not in unnamed}
    for wrong, why in (
        ({"skipped": {"herd": "no such call"}}, "left out"),
        ({"locks": [lock | waiter]}, "does not wait for"),
        ({"tasks": named}, "nobody has said so"),
    ):
        other = replace(run)
        other.__dict__["workload"] = said | wrong
        with pytest.raises(LabError, match=why):
            locks.check(other)
