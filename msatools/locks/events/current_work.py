# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes the work item that a task executes, if it is a worker."""

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.locks.base.lock_context import LockContext
from msatools.locks.events.kthreads import kernel_threads
from msatools.locks.workqueues.pools import Worker, WorkPools, work_pools
from msatools.target.addresses import KERNEL_HALF

_PF_WQ_WORKER = 0x20
"""Flag of ``task_struct.flags``: a worker of a workqueue."""


def current_work(context: LockContext, row: int) -> str | None:
    """Return the work item that a task executes, as ``FUNCTION of WORKQUEUE``.

    :return: ``None`` if the task is no worker, is idle, or that cannot be read.
    """
    if not int(context.tasks["flags"][row]) & _PF_WQ_WORKER:
        return None
    try:
        worker = _worker(context, int(context.tasks["address"][row]))
        if worker is None or not worker.work:
            return None
        return name_of_work(work_pools(context), worker)
    except MissingError:
        return None
    except UNREADABLE as error:
        context.losses.lose(
            Loss.WORKQUEUES, f"cannot determine what a worker does: {error}"
        )
        return None


def _worker(context: LockContext, task: int) -> Worker | None:
    address = kernel_threads(context).data_of(task) or 0
    if address < KERNEL_HALF:
        return None
    worker = work_pools(context).worker(address)
    return worker if worker.task == task else None


def name_of_work(pools: WorkPools, worker: Worker) -> str:
    """Return the work item of a worker, as ``FUNCTION of WORKQUEUE``.

    :raises drgn.FaultError: if its workqueue cannot be read
    """
    function = pools.function(worker.function) or "of unknown name"
    return f"{function} of {pools.queue(pools.part(worker.pwq).queue).name}"
