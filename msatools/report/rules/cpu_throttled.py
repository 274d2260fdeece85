# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runnable tasks may not run, as the quota of their control group is used up."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.cpus.model import RunnableTask
from msatools.locks.report import Root
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import throttled_tasks
from msatools.report.words import count_text, pid_text, tasks_text

_MANY = 3
"""Minimum number of throttled tasks that is told though nobody waits for them: a group
with a quota has some now and then."""

_NAMED = 3


class _Throttled(Struct, frozen=True):
    """The tasks that are throttled for one reason."""

    why: str
    tasks: list[RunnableTask]
    roots: list[Root]
    """What of that others wait for."""


def _when(parts: ReportParts) -> Iterator[_Throttled]:
    roots = parts.locks.roots if parts.locks is not None else ()
    for why, tasks in throttled_tasks(parts).items():
        pids = {task.pid for task in tasks}
        held_up = [root for root in roots if root.pid in pids]
        if held_up or len(tasks) >= _MANY:
            yield _Throttled(why, tasks, held_up)


def _severity(subject: _Throttled) -> Severity:
    return "warning" if subject.roots else "info"


def _words(subject: _Throttled) -> str:
    tasks = subject.tasks
    if not subject.roots:
        return f"{count_text(len(tasks), 'task')} are {subject.why}"
    names = {task.pid: task.comm for task in tasks}
    (first, *others) = [root.pid for root in subject.roots if root.pid is not None]
    who = pid_text(first, names.get(first))
    more = f" (and {len(others)} more)" if others else ""
    waiting = sum(root.blocked_d + root.blocked_s for root in subject.roots)
    wait = "waits" if waiting == 1 else "wait"
    return (
        f"{who}{more}, for which {count_text(waiting, 'task')} {wait}, is {subject.why}"
    )


def _evidence(subject: _Throttled) -> Iterator[str]:
    tasks = subject.tasks
    yield f"throttled: {tasks_text(((task.pid, task.comm) for task in tasks), _NAMED)}"


RULE = VerdictRule(
    code="cpu-throttled",
    needs=("cpus",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("cpus", "-v"),
)
