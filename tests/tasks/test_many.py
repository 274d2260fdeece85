# SPDX-License-Identifier: LGPL-2.1-or-later

"""20,000 zombies and 20,000 threads are classified, with few reads for one process."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from drgn import Object

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.sampler import TaskState, collect_now
from msatools.tasks.stacks import MAX_ASKED, StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.waits import TaskClass
from tests.support.dumps import open_dump
from tests.tasks.sleepers import by_drgn

MANY = 20_000
SAMPLE = 250

pytestmark = pytest.mark.long


@dataclass
class Dump:
    run: lab.Run
    reader: Reader
    table: TaskTable
    now: TaskState
    losses: LossLog

    def counts(self, pids: list[int]) -> Counter[str]:
        """Count the classes of some threads."""
        classes = self.now.classes[np.isin(self.table["pid"], pids)]
        return Counter(TaskClass(number).name for number in classes.tolist())


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"manytasks-{request.param}")


@pytest.fixture(scope="module")
def dump(run: lab.Run) -> Dump:
    prog = open_dump(run.name, "btf")
    reader, losses = Reader(prog), LossLog()
    table = TaskReader(reader).read_all(losses)
    collector = StackCollector(reader, losses)
    now = collect_now(collector, prog, table, read_clocks(reader, losses))
    return Dump(run, reader, table, now, losses)


def test_all_are_there(dump: Dump) -> None:
    workload = dump.run.workload
    zombies = workload["farm"]["zombies"]
    crowds = workload["crowds"].values()
    assert len(zombies) == sum(len(crowd["tids"]) for crowd in crowds) == MANY
    # The kernel's own count. /proc/loadavg has one from before the dump; kernel workers
    # may have been created since.
    prog = dump.reader.prog
    assert len(dump.table) == prog.read_u32(prog.symbol("nr_threads").address)
    assert not dump.losses.notes


def test_every_class_is_right(dump: Dump) -> None:
    workload = dump.run.workload
    assert dump.counts(workload["farm"]["zombies"]) == {"ZMB": MANY}
    for kind, crowd in workload["crowds"].items():
        expected = Counter({crowd["class"]: len(crowd["tids"])})
        if kind == "inode":
            # One holds the lock that the others wait for.
            expected += Counter({"FLT": 1})
            expected[crowd["class"]] -= 1
        assert dump.counts(crowd["tids"]) == expected, kind


def test_stacks_are_drgns(dump: Dump) -> None:
    """A sample is compared: drgn takes milliseconds per stack."""
    stacks = dump.now.stacks
    rows = np.flatnonzero(stacks.index).tolist()
    for row in random.Random(1).sample(rows, SAMPLE):
        task = Object(
            dump.reader.prog,
            "struct task_struct *",
            value=int(dump.table["address"][row]),
        )
        stack = stacks[row]
        assert (stack.addresses, stack.interrupted) == by_drgn(task), task.pid
    assert len(rows) > MANY
    assert len(stacks.unique) < 100
    assert stacks.asked <= MAX_ASKED
