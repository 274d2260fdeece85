# SPDX-License-Identifier: LGPL-2.1-or-later

"""The graph of waits, with its cycles, roots and chains; reads no memory.

Also the owners of locks, by the lock itself and by stacks, with their confidence.
"""

from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cached_property
from graphlib import TopologicalSorter

from msgspec import Struct

from msatools.locks.report import SUREST_FIRST, Lock, OwnerConfidence

# --- Owners of locks, by the lock itself and by stacks, with their confidence.


BY_STACK = frozenset({"rwsem", "semaphore", "percpu_rwsem", "srcu"})
"""Lock types that do not record all owners: stacks are searched."""

MAX_BY_STACK = 32
"""Maximum number of owners of one lock to report by their stacks."""


class Owned(Struct, frozen=True):
    """An owner of a lock, certain or probable."""

    row: int
    confidence: OwnerConfidence
    seen: bool
    """Whether the lock's address is on its stack."""

    firm: bool
    """Whether an edge to it may be part of a deadlock."""

    against: tuple[str, ...] = ()
    """Reasons why it cannot have the lock, though the lock names it."""

    others: tuple[int, ...] = ()
    """Rows of other tasks whose stacks have the lock's address: a contradiction."""


def owners(
    lock: Lock,
    named: Sequence[tuple[int, OwnerConfidence]],
    readers: int | None,
    seen: Collection[int],
    waiting: Collection[int],
    *,
    searched: bool = True,
    implied: Collection[int] = (),
    against: Callable[[int], tuple[str, ...]] = lambda row: (),
    handles: Callable[[int], bool] = lambda row: True,
) -> tuple[Owned, ...]:
    """
    Return the owners of a lock, by three kinds of evidence, the strongest first.

    1. The exact owner that the lock records. If something refutes it (see
       :mod:`msatools.locks.ownership`), only refuted tasks are returned.
    2. Readers in a function that implies that they have the lock; and the last reader
       of a rwsem, or the last owner of a semaphore, that the kernel recorded, unless
       refuted: it may have released the lock since.
    3. Tasks with the lock's address on their stack, in a function that takes such
       locks. An owner usually has it there; so has each waiter, and sometimes a task
       that has released the lock. So stacks prove nothing if these tasks and the ones
       of 2. that are seen or firm are more than the readers. If they are just as many,
       the recorded last reader has left, unless it is one of them.

    :param named: Rows of tasks that the lock itself records, with the confidence.
    :param readers: The number of readers; ``None`` if the lock does not count them.
    :param seen: Rows of tasks with the lock's address on their stacks.
    :param waiting: Rows of tasks that wait for the lock.
    :param searched: Whether all stacks were searched, not just those of named tasks.
    :param implied: Rows of tasks that have the lock, by the functions they are in.
    :param against: Returns reasons why the task in a row cannot have the lock.
    :param handles: Returns whether a task is in a function that takes such locks.
    :return: Refuted tasks have :attr:`Owned.against`: they are no owners.
    """
    refuted = {row: texts for row, _ in named if (texts := against(row))}
    if any(confidence == "exact" and row in refuted for row, confidence in named):
        return tuple(
            Owned(row, "evidence", False, False, texts)
            for row, texts in refuted.items()
        )
    recorded = [
        Owned(
            row,
            confidence,
            seen=row in seen or confidence == "evidence",
            firm=confidence == "exact" or not readers,
        )
        for row, confidence in named
        # A writer may be recorded while it waits for readers to leave.
        if not (readers and row in waiting) and row not in refuted
    ]
    recorded = _with_implied(recorded, implied, seen)
    if lock.type not in BY_STACK or any(own.confidence == "exact" for own in recorded):
        return tuple(recorded)
    if not searched:
        # The last reader may have left, and other stacks were not searched.
        return tuple(own for own in recorded if own.seen)
    if lock.type == "srcu" and not readers:
        return tuple(recorded)
    known = {own.row for own in recorded}
    others = sorted(set(seen) - set(waiting) - known)
    others = [row for row in others if not against(row) and handles(row)]
    if lock.type == "semaphore":
        # A semaphore does not count its owners.
        alone = not recorded and len(others) == 1
        found = [Owned(row, "evidence", True, alone) for row in others]
        return (*recorded, *found[:MAX_BY_STACK])
    most = 1 if readers is None else readers
    if lock.type == "percpu_rwsem" and not readers:
        most = 1  # a writer owns the lock
    supported = [own for own in recorded if own.seen or own.firm]
    if len(others) + len(supported) > most:
        # More candidates than owners: the stacks prove nothing.
        return tuple(_contradicted(own, others) for own in recorded)
    if others and len(others) + len(supported) == most:
        recorded = supported
    seen_too = [own for own in recorded if own.seen]
    confirmed = [Owned(own.row, own.confidence, True, True) for own in seen_too]
    unseen = [own for own in recorded if not own.seen]
    found = [Owned(row, "evidence", True, True) for row in others]
    return (*confirmed, *unseen, *found[:MAX_BY_STACK])


