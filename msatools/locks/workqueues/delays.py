# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds out why a work item has not begun, and who keeps it waiting.

kernel/workqueue.c: a pool starts another worker only while none of its workers counts
as running; a workqueue has at most ``max_active`` work items on a pool.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.lock import Holder, OwnerConfidence
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.locks.workqueues.pools import (
    IDLE,
    NOT_RUNNING,
    Pool,
    PoolQueue,
    Worker,
    WorkItem,
    WorkPools,
    work_pools,
)
from msatools.target.addresses import KERNEL_HALF

_WQ_UNBOUND = 1 << 1
"""``WQ_UNBOUND`` of ``workqueue_struct.flags``."""


class Delay(Struct, frozen=True):
    """Why a work item has not begun."""

    text: str
    holders: tuple[Holder, ...] = ()
    """The workers that keep it waiting; empty if nobody is to do it."""


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
            # What is active is on the pool, but no worker has begun it either.
            delay = self.of_pool(self._pools.pools[part.pool])
            return Delay(f"{reached}; {delay.text}", delay.holders)
        # Any one of several workers may end the wait.
        return Delay(reached, _holders(workers, exact=len(workers) == 1))

    def _on(self, part: PoolQueue) -> Iterator[Worker]:
        """Yield the workers that execute work items which count for ``max_active``."""
        pools, queue = self._pools, self._pools.queue(part.queue)
        if queue.flags & _WQ_UNBOUND:
            parts = {each.address: each for each in pools.parts(queue)}
        else:
            parts = {part.address: part}
        for address in dict.fromkeys(each.pool for each in parts.values()):
            for worker in pools.workers(pools.pools[address]):
                if worker.work and worker.pwq in parts:
                    yield worker
        rescuer = self._rescuer(queue.rescuer)
        if rescuer is not None and rescuer.work and rescuer.pwq in parts:
            yield rescuer

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
    """Return what explains work items that have not begun, for a context."""
    return WorkDelays(context.layout, work_pools(context), context.losses)
