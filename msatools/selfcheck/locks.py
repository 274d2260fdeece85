# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of msa-locks: whether waiters, locks, owners and tasks fit each other."""

from collections.abc import Iterator

import numpy as np

from msatools.selfcheck.comparison import Comparison
from msatools.selfcheck.report_set import ReportSet

_LOCK_CLASSES = ("LCK", "KLK")
"""Classes of threads that wait for a lock."""


def waits(reports: ReportSet) -> Iterator[Comparison]:
    """Compare blocked tasks with the waiters of locks, and with msa-prstat's classes.

    A task's lock is found from its stack, a lock's waiters from its list.
    """
    report = reports.locks
    wanted = {
        (wait.pid, lock)
        for wait in report.waits
        for lock in (wait.any_of or (wait.lock,))
        if lock is not None
    }
    listed = {(pid, lock.id) for lock in report.locks for pid in lock.waiters}
    yield Comparison(
        name="locks.waiters",
        left="waits of tasks for locks, by task",
        right="those among the waiters of locks",
        left_value=len(wanted),
        right_value=len(wanted & listed),
    )
    yield Comparison(
        name="locks.listed",
        left="waiters of locks",
        right="those among the waits of tasks",
        left_value=len(listed),
        right_value=len(wanted & listed),
    )
    yield Comparison(
        name="locks.unknown",
        left="tasks in a function that waits for a lock, which was not found",
        right="none",
        left_value=sum(wait.why is not None for wait in report.waits),
        right_value=0,
    )
    for name in _LOCK_CLASSES:
        yield Comparison(
            name=f"locks.class-{name.lower()}",
            left=f"threads in class {name} by msa-prstat",
            right="waits of that class by msa-locks",
            left_value=reports.prstat.totals.classes.get(name, 0),
            right_value=sum(wait.task_class == name for wait in report.waits),
        )


def owners(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the owners of locks with the threads that exist."""
    pids = {*reports.locks.pids}
    found = {owner.pid for lock in reports.locks.locks for owner in lock.owners}
    yield Comparison(
        name="locks.owners",
        left="owners of locks",
        right="those among the threads",
        left_value=len(found),
        right_value=len(found & pids),
    )


def standings(reports: ReportSet) -> Iterator[Comparison]:
    """Compare what the commands say of tasks that run, wait for a CPU, or may not.

    All ask :mod:`msatools.tasks.standing`, each from what it has read itself.
    """
    by_cpus = _by_cpus(reports)
    throttled = {
        task.pid
        for task in reports.prstat.tasks
        if task.on is not None and task.on.kind == "quota"
    }
    same = throttled & by_cpus["throttled"]
    yield Comparison(
        name="standing.throttled",
        left="tasks throttled by msa-prstat or msa-cpus",
        right="those that are by both",
        left_value=len(throttled | by_cpus["throttled"]),
        right_value=len(same),
    )
    said = {
        (root.pid, what)
        for root in reports.locks.roots
        for start, what in _STANDINGS.items()
        if root.kind == "task" and root.reason.startswith(start)
    }
    yield Comparison(
        name="standing.roots",
        left="roots of msa-locks that run, wait for a CPU, or may not run",
        right="those that msa-cpus says the same of",
        left_value=len(said),
        right_value=sum(pid in by_cpus[what] for pid, what in said),
    )
    known = [(pid, what) for what, pids in by_cpus.items() for pid in pids if pid > 0]
    yield Comparison(
        name="standing.whatis",
        left="tasks that run, wait for a CPU, or may not run, by msa-cpus",
        right="those that msa-whatis says the same of",
        left_value=len(known),
        right_value=sum(_by_whatis(reports, pid) == what for pid, what in known),
    )
    yield from _spinlocks(reports)


def _by_whatis(reports: ReportSet, pid: int) -> str | None:
    """Return the standing of a task as msa-whatis has it; ``None`` if it has none."""
    (rows,) = np.nonzero(reports.tasks["pid"] == pid)
    if not len(rows):
        return None
    address = int(reports.tasks["address"][rows[0]])
    said = reports.whatis.task(address).standing or ""
    return next(
        (what for start, what in _STANDINGS.items() if said.startswith(start)), None
    )


def _spinlocks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare who has spinlocks, by what stands still and by waits for locks."""
    stalls = reports.cpus.stalls
    spins = {
        (each.pid, tuple(sorted(owner.pid for owner in each.wanted.owners)))
        for each in (stalls.cpus if stalls is not None else ())
        if each.wanted is not None and each.pid is not None
    }
    owners = {
        pid: tuple(sorted(owner.pid for owner in lock.owners))
        for lock in reports.locks.locks
        if lock.type == "spinlock"
        for pid in lock.waiters
    }
    yield Comparison(
        name="standing.spinlocks",
        left="tasks that spin for a lock, by msa-cpus --stalls",
        right="those of which msa-locks says the same, and who has it",
        left_value=len(spins),
        right_value=sum(owners.get(pid) == found for pid, found in spins),
    )


_STANDINGS = {
    "runs on CPU": "running",
    "waits for CPU": "waiting",
    "throttled": "throttled",
}
"""Maps how the reason of a root begins to the standing of its task."""


def _by_cpus(reports: ReportSet) -> dict[str, set[int]]:
    """Return the IDs of tasks by their standing, as msa-cpus has it."""
    found: dict[str, set[int]] = {name: set() for name in _STANDINGS.values()}
    for queue in reports.cpus.run_queues:
        if queue.current is not None:
            found["running"].add(queue.current.pid)
        for task in queue.waiting:
            found["throttled" if task.throttled else "waiting"].add(task.pid)
    return found


CHECKS = (waits, owners, standings)
