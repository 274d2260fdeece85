# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for RCU: threads that invoke callbacks, tasks that hold up grace periods."""

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.clocks import read_jiffies
from msatools.kernel.percpu import read_percpu
from msatools.kernel.report import Loss
from msatools.kernel.structs import Members, read_structs
from msatools.locks.context import LockContext, per_context
from msatools.locks.report import Holder
from msatools.program.linear import KERNEL_HALF
from msatools.reports.units import ranges
from msatools.tasks.preemption import GracePeriodState, read_grace_period_state

# --- The threads that invoke the RCU callbacks that tasks wait for.
#
# kernel/rcu/tree.c, rcu_barrier(): each CPU that has callbacks gets one more, and the
# last one to be invoked completes rcu_state.barrier_completion. A task that waits for a
# grace period has a callback on its stack. Callbacks of an offloaded CPU (rcu_nocbs=;
# kernel/rcu/tree_nocb.h) are invoked by a thread, those of other CPUs by a softirq. A
# CPU that is not offloaded may have such a thread, too.


MAX_CALLBACKS = 1 << 16
"""Maximum number of callbacks of one CPU to read."""

_MAX_OF_ALL = 1 << 18
"""Maximum number of callbacks of all CPUs to read."""

_MAX_SERVED = 1 << 13
"""Maximum number of CPUs in the list of one thread."""


class QueuedCallback(Struct, frozen=True):
    """A callback in the list of a CPU."""

    cpu: int
    data: int
    """Address of the CPU's ``struct rcu_data``."""

    is_ready: bool
    """Whether its grace period has ended, so that it can be invoked."""


class _Callbacks(Struct, frozen=True):
    """The callbacks in the lists of all CPUs."""

    by_head: dict[int, QueuedCallback]
    """Maps the address of a ``struct rcu_head`` to its callback."""

    longer: frozenset[int]
    """Addresses of the ``struct rcu_data`` of CPUs with more callbacks: the list is too
    long to read, or rcu_do_batch() has taken callbacks off the list to invoke them, and
    has not subtracted them from its length yet."""


class _Awaited(Struct, frozen=True):
    """A callback that rcu_barrier() has queued on one CPU, and waits for."""

    queued: QueuedCallback
    is_seen: bool
    """Whether it is in the CPU's list; if not, the list is known to lack some."""

    thread: int
    """Address of the task that has to run next for it: see :func:`callback_thread`."""


def awaited_callbacks(
    context: LockContext, address: int
) -> tuple[str, tuple[Holder, ...]] | None:
    """
    Describe the callbacks that rcu_barrier() waits for, and find their threads.

    :param address: Address of a completion.
    :return: The description, and the threads that have to invoke the callbacks;
        ``None`` for another completion, or if no callback was found.
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
    """Return the callbacks of rcu_barrier() that have not been invoked yet.

    A callback that is not in its CPU's list may be in the batch being invoked, or past
    the part of the list that was read: either way the same thread invokes it. Or it was
    invoked long ago: its ``func`` stays set, and not all kernels mark it as invoked. So
    callbacks that are not in a list count only if rcu_barrier() waits for as many.
    """
    layout = context.layout
    function = layout.symbol("rcu_barrier_callback")
    if function is None or not layout.has("rcu_data", "barrier_head"):
        return []
    known, seen, unseen = callbacks(context), [], []
    percpu = read_percpu(context.reader, context.losses)
    addresses = percpu.addresses("rcu_data").tolist()
    for cpu, data in zip(percpu.cpus.tolist(), addresses, strict=True):
        if layout.member(data, "rcu_data", "barrier_head.func") != function:
            continue
        head = data + layout.offset("rcu_data", "barrier_head")
        queued = known.by_head.get(head)
        if queued is not None:
            seen.append(queued)
        elif data in known.longer and not _is_made(context, head):
            unseen.append(QueuedCallback(cpu, data, is_ready=True))
    if unseen and len(seen) + len(unseen) != _barrier_count(context):
        unseen = []
    return [
        _Awaited(queued, is_seen, callback_thread(context, queued))
        for group, is_seen in ((seen, True), (unseen, False))
        for queued in group
    ]


def _is_made(context: LockContext, head: int) -> bool:
    """Return whether a callback of rcu_barrier() is marked as invoked.

    kernel/rcu/tree.c, rcu_barrier_callback(): v6.12 makes it point to itself, v6.1 does
    not mark it.
    """
    return context.layout.member(head, "callback_head", "next") == head


def _barrier_count(context: LockContext) -> int | None:
    """Return the number of callbacks that rcu_barrier() still waits for."""
    layout, state = context.layout, context.layout.symbol("rcu_state")
    if state is None or not layout.has("rcu_state", "barrier_cpu_count"):
        return None
    return layout.member(state, "rcu_state", "barrier_cpu_count")


@per_context
def callbacks(context: LockContext) -> _Callbacks:
    """Return the callbacks of all CPUs.

    include/linux/rcu_segcblist.h: callbacks up to ``tails[0]`` are ready.

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
    """Return the address of the task that has to run next for a callback.

    For a ready callback that is the thread that invokes callbacks of the CPU, else the
    grace-period thread of the CPU's group, if runnable.

    :return: 0 if there is no such task, as with a softirq, or it is unknown.
    """
    layout, data = context.layout, queued.data
    try:
        leader = layout.member(data, "rcu_data", "nocb_gp_rdp")
        if not _is_offloaded(context, data, leader):
            return 0
        if queued.is_ready:
            return _nocb(context, data, "nocb_cb_kthread")
        leads = leader >= KERNEL_HALF and _nocb(context, leader, "nocb_gp_kthread")
        return leads if leads and _is_runnable(context, leads) else 0
    except MissingError:
        return 0  # without CONFIG_RCU_NOCB_CPU
    except UNREADABLE as error:
        context.losses.lose(
            Loss.COMPLETIONS, f"cannot read the thread of callbacks: {error}"
        )
        return 0


