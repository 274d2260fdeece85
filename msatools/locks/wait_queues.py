# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait queues and their waiters, and the events that tasks wait for on them.

Events are changes of bits of pages and other words, changes of variables, and wake-ups
by a subsystem. Unlike a lock, an event has no owner.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.reader import column
from msatools.kernel.report import Loss, LossLog
from msatools.locks.context import (
    BlockedTask,
    LockContext,
    LockType,
    at_most_one,
    per_context,
)
from msatools.locks.rcu import awaited_expedited, expedited_queue
from msatools.locks.report import Holder, Lock, QueuedWaiter, Request
from msatools.locks.storage import Inode
from msatools.locks.struct_reader import (
    Entry,
    Layout,
    OwnStack,
    Rings,
    Shape,
    WaitEntry,
)
from msatools.locks.work import writeback, writeback_text
from msatools.locks.workers import kernel_threads
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type
from msatools.tasks.states import loads
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import stack_bytes
from msatools.tasks.waits import TaskClass

# --- Finds wait queues and their waiters (include/linux/wait.h, swait.h).
#
# A waiter is on the stack of its task. It is a node of a ring, together with all other
# waiters and the list head of the queue. Only waiters have a pointer to a task
# (swait.h) or to a wake function (wait.h) next to the node.


_LOW_32 = (1 << 32) - 1

_TRIES = 3
"""Maximum number of walks of a ring that changes while it is read."""

_MANY = 256
"""If an inconsistent ring has more nodes than this, it is not followed again from any
of them."""

_Test = Callable[[Entry], bool]


class Queue(Struct, frozen=True):
    """A wait queue."""

    head: int
    """Address of the list head."""

    waiters: tuple[Entry, ...] | None
    """The waiters in order; ``None`` if there are too many to read."""


class QueueKey(Struct, frozen=True):
    """Offsets, in a waiter on a hashed bucket, of the key that it waits for."""

    wait: int
    """Offset of the ``struct wait_queue_entry``."""

    of: int
    """Offset of a pointer to the word or folio that has the bit."""

    bit: int
    """Offset of the number of the bit, an int."""


