# SPDX-License-Identifier: LGPL-2.1-or-later

"""RCU's grace period, and who holds it up (kernel/rcu/tree.c, tree_plugin.h).

A leaf ``struct rcu_node`` has a bit for each of its CPUs that has not passed a
quiescent state, and a list of the tasks that left a CPU as readers. Stalls of CPUs and
waits for a grace period are both explained by it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, Structs, read_struct, read_structs
from msatools.kernel.words import LIST_HEAD, MAX_PLAUSIBLE
from msatools.selfdesc.find import find_symbol, find_type, offset_of

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


class GracePeriodState(Struct, frozen=True, kw_only=True):
    """The state of RCU, with addresses of tasks; times are in jiffies."""

    sequence: int
    """``rcu_state.gp_seq``."""

    is_active: bool
    """Whether a grace period is under way."""

    is_asked: bool
    """Whether one was requested that has not begun."""

    start: int | None
    """When it began."""

    activity: int | None
    """When RCU's thread did something last."""

    requested: int | None
    """When one was requested last."""

    thread: int
    """The thread that runs grace periods; 0 if unknown."""

    callbacks: int | None
    """Number of callbacks that wait, over all CPUs."""

    cpus: tuple[int, ...]
    """CPUs that have not passed a quiescent state (``qsmask``)."""

    tasks: tuple[int, ...]
    """Tasks that left a CPU as readers, and hold it up."""

    expedited_cpus: tuple[int, ...]
    expedited_tasks: tuple[int, ...]


class _Leaves(Struct, frozen=True):
    """The leaves of the tree, and the callbacks of all CPUs."""

    nodes: Structs
    addresses: Sequence[int]
    callbacks: int | None


def read_grace_period_state(
    reader: Reader, percpu: PerCpu, losses: LossLog
) -> GracePeriodState | None:
    """Read the state of RCU; ``None`` if it is lost.

    :raises MissingError: if the kernel has no tree RCU
    """
    try:
        # The symbol is enough: without debug info the size of the type, which is
        # large, could not be confirmed.
        address = find_symbol(reader.prog, "rcu_state").address
        state = read_struct(reader, "struct rcu_state", _STATE, address)
        leaves = _read_leaves(reader, percpu, losses)
    except UNREADABLE as error:
        losses.lose(Loss.VARIABLES, f"cannot read the state of RCU: {error}")
        return None
    is_active = bool(state["sequence"] & _UNDER_WAY)
    expedited = bool(state.get("expedited", 0) & _UNDER_WAY)
    tasks, others = _blocking(reader, leaves, expedited, losses)
    return GracePeriodState(
        sequence=state["sequence"],
        is_active=is_active,
        is_asked=bool(state.get("flags", 0) & _INIT),
        start=state.get("start"),
        activity=state.get("activity"),
        requested=state.get("requested"),
        thread=state.get("thread", 0),
        callbacks=leaves.callbacks,
        cpus=_cpus(leaves, "cpus") if is_active else (),
        tasks=tuple(tasks) if is_active else (),
        expedited_cpus=_cpus(leaves, "expedited_cpus") if expedited else (),
        expedited_tasks=tuple(others),
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