def _is_offloaded(context: LockContext, data: int, leader: int) -> bool:
    """Return whether threads invoke the callbacks of a CPU, not its own softirq.

    Since "rcu/nocb: Create kthreads on all CPUs if "rcu_nocbs=" or "nohz_full=" are
    passed" (in v5.17) CPUs that are not offloaded have threads, too, which sleep or are
    parked. Since "rcu/nocb: Remove rdp from nocb list when de-offloaded" (in v5.17) the
    list of a leader has only offloaded CPUs. The bit of ``cblist.flags`` is not used:
    it has no name in the types, and its position has changed.

    :param data: Address of the CPU's ``struct rcu_data``.
    :param leader: Address of the ``struct rcu_data`` that leads its group of CPUs.
    """
    layout = context.layout
    if not layout.has("rcu_data", "nocb_head_rdp"):
        return True  # only offloaded CPUs have threads
    if leader < KERNEL_HALF:
        return False
    head = leader + layout.offset("rcu_data", "nocb_head_rdp")
    wanted = data + layout.offset("rcu_data", "nocb_entry_rdp")
    node = head
    for _ in range(_MAX_SERVED):
        node = layout.word(node)
        if node == wanted:
            return True
        if node == head or node < KERNEL_HALF:
            break
    return False


def _nocb(context: LockContext, data: int, member: str) -> int:
    task = context.layout.member(data, "rcu_data", member)
    return task if task >= KERNEL_HALF else 0


def _is_runnable(context: LockContext, task: int) -> bool:
    return bool(context.layout.member(task, "task_struct", "on_rq"))


# --- The tasks that hold up the RCU grace period that a task waits for.
#
# kernel/rcu/update.c, __wait_rcu_gp(): the task queues an RCU callback, and waits until
# that completes a struct rcu_synchronize on the task's stack. The callback runs after a
# grace period, the current one or a later one; in both cases the current one has to end
# first. So the task waits for the tasks that hold up the current grace period (read by
# msatools.tasks.preemption, as for msa-cpus --stalls). If the callback's grace period
# has ended, the task waits for the thread that invokes the callbacks of its CPU.


HOLDS_UP_NS = 1_000_000_000
"""Minimum age of a grace period from which CPUs are reported to hold it up: normally
all pass a quiescent state within milliseconds."""

_MAX_REQUESTS = 4096
"""Maximum number of entries of one list of waiters or callbacks to read."""

_WHAT = "RCU grace period"
_EXPEDITED = "expedited RCU grace period"

_EXPEDITED_QUEUES = 4
"""Number of elements of ``rcu_node.exp_wq``."""

_FLAVOURS = {
    "rcu_tasks": "RCU Tasks",
    "rcu_tasks_rude": "RCU Tasks Rude",
    "rcu_tasks_trace": "RCU Tasks Trace",
}
"""Maps variables of kernel/rcu/tasks.h to the kernel's names of these RCU flavours."""

_HOLDOUT: Members = {
    "holdout": ("rcu_tasks_holdout",),
    "then": ("rcu_tasks_nvcsw",),
    "switches": ("nvcsw",),
    "in_user": ("rcu_tasks_idle_cpu",),
}


