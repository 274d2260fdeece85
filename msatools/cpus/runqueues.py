# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each CPU runs, what waits for it, and how far its clock is behind.

kernel/sched/core.c: a run queue's clock is brought up to date by each tick and by
whatever changes the queue. So it stands while nothing does: while the CPU is idle or
runs one task without a tick, and where interrupts are off for too long.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import drgn
import numpy as np

from msatools.cpus.fairqueue import FairTask, read_fair
from msatools.cpus.model import RunnableTask, RunQueue, SchedClass
from msatools.cpus.queued import QueuedTask, RunQueueLists, read_queues
from msatools.cpus.queuedtasks import DEADLINE, QueuedTasks, idle_task
from msatools.cpus.ticksched import TickSched
from msatools.kernel.clocks import Clocks
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskTable

LATE_NS = 1_000_000_000
"""Where an interrupt of a timer is late by this much, interrupts are off.

They are off for microseconds, while a serial console prints, firmware works or a
hypervisor runs others at times for some 0.1 s. What looks for this in the kernel waits
for 10 s (kernel/watchdog.c)."""

_ORDER: Sequence[SchedClass] = ("stop", "deadline", "realtime", "fair", "ext", "idle")

_MOST_NS = 1 << 60
"""36 years, more than any machine is up: a clock that says so is damaged."""

LagWhy = Literal["idle", "tick stopped", "interrupts off", "offline"]


def read_run_queues(
    reader: Reader,
    percpu: PerCpu,
    clocks: Clocks,
    ticks: TickSched,
    losses: LossLog,
    *,
    tasks: TaskTable | None = None,
    crash_cpu: int | None = None,
) -> tuple[RunQueue, ...]:
    """Read the run queue of each CPU of ``percpu.cpus``; one that is lost is left out.

    Of the fair class, the order is that of :func:`msatools.cpus.fairqueue.read_fair`;
    throttled tasks of all classes come last. A task that sleeps on the queue (delayed
    dequeue, v6.12) does not wait. What is found is held against the kernel's own
    number (``nr_running``), and a difference noted.

    :param tasks: All tasks, if somebody has read them: those that are throttled one by
        one are on no queue (deadline tasks; in v6.18 and later, fair ones).
    :param crash_cpu: Where the kernel died, if it did.
    :raises LookupError: if no run queue can be found at all
    """
    queues = read_queues(reader, percpu, losses)
    rq = queues.rq
    on_queue = _with_throttled(reader, percpu, queues, tasks, losses)
    clock = [at if at < _MOST_NS else 0 for at in rq["clock"].tolist()]
    now = max([clocks.local_ns, *clock])
    known = _read_tasks(reader, queues, on_queue, now, losses)
    turns = _turns(reader, queues, known, losses)
    online = frozenset(online_cpus(reader, losses))
    found = []
    for row, cpu in enumerate(percpu.cpus.tolist()):
        if not rq.readable[row]:
            continue
        runs, running = int(rq["curr"][row]), int(rq["running"][row])
        # Where a page of zeros is, nothing runs.
        is_online, is_idle = cpu in online, 0 != runs == int(rq["idle"][row])
        current: RunnableTask | None = None
        if is_online and is_idle:
            current = idle_task(cpu, _since(now, int(rq["idle_since"][row])))
        elif is_online:
            current = known.running(runs)
        lag = _since(now, clock[row])
        ticked = _since(ticks.latest_ns, ticks.ticked_ns[row]) if is_online else None
        found.append(
            RunQueue(
                cpu=cpu,
                running=running,
                current=current,
                waiting=_waiting(known, turns, on_queue[row], runs, cpu),
                clock_ns=clock[row],
                lag_ns=lag,
                ticked_ns=ticked,
                switched_ns=None if current is None else current.wait_ns,
                lag_why=lag_why(
                    online=is_online,
                    idle=is_idle,
                    tick_stopped=ticks.stopped[row],
                    late_ns=_late(ticks, row, lag),
                ),
                panicked=cpu == crash_cpu,
            )
        )
        if not reader.is_live:
            # A live one goes on while we look.
            counted = {t.address for t in on_queue[row] if not _is_out(t, turns)}
            number = sum(known.is_queued(address, cpu) for address in counted | {runs})
            _check(
                cpu, running, range(number, number + queues.servers[row] + 1), losses
            )
    return tuple(found)


def lag_why(
    *, online: bool, idle: bool, tick_stopped: bool | None, late_ns: int | None
) -> LagWhy | None:
    """Return why the clock of a CPU stands; ``None`` if it does not, or nothing tells.

    ``tick stopped`` is one that runs a task without a tick (nohz_full). Where timers'
    interrupts are late by :data:`LATE_NS`, interrupts are off, or a hypervisor keeps
    the CPU from running. That the clock stands does not tell: others bring it up to
    date too, when they wake tasks there or look for work. Where a kernel dies,
    interrupts are off for as long as it takes to report that.

    :param late_ns: By how much an interrupt is late; ``None`` if nothing tells.
    """
    if not online:
        return "offline"
    if late_ns is not None and late_ns >= LATE_NS:
        return "interrupts off"
    if tick_stopped:
        return "idle" if idle else "tick stopped"
    return None