def _contradicted(own: Owned, others: Sequence[int]) -> Owned:
    """Add the other candidates to an owner that is neither firm nor seen."""
    if own.firm or own.seen:
        return own
    return Owned(own.row, own.confidence, own.seen, own.firm, others=tuple(others))


def _with_implied(
    recorded: list[Owned], implied: Collection[int], seen: Collection[int]
) -> list[Owned]:
    """Add the tasks whose functions imply that they have the lock, as firm owners."""
    known = {own.row: own for own in recorded}
    for row in sorted(implied):
        known[row] = Owned(row, "likely", seen=row in seen, firm=True)
    return list(known.values())


# --- The graph of waits, with its cycles, roots and chains.
#
# A task that waits for a lock has an edge to each owner. A node without edges of its
# own is a root: a task that owns what others wait for, or something that is not a task,
# such as a device or a lock with no known owner. Tasks that wait for each other are one
# root together: their strongly connected component (Tarjan, Depth-first search and
# linear graph algorithms, 1972).


Thing = Hashable
"""Something that tasks wait for, but no task: also a lock with no known owner."""


class Edge(Struct, frozen=True):
    """The wait of a task for the owner of a lock."""

    waiter: int
    lock: Lock
    owner: int
    confidence: OwnerConfidence

    firm: bool = True
    """Whether it may be part of a deadlock."""


class Cycle(Struct, frozen=True):
    """Tasks that wait for each other."""

    edges: tuple[Edge, ...]
    """The edges in order: the owner of each is the waiter of the next, and the owner of
    the last is the waiter of the first."""

    tasks: frozenset[int]
    """All tasks that wait for each other; the edges may be of only some of them."""

    @property
    def exact(self) -> bool:
        """Whether all of its edges are certain."""
        return all(edge.confidence == "exact" for edge in self.edges)


class GraphRoot(Struct, frozen=True):
    """A root: the end of a chain of waits."""

    tasks: frozenset[int]
    """A single task, or those of a cycle; empty for a thing."""

    thing: Thing | None
    """What the root is if it is no task; ``None`` for tasks."""

    direct: tuple[int, ...]
    """Tasks that wait for the root directly, without its own tasks."""

    blocked: frozenset[int]
    """Tasks that wait for the root directly or indirectly, without its own tasks."""

    chain: tuple[int, ...]
    """The longest chain of waits, the root's own task last."""


