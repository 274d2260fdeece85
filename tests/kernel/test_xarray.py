# SPDX-License-Identifier: LGPL-2.1-or-later

"""Entries of XArrays and maple trees are those of drgn's walk; damage is counted."""

from collections.abc import Iterator

import pytest
from drgn import Object, Program
from drgn.helpers.linux.mapletree import mt_for_each
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.radixtree import radix_tree_for_each

from msatools.errors import UNREADABLE
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import (
    Entries,
    XArray,
    maple_entries,
    maple_load,
    xarray_entries,
    xarray_values,
)
from tests.support.dumps import open_dump
from tests.support.overlay import lose, put

INTERNAL = 2
"""The tag of a pointer to a node (include/linux/xarray.h)."""


def pids(prog: Program) -> Object:
    return prog["init_pid_ns"].idr.idr_rt.address_of_()


def by_drgn(tree: Object) -> Entries:
    return [
        (number, number, entry.value_()) for number, entry in radix_tree_for_each(tree)
    ]


def maple_by_drgn(tree: Object) -> Entries:
    return [(first, last, entry.value_()) for first, last, entry in mt_for_each(tree)]


def mappings(prog: Program) -> Iterator[Object]:
    """Return the maple trees of the processes' mappings."""
    return (
        task.mm.mm_mt.address_of_()
        for task in for_each_task(prog)
        if task.mm and task.pid == task.tgid
    )


def ours(tree: Object) -> tuple[Entries, LossLog]:
    losses = LossLog()
    reader = Reader(tree.prog_)
    is_maple = tree.type_.type.type_name() == "struct maple_tree"
    walk = maple_entries if is_maple else xarray_entries
    return walk(reader, tree.value_(), losses, "the tree"), losses


@pytest.mark.parametrize("name", ["memory-5.10", "tasks-6.1", "tasks-6.12"])
def test_xarray(name: str) -> None:
    tree = pids(open_dump(name, "btf"))
    found, losses = ours(tree)
    assert len(found) > 100
    assert found == by_drgn(tree)
    assert not losses.notes
    loaded = XArray(Reader(tree.prog_), tree.value_())
    for number, _, entry in found[::7]:
        assert loaded.load(number) == entry
    assert loaded.load(found[-1][1] + 1) == 0


