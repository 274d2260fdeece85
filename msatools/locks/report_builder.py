# SPDX-License-Identifier: LGPL-2.1-or-later

"""Builds the rows of a report from a snapshot: ranked and named."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from msatools.kernel.structs import Booleans
from msatools.locks.base.blocked_tasks import BlockedTask, read_cases
from msatools.locks.base.lock import Lock
from msatools.locks.base.model import CONDITION, Herd, WaitTarget
from msatools.locks.blocked import stands_for
from msatools.locks.externals import External
from msatools.locks.graph import Cycle, Graph, GraphRoot
from msatools.locks.herds import MIN_WAITERS, Watched, crowd_of
from msatools.locks.names.names import LockNames, Name
from msatools.locks.options import LocksOptions
from msatools.locks.reasons import external_reason, reason
from msatools.locks.report import Deadlock, Inversion, LockRow, Owner, Root, Wait
from msatools.locks.user.userlocks import FUTEX, is_condition
from msatools.locks.user.wakers import with_frames
from msatools.locks.wait_snapshot import (
    Unknown,
    WaitSnapshot,
    Wanted,
    futex_at,
)
from msatools.locks.wait_targets.explain import awake_rows, leaving, wait_target
from msatools.target.model import Address
from msatools.tasks.classes import RUNNABLE, TaskClass
from msatools.tasks.identity import comm_text
from msatools.tasks.membership import read_members
from msatools.tasks.states import letters
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import AgeBound

_INHERITS = frozenset(("pi_futex", "rt_mutex"))
"""Locks whose owners inherit the priority of waiters."""

_WITHOUT_STACK = (*RUNNABLE, TaskClass.ZMB)

_PRIO_OF_PROC = 100
"""What /proc takes off a task's priority (MAX_RT_PRIO)."""

_D_WEIGHT = 10
"""Weight of a task in state D against one in another state: signals do not end its
wait, but for fatal ones if it is killable."""


class ReportRows(TypedDict):
    """The fields of a report that come from a snapshot."""

    waits: tuple[Wait, ...]
    locks: tuple[LockRow, ...]
    roots: tuple[Root, ...]
    deadlocks: tuple[Deadlock, ...]
    herds: tuple[Herd, ...]
    inversions: tuple[Inversion, ...]


