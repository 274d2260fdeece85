# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make reports of zombies by hand."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msatools.program.model import Address
from msatools.zombies.model import (
    Evidence,
    Heir,
    HeldMemory,
    Leak,
    Limit,
    ParentThread,
    TaskAsked,
    Verdict,
    Waiting,
    Zombie,
    ZombieGroup,
    ZombiesReport,
    ending,
)
from tests.locks.madelocks import SECOND, TARGET

FIRST_NAMESPACE = 4026531836


def zombie(pid: int, ppid: int = 147, **others: Any) -> Zombie:
    """Make a zombie that has been dead for as many seconds as its PID."""
    given: dict[str, Any] = {
        "comm": f"dead-{pid}",
        "parent_comm": f"parent-{ppid}",
        "uid": 0,
        "cgroup": "/",
        "exit_code": 0,
        "age_ns": pid * SECOND,
        "age_bound": "estimate",
        "verdict": "never-waits",
        "namespace": FIRST_NAMESPACE,
        "ns_pid": None,
        "threads": 0,
    }
    return Zombie(pid=pid, ppid=ppid, **(given | others))


_UNKNOWN = dict.fromkeys(
    (
        *("sigchld", "handler", "pending", "blocked", "blocked_signals"),
        *("ignored_signals", "caught_signals", "reaper", "tracer", "root", "root_pid"),
    )
)


def evidence(text: str = "it sleeps", **others: Any) -> Evidence:
    """Make evidence with few facts."""
    given: dict[str, Any] = {**_UNKNOWN, "threads": (), "thread_count": 1}
    return Evidence(text=text, **(given | others))


def thread(pid: int, **others: Any) -> ParentThread:
    given: dict[str, Any] = {
        "comm": f"thread-{pid}",
        "state": "S",
        "task_class": "TMR",
        "age_ns": SECOND,
        "doing": "asleep in clock_nanosleep",
        "waiting": None,
        "blocks_sigchld": False,
    }
    return ParentThread(pid=pid, **(given | others))


def waiting(kind: Any = "any", number: int | None = None, flags: str = "") -> Waiting:
    """Make a wait(); *flags* is text such as ``__WALL``."""
    return Waiting(
        kind=kind, number=number, clone="__WCLONE" in flags, all="__WALL" in flags
    )


def group(zombies: Sequence[Zombie], **others: Any) -> ZombieGroup:
    """Make the group of one parent's zombies."""
    first, *_ = zombies
    ages = [dead.age_ns for dead in zombies]
    given: dict[str, Any] = {
        "count": len(zombies),
        "evidence": evidence(),
        "advice": f"restart {first.ppid}",
        "parent_state": "S",
        "parent_age_ns": 50 * SECOND,
        "min_age_ns": min(ages),
        "max_age_ns": max(ages),
        "exit_codes": Counter(ending(dead.exit_code) for dead in zombies),
        "uids": tuple(sorted({dead.uid for dead in zombies if dead.uid is not None})),
        "cgroups": tuple(sorted({dead.cgroup for dead in zombies if dead.cgroup})),
        "namespaces": tuple(
            sorted({dead.namespace for dead in zombies if dead.namespace})
        ),
        "pids": [dead.pid for dead in zombies],
    }
    return ZombieGroup(
        ppid=first.ppid,
        parent_comm=first.parent_comm,
        verdict=first.verdict,
        **(given | others),
    )


def limit(
    name: str, used: int | None, most: int | None, dead: int = 0, **others: Any
) -> Limit:
    left = None if used is None or most is None else max(most - used, 0)
    given: dict[str, Any] = {"scope": "system", "left": left, "first": False}
    return Limit(name=name, used=used, max=most, zombies=dead, **(given | others))


def heir(ppid: int, to: int | None, **others: Any) -> Heir:
    given: dict[str, Any] = {"why": "subreaper"}
    given["heir_comm"] = None if to is None else f"heir-{to}"
    return Heir(ppid=ppid, heir=to, **({"reaps": True} | given | others))


def leak(pid: int, references: int, **named: int) -> Leak:
    return Leak(
        address=Address(0xFFFF888000000000 + pid),
        pid=pid,
        references=references,
        named=named,
        task="zombie" if named.get("task") else None,
    )


def asked(pid: int, verdict: Verdict | None = None, **others: Any) -> TaskAsked:
    given: dict[str, Any] = {
        "comm": f"dead-{pid}" if verdict else f"task-{pid}",
        "state": "Z" if verdict else "S",
        "ppid": 147,
        "parent_comm": "parent-147",
        "age_ns": pid * SECOND,
    }
    return TaskAsked(pid=pid, verdict=verdict, **(given | others))


def report(
    zombies: Sequence[Zombie] = (),
    groups: Sequence[ZombieGroup] | None = None,
    limits: Sequence[Limit] = (),
    **others: Any,
) -> ZombiesReport:
    """Make a report of a dump, by default with one group per parent and verdict."""
    if groups is None:
        kinds: dict[tuple[int, str], list[Zombie]] = {}
        for dead in zombies:
            kinds.setdefault((dead.ppid, dead.verdict), []).append(dead)
        groups = [group(members) for members in kinds.values()]
    given: dict[str, Any] = {
        "target": TARGET,
        "taken_at_ns": None,
        "interval_ns": None,
        "coverage": {"tasks": 427, "tasks_scanned": 427},
        "notes": (),
        "held": HeldMemory(bytes=0, each_bytes={}),
    }
    by_count = sorted(groups, key=lambda row: -row.count)
    return ZombiesReport(
        zombies=tuple(zombies),
        groups=tuple(by_count),
        limits=tuple(limits),
        **(given | others),
    )
