# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recognizes tasks that wait for an event, which unlike a lock has no owner."""

import numpy as np

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.ownstack import WaitEntry
from msatools.locks.base.wait_queues import Queue, wait_queues
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
_IN_LOCKS = (
    *("__mutex_lock", "mutex_lock", "__ww_mutex_lock", "ww_mutex_lock", "__down"),
    *("down_", "rwsem_down_", "percpu_rwsem_wait", "percpu_down_write", "ldsem_down_"),
    *("__percpu_down_read", "rt_mutex_", "__rt_mutex_", "rtlock_", "rt_spin_lock"),
    *("rt_read_lock", "rt_write_lock", "rwbase_", "__rwbase_", "futex_", "__futex_"),
)
"""A task that sleeps in one of these functions waits for a lock, even if it is also on
a wait queue."""

_WAITS = ("wait_for_completion", "__wait_for_common", "wait_for_common")
_COMPLETION_WAYS = (*_WAYS, "do_wait_for_common", "blk_wait_io", *_WAITS)
"""Functions in which tasks wait; the caller identifies the event."""

# Descriptions of events, by the innermost function that is not one of those.
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
    return any(name.startswith(_WAITS) for name in case.names)


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
    return _BY_CALLER.get(_caller(case))


def _caller(case: BlockedTask) -> str:
    """Return the innermost function that is not one of those in which tasks wait."""
    names = (name.partition(".")[0] for name in case.names)
    return next((name for name in names if not name.startswith(_COMPLETION_WAYS)), "")


def _is_asked_for(context: LockContext, case: BlockedTask) -> bool:
    if case.task_class is TaskClass.WAI:
        # Other waits are for any child, which is no event.
        return is_completion(case)
    if case.task_class in _CLASSES:
        return True
    row = np.array([case.row], np.intp)
    return bool(loads(TaskTable(context.tasks.records[row], context.tasks.columns))[0])


def _is_in_lock(case: BlockedTask) -> bool:
    sleeper = next((name for name in case.names if not name.startswith(_WAYS)), "")
    return sleeper.startswith(_IN_LOCKS)