class ReportBuilder:
    """Makes the rows of a report from one snapshot."""

    def __init__(
        self,
        snapshot: WaitSnapshot,
        options: LocksOptions,
        stack_size: int,
        crowded: WaitSnapshot | None = None,
        again: Callable[[npt.NDArray[np.intp]], Iterator[TaskTable]] | None = None,
    ) -> None:
        """
        :param crowded: The snapshot with waits that changed meanwhile, if another.
        :param again: Reads some tasks again: see :class:`msatools.locks.herds.Watched`.
        """
        self._snapshot = snapshot
        self._crowded = crowded or snapshot
        self._again = again
        self._options = options
        self._stack_size = stack_size
        self._graph: Graph = snapshot.graph
        self._letters: list[str] = letters(snapshot.tasks).tolist()
        self._pids: list[int] = snapshot.tasks["pid"].tolist()
        self._ages: list[int] = snapshot.now.age_ns.tolist()
        self._names = LockNames(snapshot.context)
        self._ids: dict[Lock, str] = {}
        self._named: dict[Lock, Name] = {}

    def rows(self, slept: npt.NDArray[np.int64] | None = None) -> ReportRows:
        """
        Return the rows that fit the options.

        :param slept: How often each task has gone to sleep within an interval.
        """
        rows = self._wanted_rows()
        locks = [
            want
            for want in self._snapshot.wanted.values()
            if not rows.isdisjoint(want.rows)
        ]
        self._name(locks)
        by_crowd = sorted(
            locks, key=lambda want: (-len(want.rows), self._ids[want.lock])
        )
        by_age = sorted(rows, key=lambda row: (-self._ages[row], self._pids[row]))
        roots = [
            replace(root, behind=self._behind(sink))
            for sink in self._graph.roots
            for root in self._roots(sink, rows)
        ]
        return ReportRows(
            waits=tuple(self._wait(row) for row in by_age),
            locks=tuple(self._lock(want) for want in by_crowd),
            roots=tuple(sorted(roots, key=_weight)),
            deadlocks=tuple(self._deadlocks()),
            herds=with_frames(
                [*self._herds(slept)], self._crowded.context, self._stack_size
            ),
            inversions=tuple(self._inversions(by_crowd)),
        )

    def names(self, locks: Iterable[Wanted]) -> dict[Lock, tuple[str, str | None]]:
        """Return the ID and the name of some locks."""
        self._name(locks)
        return {lock: (id_, self._named[lock].name) for lock, id_ in self._ids.items()}

    def ids(self, locks: Iterable[Wanted]) -> dict[Lock, str]:
        """Return the IDs of some locks, without reading what they lie in."""
        return {want.lock: self._id(want, Name()) for want in locks}

    # --- which

    def _wanted_rows(self) -> set[int]:
        """Return the waits that fit the options, and those on chains to their roots."""
        chosen = {row for row in self._snapshot.blocked if self._fits(row)}
        todo = list(chosen)
        while todo:
            for edge in self._graph.edges_of(todo.pop()):
                if edge.owner in self._snapshot.blocked and edge.owner not in chosen:
                    chosen.add(edge.owner)
                    todo.append(edge.owner)
        return chosen

    def _fits(self, row: int) -> bool:
        options, blocked = self._options, self._snapshot.blocked[row]
        if options.pids is not None and self._pids[row] not in options.pids:
            return False
        if options.states is not None and self._letters[row] not in options.states:
            return False
        if not self._members[row]:
            return False
        types = {request.lock.type for request in blocked.requests}
        if options.types is not None and types.isdisjoint(options.types):
            return False
        return self._ages[row] >= options.min_wait_ns

    @cached_property
    def _members(self) -> Booleans:
        """Whether each thread is in a control group or namespace that is asked for."""
        context, wanted = self._snapshot.context, self._options.membership
        return read_members(
            context.reader, self._snapshot.tasks, wanted, context.losses
        )

    # --- waits

    def _wait(self, row: int) -> Wait:
        snapshot, now = self._snapshot, self._snapshot.now
        tasks, blocked = snapshot.tasks, snapshot.blocked[row]
        index = int(now.stacks.index[row])
        wait = now.waits[index]
        task_class = TaskClass(int(now.classes[row]))
        single = len(blocked.requests) == 1
        ids = tuple(self._ids[request.lock] for request in blocked.requests)
        return Wait(
            pid=self._pids[row],
            tgid=int(tasks["tgid"][row]),
            comm=comm_text(tasks["comm"][row]),
            state=self._letters[row],
            age_ns=self._ages[row],
            age_bound=AgeBound(int(now.age_bound[row])).name.lower(),
            mode=blocked.requests[0].mode if single else None,
            lock=ids[0] if single else None,
            task_class=task_class.name,
            # The caller of a futex is in user space.
            caller=blocked.caller
            or (None if task_class is TaskClass.LCK else wait.caller),
            call=wait.call,
            start_ns=int(tasks["start_ns"][row]),
            switches=int(tasks["nvcsw"][row]) + int(tasks["nivcsw"][row]),
            owners=tuple(
                dict.fromkeys(
                    self._pids[edge.owner] for edge in self._graph.edges_of(row)
                )
            ),
            any_of=ids if len(ids) > 1 else None,
            on=blocked.on,
            why=blocked.why,
            stack=self._stack(row),
        )

    def _stack(self, row: int) -> tuple[str, ...] | None:
        if not self._options.stack:
            return None
        stacks = self._snapshot.now.stacks
        return stacks.names(stacks[row])

    # --- locks

    def _name(self, locks: Iterable[Wanted]) -> None:
        """Name locks, by one of those that wait for each."""
        wanted = list(locks)
        firsts = np.array(sorted({want.rows[0] for want in wanted}), np.intp)
        cases = {case.row: case for case in self._cases(firsts)}
        taken: set[str] = set()
        for want in wanted:
            name = self._names.name(want.lock, [cases[want.rows[0]]])
            self._named[want.lock] = name
            own_id = self._id(want, name)
            if own_id in taken:
                own_id += f" ({len(taken)})"
            taken.add(own_id)
            self._ids[want.lock] = own_id

    def _cases(self, rows: npt.NDArray[np.intp]) -> Iterable[BlockedTask]:
        snapshot = self._snapshot
        return read_cases(snapshot.context, snapshot.now, rows, self._stack_size)

    def _id(self, want: Wanted, name: Name) -> str:
        lock = want.lock
        if lock.type not in FUTEX.names:
            bit = f" bit {lock.key}" if lock.type == "bit_wait" else ""
            return f"{lock.type} {lock.address or 0:#x}{bit}"
        if lock.address is not None:
            tgid = int(self._snapshot.tasks["tgid"][want.rows[0]])
            return f"{lock.type} {tgid}:{lock.address:#x}"
        key = lock.key
        assert key is not None
        assert not isinstance(key, int)
        inode = name.inode if name.inode is not None else f"{key.object:#x}"
        return f"{lock.type} inode {inode}+{key.file_offset or 0:#x}"

    def _lock(self, want: Wanted) -> LockRow:
        name = self._named[want.lock]
        address = want.lock.address
        return LockRow(
            id=self._ids[want.lock],
            type=want.lock.type,
            address=None if address is None else Address(address),
            name=name.name,
            owners=tuple(
                Owner(
                    pid=self._pids[own.row],
                    confidence=own.confidence,
                    comm=comm_text(self._snapshot.tasks["comm"][own.row]),
                    seen=own.seen,
                )
                for own in want.owners
            ),
            waiters=tuple(self._waiters(want)),
            max_age_ns=max(self._ages[row] for row in want.rows),
            readers=want.readers,
            path=name.path,
            inode=name.inode,
            device=name.device,
            pid=name.pid,
            cache=name.cache,
        )

    def _waiters(self, want: Wanted) -> list[int]:
        """Return the waiters in the order of the queue, or else the longest first."""
        by_age = sorted(want.rows, key=lambda row: (-self._ages[row], self._pids[row]))
        pids = [self._pids[row] for row in by_age]
        queued = [self._snapshot.pid(each.task) for each in want.queue or ()]
        waiting = [pid for pid in queued if pid is not None]
        return list(dict.fromkeys([*waiting, *pids]))

    # --- roots

    def _roots(self, sink: GraphRoot, rows: set[int]) -> Iterable[Root]:
        """Yield a root; it may be several: see :meth:`_keeping`."""
        if sink.blocked.isdisjoint(rows) and sink.tasks.isdisjoint(rows):
            return
        if sink.thing is None:
            yield self._of_tasks(sink)
            return
        keeping = self._keeping(sink)
        for row in keeping:
            yield self._of_tasks(self._graph.root_of(row))
        others = [row for row in sink.direct if row not in keeping]
        if others and not _is_futex(sink.thing):
            yield self._of_thing(self._graph.root_before(sink.thing, others))

    def _behind(self, sink: GraphRoot) -> tuple[int, ...]:
        return tuple(sorted(self._pids[row] for row in sink.blocked | sink.tasks))

    def _keeping(self, sink: GraphRoot) -> list[int]:
        """Return the tasks that are roots in place of the thing that they wait for.

        These are tasks that keep others waiting: a single one that waits for the thing;
        or all of them if the thing says little, as a futex without an owner, or a
        function in which they sleep.
        """
        apart = _is_futex(sink.thing) or isinstance(sink.thing, Unknown)
        if len(sink.direct) > 1 and not apart:
            return []
        return [row for row in sink.direct if self._graph.keeps_waiting(row)]

    def _of_tasks(self, sink: GraphRoot) -> Root:
        made = self._root(sink)
        if len(sink.tasks) > 1 or self._graph.is_cycle(sink):
            waiters = tuple(sorted(self._pids[row] for row in sink.tasks))
            text = (
                "they wait for each other" if len(waiters) > 1 else "waits for itself"
            )
            return replace(made, kind="cycle", reason=text, waiters=waiters)
        (row,) = sink.tasks
        return replace(
            made,
            pid=self._pids[row],
            reason=self._reason(row),
            comm=comm_text(self._snapshot.tasks["comm"][row]),
            state=self._letters[row],
            age_ns=self._ages[row],
            stack=self._stack(row),
        )

    def _of_thing(self, sink: GraphRoot) -> Root:
        made = replace(self._root(sink), kind="external")
        thing = sink.thing
        first = self._snapshot.blocked[sink.direct[0]]
        if isinstance(thing, Lock):
            name = self._named[thing].name or thing.type
            text = first.what or f"{name}: nobody is known to have it"
            if thing.type in ("folio", "bit_wait"):
                text = f"{name}, {first.what}" if first.what else name
            return replace(made, reason=text, lock=self._ids[thing])
        if isinstance(thing, Unknown):
            return replace(made, reason=thing.text)
        external = first.external
        assert external is not None
        return replace(made, reason=self._external(external), pid=external.pid)

    def _root(self, sink: GraphRoot) -> Root:
        of_d = sum(self._letters[row] == "D" for row in sink.blocked)
        return Root(
            kind="task",
            pid=None,
            reason="",
            blocked_d=of_d,
            blocked_s=len(sink.blocked) - of_d,
            comm=None,
            state=None,
            age_ns=None,
            waiters=tuple(self._pids[row] for row in sink.direct),
            chain=tuple(self._pids[row] for row in sink.chain),
            max_age_ns=max((self._ages[row] for row in sink.blocked), default=0),
        )

    def _reason(self, row: int) -> str:
        """Return what a task is doing instead of releasing what others wait for."""
        snapshot = self._snapshot
        blocked = snapshot.blocked.get(row)
        if blocked is not None and blocked.external is not None:
            return self._external(blocked.external)
        if snapshot.now.classes[row] in _WITHOUT_STACK:
            return reason(snapshot.context, row, snapshot.now, None, None, None)
        if row in snapshot.moved:
            return "has run while it was looked at"
        (case,) = self._cases(np.array([row], np.intp))
        on, what = wait_target(snapshot.context, case), None
        if blocked is not None:
            what = blocked.what or stands_for(snapshot.context, case, blocked.requests)
        return reason(snapshot.context, row, snapshot.now, case, on, what)

    def _external(self, external: External) -> str:
        """Return what serves a wait, and what that is doing."""
        servers = [self._snapshot.rows.get(each.task) for each in external.servers]
        known = [row for row in servers if row is not None]
        doing = self._reason(known[0]) if len(known) == 1 else None
        return external_reason(external, doing)

    # --- the rest

    def _deadlocks(self) -> Iterable[Deadlock]:
        for cycle in self._graph.cycles:
            edges = cycle.edges
            if any(edge.lock not in self._ids for edge in edges):
                continue  # a lock that was not asked for
            yield Deadlock(
                confidence="exact" if self._is_certain(cycle) else "possible",
                pids=tuple(self._pids[edge.waiter] for edge in edges),
                locks=tuple(self._ids[edge.lock] for edge in edges),
            )

    def _is_certain(self, cycle: Cycle) -> bool:
        """Return whether a deadlock is certain.

        A wait with a timer ends by itself. A lock of a process may be released by
        another thread of it than its reported owner.
        """
        tasks = self._snapshot.tasks
        for edge in cycle.edges:
            if edge.confidence != "exact":
                return False
            own = (tasks["tgid"] == tasks["tgid"][edge.owner]) & (
                tasks["exit_state"] == 0
            )
            if edge.lock.type == "posix_lock" and np.count_nonzero(own) > 1:
                return False
        rows = np.array(sorted(edge.waiter for edge in cycle.edges), np.intp)
        return all(case.stack.timer() is None for case in self._cases(rows))

    def _herds(self, slept: npt.NDArray[np.int64] | None) -> Iterable[Herd]:
        snapshot = self._crowded
        awake = awake_rows(snapshot.tasks, snapshot.now)
        left = leaving(snapshot.context, snapshot.now, awake, self._stack_size)
        woken: dict[tuple[int, int], list[int]] = {}
        if not snapshot.context.live:
            # Of a running kernel, queues were read at another time than stacks.
            woken = {place: list(rows) for place, rows in snapshot.unqueued.items()}
        for row, on in zip(awake.tolist(), left, strict=True):
            if on is not None and on.address is not None:
                place = snapshot.place_of(row, int(on.address))
                woken.setdefault(place, []).append(row)
        wants = list(snapshot.crowds)
        # If all waiters are woken together, none of them may be asleep.
        queued = {snapshot.place(want) for want in wants}
        wants += [
            Wanted(futex_at(place), rows)
            for place, rows in woken.items()
            if place not in queued
        ]
        crowds = sorted(wants, key=lambda want: -len(want.rows))
        watched = Watched(slept, self._again)
        for want in crowds:
            at = snapshot.place(want)
            woke = woken.get(at, []) if at else []
            waiting = sorted(set(want.rows).difference(woke))
            if len(waiting) + len(woke) < MIN_WAITERS or not self._is_asked_for(want):
                continue
            if want.lock not in self._ids:
                self._name([want])
            exact = [own.row for own in want.owners if own.confidence == "exact"]
            on = WaitTarget(
                kind="futex" if want.lock.type in FUTEX.names else "lock",
                address=None
                if want.lock.address is None
                else Address(want.lock.address),
                owner=self._pids[exact[0]] if exact else None,
                name=self._whole(want),
            )
            yield crowd_of(
                self._ids[want.lock],
                on,
                snapshot.tasks,
                snapshot.now,
                np.array(waiting, np.intp),
                snapshot.clocks,
                woke,
                watched,
            )

    def _whole(self, want: Wanted) -> str | None:
        mm = int(self._snapshot.tasks["mm"][want.rows[0]])
        return CONDITION if is_condition(self._crowded.context, want.lock, mm) else None

    def _is_asked_for(self, want: Wanted) -> bool:
        return any(
            self._fits(row) for row in want.rows if row in self._snapshot.blocked
        ) or (want.lock not in self._snapshot.wanted and self._options.asks_for_all)

    def _inversions(self, locks: Iterable[Wanted]) -> Iterable[Inversion]:
        """Find runnable owners that are off the CPU and less urgent than a waiter."""
        tasks = self._snapshot.tasks
        prio: list[int] = tasks["prio"].tolist()
        for want in locks:
            if want.lock.type in _INHERITS:
                continue
            waiter = min(want.rows, key=lambda row: prio[row])
            for own in want.owners:
                runnable = tasks["state"][own.row] == 0 and not tasks["on_cpu"][own.row]
                if runnable and prio[own.row] > prio[waiter]:
                    yield Inversion(
                        lock=self._ids[want.lock],
                        owner=self._pids[own.row],
                        waiter=self._pids[waiter],
                        owner_pri=prio[own.row] - _PRIO_OF_PROC,
                        waiter_pri=prio[waiter] - _PRIO_OF_PROC,
                    )


def _is_futex(thing: object) -> bool:
    return isinstance(thing, Lock) and thing.type in FUTEX.names


def _weight(root: Root) -> tuple[int, int, int]:
    """Return the sort key of roots: most blocked tasks first, then the longest wait."""
    return (
        -(_D_WEIGHT * root.blocked_d + root.blocked_s),
        -root.max_age_ns,
        root.pid or 0,
    )
