# SPDX-License-Identifier: LGPL-2.1-or-later

"""All that msa-zombies reports of real dumps, against what was logged in the guests."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest

from fixtures import lab
from msatools.render.json import dumps as as_json
from msatools.zombies.model import Zombie, ZombiesReport
from msatools.zombies.options import ZombiesOptions
from msatools.zombies.zombies import collect_zombies
from tests.support.dumps import open_dump

ALL = ("zombies-6.1", "zombies-6.12")
MANY = ("manytasks-6.1", "manytasks-6.12")
BOUND_NS = 100_000_000


@dataclass(frozen=True)
class Told:
    run: lab.Run
    report: ZombiesReport

    @property
    def zombies(self) -> dict[int, Zombie]:
        return {zombie.pid: zombie for zombie in self.report.zombies}

    @property
    def truths(self) -> dict[int, dict[str, Any]]:
        return {truth["pid"]: truth for truth in self.run.workload["zombies"]}


@lru_cache(maxsize=4)
def told(name: str, types: str = "btf", **options: Any) -> Told:
    prog = open_dump(name, types)
    asked = ZombiesOptions(**options)
    return Told(lab.build(name), collect_zombies(prog, options=asked))


@pytest.fixture(scope="module", params=ALL)
def dump(request: pytest.FixtureRequest) -> Told:
    return told(request.param)


def test_all_are_told_and_no_others(dump: Told) -> None:
    threads = {each["pid"] for each in dump.run.workload["zombie_threads"]}
    assert dump.zombies.keys() == dump.truths.keys() | threads
    assert len(dump.report.zombies) == dump.report.coverage["zombies"]


def test_verdicts(dump: Told) -> None:
    wrong = {
        pid: (zombie.verdict, dump.truths[pid]["verdict"])
        for pid, zombie in dump.zombies.items()
        if pid in dump.truths and zombie.verdict != dump.truths[pid]["verdict"]
    }
    assert wrong == {}


def test_what_is_known_of_each(dump: Told) -> None:
    for pid, truth in dump.truths.items():
        zombie = dump.zombies[pid]
        same = ("comm", "ppid", "parent_comm", "cgroup", "exit_code", "namespace")
        for name in same:
            assert getattr(zombie, name) == truth[name], (pid, name)
        assert zombie.uid == truth["real_uid"]
        assert (zombie.tracer or 0) == truth["tracer"]
        *_, innermost = truth["ns_pids"]
        nested = len(truth["ns_pids"]) > 1
        assert zombie.ns_pid == (innermost if nested else None)


def test_ages(dump: Told) -> None:
    """They died between two times that were logged; all times are estimates."""
    taken_at_ns = dump.report.taken_at_ns
    assert taken_at_ns is not None
    for pid, truth in dump.truths.items():
        if truth["exited_ns"] is None:
            continue
        died_ns = taken_at_ns - dump.zombies[pid].age_ns
        assert truth["told_ns"] - BOUND_NS < died_ns < truth["exited_ns"] + BOUND_NS
        assert dump.zombies[pid].age_bound == "estimate"


def test_groups(dump: Told) -> None:
    expected = Counter(
        (truth["ppid"], truth["verdict"]) for truth in dump.truths.values()
    )
    threads = {each["pid"] for each in dump.run.workload["zombie_threads"]}
    found = {
        (group.ppid, group.verdict): len(set(group.pids) - threads)
        for group in dump.report.groups
    }
    assert {key: count for key, count in found.items() if count} == expected
    for group in dump.report.groups:
        assert group.count == len(group.pids) == sum(group.exit_codes.values())
        members = [dump.zombies[pid] for pid in group.pids]
        assert group.min_age_ns == min(each.age_ns for each in members)
        assert group.max_age_ns == max(each.age_ns for each in members)
        assert set(group.uids) == {each.uid for each in members}
        assert set(group.cgroups) == {each.cgroup for each in members}
        assert set(group.namespaces) == {each.namespace for each in members}
    counts = [group.count for group in dump.report.groups]
    assert counts == sorted(counts, reverse=True)


def test_signal_masks_are_those_of_proc(dump: Told) -> None:
    parents = {parent["pid"]: parent for parent in dump.run.workload["parents"]}
    for group in dump.report.groups:
        if group.ppid not in parents:
            continue  # the guest's first process, which is parent of dead leaders alone
        masks = parents[group.ppid]["masks"]
        evidence = group.evidence
        assert evidence.blocked_signals == tuple(masks["blocked"]), group.ppid
        assert evidence.ignored_signals == tuple(masks["ignored"]), group.ppid
        assert evidence.caught_signals == tuple(masks["caught"]), group.ppid


def test_blocked_parents_say_what_they_wait_for_in_the_end(dump: Told) -> None:
    blocked = [g for g in dump.report.groups if g.verdict == "parent-blocked"]
    assert len(blocked) > 3
    for group in blocked:
        assert group.evidence.root, group.parent_comm
    roots = " ".join(group.evidence.root or "" for group in blocked)
    assert "(suspended)" in roots
    assert "FUSE" in roots


def test_advice_says_whom_to_act_on(dump: Told) -> None:
    for group in dump.report.groups:
        assert group.advice
        if group.verdict not in ("leader-exited", "being-reaped"):
            assert "kill -9 on a zombie does nothing" in group.advice
        if group.verdict in ("never-waits", "handler-missed", "sigchld-blocked"):
            assert str(group.ppid) in group.advice


def test_never_a_stack_of_a_zombie(dump: Told) -> None:
    """Those of parents' threads alone are read, some of each parent."""
    parents = len({group.ppid for group in dump.report.groups})
    assert 0 < dump.report.coverage["stacks"] <= 8 * parents


