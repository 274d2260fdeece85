# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernel threads have the names that the guest's /proc recorded."""

import numpy as np
import pytest
from drgn import Object, cast

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.identity import KernelNames
from msatools.tasks.table import TaskTable
from tests.prstat.dumps import OFF, Dump, read_dump
from tests.support.dumps import open_dump
from tests.support.overlay import lose, put

LONGEST_COMM = 15


@pytest.fixture(scope="module", params=OFF)
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


def names_of(dump: Dump, reader: Reader, losses: LossLog) -> list[bytes]:
    """Return the name of each thread of a dump."""
    table = TaskTable(dump.table.records.copy(), dump.table.columns)
    KernelNames(reader).fill(table, losses)
    names: list[bytes] = table["comm"].tolist()
    return names


def test_names_are_those_of_proc(dump: Dump) -> None:
    """Compare threads that have not run since the guest read their names."""
    losses = LossLog()
    names = names_of(dump, Reader(open_dump(dump.run.name, "btf")), losses)
    recorded = dict(dump.still())
    own = [row for row in recorded if dump.kernels_own[row]]
    own = [row for row in own if f"{recorded[row]}/comm" in dump.run.truth_names()]
    expected = {row: dump.run.truth(f"{recorded[row]}/comm")[:-1] for row in own}
    assert {row: names[row] for row in own} == expected
    assert any(len(name) > LONGEST_COMM for name in expected.values())
    workers = [name for name in expected.values() if name.startswith(b"kworker/")]
    assert any(b"-" in name for name in workers)
    assert not losses.coverage
    # Names of user tasks are unchanged.
    others = np.flatnonzero(~dump.kernels_own).tolist()
    assert [names[row] for row in others] == dump.table["comm"][others].tolist()


def test_names_that_cannot_be_read_stay_short(dump: Dump) -> None:
    prog = open_dump(dump.run.name, "btf")
    row = next(
        row
        for row, name in enumerate(dump.table["comm"].tolist())
        if len(name) == LONGEST_COMM and dump.kernels_own[row]
    )
    thread = Object(prog, "struct kthread *", int(dump.table["kthread"][row]))
    lose(prog, thread.full_name.value_(), 8)
    losses = LossLog()
    names = names_of(dump, Reader(prog), losses)
    assert names[row] == dump.table["comm"][row]
    assert losses.coverage == {"names_unreadable": 1}


def test_worker_of_another_task_is_ignored(dump: Dump) -> None:
    """kthread.data can point to freed memory of a worker that has ended."""
    prog = open_dump(dump.run.name, "btf")
    reader = Reader(prog)
    names = names_of(dump, reader, LossLog())
    row = next(
        row
        for row, name in enumerate(names)
        if name.startswith(b"kworker/u") and b"-" in name
    )
    thread = Object(prog, "struct kthread *", int(dump.table["kthread"][row]))
    worker = cast("struct worker *", thread.data)
    put(prog, worker.task.address_ or 0, bytes(8))
    bare = names_of(dump, Reader(prog), LossLog())[row]
    assert bare == dump.table["comm"][row]
    assert names[row].startswith(bare)
