# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits that several verdicts judge: how long is long, and what explains which. Pure.

A wait has one cause, and one verdict names it: a task behind a dead disk or a frozen
file system is not reported again as a hung task.
"""

from collections.abc import Callable, Iterator

from msatools.cpus.model import RunnableTask
from msatools.locks.report import LocksReport, Root, Wait
from msatools.report.parts import ReportParts

LONG_NS = 10_000_000_000
"""Disks and servers answer within seconds, mostly within milliseconds."""

HUNG_NS = 120_000_000_000
"""The kernel's own measure (CONFIG_DEFAULT_HUNG_TASK_TIMEOUT)."""

_RCU = "RCU grace period"
_SERVED = ("device", "swap", "fuse", "network")


def is_long(wait: Wait, limit_ns: int = LONG_NS) -> bool:
    """Return whether a wait is known to have lasted for a time."""
    return wait.age_ns >= limit_ns and wait.age_bound != "upper"


def stuck_roots(locks: LocksReport) -> Iterator[Root]:
    """Yield the devices and servers that tasks in state D have long waited for."""
    blocked = uninterruptible(locks)
    for root in locks.roots:
        is_old = root.external in _SERVED and served_age_ns(locks, root) >= LONG_NS
        if is_old and not blocked.isdisjoint(root.behind):
            yield root


def served_age_ns(locks: LocksReport, root: Root) -> int:
    """Return the longest wait for a device or server itself.

    Who is behind those that wait may have waited for longer, for other things.
    """
    direct = {root.pid} if root.kind == "task" else {*root.waiters}
    ages = (
        wait.age_ns
        for wait in locks.waits
        if wait.pid in direct and wait.age_bound != "upper"
    )
    return max(ages, default=0)


def frozen_roots(locks: LocksReport) -> Iterator[Root]:
    """Yield the frozen file systems that tasks wait for."""
    yield from (root for root in locks.roots if root.external == "frozen")


def stopped_roots(locks: LocksReport) -> Iterator[Root]:
    """Yield the stopped, traced or frozen tasks that others have long waited for."""
    for root in locks.roots:
        is_stopped = root.state in ("T", "t") or root.reason.startswith("frozen by")
        waiting = root.blocked_d + root.blocked_s
        is_task = root.kind == "task" and root.external is None
        if is_task and is_stopped and waiting and stopped_age_ns(root) >= LONG_NS:
            yield root


def stopped_age_ns(root: Root) -> int:
    """Return for how long others have waited for a task that was stopped then."""
    ages = (root.max_age_ns, root.age_ns)
    return min(age for age in ages if age is not None)


def explained(parts: ReportParts) -> set[int]:
    """Return the IDs of the tasks whose waits verdicts with a cause name."""
    locks = parts.locks
    if locks is None:
        return set()
    roots = [*stuck_roots(locks), *frozen_roots(locks), *stopped_roots(locks)]
    dead = [{*each.pids} for each in locks.deadlocks]
    roots += (
        root
        for root in locks.roots
        if root.kind == "cycle" and any(each <= {*root.waiters} for each in dead)
    )
    roots += _stalled_roots(parts, locks)
    roots += starved_roots(parts, lambda task: task.throttle is not None)
    return {pid for root in roots for pid in root.behind}.union(*dead)


def starved_roots(
    parts: ReportParts, is_starved: Callable[[RunnableTask], bool], *cpus: int
) -> list[Root]:
    """Return the runnable tasks that get no CPU and that others wait for.

    :param cpus: The CPUs to look at; all if none is given.
    """
    if parts.cpus is None or parts.locks is None:
        return []
    starved = {
        task.pid
        for queue in parts.cpus.run_queues
        if not cpus or queue.cpu in cpus
        for task in queue.waiting
        if is_starved(task)
    }
    return [
        root
        for root in parts.locks.roots
        if root.kind == "task" and root.pid in starved
        if root.blocked_d + root.blocked_s
    ]


def _stalled_roots(parts: ReportParts, locks: LocksReport) -> Iterator[Root]:
    """Yield the roots that a verdict on CPUs names.

    They are who holds up CPUs or RCU, and who does not get to run because of that.
    """
    stalls = parts.cpus.stalls if parts.cpus is not None else None
    found = [each for each in stalls.found if each.over_limit] if stalls else []
    named = {each.culprit_pid for each in found if each.culprit_pid}
    is_rcu = any(each.code == "rcu-stalled" for each in found)
    if is_rcu and stalls is not None and stalls.rcu is not None:
        named |= {task.pid for task in stalls.rcu.tasks}
    for stall in found:
        yield from starved_roots(parts, lambda task: not task.throttled, *stall.cpus)
    for diagnostic in parts.cpus.findings if parts.cpus is not None else ():
        if diagnostic.code == "no-turn":
            yield from starved_roots(parts, has_waited_long, *diagnostic.cpus)
    for root in locks.roots:
        waits_for_rcu = root.kind == "external" and root.reason.startswith(_RCU)
        if root.pid in named or (is_rcu and waits_for_rcu):
            yield root


def throttled_tasks(parts: ReportParts) -> dict[str, list[RunnableTask]]:
    """Map why tasks are throttled, in words, to those tasks."""
    found: dict[str, list[RunnableTask]] = {}
    for queue in parts.cpus.run_queues if parts.cpus is not None else ():
        for task in queue.waiting:
            if task.throttle is not None:
                found.setdefault(task.throttle, []).append(task)
    return found


def has_waited_long(task: RunnableTask) -> bool:
    """Return whether a runnable task has long waited for its CPU."""
    return (task.wait_ns or 0) >= LONG_NS


def uninterruptible(locks: LocksReport) -> set[int]:
    """Return the IDs of the blocked tasks in state D."""
    return {wait.pid for wait in locks.waits if wait.state == "D"}
