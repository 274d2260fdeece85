# SPDX-License-Identifier: LGPL-2.1-or-later

"""The part of a report that the options ask for. Pure."""

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from msatools.locks.base.lock import LockTypeName
from msatools.locks.options import LocksOptions
from msatools.locks.report import LockChanges, LocksReport, Wait


def choose(report: LocksReport, options: LocksOptions) -> LocksReport:
    """
    Return the waits that the options ask for, and the chains from them to the roots.

    :param report: A report of all waits.
    """
    if not options.stacks:
        report = _without_stacks(report)
    if not options.workqueues:
        report = replace(report, workqueues=None)
    chosen = report if options.asks_for_all else _chosen(report, options)
    return chosen if options.io else _without_other_io(chosen)


def _chosen(report: LocksReport, options: LocksOptions) -> LocksReport:
    types = {lock.id: lock.type for lock in report.locks}
    matching = {wait.pid for wait in report.waits if _matches(wait, options, types)}
    owners = {wait.pid: wait.owners for wait in report.waits}
    pids = with_chains(owners, matching)
    waits = tuple(wait for wait in report.waits if wait.pid in pids)
    locks = {id_ for wait in waits for id_ in _lock_ids(wait)}
    asked = {id_ for w in report.waits if w.pid in matching for id_ in _lock_ids(w)}
    return replace(
        report,
        waits=waits,
        locks=tuple(lock for lock in report.locks if lock.id in locks),
        roots=tuple(root for root in report.roots if not pids.isdisjoint(root.behind)),
        deadlocks=tuple(each for each in report.deadlocks if locks >= {*each.locks}),
        herds=tuple(herd for herd in report.herds if herd.lock in asked),
        inversions=tuple(each for each in report.inversions if each.lock in locks),
        changes=report.changes and _changes(report.changes, report.waits, pids),
        contention=report.contention
        and tuple(
            each
            for each in report.contention
            if options.types is None or each.type in options.types
        ),
    )


def has_stacks(report: LocksReport) -> bool:
    """Return whether stacks are included, or there are no waits at all."""
    return not report.waits or any(wait.stack is not None for wait in report.waits)


def _without_stacks(report: LocksReport) -> LocksReport:
    return replace(
        report,
        waits=tuple(replace(wait, stack=None) for wait in report.waits),
        roots=tuple(replace(root, stack=None) for root in report.roots),
    )


def _without_other_io(report: LocksReport) -> LocksReport:
    """Return the report with the I/O of the disks of roots only."""
    names = {name for root in report.roots for name in root.disks or ()}
    disks = tuple(disk for disk in report.io or () if disk.name in names)
    return replace(report, io=disks or None, has_all_io=None)


def _lock_ids(wait: Wait) -> tuple[str, ...]:
    """Return the IDs of the locks that a task waits for."""
    return (wait.any_of or ()) if wait.lock is None else (wait.lock,)


def _matches(wait: Wait, options: LocksOptions, types: dict[str, LockTypeName]) -> bool:
    if options.pids is not None and wait.pid not in options.pids:
        return False
    if options.states is not None and wait.state not in options.states:
        return False
    if options.types is not None:
        lock_types = {types.get(id_) for id_ in _lock_ids(wait)}
        if lock_types.isdisjoint(options.types):
            return False
    return wait.age_ns >= options.min_age_ns


def with_chains(owners: Mapping[int, Iterable[int]], tasks: Iterable[int]) -> set[int]:
    """
    Return tasks, and all blocked tasks on the chains from them to the roots.

    :param owners: Maps each blocked task to the tasks that it waits for.
    """
    chosen = set(tasks)
    todo = list(chosen)
    while todo:
        for owner in owners[todo.pop()]:
            if owner in owners and owner not in chosen:
                chosen.add(owner)
                todo.append(owner)
    return chosen


def _changes(
    changes: LockChanges, waits: Iterable[Wait], pids: Collection[int]
) -> LockChanges:
    """Return the changes without waits that were not asked for; all ended ones stay."""
    gone = {wait.pid for wait in waits if wait.pid not in pids}

    def left(pids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(pid for pid in pids if pid not in gone)

    return LockChanges(
        begun=left(changes.begun),
        ended=changes.ended,
        moved=left(changes.moved),
        stuck=left(changes.stuck),
    )
