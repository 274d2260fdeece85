# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who is to make the callbacks of RCU that tasks wait for.

kernel/rcu/tree.c, rcu_barrier(): each CPU that has callbacks gets one more, and the
last of those completes ``rcu_state.barrier_completion``. Who waits for a grace period
has a callback of its own, on its stack. A thread makes the callbacks of a CPU where
they are taken from it (rcu_nocbs=; kernel/rcu/tree_nocb.h), else a softirq does.
"""

from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.kernel.ranges import ranges
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.target.addresses import KERNEL_HALF

MAX_CALLBACKS = 1 << 16
"""Maximum number of callbacks of one CPU to go through."""

_MAX_OF_ALL = 1 << 18
"""Maximum number of callbacks of all CPUs to go through."""


class QueuedCallback(Struct, frozen=True):
    """A callback in the list of a CPU."""

    cpu: int
    data: int
    """Address of the CPU's ``struct rcu_data``."""

    is_ready: bool
    """Whether its grace period has ended, so that it is to be made."""


class _Callbacks(Struct, frozen=True):
    """The callbacks in the lists of all CPUs."""

    by_head: dict[int, QueuedCallback]
    """By the address of each one's ``struct rcu_head``."""

    longer: frozenset[int]
    """The ``struct rcu_data`` of CPUs that have more: the list is too long to be gone
    through, or who makes callbacks has taken them out of it (rcu_do_batch()) and not
    counted them yet."""


class _Awaited(Struct, frozen=True):
    """The callback of one CPU that is waited for."""

    queued: QueuedCallback
    is_seen: bool
    """Whether it was found in the CPU's list; else the CPU has more than are there."""

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
    cpus = ranges(each.queued.cpu for each in awaited)
    text = f"RCU callbacks of CPU{'' if len(awaited) == 1 else 's'} {cpus}"
    if not any(each.queued.is_ready for each in awaited):
        text += ", whose grace period has not ended"
    return text, tuple(
        Holder(
            each.thread,
            "exact" if each.queued.is_ready and each.is_seen else "likely",
        )
        for each in awaited
        if each.thread
    )


@per_context
def _awaited(context: LockContext) -> list[_Awaited]:
    """The callbacks that rcu_barrier() has queued, and that are still queued.

    One that is not in the list may be among those that are being made, or behind more
    than are gone through. They are made in order, so that it takes the same thread.
    """
    layout = context.layout
    function = layout.symbol("rcu_barrier_callback")
    if function is None or not layout.has("rcu_data", "barrier_head"):
        return []
    known, found = callbacks(context), []
    percpu = read_percpu(context.reader, context.losses)
    addresses = percpu.addresses("rcu_data").tolist()
    for cpu, data in zip(percpu.cpus.tolist(), addresses, strict=True):
        if layout.member(data, "rcu_data", "barrier_head.func") != function:
            continue
        head = data + layout.offset("rcu_data", "barrier_head")
        queued = known.by_head.get(head)
        is_seen = queued is not None
        if queued is None and data in known.longer:
            queued = QueuedCallback(cpu, data, is_ready=True)
        if queued is not None:
            thread = callback_thread(context, queued)
            found.append(_Awaited(queued, is_seen, thread))
    return found


@per_context
def callbacks(context: LockContext) -> _Callbacks:
    """Return the callbacks of all CPUs.

    include/linux/rcu_segcblist.h: what is up to ``tails[0]`` is ready.

    :raises MissingError: if the types are unknown
    """
    layout = context.layout
    start = layout.offset("rcu_data", "cblist.head")
    following = layout.offset("callback_head", "next")
    percpu = read_percpu(context.reader, context.losses)
    addresses = percpu.addresses("rcu_data").tolist()
    found: dict[int, QueuedCallback] = {}
    longer = set()
    for cpu, data in zip(percpu.cpus.tolist(), addresses, strict=True):
        try:
            last = layout.member(data, "rcu_data", "cblist.tails[0]")
            place, is_ready = data + start, last != data + start
            for count in range(min(MAX_CALLBACKS, _MAX_OF_ALL - len(found))):
                node = layout.word(place)
                if node < KERNEL_HALF:
                    if layout.member(data, "rcu_data", "cblist.len") > count:
                        longer.add(data)
                    break
                found[node] = QueuedCallback(cpu, data, is_ready)
                place = node + following
                is_ready = is_ready and place != last
            else:
                longer.add(data)
        except UNREADABLE as error:
            context.losses.lose(
                Loss.COMPLETIONS, f"cannot read callbacks of CPU {cpu}: {error}"
            )
    return _Callbacks(found, frozenset(longer))


def callback_thread(context: LockContext, queued: QueuedCallback) -> int:
    """Return the thread that makes a callback, or that wakes it; 0 if unknown."""
    layout, data = context.layout, queued.data
    try:
        if queued.is_ready:
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
