# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes: requests, waiters, owners and readers.

The kernel records the waiters of each futex, but the owner only of a PI futex. Other
owners are in the memory of the process, next to the futex: see
:mod:`msatools.locks.user.futexcontent`.
"""

from collections.abc import Iterable

import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import (
    Holder,
    Lock,
    LockTypeName,
    QueuedWaiter,
    Request,
)
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.lock_type import LockType
from msatools.locks.sleeping.kernellocks import kernel_locks
from msatools.locks.user.futexcontent import FutexContent, content_of
from msatools.locks.user.futexes import Waiter, futex_waiters, futexes
from msatools.locks.user.futexwaits import (
    requested_futexes,
    waiters_of,
    waiters_on,
)
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.syscalls import read_syscalls

PARKED = "parked on a futex of its own stack: nobody wakes it"

_PARKED_BYTES = 256
"""Bytes above the stack pointer that may be local variables of the function."""

# FUTEX_CMD_MASK: the operation without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
_COMMAND = 0x7F
_WAIT_BITSET = 9
_ALL_BITS = 0xFFFF_FFFF


def requests(context: LockContext, case: BlockedTask) -> list[Request]:
    """
    Return the futexes that a task waits on.

    :return: One; several for a ``futex_waitv()``; empty if not found.
    """
    waiters, _ = waiters_of(context, case)
    return _requests(context, waiters)


def futex_requests(context: LockContext, task: int) -> list[Request]:
    """Return the futexes that a task waits on, by the hash tables.

    The first call reads all waiters; later calls are cheap.

    :param task: Address of a ``struct task_struct``.
    """
    by_task, _ = futex_waiters(context)
    waiters = sorted(by_task.get(task, ()), key=lambda waiter: waiter.address)
    return _requests(context, waiters)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters on a futex, the next to be woken up first.

    Waiters of a PI futex are in the order of its ``rt_mutex``. The waiter of a
    ``futex_waitv()`` is in the queue of each of its futexes.
    """
    waiters = waiters_on(context, lock)
    if not waiters:
        return None
    mode = None if lock.type == "pi_futex" else content_of(context, waiters[0]).mode
    tasks = list(dict.fromkeys(waiter.task for waiter in waiters))
    if lock.type == "pi_futex":
        tasks = _by_urgency(context, waiters[0].pi_state, tasks)
    return [QueuedWaiter(task, mode) for task in tasks]


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the owner of a futex.

    It is ``exact`` for a PI futex, whose owner the kernel records, and for a thread
    whose exit is waited for. Other owners are ``likely``: the C library recorded them.
    """
    waiter = requested_futexes(context).waiters.get((lock.type, lock.key))
    if waiter is None:
        return []
    if lock.type == "pi_futex":
        return _pi_owner(context, waiter)
    content = content_of(context, waiter)
    if content.owner is None:
        return []
    return [Holder(content.owner, content.confidence)]


def readers(context: LockContext, lock: Lock) -> int | None:
    """Return the number of readers of a futex; ``None`` if it does not count them."""
    waiter = requested_futexes(context).waiters.get((lock.type, lock.key))
    if waiter is None or lock.type == "pi_futex":
        return None
    return content_of(context, waiter).readers


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe a futex without an owner: see :func:`recorded` and :func:`parked`."""
    known = recorded(context, request)
    return known or parked(context, case.address, request)


def recorded(context: LockContext, request: Request) -> str | None:
    """Describe a futex by the memory of the process; ``None`` if there is no need."""
    requested = requested_futexes(context).waiters
    waiter = requested.get((request.lock.type, request.lock.key))
    if waiter is None or waiter.pi_state:
        return None
    return content_of(context, waiter).what