class WaitQueues:
    """Finds wait queues; follows each once."""

    def __init__(self, layout: Layout, losses: LossLog, limit: int) -> None:
        """
        :param limit: Maximum number of waiters to read of one queue.
        """
        self._layout = layout
        self._losses = losses
        self._limit = limit
        self._rings = Rings(layout, losses)
        self._queues: dict[int, Queue | None] = {}
        """Maps each node of a ring to its queue."""

        self._stacks: dict[int, int] = {}
        """Maps a task to the start of its stack."""

        self.buckets: dict[Lock, int] = {}
        """Maps a lock whose queue is a hashed bucket to the list head of the bucket."""

        self.lookups: set[Lock] = set()
        """Locks whose waiters are woken at the end of a lookup of a dentry."""

    def of_entry(self, entry: WaitEntry) -> Queue | None:
        """Find the queue of a waiter on a stack; ``None`` if it is on no queue."""
        node = entry.address + self._entries.node
        if not self._is_queued(entry):
            return None
        return self._queue(node, self._entries, self._is_entry)

    def _is_queued(self, entry: WaitEntry) -> bool:
        node = entry.address + self._entries.node
        return node in self._queues or self._rings.is_linked(
            node, entry.next, entry.previous
        )

    def of_head(self, head: int) -> Queue | None:
        """Read a wait queue by its list head; ``None`` if it cannot be read."""
        return self._queue(head, self._entries, self._is_entry)

    def of_simple_head(self, head: int) -> Queue | None:
        """Read a simple wait queue by its list head; ``None`` if it cannot be read."""
        return self._queue(head, self._simple, self._is_simple)

    def simple(self, stack: OwnStack) -> Queue | None:
        """Find the simple wait queue (``struct swait_queue_head``) of a task."""
        for start in stack.own("swait_queue", "task"):
            node = start + self._simple.node
            following, previous = stack.word(node), stack.word(node + 8)
            # A node that is on no list points at itself.
            if following is None or previous is None or following == node:
                continue
            if self._rings.is_linked(node, following, previous):
                queue = self._queue(node, self._simple, self._is_simple)
                if queue is not None:
                    return queue
        return None

    def innermost(self, stack: OwnStack) -> tuple[WaitEntry, Queue] | None:
        """Find the innermost waiter on a stack that is queued, and its queue.

        :return: ``None`` also if that queue is not found; outer waiters are not tried.
        """
        for entry in stack.wait_entries():
            if self._is_queued(entry):
                queue = self.of_entry(entry)
                return None if queue is None else (entry, queue)
        return None

    def head_of(self, entry: WaitEntry) -> tuple[int, int | None] | None:
        """
        Find the ``struct wait_queue_head`` that a waiter is on.

        :return: Its address, and the number of waiters, which is ``None`` if there are
            too many to read. ``None`` if not found.
        """
        queue = self.of_entry(entry)
        if queue is None:
            return None
        address = queue.head - self._layout.offset("wait_queue_head", "head")
        return address, None if queue.waiters is None else len(queue.waiters)

    def tasks(self, waiters: Iterable[Entry]) -> list[QueuedWaiter]:
        """Return the tasks of waiters, in order.

        The ``private`` of an entry may point at a task, or at data of a poll. It is a
        task if the entry is on its stack.
        """
        return [
            QueuedWaiter(waiter.task)
            for waiter in waiters
            if waiter.task is not None and self.is_on_stack(waiter.node, waiter.task)
        ]

    def is_on_stack(self, address: int, task: int) -> bool:
        """Return whether an address is on the stack of a task.

        :param task: What may be the address of a ``struct task_struct``.
        """
        if task not in self._stacks:
            try:
                stack = self._layout.member(task, "task_struct", "stack")
            except UNREADABLE:
                stack = 0
            self._stacks[task] = stack
        stack = self._stacks[task]
        return stack >= KERNEL_HALF and stack <= address < stack + self.stack_bytes

    def bucket(
        self, lock: Lock, key: QueueKey, functions: Iterable[int | None]
    ) -> list[QueuedWaiter] | None:
        """
        Return the waiters of a lock whose wait queue is a hash bucket, in order.

        Waiters of other locks in the bucket are left out.

        :param key: Offsets of the word and bit in a waiter of such a lock.
        :param functions: Wake functions of waiters that have such a key.
        :return: ``None`` if the bucket is unknown, too long, or cannot be read.
        """
        head = self.buckets.get(lock)
        queue = self.of_head(head) if head else None
        if queue is None or queue.waiters is None:
            return None
        kinds = {function & _LOW_32 for function in functions if function}
        waiters = [waiter for waiter in queue.waiters if waiter.kind in kinds]
        nodes = np.array([waiter.node for waiter in waiters], np.uint64)
        starts = nodes - np.uint64(key.wait + self._entries.node)
        reader = self._layout.reader
        records, readable = reader.read_records(starts, max(key.of + 8, key.bit + 4))
        bit = lock.key if isinstance(lock.key, int) else 0
        same = readable & (column(records, key.of) == np.uint64(lock.address or 0))
        same &= column(records, key.bit, 4) == np.uint64(bit & _LOW_32)
        return self.tasks(waiters[row] for row in np.flatnonzero(same).tolist())

    @cached_property
    def stack_bytes(self) -> int:
        """The size of a kernel stack."""
        return stack_bytes(self._layout.reader.prog)

    @cached_property
    def _entries(self) -> Shape:
        return Shape.of(self._layout, "wait_queue_entry", "entry", "private", "func")

    @cached_property
    def _simple(self) -> Shape:
        return Shape.of(self._layout, "swait_queue", "task_list", "task")

    def _is_entry(self, entry: Entry) -> bool:
        return self._layout.is_low_code(entry.kind)

    def _is_simple(self, entry: Entry) -> bool:
        task = entry.task or 0
        return task >= KERNEL_HALF and self.is_on_stack(entry.node, task)

    def _queue(self, node: int, shape: Shape, is_waiter: _Test) -> Queue | None:
        if node not in self._queues:
            queue, nodes = self._find(node, shape, is_waiter)
            self._queues.update(dict.fromkeys(nodes, queue))
        return self._queues[node]

    def _find(
        self, node: int, shape: Shape, is_waiter: _Test
    ) -> tuple[Queue | None, set[int]]:
        """Follow a ring; return its queue, and the nodes to store the queue for."""
        for _ in range(_TRIES):
            ring = self._rings.follow(node, shape, self._limit)
            if ring.whole or ring.cut:
                break
        else:
            self._losses.lose(Loss.WAITERS, "cannot read a queue of waiters")
            return None, ring.nodes if len(ring.entries) > _MANY else {node}
        heads = [entry.node for entry in ring.entries if not is_waiter(entry)]
        if ring.whole and len(heads) == 1:
            return Queue(heads[0], tuple(ring.after(heads[0]))), ring.nodes
        if len(heads) > 1:
            # A wait queue has one node that is no waiter: this ring is something else.
            return None, {node}
        if heads:
            self._rings.note_cut(self._limit)
            return Queue(heads[0], None), {node}
        if ring.cut:
            self._losses.note(
                "lock-not-found",
                f"more than {self._limit} wait for one lock, which is left out; a "
                "report of all tasks finds it",
            )
        return None, {node}


