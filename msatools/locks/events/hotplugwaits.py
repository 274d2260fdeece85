# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits of a CPU that goes offline for the tasks that cannot leave it.

kernel/sched/core.c, balance_hotplug_wait(): the CPU's thread waits in
``rq.hotplug_wait`` until no task of the run queue has migration disabled (v5.11).
"""

import numpy as np

from msatools.errors import MissingError
from msatools.kernel.percpu import read_percpu
from msatools.kernel.structs import Members, read_structs
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one

_WAITS = ("sched_cpu_wait_empty", "balance_hotplug_wait")

_PINNED: Members = {"pinned": ("migration_disabled",)}


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the wait of a CPU's thread for the CPU to be empty.

    :raises drgn.FaultError: if the run queue cannot be read
    :raises MissingError: if its type is unknown
    """
    layout = context.layout
    if not case.is_in(*_WAITS) or not layout.has("rq", "hotplug_wait"):
        return None
    cpu = int(context.tasks["cpu"][case.row])
    queue = _run_queue(context, cpu)
    if layout.member(queue, "rq", "hotplug_wait.task") != case.address:
        return None
    return Request(Lock("rcuwait", queue + layout.offset("rq", "hotplug_wait"), cpu))


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the tasks that have migration disabled on the CPU.

    :raises drgn.FaultError: if the run queue cannot be read
    """
    layout, cpu = context.layout, _cpu(lock)
    if not layout.has("rq", "nr_pinned"):
        return []
    count = layout.member(_run_queue(context, cpu), "rq", "nr_pinned")
    rows = np.flatnonzero(
        (context.tasks["cpu"] == cpu) & (context.tasks["exit_state"] == 0)
    )
    addresses = context.tasks["address"][rows].astype(np.uint64)
    found = read_structs(
        context.reader, "struct task_struct", _PINNED, addresses, context.losses
    )
    if not count or not found.has("pinned"):
        return []
    pinned = addresses[found["pinned"] != 0].tolist()
    # One that runs is in and out of short sections.
    is_all = len(pinned) == count
    return [Holder(task, "exact" if is_all else "likely") for task in pinned]


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe the wait: which CPU, and how many tasks."""
    cpu = _cpu(request.lock)
    text = f"CPU {cpu} to be left by all tasks"
    count = context.layout.member(_run_queue(context, cpu), "rq", "nr_pinned")
    if count:
        have = "has" if count == 1 else "have"
        text += f": {count:,} {have} migration disabled"
    return text


def _cpu(lock: Lock) -> int:
    assert isinstance(lock.key, int)
    return lock.key


def _run_queue(context: LockContext, cpu: int) -> int:
    """Return the address of the ``struct rq`` of a CPU."""
    percpu = read_percpu(context.reader, context.losses)
    (rows,) = np.nonzero(percpu.cpus == cpu)
    if not len(rows):
        raise MissingError(f"there is no CPU {cpu}")
    return int(percpu.addresses("runqueues")[rows[0]])


HOTPLUG_WAIT = LockType(
    names=frozenset({"rcuwait"}),
    requests=at_most_one(request),
    holders=holders,
    what=what,
)
