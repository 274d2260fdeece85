# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who is to make the callbacks of RCU that rcu_barrier() waits for.

kernel/rcu/tree.c, rcu_barrier(): each CPU that has callbacks gets one more, and the
last of those completes ``rcu_state.barrier_completion``. A thread makes the callbacks
of a CPU where they are taken from it (rcu_nocbs=; kernel/rcu/tree_nocb.h), else a
softirq does.
"""

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.ranges import ranges
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.records import dataclass
from msatools.target.addresses import KERNEL_HALF

MAX_CALLBACKS = 1 << 16
"""Maximum number of callbacks of one CPU to go through."""


@dataclass(frozen=True)
class _Awaited:
    """The callback of one CPU that is waited for."""

    cpu: int
    is_ready: bool
    """Whether its grace period has ended, so that it is to be made."""

    thread: int
    """Task that has to run for that; 0 if unknown, as with a softirq."""


def awaited_callbacks(
    context: LockContext, address: int
) -> tuple[str, tuple[Holder, ...]] | None:
    """
    Return what rcu_barrier() waits for, and the threads that are to make it.

    :param address: Address of a completion.
    :return: ``None`` if it is another completion, or nothing is known of this one.
    :raises drgn.FaultError: if the callbacks cannot be read
    """
    state = context.layout.symbol("rcu_state")
    if state is None or not context.layout.has("rcu_state", "barrier_completion"):
        return None
    if address - state != context.layout.offset("rcu_state", "barrier_completion"):
        return None
    awaited = _awaited(context)
    if not awaited:
        return None
    cpus = ranges(each.cpu for each in awaited)
    text = f"RCU callbacks of CPU{'' if len(awaited) == 1 else 's'} {cpus}"
    if not any(each.is_ready for each in awaited):
        text += ", whose grace period has not ended"
    return text, tuple(
        Holder(each.thread, "exact" if each.is_ready else "likely")
        for each in awaited
        if each.thread
    )


@per_context
def _awaited(context: LockContext) -> list[_Awaited]:
    """The callbacks that rcu_barrier() has queued, and that are still queued."""
    layout = context.layout
    function = layout.symbol("rcu_barrier_callback")
    if function is None or not layout.has("rcu_data", "barrier_head"):
        return []
    percpu = read_percpu(context.reader, context.losses)
    addresses = percpu.addresses("rcu_data").tolist()
    found = []
    for cpu, data in zip(percpu.cpus.tolist(), addresses, strict=True):
        if layout.member(data, "rcu_data", "barrier_head.func") != function:
            continue
        is_ready = _is_ready(context, data)
        if is_ready is not None:
            thread = _thread(context, data, is_ready)
            found.append(_Awaited(cpu, is_ready, thread))
    return found


def _is_ready(context: LockContext, data: int) -> bool | None:
    """Return whether the callback of a CPU is to be made; ``None`` if not queued.

    include/linux/rcu_segcblist.h: what is up to ``tails[0]`` is ready.
    """
    layout = context.layout
    wanted = data + layout.offset("rcu_data", "barrier_head")
    (last,) = layout.members(data, "rcu_data", "cblist.tails[0]")
    place = data + layout.offset("rcu_data", "cblist.head")
    is_ready = last != place
    for _ in range(MAX_CALLBACKS):
        node = layout.word(place)
        if node == wanted:
            return is_ready
        if node < KERNEL_HALF:
            break
        place = node + layout.offset("callback_head", "next")
        is_ready = is_ready and place != last
    return None


def _thread(context: LockContext, data: int, is_ready: bool) -> int:
    """Return the thread that makes the callbacks of a CPU, or that wakes it."""
    layout = context.layout
    try:
        if is_ready:
            return _nocb(context, data, "nocb_cb_kthread")
        leader = layout.member(data, "rcu_data", "nocb_gp_rdp")
        leads = leader >= KERNEL_HALF and _nocb(context, leader, "nocb_gp_kthread")
        return leads if leads and _is_runnable(context, leads) else 0
    except MissingError:
        return 0  # without CONFIG_RCU_NOCB_CPU
    except UNREADABLE as error:
        context.losses.lose(
            Loss.COMPLETIONS, f"cannot read the thread of callbacks: {error}"
        )
        return 0


def _nocb(context: LockContext, data: int, member: str) -> int:
    task = context.layout.member(data, "rcu_data", member)
    return task if task >= KERNEL_HALF else 0


def _is_runnable(context: LockContext, task: int) -> bool:
    return bool(context.layout.member(task, "task_struct", "on_rq"))