@per_context
def wait_queues(context: LockContext) -> WaitQueues:
    """Return the finder of wait queues of a context."""
    return WaitQueues(context.layout, context.losses, context.limit)


# --- Recognizes tasks that wait for an event, which unlike a lock has no owner.


_CLASSES = frozenset(
    {
        *(TaskClass.KLK, TaskClass.DSK, TaskClass.FLT, TaskClass.SWP, TaskClass.RCL),
        TaskClass.OTH,
    }
)
_WAYS = ("__schedule", "schedule", "io_schedule", "preempt_schedule", "__switch_to")
_IN_LOCKS = (
    *("__mutex_lock", "mutex_lock", "__ww_mutex_lock", "ww_mutex_lock", "__down"),
    *("down_", "rwsem_down_", "percpu_rwsem_wait", "percpu_down_write", "ldsem_down_"),
    *("__percpu_down_read", "rt_mutex_", "__rt_mutex_", "rtlock_", "rt_spin_lock"),
    *("rt_read_lock", "rt_write_lock", "rwbase_", "__rwbase_", "futex_", "__futex_"),
)
"""A task that sleeps in one of these functions waits for a lock, even if it is also on
a wait queue."""

COMPLETION_WAITS = ("wait_for_completion", "__wait_for_common", "wait_for_common")
_COMPLETION_WAYS = (*_WAYS, "do_wait_for_common", "blk_wait_io", *COMPLETION_WAITS)
"""Functions in which tasks wait; the caller identifies the event."""

# Descriptions of events, by the innermost function outside of _COMPLETION_WAYS.
_BY_CALLER = {
    name: text
    for text, names in {
        "RCU grace period": """
            __wait_rcu_gp synchronize_rcu synchronize_rcu_normal rcu_sync_enter
            synchronize_rcu_expedited exp_funnel_lock synchronize_rcu_mult
            synchronize_rcu_tasks synchronize_rcu_tasks_generic
            synchronize_rcu_tasks_rude synchronize_rcu_tasks_trace
        """,
        "SRCU grace period": "__synchronize_srcu synchronize_srcu",
        "RCU callbacks": """
            rcu_barrier srcu_barrier rcu_barrier_tasks rcu_barrier_tasks_generic
            rcu_barrier_tasks_rude rcu_barrier_tasks_trace
        """,
        "module load": """
            load_module idempotent_init_module idempotent_wait_for_completion
            module_patient_check_exists add_unformed_module
        """,
        "CPU stopper": """
            stop_one_cpu stop_two_cpus __stop_cpus stop_cpus stop_machine_cpuslocked
            affine_move_task
        """,
        "CPU hotplug": "cpuhp_kick_ap cpuhp_kick_ap_work wait_for_ap_thread",
        "user-mode helper": "call_usermodehelper_exec call_usermodehelper",
        "block I/O": "submit_bio_wait blk_execute_rq bio_await bio_await_chain",
        "look-up of a name": "d_alloc_parallel d_wait_lookup",
        "log of XFS": """
            xlog_wait_on_iclog xlog_wait_on_iclog_lsn xlog_state_get_iclog_space
            xlog_cil_force_seq xlog_cil_push_work xlog_grant_head_wait
        """,
        "commit of btrfs": "wait_for_commit wait_current_trans",
        "log of btrfs": "btrfs_sync_log wait_log_commit wait_for_writer",
        "core dump": "coredump_wait do_coredump vfs_coredump coredump_task_exit",
    }.items()
    for name in names.split()
}


