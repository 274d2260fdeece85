# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-locks --workqueues: what the kernel itself printed of its workqueues,
and what a module made."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fixtures.lab import Run
from tests.truth.fact import Fact, Figures

OURS = "wm_"
"""Prefix of the module's workqueues: the work of others comes and goes."""

_QUEUE = re.compile(r"workqueue (\S+): flags=")
_LIST = re.compile(r"(in-flight|pending|inactive): (.*)")
_BUSY = re.compile(r"(\d+)(?:\(RESCUER\))?:(\w+)")
_BARRIER = re.compile(r"BAR\((\d+)\)")


def printed(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield workqueue, name of a list and the list that the kernel printed."""
    name = ""
    for line in run.workload["kernel_says"]:
        if found := _QUEUE.match(line):
            name = found[1]
        elif found := _LIST.match(line.strip()):
            yield name, found[1], found[2]


def busy(run: Run) -> Figures:
    """Return function and workqueue of each worker, by PID."""
    return {
        int(pid): (function, name)
        for name, kind, text in printed(run)
        if kind == "in-flight" and name.startswith(OURS)
        for pid, function in _BUSY.findall(text)
    }


def reported_busy(report: Any) -> Figures:
    return {
        worker["pid"]: (worker["function"], worker["workqueue"])
        for pool in report["workqueues"]["pools"]
        for worker in pool["busy"]
    }


def queued(run: Run, kind: str) -> Figures:
    """Return the functions of queued work items by workqueue; barriers as PIDs."""
    found: dict[Any, list[Any]] = {}
    for name, listed, text in printed(run):
        if listed == kind and name.startswith(OURS):
            found.setdefault(name, []).extend(_items(text))
    if not found:
        raise LookupError("no such work")
    return found


def _items(text: str) -> Iterator[str | int]:
    """Yield the work items of a list; a barrier follows the one that it is behind."""
    for item in text.split(","):
        function, *_ = item.split()
        yield function
        yield from map(int, _BARRIER.findall(item))


def _listed(works: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for work in works:
        what = work["waiter"] if work["waiter"] is not None else work["function"]
        found.setdefault(work["workqueue"], []).append(what)
    return found


def reported_pending(report: Any) -> Figures:
    found: dict[Any, list[Any]] = {}
    for pool in report["workqueues"]["pools"]:
        for name, works in _listed(pool["works"]).items():
            found.setdefault(name, []).extend(works)
    return found


def reported_inactive(report: Any) -> Figures:
    return {
        queue["name"]: _listed(queue["works"])[queue["name"]]
        for queue in report["workqueues"]["queues"]
    }


def ends(run: Run) -> Figures:
    """Return the task that each waiter waits for in the end: of no pool, a holder or
    the worker on the work item."""
    found = {}
    for case in run.workload["cases"]:
        # The holder of the chain waits itself; that of the limited workqueue sleeps.
        last = case["holder"] if case["name"] == "limited" else case["worker"]
        for pid in case["waiters"] if last else ():
            found[pid] = last
    return found


def reported_ends(report: Any) -> Figures:
    """Follow each wait from owner to owner; a task that waits for itself is an end."""
    locks = {lock["id"]: lock for lock in report["locks"]}
    after = {
        wait["pid"]: locks[wait["lock"]]["owners"]
        for wait in report["waits"]
        if wait["lock"] in locks
    }
    found = {}
    for pid in after:
        seen, task = {pid}, pid
        while owners := after.get(task):
            task = owners[0]["pid"]
            if task in seen:
                break
            seen.add(task)
        found[pid] = task
    return found


def offline(run: Run) -> Figures:
    """Return the workqueue of the delayed work on each offline CPU."""
    return {
        case["cpu"]: case["workqueue"]
        for case in run.workload["cases"]
        if case["name"] == "offline"
    }


def reported_offline(report: Any) -> Figures:
    return {work["cpu"]: work["workqueue"] for work in report["workqueues"]["offline"]}


FACTS = (
    Fact("busy workers", reported_busy, busy),
    Fact("pending work", reported_pending, lambda run: queued(run, "pending")),
    Fact("inactive work", reported_inactive, lambda run: queued(run, "inactive")),
    Fact("end of each wait for work", reported_ends, ends),
    Fact("delayed work on offline CPUs", reported_offline, offline),
)
