# SPDX-License-Identifier: LGPL-2.1-or-later

"""All types of locks, and the blocked tasks with the locks that they wait for.

To add a type, define a :class:`LockType` in the module of its kind, and add its name to
:data:`.report.LockTypeName` and the type itself to ``LOCK_TYPES``.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.report import Loss
from msatools.kernel.structs import Booleans
from msatools.locks import (
    completions,
    file_locks,
    relatives,
    sleeping_locks,
    spinlocks,
    user_locks,
    wait_queues,
)
from msatools.locks.context import BlockedTask, LockContext, LockType, read_cases
from msatools.locks.externals import AIO, CANCEL, External, asynchronous_io, external
from msatools.locks.relatives import NAMESPACE, PF_IO_WORKER, URING
from msatools.locks.report import Holder, Lock, QueuedWaiter, Request, WaitTarget
from msatools.locks.user_locks import futex_requests, recorded
from msatools.locks.wait_targets import wait_target
from msatools.tasks.sampler import TaskState
from msatools.tasks.states import asleep, letters
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows
from msatools.tasks.waits import TaskClass, are_any

# --- All types of locks.


# The first type that finds a request of a task is used.
LOCK_TYPES: tuple[LockType, ...] = (
    user_locks.FUTEX,
    file_locks.FILE_LOCK,
    spinlocks.SPINLOCK,
    sleeping_locks.PERCPU_RWSEM,
    sleeping_locks.SLEEPING_LOCK,
    sleeping_locks.VMA_LOCK,
    sleeping_locks.SRCU,
    relatives.RELATIVES,
    relatives.HOTPLUG_WAIT,
    completions.COMPLETION,
    wait_queues.FOLIO,
    wait_queues.BIT_WAIT,
    wait_queues.WAIT_QUEUE,
)

_BY_NAME = {name: lock_type for lock_type in LOCK_TYPES for name in lock_type.names}
_OWN_CLASSES = {lock_type.task_class for lock_type in LOCK_TYPES} - {None}


def requests_of(context: LockContext, case: BlockedTask) -> Sequence[Request]:
    """
    Return the locks that a task waits for: one, or several if any one ends the wait.

    :return: Empty if the task waits for no known lock.
    :raises drgn.FaultError: if a structure that leads to them cannot be read
    :raises MissingError: if the types are unknown
    """
    own = case.task_class if case.task_class in _OWN_CLASSES else None
    for lock_type in LOCK_TYPES:
        found = lock_type.requests(context, case) if lock_type.task_class is own else ()
        if found:
            return found
    return ()


def queue_of(context: LockContext, lock: Lock) -> Sequence[QueuedWaiter] | None:
    """
    Return the waiters of a lock, in order.

    :return: ``None`` if the lock has no list of waiters, or it could not be read.
    :raises drgn.FaultError: if the lock cannot be read
    """
    return _BY_NAME[lock.type].queue(context, lock)


def holders_of(context: LockContext, lock: Lock) -> Sequence[Holder]:
    """
    Return the holders that a lock records; empty if it records none.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return _BY_NAME[lock.type].holders(context, lock)