class _Blockers(Struct, frozen=True):
    """The current grace period: a description, and the tasks that hold it up."""

    text: str
    holders: tuple[Holder, ...]


def awaited_grace_period(
    context: LockContext, address: int
) -> tuple[str, tuple[Holder, ...]] | None:
    """
    Describe the grace period that a task waits for; return the tasks that hold it up.

    The kernel records readers that were preempted (``exact``). Of a CPU that has not
    passed a quiescent state it records only the number: the task that the CPU runs is
    ``likely`` the reader.

    :param address: Address of a completion.
    :return: ``None`` if the completion is not of a grace period.
    :raises drgn.FaultError: if RCU's lists cannot be read
    :raises MissingError: if the types are unknown
    """
    head = address - context.layout.offset("rcu_synchronize", "completion")
    is_callback, queued = _wakes(context, head), None
    # For other completions the callbacks of all CPUs need not be read.
    if is_callback:
        queued = callbacks(context).by_head.get(head)
    if queued is None and head not in _requests(context):
        flavour = _flavour_of(context, head) if is_callback else None
        return None if flavour is None else _task_blockers(context, flavour)
    if queued is not None and queued.is_ready:
        thread = callback_thread(context, queued)
        text = f"RCU callback of CPU {queued.cpu}, whose grace period has ended"
        return text, (Holder(thread, "exact"),) if thread else ()
    found = _blockers(context)
    return found.text, found.holders


def awaited_expedited(
    context: LockContext, head: int
) -> tuple[str, tuple[Holder, ...]] | None:
    """
    Describe an expedited grace period; return the tasks that hold it up.

    kernel/rcu/tree_exp.h: a task that asks for a grace period that another task has
    started waits in ``exp_wq`` of a node; the worker that runs it waits in
    ``expedited_wq``. A reader holds it up until it ends; a reader that leaves its CPU
    is recorded.

    :param head: Address of a ``struct wait_queue_head`` or ``swait_queue_head``.
    :return: ``None`` if the queue is not of an expedited grace period.
    :raises drgn.FaultError: if RCU's tree cannot be read
    :raises MissingError: if the types are unknown
    """
    layout = context.layout
    root = layout.symbol("rcu_state")
    if root is None or not layout.has("rcu_node", "exp_wq"):
        return None
    # rcu_state has an array of nodes before its member level. Each node has an array of
    # queues, which is followed by other queues that must not match.
    first, end = (layout.offset("rcu_state", name) for name in ("node", "level"))
    start = layout.offset("rcu_node", "exp_wq")
    width = _EXPEDITED_QUEUES * layout.size("wait_queue_head")
    place = (head - root - first) % layout.size("rcu_node")
    is_node = first <= head - root < end and start <= place < start + width
    if not is_node and head != expedited_queue(context):
        return None
    state = _state(context)
    if state is None:
        return _EXPEDITED, ()
    readers = [task for task in state.expedited_tasks if context.pid(task)]
    running = [
        task
        for cpu in state.expedited_cpus
        if (task := _runs(context, cpu, HOLDS_UP_NS)) and task not in readers
    ]
    text = _EXPEDITED
    if running:
        cpus = state.expedited_cpus
        some = f"CPU{'' if len(cpus) == 1 else 's'} {ranges(cpus)}"
        text += f", held up by {some}{' and by readers' if readers else ''}"
    elif readers:
        text += f", held up by {'a reader' if len(readers) == 1 else 'readers'}"
    return text, (
        *(Holder(task, "exact") for task in readers),
        *(Holder(task, "likely") for task in running),
    )


def expedited_queue(context: LockContext) -> int | None:
    """Return the queue on which the worker of an expedited grace period waits.

    :return: Address of the ``struct swait_queue_head``; ``None`` if unknown.
    """
    state = context.layout.symbol("rcu_state")
    if state is None or not context.layout.has("rcu_state", "expedited_wq"):
        return None
    return state + context.layout.offset("rcu_state", "expedited_wq")


def _flavour_of(context: LockContext, head: int) -> str | None:
    """Return the variable of the RCU Tasks flavour that a callback is queued on.

    kernel/rcu/tasks.h: each flavour has a list for each CPU (since v5.17), in which a
    callback stays until its grace period has ended.

    :param head: Address of the callback's ``struct rcu_head``.
    :return: A key of :data:`_FLAVOURS`; ``None`` if it is in no list.
    """
    layout = context.layout
    if not layout.has("rcu_tasks", "rtpcpu"):
        return None
    percpu = read_percpu(context.reader, context.losses)
    for name in _FLAVOURS:
        flavour = layout.symbol(name)
        if flavour is None:
            continue
        lists = percpu.at(layout.member(flavour, "rcu_tasks", "rtpcpu")).tolist()
        for place in lists:
            node = layout.member(place, "rcu_tasks_percpu", "cblist.head")
            for _ in range(_MAX_REQUESTS):
                if node == head:
                    return name
                if node < KERNEL_HALF:
                    break
                node = layout.word(node)
    return None


