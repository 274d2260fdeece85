# SPDX-License-Identifier: LGPL-2.1-or-later

"""The stacks of hung tasks, those that are alike together, as the page shows them.

Pure: they are chosen from the stacks that :mod:`msatools.report.report` has read.
"""

from collections.abc import Mapping

from msgspec import Struct

from msatools.prstat.model import StackGroup
from msatools.render.cells import plural
from msatools.report.parts import ReportParts
from msatools.reports.units import duration_range

MAX_STACKS = 40
MAX_FRAMES = 64
MAX_PIDS = 24


class HungStack(Struct, frozen=True):
    """A stack, and the tasks that have it."""

    count: str
    """How many they are."""

    task_class: str
    """What they do now."""

    ages: str
    place: str
    """The function that waits; empty if not known."""

    tasks: str
    """PIDs and names."""

    frames: tuple[str, ...]
    """Innermost first."""

    left_out: str
    """Further frames; empty if it has all."""


def hung_stacks(parts: ReportParts | None) -> tuple[list[HungStack], int]:
    """Return the stacks of tasks in uninterruptible sleep, and of whom they wait for.

    Those of the most tasks come first.

    :return: The stacks, and the number of those that are left out.
    """
    if parts is None or parts.locks is None or not parts.stacks:
        return [], 0
    hung = {wait.pid for wait in parts.locks.waits if wait.state == "D"}
    for root in parts.locks.roots:
        if root.blocked_d and root.pid is not None:
            hung.add(root.pid)
    found = [(group, _only(group, hung)) for group in parts.stacks]
    found = [(group, tasks) for group, tasks in found if tasks]
    found.sort(key=lambda each: (-len(each[1]), -each[1][0][2]))
    callers = {wait.pid: wait.caller for wait in parts.locks.waits}
    shown = [_stack(group, tasks, callers) for group, tasks in found[:MAX_STACKS]]
    return shown, len(found) - len(shown)


_Task = tuple[int, str, int]
"""PID, name, and the time since it does what it does."""


def _only(group: StackGroup, hung: set[int]) -> list[_Task]:
    """Return the tasks of a stack that are wanted, the longest wait first."""
    tasks = zip(group.pids, group.comms, group.ages_ns, strict=True)
    return sorted((each for each in tasks if each[0] in hung), key=lambda t: -t[2])


def _stack(
    group: StackGroup, wanted: list[_Task], callers: Mapping[int, str | None]
) -> HungStack:
    names = ", ".join(f"{pid} {comm}" for pid, comm, _ in wanted[:MAX_PIDS])
    left = len(wanted) - MAX_PIDS
    frames = len(group.frames) - MAX_FRAMES
    return HungStack(
        count=plural(len(wanted), "task"),
        task_class=group.task_class,
        ages=duration_range(wanted[-1][2], wanted[0][2]),
        # The stack is the same, and so is the place.
        place=callers.get(wanted[0][0]) or "",
        tasks=names + (f" and {left:,} more" if left > 0 else ""),
        frames=group.frames[:MAX_FRAMES],
        left_out=f"… {plural(frames, 'more frame')}" if frames > 0 else "",
    )
