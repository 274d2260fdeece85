# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dead tasks and their values; most are facts in tests/truth/zombies.py."""

import pytest
from drgn import Object, Program

from msatools.kernel.report import LossLog
from msatools.zombies.parents import UNKNOWN, zombie_rows
from tests.support.overlay import lose, put
from tests.zombies.dumps import Dump, read_dump

MANY = 20_000
SPACE = 4026531836
"""The initial PID namespace (PROC_PID_INIT_INO)."""


@pytest.mark.long
def test_many() -> None:
    many = read_dump("manytasks-6.12")
    farm = many.workload["farm"]
    assert len(farm["zombies"]) == MANY
    assert many.pids == farm["zombies"]
    assert [parent.pid for parent in many.parents.facts] == [farm["pid"]]
    assert set(many.verdicts.values()) == {"never-waits"}
    assert set(many.dead.namespace.tolist()) == {SPACE}
    # Adjacent structures take one read.
    dead, parents = many.reads
    assert dead < MANY / 10
    assert parents < 20


@pytest.mark.parametrize(("column", "value"), [("ptrace", 0), ("exit_state", 0x10)])
def test_invisible_dead_threads_are_left_out(
    dump: Dump, column: str, value: int
) -> None:
    """Threads that are not traced, or are being reaped, are left out."""
    row = dump.dead.row[dump.index("thread-traced")]
    rows = zombie_rows(dump.with_records(**{column: (row, value)}))
    assert set(dump.dead.row.tolist()) - set(rows.tolist()) == {row}


def test_exit_code_of_a_process(program: Program) -> None:
    """exit_group() of another thread sets the code after the leader has exited."""
    whole = read_dump("zombies-6.12")
    index = whole.index("leader-many")
    assert whole.dead.exit_code[index] == 5 << 8
    address = int(whole.dead.process[index])
    process = Object(whole.prog, "struct signal_struct", address=address)
    put(program, process.flags.address_, (4).to_bytes(4, "little"))
    put(program, process.group_exit_code.address_, (7 << 8).to_bytes(4, "little"))
    assert Dump(program, "zombies-6.12").dead.exit_code[index] == 7 << 8


@pytest.mark.parametrize("state", [0x10, 0x30])
def test_tasks_being_reaped(dump: Dump, state: int) -> None:
    assert not dump.dead.reaped.any()
    table = dump.with_records(exit_state=(dump.dead.row[0], state))
    dead = dump.read_dead(table, LossLog())
    assert dead.reaped.tolist() == [True] + [False] * (len(dead) - 1)


def test_unreadable_structures(program: Program) -> None:
    whole = read_dump("zombies-6.12")
    index = whole.index("of-sleeper-1")
    lose(program, int(whole.dead.process[index]), 64)
    lose(program, int(whole.dead.thread_pid[index]), 64)
    found = Dump(program, "zombies-6.12")
    assert found.pids == whole.pids
    assert found.dead.threads[index] == UNKNOWN
    assert found.dead.namespace[index] == UNKNOWN
    pid = whole.pids[index]
    assert found.verdicts == whole.verdicts | {pid: "unknown"}
    coverage = found.losses.coverage
    assert coverage["signal_struct_unreadable"] >= 1
    assert coverage["pid_unreadable"] == 1
