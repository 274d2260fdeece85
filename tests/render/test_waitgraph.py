# SPDX-License-Identifier: LGPL-2.1-or-later

"""The graph of waits in a report: from waiters to owners, and back."""

import random
from functools import partial

import pytest

from msatools.locks.report import LocksReport
from msatools.render.locks.tree import WaitGraph
from tests.locks.madelocks import lock, report, root, wait
from tests.support.cost import calls


def graph(*locks: str) -> WaitGraph:
    """Make a graph of texts such as ``2,3>1``: 2 and 3 wait for a lock that 1 owns."""
    return WaitGraph(made(*locks))


def made(*locks: str) -> LocksReport:
    rows, waits = [], []
    for number, text in enumerate(locks):
        waiters, _, owners = text.partition(">")
        pids = [int(pid) for pid in waiters.split(",")]
        marked = " ".join(
            word if word[0] in "=~?" else f"={word}"
            for word in owners.split(",")
            if word
        )
        rows.append(lock(f"mutex {number}", pids, marked))
        waits += [wait(pid, f"mutex {number}") for pid in pids]
    return report(waits, rows)


def way(made: WaitGraph, pid: int) -> list[int | None]:
    return [step.owner and step.owner.pid for step in made.way(pid)]


def test_way() -> None:
    chain = graph("3>2", "2>1")
    assert way(chain, 3) == [2, 1]
    assert way(chain, 1) == []
    assert way(chain, 99) == []
    assert way(graph("3>2", "2>"), 3) == [2, None]
    # In a cycle, the way ends at the first task that it meets again.
    assert way(graph("1>2", "2>3", "3>1"), 1) == [2, 3, 1]
    assert way(graph("9>1", "1>2", "2>1"), 9) == [1, 2, 1]
    assert way(graph("1>1"), 1) == [1]


def test_way_takes_the_surest_owner() -> None:
    steps = list(graph("3>?9,~8,=7,=6").way(3))
    assert [(step.owner and step.owner.pid, step.others) for step in steps] == [(7, 3)]


@pytest.mark.parametrize("seed", range(100))
def test_behind_counts_the_tasks_that_reach_an_owner(seed: int) -> None:
    chance = random.Random(seed)
    pids = list(range(1, 9))
    locks = []
    for pid in chance.sample(pids, chance.randrange(1, 8)):
        owners = chance.sample(pids, chance.randrange(3))
        locks.append(f"{pid}>{','.join(map(str, owners))}")
    found = graph(*locks)
    after = {
        int(text.partition(">")[0]): [
            int(p) for p in text.partition(">")[2].split(",") if p
        ]
        for text in locks
    }

    def reached(pid: int) -> set[int]:
        seen: set[int] = set()
        todo = list(after.get(pid, ()))
        while todo:
            if (other := todo.pop()) not in seen:
                seen.add(other)
                todo += after.get(other, ())
        return seen

    owners = {pid for pids in after.values() for pid in pids}
    assert found.behind == {
        owner: sum(owner in reached(pid) for pid in after if pid != owner)
        for owner in owners
    }


def test_long_chain_and_large_crowd() -> None:
    """There is no recursion, and the work is linear in the number of tasks."""

    def chain(count: int) -> None:
        found = graph(*(f"{n + 1}>{n}" for n in range(1, count)))
        assert found.behind[1] == count - 1

    def crowd(count: int) -> None:
        found = graph(",".join(map(str, range(2, count))) + ">1")
        assert found.behind == {1: count - 2}
        assert found.reached([root(1, (0, 0))]) == set(range(1, count))

    for shape in (chain, crowd):
        costs = [calls(partial(shape, count)) for count in (1500, 3000)]
        assert costs[1] < 3 * costs[0]


def test_reached() -> None:
    found = graph("2,3>1", "4>3", "6>5", "8>")
    assert found.reached([root(1, (0, 0))]) == {1, 2, 3, 4}
    assert found.reached([root(5, (0, 0)), root(1, (0, 0))]) == {1, 2, 3, 4, 5, 6}
    outside = root(77, (0, 0), kind="external", lock="mutex 3")
    assert found.reached([outside]) == {8}
    assert found.reached([root(None, (0, 0), kind="external", waiters=(6,))]) == {6}
    assert found.reached([root(None, (0, 0), kind="cycle", waiters=(3,))]) == {3, 4}


def test_names() -> None:
    made = report(
        [wait(2, "mutex 0")],
        [lock("mutex 0", (2, 3), "=1")],
        [root(5, (0, 0), comm="served")],
    )
    found = WaitGraph(made)
    assert [found.comm(pid) for pid in (1, 2, 3, 5)] == [
        "task-1", "task-2", None, "served",
    ]  # fmt: skip


def test_any_of_several() -> None:
    locks = [lock("futex 1", (2,)), lock("futex 2", (2,))]
    task = wait(2, any_of=("futex 1", "futex 2", "futex 3"))
    found = WaitGraph(report([task], locks))
    assert found.wanted(task) == locks
    assert found.step(2) is None
