# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run queues: the running task, the waiting tasks, and the lag of the clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import drgn
import numpy as np

from msatools.cpus.model import RunnableTask, RunQueue, SchedClass
from msatools.cpus.queued import (
    FairTask,
    QueuedTask,
    RunQueueLists,
    quota_waiters,
    read_fair,
    read_queues,
)
from msatools.cpus.times import TickSched
from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.percpu import PerCpu, online_cpus
from msatools.kernel.reader import MAX_PLAUSIBLE, Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.selfdesc.find import find_symbol, find_type, object_at
from msatools.tasks.identity import comm_text, read_cgroups
from msatools.tasks.states import (
    DEADLINE,
    MAX_RT_PRIO,
    NICE_0,
    POLICIES,
    REALTIME,
    Throttles,
)
from msatools.tasks.table import TaskReader, TaskTable

# --- Details of tasks on run queues: policy, priority, wait, throttling.


_QUEUED = 1
"""TASK_ON_RQ_QUEUED (kernel/sched/sched.h), not TASK_ON_RQ_MIGRATING."""

_CLASSES: dict[str, SchedClass] = {
    "stop_sched_class": "stop",
    "dl_sched_class": "deadline",
    "rt_sched_class": "realtime",
    "fair_sched_class": "fair",
    "idle_sched_class": "idle",
    "ext_sched_class": "ext",
}

_MORE: Members = {
    "class": ("sched_class",),
    "deadline": ("dl.deadline",),
}


class QueuedTasks:
    """Tasks on run queues, read at once by their addresses."""

    def __init__(
        self, reader: Reader, addresses: Iterable[int], now: int, losses: LossLog
    ) -> None:
        """Read the tasks, none of which may be an idle task.

        :param now: The local clock, in nanoseconds.
        """
        self._now = now
        task_reader = reader.once(TaskReader, lambda: TaskReader(reader))
        self._table = task_reader.read(list(addresses), losses)
        self._rows = {
            address: row for row, address in enumerate(self._table["address"].tolist())
        }
        self._more = read_structs(
            reader, "struct task_struct", _MORE, self._table["address"], losses
        )
        self._classes = reader.once(_classes, lambda: _classes(reader.prog))
        self._cgroups = read_cgroups(reader, self._table, losses)
        self._throttles = Throttles(reader, self._table, losses)

    def is_queued(self, address: int, cpu: int) -> bool:
        """Return whether a task is on a CPU's run queue; ``False`` if unreadable."""
        row = self._rows.get(address)
        if row is None or int(self._table["cpu"][row]) != cpu:
            return False
        return int(self._table["on_rq"][row]) == _QUEUED

    def sleeps(self, address: int) -> bool:
        """Return whether a task sleeps on the run queue (delayed dequeue, v6.12)."""
        return delays(self._table) and bool(
            self._table["sched_delayed"][self._rows[address]]
        )

    def running(self, address: int) -> RunnableTask | None:
        """Return a running task; ``None`` if it could not be read."""
        if address not in self._rows:
            return None
        sched_class = self._classes.get(int(self._more["class"][self._rows[address]]))
        return sched_class and self.queued(address, sched_class, runs=True)

    def queued(
        self,
        address: int,
        sched_class: SchedClass,
        *,
        runs: bool = False,
        throttled: bool = False,
    ) -> RunnableTask:
        """Return a task that waits, or with *runs* one that runs."""
        row, table = self._rows[address], self._table
        policy = int(table["policy"][row])
        wait = self._since("last_arrival_ns" if runs else "last_queued_ns", row)
        deadline = int(self._more["deadline"].astype(np.int64)[row])
        return RunnableTask(
            pid=int(table["pid"][row]),
            comm=comm_text(table["comm"][row]),
            sched_class=sched_class,
            policy=POLICIES.get(policy, str(policy)),
            priority=int(table["prio"][row]) - MAX_RT_PRIO,
            rt_priority=int(table["rt_priority"][row]) if policy in REALTIME else None,
            nice=None
            if policy in (*REALTIME, DEADLINE)
            else int(table["static_prio"][row]) - NICE_0,
            deadline_ns=deadline - self._now if sched_class == "deadline" else None,
            wait_ns=wait,
            wait_bound="upper" if not runs and self._may_have_slept(row) else "exact",
            cgroup=self._cgroups.path(row),
            throttled=throttled,
            throttle=self._throttle(row) if throttled else None,
        )

    def _may_have_slept(self, row: int) -> bool:
        """Return whether a task's time on the queue may include sleep.

        A delayed sleeper that moves to another CPU is queued there while it sleeps
        (v6.12), and loses its exec_start until it runs (migrate_task_rq_fair()).
        """
        return delays(self._table) and not self._table["exec_start_ns"][row]

    def _throttle(self, row: int) -> str | None:
        found = self._throttles.of(row, self._now)
        return None if found is None else found.text

    def _since(self, column: str, row: int) -> int | None:
        """Return the time since the stamp in a column, in ns; ``None`` if there is no
        stamp, as without CONFIG_SCHED_INFO."""
        if not self._table.has(column) or not self._table[column][row]:
            return None
        return max(self._now - int(self._table[column][row]), 0)


