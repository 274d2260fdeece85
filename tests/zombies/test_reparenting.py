# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks that would inherit zombies agree with the guest's computation."""

import pytest

from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskTable
from msatools.zombies.model import Heir
from msatools.zombies.reparenting import find_heirs
from tests.zombies.dumps import Dump


def heirs_and_losses(
    dump: Dump, table: TaskTable | None = None
) -> tuple[tuple[Heir, ...], LossLog]:
    losses = LossLog()
    table = dump.table if table is None else table
    return find_heirs(dump.reader, table, dump.rows, losses), losses


@pytest.fixture
def heirs(dump: Dump) -> dict[int, Heir]:
    found, losses = heirs_and_losses(dump)
    assert not losses.notes
    assert len({heir.ppid for heir in found}) == len(found)
    return {heir.ppid: heir for heir in found}


def test_heirs_are_those_of_the_guest(dump: Dump, heirs: dict[int, Heir]) -> None:
    parents = dump.workload["parents"]
    assert len(parents) > 40
    for parent in parents:
        assert heirs[parent["pid"]].heir == parent["heir"], parent["comm"]
    # Process 1 has a dead child with a living thread, which the guest leaves out.
    assert heirs.keys() - {parent["pid"] for parent in parents} <= {1}


def test_namespaces_of_all_parents_take_one_read(dump: Dump) -> None:
    before = dump.reader.reads
    found, _ = heirs_and_losses(dump)
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


def test_heirs_that_reap(dump: Dump, heirs: dict[int, Heir]) -> None:
    """An heir with zombies of its own does not reap; one that has waited does."""
    reaps = {heir.heir: heir.reaps for heir in heirs.values()}
    assert reaps.pop(None) is None
    assert reaps == {
        1: True,
        dump.task("init-inner"): False,
        # It has no zombies, and has never waited.
        dump.task("above"): None,
    }


def test_losses_are_noted(dump: Dump) -> None:
    """Processes have invalid pointers to struct pid."""
    pid = dump.task("never-sleeps")
    found, losses = heirs_and_losses(
        dump, dump.with_records(thread_pid=(dump.row(pid), 0x8_0000))
    )
    everyone, _ = heirs_and_losses(dump)
    assert {heir.ppid for heir in everyone} - {heir.ppid for heir in found} == {pid}
    assert losses.lost["heirs_unreadable"] == 1


def test_loop_ends(dump: Dump) -> None:
    """Damaged tasks are their own grandparents."""
    below, above = (dump.task(name) for name in ("below-subreaper", "above"))
    same = dump.table["tgid"] == above
    table = dump.with_records(
        real_parent=(dump.row(above), dump.address(below)),
        flags=(same, dump.table["flags"][same] | 0x4),
    )
    _, losses = heirs_and_losses(dump, table)
    assert losses.lost["heirs_unreadable"] == 1
