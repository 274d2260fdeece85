# SPDX-License-Identifier: LGPL-2.1-or-later

"""What threads of parents are doing in place of waiting for the dead."""

from collections.abc import Sequence

import drgn
import numpy as np

from msatools.kernel.clocks import Clocks
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import letters
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState, collect_now
from msatools.tasks.wait_options import WaitOpts
from msatools.tasks.waits import StackWait
from msatools.zombies.model import ParentThread, Waiting
from msatools.zombies.parentfacts import ParentFacts
from msatools.zombies.parents import Parents

MAX_THREADS = 8
"""Of each parent, that are looked at: a parent may have thousands."""

_PLAIN = {
    TaskClass.CPU: "running",
    TaskClass.USR: "running in user mode",
    TaskClass.SYS: "running in the kernel",
    TaskClass.INT: "interrupted",
    TaskClass.STP: "stopped",
    TaskClass.TRC: "stopped by its tracer",
    TaskClass.ZMB: "dead",
}


def read_doing(
    collector: StackCollector,
    prog: drgn.Program,
    tasks: TaskTable,
    parents: Parents,
    clocks: Clocks,
) -> tuple[tuple[ParentThread, ...], ...]:
    """Return what the threads of each parent are doing, in the order of ``facts``.

    Of many threads those are told that tell most: who is in wait(), who is in
    uninterruptible sleep, who made the dead, and the first.
    """
    makers = set(parents.row.tolist())
    chosen = [_choose(tasks, parent, makers) for parent in parents.facts]
    rows = np.array([row for each in chosen for row in each], np.intp)
    part = TaskTable(tasks.records[rows], tasks.columns)
    now = collect_now(collector, prog, part, clocks)
    states = letters(part)
    places = iter(range(len(rows)))
    activities = []
    for parent, each in zip(parents.facts, chosen, strict=True):
        waits = {wait.task: wait for wait in parent.waits or ()}
        threads = []
        for row, place in zip(each, places, strict=False):
            wait = waits.get(int(part["address"][place]))
            threads.append(
                ParentThread(
                    pid=int(part["pid"][place]),
                    comm=comm_text(part["comm"][place]),
                    state=str(states[place]),
                    task_class=TaskClass(int(now.classes[place])).name,
                    age_ns=int(now.age_ns[place]),
                    doing=_doing(now, place, row in parent.frozen, wait, part),
                    waiting=None if wait is None else _waiting(wait),
                    blocks_sigchld=row in parent.blocking,
                )
            )
        activities.append(tuple(threads))
    return tuple(activities)


def _choose(tasks: TaskTable, parent: ParentFacts, makers: set[int]) -> Sequence[int]:
    """Choose rows of a parent's living threads, those that tell most first."""
    if len(parent.living) <= MAX_THREADS:
        return parent.living
    waiting = {wait.task for wait in parent.waits or ()}

    def rank(row: int) -> tuple[bool, ...]:
        waits = int(tasks["address"][row]) in waiting
        return not waits, row not in parent.stuck, row not in makers, row != parent.row

    return sorted(parent.living, key=rank)[:MAX_THREADS]


def waited(wait: WaitOpts) -> str:
    """Return what a wait is for, in a few words."""
    number = "that cannot be told" if wait.number is None else str(wait.number)
    who = {"any": "any child", "pid": f"child {number}", "group": f"group {number}"}
    text = who[wait.kind]
    if wait.own:
        text += " of its own"
    if wait.clone:
        text += " that sends no SIGCHLD"
    if not wait.exited:
        text += " to stop or go on"
    return text


def _waiting(wait: WaitOpts) -> Waiting:
    return Waiting(kind=wait.kind, number=wait.number, clone=wait.clone, all=wait.all)


def _doing(
    now: TaskState, place: int, frozen: bool, wait: WaitOpts | None, part: TaskTable
) -> str:
    """Return what one thread is doing, without for how long."""
    task_class = TaskClass(int(now.classes[place]))
    if frozen:
        return "frozen"
    if task_class in _PLAIN:
        return _PLAIN[task_class]
    if task_class is TaskClass.LAT:
        return f"waits for CPU {int(part['cpu'][place])}"
    if wait is not None:
        return f"in wait() for {waited(wait)}"
    return _asleep(now.waits[int(now.stacks.index[place])])


def _asleep(wait: StackWait) -> str:
    where = wait.caller or wait.function
    if wait.call is not None and where is not None and where != wait.call:
        return f"asleep in {where}() of {wait.call}()"
    if where or wait.call:
        return f"asleep in {where or wait.call}()"
    return "asleep"
