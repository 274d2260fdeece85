# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from signal import SIGCHLD
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import zombies
from fixtures.lab.cache import Cache
from fixtures.lab.errors import LabError
from fixtures.lab.guest import cases
from fixtures.lab.guest.zombies import Seen, heir_of, masks

VERDICTS = {
    *("leader-exited", "traced", "parent-blocked", "parent-stopped"),
    *("reaper-never-reaps", "sigchld-blocked", "waiting-for-other", "clone-child"),
    *("handler-missed", "never-waits"),
}
"""Those in contract.md, but for being-reaped and unknown."""
Facts = dict[str, Any]


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"zombies-{request.param}")


def parents(run: lab.Run, verdict: str) -> Iterator[Facts]:
    return (one for one in run.workload["parents"] if verdict in one["verdicts"])


# --- the program, and what is made of files


@pytest.fixture(scope="module")
def farm(programs: Cache) -> Iterator[tuple[Facts, Any]]:
    """What a parent of 20 zombies says here, and its log of them."""
    program = zombies.program(programs)
    said, say = os.pipe()
    logged, log = os.pipe()
    words = [str(program), str(say), str(log), "20", "400"]
    with subprocess.Popen(words, pass_fds=[say, log]) as process:
        os.close(say)
        os.close(log)
        with open(said) as pipe, open(logged) as entries:
            task = json.loads(pipe.readline())
            yield task, [json.loads(entries.readline()) for _ in range(20)]
        process.kill()


def test_farm_logs_the_end_of_each(farm: tuple[Facts, Any]) -> None:
    task, entries = farm
    for number, entry in enumerate(entries):
        assert (entry["name"], entry["exit_code"]) == (f"farm-{number}", number << 8)
        assert cases.state_of(entry["pid"], entry["pid"]) == "Z"
        fields = cases.text_of(entry["pid"], entry["pid"], "stat")
        assert fields.partition(" (")[2].startswith(f"farm-{number}) Z {task['pid']} ")
        assert entry["told_ns"] < entry["exited_ns"]
        assert entry["verdict"] == task["verdict"]
    span = entries[-1]["exited_ns"] - entries[0]["told_ns"]
    assert span >= 380e6  # they are 20 ms from each other, 19 times


def files_of(pid: int, parent: int, ns_pids: str, inode: int) -> dict[str, str]:
    """What Seen needs to know of a process that has a thread."""
    status = f"Uid:\t1\t2\t2\t2\nNSpid:\t{ns_pids}\nNSpgid:\t{ns_pids}\nNSsid:\t0\n"
    status += "SigBlk:\t0000000000010000\nSigIgn:\t0000000000000001\n"
    status += "SigCgt:\t8000000000000000\nSigPnd:\t0\nShdPnd:\t0\n"
    place, line = f"/proc/{pid}", f"{pid} (a) b) S {parent} 0 0"
    return {
        f"{place}/stat": line,
        f"{place}/status": status,
        f"{place}/limits": f"Max processes     {pid}    unlimited  processes",
        f"{place}/ns/pid": f"pid:[{inode}]",
        f"{place}/task/{pid}/stat": line,
        f"{place}/task/{pid}/status": status,
    }


@pytest.fixture
def seen() -> Seen:
    """A process in a namespace in the namespace of all, and its parents."""
    return Seen(
        files_of(1, 0, "1", 100)
        | files_of(5, 1, "5", 100)
        | files_of(6, 5, "6\t1", 200)
        | files_of(7, 6, "7\t2", 200)
    )


def test_numbers_count_in_every_namespace_above(seen: Seen) -> None:
    assert seen.ids() == {100: 4, 200: 2}
    assert seen.namespaces[200] == {"init": 6, "level": 1, "parent": 100}


def test_heirs(seen: Seen) -> None:
    assert heir_of(seen, 5, set()) == 1
    assert heir_of(seen, 7, {5}) == 6  # a subreaper above has no say in there
    assert heir_of(seen, 6, {5}) is None


def test_masks_are_lists_of_signals(seen: Seen) -> None:
    found = masks(seen, 5, 5)
    assert (found["blocked"], found["ignored"]) == ([SIGCHLD], [1])
    assert (found["caught"], found["shared"]) == ([64], [])


def test_lowest_limit_of_a_user(seen: Seen) -> None:
    assert seen.users() == {1: {"processes": 4, "threads": 4, "max_processes": 1}}


# --- the truth of a dump


def test_every_verdict_has_several_zombies(run: lab.Run) -> None:
    assert run.workload["skipped"] == {}
    found = Counter(one["verdict"] for one in run.workload["zombies"])
    assert set(found) == VERDICTS
    assert min(found.values()) >= 3
    for verdict in VERDICTS - {"leader-exited"}:
        assert len([*parents(run, verdict)]) >= 2


@pytest.mark.parametrize(
    ("ran_ns", "is_right"),
    [(99, True), (300_000_099, True), (-9_000_000, False), (300_000_101, False)],
)
def test_one_that_ran_at_another_time(ran_ns: int, is_right: bool) -> None:
    """The dump is then made anew."""
    one = {"pid": 5, "comm": "a", "told_ns": 100, "exited_ns": 200_000_100}
    text = f"se.exec_start   :   {ran_ns + 10**9:010}"
    made: Any = SimpleNamespace(
        workload={"zombies": [one], "times": {"scheduler_ahead_ns": 10**9}},
        truth=lambda name: f"{text[:-6]}.{text[-6:]}\n".encode(),
    )
    with nullcontext() if is_right else pytest.raises(LabError, match="a ran"):
        zombies.check(made)