@pytest.mark.parametrize("name", ALL)
def test_same_with_debug_info(name: str) -> None:
    assert same(told(name)) == same(told(name, "dwarf"))


def same(dump: Told) -> str:
    return as_json(replace(dump.report, target=told("zombies-6.1").report.target))


@pytest.mark.parametrize("name", MANY)
def test_twenty_thousand(name: str) -> None:
    dump = told(name)
    farm = dump.run.workload["farm"]
    assert len(dump.report.zombies) == len(farm["zombies"]) == 20_000
    (group,) = dump.report.groups
    assert (group.ppid, group.count) == (farm["pid"], 20_000)
    assert group.verdict == "never-waits"
    assert sorted(group.pids) == sorted(farm["zombies"])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("by", ["parents", "namespaces", "uids", "verdicts"])
def test_selection(name: str, by: str) -> None:
    key = {"parents": "ppid", "namespaces": "namespace"}.get(by, by.rstrip("s"))
    whole = told(name).zombies
    wanted = Counter(getattr(each, key) for each in whole.values()).most_common()[-1][0]
    chosen = frozenset((wanted,)) if by == "verdicts" else (wanted,)
    report = told(name, **{by: chosen}).report
    expected = {p for p, each in whole.items() if getattr(each, key) == wanted}
    assert {each.pid for each in report.zombies} == expected
    assert sum(group.count for group in report.groups) == len(expected)


@pytest.mark.parametrize("name", ALL)
def test_named_tasks(name: str) -> None:
    """Dead or alive, each is told as among all."""
    dump = told(name)
    parents = {truth["ppid"] for truth in dump.truths.values()}
    pids = tuple(sorted(dump.truths))[::25] + tuple(sorted(parents))[:3]
    report = told(name, pids=pids).report
    assert report.asked is not None
    assert [each.pid for each in report.asked] == list(pids)
    # Nobody looked at these, which take all tasks.
    assert (report.limits, report.held) == (None, None)
    for each in report.asked:
        zombie = dump.zombies.get(each.pid)
        assert each.verdict == (zombie.verdict if zombie else None)
        assert (each.state == "Z") == (zombie is not None)
        if zombie:
            assert (each.ppid, each.parent_comm) == (zombie.ppid, zombie.parent_comm)
    alone = {zombie.pid: zombie for zombie in report.zombies}
    for pid, zombie in alone.items():
        whole = dump.zombies[pid]
        assert replace(zombie, age_ns=0) == replace(whole, age_ns=0)


@pytest.mark.parametrize("name", ALL)
def test_first_tasks(name: str) -> None:
    """Their parent is the idle task, which is no loss."""
    report = told(name, pids=(1, 2)).report
    assert report.asked is not None
    assert [(each.pid, each.ppid) for each in report.asked] == [(1, 0), (2, 0)]
    assert report.notes == ()
    assert report.coverage["tasks_unreadable"] == 0
