# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the evidence of stalls, and return the stalls that follow from it."""

from collections.abc import Iterable, Sequence

import drgn
import numpy as np
from msgspec.structs import replace

from msatools.cpus.cross_calls import read_calls, read_stop_machine
from msatools.cpus.held_cpus import HeldCpus
from msatools.cpus.model import (
    CrossCall,
    GracePeriod,
    GracePeriodTask,
    OverdueTimer,
    RunQueue,
    Stalls,
    StopMachine,
)
from msatools.cpus.rcu import read_grace_period, waiters
from msatools.cpus.runqueues import read_run_queues
from msatools.cpus.stall_chains import STALL_NS, StallEvidence
from msatools.cpus.stall_findings import find_stalls, found_by_kernel
from msatools.cpus.stall_reading import (
    CpuReader,
    CpuState,
    overdue_timers,
    read_watchdogs,
)
from msatools.cpus.times import read_tick_sched
from msatools.errors import LOST, MissingError
from msatools.kernel.clocks import Clocks, Jiffies, read_jiffies
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.program.model import Crash
from msatools.selfdesc.find import find_type, offset_of
from msatools.tasks.sampler import TaskState, collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import NOLOAD, UNINTERRUPTIBLE
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import stack_bytes

_PREEMPTED = 1
"""KVM_VCPU_PREEMPTED (arch/x86/include/uapi/asm/kvm_para.h)"""


def collect_stalls(
    prog: drgn.Program,
    clocks: Clocks,
    losses: LossLog,
    *,
    tasks: TaskTable | None = None,
    now: TaskState | None = None,
    crash: Crash | None = None,
) -> Stalls:
    """
    Return the CPUs, grace periods and the like without progress, with the evidence.

    Items of ``found`` with ``over_limit`` are stalls by the limits of the kernel's own
    detectors. On a kernel without stalls this costs some reads of each CPU.

    :param clocks: The kernel's clocks.
    :param tasks: All tasks; if this or *now* is missing, tasks are read only if a grace
        period does not end.
    :param now: The state and stack of each task of *tasks*.
    :param crash: How the kernel crashed, if it did.
    :raises MissingError: if no run queue can be found at all
    """
    reader = Reader(prog)
    percpu = read_percpu(reader, losses)
    ticks = read_tick_sched(reader, percpu, losses)
    queues = read_run_queues(
        *(reader, percpu, clocks, ticks, losses),
        tasks=tasks,
        crash_cpu=crash.cpu if crash else None,
    )
    cpus = CpuState(percpu, clocks, ticks, queues, crash)
    return read_stalls(reader, cpus, losses, tasks=tasks, now=now)


def read_stalls(
    reader: Reader,
    cpus: CpuState,
    losses: LossLog,
    *,
    tasks: TaskTable | None = None,
    now: TaskState | None = None,
    thorough: bool = False,
) -> Stalls:
    """Return the same as :func:`collect_stalls`, from the state of CPUs read before.

    :param thorough: Whether to find the tasks that wait for a grace period even if it
        is young, and examine CPUs with realtime tasks that others wait for.
    """
    return _StallReader(reader, cpus, losses).read(tasks, now, thorough)


