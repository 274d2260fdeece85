# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernel threads, pools of workers, and reasons why work items have not begun."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.reader import decode_string, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import constant, read_structs
from msatools.kernel.walks import list_records, xarray_entries
from msatools.locks.context import LockContext, per_context
from msatools.locks.report import Holder, OwnerConfidence
from msatools.locks.struct_reader import Layout
from msatools.program.linear import KERNEL_HALF
from msatools.tasks.text import KernelText

# --- Kernel threads, by their struct kthread (kernel/kthread.c).


_KTHREAD = ("worker_private", "set_child_tid")
"""Members that point at the ``struct kthread``: "kthread: Generalize pf_io_worker so it
can point to struct kthread" (in v5.17)."""


class KernelThreads:
    """The threads that kthreadd created."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    @cached_property
    def maker(self) -> int | None:
        """The task of kthreadd, which creates all others; ``None`` if unknown."""
        variable = self._layout.symbol("kthreadd_task")
        try:
            task = self._layout.word(variable) if variable else 0
        except UNREADABLE as error:
            self._losses.lose(Loss.KERNEL_THREADS, f"cannot read kthreadd: {error}")
            return None
        return task if task >= KERNEL_HALF else None

    @cached_property
    def by_kthread(self) -> dict[int, int]:
        """Maps the address of a ``struct kthread`` to its task."""
        if self.maker is None:
            return {}
        offset = self._layout.offset
        sibling = offset("task_struct", "sibling")
        kthread = offset("task_struct", *_KTHREAD)
        size = max(sibling, kthread) + 8
        head = self.maker + offset("task_struct", "children")
        children = list_records(
            self._layout.reader, head, sibling, size, self._losses, "kernel threads"
        )
        tasks = {unsigned(data, kthread, 8): task for task, data in children}
        tasks.pop(0, None)
        return tasks

    def data_of(self, task: int) -> int | None:
        """Return the argument of the main function of a kernel thread.

        :return: ``None`` if the task is no kernel thread.
        :raises drgn.FaultError: if the task cannot be read
        """
        kthread = self._layout.member(task, "task_struct", *_KTHREAD)
        # The members of a process have another meaning: look among kernel threads.
        if self.by_kthread.get(kthread) != task:
            return None
        return self._layout.member(kthread, "kthread", "data")

    def is_making(self, completion: int, limit: int, stack_bytes: int) -> bool:
        """
        Return whether kthreadd handles a request to create a thread.

        If so, its stack has a pointer to the request.

        :param completion: Address of the completion of the request.
        :param limit: Maximum number of pointers to try.
        :param stack_bytes: Bytes of a kernel stack.
        """
        if self.maker is None:
            return False
        try:
            stack = self._layout.member(self.maker, "task_struct", "stack")
            pointer = self._layout.member(self.maker, "task_struct", "thread.sp")
            used = stack + stack_bytes - pointer
            if not 0 < used <= stack_bytes:
                return False
            words = self._layout.reader.words(pointer, used // 8)
        except UNREADABLE:
            return False
        for request in self._layout.data_pointers(words)[:limit]:
            try:
                done = self._layout.member(request, "kthread_create_info", "done")
            except UNREADABLE:
                continue
            if done == completion:
                return True
        return False


@per_context
def kernel_threads(context: LockContext) -> KernelThreads:
    """Return the reader of the kernel threads of a context."""
    return KernelThreads(context.layout, context.losses)


# --- Reads pools of workers, workers, work items and workqueues (kernel/workqueue.c).


_MAX_POOLS = 1 << 16
_MAX_WORKS = 1 << 16
"""Maximum number of work items to count on one list."""

NAME_BYTES = 32
"""``WQ_NAME_LEN``, which was 24 before v6.9."""

_INACTIVE, _PWQ = 1 << 1, 1 << 2
"""Flags in ``work_struct.data``: ``max_active`` holds the work item back
(``WORK_STRUCT_INACTIVE``); a pool_workqueue is in the high bits
(``WORK_STRUCT_PWQ``)."""

_FLAG_BITS = ("WORK_STRUCT_PWQ_SHIFT", "WORK_STRUCT_FLAG_BITS")
"""Names of the number of flag bits in ``work_struct.data``: the first name since
"workqueue: Implement disable/enable for (delayed) work items" (in v6.10)."""

_USUAL_FLAG_BITS = 8

IDLE, PREP, INTENSIVE = 1 << 2, 1 << 3, 1 << 6
UNBOUND, REBOUND = 1 << 7, 1 << 8
NOT_RUNNING = PREP | INTENSIVE | UNBOUND | REBOUND
"""Bits of ``worker.flags``; a worker with any bit of ``NOT_RUNNING`` is not counted in
``nr_running`` (``WORKER_NOT_RUNNING``)."""

_POOL_FLAGS = {
    "POOL_BH": 0,
    "POOL_MANAGER_ACTIVE": 1 << 0,
    "POOL_DISASSOCIATED": 1 << 2,
}
"""Bits of ``worker_pool.flags`` before "workqueue: Implement BH workqueues to
eventually replace tasklets" (in v6.9) added POOL_BH and moved the others."""

