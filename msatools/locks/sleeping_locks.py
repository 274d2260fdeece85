# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's sleeping locks: requests, waiters, owners and readers.

Also the locks with an rt_mutex of PREEMPT_RT, per-CPU rwsems, per-VMA locks, and SRCU.
"""

from itertools import islice, pairwise

import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.percpu import read_percpu, sum_parts
from msatools.locks.context import (
    MAX_CANDIDATES,
    BlockedTask,
    LockContext,
    LockType,
    at_most_one,
)
from msatools.locks.kernel_locks import (
    LIST_LOCKS,
    MAX_WORDS,
    KernelLock,
    Record,
    holders_at,
    kernel_locks,
    known_to,
)
from msatools.locks.report import (
    Holder,
    Lock,
    LockTypeName,
    Mode,
    QueuedWaiter,
    Request,
)
from msatools.locks.struct_reader import Rings, Shape, may_be_task
from msatools.locks.wait_queues import wait_queues
from msatools.program.linear import KERNEL_HALF

# --- Locks with priority inheritance: rt_mutex, and locks that contain one.
#
# kernel/locking/rtmutex.c, rwbase_rt.c: task_struct.pi_blocked_on points at the waiter
# of a task, which points at the lock. With CONFIG_PREEMPT_RT mutexes, rwsems and
# spinlocks contain an rt_mutex.


_PI_FUTEX = ("futex_lock_pi", "futex_wait_requeue_pi")
"""Functions that wait for the rt_mutex of a PI futex."""

# Prefixes of functions of CONFIG_PREEMPT_RT, and the type and mode of their locks.
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


def rt_find(context: LockContext, case: BlockedTask) -> KernelLock | None:
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
        return _rt_find_by_writer(context, case)
    task, rt_mutex = context.layout.members(waiter, "rt_mutex_waiter", "task", "lock")
    if task != case.address:
        return None
    type_, mode = _classify(context, case)
    address = rt_mutex - _offset(context, type_)
    lock = Lock(type_, address)
    waiters = rt_queue(context, lock)
    if not kernel_locks(context).is_queued(type_, address, task):
        return None
    count = None if waiters is None else len(waiters)
    return KernelLock(type_, address, mode, count, rt_owner(context, lock))


def is_made_of(context: LockContext, type_: LockTypeName) -> bool:
    """Return whether locks of a type are or contain an ``rt_mutex``."""
    return type_ == "rt_mutex" or (
        type_ in _RT_MUTEX_IN and context.layout.has(*_RT_MUTEX_IN[type_])
    )


def rt_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock, the most urgent first.

    The modes of a rwsem's waiters are not recorded. The exception is a writer that owns
    the rwsem and waits for readers to leave; it comes first.

    :return: ``None`` if the waiters cannot be read.

    :raises drgn.FaultError: if the lock cannot be read
    """
    queues, key = kernel_locks(context).queues, (lock.type, lock.address or 0)
    if key not in queues:
        queues[key] = _rt_read_queue(context, lock)
    return queues[key]


def _rt_read_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    rt_mutex = kernel_locks(context).rt_mutex(_rt_mutex(context, lock))
    if rt_mutex.waiters is None:
        return None
    waiters = [QueuedWaiter(task) for task in rt_mutex.waiters]
    if lock.type == "rwsem" and rt_mutex.owner and _waits_for_readers(context, lock):
        waiters.insert(0, QueuedWaiter(rt_mutex.owner, "write"))
    return waiters


def rt_owner(context: LockContext, lock: Lock) -> int | None:
    """
    Return the owner of a lock; ``None`` if it has none.

    The owner of a rwsem is a writer, also one that still waits for readers to leave.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return kernel_locks(context).rt_mutex(_rt_mutex(context, lock)).owner or None


def rt_readers(context: LockContext, lock: Lock) -> int | None:
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


def _rt_find_by_writer(context: LockContext, case: BlockedTask) -> KernelLock | None:
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
                waiters = rt_queue(context, lock)
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


# --- Locks with per-CPU reader counts: struct percpu_rw_semaphore.
#
# kernel/locking/percpu-rwsem.c (since v5.7): the waiters are on a wait queue in the
# lock. A writer first sets block to keep others out, then waits for readers to leave.
# writer points at it only while it waits for them. The readers, and the writer once
# they have left, are not recorded.


_LOCK = "percpu_rw_semaphore"
_CUSTOM = 0b1100
"""``WQ_FLAG_CUSTOM``, which marks a reader: bit 2, or bit 3 before v6.6. Waiters on
this queue never set the other of these bits."""


def percpu_find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find the lock that a task waits for; ``None`` if it waits for no such lock.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
    """
    waits = any(name.startswith("percpu_rwsem_wait") for name in case.names)
    if not waits and not case.is_in("percpu_down_write", "__percpu_down_read"):
        return None
    found = _find_by_entry(context, case) or _percpu_find_by_writer(context, case)
    if found is None:
        return KernelLock("percpu_rwsem", None, None, None, None) if waits else None
    address, mode = found
    waiters = percpu_queue(context, address)
    count = None if waiters is None else len(waiters)
    owner = writer(context, address)
    # A writer that waits for readers does not wait for itself.
    owner = None if owner == case.address else owner
    return KernelLock("percpu_rwsem", address, mode, count, owner)


