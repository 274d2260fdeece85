# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make reports of locks by hand."""

from collections.abc import Sequence
from typing import Any, cast

from msatools.locks.report import (
    Deadlock,
    LockRow,
    LocksReport,
    LockTypeName,
    Owner,
    OwnerConfidence,
    Root,
    Wait,
)
from msatools.program.model import Target

SECOND = 1_000_000_000
MARKS: dict[str, OwnerConfidence] = {"=": "exact", "~": "likely", "?": "evidence"}

TARGET = Target(
    path="vmcore",
    kind="elf",
    live=False,
    release="6.12",
    arch="x86_64",
    page_size=4096,
    types="btf",
    dump_level=None,
    truncated=False,
    crash=None,
    format="ELF",
)


def wait(pid: int, lock: str | None = None, **others: Any) -> Wait:
    """Make a waiting task; by default it is in D for as many seconds as its PID."""
    given: dict[str, Any] = {
        "tgid": pid,
        "comm": f"task-{pid}",
        "state": "D",
        "age_ns": pid * SECOND,
        "age_bound": "exact",
        "mode": None,
        "task_class": "KLK",
        "caller": None,
        "call": None,
    }
    return Wait(pid=pid, lock=lock, **(given | others))


def owner(text: str, comm: str | None = None, *, seen: bool = False) -> Owner:
    """Make an owner from text such as ``=12``: a mark for the confidence, and a PID."""
    pid = int(text[1:])
    return Owner(
        pid=pid, confidence=MARKS[text[0]], comm=comm or f"task-{pid}", seen=seen
    )


def lock(
    lock_id: str,
    waiters: Sequence[int],
    owners: str | Sequence[Owner] = "",
    **more: Any,
) -> LockRow:
    """Make a lock; owners can be text such as ``=12 ~13``."""
    if isinstance(owners, str):
        owners = [owner(word) for word in owners.split()]
    given: dict[str, Any] = {"address": None, "name": None}
    given["max_age_ns"] = max(waiters, default=0) * SECOND
    return LockRow(
        id=lock_id,
        type=cast(LockTypeName, lock_id.split()[0]),
        owners=tuple(owners),
        waiters=tuple(waiters),
        **(given | more),
    )


def root(pid: int | None, blocked: tuple[int, int], **others: Any) -> Root:
    """Make a root.

    :param blocked: Numbers of blocked tasks in D and in S.
    """
    given: dict[str, Any] = {
        "kind": "task",
        "reason": "runs on CPU 1",
        "comm": None if pid is None else f"task-{pid}",
        "state": None if pid is None else "R",
        "age_ns": None if pid is None else pid * SECOND,
        "waiters": (),
        "chain": (),
        "max_age_ns": 0,
    }
    in_d, in_s = blocked
    return Root(pid=pid, blocked_d=in_d, blocked_s=in_s, **(given | others))


def deadlock(hops: str, locks: Sequence[str], *, exact: bool = True) -> Deadlock:
    """Make a deadlock of tasks, such as ``1 2``, each of which waits for the next."""
    return Deadlock(
        confidence="exact" if exact else "possible",
        pids=tuple(map(int, hops.split())),
        locks=tuple(locks),
    )


def report(
    waits: Sequence[Wait] = (),
    locks: Sequence[LockRow] = (),
    roots: Sequence[Root] = (),
    **others: Any,
) -> LocksReport:
    """Make a report of a dump, with waits sorted by age."""
    given: dict[str, Any] = {
        "target": TARGET,
        "taken_at_ns": None,
        "interval_ns": None,
        "coverage": {"tasks": 427, "tasks_scanned": 391, "zombies": 36},
        "notes": (),
        "deadlocks": (),
        "herds": (),
        "inversions": (),
    }
    by_age = sorted(waits, key=lambda wait: -wait.age_ns)
    return LocksReport(
        waits=tuple(by_age), locks=tuple(locks), roots=tuple(roots), **(given | others)
    )
