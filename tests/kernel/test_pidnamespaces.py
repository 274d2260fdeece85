# SPDX-License-Identifier: LGPL-2.1-or-later

"""PID namespaces have the PIDs that drgn's walk of them finds."""

import drgn
import numpy as np
import pytest
from drgn.helpers.linux.pid import for_each_pid

from msatools.kernel.pids import (
    RESERVED_PIDS,
    PidTree,
    innermost_numbers,
    read_pid_namespaces,
    reserved_taken,
)
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.support.dumps import open_dump


@pytest.fixture(scope="module", params=["zombies-6.1", "zombies-6.12", "memory-5.10"])
def prog(request: pytest.FixtureRequest) -> drgn.Program:
    return open_dump(request.param, "btf")


def test_numbers_below(prog: drgn.Program) -> None:
    numbers = [pid.numbers[0].nr.value_() for pid in for_each_pid(prog)]
    address = prog["init_pid_ns"].address_
    assert address is not None
    tree = PidTree(Reader(prog), address)
    last = max(numbers)
    for end in (1, 2, 64, 65, 300, last, last + 1, 4096, 1 << 22):
        assert tree.count_below(end) == sum(number < end for number in numbers), end


def test_namespaces(prog: drgn.Program) -> None:
    reader, losses = Reader(prog), LossLog()
    pids = np.array([pid.value_() for pid in for_each_pid(prog)], np.uint64)
    innermost, _ = innermost_numbers(reader, pids, losses)
    for pid, space in zip(for_each_pid(prog), innermost.tolist(), strict=True):
        assert space == pid.numbers[pid.level].ns.value_()
    spaces = read_pid_namespaces(reader, innermost, losses)
    assert not losses.notes
    assert spaces.keys() == set(innermost.tolist())
    for address, space in spaces.items():
        ns = drgn.Object(prog, "struct pid_namespace", address=address)
        taken = sum(1 for _ in for_each_pid(ns))
        assert (space.taken, space.most) == (taken, 32768)
        assert (space.level, space.parent) == (ns.level, ns.parent.value_())
        low = [pid.numbers[space.level].nr for pid in for_each_pid(ns)]
        known = reserved_taken(reader, space, losses)
        assert known == sum(number < RESERVED_PIDS for number in low)


def test_parent_namespaces_are_read_as_well() -> None:
    prog = open_dump("zombies-6.12", "btf")
    pids = [pid for pid in for_each_pid(prog) if pid.level == 2]
    deepest = pids[0].numbers[2].ns
    found = read_pid_namespaces(
        Reader(prog), np.array([deepest.value_()], np.uint64), LossLog()
    )
    assert [space.level for space in found.values()] == [2, 1, 0]


def test_damage_costs_a_note() -> None:
    prog = open_dump("zombies-6.12", "btf")
    reader, losses = Reader(prog), LossLog()
    nowhere = np.array([0x8_0000], np.uint64)
    spaces, numbers = innermost_numbers(reader, nowhere, losses)
    assert (spaces.tolist(), numbers.tolist()) == ([0], [0])
    assert read_pid_namespaces(reader, nowhere, losses) == {}
    assert losses.lost == {"pid_unreadable": 1, "pid_namespace_unreadable": 1}
