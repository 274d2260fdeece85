# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the work item that is to complete a completion beside it.

A driver often has both in one structure, on the waiter's stack or in a slab object.
"""

from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.lock import Holder, OwnerConfidence
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.locks.places.slabs import Slabs
from msatools.locks.workqueues.delays import Delay, WorkDelays, work_delays
from msatools.locks.workqueues.offline import DelayedWork, read_offline_work
from msatools.locks.workqueues.pools import Worker, WorkItem, WorkPools, work_pools

_ON_STACK = 512
"""Maximum distance on a stack, in bytes."""

_MAX_OBJECT = 8192
"""Maximum bytes of a slab object."""


class BesideWork(Struct, frozen=True):
    """A work item beside a completion."""

    function: int
    confidence: OwnerConfidence
    """``likely`` on the waiter's stack, ``evidence`` in the same slab object."""

    worker: int | None = None
    """Address of the ``struct task_struct`` of the worker that executes it."""

    delay: Delay | None = None
    """Why it has not begun, if no worker executes it."""


class WorkBeside:
    """Finds work items by address; reads all that are known once."""

    def __init__(
        self, layout: Layout, pools: WorkPools, delays: WorkDelays, losses: LossLog
    ) -> None:
        self._layout = layout
        self._pools = pools
        self._delays = delays
        self._losses = losses
        self._slabs = Slabs(layout)

    def find(self, address: int, stack: tuple[int, int] | None) -> BesideWork | None:
        """
        Return the only work item in the structure of a completion.

        :param address: Address of the completion.
        :param stack: Bounds of the waiter's stack, if the completion is on it.
        :return: ``None`` if there is none, or several.
        :raises drgn.FaultError: if a structure that leads to it cannot be read
        :raises MissingError: if the types are unknown
        """
        confidence: OwnerConfidence
        if stack is not None:
            low, high = address - _ON_STACK, address + _ON_STACK
            bounds = max(low, stack[0]), min(high, stack[1])
            confidence = "likely"
        else:
            found = self._slabs.find(address)
            if found is None or found.size > _MAX_OBJECT:
                return None
            bounds, confidence = (found.start, found.end), "evidence"
        near = [work for work in self._known if bounds[0] <= work < bounds[1]]
        if len(near) != 1:
            return None
        return self._explain(self._known[near[0]], confidence)

    def _explain(
        self, work: Worker | WorkItem | DelayedWork, confidence: OwnerConfidence
    ) -> BesideWork:
        if isinstance(work, Worker):
            return BesideWork(work.function, confidence, worker=work.task)
        if isinstance(work, DelayedWork):
            text = f"its timer is on CPU {work.cpu}, which is offline"
            return BesideWork(work.function, confidence, delay=Delay(text))
        delay = self._delays.of_item(work)
        if delay is not None:
            holders = (Holder(each.task, confidence) for each in delay.holders)
            delay = Delay(delay.text, tuple(holders))
        return BesideWork(work.function, confidence, delay=delay)

    @cached_property
    def _known(self) -> dict[int, Worker | WorkItem | DelayedWork]:
        """Maps the addresses of work items to what is known of each."""
        known: dict[int, Worker | WorkItem | DelayedWork] = {}
        for work in self._offline():
            known[work.work] = work
        pools = self._pools
        for pool in pools.pools.values():
            known |= {item.address: item for item in self._plain(pools.pending(pool))}
            for worker in pools.workers(pool):
                if worker.work:
                    known[worker.work] = worker
        for queue in pools.queues:
            for part in pools.parts(queue):
                items = self._plain(pools.inactive(part))
                known |= {item.address: item for item in items}
        return known

    def _plain(self, items: list[WorkItem]) -> Iterator[WorkItem]:
        """Yield the work items that are not barriers."""
        for item in items:
            if item.function != self._pools.barrier_function:
                yield item

    def _offline(self) -> list[DelayedWork]:
        try:
            return read_offline_work(self._layout, self._losses)
        except LOST as error:
            self._losses.lose(Loss.WORKQUEUES, f"cannot read delayed work: {error}")
            return []


@per_context
def work_beside(context: LockContext) -> WorkBeside:
    """Return the finder of work items beside completions of a context."""
    pools, delays = work_pools(context), work_delays(context)
    return WorkBeside(context.layout, pools, delays, context.losses)