class Graph:
    """A graph of waits; tasks are numbers, such as rows of a table."""

    def __init__(
        self,
        edges: Iterable[Edge],
        things: Mapping[int, Thing],
        age_ns: Callable[[int], int],
    ) -> None:
        """
        :param things: Maps tasks to things that they wait for. The thing of a task that
            has edges is used only if all of these are dropped.
        :param age_ns: Returns how long a task has waited; of several chains with the
            same length, the oldest is returned.
        """
        self._age_ns = age_ns
        self.edges = _without_loose_cycles(list(edges))
        self._after: dict[int, list[Edge]] = {}
        self._before: dict[int, list[int]] = {}
        for edge in self.edges:
            self._after.setdefault(edge.waiter, []).append(edge)
            self._before.setdefault(edge.owner, []).append(edge.waiter)
        self._behind: dict[Thing, list[int]] = {}
        for task, thing in things.items():
            if task not in self._after:
                self._behind.setdefault(thing, []).append(task)
        self._things = things

    def edges_of(self, task: int) -> Sequence[Edge]:
        """Return the edges from a task to owners."""
        return self._after.get(task, ())

    @cached_property
    def _components(self) -> list[frozenset[int]]:
        return _components(self._owners)

    @property
    def _owners(self) -> dict[int, list[int]]:
        return {
            task: [edge.owner for edge in edges] for task, edges in self._after.items()
        }

    @cached_property
    def cycles(self) -> tuple[Cycle, ...]:
        """All sets of tasks that wait for each other, certain ones first.

        If only a part of a set is certain, only the cycle of that part is returned.
        """
        exact = [edge for edge in self.edges if edge.confidence == "exact"]
        sure = list(_cycles(exact))
        certain = frozenset[int]().union(*(cycle.tasks for cycle in sure))
        others = _cycles(self.edges)
        return (*sure, *(cycle for cycle in others if not cycle.tasks & certain))

    @cached_property
    def roots(self) -> tuple[GraphRoot, ...]:
        """All roots, in no order."""
        found = []
        for component in self._components:
            ends = not any(
                edge.owner not in component
                for task in component
                for edge in self.edges_of(task)
            )
            waits = any(task in self._waiting_for_thing for task in component)
            if ends and not waits:
                found.append(self._root(component))
        found += [self.root_before(*each) for each in self._behind.items()]
        return tuple(root for root in found if root.blocked or self.is_cycle(root))

    def is_cycle(self, root: GraphRoot) -> bool:
        """Return whether a root's tasks wait for each other, or for themselves."""
        return any(
            edge.owner in root.tasks
            for task in root.tasks
            for edge in self.edges_of(task)
        )

    @cached_property
    def _waiting_for_thing(self) -> frozenset[int]:
        return frozenset(task for tasks in self._behind.values() for task in tasks)

    def root_of(self, task: int) -> GraphRoot:
        """Return a task as a root, even if it waits for something itself."""
        return self._root(frozenset((task,)))

    def root_before(self, thing: Thing, direct: Sequence[int]) -> GraphRoot:
        """Return a thing as the root of the tasks *direct* and of all behind them."""
        blocked = frozenset(direct) | self.blocked_by(direct)
        chain = self._chain(direct)
        return GraphRoot(frozenset(), thing, tuple(direct), blocked, chain)

    def keeps_waiting(self, task: int) -> bool:
        """Return whether another task waits for what a task owns."""
        return any(waiter != task for waiter in self._before.get(task, ()))

    def blocked_by(self, tasks: Iterable[int]) -> frozenset[int]:
        """Return all tasks that wait for some tasks, directly or not, without these."""
        start = set(tasks)
        found = set(start)
        todo = list(start)
        while todo:
            for waiter in self._before.get(todo.pop(), ()):
                if waiter not in found:
                    found.add(waiter)
                    todo.append(waiter)
        return frozenset(found - start)

    def way(self, task: int) -> list[Edge]:
        """Return a path of edges from a task to its root: at each task the surest edge
        that does not lead back to a task on the path."""
        seen = {task}
        edges: list[Edge] = []
        while True:
            onward = [edge for edge in self.edges_of(task) if edge.owner not in seen]
            if not onward:
                return edges
            edge = min(onward, key=lambda edge: SUREST_FIRST.index(edge.confidence))
            edges.append(edge)
            task = edge.owner
            seen.add(task)

    def confidence_in(
        self, owner: int, waiters: Iterable[int]
    ) -> OwnerConfidence | None:
        """Return the confidence of the surest edge from some tasks to an owner."""
        found = {
            edge.confidence
            for waiter in waiters
            for edge in self.edges_of(waiter)
            if edge.owner == owner
        }
        return min(found, key=SUREST_FIRST.index, default=None)

    def _root(self, component: frozenset[int]) -> GraphRoot:
        direct = dict.fromkeys(
            waiter
            for task in sorted(component)
            for waiter in self._before.get(task, ())
            if waiter not in component
        )
        own = tuple(component) if len(component) == 1 else ()
        chain = (*self._chain(list(direct)), *own)
        blocked = self.blocked_by(component)
        return GraphRoot(component, None, tuple(direct), blocked, chain)

    def _chain(self, waiting: Sequence[int]) -> tuple[int, ...]:
        """Return the longest chain that ends in one of some tasks."""
        chain: list[int] = []
        while waiting:
            task = max(waiting, key=self._rank)
            chain.append(task)
            inside = self._component_of[task]
            waiting = [
                waiter
                for member in inside
                for waiter in self._before.get(member, ())
                if waiter not in inside
            ]
        return tuple(reversed(chain))

    def _rank(self, task: int) -> tuple[int, int]:
        return self._heights[self._component_of[task]], self._age_ns(task)

    @cached_property
    def _component_of(self) -> dict[int, frozenset[int]]:
        found = {task: frozenset((task,)) for task in self._things}
        for component in self._components:
            found.update(dict.fromkeys(component, component))
        return found

    @cached_property
    def _heights(self) -> dict[frozenset[int], int]:
        """Maps each component to the length of the longest chain that ends in it."""
        of = self._component_of
        behind: dict[frozenset[int], set[frozenset[int]]] = {
            component: set() for component in of.values()
        }
        for edge in self.edges:
            waiter, owner = of[edge.waiter], of[edge.owner]
            if waiter != owner:
                behind[owner].add(waiter)
        heights: dict[frozenset[int], int] = {}
        for component in TopologicalSorter(behind).static_order():
            below = (heights[waiter] for waiter in behind[component])
            heights[component] = len(component) + max(below, default=0)
        return heights


