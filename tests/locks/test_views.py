# SPDX-License-Identifier: LGPL-2.1-or-later

"""Views and selections of msa-locks on the lab's dumps agree with its full report."""

import io
import json
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import pytest
from drgn import Program
from msatools.commands.locks import COMMAND

from fixtures import lab
from msatools.cli.drgn_prompt import run_in_drgn
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
    """Return a report's JSON."""
    (line,) = text(name, "--json", *words)
    return json.loads(line)


def pids(found: Report) -> list[int]:
    return [wait["pid"] for wait in found["waits"]]


@pytest.fixture(params=STOCK)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


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
    """Selected waits are listed, and those between them and a root."""
    everything, found = report(name), report(name, *words.split())
    types = {lock["id"]: lock["type"] for lock in everything["locks"]}
    waits = {wait["pid"]: wait for wait in everything["waits"]}

    def lock_type(wait: Report) -> str | None:
        # If a task waits for any of several locks, they have the same type.
        return types.get((wait.get("any_of") or [wait["lock"]])[0])

    fit = {
        pid for pid, wait in waits.items() if SELECTIONS[words](wait, lock_type(wait))
    }
    assert fit
    assert len(fit) < len(waits)
    assert fit <= set(pids(found))
    # Every other wait is in the chain of a selected one.
    chains = [set(root["chain"]) for root in found["roots"]]
    owners = {owner["pid"] for lock in found["locks"] for owner in lock["owners"]}
    for pid in set(pids(found)) - fit:
        assert pid in owners or any(pid in chain for chain in chains)


def test_least_wait(name: str) -> None:
    ages = sorted(wait["age_ns"] for wait in report(name)["waits"])
    least = ages[len(ages) // 2]
    found = report(name, "--min-age", f"{least}ns")
    fit = [wait for wait in report(name)["waits"] if wait["age_ns"] >= least]
    assert {wait["pid"] for wait in fit} <= set(pids(found))
    assert len(found["waits"]) < len(ages)
    assert not report(name, "--min-age", f"{ages[-1] + 1}ns")["waits"]
    text_of = text(name, "--min-age", f"{ages[-1] + 1}ns")
    assert "No blocked task matches the selection." in text_of


def test_stacks(name: str) -> None:
    found = report(name, "--stacks")
    assert all(wait["stack"] for wait in found["waits"])
    assert all("stack" not in wait for wait in report(name)["waits"])
    lines = text(name, "--stacks", "--by", "task")
    groups = [line for line in lines if line.startswith("STACK of ")]
    alike = {tuple(wait["stack"]) for wait in found["waits"]}
    assert len(groups) == len(alike)


def test_stacks_of_who_spins() -> None:
    """They run, and so do the owners: their stacks are by the registers."""
    found = report("lockspin-6.12", "--stacks")
    rows = [*found["waits"], *found["roots"]]
    stacks = [row["stack"] for row in rows if (row["comm"] or "").startswith("lm-")]
    assert len(stacks) > 2
    assert all("lm_spin_thread" in stack for stack in stacks)


def test_waits_of_a_control_group_or_namespace() -> None:
    """Waiters are selected by group; their owners can be in any group."""
    dump, first = "tasks-6.12", "4026531836"
    named = lab.build(dump).workload["tasks"]
    swaps, slowed = (named[task]["tid"] for task in ("swap-in", "over-high"))
    # The second goes on every other second, for a moment.
    waiting = {swaps} | ({slowed} & {*pids(report(dump))})
    assert {*pids(report(dump, "--cgroup", "/swap,/hi*"))} == waiting
    assert set(pids(report(dump, "--cgroup", "/swap", "--ns", first))) == {
        named["swap-in"]["tid"]
    }
    assert pids(report(dump, "--ns", first)) == pids(report(dump))
    for words in (("--container", "0" * 12), ("--ns", "1"), ("--cgroup", "/nowhere")):
        assert pids(report(dump, *words)) == []
        assert "No blocked task matches the selection." in text(dump, *words)
