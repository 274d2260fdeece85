# SPDX-License-Identifier: LGPL-2.1-or-later

"""Preempt counts of CPUs, and RCU's grace periods."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import (
    LIST_HEAD,
    MAX_PLAUSIBLE,
    Addresses,
    Reader,
    column,
    distinct,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Booleans,
    Members,
    Structs,
    read_struct,
    read_structs,
)
from msatools.selfdesc.find import find_symbol, find_type, find_variable, offset_of

# --- The preempt count of each CPU: include/linux/preempt.h.


_PREEMPTION = 0xFF
_SOFTIRQ_SHIFT = 8
_HARDIRQ_SHIFTS = 16, 24
_COUNT = 0x7FFF_FFFF
"""Parts of the preempt count. ``_COUNT`` leaves out the bit of x86 for "no switch is
due". The count of interrupts is at the first of the shifts; at the second in kernels
that have a count of disabled interrupts at the first."""

_OF_TASK: Members = {
    "count": ("thread_info.preempt.count", "thread_info.preempt_count")
}


def preemption_count(count: int) -> int:
    """Return how deeply preemption is disabled: the lowest part of a preempt count."""
    return count & _PREEMPTION


def softirq_count(count: int) -> int:
    """Return the part of a preempt count for softirqs: 2 for each time that they were
    disabled, and 1 while one is served."""
    return count >> _SOFTIRQ_SHIFT & 0xFF


class PreemptCounts:
    """The preempt counts of all CPUs, read when first needed."""

    def __init__(
        self,
        reader: Reader,
        percpu: PerCpu,
        tasks: Callable[[], Addresses],
        losses: LossLog,
    ) -> None:
        """
        :param tasks: Returns the address of each CPU's task, in the order of *percpu*.
        """
        self._reader = reader
        self._percpu = percpu
        self._tasks = tasks
        self._losses = losses

    @cached_property
    def by_cpu(self) -> dict[int, int]:
        """The preempt count by CPU, without CPUs for which it is unknown.

        "x86/percpu: Move preempt_count next to current_task" (in v6.2) put it into
        ``pcpu_hot``, up to "x86/preempt: Move preempt count to percpu hot section" (in
        v6.15). On arm64 it is part of the task.
        """
        prog = self._reader.prog
        try:
            offset = offset_of(find_type(prog, "struct pcpu_hot"), "preempt_count")
            addresses = self._percpu.addresses("pcpu_hot") + np.uint64(offset)
        except MissingError:
            try:
                addresses = self._percpu.addresses("__preempt_count")
            except MissingError:
                return self._of_tasks()
        records, readable = self._reader.read_records(addresses, 4)
        return self._known(column(records, 0, 4), readable)

    def _of_tasks(self) -> dict[int, int]:
        type_, tasks = "struct task_struct", self._tasks()
        read = read_structs(self._reader, type_, _OF_TASK, tasks, self._losses)
        return self._known(read["count"], read.readable) if read.has("count") else {}

    def _known(self, counts: Addresses, readable: Booleans) -> dict[int, int]:
        each = (self._percpu.cpus.tolist(), counts.tolist(), readable.tolist())
        return {
            cpu: int(count) & _COUNT
            for cpu, count, known in zip(*each, strict=True)
            if known
        }

    def in_interrupt(self, count: int) -> bool:
        """Return whether a CPU was in an interrupt other than an NMI.

        An NMI, by which a crashing kernel stops CPUs, adds 1 to both counts.
        """
        if not count >> min(_HARDIRQ_SHIFTS):
            # Looking for a variable that is missing takes long.
            return False
        shift = self._reader.once("hardirq shift", self._find_hardirq_shift)
        return count >> shift & 0xF > count >> (shift + 4) & 0xF

    def _find_hardirq_shift(self) -> int:
        """Return the shift of the count of interrupts in the preempt count.

        Newer kernels (by 7.3) have below it a count of how often interrupts were
        disabled. They also have the per-CPU variable that is looked up here.
        """
        before, after = _HARDIRQ_SHIFTS
        try:
            find_variable(self._reader.prog, "local_interrupt_disable_state")
        except MissingError:
            return before
        return after


# --- RCU's grace period, and what holds it up (kernel/rcu/tree.c, tree_plugin.h).
#
# A leaf struct rcu_node has a bit for each of its CPUs that has not passed a quiescent
# state, and a list of the tasks that left a CPU as readers.


_UNDER_WAY = 3
"""RCU_SEQ_STATE_MASK: the bits of a sequence number, not 0 during a grace period."""

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
"""Maximum number of tasks that are read from the list of one leaf."""


class GracePeriodState(Struct, frozen=True, kw_only=True):
    """The state of RCU, with tasks as addresses and times in jiffies."""

    sequence: int
    """``rcu_state.gp_seq``."""

    is_active: bool
    """Whether a grace period is under way."""

    is_asked: bool
    """Whether a grace period was requested that has not begun."""

    start: int | None
    """When the grace period began; ``None`` if the kernel has no ``gp_start``."""

    activity: int | None
    """When RCU's thread was last active."""

    requested: int | None
    """When a grace period was last requested."""

    thread: int
    """The thread that runs grace periods; 0 if unknown."""

    callbacks: int | None
    """Number of callbacks that wait, over all CPUs; ``None`` if unknown."""

    cpus: tuple[int, ...]
    """CPUs that have not passed a quiescent state (``qsmask``)."""

    tasks: tuple[int, ...]
    """Tasks that left a CPU as readers, and hold up the grace period."""

    expedited_cpus: tuple[int, ...]
    expedited_tasks: tuple[int, ...]


class _Leaves(Struct, frozen=True):
    """The leaves of RCU's tree, and the number of callbacks on all CPUs."""

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
    """Return the tasks that hold up the normal, and the expedited grace period.

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
