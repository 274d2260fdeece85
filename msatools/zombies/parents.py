# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processes that are to wait for the dead, and what keeps them from it.

A child is that of the thread that made it (``task_struct.real_parent``), and any thread
of that process may wait for it. Who traces it has to wait for it first (``parent``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, read_structs
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskTable
from msatools.zombies.parentfacts import ParentFacts, read_facts
from msatools.zombies.zombie_tasks import UNKNOWN, Aged, Dead, Numbers

NONE = -1
"""No row, and no parent."""

_GROUP = {"group": ("pids[2]",)}
"""``PIDTYPE_PGID``."""

_TRACER = {"process": ("signal",), "tgid": ("tgid",)}


@dataclass(frozen=True)
class Parents:
    """Each parent once, and whose each of the dead is."""

    facts: tuple[ParentFacts, ...]

    index: Rows
    """By dead task: which of them; :data:`NONE` if its parent is not in the table."""

    row: Rows
    """By dead task: the row of the thread that it is a child of, or :data:`NONE`."""

    stuck_ns: Nanoseconds
    """By dead task: how long that thread, or the first of that process, has been in
    uninterruptible sleep; :data:`UNKNOWN` if neither is."""

    group: Addresses
    """By dead task: the ``struct pid`` of its process group, if its parent waits for a
    group; else 0."""

    tracer: Numbers
    """By dead task: the process that traces it; 0 if none does, :data:`UNKNOWN` if it
    cannot be read."""

    elsewhere: Booleans
    """By dead task: whether that is another process than its parent."""


def read_parents(
    reader: Reader, tasks: TaskTable, dead: Dead, aged: Aged, losses: LossLog
) -> Parents:
    """Read the parents of the dead, in bulk, and the waits of their threads.

    A parent that is not in the table, or gone meanwhile, costs a note; what cannot be
    read is counted and unknown.

    :param tasks: All tasks, or the dead and all threads of their parents.
    """
    row = _rows_of(tasks, dead.real_parent)
    known = row != NONE
    if not known.all():
        losses.coverage["parents_unknown"] += int(np.count_nonzero(~known))
        losses.note("parent-unknown", "the parents of some dead tasks are not known")
    processes, place = np.unique(tasks["signal"][row[known]], return_inverse=True)
    index = np.full(len(dead), NONE, np.intp)
    index[known] = place
    facts, stuck_ns = read_facts(
        reader, tasks, processes.astype(np.uint64), aged, losses
    )
    tracer, elsewhere = _tracers(reader, dead, row, tasks, losses)
    return Parents(
        facts=facts,
        index=index,
        row=row,
        stuck_ns=_stuck(stuck_ns, facts, index, row),
        group=_groups(reader, dead, facts, index, losses),
        tracer=tracer,
        elsewhere=elsewhere,
    )


def _rows_of(tasks: TaskTable, addresses: Addresses) -> Rows:
    """Find the rows of tasks by their address; :data:`NONE` of who is not there."""
    there = tasks["address"]
    if not len(there):
        return np.full(len(addresses), NONE, np.intp)
    order = np.argsort(there, kind="stable")
    place = np.searchsorted(there, addresses, sorter=order)
    row = order[np.minimum(place, len(order) - 1)]
    return np.where(there[row] == addresses, row, NONE)


def _stuck(
    by_row: Nanoseconds, facts: Sequence[ParentFacts], index: Rows, row: Rows
) -> Nanoseconds:
    own = np.where(row == NONE, UNKNOWN, by_row[row])
    leaders = np.array([each.row for each in facts], np.intp)
    first = np.full(len(row), UNKNOWN, np.int64)
    known = index != NONE
    first[known] = by_row[leaders[index[known]]]
    stuck: Nanoseconds = np.maximum(own, first)
    return stuck


def _groups(
    reader: Reader,
    dead: Dead,
    facts: Sequence[ParentFacts],
    index: Rows,
    losses: LossLog,
) -> Addresses:
    """Read the process groups of those of whom a parent waits for a group."""
    asks = [any(wait.kind == "group" for wait in each.waits or ()) for each in facts]
    groups = np.zeros(len(dead), np.uint64)
    chosen = np.flatnonzero(np.array([*asks, False])[index])
    if len(chosen):
        read = read_structs(
            reader, "struct signal_struct", _GROUP, dead.process[chosen], losses
        )
        groups[chosen] = read["group"]
    return groups


def _tracers(
    reader: Reader, dead: Dead, row: Rows, tasks: TaskTable, losses: LossLog
) -> tuple[Numbers, Booleans]:
    """Return who traces each, and whether that is another process than its parent."""
    tracer = np.zeros(len(dead), np.int64)
    elsewhere = np.zeros(len(dead), np.bool_)
    traced = np.flatnonzero(dead.ptraced)
    if not len(traced):
        return tracer, elsewhere
    found = read_structs(
        reader, "struct task_struct", _TRACER, dead.parent[traced], losses
    )
    tracer[traced] = np.where(found.readable, found["tgid"], UNKNOWN)
    parents = np.where(row[traced] == NONE, 0, tasks["signal"][row[traced]])
    other = dead.parent[traced] != dead.real_parent[traced]
    elsewhere[traced] = other & (~found.readable | (found["process"] != parents))
    return tracer, elsewhere