def idle_task(cpu: int, since: int | None) -> RunnableTask:
    """Return the idle task of a CPU without reading it: init_idle() fixes its values.

    :param since: time that it has been running, in ns; ``None`` if unknown
    """
    return RunnableTask(
        pid=0,
        comm=f"swapper/{cpu}",
        sched_class="idle",
        policy=POLICIES[0],
        priority=NICE_0 - MAX_RT_PRIO,
        rt_priority=None,
        nice=0,
        deadline_ns=None,
        wait_ns=since,
        wait_bound="exact",
        cgroup=None,
        throttled=False,
    )


def delays(tasks: TaskTable) -> bool:
    """Return whether tasks may sleep on the run queue (delayed dequeue, v6.12)."""
    return tasks.has("sched_delayed")


def _classes(prog: drgn.Program) -> dict[int, SchedClass]:
    """Return the classes by the address of their ``struct sched_class``."""
    # The first lookup of a missing symbol takes long.
    has_ext = find_type(prog, "struct rq").has_member("scx")
    classes: dict[int, SchedClass] = {}
    for name, sched_class in _CLASSES.items():
        if sched_class == "ext" and not has_ext:
            continue
        try:
            classes[find_symbol(prog, name).address] = sched_class
        except MissingError:
            # The symbols are incomplete.
            continue
    return classes


# --- Run queues: the running task, the waiting tasks, and the lag of the clock.
#
# kernel/sched/core.c: a run queue's clock is updated by each tick and by each change of
# the queue. So it stands still while the CPU is idle or runs one task without a tick,
# and while interrupts are off.


LATE_NS = 1_000_000_000
"""Minimum delay of a timer's interrupt from which on interrupts are taken to be off.

They are usually off for microseconds, and for up to some 0.1 s by a serial console,
firmware or a busy hypervisor. The kernel's own detector waits for 10 s
(kernel/watchdog.c)."""

_ORDER: Sequence[SchedClass] = ("stop", "deadline", "realtime", "fair", "ext", "idle")

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
    """Read the run queue of each CPU of ``percpu.cpus``; leave out unreadable ones.

    Fair tasks are in the order of :func:`msatools.cpus.queued.read_fair`; throttled
    tasks of all classes come last. A task that sleeps on the queue (delayed dequeue,
    v6.12) is not among the waiting ones. In a dump the number of tasks found is
    compared with ``nr_running``, and a difference noted.

    :param tasks: All tasks, if they have been read: throttled deadline tasks, which are
        on no queue and no list, are found only among these.
    :param crash_cpu: The CPU that the kernel crashed on, if it did.
    :raises MissingError: if no run queue can be found at all
    """
    queues = read_queues(reader, percpu, losses)
    rq = queues.rq
    on_queue = _with_throttled(reader, percpu, queues, tasks, losses)
    clock = [time if time < MAX_PLAUSIBLE else 0 for time in rq["clock"].tolist()]
    now = max([clocks.local_ns, *clock])
    known = _read_tasks(reader, queues, on_queue, now, losses)
    turns = _turns(reader, queues, losses)
    online = frozenset(online_cpus(reader, losses))
    result = []
    for row, cpu in enumerate(percpu.cpus.tolist()):
        if not rq.readable[row]:
            continue
        runs, running = int(rq["curr"][row]), int(rq["running"][row])
        # In a zeroed page curr and idle are both NULL: that is no idle CPU.
        is_online, is_idle = cpu in online, 0 != runs == int(rq["idle"][row])
        current: RunnableTask | None = None
        if is_online and is_idle:
            current = idle_task(cpu, _since(now, int(rq["idle_since"][row])))
        elif is_online:
            current = known.running(runs)
        lag = _since(now, clock[row])
        ticked = _since(ticks.latest_ns, ticks.ticked_ns[row]) if is_online else None
        result.append(
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
                    late_ns=tick_delay(ticks, row, lag),
                ),
                panicked=cpu == crash_cpu,
            )
        )
        if not reader.is_live:
            # On a live kernel queue and count change between the reads.
            counted = {t.address for t in on_queue[row] if not _is_out(t, turns)}
            number = sum(known.is_queued(address, cpu) for address in counted | {runs})
            _check(
                cpu, running, range(number, number + queues.servers[row] + 1), losses
            )
    return tuple(result)


def lag_why(
    *, online: bool, idle: bool, tick_stopped: bool | None, late_ns: int | None
) -> LagWhy | None:
    """Return why a run queue's clock lags; ``None`` if it does not, or if unknown.

    ``tick stopped``: the CPU runs a task without a tick (nohz_full). ``interrupts
    off``: a timer's interrupt is late by :data:`LATE_NS`; a hypervisor that does
    not run the CPU has the same effect. The clock itself is no evidence, as other CPUs
    update it, too, when they wake tasks there or balance load. A crashing kernel has
    interrupts off while it reports the crash.

    :param late_ns: Delay of a timer's interrupt, in ns; ``None`` if unknown.
    """
    if not online:
        return "offline"
    if late_ns is not None and late_ns >= LATE_NS:
        return "interrupts off"
    if tick_stopped:
        return "idle" if idle else "tick stopped"
    return None


