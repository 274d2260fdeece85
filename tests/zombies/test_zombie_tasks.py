# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who is dead, and what is left of them; that all of it is so: tests/truth/zombies."""

import numpy as np
import pytest
from drgn import Object, Program

from msatools.kernel.report import LossLog
from msatools.tasks.task_state import AgeBound
from msatools.zombies.verdicts import verdicts
from msatools.zombies.zombie_tasks import UNKNOWN, zombie_rows
from tests.support.overlay import lose, put
from tests.zombies.dumps import Dump, read_dump

MANY = 20_000
SPACE = 4026531836
"""The initial PID namespace (PROC_PID_INIT_INO)."""


def test_all_that_are_dead(dump: Dump) -> None:
    assert sorted(dump.pids) == sorted(dump.recorded)
    leaders = {one["pid"] for one in dump.workload["zombies"]}
    leads = dump.dead.leads.tolist()
    assert {p for p, lead in zip(dump.pids, leads, strict=True) if lead} == leaders
    assert set(dump.dead.age_bound.tolist()) == {AgeBound.ESTIMATE}
    assert dump.parents
    assert not dump.losses.notes
    assert not dump.losses.coverage


def test_threads_that_live(dump: Dump) -> None:
    living = {}
    for pid in dump.dead.process[dump.dead.leads].tolist():
        same = (dump.table["signal"] == pid) & (dump.table["exit_state"] == 0)
        living[pid] = int(np.count_nonzero(same))
    found = dict(zip(dump.dead.process.tolist(), dump.dead.threads, strict=True))
    assert {pid: found[pid] for pid in living} == living
    assert found[dump.dead.process[dump.place("leader-many")]] == 40


def test_who_traces(dump: Dump) -> None:
    for place, pid in enumerate(dump.pids):
        one = dump.recorded[pid]
        assert bool(dump.dead.ptraced[place]) == bool(one["tracer"])
        assert dump.parents.tracer[place] == one["tracer"], one
        other = one["tracer"] not in (0, one["ppid"])
        assert dump.parents.elsewhere[place] == other
        same = dump.dead.parent[place] == dump.dead.real_parent[place]
        assert same != other
    assert 0 < np.count_nonzero(dump.parents.elsewhere) < dump.dead.ptraced.sum()


@pytest.mark.long
def test_many() -> None:
    many = read_dump("manytasks-6.12")
    farm = many.workload["farm"]
    assert len(farm["zombies"]) == MANY
    assert many.pids == farm["zombies"]
    assert [parent.pid for parent in many.parents.facts] == [farm["pid"]]
    assert set(many.verdicts.values()) == {"never-waits"}
    assert set(many.dead.namespace.tolist()) == {SPACE}
    # Structures that lie together come with one read.
    dead, parents = many.reads
    assert dead < MANY / 10
    assert parents < 20


@pytest.mark.parametrize(("column", "value"), [("ptrace", 0), ("exit_state", 0x10)])
def test_dead_threads_that_nobody_may_see_are_none(
    dump: Dump, column: str, value: int
) -> None:
    """Not traced, or just being reaped."""
    row = dump.dead.row[dump.place("thread-traced")]
    rows = zombie_rows(dump.with_records(**{column: (row, value)}))
    assert set(dump.dead.row.tolist()) - set(rows.tolist()) == {row}


def test_the_end_of_a_whole_process(program: Program) -> None:
    """exit_group() of another thread says how it ended, after the first one has."""
    whole = read_dump("zombies-6.12")
    place = whole.place("leader-many")
    assert whole.dead.exit_code[place] == 5 << 8
    address = int(whole.dead.process[place])
    process = Object(whole.prog, "struct signal_struct", address=address)
    put(program, process.flags.address_, (4).to_bytes(4, "little"))
    put(program, process.group_exit_code.address_, (7 << 8).to_bytes(4, "little"))
    assert Dump(program, "zombies-6.12").dead.exit_code[place] == 7 << 8


@pytest.mark.parametrize("state", [0x10, 0x30])
def test_who_is_being_reaped(dump: Dump, state: int) -> None:
    assert not dump.dead.reaped.any()
    table = dump.with_records(exit_state=(dump.dead.row[0], state))
    dead = dump.read_dead(table, LossLog())
    assert dead.reaped.tolist() == [True] + [False] * (len(dead) - 1)


def test_what_is_lost(program: Program) -> None:
    whole = read_dump("zombies-6.12")
    place = whole.place("of-sleeper-1")
    lose(program, int(whole.dead.process[place]), 64)
    lose(program, int(whole.dead.thread_pid[place]), 64)
    found = Dump(program, "zombies-6.12")
    assert found.pids == whole.pids
    assert found.dead.threads[place] == UNKNOWN
    assert found.dead.namespace[place] == UNKNOWN
    pid = whole.pids[place]
    assert found.verdicts == whole.verdicts | {pid: "unknown"}
    coverage = found.losses.coverage
    assert coverage["signal_struct_unreadable"] >= 1
    assert coverage["pid_unreadable"] == 1


def test_none(dump: Dump) -> None:
    alive = dump.table.only(dump.table["exit_state"] == 0)
    losses = LossLog()
    dead = dump.read_dead(alive, losses)
    parents = dump.read_parents(alive, dead, losses)
    assert (len(dead), parents.facts) == (0, ())
    assert verdicts(dead, parents).tolist() == []
    assert not losses.notes