_POOL = {
    "cpu": ("cpu",),
    "node": ("node",),
    "id": ("id",),
    "flags": ("flags",),
    # "watchdog_ts" before "workqueue: Rename pool->watchdog_ts to
    # pool->last_progress_ts" (in v7.1, and stable kernels)
    "progress": ("last_progress_ts", "watchdog_ts"),
    "running": ("nr_running",),
    "first": ("worklist",),
    "workers": ("nr_workers",),
    "idle": ("nr_idle",),
    "manager": ("manager",),
    "attrs": ("attrs",),
}


class Pool(Struct, frozen=True):
    """Some members of a ``struct worker_pool``."""

    address: int
    number: int
    cpu: int | None
    node: int | None
    flags: int
    progress: int
    """Jiffies when a worker last took a work item, or the empty list got its first."""

    running: int
    workers: int
    idle: int
    manager: int
    """Address of the ``struct worker`` that creates other workers; 0 if none does."""

    attrs: int
    is_pending: bool
    """Whether there are work items that no worker has begun."""


class Worker(Struct, frozen=True):
    """Some members of a ``struct worker``."""

    address: int
    task: int
    work: int
    """Address of the work item that it executes; 0 if none."""

    function: int
    pwq: int
    flags: int
    begun: int | None
    """Jiffies when it began the work item; ``None`` if the kernel does not record
    that, as before v7.1."""

    rescues: int
    """Address of the workqueue whose rescuer it is; 0 for another worker."""


class WorkItem(Struct, frozen=True):
    """A ``struct work_struct`` on a list."""

    address: int
    function: int
    pwq: int
    """Address of its ``struct pool_workqueue``; 0 if it is on none."""

    is_inactive: bool
    """Whether ``max_active`` holds it back."""


class PoolQueue(Struct, frozen=True):
    """A ``struct pool_workqueue``: the work items of one workqueue on one pool."""

    address: int
    pool: int
    queue: int
    active: int
    max_active: int | None
    """Its own limit, before v6.9; ``None`` if the workqueue has it."""


class WorkqueueRecord(Struct, frozen=True):
    """Some members of a ``struct workqueue_struct``."""

    address: int
    name: str
    flags: int
    max_active: int
    rescuer: int
    """Address of its ``struct worker``; 0 if it has none."""


