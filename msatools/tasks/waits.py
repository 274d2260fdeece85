# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classify the wait of a task that does not run, by the functions on its stack."""

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

from msatools.tasks.classes import TaskClass
from msatools.tasks.functions import (
    CALLS,
    LOCKS,
    MEMORY,
    SCHEDULER,
    SLEEPERS,
    SUBSYSTEMS,
    THREAD_START,
    WAITS,
    WAYS,
)


class StackWait(Struct, frozen=True):
    """The wait that a stack shows."""

    task_class: TaskClass

    function: str | None
    """The function that decided on the class; ``None`` if not found."""

    caller: str | None
    """The innermost function that is not part of a generic wait or lock."""

    call: str | None
    """The system call, such as ``futex``; ``None`` if none is on the stack."""

    preempted: bool = False
    """Whether the task lost its CPU while it was runnable."""


_CALL = re.compile(
    r"(?:__[a-z0-9]+_(?:compat_)?|__compat_|compat_|__|k)?sys_(\w+?)"
    r"(?:_time32|_time64)?"
)


class _WaitNames:
    """Maps names of functions to classes."""

    def __init__(self, table: dict[TaskClass, str]) -> None:
        self._exact: dict[str, TaskClass] = {}
        prefixes: list[tuple[str, TaskClass]] = []
        for task_class, names in table.items():
            for name in names.split():
                if name.endswith("*"):
                    prefixes.append((name[:-1], task_class))
                else:
                    self._exact[name] = task_class
        # The longest first, as the most specific.
        self._prefixes = sorted(prefixes, key=lambda pair: -len(pair[0]))
        # The same functions are on most stacks.
        self._cache: dict[str, TaskClass | None] = {}

    def get(self, name: str) -> TaskClass | None:
        if name not in self._cache:
            self._cache[name] = self._find(name)
        return self._cache[name]

    def _find(self, name: str) -> TaskClass | None:
        found = self._exact.get(name)
        if found is not None:
            return found
        for prefix, task_class in self._prefixes:
            if name.startswith(prefix):
                return task_class
        return None

    def first(self, names: Iterable[str]) -> tuple[TaskClass, str] | None:
        for name in names:
            found = self.get(name)
            if found is not None:
                return found, name
        return None


def _set(names: str) -> _WaitNames:
    return _WaitNames({TaskClass.OTH: names})


_BY_WAIT = _WaitNames(WAITS)
_BY_SLEEPER = _WaitNames(SLEEPERS)
_BY_SUBSYSTEM = _WaitNames(SUBSYSTEMS)
_BY_WAY = _WaitNames(WAYS)
_BY_CALL = _WaitNames(CALLS)
_IS_SCHEDULER = _set(SCHEDULER)
_IS_LOCK = _set(SCHEDULER + LOCKS)
_IS_PI_FUTEX = _set("futex_lock_pi futex_wait_requeue_pi")
_IS_RT_MUTEX = _set("__rt_mutex_* rt_mutex_*")


@lru_cache(maxsize=4096)
def classify(stack: tuple[str, ...]) -> StackWait:
    """
    Classify the wait of a task that does not run.

    The task's state (runnable, stopped, traced, dead) is not considered, only what the
    stack shows of it. For a runnable task the result is the sleep that has just ended,
    unless the stack has one of :data:`msatools.tasks.functions.PREEMPTIONS`.

    :param stack: Functions of the kernel, innermost first.
    """
    names = [name.partition(".")[0] for name in stack]
    known = _class_of(names)
    task_class, function = known if known else (TaskClass.OTH, None)
    caller = next((name for name in names if _IS_LOCK.get(name) is None), None)
    calls = (_CALL.fullmatch(name) for name in reversed(names))
    call = next((matched[1] for matched in calls if matched), None)
    way = next((name for name in names if _IS_SCHEDULER.get(name) is None), None)
    preempted = way is None or task_class is TaskClass.LAT
    return StackWait(task_class, function, caller, call, preempted)


def _class_of(names: list[str]) -> tuple[TaskClass, str] | None:
    sleeper = next(
        (i for i, name in enumerate(names) if _IS_SCHEDULER.get(name) is None), None
    )
    is_thread = any(name in THREAD_START for name in names[-3:])
    if sleeper is not None:
        known = _BY_SLEEPER.get(names[sleeper])
        if known is None and names[sleeper + 1 : sleeper + 2] == ["kthread"]:
            # The main function of a kernel thread sleeps itself: the thread is idle.
            known = TaskClass.KTW
        if known is not None:
            return known, names[sleeper]
    return (
        _wait(names)
        or _BY_SUBSYSTEM.first(names)
        or _BY_WAY.first(names)
        or _call(names)
        or ((TaskClass.KTW, names[-1]) if is_thread else None)
    )


def _wait(names: list[str]) -> tuple[TaskClass, str] | None:
    """Find the innermost wait; memory reclaim and faults go before waits for disks."""
    found = _BY_WAIT.first(names)
    if found is None:
        return None
    if found[0] is TaskClass.DSK:
        for name in names:
            task_class = _BY_WAIT.get(name)
            if task_class in MEMORY:
                return task_class, name
    if _IS_RT_MUTEX.get(found[1]) is not None:
        # A PI futex is backed by an rt_mutex.
        pi = _IS_PI_FUTEX.first(names)
        if pi is not None:
            return TaskClass.LCK, pi[1]
    return found


def _call(names: list[str]) -> tuple[TaskClass, str] | None:
    for name in names:
        matched = _CALL.fullmatch(name)
        known = _BY_CALL.get(matched[1]) if matched else None
        if known is not None:
            return known, name
    return None