def percpu_queue(context: LockContext, address: int) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock: the writer that waits for readers, then the queue.

    :raises drgn.FaultError: if the lock cannot be read
    """
    queues = kernel_locks(context).queues
    if ("percpu_rwsem", address) not in queues:
        queues["percpu_rwsem", address] = _percpu_read_queue(context, address)
    return queues["percpu_rwsem", address]


def _percpu_read_queue(context: LockContext, address: int) -> list[QueuedWaiter] | None:
    shape = Shape.of(context.layout, "wait_queue_entry", "entry", "private", "flags")
    head = address + context.layout.offset(_LOCK, "waiters")
    head += context.layout.offset("wait_queue_head", "head")
    entries = Rings(context.layout, context.losses).walk(head, shape, context.limit)
    if entries is None:
        return None
    first = writer(context, address)
    ahead = [] if first is None else [QueuedWaiter(first, "write")]
    # On a long queue, wake-ups leave a bookmark entry without a task (before v6.6).
    return ahead + [
        QueuedWaiter(entry.task, _mode(entry.kind))
        for entry in entries
        if entry.task and may_be_task(entry.task)
    ]


def writer(context: LockContext, address: int) -> int | None:
    """
    Return the writer that keeps others out and waits for readers to leave.

    :return: Address of its ``struct task_struct``; ``None`` also if a writer owns the
        lock.
    :raises drgn.FaultError: if the lock cannot be read
    """
    task, block = context.layout.members(address, _LOCK, "writer.task", "block")
    return task if block and may_be_task(task) else None


def percpu_readers(context: LockContext, address: int) -> int | None:
    """
    Return the number of readers, summed over all CPUs.

    :return: ``None`` if the sum is negative: on a running kernel the CPUs are read one
        after the other.
    :raises drgn.FaultError: if the lock cannot be read
    """
    counts = context.layout.member(address, _LOCK, "read_count")
    total = int(
        sum_parts(context.reader, np.array([counts], np.uint64), context.losses)[0]
    )
    return total if total >= 0 else None


def _find_by_entry(context: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    wake_function = context.layout.symbol("percpu_rwsem_wake_function")
    flags = context.layout.offset("wait_queue_entry", "flags")
    for entry in case.stack.wait_entries():
        if entry.function != wake_function:
            continue
        found = wait_queues(context).head_of(entry)
        if found is not None:
            address = found[0] - context.layout.offset(_LOCK, "waiters")
            return address, _mode(case.stack.half(entry.address + flags) or 0)
    return None


def _percpu_find_by_writer(
    context: LockContext, case: BlockedTask
) -> tuple[int, Mode] | None:
    if not case.is_in("percpu_down_write"):
        return None
    for address in islice(known_to(case.stack), MAX_WORDS):
        try:
            if writer(context, address) == case.address:
                return address, "write"
        except UNREADABLE:
            continue
    return None


def _mode(flags: int) -> Mode:
    return "read" if flags & _CUSTOM else "write"


def _request(context: LockContext, case: BlockedTask) -> Request | None:
    found = percpu_find(context, case)
    return found.request if found else None


def _queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    return percpu_queue(context, lock.address or 0)


def _holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the writer that keeps others out while it waits for readers to leave."""
    return holders_at(context, writer(context, lock.address or 0), "exact")


def _readers(context: LockContext, lock: Lock) -> int | None:
    return percpu_readers(context, lock.address or 0)


PERCPU_RWSEM = LockType(
    names=frozenset({"percpu_rwsem"}),
    requests=at_most_one(_request),
    queue=_queue,
    holders=_holders,
    readers=_readers,
)


