# SPDX-License-Identifier: LGPL-2.1-or-later

"""Roots, cycles and chains of a wait graph."""

import random
from collections.abc import Iterable
from itertools import permutations

import pytest

from msatools.locks.graph import Edge, Graph
from msatools.locks.report import Lock, OwnerConfidence

MARKS: dict[str, OwnerConfidence] = {"=": "exact", "~": "likely", "?": "evidence"}


def edge(text: str) -> Edge:
    """Make an edge from text such as ``1=2``; with ``!`` it cannot close a cycle."""
    mark = text.strip("0123456789!")
    waiter, owner = text.rstrip("!").split(mark)
    lock = Lock("mutex", 0x1000 * int(owner))
    return Edge(int(waiter), lock, int(owner), MARKS[mark], not text.endswith("!"))


def graph(text: str, things: dict[int, str] | None = None) -> Graph:
    edges = [edge(word) for word in text.split()]
    # Tasks with smaller numbers have waited longer.
    return Graph(edges, things or {}, lambda task: -task)


def test_nothing() -> None:
    assert graph("").roots == () == graph("").cycles


@pytest.mark.parametrize(
    ("edges", "cycles"),
    [
        ("1=2 2=1", [(True, {1, 2}, [1, 2])]),
        ("1=1", [(True, {1}, [1])]),
        # One edge that is not exact makes the cycle possible.
        ("1=2 2~1", [(False, {1, 2}, [1, 2])]),
        ("1=2 2?1", [(False, {1, 2}, [1, 2])]),
        # An exact cycle within a possible one, and a separate one.
        ("1=2 2=1 2~3 3=1", [(True, {1, 2}, [1, 2])]),
        ("1=2 2=1 5~6 6=5", [(True, {1, 2}, [1, 2]), (False, {5, 6}, [5, 6])]),
        # The edges are those of a shortest cycle.
        ("1=2 2=3 3=4 4=1 2=1", [(True, {1, 2, 3, 4}, [1, 2])]),
        ("1=2 2?1!", []),
    ],
)
def test_cycles(edges: str, cycles: list[tuple[bool, set[int], list[int]]]) -> None:
    found = graph(edges).cycles
    assert [
        (cycle.exact, cycle.tasks, [edge.waiter for edge in cycle.edges])
        for cycle in found
    ] == cycles


def test_way() -> None:
    made = graph("1?5 1=2 2=3")
    assert [edge.owner for edge in made.way(1)] == [2, 3]
    assert [edge.owner for edge in graph("1=2 2=1").way(1)] == [2]


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
    """Components, roots and blocked tasks agree with reachability."""
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
    # Each component with a cycle is reported, or an exact cycle within it.
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
        blocked = {task for task in waiting if after[task] & root.tasks} - root.tasks
        assert root.blocked == blocked
        outside = set().union(*(after[task] for task in root.tasks)) - root.tasks
        assert not outside
        assert set(root.chain) <= root.blocked | root.tasks
    rooted = {task for root in made.roots for task in (*root.tasks, *root.blocked)}
    assert waiting <= rooted
