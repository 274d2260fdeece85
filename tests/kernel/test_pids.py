# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks found by PID are those of a walk of all tasks; also in damaged trees."""

from collections.abc import Callable

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.pid import find_pid

from msatools.kernel.pids import PID_MAX_LIMIT, find_tasks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskReader
from tests.support.dumps import open_dump
from tests.support.overlay import lose, overwrite

MANY = pytest.param("manytasks-6.12", marks=pytest.mark.long)
DUMPS = ("memory-5.10", "memory-6.1", "tasks-6.1", "tasks-6.12", MANY)
RETRY = 256 << 2 | 2
"""An entry of include/linux/xarray.h for readers that meet a change."""


@pytest.mark.parametrize("name", DUMPS)
def test_every_thread_is_found(name: str) -> None:
    reader, losses = Reader(open_dump(name, "btf")), LossLog()
    tasks = TaskReader(reader).read_all(losses)
    addresses = dict(zip(tasks["pid"].tolist(), tasks["address"].tolist(), strict=True))
    assert len(addresses) == len(tasks) > 100
    # The numbers in between have no task, even if they are IDs of process groups.
    pids = [*range(-1, max(pid for pid in addresses if pid < 100_000) + 64)]
    pids += [*addresses, PID_MAX_LIMIT, 64**3 + 1]
    assert find_tasks(reader, pids, losses) == addresses
    assert not losses.notes
    for pid in (1, max(addresses)):
        reads = reader.reads
        assert find_tasks(reader, [pid], losses) == {pid: addresses[pid]}
        assert reader.reads - reads <= 7


class PidPath:
    """The way through the tree of PIDs to a task that is in a leaf of three levels."""

    def __init__(self) -> None:
        self.prog = open_dump("tasks-6.12", "btf")
        self.head = self.prog["init_pid_ns"].idr.idr_rt.xa_head
        tasks = TaskReader(Reader(self.prog)).read_all(LossLog())
        self.number = int(tasks["pid"].max())
        self.nodes, self.slots, entry = [], [], self.head.value_()
        while entry & 3 == 2:
            node = Object(self.prog, "struct xa_node", address=entry - 2)
            slot = node.slots[self.number >> node.shift.value_() & 63]
            self.nodes.append(node)
            self.slots.append(slot)
            entry = slot.value_()
        self.pid = find_pid(self.prog, self.number)[0]
        assert entry == self.pid.address_
        self.first = self.pid.tasks[0].first
        link = self.prog.type("struct task_struct").member("pid_links").offset
        start = self.first.value_() - link
        self.task = Object(self.prog, "struct task_struct", address=start)

    def find(self) -> tuple[dict[int, int], LossLog, int]:
        reader, losses = Reader(self.prog), LossLog()
        found = find_tasks(reader, [self.number], losses)
        return found, losses, reader.reads


Change = Callable[[PidPath], None]
WITHOUT: dict[str, Change] = {
    "empty tree": lambda path: overwrite(path.head, 0),
    "a single entry, at index 0": lambda path: overwrite(path.head, path.pid.address_),
    "retry in place of the tree": lambda path: overwrite(path.head, RETRY),
    "retry in place of a node": lambda path: overwrite(path.slots[0], RETRY),
    "retry in place of a PID": lambda path: overwrite(path.slots[-1], RETRY),
    "a value": lambda path: overwrite(path.slots[-1], path.pid.address_ | 1),
    "ID of a process group alone": lambda path: overwrite(path.first, 0),
}


@pytest.mark.parametrize("change", WITHOUT)
def test_tree_without_the_task(change: str) -> None:
    path = PidPath()
    assert path.find()[0] == {path.number: path.task.address_}
    WITHOUT[change](path)
    found, losses, _ = path.find()
    assert found == {}
    assert not losses.notes


def _lose(object_: Object) -> None:
    lose(object_.prog_, object_.address_, min(sizeof(object_), 4096))


DAMAGE: dict[str, Change] = {
    "tree lost": lambda path: _lose(path.head),
    "node lost": lambda path: _lose(path.nodes[0]),
    "leaf lost": lambda path: _lose(path.nodes[-1]),
    "PID lost": lambda path: _lose(path.pid),
    "task lost": lambda path: _lose(path.task.pid),
    "loop": lambda path: overwrite(path.slots[0], path.head.value_()),
    "leaf of another level": lambda path: overwrite(path.nodes[-1].shift, 6),
    "odd level": lambda path: overwrite(path.nodes[0].shift, 7),
    "absurd level": lambda path: overwrite(path.nodes[0].shift, 255),
    "PID of another number": lambda path: overwrite(path.pid.numbers[0].nr, 1),
    "no pointer": lambda path: overwrite(path.first, 8),
    "task of another number": lambda path: overwrite(path.task.pid, 1),
}


@pytest.mark.parametrize("change", DAMAGE)
def test_damage_costs_a_note(change: str) -> None:
    path = PidPath()
    DAMAGE[change](path)
    found, losses, reads = path.find()
    assert found == {}
    assert losses.coverage["pids_unreadable"] == 1
    assert losses.lost == {"pids_unreadable": 1}
    assert losses.notes
    assert reads <= 7


def test_pointer_above_the_last_level() -> None:
    """It covers all indices below (lib/xarray.c), as those of large folios do."""
    path = PidPath()
    overwrite(path.slots[0], path.pid.address_)
    assert path.find()[0] == {path.number: path.task.address_}


def test_others_are_found_despite_damage() -> None:
    prog: Program = open_dump("memory-6.12", "btf")
    reader, losses = Reader(prog), LossLog()
    whole = find_tasks(reader, [1, 2, 3], losses)
    lose(prog, whole[2], prog["task_struct_cachep"].object_size.value_())
    found = find_tasks(reader, [1, 2, 3], losses)
    assert found.keys() >= {1}
    assert 2 not in found
    assert losses.coverage["pids_unreadable"] >= 1