@pytest.mark.parametrize("name", ["tasks-6.1", "tasks-6.12"])
def test_maple_tree(name: str) -> None:
    """Trees have all sizes: most have two levels, one has 2,000 entries."""
    sizes = set()
    for tree in mappings(open_dump(name, "btf")):
        found, losses = ours(tree)
        assert found == maple_by_drgn(tree)
        assert not losses.notes
        reader = Reader(tree.prog_)
        for first, last, entry in found[:: max(len(found) // 20, 1)]:
            for index in (first, last):
                assert maple_load(reader, tree.value_(), index) == entry
        for index in (0, found[0][0] - 1, found[-1][1] + 1, (1 << 64) - 1):
            assert maple_load(reader, tree.value_(), index) == 0
        sizes.add(len(found))
    assert min(sizes) < 20
    assert max(sizes) > 2000


@pytest.fixture
def program() -> Program:
    """A dump of the test's own, which it can damage."""
    return open_dump("tasks-6.12", "btf")


def top(prog: Program) -> int:
    """Return the address of the top node of the tree of PIDs, which is not a leaf."""
    node = int(pids(prog).xa_head.value_()) - INTERNAL
    assert prog.read_u8(node + prog.type("struct xa_node").member("shift").offset)
    return node


def slot(prog: Program, index: int) -> int:
    """Return the address of a slot of the top node."""
    slots = prog.type("struct xa_node").member("slots").offset
    return top(prog) + slots + 8 * index


@pytest.mark.parametrize("how", ["part lost", "root lost", "itself", "other level"])
def test_damage_costs_a_subtree(program: Program, how: str) -> None:
    tree = pids(program)
    whole, _ = ours(tree)
    node = program.type("struct xa_node")
    child = program.read_u64(slot(program, 0)) - INTERNAL
    if how == "part lost":
        lose(program, child, node.size)
    elif how == "root lost":
        lose(program, tree.value_(), 16)
    elif how == "itself":
        itself = (top(program) + INTERNAL).to_bytes(8, "little")
        put(program, slot(program, 0), itself)
    else:
        put(program, child + node.member("shift").offset, bytes([60]))
    found, losses = ours(tree)
    assert how == "itself" or set(found) < set(whole)
    assert losses.coverage["trees_broken"] == 1
    if how == "root lost":
        assert found == []
    if how == "part lost":
        assert found
        assert "the tree cannot be read" in next(iter(losses.notes.values())).text


def maple_slot(prog: Program, tree: Object) -> int:
    """Return the address of the first slot of a tree's top node."""
    root = tree.ma_root.value_()
    assert root >> 3 & 15 == prog.constant("maple_arange_64").value_()
    node = root & ~255
    return int(node + prog.type("struct maple_arange_64").member("slot").offset)


@pytest.mark.parametrize("how", ["itself", "of no type", "gone"])
def test_damaged_maple_tree(program: Program, how: str) -> None:
    tree = max(mappings(program), key=lambda tree: len(ours(tree)[0]))
    whole, _ = ours(tree)
    address = maple_slot(program, tree)
    first = program.read_u64(address)
    words = {
        "itself": tree.ma_root.value_(),
        "of no type": first | 15 << 3,
        "gone": first & 255 | 0xFFFF << 48,
    }
    put(program, address, words[how].to_bytes(8, "little"))
    found, losses = ours(tree)
    assert set(found) < set(whole)
    assert losses.coverage["trees_broken"] == 1
    # drgn's own lookup of a node that contains itself does not end.
    with pytest.raises(UNREADABLE):
        maple_load(Reader(program), tree.value_(), whole[0][0])


def test_single_entry_without_a_node(program: Program) -> None:
    tree = pids(program)
    put(program, tree.xa_head.address_, (0x1000).to_bytes(8, "little"))
    assert ours(tree)[0] == [(0, 0, 0x1000)]
    put(program, tree.xa_head.address_, bytes(8))
    assert ours(tree)[0] == []


def test_slots_past_the_end_do_not_count(program: Program) -> None:
    """A node keeps old contents of slots past its last entry."""
    tree = max(mappings(program), key=lambda tree: len(ours(tree)[0]))
    whole, _ = ours(tree)
    address = maple_slot(program, tree)
    node = Object(program, "struct maple_arange_64", address=address & ~255)
    end = node.meta.end.value_()
    assert end + 1 < len(node.slot)
    first = program.read(address, 8)
    put(program, address + 8 * (end + 1), first)
    put(program, node.pivot[end].address_, (1 << 40).to_bytes(8, "little"))
    found, losses = ours(tree)
    assert found == whole
    assert not losses.notes


def test_values(program: Program) -> None:
    """One that covers four slots, one alone, and one in the place of a node."""
    tree = pids(program)
    child = program.read_u64(slot(program, 0)) - INTERNAL
    slots = program.type("struct xa_node").member("slots").offset
    sibling = 4 << 2 | INTERNAL  # of slot 4
    words = [*[0] * 4, 100 << 1 | 1, *[sibling] * 3, 0, 200 << 1 | 1, *[0] * 54]
    put(program, child + slots, b"".join(w.to_bytes(8, "little") for w in words))
    put(program, slot(program, 1), (1000 << 1 | 1).to_bytes(8, "little"))
    put(program, slot(program, 2), bytes(8 * 62))
    losses = LossLog()
    found = xarray_values(Reader(program), tree.value_(), losses, "the tree")
    assert found == [(4, 7, 100), (9, 9, 200), (64, 127, 1000)]
    assert not losses.notes
