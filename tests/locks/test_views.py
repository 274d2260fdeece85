# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-locks prints of the lab's dumps, beside what it reports of them."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import pytest
from drgn import Program
from msatools.commands.locks import COMMAND

from fixtures import lab
from msatools.cli import run_console, run_in_drgn
from tests.locks.seen import STOCK
from tests.support.dumps import open_dump

Report = dict[str, Any]


@cache
def opened(name: str) -> Program:
    return open_dump(name, "btf")


@cache
def text(name: str, *words: str) -> list[str]:
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, opened(name), words)
    return out.getvalue().splitlines()


def report(name: str, *words: str) -> Any:
    """Give a report's JSON; it is to be left as it is."""
    (line,) = text(name, "--json", *words)
    return json.loads(line)


def pids(found: Report) -> list[int]:
    return [wait["pid"] for wait in found["waits"]]


@pytest.fixture(params=STOCK)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def table(lines: list[str], first: str) -> list[list[str]]:
    """Give the cells of the rows of a table, whose columns are two blanks apart."""
    (at,) = (n for n, line in enumerate(lines) if line.split()[:1] == [first])
    rows = []
    for line in lines[at + 1 :]:
        if line.startswith(("HERD", "INVERSION", "R, W:", "coverage:")):
            break
        rows.append(re.split(r" {2,}", line.strip()))
    return rows


def test_keys(name: str) -> None:
    """Those of the contract, whatever is added."""
    found = report(name)
    assert found["schema"] == "msatools.locks/1"
    contract = {
        "waits": {"pid", "comm", "state", "age_ns", "mode", "lock"},
        "locks": {"id", "type", "address", "name", "owners", "waiters"},
        "roots": {"kind", "pid", "reason", "blocked_d", "blocked_s"},
        "deadlocks": {"confidence", "pids", "locks"},
        "herds": {"lock", "waiters", "owner"},
    }
    for key, inner in contract.items():
        assert found[key]
        assert all(inner <= row.keys() for row in found[key]), key
    owners = [owner for lock in found["locks"] for owner in lock["owners"]]
    assert all({"pid", "confidence"} <= owner.keys() for owner in owners)
    ids = [lock["id"] for lock in found["locks"]]
    assert len(set(ids)) == len(ids)
    wanted = {wait["lock"] for wait in found["waits"]} - {None}
    assert wanted <= set(ids)


def test_roots(name: str) -> None:
    found, lines = report(name), text(name, "-v")
    heads = [line for line in lines if line.startswith("ROOT")]
    assert len(heads) == len(found["roots"])
    for number, (head, root) in enumerate(zip(heads, found["roots"], strict=True), 1):
        assert head.startswith(f"ROOT {number}  ")
        assert root["reason"] in head
    deadlocks = [line for line in lines if "DEADLOCK" in line]
    assert len(deadlocks) == len(found["deadlocks"])
    # Each that waits behind a root has a line: `pid comm`, after its mode.
    for wait in found["waits"]:
        assert any(
            re.search(rf"\b{wait['pid']} {re.escape(wait['comm'])}", line)
            for line in lines
        ) or is_idle(found, wait)


def is_idle(found: Report, wait: Report) -> bool:
    locks = {lock["id"]: lock for lock in found["locks"]}
    wanted = wait.get("any_of") or [wait["lock"]]
    return wait["state"] != "D" and not any(locks[id_]["owners"] for id_ in wanted)


def test_one_screenful(name: str) -> None:
    lines = text(name)
    roots = [line for line in lines if line.startswith("ROOT")]
    assert len(roots) <= 10
    assert len(lines) < 100
    assert len(lines) < len(text(name, "-v"))


def test_by_task(name: str) -> None:
    rows = table(text(name, "--by", "task"), "PID/TID")
    found = report(name)["waits"]
    told = [int(row[0].rpartition("/")[2]) for row in rows]
    assert told == [wait["pid"] for wait in found]
    assert [row[1] for row in rows] == [wait["state"] for wait in found]


def test_by_lock(name: str) -> None:
    rows = table(text(name, "--by", "lock"), "WAITERS")
    found = report(name)["locks"]
    counts = [int(row[0].replace(",", "")) for row in rows]
    assert counts == [len(lock["waiters"]) for lock in found]


def test_chains(name: str) -> None:
    found, lines = report(name), text(name, "--chains")
    waits = {wait["pid"]: wait for wait in found["waits"]}
    chains = [line for line in lines if " -> " in line]
    assert [int(line.split()[0]) for line in chains] == list(waits)
    # Each step from a task leads to who is said to have what it waits for.
    owners = {lock["id"]: lock["owners"] for lock in found["locks"]}
    steps = 0
    for line in chains:
        pid = int(line.split()[0])
        for step in re.findall(r" [=~?]> (\d+) ", line):
            has = {owner["pid"] for owner in owners[waits[pid]["lock"]]}
            assert int(step) in has
            pid, steps = int(step), steps + 1
    assert steps > 20


