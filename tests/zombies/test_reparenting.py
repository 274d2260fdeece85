# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who would inherit the dead, as the guest works it out from its /proc."""

import pytest

from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskTable
from msatools.zombies.model import Heir
from msatools.zombies.reparenting import find_heirs
from tests.zombies.dumps import Dump


def look(
    dump: Dump, table: TaskTable | None = None
) -> tuple[tuple[Heir, ...], LossLog]:
    losses = LossLog()
    table = dump.table if table is None else table
    return find_heirs(dump.reader, table, dump.rows, losses), losses


@pytest.fixture
def heirs(dump: Dump) -> dict[int, Heir]:
    found, losses = look(dump)
    assert not losses.notes
    assert len({heir.ppid for heir in found}) == len(found)
    return {heir.ppid: heir for heir in found}


def test_heirs_equal_the_guests(dump: Dump, heirs: dict[int, Heir]) -> None:
    parents = dump.workload["parents"]
    assert len(parents) > 40
    for parent in parents:
        assert heirs[parent["pid"]].heir == parent["heir"], parent["comm"]
    # Process 1 has a dead child that the guest leaves out, as a thread of it lives.
    assert heirs.keys() - {parent["pid"] for parent in parents} <= {1}


def test_namespaces_of_all_parents_are_read_at_once(dump: Dump) -> None:
    before = dump.reader.reads
    found, _ = look(dump)
    assert len(found) > 40
    assert dump.reader.reads - before < len(found)


def test_reasons(dump: Dump, heirs: dict[int, Heir]) -> None:
    comms = {parent["comm"]: parent for parent in dump.workload["parents"]}
    first = comms["never-sleeps"]
    assert heirs[first["pid"]] == Heir(
        ppid=first["pid"],
        heir=1,
        heir_comm="python3",
        why=f"init of PID namespace {first['namespace']}",
        reaps=True,
    )
    below = heirs[comms["below-subreaper"]["pid"]]
    assert (below.heir, below.why) == (dump.task("above"), "subreaper")
    inner = comms["inner-service"]
    found = heirs[inner["pid"]]
    assert (found.heir, found.heir_comm) == (dump.task("init-inner"), "init-inner")
    assert found.why == f"init of PID namespace {inner['namespace']}"
    ends = heirs[comms["init-1"]["pid"]]
    assert ends.why == f"PID namespace {comms['init-1']['namespace']} ends with it"
    assert (ends.heir, ends.heir_comm, ends.reaps) == (None, None, None)


def test_who_reaps(dump: Dump, heirs: dict[int, Heir]) -> None:
    """One that has dead children of its own does not; one that has waited does."""
    told = {heir.heir: heir.reaps for heir in heirs.values()}
    assert told.pop(None) is None
    assert told == {
        1: True,
        dump.task("init-inner"): False,
        # It has none yet, and has never waited.
        dump.task("above"): None,
    }


def test_what_is_lost_is_noted(dump: Dump) -> None:
    """Of processes whose PIDs lead nowhere."""
    pid = dump.task("never-sleeps")
    found, losses = look(dump, dump.with_records(thread_pid=(dump.row(pid), 0x8_0000)))
    everyone, _ = look(dump)
    assert {heir.ppid for heir in everyone} - {heir.ppid for heir in found} == {pid}
    assert losses.lost["heirs_unreadable"] == 1


def test_loop_ends(dump: Dump) -> None:
    """Of damaged tasks that are their own parents' parents."""
    below, above = (dump.task(name) for name in ("below-subreaper", "above"))
    same = dump.table["tgid"] == above
    table = dump.with_records(
        real_parent=(dump.row(above), dump.address(below)),
        flags=(same, dump.table["flags"][same] | 0x4),
    )
    _, losses = look(dump, table)
    assert losses.lost["heirs_unreadable"] == 1