def _task_blockers(
    context: LockContext, flavour: str
) -> tuple[str, tuple[Holder, ...]]:
    """Describe a grace period of RCU Tasks; return the tasks that hold it up.

    rcu_tasks_wait_gp(): a runnable task holds up RCU Tasks until it switches
    voluntarily or is in user mode. For the other flavours the flavour's own thread is
    returned: its wait leads to the tasks that hold it up.
    """
    text = f"{_FLAVOURS[flavour]} grace period"
    holdouts = _holdouts(context) if flavour == "rcu_tasks" else []
    if holdouts:
        many = len(holdouts)
        text += f", held up by {'a task' if many == 1 else f'{many:,} tasks'} "
        text += f"that {'has' if many == 1 else 'have'} not switched"
        return text, tuple(Holder(task, "exact") for task in holdouts)
    layout = context.layout
    place = layout.symbol(flavour)
    assert place is not None
    thread = layout.member(place, "rcu_tasks", "kthread_ptr")
    return text, (Holder(thread, "exact"),) if thread >= KERNEL_HALF else ()


@per_context
def _holdouts(context: LockContext) -> list[int]:
    """Return the addresses of tasks that RCU Tasks waits for (check_holdout_task())."""
    addresses = context.tasks["address"].astype(np.uint64)
    found = read_structs(
        context.reader, "struct task_struct", _HOLDOUT, addresses, context.losses
    )
    if not all(found.has(name) for name in ("holdout", "switches", "then")):
        return []
    waits = (found["holdout"] != 0) & found.readable & (context.tasks["on_rq"] != 0)
    waits &= found["switches"] == found["then"]
    waits &= context.tasks["exit_state"] == 0
    if found.has("in_user"):
        # The CPU on which context tracking (nohz_full=) has the task in user mode, or
        # -1: in user mode it holds up nothing, and the next check removes it.
        waits &= found["in_user"].astype(np.int32) < 0
    return [int(address) for address in addresses[waits].tolist()]


def _wakes(context: LockContext, head: int) -> bool:
    """Return whether an address may be of a callback that wakes a waiting task."""
    function = context.layout.symbol("wakeme_after_rcu")
    found = context.layout.member(head, "callback_head", "func")
    return function is not None and found == function


@per_context
def _requests(context: LockContext) -> frozenset[int]:
    """Return the addresses of the ``struct rcu_head`` that RCU's own thread wakes.

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
    cpus = list(state.cpus) if (age_ns or 0) >= HOLDS_UP_NS else []
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
    """Return the ns since jiffies had the value *count*; ``None`` if unknown."""
    if count is None or context.monotonic_ns is None:
        return None
    try:
        moment = read_jiffies(context.reader.prog).past_ns(count)
    except LOST as error:
        context.losses.lose(Loss.TICKS, f"cannot read the time in ticks: {error}")
        return None
    return None if moment is None else context.monotonic_ns - moment


def _runs(context: LockContext, cpu: int, least_ns: int = 0) -> int | None:
    """Return the address of the task that a CPU runs; ``None`` if it idles.

    :param least_ns: ``None`` also if the task has run for a shorter time.
    """
    tasks = context.tasks
    since = context.local_ns - tasks["last_arrival_ns"].astype(np.int64)
    is_here = (tasks["on_cpu"] != 0) & (tasks["cpu"] == cpu) & (since >= least_ns)
    rows = np.flatnonzero(is_here).tolist()
    found = [row for row in rows if tasks["pid"][row]]
    return int(tasks["address"][found[0]]) if found else None


def _is_kept(context: LockContext, state: GracePeriodState) -> bool:
    """Return whether RCU's thread is runnable, but has not run for HOLDS_UP_NS."""
    if state.thread < KERNEL_HALF:
        return False
    if (_since(context, state.activity) or 0) < HOLDS_UP_NS:
        return False
    try:
        waits, runs = context.layout.members(
            state.thread, "task_struct", "on_rq", "on_cpu"
        )
    except (MissingError, *UNREADABLE):
        return False
    return bool(waits and not runs)
