# SPDX-License-Identifier: LGPL-2.1-or-later

"""Makes the rows of roots: the tasks and things that keep others waiting, and why."""

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from msatools.locks.context import read_cases
from msatools.locks.externals import External
from msatools.locks.graph import GraphRoot, Thing
from msatools.locks.lock_types import stands_for
from msatools.locks.names import LockNames, Name
from msatools.locks.report import Lock, Root, WorkPool
from msatools.locks.user_locks import FUTEX
from msatools.locks.wait_snapshot import (
    Unknown,
    WaitSnapshot,
    Wanted,
    external_reason,
    reason,
)
from msatools.locks.wait_targets import wait_target
from msatools.reports.units import duration
from msatools.tasks.waits import RUNNABLE, TaskClass

# --- IDs and names of the locks of a snapshot.


class LockIds:
    """The IDs and names of locks, each looked up once."""

    def __init__(self, snapshot: WaitSnapshot, stack_size: int) -> None:
        """
        :param stack_size: Bytes of a kernel stack.
        """
        self._snapshot = snapshot
        self._stack_size = stack_size
        self._lookup = LockNames(snapshot.context)
        self._ids: dict[Lock, str] = {}
        self._names: dict[Lock, Name] = {}
        self._taken: set[str] = set()

    def __getitem__(self, lock: Lock) -> str:
        """Return the ID of a lock that was added."""
        return self._ids[lock]

    def __contains__(self, lock: Lock) -> bool:
        return lock in self._ids

    def name(self, lock: Lock) -> Name:
        """Return the name of a lock that was added."""
        return self._names[lock]

    def add(self, locks: Iterable[Wanted]) -> None:
        """Look up the names of locks, each by its first waiter."""
        wanted = [want for want in locks if want.lock not in self._ids]
        snapshot = self._snapshot
        firsts = np.array(sorted({want.rows[0] for want in wanted}), np.intp)
        cases = read_cases(snapshot.context, snapshot.now, firsts, self._stack_size)
        by_row = {case.row: case for case in cases}
        for want in wanted:
            name = self._lookup.name(want.lock, [by_row[want.rows[0]]])
            id_ = self._unique(lock_id(snapshot, want, name))
            # The crowd that waits for a futex has the ID of the futex.
            for lock in (want.lock, snapshot.crowd_lock(want)):
                self._ids.setdefault(lock, id_)
                self._names.setdefault(lock, name)

    def _unique(self, id_: str) -> str:
        if id_ in self._taken:
            id_ = f"{id_} ({len(self._taken)})"
        self._taken.add(id_)
        return id_


def lock_id(snapshot: WaitSnapshot, want: Wanted, name: Name | None = None) -> str:
    """
    Return the ID of a lock: its type and address, or the file that it is in.

    :param name: Name of the lock; that of a futex in a file has the inode's number.
    """
    lock = want.lock
    if lock.type not in FUTEX.names:
        bit = f" bit {lock.key}" if lock.type == "bit_wait" else ""
        return f"{lock.type} {lock.address or 0:#x}{bit}"
    if lock.address is not None:
        tgid = int(snapshot.tasks["tgid"][want.rows[0]])
        return f"{lock.type} {tgid}:{lock.address:#x}"
    key = lock.key
    assert key is not None
    assert not isinstance(key, int)
    number = name.inode if name else None
    inode = f"{key.object:#x}" if number is None else number
    return f"{lock.type} inode {inode}+{key.file_offset or 0:#x}"


# --- The rows of roots: tasks, cycles and external waits that block others.


_WITHOUT_STACK = (*RUNNABLE, TaskClass.ZMB)

_D_WEIGHT = 10
"""Weight of a task in state D against one in another state: no signal ends its wait,
except a fatal one if the wait is killable."""