def _without_loose_cycles(edges: list[Edge]) -> list[Edge]:
    """Leave out edges that are not firm and are part of a cycle.

    A cycle contradicts evidence from stacks: a task that has released a lock may still
    have its address on the stack.
    """
    firm = [edge for edge in edges if edge.firm]
    if len(firm) == len(edges):
        return edges
    inside = _component_numbers(edges)
    return [
        edge for edge in edges if edge.firm or inside[edge.waiter] != inside[edge.owner]
    ]


def _component_numbers(edges: Iterable[Edge]) -> dict[int, int]:
    owners: dict[int, list[int]] = {}
    for edge in edges:
        owners.setdefault(edge.waiter, []).append(edge.owner)
    components = enumerate(_components(owners))
    return {task: number for number, tasks in components for task in tasks}


def _cycles(edges: Iterable[Edge]) -> Iterator[Cycle]:
    """Yield a shortest cycle of each component that has one."""
    after: dict[int, list[Edge]] = {}
    for edge in edges:
        after.setdefault(edge.waiter, []).append(edge)
    owners = {task: [edge.owner for edge in edges] for task, edges in after.items()}
    for tasks in _components(owners):
        start = min(tasks)
        if len(tasks) > 1 or start in owners.get(start, ()):
            yield Cycle(_shortest(after, start, tasks), tasks)


def _shortest(
    after: Mapping[int, Sequence[Edge]], start: int, within: frozenset[int]
) -> tuple[Edge, ...]:
    """Find a shortest path from a task back to itself."""
    came: dict[int, Edge] = {}
    todo = deque([start])
    while start not in came:
        task = todo.popleft()
        for edge in after.get(task, ()):
            if edge.owner in within and edge.owner not in came:
                came[edge.owner] = edge
                todo.append(edge.owner)
    edges = [came[start]]
    while edges[-1].waiter != start:
        edges.append(came[edges[-1].waiter])
    return tuple(reversed(edges))


def _components(after: Mapping[int, Sequence[int]]) -> list[frozenset[int]]:
    """Find the strongly connected components, without recursion.

    :param after: Maps each task that waits to the owners.
    """
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[frozenset[int]] = []
    for first in after:
        if first in number:
            continue
        work = [(first, iter(after.get(first, ())))]
        number[first] = low[first] = len(number)
        stack.append(first)
        on_stack.add(first)
        while work:
            task, onward = work[-1]
            for owner in onward:
                if owner not in number:
                    number[owner] = low[owner] = len(number)
                    stack.append(owner)
                    on_stack.add(owner)
                    work.append((owner, iter(after.get(owner, ()))))
                    break
                if owner in on_stack:
                    low[task] = min(low[task], number[owner])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[task])
                if low[task] == number[task]:
                    found.append(frozenset(_popped(stack, on_stack, task)))
    return found


def _popped(stack: list[int], on_stack: set[int], last: int) -> Iterator[int]:
    while True:
        task = stack.pop()
        on_stack.remove(task)
        yield task
        if task == last:
            return
