# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the workers that write back the inodes of a backing device.

fs/fs-writeback.c: sync and others queue their wish, wake the work item of the device,
wb_workfn(), and wait on ``bdi->wb_waitq``. A device has one such work item, and one
more for each control group with pages of it.
"""

from collections.abc import Iterator

from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.workqueues.delays import Delay, work_delays
from msatools.locks.workqueues.pools import work_pools
from msatools.target.addresses import KERNEL_HALF


class Writeback(Struct, frozen=True):
    """The writeback of a backing device."""

    name: str
    """Name of the device, as ``254:0``."""

    workers: tuple[int, ...]
    """The ``struct task_struct`` of the workers that write."""

    delay: Delay | None
    """Why the work has not begun, if no worker writes and it is queued."""


def writeback(context: LockContext, head: int) -> Iterator[Holder]:
    """
    Yield the workers that a waiter on a queue of a backing device waits for.

    They are ``likely``: with control groups, they may write back others' pages.

    :param head: Address of a ``struct wait_queue_head``.
    """
    found = _find(context, head)
    if found is None:
        return
    for worker in found.workers:
        yield Holder(worker, "likely")
    if not found.workers and found.delay is not None:
        for holder in found.delay.holders:
            yield Holder(holder.task, "likely")


def writeback_text(context: LockContext, head: int) -> str | None:
    """Describe the writeback that a waiter on a queue waits for.

    :return: ``None`` if the queue is of something else.
    """
    found = _find(context, head)
    if found is None:
        return None
    text = f"writeback of {found.name}"
    if found.workers or found.delay is None:
        return text
    return f"{text}, not begun: {found.delay.text}"


@per_context
def _known(context: LockContext) -> dict[int, Writeback | None]:
    """Maps wait queues to the writeback that they are of."""
    return {}


def _find(context: LockContext, head: int) -> Writeback | None:
    known = _known(context)
    if head not in known:
        try:
            known[head] = _read(context, head)
        except MissingError:
            known[head] = None
        except UNREADABLE as error:
            context.losses.lose(Loss.WORKQUEUES, f"cannot read writeback: {error}")
            known[head] = None
    return known[head]


def _read(context: LockContext, head: int) -> Writeback | None:
    layout, name = context.layout, "backing_dev_info"
    device = head - layout.offset(name, "wb_waitq")
    try:
        owner = layout.member(device, name, "wb.bdi")
    except UNREADABLE:
        return None
    if owner != device:
        return None
    # "bdi: add a ->dev_name field to struct backing_dev_info" (in v5.7)
    text = layout.text(device, name, "dev_name")
    workers = tuple(_workers(context, device))
    delay = None if workers else _delay(context, device)
    return Writeback(text, workers, delay)


def _workers(context: LockContext, device: int) -> Iterator[int]:
    """Yield the tasks of the workers that write back inodes of a device."""
    layout, pools = context.layout, work_pools(context)
    function = layout.symbol("wb_workfn")
    offset = layout.offset("bdi_writeback", "dwork.work")
    for pool in pools.pools.values():
        for worker in pools.workers(pool):
            if not worker.work or worker.function != function:
                continue
            owner = layout.member(worker.work - offset, "bdi_writeback", "bdi")
            if owner == device:
                yield worker.task


def _delay(context: LockContext, device: int) -> Delay | None:
    """Explain why the device's own work item has not begun, if it is queued."""
    layout = context.layout
    work = device + layout.offset("backing_dev_info", "wb.dwork.work")
    item = work_pools(context).item(work)
    if layout.word(work + layout.offset("work_struct", "entry")) < KERNEL_HALF:
        return None
    return work_delays(context).of_item(item)