def readers_of(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers of a lock; ``None`` if it does not count them.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return _BY_NAME[lock.type].readers(context, lock)


def what_of(
    context: LockContext, case: BlockedTask, requests: Sequence[Request]
) -> str | None:
    """
    Describe the event behind the lock that a task waits for, such as a work item.

    :return: ``None`` if the task waits for several locks, or the event is unknown.
    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    if len(requests) != 1:
        return None
    (request,) = requests
    return _BY_NAME[request.lock.type].what(context, case, request)


# --- Finds blocked tasks, and the locks or other things that they wait for.


_LOCKS = (TaskClass.LCK, TaskClass.KLK, TaskClass.FLK)
_IN_LOCKS = (*_LOCKS, TaskClass.FLT, TaskClass.SWP)
"""Classes of tasks that count as blocked even in interruptible sleep."""

_FROZEN = (TaskClass.STP, TaskClass.TRC, TaskClass.ZMB)
_RINGS = frozenset(URING)
_AIO = frozenset(AIO)
_WAITS_ON = frozenset(("request_wait_answer", NAMESPACE))
"""Functions in which a task is blocked even if its sleep is interruptible: a request to
a FUSE server (fs/fuse/dev.c), and the exit of a PID namespace's init process."""

_DUMPED = ("coredump_task_exit", "do_exit")
"""Functions in which a thread sleeps while another dumps the core of their process."""


class Blocked(Struct, frozen=True):
    """A blocked task, with the locks or other things that it waits for."""

    row: int
    requests: tuple[Request, ...]
    """The locks that it waits for: usually one; several if any one ends the wait; none
    if it waits for no lock, or its lock is unknown."""

    external: External | None = None
    """The thing outside of all tasks that it waits for, such as a device."""

    what: str | None = None
    """Description of the wait for a lock without an owner, such as for a work item."""

    on: WaitTarget | None = None
    """The wait target, if it waits for no known lock."""

    why: str | None = None
    """The reason why its lock is unknown; ``None`` if the lock is known, or it waits
    for none."""

    caller: str | None = None
    """For a task that spins: the function that takes the spinlock."""


def blocked_rows(context: LockContext, now: TaskState) -> Rows:
    """Return the rows of blocked tasks: in uninterruptible sleep, or on a lock.

    Idle workers and stopped or frozen tasks are not blocked. Tasks that wait for events
    of io_uring or AIO are blocked only if a worker is stuck, or I/O takes long.
    """
    tasks = context.tasks
    blocked = (letters(tasks) == "D") | are_any(now.classes, _IN_LOCKS)
    blocked |= _are_in(now, _WAITS_ON)[now.stacks.index]
    in_ring = _are_in(now, _RINGS)[now.stacks.index] & ~_are_workers(tasks)
    blocked |= _waits_for_worker(tasks, now, in_ring) | _waits_for_dump(now)
    in_ring |= _are_in(now, _AIO)[now.stacks.index]
    if in_ring.any():
        cancels = _are_in(now, frozenset({CANCEL}))[now.stacks.index]
        blocked |= asynchronous_io(context).waits(in_ring, cancels) & asleep(tasks)
    blocked &= ~are_any(now.classes, _FROZEN)
    return np.flatnonzero(blocked)


def _are_in(now: TaskState, functions: frozenset[str]) -> Booleans:
    """Return which of ``now.stacks.unique`` have any of some functions."""
    names = (now.stacks.names(stack) for stack in now.stacks.unique)
    return np.array([not functions.isdisjoint(each) for each in names], np.bool_)


def _waits_for_dump(now: TaskState) -> Booleans:
    """Return which tasks wait until the core of their process is dumped."""
    waits = [wait.function in _DUMPED for wait in now.waits]
    found: Booleans = np.array(waits, np.bool_)[now.stacks.index]
    return found & are_any(now.classes, (TaskClass.WAI,))


def _are_workers(tasks: TaskTable) -> Booleans:
    """Return which tasks are workers of io_uring."""
    workers: Booleans = (tasks["flags"] & PF_IO_WORKER) != 0
    return workers


def _waits_for_worker(tasks: TaskTable, now: TaskState, in_ring: Booleans) -> Booleans:
    """Return which tasks wait for an io_uring whose workers are stuck in requests."""
    stuck: Booleans = (
        _are_workers(tasks) & (now.classes != TaskClass.URG) & asleep(tasks)
    )
    waits: Booleans = in_ring & np.isin(tasks["signal"], tasks["signal"][stuck])
    return waits


def find_blocked(
    context: LockContext, now: TaskState, rows: Rows, stack_size: int
) -> Iterator[Blocked]:
    """Yield the tasks of some rows, with the locks or other things that they wait for.

    :param rows: The result of :func:`blocked_rows`.
    :param stack_size: Bytes of a kernel stack.
    """
    found: list[int] = []
    if not context.alone:
        # Most waiters are on futexes: the hash tables list them, no stack is needed.
        for each in _on_futexes(context, rows[now.classes[rows] == TaskClass.LCK]):
            found.append(each.row)
            yield each
    alike: dict[WaitTarget | None, WaitTarget | None] = {}
    others = rows[~np.isin(rows, found)]
    for case in read_cases(context, now, others, stack_size):
        yield _blocked(context, case, alike)


def _on_futexes(context: LockContext, rows: Rows) -> Iterator[Blocked]:
    """Yield tasks with the futexes that they wait on; leave out those not found."""
    addresses = context.tasks["address"][rows].tolist()
    for row, address in zip(rows.tolist(), addresses, strict=True):
        try:
            requests = tuple(futex_requests(context, address))
        except MissingError:
            return  # _blocked() says why, for each task
        if requests:
            what = recorded(context, requests[0]) if len(requests) == 1 else None
            yield Blocked(row, requests, what=what)


def _blocked(
    context: LockContext,
    case: BlockedTask,
    alike: dict[WaitTarget | None, WaitTarget | None],
) -> Blocked:
    requests: tuple[Request, ...] = ()
    outside = why = None
    try:
        requests = tuple(requests_of(context, case))
    except UNREADABLE as error:
        context.losses.lose(
            Loss.LOCKS, f"cannot determine what a task waits for: {error}"
        )
        why = "it cannot be read"
    except MissingError as error:
        context.losses.note(
            "lock-unknown",
            f"locks of class {case.task_class.name} are unknown: {error}",
            case.task_class.name,
        )
        why = "the types are unknown"
    on = None
    if not requests:
        on = wait_target(context, case)
        if why is None and case.task_class in _LOCKS:
            why = "it was not found"
    try:
        outside = external(context, case, requests)
    except LOST as error:
        context.losses.lose(
            Loss.SERVERS, f"cannot determine who serves a wait: {error}"
        )
    what = stands_for(context, case, requests)
    return Blocked(case.row, requests, outside, what, alike.setdefault(on, on), why)


def stands_for(
    context: LockContext, case: BlockedTask, requests: Sequence[Request]
) -> str | None:
    """Call :func:`what_of`; log losses instead of raising."""
    try:
        return what_of(context, case, requests)
    except LOST as error:
        context.losses.lose(
            Loss.LOCK_NAMES, f"cannot determine what a lock stands for: {error}"
        )
    return None
