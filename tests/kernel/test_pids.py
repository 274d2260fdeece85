# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks found by PID are those of a walk of all tasks; also in trees made by hand."""

from collections.abc import Mapping
from struct import pack

import pytest
from drgn import Object, Program

from msatools.kernel.pids import PID_MAX_LIMIT, find_tasks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskReader
from tests.support.dumps import open_dump
from tests.support.madetypes import made_program, serve, struct
from tests.support.overlay import lose, put

MANY = pytest.param("manytasks-6.12", marks=pytest.mark.long)
DUMPS = ("memory-5.10", "memory-6.1", "tasks-6.1", "tasks-6.12", MANY)


@pytest.mark.parametrize("name", DUMPS)
def test_every_thread_is_found(name: str) -> None:
    reader, losses = Reader(open_dump(name, "btf")), LossLog()
    tasks = TaskReader(reader).read_all(losses)
    addresses = dict(zip(tasks["pid"].tolist(), tasks["address"].tolist(), strict=True))
    assert len(addresses) == len(tasks) > 100
    # The numbers in between have no task, even if they are IDs of process groups.
    pids = [*range(-1, max(pid for pid in addresses if pid < 100_000) + 64)]
    pids += addresses
    assert find_tasks(reader, pids, losses) == addresses
    assert not losses.notes
    for pid in (1, max(addresses)):
        reads = reader.reads
        assert find_tasks(reader, [pid], losses) == {pid: addresses[pid]}
        assert reader.reads - reads <= 7


# A node has 64 slots, from byte 16.
HEAD, ROOT, MIDDLE, LEAF, PID, TASK = (0x10_0000 + 0x1000 * i for i in range(6))
NUMBER = 70 << 6 | 5


def types() -> Program:
    prog = made_program()
    byte = prog.int_type("unsigned char", 1, False)
    number = prog.int_type("int", 4, True)
    pointer = prog.pointer_type(prog.void_type())
    head = struct(prog, "hlist_head", 8, first=(pointer, 0))
    links = prog.array_type(struct(prog, "hlist_node", 16, next=(pointer, 0)), 4)
    numbers = prog.array_type(struct(prog, "upid", 16, nr=(number, 0)), 1)
    tree = struct(prog, "xarray", 16, xa_head=(pointer, 8))
    idr = struct(prog, "idr", 24, idr_rt=(tree, 0))
    space = struct(prog, "pid_namespace", 32, idr=(idr, 8))
    slots, tasks = prog.array_type(pointer, 64), prog.array_type(head, 4)
    made = [
        space,
        tree,
        struct(prog, "xa_node", 528, shift=(byte, 0), slots=(slots, 16)),
        struct(prog, "pid", 128, tasks=(tasks, 16), numbers=(numbers, 96)),
        struct(prog, "task_struct", 256, pid=(number, 8), pid_links=(links, 64)),
    ]
    serve(prog, made, {"init_pid_ns": Object(prog, space, address=HEAD)})
    return prog


def node(shift: int, **slots: int) -> bytes:
    entries = [0] * 64
    for name, entry in slots.items():
        entries[int(name[1:])] = entry
    return pack("<B15x64Q", shift, *entries)


WHOLE = {
    HEAD: pack("<4Q", 0, 0, ROOT | 2, 0),
    ROOT: node(12, _1=MIDDLE | 2),
    MIDDLE: node(6, _6=LEAF | 2),
    LEAF: node(0, _5=PID),
    PID: pack("<16xQ72xi28x", TASK + 64, NUMBER),
    TASK: pack("<8xi244x", NUMBER),
}


def find(
    pid: int, changed: Mapping[int, bytes | None] | None = None
) -> tuple[dict[int, int], LossLog, int]:
    """Look a PID up in the tree ``WHOLE`` with some parts changed or missing."""
    prog = types()
    for start, data in {**WHOLE, **(changed or {})}.items():
        if data is not None:
            put(prog, start, data)
    reader, losses = Reader(prog), LossLog()
    found = find_tasks(reader, [pid], losses)
    assert found or bool(losses.notes) == bool(losses.coverage["pids_unreadable"])
    return found, losses, reader.reads


def test_pointer_above_the_last_level() -> None:
    """It covers all indices below (lib/xarray.c), as those of large folios do."""
    assert find(NUMBER, {MIDDLE: node(6, _6=PID)})[0] == {NUMBER: TASK}


def test_whole_tree() -> None:
    found, losses, reads = find(NUMBER)
    assert found == {NUMBER: TASK}
    assert not losses.notes
    assert reads == 6


@pytest.mark.parametrize(
    "pid",
    [NUMBER + 1, NUMBER + 64, NUMBER - 4096, 64**3 + NUMBER, 1, 0, -1, PID_MAX_LIMIT],
)
def test_pid_without_a_task(pid: int) -> None:
    found, losses, _ = find(pid)
    assert found == {}
    assert not losses.notes


@pytest.mark.parametrize(
    "changed",
    [
        {HEAD: pack("<4Q", 0, 0, 0, 0)},  # empty
        {HEAD: pack("<4Q", 0, 0, PID, 0)},  # a single entry, at index 0
        {HEAD: pack("<4Q", 0, 0, 256 << 2 | 2, 0)},  # a retry entry
        {MIDDLE: node(6, _6=256 << 2 | 2)},
        {LEAF: node(0, _5=PID | 1)},
        {LEAF: node(0, _5=256 << 2 | 2)},
        # The ID of a process group or session only.
        {PID: pack("<16xQ72xi28x", 0, NUMBER)},
    ],
)
def test_tree_without_the_task(changed: dict[int, bytes]) -> None:
    found, losses, _ = find(NUMBER, changed)
    assert found == {}
    assert not losses.notes


@pytest.mark.parametrize(
    "changed",
    [
        *({part: None} for part in WHOLE),
        {MIDDLE: node(6, _6=MIDDLE | 2)},  # a loop
        {ROOT: node(12, _1=ROOT | 2)},
        {LEAF: node(6, _5=PID)},
        {MIDDLE: node(7, _6=LEAF | 2)},
        {ROOT: node(255, _0=MIDDLE | 2)},
        {PID: pack("<16xQ72xi28x", TASK + 64, NUMBER + 1)},
        {PID: pack("<16xQ72xi28x", 8, NUMBER)},
        {TASK: pack("<8xi244x", NUMBER + 1)},
    ],
)
def test_damage_costs_a_note(changed: dict[int, bytes | None]) -> None:
    found, losses, reads = find(NUMBER, changed)
    assert found == {}
    assert losses.coverage["pids_unreadable"] == 1
    assert losses.lost == {"pids_unreadable": 1}
    assert reads <= 6


def test_others_are_found_despite_damage() -> None:
    prog = open_dump("memory-6.12", "btf")
    reader, losses = Reader(prog), LossLog()
    whole = find_tasks(reader, [1, 2, 3], losses)
    lose(prog, whole[2], prog["task_struct_cachep"].object_size.value_())
    assert find_tasks(reader, [1, 2, 3], losses).keys() >= {1}
    assert 2 not in find_tasks(reader, [1, 2, 3], losses)
    assert losses.coverage["pids_unreadable"] >= 1
