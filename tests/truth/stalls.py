# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-cpus --stalls: what the lab's module says of its threads."""

from typing import Any

from fixtures.lab import Run
from tests.support.dumps import spinning
from tests.truth.fact import Fact, Figures

OWN = ("own-lock", "irqs-off", "softirq-off", "syscall", "preempt-off", "in-interrupt")
"""Threads that are the cause of what their CPU does."""

OF_CPUS = ("no-tick", "no-switch")
"""Kinds of stalls of single CPUs."""


def threads(run: Run, *names: str) -> list[dict[str, Any]]:
    return [each for each in spinning(run)["stalls"] if each["name"] in names]


def causes(run: Run) -> Figures:
    """Return the CPU at fault, by the CPU that stands still."""
    found = {each["cpu"]: each["cpu"] for each in threads(run, *OWN)}
    for owner in threads(run, "own-lock"):
        found |= {each["cpu"]: owner["cpu"] for each in threads(run, "want-lock")}
    return found


def culprits(report: Any) -> Figures:
    return {
        stall["cpus"][0]: stall["culprit_cpu"]
        for stall in report["stalls"]["found"]
        if stall["kind"] in OF_CPUS
    }


def tasks(run: Run) -> Figures:
    """Return the thread on each CPU that a thread stands still on."""
    names = ("own-lock", "want-lock", "softirq-off", "syscall")
    return {each["cpu"]: each["pid"] for each in threads(run, *names)}


def lock_owners(run: Run) -> Figures:
    owners = [each["pid"] for each in threads(run, "own-lock")]
    return {each["cpu"]: owners for each in threads(run, "want-lock")}


def reported_owners(report: Any) -> Figures:
    return {
        held["cpu"]: [owner["pid"] for owner in held["wanted"]["owners"]]
        for held in report["stalls"]["cpus"]
        if held["wanted"] is not None
    }


def calls(run: Run) -> Figures:
    return {each["target"]: each["cpu"] for each in threads(run, "call-cpu")}


def reported_calls(report: Any) -> Figures:
    return {
        call["cpu"]: call["caller"]
        for call in report["stalls"]["calls"]
        if call["kind"] == "call"
    }


def waiters(run: Run) -> Figures:
    return {each["pid"]: True for each in threads(run, "wait-rcu")}


def reported_waiters(report: Any) -> Figures:
    rcu = report["stalls"]["rcu"]
    return {each["pid"]: True for each in (rcu["waiters"] if rcu else None) or ()}


def readers(run: Run) -> Figures:
    return {each["pid"]: True for each in threads(run, "read-rcu")}


def reported_readers(report: Any) -> Figures:
    rcu = report["stalls"]["rcu"]
    return {each["pid"]: True for each in (rcu["tasks"] if rcu else ())}


def awaited(run: Run) -> Figures:
    """Return whether each CPU is one that stop_machine() waits for."""
    stops = threads(run, "stop-machine")
    return {each["cpu"]: True for each in threads(run, *OWN) if stops}


def reported_awaited(report: Any) -> Figures:
    stop = report["stalls"]["stop_machine"]
    return dict.fromkeys(stop["missing"] if stop else (), True)


FACTS = (
    Fact("culprit of a CPU that stands still", culprits, causes),
    Fact(
        "task of a CPU that stands still",
        lambda report: {held["cpu"]: held["pid"] for held in report["stalls"]["cpus"]},
        tasks,
    ),
    Fact("owner of a spinlock", reported_owners, lock_owners),
    Fact("caller of a cross call", reported_calls, calls),
    Fact("task that waits for RCU", reported_waiters, waiters),
    Fact("reader that holds up RCU", reported_readers, readers),
    Fact("CPU that stop_machine waits for", reported_awaited, awaited),
)