def is_completion(case: BlockedTask) -> bool:
    """Return whether a task waits for a completion."""
    return any(name.startswith(COMPLETION_WAITS) for name in case.names)


def is_event(context: LockContext, case: BlockedTask) -> bool:
    """Return whether a task may wait for an event, and does not wait for a lock.

    Idle waits, such as that of a worker for work, do not count.
    """
    return _is_asked_for(context, case) and not _is_in_lock(case)


def wait_of(context: LockContext, case: BlockedTask) -> tuple[WaitEntry, Queue] | None:
    """
    Find the wait queue on which a task waits for an event.

    :return: ``None`` if it is on no wait queue, or waits for a completion.
    :raises drgn.FaultError: if the queue cannot be read
    """
    if is_completion(case) or not is_event(context, case):
        return None
    return wait_queues(context).innermost(case.stack)


def by_caller(case: BlockedTask) -> str | None:
    """Describe what a task waits for, by the function that waits."""
    return _BY_CALLER.get(case.innermost(_COMPLETION_WAYS))


def _is_asked_for(context: LockContext, case: BlockedTask) -> bool:
    if case.task_class is TaskClass.WAI:
        # In this class only waits for a completion are events, such as in vfork();
        # wait_targets.child() describes wait4() and the like.
        return is_completion(case)
    if case.task_class in _CLASSES:
        return True
    row = np.array([case.row], np.intp)
    return bool(loads(TaskTable(context.tasks.records[row], context.tasks.columns))[0])


def _is_in_lock(case: BlockedTask) -> bool:
    sleeper = next((name for name in case.names if not name.startswith(_WAYS)), "")
    return sleeper.startswith(_IN_LOCKS)


# --- Waits for a bit of a page, such as locked or writeback (mm/filemap.c).
#
# The kernel does not record the task that will change the bit.


_PAGE = ("folio", "page")
"""Members of ``struct wait_page_queue``: "mm/filemap: Add folio_wait_bit()" and the
like (in v5.16)."""


def folio_of(context: LockContext, case: BlockedTask, entry: WaitEntry) -> int | None:
    """Return the page that an entry on a stack waits for; ``None`` if for none."""
    if entry.function != context.layout.symbol("wake_page_function"):
        return None
    key = _folio_key(context)
    return case.stack.word(entry.address - key.wait + key.of)


def folio_request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the bit of a page that a task waits for.

    The address of the lock is that of the ``struct folio``, its key the number of the
    bit.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    queued = wait_of(context, case)
    if queued is None:
        return None
    entry, bucket = queued
    folio = folio_of(context, case, entry)
    if not folio:
        return None
    key = _folio_key(context)
    bit = case.stack.half(entry.address - key.wait + key.bit)
    if bit is None:
        return None
    lock = Lock("folio", folio, bit)
    wait_queues(context).buckets[lock] = bucket.head
    return Request(lock)


def folio_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters for a bit of a page that :func:`folio_request` found, in order.

    The queue is a hashed bucket: waiters for other pages are left out.
    """
    wake_function = context.layout.symbol("wake_page_function")
    return wait_queues(context).bucket(lock, _folio_key(context), [wake_function])


def folio_what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Return the name of the bit, as ``locked``; ``None`` if unknown."""
    try:
        flags = find_type(context.reader.prog, "enum pageflags").enumerators
    except MissingError:
        return None
    # The first of several names is the generic one.
    names = [flag.name for flag in flags or () if flag.value == request.lock.key]
    return names[0].removeprefix("PG_") if names else None


