# SPDX-License-Identifier: LGPL-2.1-or-later

"""RCU's grace period, and the tasks that wait for it (kernel/rcu/tree.c)."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from msatools.cpus.model import GracePeriod, GracePeriodTask
from msatools.errors import MissingError
from msatools.kernel.clocks import Clocks, Jiffies
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.identity import comm_text
from msatools.tasks.preemption import read_grace_period_state
from msatools.tasks.sampler import TaskState, ages
from msatools.tasks.states import letters
from msatools.tasks.table import TaskReader, TaskTable

_WAITS = (
    *("synchronize_rcu", "__wait_rcu_gp", "wait_rcu_gp", "rcu_barrier"),
    *("kvfree_rcu_barrier", "synchronize_sched"),
    *("cond_synchronize_rcu", "exp_funnel_lock"),
)
"""Prefixes of the functions that wait for a grace period."""

_OTHER_FLAVOURS = ("synchronize_rcu_tasks", "rcu_barrier_tasks")
"""Prefixes of functions that also match ``_WAITS``, but wait for the readers of Tasks
RCU, not for a grace period of RCU."""

_WORKER = frozenset({"synchronize_rcu_expedited_wait_once", "rcu_exp_wait_wake"})
"""Functions that run an expedited grace period: in a worker, or early in the boot in
the task that asked for it (kernel/rcu/tree_exp.h)."""

_EXPEDITED = ("synchronize_rcu_expedited", "exp_funnel_lock")
"""Prefixes of the functions that wait for an expedited grace period."""


def read_grace_period(
    reader: Reader,
    percpu: PerCpu,
    clocks: Clocks,
    jiffies: Jiffies,
    now_ns: int,
    losses: LossLog,
) -> GracePeriod | None:
    """Read the state of RCU; ``None`` if it is lost, or the kernel has no tree RCU.

    ``waiters`` is ``None``: see :func:`waiters`.

    :param now_ns: CLOCK_MONOTONIC, as exactly as it is known.
    """
    try:
        state = read_grace_period_state(reader, percpu, losses)
    except MissingError:
        return None
    if state is None:
        return None

    def since(count: int | None) -> int | None:
        moment = None if count is None else jiffies.past_ns(count)
        return None if moment is None else max(now_ns - moment, 0)

    age = since(state.start) if state.is_active else None
    if not state.is_active and state.is_asked:
        age = since(max(state.requested or 0, state.activity or 0))
    tasks, others = state.tasks, state.expedited_tasks
    named = _Tasks(reader, clocks, [*tasks, *others, state.thread], losses)
    thread = named.of(state.thread)
    quiet = since(state.activity)
    return GracePeriod(
        active=state.is_active,
        age_ns=age,
        sequence=state.sequence,
        cpus=state.cpus,
        tasks=named.of_all(tasks),
        expedited_cpus=state.expedited_cpus,
        expedited_tasks=named.of_all(others, expedited=True),
        thread=None if thread is None else named.quiet(thread, quiet),
        callbacks=state.callbacks,
        waiters=None,
    )


class _Tasks:
    """Tasks at some addresses, read at once and returned as structs of the report."""

    def __init__(
        self, reader: Reader, clocks: Clocks, addresses: Sequence[int], losses: LossLog
    ) -> None:
        task_reader = reader.once(TaskReader, lambda: TaskReader(reader))
        wanted = sorted({address for address in addresses if address})
        self._table = task_reader.read(wanted, losses)
        # Only the age of a task that waits for a CPU depends on its class.
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
    """Return the tasks that wait for a grace period, the longest wait first."""
    stacks = now.stacks
    by_stack = [_waits_in(stacks.names(stack)) for stack in stacks.unique]
    letter = letters(tasks).tolist()
    found = [
        GracePeriodTask(
            pid=int(tasks["pid"][row]),
            comm=comm_text(tasks["comm"][row]),
            wait_ns=int(now.age_ns[row]),
            state=letter[row],
            expedited=wait.is_expedited,
            function=wait.function,
        )
        for row, index in enumerate(stacks.index.tolist())
        if (wait := by_stack[index]) is not None
    ]
    return tuple(sorted(found, key=lambda task: (-(task.wait_ns or 0), task.pid)))


class _StackWait(Struct, frozen=True):
    """The wait for a grace period that a stack shows."""

    function: str
    """The outermost function on the stack that waits for a grace period."""

    is_expedited: bool


def _waits_in(names: Sequence[str]) -> _StackWait | None:
    # A worker runs the expedited grace period, and does not wait for one.
    if not _WORKER.isdisjoint(names) and "synchronize_rcu_expedited" not in names:
        return None
    found = [name for name in names if name.startswith(_WAITS)]
    if not found or found[-1].startswith(_OTHER_FLAVOURS):
        return None
    # With rcu_expedited set, synchronize_rcu() calls synchronize_rcu_expedited().
    is_expedited = any(name.startswith(_EXPEDITED) for name in found)
    return _StackWait(found[-1].partition(".")[0], is_expedited)
