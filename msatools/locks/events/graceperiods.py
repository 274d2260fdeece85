# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who a task waits for that waits for a grace period of RCU.

kernel/rcu/update.c, __wait_rcu_gp(): the task queues a callback that completes a
``struct rcu_synchronize`` on its stack, once the readers of that moment have ended.
Whichever grace period that is, the one under way has to end first. So the wait leads to
who holds that up, which :mod:`msatools.tasks.graceperiods` reads, as it does for
``msa-cpus --stalls``; or, where it has ended, to the thread that makes the callback.
"""

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.jiffies import read_jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.ranges import ranges
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.events.callbacks import (
    QueuedCallback,
    callback_thread,
    callbacks,
)
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.graceperiods import GracePeriodState, read_grace_period_state

LATE_NS = 1_000_000_000
"""From when on a CPU holds up a grace period: all others pass within milliseconds, and
what such a CPU runs by then may be another task."""

_MAX_REQUESTS = 4096
"""Maximum number of waiters in the list of RCU's thread."""

_WHAT = "RCU grace period"


class _Blockers(Struct, frozen=True):
    """What holds up the grace period that is under way."""

    text: str
    holders: tuple[Holder, ...]


def awaited_grace_period(
    context: LockContext, address: int
) -> tuple[str, tuple[Holder, ...]] | None:
    """
    Return what a task waits for, and the tasks that hold it up.

    Readers that left their CPU are recorded (``exact``). Of a CPU that has not passed a
    quiescent state only the number is: what it runs is ``likely`` the reader.

    :param address: Address of a completion.
    :return: ``None`` if it is another completion.
    :raises drgn.FaultError: if RCU's lists cannot be read
    :raises MissingError: if the types are unknown
    """
    head = address - context.layout.offset("rcu_synchronize", "completion")
    queued = _own_callback(context, head)
    if queued is None and head not in _requests(context):
        return None
    if queued is not None and queued.is_ready:
        thread = callback_thread(context, queued)
        text = f"RCU callback of CPU {queued.cpu}, whose grace period has ended"
        return text, (Holder(thread, "exact"),) if thread else ()
    found = _blockers(context)
    return found.text, found.holders


def _own_callback(context: LockContext, head: int) -> QueuedCallback | None:
    """Return the callback at an address, if it wakes one who waits."""
    layout = context.layout
    function = layout.symbol("wakeme_after_rcu")
    found = layout.member(head, "callback_head", "func")
    # Other completions are not worth going through all callbacks for.
    if function is None or found != function:
        return None
    return callbacks(context).by_head.get(head)


@per_context
def _requests(context: LockContext) -> frozenset[int]:
    """The waiters in the list of RCU's own thread, by their ``struct rcu_head``.

    "rcu: Reduce synchronize_rcu() latency" (in v6.10), with rcu_normal_wake_from_gp.
    """
    layout = context.layout
    state = layout.symbol("rcu_state")
    if state is None or not layout.has("rcu_state", "srs_next"):
        return frozenset()
    node = layout.member(state, "rcu_state", "srs_next.first")
    found: set[int] = set()
    while node >= KERNEL_HALF and node not in found and len(found) < _MAX_REQUESTS:
        found.add(node)
        node = layout.word(node)
    return frozenset(found)


@per_context
def _blockers(context: LockContext) -> _Blockers:
    state = _state(context)
    if state is None:
        return _Blockers(_WHAT, ())
    age_ns = _since(context, state.start) if state.is_active else None
    cpus = list(state.cpus) if (age_ns or 0) >= LATE_NS else []
    running = [task for cpu in cpus if (task := _runs(context, cpu))]
    readers = [task for task in state.tasks if context.pid(task)]
    holders = [
        *(Holder(task, "exact") for task in readers),
        *(Holder(task, "likely") for task in running if task not in readers),
    ]
    text = _WHAT
    if running and cpus:
        some = f"CPU{'' if len(cpus) == 1 else 's'} {ranges(cpus)}"
        text += f", held up by {some}{' and by readers' if readers else ''}"
    elif readers:
        text += f", held up by {'a reader' if len(readers) == 1 else 'readers'}"
    elif not holders and _is_kept(context, state):
        holders = [Holder(state.thread, "likely")]
        text += ", whose thread has no turn"
    return _Blockers(text, tuple(holders))


def _state(context: LockContext) -> GracePeriodState | None:
    percpu = read_percpu(context.reader, context.losses)
    try:
        return read_grace_period_state(context.reader, percpu, context.losses)
    except MissingError:
        return None


def _since(context: LockContext, count: int | None) -> int | None:
    """Return the time since jiffies had some value."""
    if count is None or context.monotonic_ns is None:
        return None
    try:
        moment = read_jiffies(context.reader.prog).past_ns(count)
    except LOST as error:
        context.losses.lose(Loss.TICKS, f"cannot read the time in ticks: {error}")
        return None
    return None if moment is None else context.monotonic_ns - moment


def _runs(context: LockContext, cpu: int) -> int | None:
    """Return the task that a CPU runs; ``None`` if it idles."""
    tasks = context.tasks
    rows = np.flatnonzero((tasks["on_cpu"] != 0) & (tasks["cpu"] == cpu)).tolist()
    found = [row for row in rows if tasks["pid"][row]]
    return int(tasks["address"][found[0]]) if found else None


def _is_kept(context: LockContext, state: GracePeriodState) -> bool:
    """Return whether RCU's thread is runnable and has long had no turn."""
    if state.thread < KERNEL_HALF:
        return False
    if (_since(context, state.activity) or 0) < LATE_NS:
        return False
    try:
        waits, runs = context.layout.members(
            state.thread, "task_struct", "on_rq", "on_cpu"
        )
    except (MissingError, *UNREADABLE):
        return False
    return bool(waits and not runs)
