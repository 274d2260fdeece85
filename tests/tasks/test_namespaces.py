# SPDX-License-Identifier: LGPL-2.1-or-later

"""Namespaces and control groups of tasks are those that the tasks recorded."""

from functools import cache
from typing import Any

import pytest

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.identity import (
    KINDS,
    UNKNOWN,
    Membership,
    TaskNamespaces,
    read_members,
    read_task_namespaces,
)
from msatools.tasks.table import TaskReader, TaskTable
from tests.prstat.reports import report
from tests.support.dumps import open_dump

NAMES = ("contained-6.12", pytest.param("contained-6.1", marks=pytest.mark.long))
ID = "0123456789abcdef" * 4
NOWHERE = 0xFFFF_DEAD_0000_0000


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@cache
def tasks(name: str) -> tuple[Reader, TaskTable]:
    reader, losses = Reader(open_dump(name, "btf")), LossLog()
    table = TaskReader(reader).read_all(losses)
    assert not losses.notes
    return reader, table


@cache
def recorded(name: str) -> dict[str, dict[str, Any]]:
    """Return the records of the tasks that recorded their namespaces."""
    named = lab.build(name).workload["tasks"]
    return {name: task for name, task in named.items() if "namespaces" in task}


def rows(table: TaskTable, name: str) -> dict[str, int]:
    by_pid = {pid: row for row, pid in enumerate(table["pid"].tolist())}
    return {task: by_pid[record["tid"]] for task, record in recorded(name).items()}


def read(name: str) -> tuple[TaskTable, TaskNamespaces, LossLog]:
    (reader, table), losses = tasks(name), LossLog()
    return table, read_task_namespaces(reader, table, losses), losses


def test_namespaces_are_those_that_tasks_see(name: str) -> None:
    table, found, losses = read(name)
    assert not losses.notes
    assert set(found.inodes) == set(KINDS)
    for task, row in rows(table, name).items():
        inodes = {kind: int(found.inodes[kind][row]) for kind in KINDS}
        assert inodes == recorded(name)[task]["namespaces"], task
    # Namespaces differ where they must.
    child, parent = (rows(table, name)[f"namespaced{end}"] for end in ("-child", ""))
    first = rows(table, name)["outside"]
    for kind in set(KINDS) - {"cgroup"}:
        inodes = found.inodes[kind]
        assert inodes[child] != inodes[first], kind
        assert (inodes[child] == inodes[parent]) == (kind not in ("pid", "time")), kind


def test_what_cannot_be_read_is_unknown_and_counted(name: str) -> None:
    reader, table = tasks(name)
    records = table.records.copy()
    records["nsproxy"][3] = NOWHERE
    records["cred"][4] = NOWHERE
    records["nsproxy"][5] = 0  # as for a dead task
    losses = LossLog()
    found = read_task_namespaces(reader, TaskTable(records, table.columns), losses)
    assert losses.coverage == {"cred_unreadable": 1, "nsproxy_unreadable": 1}
    _, good, _ = read(name)
    for kind in KINDS:
        lost = {"pid": [], "user": [4]}.get(kind, [3, 5])
        expected = good.inodes[kind].copy()
        expected[lost] = UNKNOWN
        assert (found.inodes[kind] == expected).all(), kind


def test_kernel_without_namespaces(name: str) -> None:
    reader, table = tasks(name)
    few = TaskTable(table.records, table.columns - {"nsproxy", "thread_pid"})
    found = read_task_namespaces(reader, few, LossLog())
    assert (found.inodes["user"] != UNKNOWN).all()
    for kind in set(KINDS) - {"user"}:
        assert (found.inodes[kind] == UNKNOWN).all()


def selected(name: str, **wanted: Any) -> set[str]:
    (reader, table), losses = tasks(name), LossLog()
    found = read_members(reader, table, Membership(**wanted), losses)
    assert not losses.notes
    return {task for task, row in rows(table, name).items() if found[row]}


INSIDE = {"contained", "namespaced", "namespaced-child"}
SERVICES = {"service-web", "service-db"}


def test_members(name: str) -> None:
    of_child = recorded(name)["namespaced-child"]["namespaces"]
    of_parent = recorded(name)["namespaced"]["namespaces"]
    apart = {"namespaced", "namespaced-child"}
    assert selected(name, cgroups=("/service",)) == SERVICES
    assert selected(name, cgroups=("/service/w*",)) == {"service-web"}
    assert selected(name, cgroups=("/machine.slice", "/service/db")) == {
        *INSIDE,
        "service-db",
    }
    assert selected(name, containers=(ID[:12],)) == INSIDE
    assert selected(name, containers=(ID[1:],)) == set()
    assert selected(name, namespaces=(of_child["pid"],)) == {"namespaced-child"}
    for kind in ("mnt", "net", "uts", "ipc", "user"):
        assert selected(name, namespaces=(of_parent[kind],)) == apart, kind
    assert selected(name, cgroups=("/",)) == set(recorded(name))


SELECTIONS = {
    "--cgroup /service": SERVICES,
    "--cgroup /service/web,/service/d?": SERVICES,
    f"--container {ID[:12].upper()}": INSIDE,
    f"--container {ID} --cgroup /machine.slice/*/payload": {"contained"},
}


@pytest.mark.parametrize("view", [(), ("-L",)])
@pytest.mark.parametrize("words", SELECTIONS)
def test_prstat_selects(name: str, words: str, view: tuple[str, ...]) -> None:
    found = report(name, *view, *words.split())
    pids = {recorded(name)[task]["pid"] for task in SELECTIONS[words]}
    assert {task["pid"] for task in found["tasks"]} == pids
    assert found["totals"]["processes"] == len(pids)


def test_prstat_groups(name: str) -> None:
    by = report(name, "--by", "container,ns,cgroup,user", "-a", "-Z")
    whole = by["totals"]
    for kind, groups in by["by"].items():
        assert sum(g["processes"] for g in groups) == whole["processes"], kind
        assert sum(g["threads"] for g in groups) == whole["threads"], kind
    assert by["by"]["cgroup"] == by["cgroups"]
    assert by["by"]["user"] == by["users"]
    counts = {
        kind: {group["key"]: group["processes"] for group in groups}
        for kind, groups in by["by"].items()
    }
    assert counts["container"][ID] == len(INSIDE)
    child = recorded(name)["namespaced-child"]
    assert counts["ns"][str(child["namespaces"]["pid"])] == 1
