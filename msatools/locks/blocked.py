# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which tasks are blocked, and on what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.locks.base.blocked_tasks import BlockedTask, read_cases
from msatools.locks.base.lock import Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import WaitTarget
from msatools.locks.externals import External, external
from msatools.locks.lock_types import requests_of, what_of
from msatools.locks.user.userlocks import futex_requests
from msatools.locks.wait_targets.explain import tell
from msatools.tasks.classes import TaskClass, are_any
from msatools.tasks.stackmemory import Rows
from msatools.tasks.states import letters
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

_LOCKS = (TaskClass.LCK, TaskClass.KLK, TaskClass.FLK)
_IN_LOCKS = (*_LOCKS, TaskClass.FLT, TaskClass.SWP)
"""What a task may wait for in interruptible sleep, and others have to give it."""

_FROZEN = (TaskClass.STP, TaskClass.TRC, TaskClass.ZMB)
_ASKS_SERVER = frozenset(("request_wait_answer",))


@dataclass(frozen=True)
class Blocked:
    """A task that is blocked, and on what."""

    row: int
    requests: tuple[Request, ...]
    """Locks of which any one will do; most wait for one, some for none."""

    external: External | None = None
    """What it waits for that is no task, nor a lock that one has."""

    what: str | None = None
    """What a lock without an owner stands for, such as work that is to be done."""

    on: WaitTarget | None = None
    """What it waits on, if that is no lock."""

    why: str | None = None
    """Why no lock is told, where it waits for one."""

    caller: str | None = None
    """The function that wanted what is waited for, of a task that does not sleep."""


def blocked_rows(tasks: TaskTable, now: TaskState) -> Rows:
    """Find the tasks that are blocked: in uninterruptible sleep, or on a lock.

    Those that only wait for work are not, nor are those that are stopped or frozen.
    """
    blocked = (letters(tasks) == "D") | are_any(now.classes, _IN_LOCKS)
    blocked |= _asks_server(now)[now.stacks.index]
    blocked &= ~are_any(now.classes, _FROZEN)
    return np.flatnonzero(blocked)


def _asks_server(now: TaskState) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell which stacks are those of who waits for a file system in user space.

    That is interruptible sleep at first (fs/fuse/dev.c).
    """
    names = (now.stacks.names(stack) for stack in now.stacks.unique)
    return np.array([not _ASKS_SERVER.isdisjoint(each) for each in names], np.bool_)


def find_blocked(
    look: LockContext, now: TaskState, rows: Rows, stack_size: int
) -> Iterator[Blocked]:
    """Tell what each of some blocked tasks waits for."""
    told: list[int] = []
    if not look.alone:
        # Most of a crowd: the tables of waiters tell it, no stack is needed.
        for each in _on_futexes(look, rows[now.classes[rows] == TaskClass.LCK]):
            told.append(each.row)
            yield each
    alike: dict[WaitTarget | None, WaitTarget | None] = {}
    others = rows[~np.isin(rows, told)]
    for case in read_cases(look, now, others, stack_size):
        yield _blocked(look, case, alike)


def _on_futexes(look: LockContext, rows: Rows) -> Iterator[Blocked]:
    """Tell which futexes some tasks wait on; those that are not found are left out."""
    addresses = look.tasks["address"][rows].tolist()
    for row, address in zip(rows.tolist(), addresses, strict=True):
        try:
            requests = tuple(futex_requests(look, address))
        except LookupError:
            return  # each is told why, by its case
        if requests:
            yield Blocked(row, requests)


def _blocked(
    look: LockContext,
    case: BlockedTask,
    alike: dict[WaitTarget | None, WaitTarget | None],
) -> Blocked:
    requests: tuple[Request, ...] = ()
    outside = why = None
    try:
        requests = tuple(requests_of(look, case))
    except drgn.FaultError as error:
        look.findings.lose(Loss.LOCKS, f"what a task waits for is lost: {error}")
        why = "it cannot be read"
    except LookupError as error:
        look.findings.note(
            "lock-unknown",
            f"locks of class {case.task_class.name} are not told: {error}",
            case.task_class.name,
        )
        why = "nothing tells the types"
    on = None
    if not requests:
        on = tell(look, case)
        if why is None and case.task_class in _LOCKS:
            why = "it is not to be found"
    try:
        outside = external(look, case, requests)
    except (drgn.FaultError, LookupError) as error:
        look.findings.lose(Loss.SERVERS, f"who serves a wait is lost: {error}")
    what = stands_for(look, case, requests)
    return Blocked(case.row, requests, outside, what, alike.setdefault(on, on), why)


def stands_for(
    look: LockContext, case: BlockedTask, requests: Sequence[Request]
) -> str | None:
    """Say what a lock that nobody has stands for; a part that is lost is noted."""
    try:
        return what_of(look, case, requests)
    except (drgn.FaultError, LookupError) as error:
        look.findings.lose(Loss.LOCK_NAMES, f"what a lock stands for is lost: {error}")
    return None
