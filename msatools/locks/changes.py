# SPDX-License-Identifier: LGPL-2.1-or-later

"""What has changed between two reports of who waits for whom. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from msatools.kernel.report import ns_between
from msatools.locks.report import LockChanges, LocksReport, Wait

_Thread = tuple[int, int]


def changes(before: LocksReport, after: LocksReport) -> LocksReport:
    """Give the later report, with what has changed since the earlier one."""
    then = {_thread(wait): wait for wait in before.waits}
    now = {_thread(wait): wait for wait in after.waits}
    both = [wait for thread, wait in now.items() if thread in then]
    stuck = {wait.pid for wait in both if _sleeps_on(then[_thread(wait)], wait)}
    crowds = {lock.id: len(lock.waiters) for lock in before.locks}
    return replace(
        after,
        interval_ns=ns_between(before, after),
        locks=tuple(
            replace(lock, delta_waiters=len(lock.waiters) - crowds.get(lock.id, 0))
            for lock in after.locks
        ),
        changes=LockChanges(
            begun=_pids(now[thread] for thread in now.keys() - then.keys()),
            ended=_pids(then[thread] for thread in then.keys() - now.keys()),
            moved=_pids(wait for wait in both if wait.pid not in stuck),
            stuck=tuple(sorted(stuck)),
        ),
    )


def _thread(wait: Wait) -> _Thread:
    """Tell threads apart of which one has the ID of another that has ended."""
    return wait.pid, wait.start_ns


def _sleeps_on(then: Wait, now: Wait) -> bool:
    """Tell whether a task has slept all the time: it was not switched."""
    return (then.lock, then.switches) == (now.lock, now.switches)


def _pids(waits: Iterable[Wait]) -> tuple[int, ...]:
    return tuple(sorted(wait.pid for wait in waits))