# --- The kernel's sleeping locks: requests, waiters, owners and readers.
#
# kernel/locking: mutexes (also those in a ww_mutex), rwsems, semaphores and rt_mutexes.
# A request may also be for a percpu_rwsem.


def sleeping_find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find the lock that a task waits for; ``None`` if it waits for no such lock.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
    """
    return (
        percpu_find(context, case)
        or rt_find(context, case)
        or kernel_locks(context).find(
            case.names, case.stack, context.limit, _record(context, case)
        )
    )


def sleeping_request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the request of a task; ``None`` also if its lock is not found.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
    """
    found = sleeping_find(context, case)
    return found.request if found else None


def sleeping_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock, in the kernel's order.

    A writer that owns the lock and waits for its readers to leave comes first.

    :return: ``None`` if there are too many to read, or they cannot be read.
    :raises drgn.FaultError: if the lock cannot be read
    """
    address = lock.address or 0
    if is_made_of(context, lock.type):
        return rt_queue(context, lock)
    return kernel_locks(context).queue(lock.type, address, context.limit)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the owners that a lock records.

    With CONFIG_PREEMPT_RT the owner of a rwsem may be the first of its queue: a writer
    that keeps others out while it waits for readers to leave.

    :raises drgn.FaultError: if the lock or its owner cannot be read
    """
    address = lock.address or 0
    if is_made_of(context, lock.type):
        return holders_at(context, rt_owner(context, lock), "exact")
    list_lock = LIST_LOCKS[lock.type]
    owner = list_lock.owner(context.layout, address)
    if owner is not None:
        return holders_at(context, owner, "exact")
    last = list_lock.last_owner(context.layout, address)
    # A last owner that waits for the lock has usually released it. is_queued() needs
    # the queue.
    sleeping_queue(context, lock)
    if last is None or kernel_locks(context).is_queued(lock.type, address, last):
        return []
    return holders_at(context, last, "likely")