class RootRows:
    """Makes the rows of the roots of one snapshot."""

    def __init__(
        self,
        snapshot: WaitSnapshot,
        ids: LockIds,
        stack_size: int,
        *,
        with_stacks: bool = False,
    ) -> None:
        """
        :param ids: Has the locks that the tasks of :meth:`of_waits` wait for.
        :param stack_size: Bytes of a kernel stack.
        :param with_stacks: Whether the rows of tasks have their stacks.
        """
        self._snapshot = snapshot
        self._graph = snapshot.graph
        self._ids = ids
        self._stack_size = stack_size
        self._with_stacks = with_stacks

    def of_waits(self, rows: set[int]) -> list[Root]:
        """Return the roots of some tasks: those that keep most tasks waiting first."""
        found = [
            root
            for sink in self._graph.roots
            if not rows.isdisjoint(sink.blocked | sink.tasks)
            for root in self._of_sink(sink)
        ]
        return sorted(found, key=_weight)

    def _of_sink(self, sink: GraphRoot) -> Iterator[Root]:
        """Yield a root of the graph, or the tasks that are roots in its place."""
        if sink.thing is None:
            yield self._of_tasks(sink)
            return
        keeping = self._keeping(sink.direct, sink.thing)
        for row in keeping:
            yield self._of_tasks(self._graph.root_of(row))
        others = [row for row in sink.direct if row not in keeping]
        if others and self._explains(sink.thing, others[0]):
            rest = self._graph.root_before(sink.thing, others)
            yield self._of_thing(rest, sink.thing)

    def _keeping(self, direct: tuple[int, ...], thing: Thing) -> list[int]:
        """Return the tasks that are roots in place of the thing that they wait for.

        These are tasks that keep others waiting: a single one that waits for the thing;
        or all of them if the thing explains little: a futex without an owner, or a
        function in which they sleep.
        """
        explains = not (_is_futex(thing) or isinstance(thing, Unknown))
        if len(direct) > 1 and explains:
            return []
        return [row for row in direct if self._graph.keeps_waiting(row)]

    def _explains(self, thing: Thing, row: int) -> bool:
        """Return whether a thing without an owner may be a root.

        Tasks that wait for a futex are usually idle, unless it is known to be a lock.
        """
        return not _is_futex(thing) or self._snapshot.blocked[row].what is not None

    def _of_tasks(self, sink: GraphRoot) -> Root:
        """Return a task, or a cycle of tasks, as a root."""
        snapshot, root = self._snapshot, self._root(sink)
        if len(sink.tasks) > 1 or self._graph.is_cycle(sink):
            itself = len(sink.tasks) == 1
            text = "waits for itself" if itself else "they wait for each other"
            waiters = self._pids(sink.tasks)
            return replace(root, kind="cycle", reason=text, waiters=waiters)
        (row,) = sink.tasks
        blocked = snapshot.blocked.get(row)
        external = None if blocked is None else blocked.external
        return replace(
            root,
            disks=external.way or None if external else None,
            external=external.kind if external else None,
            pid=snapshot.pids[row],
            confidence=self._graph.confidence_in(row, sink.direct),
            reason=self._reason(row),
            comm=snapshot.comm(row),
            state=snapshot.letters[row],
            age_ns=snapshot.ages_ns[row],
            stack=snapshot.stack_of(row) if self._with_stacks else None,
        )

    def _of_thing(self, sink: GraphRoot, thing: Thing) -> Root:
        """Return something that is not a task as a root."""
        root = replace(self._root(sink), kind="external")
        first = self._snapshot.blocked[sink.direct[0]]
        if isinstance(thing, Lock):
            text = self._without_owner(thing, first.what)
            return replace(root, reason=text, lock=self._ids[thing])
        if isinstance(thing, Unknown):
            return replace(root, reason=thing.text)
        assert first.external is not None
        text = self._external(first.external, frozenset(sink.direct))
        # The longest path of disks: some waiters may wait for a disk further down it.
        ways = (self._snapshot.blocked[row].external for row in sink.direct)
        way = max((each.way for each in ways if each), key=len)
        pid = first.external.pid
        return replace(
            root,
            reason=text,
            pid=pid,
            disks=way or None,
            external=first.external.kind,
        )

    def _without_owner(self, lock: Lock, what: str | None) -> str:
        """Describe the wait for a lock that has no known owner."""
        name = self._ids.name(lock).name or lock.type
        want = self._snapshot.wanted.get(lock)
        for own in want.refuted if want else ():
            pid, comm = self._snapshot.pids[own.row], self._snapshot.comm(own.row)
            return (
                f"{name}, left locked: its owner field names pid {pid} {comm}, "
                f"but {' and '.join(own.against)}"
            )
        if lock.type in ("folio", "bit_wait", "srcu"):
            return f"{name}, {what}" if what else name
        return what or f"{name}: no known owner"

    def _root(self, sink: GraphRoot) -> Root:
        """Return the part of a root that is the same for tasks and things."""
        snapshot = self._snapshot
        blocked_d = sum(snapshot.letters[row] == "D" for row in sink.blocked)
        return Root(
            kind="task",
            pid=None,
            reason="",
            blocked_d=blocked_d,
            blocked_s=len(sink.blocked) - blocked_d,
            comm=None,
            state=None,
            age_ns=None,
            waiters=tuple(snapshot.pids[row] for row in sink.direct),
            chain=tuple(snapshot.pids[row] for row in sink.chain),
            max_age_ns=max((snapshot.ages_ns[row] for row in sink.blocked), default=0),
            behind=self._pids(sink.blocked | sink.tasks),
        )

    def _pids(self, rows: frozenset[int]) -> tuple[int, ...]:
        return tuple(sorted(self._snapshot.pids[row] for row in rows))

    def _reason(self, row: int, before: frozenset[int] = frozenset()) -> str:
        """Return what a task is doing instead of releasing what others wait for.

        :param before: Rows of tasks that wait for the task as their server.
        """
        snapshot = self._snapshot
        blocked = snapshot.blocked.get(row)
        if blocked is not None and blocked.external is not None:
            return self._external(blocked.external, before | {row})
        runs = bool(snapshot.tasks["on_cpu"][row])
        if runs or snapshot.now.classes[row] in _WITHOUT_STACK:
            return reason(snapshot.context, row, snapshot.now, None, None, None)
        if row in snapshot.moved:
            return "ran while it was examined"
        rows = np.array([row], np.intp)
        (case,) = read_cases(snapshot.context, snapshot.now, rows, self._stack_size)
        on, what = wait_target(snapshot.context, case), None
        if blocked is not None:
            what = blocked.what or stands_for(snapshot.context, case, blocked.requests)
        return reason(snapshot.context, row, snapshot.now, case, on, what)

    def _external(self, external: External, waiting: frozenset[int]) -> str:
        """Describe an external thing, and what its server is doing.

        :param waiting: Rows of the tasks that wait for it; the server may be of them.
        """
        servers = [self._snapshot.rows.get(each.task) for each in external.servers]
        known = [row for row in servers if row is not None]
        if len(known) != 1:
            return external_reason(external, None)
        (row,) = known
        own = "which waits for what it serves itself"
        doing = own if row in waiting else self._reason(row, waiting)
        return external_reason(external, doing)