def _folio_key(context: LockContext) -> QueueKey:
    offset, entry = context.layout.offset, "wait_page_queue"
    return QueueKey(
        wait=offset(entry, "wait"),
        of=offset(entry, *_PAGE),
        bit=offset(entry, "bit_nr"),
    )


FOLIO = LockType(
    names=frozenset({"folio"}),
    requests=at_most_one(folio_request),
    queue=folio_queue,
    what=folio_what,
)


# --- Waits for a bit of a word, or for a variable (kernel/sched/wait_bit.c).
#
# The kernel does not record the task that will change it.


_VARIABLE = -1
"""Value of :attr:`BitWait.bit` for a variable."""

_STATE_BITS = 3
"""Number of bits of an inode's state that may be waited for; they are the lowest."""

_VARIABLE_U32 = (1 << 32) - 1


class BitWait(Struct, frozen=True):
    """The bit of a word, or the variable, that a waiter waits for."""

    word: int
    """Address of the word or the variable, which may be a byte of a larger member."""

    bit: int
    """Number of the bit; -1 for a variable."""

    @property
    def variable(self) -> bool:
        """Whether this is a wait for a variable."""
        return self.bit == _VARIABLE


def bit_of(context: LockContext, case: BlockedTask, entry: WaitEntry) -> BitWait | None:
    """Return the bit that an entry on a stack waits for; ``None`` if for none."""
    if entry.function not in _wake_functions(context):
        return None
    key = _bit_key(context)
    start = entry.address - key.wait
    word, bit = case.stack.word(start + key.of), case.stack.half(start + key.bit)
    if word is None or bit is None or word < KERNEL_HALF:
        return None
    return BitWait(word, _VARIABLE if bit == _VARIABLE_U32 else bit)


def inode_of(context: LockContext, wait: BitWait) -> Inode | None:
    """
    Return the inode whose state a task waits for; ``None`` if the word is not a state.

    :raises drgn.FaultError: if the inode cannot be read
    """
    # "inode: port __I_NEW to var event" and the like (in v6.12): each bit of the state
    # is a variable. Its address is that of the byte with the number of the bit.
    bits = range(_STATE_BITS) if wait.variable else range(1)
    state = context.layout.offset("inode", "i_state")
    for bit in bits:
        inode = wait.word - bit - state
        if inode % 8 == 0 and context.storage.is_inode(inode):
            return context.storage.inode(inode)
    return None


def bit_request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the bit that a task waits for.

    The address of the lock is that of the word, its key the number of the bit.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    queued = wait_of(context, case)
    if queued is None:
        return None
    entry, bucket = queued
    wait = bit_of(context, case, entry)
    if wait is None:
        return None
    lock = Lock("bit_wait", wait.word, wait.bit)
    wait_queues(context).buckets[lock] = bucket.head
    return Request(lock)


