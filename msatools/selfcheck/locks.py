# SPDX-License-Identifier: LGPL-2.1-or-later

"""Checks of msa-locks: whether waiters, locks, owners and tasks fit each other."""

from collections.abc import Iterator

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


CHECKS = (waits, owners)
