# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait for that nobody takes: completions, wait queues, pages and bits."""

import numpy as np

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.events import bitwaits, completions, folios, waitqueues
from msatools.tasks.classes import TaskClass
from msatools.tasks.states import loads
from msatools.tasks.table import TaskTable

_CLASSES = frozenset(
    {
        *(TaskClass.KLK, TaskClass.DSK, TaskClass.FLT, TaskClass.SWP, TaskClass.RCL),
        TaskClass.OTH,
    }
)
_WAYS = ("__schedule", "schedule", "io_schedule", "preempt_schedule", "__switch_to")
_LOCKS = (
    *("__mutex_lock", "mutex_lock", "__ww_mutex_lock", "ww_mutex_lock", "__down"),
    *("down_", "rwsem_down_", "percpu_rwsem_wait", "percpu_down_write", "ldsem_down_"),
    *("__percpu_down_read", "rt_mutex_", "__rt_mutex_", "rtlock_", "rt_spin_lock"),
    *("rt_read_lock", "rt_write_lock", "rwbase_", "__rwbase_", "futex_", "__futex_"),
)
"""Who sleeps in them waits for a lock, whatever else it is queued on."""


def request(look: LockContext, case: BlockedTask) -> Request | None:
    """
    Tell what a task waits for; ``None`` if it is none of these, or nothing tells.

    :raises drgn.FaultError: if it cannot be read
    """
    if not _is_asked_for(look, case) or _is_in_lock(case):
        return None
    # Nothing else is waited for within a wait for a completion.
    found = completions.request(look, case)
    if found is not None or completions.is_waiting(case):
        return found
    return (
        folios.request(look, case)
        or bitwaits.request(look, case)
        or waitqueues.request(look, case)
    )


def queue(look: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Tell who waits for one of these, in order; ``None`` if that is not known.

    :raises drgn.FaultError: if it cannot be read
    """
    by_type = {
        "completion": completions.queue,
        "folio": folios.queue,
        "bit_wait": bitwaits.queue,
        "wait_queue": waitqueues.queue,
    }
    return by_type[lock.type](look, lock)


def holders(look: LockContext, lock: Lock) -> list[Holder]:
    """
    Tell who is to end the wait for one of these, where a structure says so.

    :raises drgn.FaultError: if it cannot be read
    """
    if lock.type == "completion":
        return completions.holders(look, lock)
    return waitqueues.holders(look, lock) if lock.type == "wait_queue" else []


def what(look: LockContext, case: BlockedTask, lock: Lock) -> str | None:
    """
    Say in a few words what a task waits for; ``None`` if nothing tells.

    :raises drgn.FaultError: if it cannot be read
    """
    if lock.type == "folio":
        return folios.what(look, case, lock)
    if lock.type == "completion":
        return completions.what(look, case, lock)
    return completions.by_caller(case) if lock.type == "wait_queue" else None


def _is_asked_for(look: LockContext, case: BlockedTask) -> bool:
    if case.task_class is TaskClass.WAI:
        # Any child will do for other waits: that is no lock.
        return completions.is_waiting(case)
    if case.task_class in _CLASSES:
        return True
    row = np.array([case.row], np.intp)
    return bool(loads(TaskTable(look.tasks.records[row], look.tasks.columns))[0])


def _is_in_lock(case: BlockedTask) -> bool:
    sleeper = next((name for name in case.names if not name.startswith(_WAYS)), "")
    return sleeper.startswith(_LOCKS)