class _StallReader:
    """Reads the evidence of one report."""

    def __init__(self, reader: Reader, cpus: CpuState, losses: LossLog) -> None:
        self._cpus = CpuReader(reader, cpus, losses)
        self._crash = cpus.crash
        self._examined = HeldCpus(self._cpus)

    def read(
        self, tasks: TaskTable | None, now: TaskState | None, thorough: bool
    ) -> Stalls:
        cpus = self._cpus
        reader, percpu, losses = cpus.reader, cpus.percpu, cpus.losses
        dogs = read_watchdogs(reader, percpu, cpus.clocks, losses)
        jiffies = self._jiffies()
        idle = frozenset(filter(cpus.is_idle, cpus.queues))
        rcu: GracePeriod | None = None
        timers: tuple[OverdueTimer, ...] = ()
        if jiffies is not None:
            latest_ns = cpus.ticks.latest_ns
            rcu = read_grace_period(
                reader, percpu, cpus.clocks, jiffies, latest_ns, losses
            )
            timers = overdue_timers(
                *(reader, percpu, cpus.ticks, jiffies),
                *(idle, cpus.online, cpus.name, losses),
            )
        stop = read_stop_machine(reader, percpu, cpus.name, losses)
        stop = self._with_time(stop)
        delays = {cpu: cpus.delay(cpu) for cpu in cpus.queues}
        # A timer that is not due yet is not late.
        late = {cpu: max(0, by) for cpu, by in delays.items() if by is not None}
        overdue = {cpu for cpu, delay in late.items() if delay >= STALL_NS}
        calls = self._calls(sorted(overdue))
        wanted = self._suspects(overdue, rcu, stop, calls, timers, thorough)
        held = self._examined.read(wanted, dogs, late, calls)
        if rcu is not None and (thorough or _is_slow(rcu)):
            rcu = replace(rcu, waiters=self._waiters(tasks, now))
        stolen = self._stolen() if overdue else ()
        halted = min((late.get(cpu, 0) for cpu in self._examined.halted), default=None)
        found = find_stalls(
            StallEvidence(
                limits=dogs.limits,
                cpus=held,
                queues=tuple(cpus.queues.values()),
                rcu=rcu,
                calls=calls,
                stop_machine=stop,
                timers=timers,
                halted_ns=halted,
                found=found_by_kernel(self._crash.message if self._crash else None),
            )
        )
        return Stalls(
            limits=dogs.limits,
            found=found,
            cpus=tuple(held.values()),
            rcu=rcu,
            calls=calls,
            stop_machine=stop,
            timers=timers,
            halted_ns=halted,
            stolen=stolen,
        )

    def _jiffies(self) -> Jiffies | None:
        try:
            return read_jiffies(self._cpus.reader.prog)
        except LOST as error:
            self._cpus.losses.lose(
                Loss.TICKS, f"cannot read the time in ticks: {error}"
            )
            return None

    def _with_time(self, stop: StopMachine | None) -> StopMachine | None:
        if stop is None:
            return None
        ran = [
            queue.switched_ns
            for cpu in stop.stopped
            if (queue := self._cpus.queues.get(cpu)) and queue.switched_ns is not None
        ]
        return replace(stop, since_ns=max(ran, default=None))

    def _calls(self, late: Sequence[int]) -> tuple[CrossCall, ...]:
        if not late:
            return ()
        cpus, running = self._cpus, self._cpus.running
        stacks = {
            cpu: stack for cpu in cpus.numbers if (stack := running.of(cpu, "stack"))
        }
        return read_calls(
            cpus.reader,
            cpus.percpu,
            late,
            stacks,
            stack_bytes(cpus.reader.prog),
            cpus.name,
            cpus.losses,
        )

    def _suspects(
        self,
        late: set[int],
        rcu: GracePeriod | None,
        stop: StopMachine | None,
        calls: Iterable[CrossCall],
        timers: Iterable[OverdueTimer],
        thorough: bool,
    ) -> list[int]:
        """Return the CPUs to examine, the most suspect first."""
        found = dict.fromkeys(sorted(late))
        for cpu, queue in self._cpus.queues.items():
            if self._does_not_switch(queue, thorough):
                found[cpu] = None
        found.update(dict.fromkeys(timer.cpu for timer in timers))
        for call in calls:
            if call.caller is not None:
                found[call.caller] = None
        if rcu is not None and _is_slow(rcu):
            for cpu in (*rcu.cpus, *rcu.expedited_cpus):
                if not self._cpus.is_idle(cpu):
                    found[cpu] = None
            found.update(dict.fromkeys(self._runs_instead_of(rcu)))
        if stop is not None:
            found.update(dict.fromkeys((*stop.missing, *stop.stopped)))
        return [cpu for cpu in found if cpu in self._cpus.queues]

    @staticmethod
    def _does_not_switch(queue: RunQueue, thorough: bool) -> bool:
        """Return whether tasks have waited for long for a CPU that runs one task.

        Not for a realtime task, unless *thorough*: its policy explains the wait without
        its stack.
        """
        current = queue.current
        if current is None or current.sched_class == "idle":
            return False
        if current.sched_class in ("realtime", "deadline"):
            if not thorough:
                return False
        elif (queue.switched_ns or 0) < STALL_NS:
            return False
        return any(
            (task.wait_ns or 0) >= STALL_NS and not task.throttled
            for task in queue.waiting
        )

    def _runs_instead_of(self, rcu: GracePeriod) -> list[int]:
        """Return the CPUs on whose run queues a reader or RCU's thread waits."""
        wanted = {task.pid for task in (*rcu.tasks, *rcu.expedited_tasks)}
        wanted |= {rcu.thread.pid} if rcu.thread is not None else set()
        return [
            cpu
            for cpu, queue in self._cpus.queues.items()
            if any(task.pid in wanted for task in queue.waiting)
        ]

    def _waiters(
        self, tasks: TaskTable | None, now: TaskState | None
    ) -> tuple[GracePeriodTask, ...]:
        """Return the tasks that wait for a grace period; read all tasks if need be."""
        if tasks is None or now is None:
            cpus = self._cpus
            task_reader = cpus.reader.once(TaskReader, lambda: TaskReader(cpus.reader))
            tasks = task_reader.read_all(cpus.losses)
            state = tasks["state"]
            asleep = (state & UNINTERRUPTIBLE != 0) & (state & NOLOAD == 0)
            tasks = tasks.only(asleep)
            collector = StackCollector(cpus.reader, cpus.losses)
            now = collect_now(collector, cpus.reader.prog, tasks, cpus.clocks)
        return waiters(tasks, now)

    def _stolen(self) -> tuple[int, ...]:
        """Return the online CPUs that KVM has marked as not running
        (``kvm_steal_time.preempted``)."""
        try:
            addresses = self._cpus.percpu.addresses("steal_time")
            member = find_type(self._cpus.reader.prog, "struct kvm_steal_time")
            offset = offset_of(member, "preempted")
        except MissingError:
            return ()
        records, _ = self._cpus.reader.read_records(addresses + np.uint64(offset), 1)
        is_out = (records[:, 0] & _PREEMPTED) != 0
        return tuple(
            cpu
            for cpu, is_set in zip(self._cpus.numbers, is_out.tolist(), strict=True)
            if is_set and cpu in self._cpus.online
        )


def _is_slow(rcu: GracePeriod) -> bool:
    """Return whether a grace period is expedited, or old enough to be examined."""
    if rcu.expedited_cpus or rcu.expedited_tasks:
        return True
    return (rcu.age_ns or 0) >= STALL_NS