def root_of_pool(pool: WorkPool) -> Root:
    """Return a stalled pool of workers as a root, which need not block any task."""
    age_ns = pool.progress_age_ns or 0
    works = f"{pool.pending:,} work item{'s' if pool.pending != 1 else ''}"
    where = "unbound" if pool.cpu is None else f"CPU {pool.cpu}"
    return Root(
        kind="external",
        pid=pool.culprits[0] if len(pool.culprits) == 1 else None,
        reason=f"pool {pool.id} ({where}) with {works} pending, and none begun for "
        f"{duration(age_ns)}: {pool.why}",
        blocked_d=0,
        blocked_s=0,
        comm=None,
        state=None,
        age_ns=None,
        waiters=(),
        chain=(),
        max_age_ns=0,
        pool=pool.id,
    )


def _is_futex(thing: Thing) -> bool:
    return isinstance(thing, Lock) and thing.type in FUTEX.names


def _weight(root: Root) -> tuple[bool, int, int, int]:
    """Return the sort key of roots: most blocked tasks first, then the longest wait.

    A task that owns a lock only by an address on its stack is a guess, and comes last.
    """
    return (
        root.confidence == "evidence",
        -(_D_WEIGHT * root.blocked_d + root.blocked_s),
        -root.max_age_ns,
        root.pid or 0,
    )