def test_holders(name: str) -> None:
    rows = table(text(name, "--holders"), "PID")
    locks = report(name)["locks"]
    owners = {owner["pid"] for lock in locks for owner in lock["owners"]}
    assert {int(row[0]) for row in rows} == owners
    for row in rows:
        has = [
            lock
            for lock in locks
            if int(row[0]) in {owner["pid"] for owner in lock["owners"]}
        ]
        direct = {pid for lock in has for pid in lock["waiters"]} - {int(row[0])}
        assert (int(row[1]), int(row[2])) == (len(has), len(direct))
        assert int(row[3]) >= len(direct)
    assert [int(row[3]) for row in rows] == sorted(int(r[3]) for r in rows)[::-1]


def test_dot(name: str) -> None:
    lines = text(name, "--dot", "-v")
    assert (lines[0], lines[-1]) == ("digraph waits {", "}")
    locks = report(name)["locks"]
    owns = sum(len(lock["owners"]) for lock in locks)
    waits = sum(len(set(lock["waiters"])) for lock in locks)
    assert sum(bool(re.match(r"  l\d+ -> t\d+ ", line)) for line in lines) == owns
    assert sum(bool(re.match(r"  t\d+ -> l\d+", line)) for line in lines) == waits
    assert any('color="red"' in line for line in lines)


SELECTIONS: dict[str, Any] = {
    "--state D": lambda wait, lock: wait["state"] == "D",
    "--type mutex": lambda wait, lock: lock == "mutex",
    "--type futex,pi_futex": lambda wait, lock: lock in ("futex", "pi_futex"),
    "--type rwsem --state D": lambda wait, lock: (
        lock == "rwsem" and wait["state"] == "D"
    ),
}


@pytest.mark.parametrize("words", SELECTIONS)
def test_selection(name: str, words: str) -> None:
    """Those that fit, and those on their ways to a root."""
    everything, found = report(name), report(name, *words.split())
    types = {lock["id"]: lock["type"] for lock in everything["locks"]}
    waits = {wait["pid"]: wait for wait in everything["waits"]}

    def lock_type(wait: Report) -> str | None:
        # Of any of several the first is as good as the others: all are alike.
        return types.get((wait.get("any_of") or [wait["lock"]])[0])

    fit = {
        pid for pid, wait in waits.items() if SELECTIONS[words](wait, lock_type(wait))
    }
    assert fit
    assert len(fit) < len(waits)
    assert fit <= set(pids(found))
    # Whoever is there and does not fit is in the way of one that does.
    chains = [set(root["chain"]) for root in found["roots"]]
    owners = {owner["pid"] for lock in found["locks"] for owner in lock["owners"]}
    for pid in set(pids(found)) - fit:
        assert pid in owners or any(pid in chain for chain in chains)


def test_least_wait(name: str) -> None:
    ages = sorted(wait["age_ns"] for wait in report(name)["waits"])
    least = ages[len(ages) // 2]
    found = report(name, "--min-wait", f"{least}ns")
    fit = [wait for wait in report(name)["waits"] if wait["age_ns"] >= least]
    assert {wait["pid"] for wait in fit} <= set(pids(found))
    assert len(found["waits"]) < len(ages)
    assert not report(name, "--min-wait", f"{ages[-1] + 1}ns")["waits"]
    text_of = text(name, "--min-wait", f"{ages[-1] + 1}ns")
    assert "No task of those that were asked for is blocked." in text_of


def test_named_tasks_and_what_they_wait_for(name: str) -> None:
    truth = lab.build(name).workload["locks"]
    case = next(each for each in truth if each["type"] == "mutex" and each["owners"])
    waiter = case["waiters"][-1]["pid"]
    owner = case["owners"][0]["pid"]
    found = report(name, "-p", str(waiter))
    assert waiter in pids(found)
    (lock,) = (each for each in found["locks"] if waiter in each["waiters"])
    assert [each["pid"] for each in lock["owners"]] == [owner]
    # Looked up directly: few tasks are read.
    assert found["coverage"]["tasks"] < 10


def test_stacks(name: str) -> None:
    found = report(name, "--stack")
    assert all(wait["stack"] for wait in found["waits"])
    assert all("stack" not in wait for wait in report(name)["waits"])
    lines = text(name, "--stack", "--by", "task")
    groups = [line for line in lines if line.startswith("STACK of ")]
    alike = {tuple(wait["stack"]) for wait in found["waits"]}
    assert len(groups) == len(alike)


def test_pid_that_is_not_there(name: str) -> None:
    run = lab.build(name)
    path = str(run.dump("elf" if run.elf else "vmcore"))
    err = io.StringIO()
    with redirect_stderr(err):
        assert run_console(COMMAND, [path, "-p", "4000000"]) == 1
    (line,) = err.getvalue().splitlines()
    assert line.startswith("msa-locks: pid 4000000: no such task; ")