def bit_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters for a bit that :func:`bit_request` found, in order.

    The queue is a hashed bucket: waiters for other words are left out.
    """
    return wait_queues(context).bucket(
        lock, _bit_key(context), _wake_functions(context)
    )


def _bit_key(context: LockContext) -> QueueKey:
    offset, entry = context.layout.offset, "wait_bit_queue_entry"
    return QueueKey(
        wait=offset(entry, "wq_entry"),
        of=offset(entry, "key.flags"),
        bit=offset(entry, "key.bit_nr"),
    )


def _wake_functions(context: LockContext) -> list[int]:
    names = ("wake_bit_function", "var_wake_function")
    functions = (context.layout.symbol(name) for name in names)
    return [function for function in functions if function is not None]


BIT_WAIT = LockType(
    names=frozenset({"bit_wait"}), requests=at_most_one(bit_request), queue=bit_queue
)


# --- Wait queues that are part of a subsystem's structure (include/linux/wait.h).


_OTHERS = (
    "wake_page_function",
    "wake_bit_function",
    "var_wake_function",
    "percpu_rwsem_wake_function",
    "child_wait_callback",
    "pollwake",
    "ep_autoremove_wake_function",
)
"""Wake functions of waiters for other lock types, or for no lock."""

_LOOKUPS = ("d_alloc_parallel", "d_wait_lookup")

_EXPEDITED_WAITS = (
    *("synchronize_rcu_expedited_wait_once", "synchronize_rcu_expedited_wait"),
    "synchronize_sched_expedited_wait",
)
"""Functions in which a worker waits that runs an expedited grace period of RCU."""


def wait_queue_request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``struct wait_queue_head`` that a task waits on.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    if case.is_in(*_EXPEDITED_WAITS):
        queue_head = expedited_queue(context)
        return None if queue_head is None else Request(Lock("wait_queue", queue_head))
    queued = wait_of(context, case)
    if queued is None:
        return None
    entry, queue = queued
    if entry.function in {context.layout.symbol(name) for name in _OTHERS}:
        return None
    head = context.layout.offset("wait_queue_head", "head")
    lock = Lock("wait_queue", queue.head - head)
    if case.is_in(*_LOOKUPS):
        wait_queues(context).lookups.add(lock)
    return Request(lock)


def wait_queue_waiters(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters on a queue, in order, without those that poll it."""
    address = lock.address or 0
    if address == expedited_queue(context):
        head = address + context.layout.offset("swait_queue_head", "task_list")
        simple = wait_queues(context).of_simple_head(head)
        waiters = None if simple is None else simple.waiters
        return None if waiters is None else wait_queues(context).tasks(waiters)
    head = address + context.layout.offset("wait_queue_head", "head")
    wait_queue = wait_queues(context).of_head(head)
    if wait_queue is None or wait_queue.waiters is None:
        return None
    return wait_queues(context).tasks(wait_queue.waiters)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the task that will wake a queue; empty if unknown.

    Known are, for a queue of a journal, the thread that commits it; of a dentry lookup,
    the task that has the queue on its stack; of a backing device, the workers that
    write back its inodes; of an expedited grace period, the readers that hold it up.

    :raises drgn.FaultError: if a structure that leads to the task cannot be read
    """
    if lock in wait_queues(context).lookups:
        return _lookup_task(context, lock.address or 0)
    address = lock.address or 0
    if (expedited := _expedited(context, address)) is not None:
        return list(expedited[1])
    return _journal_thread(context, address) or list(writeback(context, address))


def _expedited(
    context: LockContext, head: int
) -> tuple[str, tuple[Holder, ...]] | None:
    """Describe the expedited RCU grace period of a queue, with its blockers."""
    try:
        return awaited_expedited(context, head)
    except MissingError:
        return None


def _lookup_task(context: LockContext, head: int) -> list[Holder]:
    """Find the task that has a queue on its stack."""
    stacks = context.tasks["stack"].astype(np.uint64)
    # For a stack above the queue, the unsigned difference is huge.
    inside = np.uint64(head) - stacks < np.uint64(wait_queues(context).stack_bytes)
    tasks = context.tasks["address"][inside & (stacks != 0)].tolist()
    return [Holder(task, "exact") for task in tasks]


def _journal_thread(context: LockContext, head: int) -> list[Holder]:
    """Find the thread of a journal whose waiters wait for the end of its commit."""
    if not context.layout.has("journal_s", "j_task"):
        return []
    for member in ("j_wait_done_commit", "j_wait_transaction_locked"):
        journal = head - context.layout.offset("journal_s", member)
        try:
            task = context.layout.member(journal, "journal_s", "j_task")
            if task < KERNEL_HALF or kernel_threads(context).data_of(task) != journal:
                continue
            barriers = context.layout.member(journal, "journal_s", "j_barrier_count")
        except UNREADABLE:
            continue
        # With a barrier, tasks in the other queue wait for the task that set it.
        if member == "j_wait_done_commit" or not barriers:
            return [Holder(task, "exact")]
    return []


def wait_queue_what(
    context: LockContext, case: BlockedTask, request: Request
) -> str | None:
    """Describe what a task waits for, by the function that waits."""
    address = request.lock.address or 0
    expedited = _expedited(context, address)
    if expedited is not None:
        return expedited[0]
    return writeback_text(context, address) or by_caller(case)


WAIT_QUEUE = LockType(
    names=frozenset({"wait_queue"}),
    requests=at_most_one(wait_queue_request),
    queue=wait_queue_waiters,
    holders=holders,
    what=wait_queue_what,
)