def sleeping_readers(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers of a lock; ``None`` if it does not count them.

    :raises drgn.FaultError: if the lock cannot be read
    """
    if is_made_of(context, lock.type):
        return rt_readers(context, lock)
    return LIST_LOCKS[lock.type].readers(context.layout, lock.address or 0)


def _record(context: LockContext, case: BlockedTask) -> Record:
    """Return the members of a task that point at the lock it waits for."""
    members = {
        name: int(context.tasks[name][case.row])
        for name in ("blocker", "blocked_on")
        if context.tasks.has(name)
    }
    return Record(**members)


SLEEPING_LOCK = LockType(
    names=frozenset({*LIST_LOCKS, "rt_mutex"}),
    requests=at_most_one(sleeping_request),
    queue=sleeping_queue,
    holders=holders,
    readers=sleeping_readers,
)


# --- Per-VMA locks that are a reference count in the mapping itself.
#
# mm/mmap_lock.c: "mm: replace vm_lock and detached flag with a reference count" (in
# v6.15). A writer, which has the mmap_lock, sets a bit of vm_refcnt to keep new readers
# out, and sleeps until readers that handle a fault in the mapping have left. They are
# not recorded: msatools.locks.ownership finds them.


_VMA_WAITS = (
    *("__vma_start_exclude_readers", "__vma_enter_locked", "__vma_start_write"),
    *("vma_mark_detached", "__vma_exclude_readers_for_detach"),
)
"""Functions in which a writer waits, of all kernel versions; some may be inlined."""

_EXCLUDES = 0x4000_0000
"""Bit of ``vm_refcnt``: ``VM_REFCNT_EXCLUDE_READERS_FLAG``, earlier named
``VMA_LOCK_OFFSET``."""


def vma_request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the mapping whose readers a task waits for.

    :raises MissingError: if the types are unknown
    """
    layout = context.layout
    if not case.is_in(*_VMA_WAITS) or not layout.has("vm_area_struct", "vm_refcnt"):
        return None
    for address in islice(case.stack.data_pointers(), MAX_CANDIDATES):
        try:
            mm, count = layout.members(address, "vm_area_struct", "vm_mm", "vm_refcnt")
        except UNREADABLE:
            continue
        if mm == case.mm and count & _EXCLUDES:
            return Request(Lock("vma", address), "write")
    return None


VMA_LOCK = LockType(names=frozenset({"vma"}), requests=at_most_one(vma_request))


# --- Waits for the readers of a struct srcu_struct (kernel/rcu/srcutree.c).
#
# A waiter has a callback on its stack, in the list of a CPU's struct srcu_data, which
# points back at the srcu_struct. The srcu_struct counts its readers, but does not
# record them: msatools.locks.ownership searches stacks for its address, and, if it is a
# variable, the code of functions there.


_SRCU_WAITS = ("__synchronize_srcu", "synchronize_srcu", "synchronize_srcu_expedited")

_COUNTS = ("srcu_locks", "srcu_unlocks"), ("srcu_lock_count", "srcu_unlock_count")
"""Members that count begun and ended readers: those of ``struct srcu_ctr`` (since
v6.15), and those of ``struct srcu_data`` before."""

_MAX_CALLBACKS = 4096
"""Maximum number of callbacks of one CPU to read."""

_MAX_WORDS = 256
"""Maximum number of words of a stack to try."""

_MASK = (1 << 64) - 1


def srcu_request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``srcu_struct`` whose readers a task waits for.

    :raises MissingError: if the types are unknown
    """
    if not case.is_in(*_SRCU_WAITS) or not context.layout.has("srcu_data", "ssp"):
        return None
    # The srcu_struct may be a variable of the kernel or of a module.
    words = [
        word
        for word in dict.fromkeys(case.stack.words.tolist())
        if word >= KERNEL_HALF and not word % 8 and word not in case.stack
    ]
    known = [each for each in words[:_MAX_WORDS] if _is_srcu(context, each)]
    if len(known) > 1 or not context.live:
        # Pointers to others are left over from earlier calls: look for the callback.
        known = [address for address in known if _queues(context, case, address)]
    return Request(Lock("srcu", known[0]), "write") if len(known) == 1 else None


def srcu_readers(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers that are waited for; ``None`` if that is unknown.

    Of two indexes, one counts new readers. The readers at the other began before, and
    have to end.

    :raises drgn.FaultError: if it cannot be read
    """
    layout, address = context.layout, lock.address or 0
    parts = _parts(context, address)
    if layout.has("srcu_data", "srcu_ctrs"):
        first = layout.member(address, "srcu_struct", "sda")
        first += layout.offset("srcu_data", "srcu_ctrs")
        now = layout.member(address, "srcu_struct", "srcu_ctrp") != first
        names = [f"srcu_ctrs[{int(not now)}].{name}" for name in _COUNTS[0]]
    else:
        now = bool(layout.member(address, "srcu_struct", "srcu_idx") & 1)
        names = [f"{name}[{int(not now)}]" for name in _COUNTS[1]]
    pairs = (layout.members(part, "srcu_data", *names) for part in parts)
    total = sum(begun - ended for begun, ended in pairs) & _MASK
    # On a running kernel the counters change while they are added up.
    return total if total < 1 << 32 else None


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe a wait for SRCU readers, for when none of them was found."""
    count = srcu_readers(context, request.lock)
    if count is None:
        return "SRCU grace period"
    if not count:
        return "SRCU grace period: no reader holds it up; its work has not run yet"
    return f"SRCU grace period: {count:,} reader{'s' if count > 1 else ''}, not found"


def _parts(context: LockContext, address: int) -> list[int]:
    """Return the addresses of the ``struct srcu_data`` of all CPUs."""
    pointer = context.layout.member(address, "srcu_struct", "sda")
    parts: list[int] = read_percpu(context.reader, context.losses).at(pointer).tolist()
    return parts


def _is_srcu(context: LockContext, address: int) -> bool:
    """Return whether the data of the first CPU points back at a ``srcu_struct``."""
    try:
        parts = _parts(context, address)
        return (
            bool(parts)
            and parts[0] >= KERNEL_HALF
            and (context.layout.member(parts[0], "srcu_data", "ssp") == address)
        )
    except UNREADABLE:
        return False


def _queues(context: LockContext, case: BlockedTask, address: int) -> bool:
    """Return whether a task's callback is in the lists of a ``srcu_struct``."""
    layout, simple = context.layout, wait_queues(context).simple(case.stack)
    if simple is None:
        return False
    queue = layout.offset("completion", "wait.task_list")
    own = simple.head - queue - layout.offset("rcu_synchronize", "completion")
    try:
        for data in _parts(context, address):
            head = layout.member(data, "srcu_data", "srcu_cblist.head")
            for _ in range(_MAX_CALLBACKS):
                if head == own:
                    return True
                if head < KERNEL_HALF:
                    break
                head = layout.member(head, "callback_head", "next")
    except UNREADABLE:
        return False
    return False


SRCU = LockType(
    names=frozenset({"srcu"}),
    requests=at_most_one(srcu_request),
    readers=srcu_readers,
    what=what,
)