def _late(ticks: TickSched, row: int, lag: int | None) -> int | None:
    """Return by how much an interrupt of a timer is late on a CPU that is online."""
    due, ticked = ticks.due_ns[row], ticks.ticked_ns[row]
    late = [] if due is None else [ticks.latest_ns - due]
    if ticks.stopped[row] is False:
        # While an interrupt of timers is served, none is due.
        if ticked is not None:
            late.append(ticks.latest_ns - ticked)
        elif due is None and lag is not None:
            late.append(lag)
    return max(late, default=None)


def _turns(
    reader: Reader, queues: RunQueueLists, known: QueuedTasks, losses: LossLog
) -> Mapping[int, FairTask]:
    """Return in what order the tasks of the fair class would run."""
    places = [
        (task.address, root)
        for tasks, root in zip(queues.tasks, queues.roots.tolist(), strict=True)
        for task in tasks
        if task.sched_class == "fair"
    ]
    places.sort(key=lambda place: known.queued_ns(place[0]))
    addresses, roots = np.array(places, np.uint64).reshape(-1, 2).T
    return read_fair(reader, addresses, roots, losses)


def _with_throttled(
    reader: Reader,
    percpu: PerCpu,
    queues: RunQueueLists,
    tasks: TaskTable | None,
    losses: LossLog,
) -> list[list[QueuedTask]]:
    """Add to the tasks on the queues those that are on none, as they are throttled."""
    on_queue = [list(of_cpu) for of_cpu in queues.tasks]
    if tasks is not None:
        rows = {cpu: row for row, cpu in enumerate(percpu.cpus.tolist())}
        known = {task.address for of_cpu in on_queue for task in of_cpu}
        for cpu, task in _throttled(reader, tasks, losses):
            if cpu in rows and task.address not in known:
                on_queue[rows[cpu]].append(task)
    return on_queue


def _throttled(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> Iterator[tuple[int, QueuedTask]]:
    """Find tasks that wait on no queue, as they have used up what they may have."""
    prog = reader.prog
    # "sched/fair: Switch to task based throttle model" (in v6.18)
    by_task = prog.type("struct task_struct").has_member("throttled")
    waits = (tasks["on_rq"] != 0) & (tasks["on_cpu"] == 0)
    rows = waits & ((tasks["policy"] == DEADLINE) | by_task)
    for cpu, address in zip(
        tasks["cpu"][rows].tolist(), tasks["address"][rows].tolist(), strict=True
    ):
        task = drgn.Object(prog, "struct task_struct", address=address)
        try:
            if task.dl.dl_throttled:
                yield cpu, QueuedTask(address, "deadline", throttled=True)
            elif by_task and task.throttled:
                yield cpu, QueuedTask(address, "fair", throttled=True)
        except drgn.FaultError as error:
            losses.lose(Loss.QUEUED, f"a throttled task is lost: {error}")


def _read_tasks(
    reader: Reader,
    queues: RunQueueLists,
    on_queue: Sequence[Sequence[QueuedTask]],
    now: int,
    losses: LossLog,
) -> QueuedTasks:
    """Read all tasks that are to be told of, each once; idle ones are all alike."""
    addresses = {task.address for tasks in on_queue for task in tasks}
    addresses.update(queues.rq["curr"].tolist())
    addresses.difference_update([0, *queues.rq["idle"].tolist()])
    return QueuedTasks(reader, sorted(addresses), now, losses)


def _since(now: int, moment: int | None) -> int | None:
    return max(now - moment, 0) if moment else None


def _is_out(task: QueuedTask, turns: Mapping[int, FairTask]) -> bool:
    """Return whether a task, or a group it is in, has used up what it may have."""
    return task.throttled or (task.address in turns and turns[task.address].throttled)


def _waiting(
    known: QueuedTasks,
    turns: Mapping[int, FairTask],
    tasks: Sequence[QueuedTask],
    runs: int,
    cpu: int,
) -> tuple[RunnableTask, ...]:
    """Return the tasks that wait for a CPU, the next first."""

    def turn(task: QueuedTask) -> tuple[object, ...]:
        # Those of the other classes are in order.
        fair = turns[task.address].turn if task.address in turns else ()
        return _is_out(task, turns), _ORDER.index(task.sched_class), fair

    waiting = [
        task
        for task in tasks
        if task.address != runs
        and known.is_queued(task.address, cpu)
        and not known.sleeps(task.address)
    ]
    return tuple(
        known.queued(task.address, task.sched_class, throttled=_is_out(task, turns))
        for task in sorted(waiting, key=turn)
    )


def _check(cpu: int, running: int, found: range, losses: LossLog) -> None:
    """Note if the kernel counts other tasks than were found.

    It counts those that sleep on the queue too, and none that are throttled.
    """
    if running not in found:
        losses.lose(Loss.QUEUES_DIFFER)
        losses.note(
            "run-queue-differs",
            f"CPU {cpu} counts {running} tasks that can run, {found.start} were found: "
            "its run queue was changing, or is damaged",
            str(cpu),
        )