class WorkPools:
    """The pools of workers, each read once."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses
        self._workers: dict[int, tuple[Worker, ...]] = {}
        self._queues: dict[int, WorkqueueRecord] = {}

    @cached_property
    def pools(self) -> dict[int, Pool]:
        """Maps the address of each pool to its members.

        :raises MissingError: if the types, or the variable, are unknown
        """
        head = self._layout.symbol("worker_pool_idr")
        if head is None:
            raise MissingError("no symbol of the pools of workers")
        entries = xarray_entries(
            self._layout.reader,
            head + self._layout.offset("idr", "idr_rt"),
            self._losses,
            "pools of workers",
        )
        found = [entry for _, _, entry in entries[:_MAX_POOLS]]
        addresses = np.array(found, np.uint64)
        read = read_structs(
            self._layout.reader, "struct worker_pool", _POOL, addresses, self._losses
        )
        worklist = self._layout.offset("worker_pool", "worklist")
        return {
            address: Pool(
                address=address,
                number=int(read["id"][row]),
                cpu=_or_none(int(read["cpu"][row])),
                node=_or_none(int(read["node"][row])),
                flags=int(read["flags"][row]),
                progress=int(read["progress"][row]),
                running=int(read["running"][row]),
                workers=int(read["workers"][row]),
                idle=int(read["idle"][row]),
                manager=int(read["manager"][row]) if read.has("manager") else 0,
                attrs=int(read["attrs"][row]),
                is_pending=int(read["first"][row]) not in (0, address + worklist),
            )
            for row, address in enumerate(found)
            if read.readable[row]
        }

    def flags(self, pool: Pool) -> frozenset[str]:
        """Return the names of a pool's flags, such as ``POOL_DISASSOCIATED``."""
        return frozenset(
            name for name, bit in self._flag_values.items() if pool.flags & bit
        )

    @cached_property
    def _flag_values(self) -> dict[str, int]:
        prog = self._layout.reader.prog
        try:
            return {name: constant(prog, name) for name in _POOL_FLAGS}
        except MissingError:
            return _POOL_FLAGS

    def workers(self, pool: Pool) -> tuple[Worker, ...]:
        """Return the workers of a pool, idle ones too."""
        if pool.address not in self._workers:
            head = pool.address + self._layout.offset("worker_pool", "workers")
            self._workers[pool.address] = tuple(self._read_workers(head, pool.number))
        return self._workers[pool.address]

    def _read_workers(self, head: int, number: int) -> Iterable[Worker]:
        node = self._layout.offset("worker", "node")
        size = self._layout.size("worker")
        for address, data in list_records(
            *(self._layout.reader, head, node, size, self._losses),
            f"workers of pool {number}",
        ):
            yield self._worker(address, data)

    def worker(self, address: int) -> Worker:
        """Read one worker, such as a rescuer.

        :raises drgn.FaultError: if it cannot be read
        """
        size = self._layout.size("worker")
        return self._worker(address, self._layout.reader.read(address, size))

    def _worker(self, address: int, data: bytes) -> Worker:
        offset = self._layout.offset

        def word(name: str) -> int:
            return unsigned(data, offset("worker", name), 8)

        return Worker(
            address=address,
            task=word("task"),
            work=word("current_work"),
            function=word("current_func"),
            pwq=word("current_pwq"),
            flags=unsigned(data, offset("worker", "flags"), 4),
            begun=word("current_start") if self._has_start else None,
            rescues=word("rescue_wq"),
        )

    @cached_property
    def _has_start(self) -> bool:
        # "workqueue: Show in-flight work item duration in stall diagnostics" (in v7.1)
        return self._layout.has("worker", "current_start")

    def pending(self, pool: Pool) -> list[WorkItem]:
        """Return the work items of a pool that no worker has begun, in order."""
        if not pool.is_pending:
            return []
        head = pool.address + self._layout.offset("worker_pool", "worklist")
        return self.items(head, f"work of pool {pool.number}")

    def inactive(self, part: PoolQueue) -> list[WorkItem]:
        """Return the work items that ``max_active`` holds back, in order."""
        # "workqueue: Rename "delayed" (delayed by active management) to "inactive""
        # (in v5.15)
        names = ("inactive_works", "delayed_works")
        head = part.address + self._layout.offset("pool_workqueue", *names)
        return self.items(head, "inactive work")

    def items(self, head: int, name: str) -> list[WorkItem]:
        """Return the work items on a list, at most 65,536."""
        entry = self._layout.offset("work_struct", "entry")
        size = self._layout.size("work_struct")
        found: list[WorkItem] = []
        for address, data in list_records(
            *(self._layout.reader, head, entry, size, self._losses), name
        ):
            if len(found) == _MAX_WORKS:
                break
            found.append(self._item(address, data))
        return found

    def item(self, address: int) -> WorkItem:
        """Read one work item.

        :raises drgn.FaultError: if it cannot be read
        """
        size = self._layout.size("work_struct")
        return self._item(address, self._layout.reader.read(address, size))

    def _item(self, address: int, data: bytes) -> WorkItem:
        offset = self._layout.offset
        bits = unsigned(data, offset("work_struct", "data"), 8)
        function = unsigned(data, offset("work_struct", "func"), 8)
        pwq = bits >> self._flag_bits << self._flag_bits if bits & _PWQ else 0
        pwq = pwq if pwq >= KERNEL_HALF else 0
        return WorkItem(address, function, pwq, bool(bits & _INACTIVE))

    @cached_property
    def _flag_bits(self) -> int:
        for name in _FLAG_BITS:
            try:
                return constant(self._layout.reader.prog, name)
            except MissingError:
                continue
        return _USUAL_FLAG_BITS

    def part(self, address: int) -> PoolQueue:
        """Read a ``struct pool_workqueue``.

        :raises UNREADABLE: if it cannot be read, or is no ``struct pool_workqueue``
        """
        layout, name = self._layout, "pool_workqueue"
        if address < KERNEL_HALF:
            raise DamagedDataError("no pool_workqueue", address)
        pool, queue, active = layout.members(address, name, "pool", "wq", "nr_active")
        # "workqueue: Move pwq->max_active to wq->max_active" (in v6.9)
        own = layout.has(name, "max_active")
        limit = layout.member(address, name, "max_active") if own else None
        if pool not in self.pools:
            raise DamagedDataError("no pool_workqueue", address)
        return PoolQueue(address, pool, queue, active, limit)

    def parts(self, queue: WorkqueueRecord) -> list[PoolQueue]:
        """Return the parts of a workqueue on the pools that it uses."""
        head = queue.address + self._layout.offset("workqueue_struct", "pwqs")
        node = self._layout.offset("pool_workqueue", "pwqs_node")
        name = f"pools of workqueue {queue.name}"
        found = []
        for address, _ in list_records(
            *(self._layout.reader, head, node, node + 16, self._losses), name
        ):
            try:
                found.append(self.part(address))
            except UNREADABLE as error:
                self._losses.lose(Loss.WORKQUEUES, f"cannot read {name}: {error}")
        return found

    def maydays(self, queue: WorkqueueRecord) -> int:
        """Return the number of pools from which a workqueue calls for its rescuer."""
        head = queue.address + self._layout.offset("workqueue_struct", "maydays")
        node = self._layout.offset("pool_workqueue", "mayday_node")
        name = f"maydays of workqueue {queue.name}"
        records = list_records(
            *(self._layout.reader, head, node, node + 16, self._losses), name
        )
        return sum(1 for _ in records)

    @cached_property
    def queues(self) -> tuple[WorkqueueRecord, ...]:
        """All workqueues."""
        head = self._layout.symbol("workqueues")
        if head is None:
            return ()
        node = self._layout.offset("workqueue_struct", "list")
        size = self._layout.size("workqueue_struct")
        return tuple(
            self._queue(address, data)
            for address, data in list_records(
                *(self._layout.reader, head, node, size, self._losses), "workqueues"
            )
        )

    def queue(self, address: int) -> WorkqueueRecord:
        """Read a workqueue.

        :raises drgn.FaultError: if it cannot be read
        """
        if address not in self._queues:
            size = self._layout.size("workqueue_struct")
            data = self._layout.reader.read(address, size)
            self._queues[address] = self._queue(address, data)
        return self._queues[address]

    def _queue(self, address: int, data: bytes) -> WorkqueueRecord:
        layout, wq = self._layout, "workqueue_struct"
        name = layout.offset(wq, "name")
        # "workqueue: Move pwq->max_active to wq->max_active" (in v6.9); before, only
        # its saved value is here.
        limit = layout.offset(wq, "max_active", "saved_max_active")
        return WorkqueueRecord(
            address=address,
            name=decode_string(data[name : name + NAME_BYTES]),
            flags=unsigned(data, layout.offset(wq, "flags"), 4),
            max_active=unsigned(data, limit, 4),
            rescuer=unsigned(data, layout.offset(wq, "rescuer"), 8),
        )

    def function(self, address: int) -> str | None:
        """Return the name of a function; ``None`` if unknown."""
        return self._text.name(address) if address >= KERNEL_HALF else None

    @cached_property
    def _text(self) -> KernelText:
        return KernelText(self._layout.reader, self._losses)

    @cached_property
    def barrier_function(self) -> int | None:
        """Address of the function of barriers, which are queued by flushes."""
        return self._layout.symbol("wq_barrier_func")

    def waiter(self, item: WorkItem) -> int | None:
        """Return the task that waits for a barrier; ``None`` if it is no barrier."""
        if not self.barrier_function or item.function != self.barrier_function:
            return None
        barrier = item.address - self._layout.offset("wq_barrier", "work")
        try:
            return self._layout.member(barrier, "wq_barrier", "task")
        except LOST:
            return None


