# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processes that have to wait for the dead, and why they do not.

The parent of a task is the thread that created it (``task_struct.real_parent``); any
thread of its process may wait for the task. A tracer (``parent``) has to wait first.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.rows import NOT_FOUND, find_rows
from msatools.kernel.structs import Booleans, read_structs
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskTable
from msatools.zombies.parentfacts import ParentFacts, read_facts
from msatools.zombies.zombie_tasks import UNKNOWN, Aged, Dead, Numbers

NONE = NOT_FOUND
"""No row, and no parent."""

_GROUP = {"group": ("pids[2]",)}
"""``PIDTYPE_PGID``."""

_TRACER = {"process": ("signal",), "tgid": ("tgid",)}


class Parents(Struct, frozen=True):
    """Each parent once; the other members have one value for each dead task."""

    facts: tuple[ParentFacts, ...]

    index: Rows
    """Index of its parent in *facts*; :data:`NONE` if that is not in the table."""

    row: Rows
    """Row of the parent thread, or :data:`NONE`."""

    stuck_ns: Nanoseconds
    """Time that the parent thread, or the leader of its process, has been in
    uninterruptible sleep; :data:`UNKNOWN` if neither is."""

    group: Addresses
    """Address of the ``struct pid`` of its process group, if the parent waits for a
    group; else 0."""

    tracer: Numbers
    """PID of the tracer; 0 if there is none, :data:`UNKNOWN` if unreadable."""

    elsewhere: Booleans
    """Whether the tracer is another process than the parent."""


def read_parents(
    reader: Reader, tasks: TaskTable, dead: Dead, aged: Aged, losses: LossLog
) -> Parents:
    """Read the parents of the dead, in bulk, and the waits of their threads.

    A parent that is not in the table, or has ended meanwhile, is noted.

    :param tasks: All tasks, or the dead and all threads of their parents.
    """
    row = find_rows(tasks["address"], dead.real_parent)
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
    """Read the process groups of tasks whose parent waits for a group."""
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
    """Return each task's tracer, and whether it is another process than the parent."""
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
