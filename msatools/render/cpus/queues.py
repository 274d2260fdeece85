# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders run queues: running task, waiting tasks and clock of each CPU."""

from collections.abc import Iterator, Mapping, Sequence

from msatools.cpus.model import RunnableTask, RunQueue, SchedClass
from msatools.kernel.ranges import ranges
from msatools.render import plain
from msatools.render.blocks import Cell, Column, Span, Table, Text, one_line
from msatools.render.blocks import text as line
from msatools.render.cells import BOUND_MARKS, NOT_KEPT, more
from msatools.reports.units import duration

_CLASSES: Mapping[str, SchedClass] = {
    "FIFO": "realtime",
    "RR": "realtime",
    "DEADLINE": "deadline",
}
"""Maps a policy to its scheduling class, if not the fair class."""

_LATE_NS = 100_000_000
"""Minimum lag of a clock to show: ten ticks at a low HZ."""

_NORMAL = (None, "idle")

_DELAYS = frozenset({"delay_tsc", "delay_loop", "__delay", "__const_udelay"})
"""Where the CPU that panicked waits for what comes then (kernel/panic.c)."""


def queue_lines(queues: Sequence[RunQueue], rows: int | None) -> Iterator[Text]:
    """Yield each CPU's running task, and below it the waiting tasks in order.

    :param rows: Maximum waiting tasks of each CPU; all if not given.
    """
    quiet: dict[str, list[int]] = {"idle": [], "offline": []}
    for queue in queues:
        if (why := _quiet(queue)) is not None:
            quiet[why].append(queue.cpu)
            continue
        yield line(Span(f"cpu {queue.cpu}", "title"), "  ", *_head(queue))
        yield from _clock(queue)
        yield from _waiting(queue.waiting, rows)
    for why, cpus in quiet.items():
        if cpus:
            words = "cpu" if len(cpus) == 1 else "cpus"
            yield line(Span(f"{words} {ranges(cpus)} {why}", "dim"))


def _quiet(queue: RunQueue) -> str | None:
    """Return the reason to omit a CPU's line; ``None`` to show it."""
    if queue.waiting or queue.panicked:
        return None
    if queue.lag_why == "offline":
        return "offline"
    is_idle = queue.current is not None and queue.current.sched_class == "idle"
    return "idle" if is_idle and queue.lag_why in _NORMAL else None


def _head(queue: RunQueue) -> Iterator[Cell]:
    parts = []
    if queue.waiting:
        throttled = sum(task.throttled for task in queue.waiting)
        words = f"{len(queue.waiting):,} waiting"
        parts.append(words + (f" ({throttled:,} throttled)" if throttled else ""))
    current = queue.current
    if current is None:
        parts.append(f"running: {NOT_KEPT}")
        yield ", ".join(parts)
        return
    is_idle = current.sched_class == "idle"
    parts.append("idle" if is_idle else "running")
    if queue.switched_ns is not None:
        parts[-1] += f" {BOUND_MARKS[current.wait_bound]}{duration(queue.switched_ns)}"
    yield ", ".join(parts)
    if not is_idle:
        yield f": {current.pid} {current.comm}  {_policy(current)}"
        yield Span(f"  {_cgroup(current)}", "dim")


def _clock(queue: RunQueue) -> Iterator[Text]:
    """Yield a line on a CPU's activity, clock and panic, if there is any to show."""
    words = [] if queue.doing is None else [queue.doing]
    if queue.panicked and _DELAYS.intersection((queue.doing or "").split()):
        words = ["waits in panic()"]
    if queue.lag_why not in _NORMAL:
        words.append(str(queue.lag_why))
    if queue.lag_ns is not None and queue.lag_ns >= _LATE_NS:
        words.append(f"its clock is {duration(queue.lag_ns)} behind")
    if queue.ticked_ns is not None:
        words.append(f"last tick {duration(queue.ticked_ns)} ago")
    cells: list[Cell] = [", ".join(words)] if words else []
    if queue.lag_why in ("interrupts off", "not run by its host"):
        cells = [Span(", ".join(words), "bad")]
    if queue.panicked:
        cells += ["; "] if words else []
        cells.append(Span("the CPU that panicked", "bad"))
    if cells:
        # If tasks wait, the tree's vertical line continues.
        yield line(Span("|    " if queue.waiting else "     ", "dim"), *cells)


def _waiting(tasks: Sequence[RunnableTask], rows: int | None) -> Iterator[Text]:
    shown = tasks[:rows]
    columns = (Column("", "right"), Column(""), Column(""), Column(""), Column(""))
    _, *lines = plain.lines(Table(columns, list(map(_task, shown))))
    left = len(tasks) - len(shown)
    for number, cells in enumerate(lines, 1):
        is_last = number == len(shown) and not left
        yield one_line(Span("`- " if is_last else "|- ", "dim"), *cells)
    for text in more(left, "task"):
        yield line(Span("`- ", "dim"), *text.spans)


def _task(task: RunnableTask) -> Sequence[Cell]:
    waits = NOT_KEPT
    if task.wait_ns is not None:
        waits = BOUND_MARKS[task.wait_bound] + duration(task.wait_ns)
    return (
        str(task.pid),
        task.comm,
        _policy(task),
        f"waits {waits}" + (", throttled" if task.throttled else ""),
        Span(_cgroup(task), "dim"),
    )


def _cgroup(task: RunnableTask) -> str:
    """Return the control group of a task; empty for the root group."""
    return "" if task.cgroup in (None, "/") else str(task.cgroup)


def _policy(task: RunnableTask) -> str:
    """Return the policy and priority of a task: ``RR 40``, ``OTHER nice 5``."""
    words = "SCHED_IDLE" if task.policy == "IDLE" else task.policy
    if task.rt_priority is not None:
        words += f" {task.rt_priority}"
    if task.nice:
        words += f" nice {task.nice}"
    if task.sched_class != _CLASSES.get(task.policy, "fair"):
        # The task has inherited a priority, or the class has no policy.
        words += f" ({task.sched_class})"
    if task.deadline_ns is not None:
        due = duration(abs(task.deadline_ns))
        words += f", {due} late" if task.deadline_ns < 0 else f", due in {due}"
    return words
