# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of msa-zombies on dumps; figures are facts in tests/truth/zombies.py."""

from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
from msgspec.structs import replace

from fixtures.lab.zombies import SLACK_NS, ran_last_ns
from msatools.tasks.identity import Membership
from msatools.zombies.model import Zombie, ZombiesOptions, ZombiesReport
from msatools.zombies.zombies import collect_zombies
from tests.zombies.dumps import Dump, read_dump

NAME = "zombies-6.12"


@lru_cache(maxsize=4)
def report(name: str, types: str = "btf", **options: Any) -> ZombiesReport:
    prog = read_dump(name, types).prog
    return collect_zombies(prog, options=ZombiesOptions(**options))


def by_pid(found: ZombiesReport) -> dict[int, Zombie]:
    return {zombie.pid: zombie for zombie in found.zombies}


def test_ages(dump: Dump) -> None:
    """Zombies died when they last ran (/proc/PID/sched)."""
    found = report(dump.run.name)
    assert found.taken_at_ns is not None
    for one in dump.workload["zombies"]:
        zombie = by_pid(found)[one["pid"]]
        died_ns = found.taken_at_ns - zombie.age_ns
        assert abs(died_ns - ran_last_ns(dump.run, one)) <= SLACK_NS, one
        assert zombie.age_bound == "estimate"


def test_blocked_parents_have_the_end_of_their_wait_chain() -> None:
    blocked = [g for g in report(NAME).groups if g.verdict == "parent-blocked"]
    assert len(blocked) > 3
    for group in blocked:
        assert group.evidence.root, group.parent_comm
    roots = " ".join(group.evidence.root or "" for group in blocked)
    assert "(suspended)" in roots
    assert "FUSE" in roots


def test_advice_names_the_task_to_act_on() -> None:
    for group in report(NAME).groups:
        assert group.advice
        if group.verdict not in ("leader-exited", "being-reaped"):
            assert "kill -9 on a zombie does nothing" in group.advice
        if group.verdict in ("never-waits", "handler-missed", "sigchld-blocked"):
            assert str(group.ppid) in group.advice


@pytest.mark.parametrize("by", ["parents", "uids", "verdicts"])
def test_selection(by: str) -> None:
    key = {"parents": "ppid"}.get(by, by.rstrip("s"))
    whole = by_pid(report(NAME))
    wanted = Counter(getattr(row, key) for row in whole.values()).most_common()[-1][0]
    chosen = frozenset((wanted,)) if by == "verdicts" else (wanted,)
    found = report(NAME, **{by: chosen})
    expected = {p for p, row in whole.items() if getattr(row, key) == wanted}
    assert {row.pid for row in found.zombies} == expected
    assert sum(group.count for group in found.groups) == len(expected)


@pytest.mark.parametrize("by", ["namespaces", "cgroups"])
def test_selection_by_membership(by: str) -> None:
    key = by.removesuffix("s")
    whole = by_pid(report(NAME))
    wanted = Counter(getattr(row, key) for row in whole.values()).most_common()[-1][0]
    found = report(NAME, membership=Membership(**{by: (wanted,)}))
    expected = {p for p, row in whole.items() if getattr(row, key) == wanted}
    assert {row.pid for row in found.zombies} == expected
    assert 0 < len(expected) < len(whole)


def test_named_tasks() -> None:
    """Dead or alive, a task is reported as in the full report."""
    whole, dead = by_pid(report(NAME)), read_dump(NAME).workload["zombies"]
    parents = {one["ppid"] for one in dead}
    pids = (*sorted(one["pid"] for one in dead)[::25], *sorted(parents)[:3])
    found = report(NAME, pids=pids)
    assert found.asked is not None
    assert [row.pid for row in found.asked] == list(pids)
    # These need all tasks and are left out.
    assert (found.limits, found.held) == (None, None)
    for row in found.asked:
        zombie = whole.get(row.pid)
        assert row.verdict == (zombie.verdict if zombie else None)
        assert (row.state == "Z") == (zombie is not None)
        if zombie:
            assert (row.ppid, row.parent_comm) == (zombie.ppid, zombie.parent_comm)
    for pid, zombie in by_pid(found).items():
        assert replace(zombie, age_ns=0) == replace(whole[pid], age_ns=0)


def test_first_tasks() -> None:
    """Their parent is the idle task, which does not count as a loss."""
    found = report(NAME, pids=(1, 2))
    assert found.asked is not None
    assert [(row.pid, row.ppid) for row in found.asked] == [(1, 0), (2, 0)]
    assert found.notes == ()
    assert found.coverage["tasks_unreadable"] == 0
