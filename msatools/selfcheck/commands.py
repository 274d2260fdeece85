# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of msa-cpus, msa-locks and msa-whatis."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.kernel.percpu import kept_mask
from msatools.kernel.reader import unsigned
from msatools.selfcheck.model import Comparison
from msatools.selfcheck.selfcheck import ReportSet
from msatools.selfdesc.find import find_symbol
from msatools.whatis.model import WhatisOptions, parse
from msatools.whatis.whatis import Whatis

# --- Checks of msa-cpus: masks of CPUs, sets, and the counters of each CPU.


_MASKS = ("online", "present", "possible")
"""The kernel's masks of CPUs, each a subset of the next."""


def masks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the kernel's masks of CPUs with each other and with its count."""
    found = [kept_mask(reports.reader, name, reports.losses) or () for name in _MASKS]
    for (inner, name), (outer, other) in pairwise(zip(found, _MASKS, strict=True)):
        yield Comparison(
            name=f"cpus.{name}",
            left=f"{name} CPUs",
            right=f"those among the {other} CPUs",
            left_value=len(inner),
            right_value=len({*inner} & {*outer}),
        )
    yield Comparison(
        name="cpus.rows",
        left="CPUs by msa-cpus",
        right="possible CPUs",
        left_value=len(reports.cpus.cpus),
        right_value=len(found[-1]),
    )
    base = Comparison(
        name="cpus.count",
        left="online CPUs",
        right="__num_online_cpus",
    )
    try:
        # Not as a variable: BTF has no type of it. It is an atomic_t.
        address = find_symbol(reports.prog, "__num_online_cpus").address
    except MissingError:
        yield replace(base, absent="this kernel keeps no such count")
        return
    count = unsigned(reports.reader.read(address, 4), 0, 4)
    # CPUs that a crash stopped are not counted any more.
    online = kept_mask(reports.reader, "online", reports.losses) or ()
    yield replace(base, left_value=len(online), right_value=count)


def sets(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the CPUs of the sets with the sets in the CPUs' rows."""
    report = reports.cpus
    known = {each.name: {*each.cpus} for each in report.sets}
    online = [cpu for cpu in report.cpus if cpu.online]
    yield Comparison(
        name="cpus.sets",
        left="online CPUs",
        right="those among the CPUs of their set",
        left_value=len(online),
        right_value=sum(cpu.cpu in known.get(cpu.set, ()) for cpu in online),
    )


def queues(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the tasks found on run queues with the queues' counts (nr_running)."""
    report = reports.cpus
    yield Comparison(
        name="queues.nr-running",
        left="run queues whose count of tasks differs from those found",
        right="none",
        left_value=report.coverage.get("run_queues_differ", 0),
        right_value=0,
        absent="they change while they are read" if report.target.live else None,
    )


def counters(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the counters of CPUs with sums of interrupts and of tasks."""
    report = reports.cpus
    softirqs = [cpu.soft for cpu in report.cpus]
    by_name = [row.total for row in report.softirqs or ()]
    yield Comparison(
        name="cpus.softirqs",
        left="softirqs of all CPUs",
        right="softirqs of all kinds",
        left_value=_sum(softirqs),
        right_value=_sum(by_name),
        lost="a counter could not be read",
    )
    yield Comparison(
        name="cpus.interrupts",
        left="interrupts of all CPUs",
        right="interrupts of devices",
        left_value=_sum([cpu.intr for cpu in report.cpus]),
        right_value=_sum([irq.total for irq in report.irqs or ()]),
        most=None,
        reason="CPUs count those of the architecture and of former devices, too",
        lost="a counter could not be read",
    )
    yield Comparison(
        name="cpus.switches",
        left="context switches of all CPUs",
        right="context switches of all threads",
        left_value=_sum([cpu.csw for cpu in report.cpus]),
        right_value=sum(task.nvcsw + task.nivcsw for task in reports.prstat.tasks),
        most=None,
        reason="CPUs count those of idle tasks and of threads that have ended, too",
        lost="a counter could not be read",
    )


def _sum(values: list[int | None]) -> int | None:
    """Return the sum; ``None`` if a part is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


CPUS_CHECKS = (masks, sets, queues, counters)


# --- Checks of msa-locks: whether waiters, locks, owners and tasks fit each other.


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
    """Compare the standings of tasks in the commands: running, waiting, throttled.

    All use :mod:`msatools.tasks.states`, each on data that it has read itself.
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
    """Return the standing of a task by msa-whatis; ``None`` if it reports none."""
    (rows,) = np.nonzero(reports.tasks["pid"] == pid)
    if not len(rows):
        return None
    address = int(reports.tasks["address"][rows[0]])
    said = reports.whatis.task(address).standing or ""
    return next(
        (what for start, what in _STANDINGS.items() if said.startswith(start)), None
    )


def _spinlocks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare the owners of spinlocks by msa-cpus --stalls with those by msa-locks."""
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
"""Maps the start of a root's reason to the standing of its task."""


def _by_cpus(reports: ReportSet) -> dict[str, set[int]]:
    """Return the IDs of tasks by their standing in msa-cpus."""
    found: dict[str, set[int]] = {name: set() for name in _STANDINGS.values()}
    for queue in reports.cpus.run_queues:
        if queue.current is not None:
            found["running"].add(queue.current.pid)
        for task in queue.waiting:
            found["throttled" if task.throttled else "waiting"].add(task.pid)
    return found


LOCKS_CHECKS = (waits, owners, standings)


# --- Checks of msa-whatis: whether it finds the task that was read from an address.


_MOST = 64
"""Maximum number of tasks to look up by address, spread over all tasks."""


def tasks(reports: ReportSet) -> Iterator[Comparison]:
    """Compare tasks with what lies at their addresses.

    A task's address comes from the list of tasks, the answer from slabs and symbols.
    """
    table = reports.tasks
    step = len(table.records) // _MOST + 1
    pids = table["pid"][::step].tolist()
    asked = [parse(f"{address:#x}") for address in table["address"][::step].tolist()]
    options = WhatisOptions(addresses=tuple(each for each in asked if each is not None))
    answers = Whatis(reports.prog, reports.target, options).report(lambda *_: None)
    found = [
        None if answer.task is None else answer.task.pid for answer in answers.answers
    ]
    yield Comparison(
        name="whatis.tasks",
        left="tasks that were asked for by address",
        right="answers that are these tasks",
        left_value=len(pids),
        right_value=sum(map(int.__eq__, pids, (pid or -1 for pid in found))),
    )


ADDRESSES_CHECKS = (tasks,)