def parked(context: LockContext, task: int, request: Request) -> str | None:
    """
    Return :data:`PARKED` if a task waits forever on a futex on its own stack.

    glibc does this if the kernel refuses a lock of a PI mutex, as it would close a
    cycle (EDEADLK). The futex is a local variable of the function that waits. There is
    no other trace, so the arguments of the call have to match, and the task has to own
    a PI futex that others wait for.

    :param task: Address of its ``struct task_struct``, one of ``context.tasks``.
    :return: ``None`` if it is not parked, or if that cannot be determined.
    """
    lock = request.lock
    if lock.type != "futex" or lock.address is None:
        return None
    waiters = waiters_on(context, lock)
    if len(waiters) != 1 or not _owns_pi_futex(context, task):
        return None
    row = context.tasks.only(context.tasks["address"] == np.uint64(task))
    if not len(row):
        return None
    prog = context.reader.prog
    call = read_syscalls(context.reader, row, stack_bytes(prog), LossLog())
    if not call.known[0] or call.compat[0] or call.name(0) != "futex":
        return None
    address, operation, value, timeout, _, bits = call.arguments[0].tolist()
    above = address - int(call.sp[0])
    plain = operation & _COMMAND == _WAIT_BITSET and bits & _ALL_BITS == _ALL_BITS
    # value and bits are u32: the high half of a register may have any value.
    fits = plain and not value & _ALL_BITS and not timeout
    if fits and address == lock.address and 0 <= above < _PARKED_BYTES:
        return PARKED
    return None


def _requests(context: LockContext, waiters: Iterable[Waiter]) -> list[Request]:
    """Return the requests of waiters without duplicates.

    On a running kernel, a task may appear in the queues of both futexes of a condition
    variable, if it waits again before all queues are read.
    """
    return list(dict.fromkeys(_request(context, waiter) for waiter in waiters))


def _request(context: LockContext, waiter: Waiter) -> Request:
    known = _known_requests(context)
    type_: LockTypeName = "pi_futex" if waiter.pi_state else "futex"
    request = known.get((type_, waiter.key))
    if request is None:
        requested = requested_futexes(context)
        content = FutexContent() if waiter.pi_state else content_of(context, waiter)
        key = waiter.key
        if content.condition is not None:
            key = waiter.key.moved(-content.condition)
            requested.words[key] = waiter.key.pair()
        requested.waiters[type_, key] = waiter
        request = Request(Lock(type_, key.address, key), content.mode)
        known[type_, waiter.key] = request
    return request


@per_context
def _known_requests(context: LockContext) -> dict[tuple[str, FutexKey], Request]:
    """Return the requests of a context by type and key of the futex."""
    return {}


def _by_urgency(context: LockContext, pi_state: int, tasks: list[int]) -> list[int]:
    try:
        mutex = pi_state + context.layout.offset("futex_pi_state", "pi_mutex")
        order = kernel_locks(context).rt_mutex(mutex).waiters or ()
    except UNREADABLE as error:
        context.losses.lose(Loss.WAITERS, f"cannot read the queue of a futex: {error}")
        order = ()
    queued = set(tasks)
    first = [task for task in order if task in queued]
    # Some tasks may not be in the rt_mutex yet, or not any more.
    return list(dict.fromkeys([*first, *tasks]))


def _pi_owner(context: LockContext, waiter: Waiter) -> list[Holder]:
    """Return the owner of a PI futex.

    It is ``likely`` if it differs from that of the rt_mutex: the futex is being handed
    over.
    """
    layout, state = context.layout, waiter.pi_state
    owner, rt_owner = layout.members(state, "futex_pi_state", "owner", "pi_mutex.owner")
    key = futexes(context).key(state + layout.offset("futex_pi_state", "key"))
    # The state may have been freed, and reused for another futex.
    if key != waiter.key or owner < KERNEL_HALF or not context.pid(owner):
        return []
    agree = rt_owner & ~1 in (0, owner)
    return [Holder(owner, "exact" if agree else "likely")]


def _owns_pi_futex(context: LockContext, task: int) -> bool:
    """Return whether a task owns a PI futex that others wait for."""
    # "futex: Move futex related task_struct data into a struct" (in v7.1)
    head = task + context.layout.offset(
        "task_struct", "futex.pi_state_list", "pi_state_list"
    )
    try:
        return context.layout.word(head) not in (0, head)
    except UNREADABLE:
        return False


FUTEX = LockType(
    names=frozenset({"futex", "pi_futex"}),
    requests=requests,
    queue=queue,
    holders=holders,
    readers=readers,
    what=what,
    task_class=TaskClass.LCK,
)
