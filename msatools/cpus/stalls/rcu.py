# SPDX-License-Identifier: LGPL-2.1-or-later

"""RCU's grace period, and who holds it up (kernel/rcu/tree.c, tree_plugin.h).

A leaf ``struct rcu_node`` has a bit for each of its CPUs that has not passed a
quiescent state, and a list of the tasks that left a CPU as readers.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from msatools.cpus.stalls.model import GracePeriod, GracePeriodTask
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.jiffies import Jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, Structs, read_struct, read_structs
from msatools.kernel.words import LIST_HEAD, MAX_PLAUSIBLE
from msatools.records import dataclass
from msatools.selfdesc.find import find_symbol, find_type, offset_of
from msatools.tasks.identity import comm_text
from msatools.tasks.states import letters
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.task_state import TaskState, ages

_UNDER_WAY = 3
"""RCU_SEQ_STATE_MASK: the bits of a sequence that are set during a grace period."""

_INIT = 1
"""RCU_GP_FLAG_INIT: a grace period was requested."""

_STATE: Members = {
    "sequence": ("gp_seq",),
    "flags": ("gp_flags",),
    "start": ("gp_start",),
    "activity": ("gp_activity",),
    "requested": ("gp_req_activity",),
    "thread": ("gp_kthread",),
    "expedited": ("expedited_sequence",),
}

_DATA: Members = {
    "node": ("mynode",),
    "callbacks": ("cblist.len",),
}

_NODE: Members = {
    "first_cpu": ("grplo",),
    "last_cpu": ("grphi",),
    "cpus": ("qsmask",),
    "expedited_cpus": ("expmask",),
    "tasks": ("gp_tasks",),
    "expedited_tasks": ("exp_tasks",),
}

_MAX_TASKS = 256
"""Maximum number of tasks of one leaf to name."""

_WAITS = (
    *("synchronize_rcu", "synchronize_srcu", "__synchronize_srcu", "__wait_rcu_gp"),
    *("wait_rcu_gp", "rcu_barrier", "kvfree_rcu_barrier", "synchronize_sched"),
    *("cond_synchronize_rcu", "exp_funnel_lock", "rcu_exp_wait_wake"),
)
"""Prefixes of the functions that wait for a grace period."""

_EXPEDITED = ("synchronize_rcu_expedited", "exp_funnel_lock", "rcu_exp_wait_wake")


@dataclass(frozen=True)
class _Leaves:
    """The leaves of the tree, and the callbacks of all CPUs."""

    nodes: Structs
    addresses: Sequence[int]
    callbacks: int | None


def read_grace_period(
    reader: Reader,
    percpu: PerCpu,
    clocks: Clocks,
    jiffies: Jiffies,
    now_ns: int,
    losses: LossLog,
) -> GracePeriod | None:
    """Read the state of RCU; ``None`` if it is lost, or the kernel has no tree RCU.

    The tasks that wait for it are not looked for: see :func:`waiters`.

    :param now_ns: CLOCK_MONOTONIC, as good as it is known.
    """
    try:
        # The symbol is enough: without debug info the size of the type, which is
        # large, could not be confirmed.
        address = find_symbol(reader.prog, "rcu_state").address
        state = read_struct(reader, "struct rcu_state", _STATE, address)
        leaves = _read_leaves(reader, percpu, losses)
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.lose(Loss.VARIABLES, f"cannot read the state of RCU: {error}")
        return None
    is_active = bool(state["sequence"] & _UNDER_WAY)
    is_asked = bool(state.get("flags", 0) & _INIT)
    expedited = bool(state.get("expedited", 0) & _UNDER_WAY)

    def since(count: int | None) -> int | None:
        moment = None if count is None else jiffies.past_ns(count)
        return None if moment is None else max(now_ns - moment, 0)

    tasks, others = _blocking(reader, leaves, expedited, losses)
    quiet = since(state.get("activity"))
    age = since(state.get("start")) if is_active else None
    if not is_active and is_asked:
        age = since(max(state.get("requested", 0), state.get("activity", 0)))
    named = _Tasks(reader, clocks, [*tasks, *others, state.get("thread", 0)], losses)
    thread = named.of(state.get("thread", 0))
    return GracePeriod(
        active=is_active,
        age_ns=age,
        sequence=state["sequence"],
        cpus=_cpus(leaves, "cpus") if is_active else (),
        tasks=named.of_all(tasks if is_active else ()),
        expedited_cpus=_cpus(leaves, "expedited_cpus") if expedited else (),
        expedited_tasks=named.of_all(others, expedited=True),
        thread=None if thread is None else named.quiet(thread, quiet),
        callbacks=leaves.callbacks,
        waiters=None,
    )


def _read_leaves(reader: Reader, percpu: PerCpu, losses: LossLog) -> _Leaves:
    data = read_structs(
        reader, "struct rcu_data", _DATA, percpu.addresses("rcu_data"), losses
    )
    addresses = distinct(data["node"][data.readable])
    addresses = addresses[addresses != 0]
    nodes = read_structs(reader, "struct rcu_node", _NODE, addresses, losses)
    callbacks = None
    if data.has("callbacks") and data.readable.all():
        lengths = data["callbacks"].astype(np.int64)
        if (lengths >= 0).all() and (lengths < MAX_PLAUSIBLE >> 20).all():
            callbacks = int(lengths.sum())
    return _Leaves(nodes, addresses.tolist(), callbacks)


def _cpus(leaves: _Leaves, mask: str) -> tuple[int, ...]:
    nodes = leaves.nodes
    if not nodes.has(mask):
        return ()
    found: list[int] = []
    for first, last, bits in zip(
        nodes["first_cpu"].tolist(),
        nodes["last_cpu"].tolist(),
        nodes[mask].tolist(),
        strict=True,
    ):
        width = min(last - first + 1, 64)
        found += (first + bit for bit in range(width) if bits >> bit & 1)
    return tuple(sorted(found))


def _blocking(
    reader: Reader, leaves: _Leaves, expedited: bool, losses: LossLog
) -> tuple[list[int], list[int]]:
    """Return the addresses of the tasks that hold up each kind of grace period.

    Without CONFIG_PREEMPT_RCU no task can.
    """
    task = find_type(reader.prog, "struct task_struct")
    if not task.has_member("rcu_node_entry"):
        return [], []
    entry = offset_of(task, "rcu_node_entry")
    head = offset_of(find_type(reader.prog, "struct rcu_node"), "blkd_tasks")
    found: list[list[int]] = [[], []]
    for kind, member in enumerate(("tasks", "expedited_tasks")):
        if kind and not expedited:
            continue
        firsts = leaves.nodes[member].tolist()
        for address, first in zip(leaves.addresses, firsts, strict=True):
            nodes = _list_from(reader, first, address + head, losses)
            found[kind] += (node - entry for node in nodes)
    return found[0], found[1]


def _list_from(reader: Reader, first: int, head: int, losses: LossLog) -> Iterator[int]:
    """Yield the nodes of a list from *first* to its end."""
    node = first
    try:
        for _ in range(_MAX_TASKS):
            if node in (0, head):
                return
            yield node
            node, _previous = LIST_HEAD.unpack(reader.read(node, LIST_HEAD.size))
    except UNREADABLE as error:
        losses.lose(Loss.LISTS, f"cannot read tasks that hold up RCU: {error}")


class _Tasks:
    """The tasks at some addresses, in the words of the report."""

    def __init__(
        self, reader: Reader, clocks: Clocks, addresses: Sequence[int], losses: LossLog
    ) -> None:
        task_reader = reader.once(TaskReader, lambda: TaskReader(reader))
        wanted = sorted({address for address in addresses if address})
        self._table = task_reader.read(wanted, losses)
        # The class matters for the age of a task that waits for a CPU alone.
        classes = np.zeros(len(self._table), np.uint8)
        self._ages, _ = ages(self._table, clocks, classes)
        self._letters = letters(self._table).tolist()
        known = self._table["address"].tolist()
        self._rows = {address: row for row, address in enumerate(known)}

    def of(self, address: int, expedited: bool = False) -> GracePeriodTask | None:
        row = self._rows.get(address)
        if row is None:
            return None
        table = self._table
        runs = bool(table["on_cpu"][row] or table["on_rq"][row])
        return GracePeriodTask(
            pid=int(table["pid"][row]),
            comm=comm_text(table["comm"][row]),
            wait_ns=int(self._ages[row]),
            cpu=int(table["cpu"][row]) if runs else None,
            state=self._letters[row],
            expedited=expedited,
        )

    def of_all(
        self, addresses: Sequence[int], expedited: bool = False
    ) -> tuple[GracePeriodTask, ...]:
        found = (self.of(address, expedited) for address in addresses)
        return tuple(task for task in found if task is not None)

    @staticmethod
    def quiet(task: GracePeriodTask, since_ns: int | None) -> GracePeriodTask:
        return GracePeriodTask(
            pid=task.pid,
            comm=task.comm,
            wait_ns=since_ns,
            cpu=task.cpu,
            state=task.state,
        )


def waiters(tasks: TaskTable, now: TaskState) -> tuple[GracePeriodTask, ...]:
    """Return the tasks that wait for a grace period, the longest first."""
    stacks = now.stacks
    by_stack = [_waits_in(stacks.names(stack)) for stack in stacks.unique]
    letter = letters(tasks).tolist()
    found = [
        GracePeriodTask(
            pid=int(tasks["pid"][row]),
            comm=comm_text(tasks["comm"][row]),
            wait_ns=int(now.age_ns[row]),
            state=letter[row],
            expedited=function.startswith(_EXPEDITED),
            function=function,
        )
        for row, index in enumerate(stacks.index.tolist())
        if (function := by_stack[index]) is not None
    ]
    return tuple(sorted(found, key=lambda task: (-(task.wait_ns or 0), task.pid)))


def _waits_in(names: Sequence[str]) -> str | None:
    """Return the function on a stack that waits for a grace period, the outermost."""
    # RCU's own threads and timers sleep in functions of other names.
    found = [name for name in names if name.startswith(_WAITS)]
    return found[-1].partition(".")[0] if found else None
