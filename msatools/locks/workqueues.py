# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lists pools of workers, workqueues that hold back work, and delayed work."""

from collections.abc import Iterable, Iterator, Sequence

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.clocks import Jiffies, read_jiffies
from msatools.kernel.percpu import place_of, try_mask
from msatools.kernel.report import Loss
from msatools.kernel.structs import constant
from msatools.locks.context import LockContext
from msatools.locks.report import (
    BusyWorker,
    OfflineWork,
    QueuedWork,
    WorkPool,
    Workqueue,
    Workqueues,
)
from msatools.locks.work import DelayedWork, read_offline_work
from msatools.locks.workers import (
    INTENSIVE,
    Delay,
    Pool,
    Worker,
    WorkItem,
    WorkqueueRecord,
    work_delays,
    work_pools,
)
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.selfdesc.find import find_variable, object_at
from msatools.tasks.identity import comm_text
from msatools.tasks.states import letters

MAX_WORKS = 32
"""Maximum number of work items to list of a pool or workqueue."""

_SECOND = 10**9
_WATCHDOG_S = 30
"""Default of ``wq_watchdog_thresh``; also used if the kernel has no such watchdog."""

_POOL_FLAGS = {
    "POOL_BH": "bh",
    "POOL_MANAGER_ACTIVE": "manager-active",
    "POOL_DISASSOCIATED": "disassociated",
}
_QUEUE_FLAGS = {
    "WQ_BH": "bh",
    "WQ_UNBOUND": "unbound",
    "WQ_FREEZABLE": "freezable",
    "WQ_MEM_RECLAIM": "mem-reclaim",
    "WQ_HIGHPRI": "highpri",
    "WQ_CPU_INTENSIVE": "cpu-intensive",
    "WQ_POWER_EFFICIENT": "power-efficient",
    "__WQ_DESTROYING": "destroying",
    "__WQ_DRAINING": "draining",
    "__WQ_ORDERED": "ordered",
}


def list_workqueues(
    context: LockContext, ages_ns: Sequence[int] | None = None
) -> Workqueues:
    """
    List all pools of workers, the workqueues that hold back work, and delayed work.

    :param ages_ns: Time since each task of the context entered its state, by row.
    :raises MissingError: if the types, or the variables, are unknown
    """
    lister = _Lister(context, ages_ns)
    pools = [lister.pool(pool) for pool in work_pools(context).pools.values()]
    return Workqueues(
        pools=tuple(sorted(pools, key=_weight)),
        queues=tuple(lister.queues()),
        offline=tuple(lister.offline()),
        stalled_after_ns=lister.stalled_after_ns,
    )


def stalled_pools(
    context: LockContext, ages_ns: Sequence[int] | None = None
) -> tuple[WorkPool, ...]:
    """
    Return the pools that have pending work, and have begun none for the kernel's limit.

    That is the limit of the kernel's workqueue watchdog, 30 s by default. If no pool is
    stalled, only the pools themselves are read.

    :param ages_ns: Time since each task of the context entered its state, by row.
    :return: The pools, the longest delay first; empty if unknown.
    """
    try:
        lister = _Lister(context, ages_ns)
        found = [
            lister.pool(pool)
            for pool in work_pools(context).pools.values()
            if lister.is_stalled(pool)
        ]
    except MissingError:
        return ()
    except UNREADABLE as error:
        context.losses.lose(Loss.WORKQUEUES, f"cannot read pools of workers: {error}")
        return ()
    return tuple(sorted(found, key=_weight))


def _weight(pool: WorkPool) -> tuple[int, int, int, int]:
    """Return the sort key of pools: the longest delay first, then the busiest."""
    return -(pool.progress_age_ns or 0), -pool.pending, -len(pool.busy), pool.id


