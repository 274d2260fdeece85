# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the threads of zombies' parents are doing."""

from collections.abc import Sequence

import numpy as np

from msatools.kernel.clocks import Clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text
from msatools.tasks.stacks import StackCollector
from msatools.tasks.standing import Throttles
from msatools.tasks.states import letters
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState, collect_now
from msatools.tasks.wait_options import WaitOpts
from msatools.tasks.waits import StackWait
from msatools.zombies.model import ParentThread, Waiting
from msatools.zombies.parentfacts import ParentFacts
from msatools.zombies.parents import Parents

MAX_THREADS = 8
"""Maximum number of threads of each parent that are read: it may have thousands."""

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
    reader: Reader,
    tasks: TaskTable,
    parents: Parents,
    clocks: Clocks,
    losses: LossLog,
) -> tuple[tuple[ParentThread, ...], ...]:
    """Return what the threads of each parent are doing, in the order of ``facts``.

    Of many threads choose the most relevant: those in wait(), those in uninterruptible
    sleep, those that created the zombies, and the leader.
    """
    creators = set(parents.row.tolist())
    chosen = [_choose(tasks, parent, creators) for parent in parents.facts]
    rows = np.array([row for each in chosen for row in each], np.intp)
    part = TaskTable(tasks.records[rows], tasks.columns)
    now = collect_now(collector, reader.prog, part, clocks)
    states = letters(part)
    throttles = Throttles(reader, part, losses)
    indices = iter(range(len(rows)))
    activities = []
    for parent, each in zip(parents.facts, chosen, strict=True):
        waits = {wait.task: wait for wait in parent.waits or ()}
        threads = []
        for row, index in zip(each, indices, strict=False):
            wait = waits.get(int(part["address"][index]))
            throttle = throttles.of(index, clocks.local_ns)
            threads.append(
                ParentThread(
                    pid=int(part["pid"][index]),
                    comm=comm_text(part["comm"][index]),
                    state=str(states[index]),
                    task_class=TaskClass(int(now.classes[index])).name,
                    age_ns=int(now.age_ns[index]),
                    doing=(
                        _doing(now, index, row in parent.frozen, wait, part)
                        if throttle is None
                        else throttle.text
                    ),
                    waiting=None if wait is None else _waiting(wait),
                    blocks_sigchld=row in parent.blocking,
                )
            )
        activities.append(tuple(threads))
    return tuple(activities)


def _choose(tasks: TaskTable, parent: ParentFacts, creators: set[int]) -> Sequence[int]:
    """Choose rows of a parent's living threads, the most relevant first."""
    if len(parent.living) <= MAX_THREADS:
        return parent.living
    waiting = {wait.task for wait in parent.waits or ()}

    def rank(row: int) -> tuple[bool, ...]:
        waits = int(tasks["address"][row]) in waiting
        return (
            not waits,
            row not in parent.stuck,
            row not in creators,
            row != parent.row,
        )

    return sorted(parent.living, key=rank)[:MAX_THREADS]


def waited(wait: WaitOpts) -> str:
    """Return a short description of the target of a wait."""
    number = "of unknown number" if wait.number is None else str(wait.number)
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
    now: TaskState, index: int, frozen: bool, wait: WaitOpts | None, part: TaskTable
) -> str:
    """Return what one thread is doing, without its age."""
    task_class = TaskClass(int(now.classes[index]))
    if frozen:
        return "frozen"
    if task_class in _PLAIN:
        return _PLAIN[task_class]
    if task_class is TaskClass.LAT:
        return f"waits for CPU {int(part['cpu'][index])}"
    if wait is not None:
        return f"in wait() for {waited(wait)}"
    return _asleep(now.waits[int(now.stacks.index[index])])


def _asleep(wait: StackWait) -> str:
    where = wait.caller or wait.function
    if wait.call is not None and where is not None and where != wait.call:
        return f"asleep in {where}() of {wait.call}()"
    if where or wait.call:
        return f"asleep in {where or wait.call}()"
    return "asleep"