def tick_delay(ticks: TickSched, row: int, lag: int | None) -> int | None:
    """Return the delay of a timer's interrupt on an online CPU, in ns; below 0 if none
    is due yet, ``None`` if unknown.

    :param row: The CPU's row in ``PerCpu.cpus``.
    :param lag: The lag of its run queue's clock, in ns.
    """
    due, ticked = ticks.due_ns[row], ticks.ticked_ns[row]
    late = [] if due is None else [ticks.latest_ns - due]
    if ticks.stopped[row] is False:
        # ``due_ns`` is None while a timer's interrupt is being handled.
        if ticked is not None:
            late.append(ticks.latest_ns - ticked)
        elif due is None and lag is not None:
            late.append(lag)
    return max(late, default=None)


def _turns(
    reader: Reader, queues: RunQueueLists, losses: LossLog
) -> Mapping[int, FairTask]:
    """Return the turns of the queued fair tasks, by the task's address."""
    fair = [
        (task.address, root)
        for tasks, root in zip(queues.tasks, queues.roots.tolist(), strict=True)
        for task in tasks
        if task.sched_class == "fair"
    ]
    addresses, roots = np.array(fair, np.uint64).reshape(-1, 2).T
    return read_fair(reader, addresses, roots, losses)


def _with_throttled(
    reader: Reader,
    percpu: PerCpu,
    queues: RunQueueLists,
    tasks: TaskTable | None,
    losses: LossLog,
) -> list[list[QueuedTask]]:
    """Return the queued tasks of each CPU, and those dequeued by throttling."""
    on_queue = [list(of_cpu) for of_cpu in queues.tasks]
    rows = {cpu: row for row, cpu in enumerate(percpu.cpus.tolist())}
    known = {task.address for of_cpu in on_queue for task in of_cpu}
    known.update(queues.rq["curr"].tolist())
    throttled = [
        (cpu, QueuedTask(address, "fair", throttled=True))
        for cpu, address in quota_waiters(reader, percpu, losses)
    ]
    if tasks is not None:
        throttled += _throttled_deadline(reader, tasks, losses)
    for cpu, task in throttled:
        if cpu in rows and task.address not in known:
            on_queue[rows[cpu]].append(task)
    return on_queue


def _throttled_deadline(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> Iterator[tuple[int, QueuedTask]]:
    """Yield the CPU and the task of each deadline task dequeued by throttling."""
    waits = (tasks["on_rq"] != 0) & (tasks["on_cpu"] == 0)
    rows = waits & (tasks["policy"] == DEADLINE)
    for cpu, address in zip(
        tasks["cpu"][rows].tolist(), tasks["address"][rows].tolist(), strict=True
    ):
        task = object_at(reader.prog, "struct task_struct", address)
        try:
            if task.dl.dl_throttled:
                yield cpu, QueuedTask(address, "deadline", throttled=True)
        except UNREADABLE as error:
            losses.lose(Loss.QUEUED, f"cannot read a throttled task: {error}")


def _read_tasks(
    reader: Reader,
    queues: RunQueueLists,
    on_queue: Sequence[Sequence[QueuedTask]],
    now: int,
    losses: LossLog,
) -> QueuedTasks:
    """Read all queued and running tasks except the idle tasks."""
    addresses = {task.address for tasks in on_queue for task in tasks}
    addresses.update(queues.rq["curr"].tolist())
    addresses.difference_update([0, *queues.rq["idle"].tolist()])
    return QueuedTasks(reader, sorted(addresses), now, losses)


def _since(now: int, moment: int | None) -> int | None:
    return max(now - moment, 0) if moment else None


def _is_out(task: QueuedTask, turns: Mapping[int, FairTask]) -> bool:
    """Return whether a task, or one of its groups, is throttled."""
    return task.throttled or (task.address in turns and turns[task.address].throttled)


def _waiting(
    known: QueuedTasks,
    turns: Mapping[int, FairTask],
    tasks: Sequence[QueuedTask],
    runs: int,
    cpu: int,
) -> tuple[RunnableTask, ...]:
    """Return the tasks that wait for a CPU that runs *runs*, the next to run first."""

    def turn(task: QueuedTask) -> tuple[object, ...]:
        # The sort is stable: tasks of other classes are in order already.
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
    """Note if the kernel's count of tasks is not in the range of numbers found.

    The count includes delayed sleepers, and excludes throttled tasks.
    """
    if running not in found:
        losses.lose(Loss.QUEUES_DIFFER)
        losses.note(
            "run-queue-differs",
            f"CPU {cpu} counts {running} tasks that can run, {found.start} were found: "
            "its run queue was changing, or is damaged",
            str(cpu),
        )
