# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks with priority inheritance: ``rt_mutex``, and locks that contain one.

kernel/locking/rtmutex.c, rwbase_rt.c: ``task_struct.pi_blocked_on`` points at the
waiter of a task, which points at the lock. With CONFIG_PREEMPT_RT mutexes, rwsems and
spinlocks contain an ``rt_mutex``.
"""

from itertools import islice, pairwise

from msatools.errors import UNREADABLE
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, LockTypeName, QueuedWaiter
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import Mode
from msatools.locks.sleeping.kernellocks import (
    MAX_WORDS,
    KernelLock,
    kernel_locks,
    known_to,
)

_PI_FUTEX = ("futex_lock_pi", "futex_wait_requeue_pi")
"""Functions that wait for the rt_mutex of a PI futex."""

# Functions of CONFIG_PREEMPT_RT, by the start of their names.
_BY_FUNCTION: tuple[tuple[str, LockTypeName, Mode | None], ...] = (
    ("rt_spin_", "rt_mutex", None),
    ("rt_read_", "rt_mutex", None),
    ("rt_write_", "rt_mutex", None),
    ("down_read", "rwsem", "read"),
    ("__down_read", "rwsem", "read"),
    ("down_write", "rwsem", "write"),
    ("__down_write", "rwsem", "write"),
    ("_down_write_nest_lock", "rwsem", "write"),
    ("rwbase_read_", "rwsem", "read"),
    ("__rwbase_read_", "rwsem", "read"),
    ("rwbase_write_", "rwsem", "write"),
    ("__ww_rt_mutex_lock", "ww_mutex", None),
    ("ww_mutex_lock", "ww_mutex", None),
    ("__ww_mutex_lock", "ww_mutex", None),
    ("mutex_lock", "mutex", None),
    ("__mutex_lock", "mutex", None),
    ("_mutex_lock", "mutex", None),
)
# Structures and their rt_mutex: "locking/rwsem: Add rtmutex based R/W semaphore
# implementation" and the like (in v5.15)
_RT_MUTEX_IN: dict[LockTypeName, tuple[str, str]] = {
    "rwsem": ("rw_semaphore", "rwbase.rtmutex"),
    "mutex": ("mutex", "rtmutex"),
    "ww_mutex": ("ww_mutex", "base.rtmutex"),
}
_WRITER_BIAS = 1 << 30
"""``WRITER_BIAS`` in ``rwbase_rt.readers``: a writer owns the lock. ``READER_BIAS``
makes the value negative: new readers may enter."""

_READERS = _WRITER_BIAS - 1


def find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find the lock that a task waits for; ``None`` if it waits for no such lock.

    PI futexes are not included.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
    """
    if case.is_in(*_PI_FUTEX) or not context.tasks.has("pi_blocked_on"):
        return None
    waiter = int(context.tasks["pi_blocked_on"][case.row])
    if not waiter:
        return _find_by_writer(context, case)
    task, rt_mutex = context.layout.members(waiter, "rt_mutex_waiter", "task", "lock")
    if task != case.address:
        return None
    type_, mode = _classify(context, case)
    address = rt_mutex - _offset(context, type_)
    lock = Lock(type_, address)
    waiters = queue(context, lock)
    if not kernel_locks(context).is_queued(type_, address, task):
        return None
    count = None if waiters is None else len(waiters)
    return KernelLock(type_, address, mode, count, owner(context, lock))


def is_made_of(context: LockContext, type_: LockTypeName) -> bool:
    """Return whether locks of a type are or contain an ``rt_mutex``."""
    return type_ == "rt_mutex" or (
        type_ in _RT_MUTEX_IN and context.layout.has(*_RT_MUTEX_IN[type_])
    )


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock, the most urgent first.

    The modes of a rwsem's waiters are not recorded. The exception is a writer that owns
    the rwsem and waits for readers to leave; it comes first.

    :return: ``None`` if the waiters cannot be read.

    :raises drgn.FaultError: if the lock cannot be read
    """
    queues, key = kernel_locks(context).queues, (lock.type, lock.address or 0)
    if key not in queues:
        queues[key] = _read_queue(context, lock)
    return queues[key]


def _read_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    rt_mutex = kernel_locks(context).rt_mutex(_rt_mutex(context, lock))
    if rt_mutex.waiters is None:
        return None
    waiters = [QueuedWaiter(task) for task in rt_mutex.waiters]
    if lock.type == "rwsem" and rt_mutex.owner and _waits_for_readers(context, lock):
        waiters.insert(0, QueuedWaiter(rt_mutex.owner, "write"))
    return waiters


def owner(context: LockContext, lock: Lock) -> int | None:
    """
    Return the owner of a lock; ``None`` if it has none.

    The owner of a rwsem is a writer, also one that still waits for readers to leave.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return kernel_locks(context).rt_mutex(_rt_mutex(context, lock)).owner or None


def readers(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers of a rwsem; ``None`` for other types.

    :raises drgn.FaultError: if the lock cannot be read
    """
    if lock.type != "rwsem":
        return None
    return _count(context, lock) & _READERS


def _count(context: LockContext, lock: Lock) -> int:
    address = lock.address or 0
    return context.layout.member(address, "rw_semaphore", "rwbase.readers")


def _waits_for_readers(context: LockContext, lock: Lock) -> bool:
    """Return whether the owner of a rwsem waits for its readers to leave."""
    return 0 < _count(context, lock) < _WRITER_BIAS


def _find_by_writer(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """Find the rwsem that a task owns, if it waits for its readers to leave."""
    if not is_made_of(context, "rwsem"):
        return None
    if _classify(context, case) != ("rwsem", "write"):
        return None
    layout = context.layout
    for address in islice(known_to(case.stack), MAX_WORDS):
        lock = Lock("rwsem", address)
        try:
            task = layout.member(address, "rw_semaphore", "rwbase.rtmutex.owner")
            if task & ~1 == case.address and _waits_for_readers(context, lock):
                waiters = queue(context, lock)
                count = None if waiters is None else len(waiters)
                return KernelLock("rwsem", address, "write", count, None)
        except UNREADABLE:
            continue
    return None


def _classify(
    context: LockContext, case: BlockedTask
) -> tuple[LockTypeName, Mode | None]:
    """Return the type and mode of a request, by the innermost known function."""
    for name, caller in pairwise([*case.names, ""]):
        # An rwlock has an rwbase_rt, too: its functions are shared with rwsems.
        if "rwbase_" in name and caller.startswith(("rt_read_", "rt_write_")):
            continue
        for prefix, type_, mode in _BY_FUNCTION:
            if name.startswith(prefix):
                return (
                    (type_, mode) if is_made_of(context, type_) else ("rt_mutex", None)
                )
    return "rt_mutex", None


def _offset(context: LockContext, type_: LockTypeName) -> int:
    """Return the offset of the rt_mutex in a lock."""
    return context.layout.offset(*_RT_MUTEX_IN[type_]) if type_ in _RT_MUTEX_IN else 0


def _rt_mutex(context: LockContext, lock: Lock) -> int:
    return (lock.address or 0) + _offset(context, lock.type)
