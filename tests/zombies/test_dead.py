# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who is dead, and what is left of them, held against what the guest logged."""

import numpy as np
import pytest
from drgn import Object, Program

from msatools.kernel.report import Findings
from msatools.tasks.now import AgeBound
from msatools.tasks.table import TaskTable
from msatools.zombies.dead import UNKNOWN, read_ages, read_dead, zombie_rows
from msatools.zombies.parents import read_parents
from msatools.zombies.verdicts import verdicts
from tests.zombies.conftest import Seen, look_at, lose, put, seen

AGE_NS = 100_000_000
"""By how much an age may differ: the clock of an idle CPU lags by some ticks."""

MANY = 20_000
SPACE = 4026531836
"""The initial PID namespace (PROC_PID_INIT_INO)."""


def test_all_that_are_dead(dump: Seen) -> None:
    assert sorted(dump.pids) == sorted(dump.told)
    leaders = {one["pid"] for one in dump.run.workload["zombies"]}
    leads = dump.dead.leads.tolist()
    assert {p for p, lead in zip(dump.pids, leads, strict=True) if lead} == leaders
    assert dump.findings.notes == {}
    assert not dump.findings.coverage


def test_how_they_ended(dump: Seen) -> None:
    found = dict(zip(dump.pids, dump.dead.exit_code.tolist(), strict=True))
    assert found == {pid: one["exit_code"] for pid, one in dump.told.items()}
    assert len(set(found.values())) > 5


def test_ages_are_those_that_were_logged(dump: Seen) -> None:
    now = dump.clocks.monotonic_ns
    assert now is not None
    for pid, age in zip(dump.pids, dump.dead.age_ns.tolist(), strict=True):
        one = dump.told[pid]
        assert one["told_ns"] - AGE_NS < now - age < one["exited_ns"] + AGE_NS, one
    assert set(dump.dead.age_bound.tolist()) == {AgeBound.ESTIMATE}


def test_namespaces_and_their_numbers(dump: Seen) -> None:
    deep = set()
    for place, pid in enumerate(dump.pids):
        one = dump.told[pid]
        assert dump.dead.namespace[place] == one["namespace"], one
        nested = len(one["ns_pids"]) > 1
        assert dump.dead.ns_pid[place] == (one["ns_pids"][-1] if nested else 0), one
        deep.add(len(one["ns_pids"]))
    assert deep == {1, 2, 3}


def test_threads_that_live(dump: Seen) -> None:
    living = {}
    for pid in dump.dead.process[dump.dead.leads].tolist():
        same = (dump.table["signal"] == pid) & (dump.table["exit_state"] == 0)
        living[pid] = int(np.count_nonzero(same))
    found = dict(zip(dump.dead.process.tolist(), dump.dead.threads, strict=True))
    assert {pid: found[pid] for pid in living} == living
    assert found[dump.dead.process[dump.place("leader-many")]] == 40


def test_what_they_send(dump: Seen) -> None:
    sends = dump.dead.exit_signal
    assert sends[dump.place("cloned-none-1")] == 0
    assert sends[dump.place("cloned-usr1-1")] == 10
    assert sends[dump.place("thread-traced")] == -1
    assert sends[dump.place("mixed-plain-1")] == 17


def test_who_traces(dump: Seen) -> None:
    for place, pid in enumerate(dump.pids):
        traced = bool(dump.told[pid]["tracer"])
        assert bool(dump.dead.ptraced[place]) == traced
        same = dump.dead.parent[place] == dump.dead.real_parent[place]
        assert traced or same


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_many(kernel: str) -> None:
    many = seen(f"manytasks-{kernel}")
    farm = many.run.workload["farm"]
    assert len(farm["zombies"]) == MANY
    assert many.pids == farm["zombies"]
    assert len(many.parents.facts) == 1
    assert many.parents.facts[0].pid == farm["pid"]
    assert set(many.verdicts.values()) == {"never-waits"}
    assert set(many.dead.namespace.tolist()) == {SPACE}
    # Structures that lie together come with one read.
    dead, parents = many.reads
    assert dead < MANY / 10
    assert parents < 20


def test_dead_threads_that_nobody_traces_are_none(dump: Seen) -> None:
    records = dump.table.records.copy()
    row = dump.dead.row[dump.place("thread-traced")]
    records["ptrace"][row] = 0
    rows = zombie_rows(TaskTable(records, dump.table.columns))
    assert set(dump.dead.row.tolist()) - set(rows.tolist()) == {row}


def test_dead_threads_that_are_being_reaped_are_none(dump: Seen) -> None:
    records = dump.table.records.copy()
    row = dump.dead.row[dump.place("thread-traced")]
    records["exit_state"][row] = 0x10
    rows = zombie_rows(TaskTable(records, dump.table.columns))
    assert row not in rows


def test_the_end_of_a_whole_process(program: Program) -> None:
    """exit_group() of another thread says how it ended, after the first one has."""
    whole = seen("zombies-6.12")
    place = whole.place("leader-many")
    assert whole.dead.exit_code[place] == 5 << 8
    address = int(whole.dead.process[place])
    process = Object(whole.prog, "struct signal_struct", address=address)
    put(program, process.flags.address_, (4).to_bytes(4, "little"))
    put(program, process.group_exit_code.address_, (7 << 8).to_bytes(4, "little"))
    found = look_at(program, "zombies-6.12")
    assert found.dead.exit_code[place] == 7 << 8


def test_who_is_being_reaped(dump: Seen) -> None:
    assert not dump.dead.reaped.any()
    for state in (0x10, 0x30):
        records = dump.table.records.copy()
        records["exit_state"][dump.dead.row[0]] = state
        table = TaskTable(records, dump.table.columns)
        dead = read_dead(dump.reader, table, read_ages(table, dump.clocks), Findings())
        assert dead.reaped.tolist() == [True] + [False] * (len(dead) - 1)


def test_what_is_lost(program: Program) -> None:
    whole = seen("zombies-6.12")
    place = whole.place("of-sleeper-1")
    lose(program, int(whole.dead.process[place]), 64)
    lose(program, int(whole.dead.thread_pid[place]), 64)
    found = look_at(program, "zombies-6.12")
    assert found.pids == whole.pids
    assert found.dead.threads[place] == UNKNOWN
    assert found.dead.namespace[place] == UNKNOWN
    coverage = found.findings.coverage
    assert coverage["signal_struct_unreadable"] >= 1
    assert coverage["pid_unreadable"] == 1
    assert found.verdicts[whole.pids[place]] == "unknown"
    others = [p for p in whole.pids if p != whole.pids[place]]
    assert [found.verdicts[p] for p in others] == [whole.verdicts[p] for p in others]


def test_none(dump: Seen) -> None:
    alive = dump.table.only(dump.table["exit_state"] == 0)
    findings = Findings()
    dead = read_dead(dump.reader, alive, read_ages(alive, dump.clocks), findings)
    assert len(dead) == 0
    assert not findings.notes
    parents = read_parents(
        dump.reader, alive, dead, read_ages(alive, dump.clocks), findings
    )
    assert parents.facts == ()
    assert not findings.notes
    assert verdicts(dead, parents).tolist() == []