def _or_none(number: int) -> int | None:
    return number if number >= 0 else None


@per_context
def work_pools(context: LockContext) -> WorkPools:
    """Return the reader of the pools of workers of a context."""
    return WorkPools(context.layout, context.losses)


# --- Finds out why a work item has not begun, and who keeps it waiting.
#
# kernel/workqueue.c: a pool starts another worker only while none of its workers counts
# as running; a workqueue has at most max_active work items on a pool.


_WQ_UNBOUND = 1 << 1
"""``WQ_UNBOUND`` of ``workqueue_struct.flags``."""


class Delay(Struct, frozen=True):
    """Why a work item has not begun."""

    text: str
    holders: tuple[Holder, ...] = ()
    """The workers that keep it waiting; empty if no worker does."""


class WorkDelays:
    """Explains work items that have not begun."""

    def __init__(self, layout: Layout, pools: WorkPools, losses: LossLog) -> None:
        self._layout = layout
        self._pools = pools
        self._losses = losses

    def of_item(self, item: WorkItem) -> Delay | None:
        """Explain why a work item that is queued has not begun.

        :return: ``None`` if it is on no pool.
        :raises drgn.FaultError: if a structure that leads to it cannot be read
        """
        if not item.pwq:
            return None
        part = self._pools.part(item.pwq)
        if item.is_inactive:
            return self.of_inactive(part)
        return self.of_pool(self._pools.pools[part.pool])

    def of_inactive(self, part: PoolQueue) -> Delay:
        """Explain why inactive work items of a workqueue have not begun.

        :raises drgn.FaultError: if the workqueue cannot be read
        """
        queue = self._pools.queue(part.queue)
        limit = queue.max_active if part.max_active is None else part.max_active
        if not limit:
            return Delay(f"workqueue {queue.name} is frozen")
        reached = f"max_active {limit:,} of {queue.name} is reached"
        workers = list(self._on(part))
        if not workers:
            # The active work items are on the pool, but no worker has begun any.
            delay = self.of_pool(self._pools.pools[part.pool])
            return Delay(f"{reached}; {delay.text}", delay.holders)
        # Any one of several workers may end the wait.
        return Delay(reached, _holders(workers, exact=len(workers) == 1))

    def _on(self, part: PoolQueue) -> Iterator[Worker]:
        """Yield the workers that execute work items which count for ``max_active``.

        A rescuer is one of its pool's workers, too, while it is attached to it.
        """
        pools, queue = self._pools, self._pools.queue(part.queue)
        if queue.flags & _WQ_UNBOUND:
            parts = {each.address: each for each in pools.parts(queue)}
        else:
            parts = {part.address: part}
        found: dict[int, Worker] = {}
        for address in dict.fromkeys(each.pool for each in parts.values()):
            for worker in pools.workers(pools.pools[address]):
                found[worker.address] = worker
        rescuer = self._rescuer(queue.rescuer)
        if rescuer is not None:
            found[rescuer.address] = rescuer
        for worker in found.values():
            if worker.work and worker.pwq in parts:
                yield worker

    def _rescuer(self, address: int) -> Worker | None:
        if address < KERNEL_HALF:
            return None
        try:
            return self._pools.worker(address)
        except UNREADABLE as error:
            self._losses.lose(Loss.WORKQUEUES, f"cannot read a rescuer: {error}")
            return None

    def of_pool(self, pool: Pool) -> Delay:
        """Explain why pending work items of a pool have not begun."""
        name = pool_name(pool)
        workers = self._pools.workers(pool)
        running = [each for each in workers if self._keeps_pool(pool, each)]
        if running:
            sure = len(running) == 1 and pool.running == 1
            function = self._pools.function(running[0].function) or "a work item"
            text = f"{name} starts no other worker while {function} runs"
            return Delay(text, _holders(running, exact=sure))
        woken = [each for each in workers if self._is_woken(each)]
        if woken:
            text = f"the worker of {name} that is to run it waits for a CPU"
            return Delay(text, _holders(woken, exact=len(woken) == 1))
        if "POOL_BH" in self._pools.flags(pool):
            return Delay(f"{name} waits for softirqs")
        maker = next((w for w in workers if w.address == pool.manager), None)
        if maker is not None:
            text = f"{name} waits for a new worker, which is being created"
            return Delay(text, (Holder(maker.task, "likely"),))
        if not workers:
            return Delay(f"{name} has no worker")
        return Delay(f"none of the {len(workers):,} workers of {name} has begun it")

    def _keeps_pool(self, pool: Pool, worker: Worker) -> bool:
        """Return whether a worker counts as running, and is runnable."""
        if pool.running <= 0 or not worker.work or worker.flags & NOT_RUNNING:
            return False
        return self._is_runnable(worker)

    def _is_woken(self, worker: Worker) -> bool:
        return bool(worker.flags & IDLE) and self._is_runnable(worker)

    def _is_runnable(self, worker: Worker) -> bool:
        # "sched: Change task_struct::state" (in v5.14)
        names = ("__state", "state")
        try:
            return self._layout.member(worker.task, "task_struct", *names) == 0
        except UNREADABLE as error:
            self._losses.lose(Loss.WORKQUEUES, f"cannot read a worker: {error}")
            return False


def _holders(workers: Sequence[Worker], exact: bool) -> tuple[Holder, ...]:
    confidence: OwnerConfidence = "exact" if exact else "likely"
    return tuple(Holder(worker.task, confidence) for worker in workers)


def pool_name(pool: Pool) -> str:
    """Return a pool's number, and its CPU if it is bound to one."""
    where = "unbound" if pool.cpu is None else f"CPU {pool.cpu}"
    return f"pool {pool.number} ({where})"


@per_context
def work_delays(context: LockContext) -> WorkDelays:
    """Return the explainer of work items of a context that have not begun."""
    return WorkDelays(context.layout, work_pools(context), context.losses)