class _Lister:
    """Makes the rows of one list."""

    def __init__(self, context: LockContext, ages_ns: Sequence[int] | None) -> None:
        self._context = context
        self._ages_ns = ages_ns
        self._pools = work_pools(context)
        self._delays = work_delays(context)
        self._rows = {
            address: row
            for row, address in enumerate(context.tasks["address"].tolist())
        }
        self._letters: list[str] = letters(context.tasks).tolist()
        self._jiffies = self._read_jiffies()
        self.stalled_after_ns = self._limit_s() * _SECOND

    def _read_jiffies(self) -> Jiffies | None:
        try:
            return read_jiffies(self._context.reader.prog)
        except LOST as error:
            self._context.losses.lose(Loss.CLOCKS, f"cannot read jiffies: {error}")
            return None

    def _limit_s(self) -> int:
        """Return the seconds after which the kernel calls a pool stalled."""
        try:
            limit = int(find_variable(self._context.reader.prog, "wq_watchdog_thresh"))
        except LOST:
            return _WATCHDOG_S
        return limit or _WATCHDOG_S

    def _since_ns(self, count: int | None) -> int | None:
        """Return the time since jiffies had the value *count*; ``None`` if unknown."""
        now = self._context.monotonic_ns
        if count is None or self._jiffies is None or now is None:
            return None
        moment = self._jiffies.time_ns(count)
        return None if moment is None else max(0, now - moment)

    def is_stalled(self, pool: Pool) -> bool:
        """Return whether work is pending, and none was begun for the kernel's limit."""
        age = self._since_ns(pool.progress) if pool.is_pending else None
        return age is not None and age >= self.stalled_after_ns

    def pool(self, pool: Pool) -> WorkPool:
        pools = self._pools
        items = pools.pending(pool)
        delay = self._delay(pool) if items else None
        flags = pools.flags(pool)
        nice, cpus = self._attributes(pool)
        return WorkPool(
            id=pool.number,
            address=Address(pool.address),
            cpu=pool.cpu,
            cpus=cpus,
            node=pool.node if pool.cpu is None else None,
            nice=nice,
            flags=tuple(text for name, text in _POOL_FLAGS.items() if name in flags),
            pending=len(items),
            progress_age_ns=self._since_ns(pool.progress) if items else None,
            is_stalled=self.is_stalled(pool),
            workers=pool.workers,
            idle=pool.idle,
            running=pool.running,
            busy=tuple(self._busy(pool)),
            works=self._works(items),
            manager=self._manager(pool),
            culprits=tuple(self._pids(delay)),
            why=delay.text if delay else None,
        )

    def _delay(self, pool: Pool) -> Delay | None:
        try:
            return self._delays.of_pool(pool)
        except UNREADABLE as error:
            self._lose(f"cannot determine why work is pending: {error}")
            return None

    def _lose(self, text: str) -> None:
        self._context.losses.lose(Loss.WORKQUEUES, text)

    def _pids(self, delay: Delay | None) -> Iterator[int]:
        for holder in delay.holders if delay else ():
            row = self._rows.get(holder.task)
            if row is not None:
                yield int(self._context.tasks["pid"][row])

    def _attributes(self, pool: Pool) -> tuple[int | None, tuple[int, ...] | None]:
        """Read the nice value of a pool's workers, and an unbound pool's CPUs."""
        if pool.attrs < KERNEL_HALF:
            return None, None
        prog = self._context.reader.prog
        attrs = object_at(prog, "struct workqueue_attrs", pool.attrs)
        try:
            nice = int(attrs.nice)
        except UNREADABLE as error:
            self._lose(f"cannot read attributes of a pool: {error}")
            return None, None
        if pool.cpu is not None:
            return nice, None
        name, losses = f"CPUs of pool {pool.number}", self._context.losses
        mask = attrs.cpumask
        return nice, try_mask(
            self._context.reader, lambda: place_of(mask), name, losses
        )

    def _manager(self, pool: Pool) -> int | None:
        for worker in self._pools.workers(pool):
            if worker.address == pool.manager:
                return self._pid(worker.task)
        return None

    def _pid(self, task: int) -> int | None:
        row = self._rows.get(task)
        return None if row is None else int(self._context.tasks["pid"][row])

    def _busy(self, pool: Pool) -> Iterator[BusyWorker]:
        for worker in self._pools.workers(pool):
            if not worker.work:
                continue
            row = self._rows.get(worker.task)
            if row is None:
                self._lose("cannot read the task of a worker")
            else:
                yield self._worker(worker, row)

    def _worker(self, worker: Worker, row: int) -> BusyWorker:
        tasks = self._context.tasks
        return BusyWorker(
            pid=int(tasks["pid"][row]),
            comm=comm_text(tasks["comm"][row]),
            function=self._pools.function(worker.function),
            workqueue=self._queue_name(worker.pwq),
            state=self._letters[row],
            age_ns=None if self._ages_ns is None else self._ages_ns[row],
            work_age_ns=self._since_ns(worker.begun),
            intensive=bool(worker.flags & INTENSIVE),
            rescuer=bool(worker.rescues),
        )

    def _queue_name(self, part: int) -> str | None:
        try:
            return self._pools.queue(self._pools.part(part).queue).name
        except UNREADABLE:
            return None

    def _works(self, items: Iterable[WorkItem]) -> tuple[QueuedWork, ...]:
        found = []
        for item in list(items)[:MAX_WORKS]:
            task = self._pools.waiter(item)
            found.append(
                QueuedWork(
                    function=self._pools.function(item.function),
                    workqueue=self._queue_name(item.pwq),
                    waiter=None if task is None else self._pid(task),
                )
            )
        return tuple(found)

    def queues(self) -> Iterator[Workqueue]:
        """Yield the workqueues that hold back work, or wait for their rescuer."""
        for queue in self._pools.queues:
            try:
                row = self._queue(queue)
            except UNREADABLE as error:
                self._lose(f"cannot read a workqueue: {error}")
                continue
            if row.inactive or row.maydays:
                yield row

    def _queue(self, queue: WorkqueueRecord) -> Workqueue:
        pools = self._pools
        parts = pools.parts(queue)
        items = [item for part in parts for item in pools.inactive(part)]
        limits = [part.max_active for part in parts if part.max_active is not None]
        return Workqueue(
            name=queue.name,
            address=Address(queue.address),
            flags=tuple(self._flags(queue)),
            max_active=max(limits) if limits else queue.max_active,
            active=sum(part.active for part in parts),
            inactive=len(items),
            works=self._works(items),
            rescuer=self._rescuer(queue),
            maydays=pools.maydays(queue),
        )

    def _flags(self, queue: WorkqueueRecord) -> Iterator[str]:
        for name, text in _QUEUE_FLAGS.items():
            try:
                bit = constant(self._context.reader.prog, name)
            except MissingError:
                continue
            if queue.flags & bit:
                yield text

    def _rescuer(self, queue: WorkqueueRecord) -> int | None:
        if queue.rescuer < KERNEL_HALF:
            return None
        return self._pid(self._pools.worker(queue.rescuer).task)

    def offline(self) -> Iterator[OfflineWork]:
        """Yield the delayed work of offline CPUs."""
        try:
            found = read_offline_work(self._context.layout, self._context.losses)
        except LOST as error:
            self._lose(f"cannot read delayed work: {error}")
            return
        for work in found:
            yield self._offline(work)

    def _offline(self, work: DelayedWork) -> OfflineWork:
        try:
            name = self._pools.queue(work.queue).name
        except UNREADABLE:
            name = None
        jiffies = self._jiffies
        return OfflineWork(
            cpu=work.cpu,
            function=self._pools.function(work.function),
            workqueue=name,
            expires_ns=None if jiffies is None else jiffies.time_ns(work.expires),
        )
