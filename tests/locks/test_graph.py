# SPDX-License-Identifier: LGPL-2.1-or-later

"""Edges in; roots, cycles and chains out."""

import random
from collections.abc import Iterable
from itertools import permutations

import pytest

from msatools.locks.graph import Edge, Graph
from msatools.locks.lock import Lock, OwnerConfidence

MARKS: dict[str, OwnerConfidence] = {"=": "exact", "~": "likely", "?": "evidence"}


def edge(text: str) -> Edge:
    """Make an edge of ``1=2``; one with ``!`` is too loose to close a cycle."""
    mark = text.strip("0123456789!")
    waiter, owner = text.rstrip("!").split(mark)
    lock = Lock("mutex", 0x1000 * int(owner))
    return Edge(int(waiter), lock, int(owner), MARKS[mark], not text.endswith("!"))


def graph(text: str, things: dict[int, str] | None = None) -> Graph:
    edges = [edge(word) for word in text.split()]
    # Who has the smaller number has waited longer.
    return Graph(edges, things or {}, lambda task: -task)


def told(text: str, things: dict[int, str] | None = None) -> dict[object, set[int]]:
    """What is behind each root."""
    roots = graph(text, things).roots
    return {
        root.thing or tuple(sorted(root.tasks)): set(root.blocked) for root in roots
    }


def test_nothing() -> None:
    assert graph("").roots == () == graph("").cycles


def test_chain() -> None:
    (root,) = graph("1=2 2=3 4=3").roots
    assert root.tasks == {3}
    assert root.blocked == {1, 2, 4}
    assert root.direct == (2, 4)
    assert root.chain == (1, 2, 3)


def test_chain_of_the_longest_wait() -> None:
    (root,) = graph("5=9 4=9").roots
    assert root.chain == (4, 9)


def test_thing_is_the_root() -> None:
    assert told("1=2", {2: "disk", 3: "disk"}) == {"disk": {1, 2, 3}}
    (root,) = graph("1=2", {2: "disk", 3: "disk"}).roots
    assert root.direct == (2, 3)
    assert root.chain == (1, 2)


def test_thing_of_who_waits_for_a_task_does_not_count() -> None:
    assert told("1=2", {1: "disk"}) == {(2,): {1}}


def test_readers_are_each_waited_for() -> None:
    assert told("1=2 1=3") == {(2,): {1}, (3,): {1}}


def test_two_tasks() -> None:
    (cycle,) = graph("1=2 2=1").cycles
    assert cycle.exact
    assert cycle.tasks == {1, 2}
    assert [(edge.waiter, edge.owner) for edge in cycle.edges] == [(1, 2), (2, 1)]
    assert told("1=2 2=1 3=1") == {(1, 2): {3}}


def test_itself() -> None:
    (cycle,) = graph("1=1").cycles
    assert cycle.tasks == {1}
    assert told("1=1 2=1") == {(1,): {2}}


@pytest.mark.parametrize("mark", "~?")
def test_one_doubt_makes_it_possible(mark: str) -> None:
    (cycle,) = graph(f"1=2 2{mark}1").cycles
    assert not cycle.exact


def test_exact_cycle_within_a_possible_one() -> None:
    cycles = graph("1=2 2=1 2~3 3=1").cycles
    assert [(cycle.exact, cycle.tasks) for cycle in cycles] == [(True, {1, 2})]


def test_exact_and_possible_apart() -> None:
    cycles = graph("1=2 2=1 5~6 6=5").cycles
    assert [cycle.exact for cycle in cycles] == [True, False]


def test_cycle_is_a_shortest_one() -> None:
    (cycle,) = graph("1=2 2=3 3=4 4=1 2=1").cycles
    assert [edge.waiter for edge in cycle.edges] == [1, 2]
    assert cycle.tasks == {1, 2, 3, 4}


def test_loose_edges_close_no_cycle() -> None:
    made = graph("1=2 2?1!")
    assert made.cycles == ()
    assert told("1=2 2?1!") == {(2,): {1}}
    # Elsewhere they count.
    assert told("1=2 2?3!") == {(3,): {1, 2}}


def test_loose_edge_left_out_leaves_the_thing() -> None:
    assert told("1=2 2?1!", {2: "rwsem"}) == {"rwsem": {1, 2}}


def test_way() -> None:
    made = graph("1?5 1=2 2=3")
    assert [edge.owner for edge in made.way(1)] == [2, 3]
    assert [edge.owner for edge in graph("1=2 2=1").way(1)] == [2]


def test_crowd_of_many() -> None:
    """As deep and as wide as a kernel can be: no recursion, and in linear time."""
    count = 10_000
    line = [Edge(n, Lock("mutex", n), n + 1, "exact") for n in range(count)]
    crowd = [Edge(count + 1 + n, Lock("mutex", 1), 0, "exact") for n in range(count)]
    (root,) = Graph([*line, *crowd], {}, lambda task: 0).roots
    assert root.tasks == {count}
    assert len(root.blocked) == 2 * count
    assert len(root.chain) == count + 2


def reaches(edges: Iterable[Edge], start: int) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        task = todo.pop()
        for edge in edges:
            if edge.waiter == task and edge.owner not in found:
                found.add(edge.owner)
                todo.append(edge.owner)
    return found


@pytest.mark.parametrize("seed", range(200))
def test_against_reachability(seed: int) -> None:
    """Components, roots and who is behind them, by asking who reaches whom."""
    chance = random.Random(seed)
    pairs = list(permutations(range(7), 2))
    edges = [
        Edge(a, Lock("mutex", b), b, chance.choice(list(MARKS.values())))
        for a, b in chance.sample(pairs, chance.randrange(12))
    ]
    made = Graph(edges, {}, lambda task: 0)
    after = {task: reaches(edges, task) for task in range(7)}
    in_cycles = {task for task in range(7) if task in after[task]}
    assert set().union(*(cycle.tasks for cycle in made.cycles)) >= {
        task for cycle in made.cycles if cycle.exact for task in cycle.tasks
    }
    possible = {frozenset(o for o in after[t] if t in after[o]) for t in in_cycles}
    # Each component with a cycle is told, or one within it that is without a doubt.
    for component in possible:
        assert any(cycle.tasks <= component for cycle in made.cycles)
    assert all(any(cycle.tasks <= c for c in possible) for cycle in made.cycles)
    for cycle in made.cycles:
        following = [*cycle.edges[1:], cycle.edges[0]]
        assert all(
            a.owner == b.waiter for a, b in zip(cycle.edges, following, strict=True)
        )
        assert {edge.waiter for edge in cycle.edges} <= cycle.tasks
    waiting = {edge.waiter for edge in edges}
    for root in made.roots:
        behind = {task for task in waiting if after[task] & root.tasks} - root.tasks
        assert root.blocked == behind
        outside = set().union(*(after[task] for task in root.tasks)) - root.tasks
        assert not outside
        assert set(root.chain) <= root.blocked | root.tasks
    rooted = {task for root in made.roots for task in (*root.tasks, *root.blocked)}
    assert waiting <= rooted
