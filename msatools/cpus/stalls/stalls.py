# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the evidence of stalls, and find what follows from it.

First only what is cheap is read, of all CPUs at once. Stacks are unwound for CPUs that
are late, or that hold something up: on a quiet kernel for none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import drgn
import numpy as np

from msatools.cpus.model import RunnableTask, RunQueue
from msatools.cpus.runqueues import read_run_queues, tick_delay
from msatools.cpus.stalls.calls import read_calls
from msatools.cpus.stalls.contexts import (
    Context,
    CpuStack,
    StackReader,
    interpret,
)
from msatools.cpus.stalls.evidence import LATE_NS, StallEvidence
from msatools.cpus.stalls.findings import find_stalls, found_by_kernel
from msatools.cpus.stalls.lock_code import refers_to
from msatools.cpus.stalls.model import (
    CrossCall,
    GracePeriod,
    GracePeriodTask,
    HeldCpu,
    OverdueTimer,
    SpinlockOwner,
    Stalls,
    StopMachine,
    WantedLock,
)
from msatools.cpus.stalls.preemptcounts import (
    PreemptCounts,
    preemption_count,
    softirq_count,
)
from msatools.cpus.stalls.rcu import read_grace_period, waiters
from msatools.cpus.stalls.stopper import read_stop_machine
from msatools.cpus.stalls.timers import overdue_timers
from msatools.cpus.stalls.watchdogs import Watchdogs, read_watchdogs
from msatools.cpus.ticksched import TickSched, read_tick_sched
from msatools.kernel.clocks import Clocks
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.jiffies import Jiffies, read_jiffies
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import PerCpu, read_percpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.target.model import Address, Crash
from msatools.tasks.identity import comm_text
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import PF_KTHREAD, TaskReader, TaskTable
from msatools.tasks.task_state import TaskState, collect_now
from msatools.tasks.text import KernelText

_MAX_STACKS = 64
"""Maximum number of CPUs whose stacks are unwound: each takes milliseconds."""

_QUEUES: Members = {"current": ("curr",), "idle": ("idle",)}

_PREEMPTED = 1
"""KVM_VCPU_PREEMPTED (arch/x86/include/uapi/asm/kvm_para.h)"""

_THREADS = ("ksoftirqd/", "rcu_", "rcuc/", "rcuog/", "rcuop/", "rcuos/", "ktimers/")
"""Beginnings of the names of threads that softirqs and RCU need."""

_UNINTERRUPTIBLE = 0x2
_NOT_IN_LOAD = 0x400
"""TASK_UNINTERRUPTIBLE, and TASK_NOLOAD for threads without work."""


@dataclass(frozen=True)
class CpuState:
    """What is known of the CPUs of a kernel before stalls are looked for."""

    percpu: PerCpu
    clocks: Clocks
    ticks: TickSched
    queues: tuple[RunQueue, ...]
    crash: Crash | None = None


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
    Return what stands still, of an open program, with the evidence.

    ``found`` has what other commands need: each has a code, a text, a confidence and
    the command's own evidence. Those with ``over_limit`` are stalls by the kernel's own
    limits. On a kernel without any it costs some reads of each CPU.

    :param clocks: The kernel's clocks.
    :param tasks: All tasks, and
    :param now: what they do, if both are known: else they are read if a grace period
        does not end.
    :param crash: How the kernel crashed, if it did.
    :raises LookupError: if no run queue can be found at all
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
    """Return what stands still: see :func:`collect_stalls`.

    :param thorough: Whether to look for tasks that wait for a grace period although it
        may still end in time.
    """
    return _StallReader(reader, cpus, losses).read(tasks, now, thorough)


@dataclass(frozen=True)
class _Running:
    """The tasks that CPUs run, in the order of ``PerCpu.cpus``."""

    addresses: Addresses
    table: TaskTable
    rows: Mapping[int, int]
    """Row in the table of the task of each CPU."""

    def of(self, cpu: int, column_: str) -> int:
        """Return a member of a CPU's task; 0 if it could not be read."""
        row = self.rows.get(cpu)
        return 0 if row is None else int(self.table[column_][row])


class _StallReader:
    """Reads the evidence of one report."""

    def __init__(self, reader: Reader, cpus: CpuState, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._percpu = cpus.percpu
        self._clocks = cpus.clocks
        self._ticks = cpus.ticks
        self._crash = cpus.crash
        self._queues = {queue.cpu: queue for queue in cpus.queues}
        self._numbers: list[int] = cpus.percpu.cpus.tolist()
        self._rows = {cpu: row for row, cpu in enumerate(self._numbers)}
        self._halted: set[int] = set()
        self._online = frozenset(online_cpus(reader, losses))
        self._text: KernelText | None = None
        self._running: _Running | None = None
        self._counts = PreemptCounts(
            reader, cpus.percpu, lambda: self._read_running().addresses, losses
        )

    def read(
        self, tasks: TaskTable | None, now: TaskState | None, thorough: bool
    ) -> Stalls:
        dogs = read_watchdogs(self._reader, self._percpu, self._clocks, self._losses)
        jiffies = self._jiffies()
        idle = frozenset(filter(self._is_idle, self._queues))
        rcu: GracePeriod | None = None
        timers: tuple[OverdueTimer, ...] = ()
        if jiffies is not None:
            rcu = read_grace_period(
                self._reader,
                self._percpu,
                self._clocks,
                jiffies,
                self._ticks.latest_ns,
                self._losses,
            )
            timers = overdue_timers(
                *(self._reader, self._percpu, self._ticks, jiffies),
                *(idle, self._online, self.name, self._losses),
            )
        stop = read_stop_machine(self._reader, self._percpu, self.name, self._losses)
        stop = self._with_time(stop)
        late = {cpu: delay for cpu in self._queues if (delay := self._delay(cpu))}
        overdue = {cpu for cpu, delay in late.items() if delay >= LATE_NS}
        calls = self._calls(sorted(overdue))
        wanted = self._suspects(overdue, rcu, stop, calls, timers, thorough)
        held = self._held(wanted, dogs, late, calls, stop)
        if rcu is not None and (thorough or _is_slow(rcu)):
            rcu = replace(rcu, waiters=self._waiters(tasks, now))
        stolen = self._stolen() if overdue else ()
        halted = min((late.get(cpu, 0) for cpu in self._halted), default=None)
        found = find_stalls(
            StallEvidence(
                limits=dogs.limits,
                cpus=held,
                queues=tuple(self._queues.values()),
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

    def name(self, address: int) -> str | None:
        """Return the function at an address."""
        found = self.text.name(address)
        return None if found is None else found.partition(".")[0]

    @property
    def text(self) -> KernelText:
        """Functions by address; made when first needed."""
        if self._text is None:
            self._text = self._reader.once(
                KernelText, lambda: KernelText(self._reader, self._losses)
            )
        return self._text

    # --- what is cheap

    def _jiffies(self) -> Jiffies | None:
        try:
            return read_jiffies(self._reader.prog)
        except (LookupError, drgn.FaultError) as error:
            self._losses.lose(Loss.TICKS, f"the time in ticks is lost: {error}")
            return None

    def _is_idle(self, cpu: int) -> bool:
        current = self._queues[cpu].current
        return current is not None and current.sched_class == "idle"

    def _delay(self, cpu: int) -> int | None:
        """Return the delay of a CPU's timer interrupt."""
        if cpu not in self._online:
            return None
        return tick_delay(self._ticks, self._rows[cpu], self._queues[cpu].lag_ns)

    def _with_time(self, stop: StopMachine | None) -> StopMachine | None:
        if stop is None:
            return None
        ran = [
            queue.switched_ns
            for cpu in stop.stopped
            if (queue := self._queues.get(cpu)) and queue.switched_ns is not None
        ]
        return replace(stop, since_ns=max(ran, default=None))

    def _calls(self, late: Sequence[int]) -> tuple[CrossCall, ...]:
        if not late:
            return ()
        running = self._read_running()
        return read_calls(
            self._reader,
            self._percpu,
            late,
            {
                cpu: stack
                for cpu in self._numbers
                if (stack := running.of(cpu, "stack"))
            },
            stack_bytes(self._reader.prog),
            self.name,
            self._losses,
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
        """Return the CPUs to examine, those with the best reason first."""
        found = dict.fromkeys(sorted(late))
        for cpu, queue in self._queues.items():
            if self._does_not_switch(queue, thorough):
                found[cpu] = None
        found.update(dict.fromkeys(timer.cpu for timer in timers))
        for call in calls:
            if call.caller is not None:
                found[call.caller] = None
        if rcu is not None and _is_slow(rcu):
            blocking = (*rcu.cpus, *rcu.expedited_cpus)
            found.update(dict.fromkeys(cpu for cpu in blocking if not self._idles(cpu)))
            found.update(dict.fromkeys(self._runs_instead_of(rcu)))
        if stop is not None:
            found.update(dict.fromkeys((*stop.missing, *stop.stopped)))
        return [cpu for cpu in found if cpu in self._queues]

    def _idles(self, cpu: int) -> bool:
        return cpu in self._queues and self._is_idle(cpu)

    @staticmethod
    def _does_not_switch(queue: RunQueue, thorough: bool) -> bool:
        """Return whether tasks wait for long, and not only for their turn.

        Why they wait for a realtime task is known without a look at its stack.
        """
        current = queue.current
        if current is None or current.sched_class == "idle":
            return False
        if current.sched_class in ("realtime", "deadline"):
            if not thorough:
                return False
        elif (queue.switched_ns or 0) < LATE_NS:
            return False
        return any(
            (task.wait_ns or 0) >= LATE_NS and not task.throttled
            for task in queue.waiting
        )

    def _runs_instead_of(self, rcu: GracePeriod) -> list[int]:
        """Return the CPUs for which tasks wait that RCU needs."""
        wanted = {task.pid for task in (*rcu.tasks, *rcu.expedited_tasks)}
        wanted |= {rcu.thread.pid} if rcu.thread is not None else set()
        return [
            cpu
            for cpu, queue in self._queues.items()
            if any(task.pid in wanted for task in queue.waiting)
        ]

    # --- what takes longer

    def _read_running(self) -> _Running:
        """Read the tasks that CPUs run, once."""
        if self._running is None:
            queues = read_structs(
                self._reader,
                "struct rq",
                _QUEUES,
                self._percpu.addresses("runqueues"),
                self._losses,
            )
            addresses = np.where(queues.readable, queues["current"], 0)
            task_reader = self._reader.once(
                TaskReader, lambda: TaskReader(self._reader)
            )
            # Idle tasks are in no list of tasks, and have no PID.
            unique = sorted({*addresses.tolist()} - {0, *queues["idle"].tolist()})
            table = task_reader.read(unique, self._losses)
            known = {
                address: row for row, address in enumerate(table["address"].tolist())
            }
            rows = {
                cpu: known[address]
                for cpu, address in zip(self._numbers, addresses.tolist(), strict=True)
                if address in known
            }
            self._running = _Running(addresses, table, rows)
        return self._running

    def _held(
        self,
        wanted: Sequence[int],
        dogs: Watchdogs,
        late: Mapping[int, int],
        calls: Sequence[CrossCall],
        stop: StopMachine | None,
    ) -> dict[int, HeldCpu]:
        """Examine some CPUs, and those that they wait for."""
        if not wanted:
            return {}
        contexts = self._contexts(wanted)
        locks: dict[int, WantedLock] = {}
        if any(each.why == "spins-for-lock" for each, _ in contexts.values()):
            locks = self._with_owners(self._locks(), contexts)
            owners = [
                owner.cpu
                for cpu in contexts
                if cpu in locks
                for owner in locks[cpu].owners
                if owner.cpu in self._queues
            ]
            wanted = list(dict.fromkeys((*wanted, *owners)))
            contexts |= self._contexts([cpu for cpu in owners if cpu not in contexts])
        counts = self._counts.by_cpu
        called: dict[int, set[int]] = {}
        for call in calls:
            if call.caller is not None:
                called.setdefault(call.caller, set()).add(call.cpu)
        return {
            cpu: self._held_cpu(
                cpu,
                contexts.get(cpu),
                dogs,
                late.get(cpu),
                counts.get(cpu),
                locks.get(cpu),
                tuple(sorted(called.get(cpu, ()))),
            )
            for cpu in wanted
        }

    def _contexts(self, cpus: Sequence[int]) -> dict[int, tuple[Context, CpuStack]]:
        running = self._read_running()
        counts = self._counts.by_cpu
        stacks = StackReader(self._reader, self.text, self._losses)
        found = {}
        if len(cpus) > _MAX_STACKS:
            text = f"only {_MAX_STACKS} CPUs have their stacks read"
            self._losses.note("stacks-left-out", text)
        for cpu in cpus[:_MAX_STACKS]:
            task = int(running.addresses[self._rows[cpu]])
            stack = stacks.read(task) if task else None
            if stack is None:
                continue
            count = counts.get(cpu)
            serves = None if count is None else bool(softirq_count(count) & 1)
            context = interpret(
                stack.names,
                kthread=bool(running.of(cpu, "flags") & PF_KTHREAD),
                late=(self._delay(cpu) or 0) >= LATE_NS,
                softirq=serves,
                interrupt=self._counts.in_interrupt(count or 0),
            )
            found[cpu] = context, stack
            if context.halted:
                self._halted.add(cpu)
        return found

    def _held_cpu(
        self,
        cpu: int,
        found: tuple[Context, CpuStack] | None,
        dogs: Watchdogs,
        late: int | None,
        count: int | None,
        lock: WantedLock | None,
        calls_cpus: tuple[int, ...],
    ) -> HeldCpu:
        queue = self._queues[cpu]
        current = queue.current
        interrupts = why = None
        context: Context | None = None
        if found is not None:
            context, stack = found
            why = context.why
            interrupts = stack.flags.get(context.skipped)
            if (
                (late or 0) >= LATE_NS
                and interrupts == "on"
                and not context.halted
                and context.mode in ("user", "task")
            ):
                # It would have taken the interrupt.
                why = "host"
        return HeldCpu(
            cpu=cpu,
            pid=None if current is None else current.pid,
            comm=None if current is None else current.comm,
            policy=_policy(current),
            running_ns=queue.switched_ns,
            tick_late_ns=late,
            ticked_ns=queue.ticked_ns,
            watchdog_ns=dogs.ages_ns[self._rows[cpu]],
            interrupts=interrupts,
            preempt_count=None if count is None else preemption_count(count),
            softirq_count=None if count is None else softirq_count(count),
            mode=None if context is None else context.mode,
            function=None if context is None else context.function,
            call=None if context is None else context.call,
            why=why,
            wanted=lock,
            calls_cpus=calls_cpus,
            waiting=sum(not task.throttled for task in queue.waiting),
            starved=tuple(
                task.comm
                for task in queue.waiting
                if task.comm.startswith(_THREADS) and (task.wait_ns or 0) >= LATE_NS
            ),
            frames=() if context is None else context.frames,
        )

    def _locks(self) -> dict[int, WantedLock]:
        """Return the spinlock that each CPU spins for, and who has it."""
        # CPUs rarely spin for long, and it takes a tenth of a second to import.
        from msatools.locks.base.lock_context import LockContext
        from msatools.locks.base.struct_reader import Layout
        from msatools.locks.names.names import LockNames
        from msatools.locks.sleeping.spinlocks import Spin, spins

        running = self._read_running()
        context = LockContext(
            Layout(self._reader),
            running.table,
            self._losses,
            self._clocks,
            alone=False,
        )
        found = spins(context, stack_bytes(self._reader.prog))
        names = LockNames(context)
        cpus = {row: cpu for cpu, row in running.rows.items()}
        addresses: list[int] = running.table["address"].tolist()
        by_task = {address: row for row, address in enumerate(addresses)}

        def owners(spin: Spin) -> tuple[SpinlockOwner, ...]:
            rows = [by_task.get(holder.task) for holder in spin.holders]
            return tuple(
                SpinlockOwner(
                    pid=int(running.table["pid"][row]),
                    comm=comm_text(running.table["comm"][row]),
                    cpu=cpus.get(row),
                    confidence="evidence",
                )
                for row in rows
                if row is not None
            )

        return {
            cpus[spin.row]: WantedLock(
                address=Address(spin.request.lock.address or 0),
                name=names.name(spin.request.lock, ()).name,
                owners=owners(spin),
            )
            for spin in found
            if spin.row in cpus
        }

    def _with_owners(
        self,
        locks: dict[int, WantedLock],
        contexts: Mapping[int, tuple[Context, CpuStack]],
    ) -> dict[int, WantedLock]:
        """Find who has a static lock whose address no other CPU has on its stack.

        It must have disabled preemption, and be in code that refers to the lock.
        """
        if all(lock.owners for lock in locks.values()):
            return locks
        others = [
            cpu for cpu in self._queues if cpu in self._online and not self._idles(cpu)
        ]
        contexts = {**contexts} | self._contexts(
            [cpu for cpu in others if cpu not in contexts]
        )
        counts = self._counts.by_cpu
        found = {}
        for spinning, lock in locks.items():
            owners = lock.owners or tuple(
                self._owner(cpu)
                for cpu, (context, stack) in contexts.items()
                if context.why != "spins-for-lock"
                and self._has_locked(context, stack, counts.get(cpu))
                and refers_to(self._reader, self.text, stack.pcs, lock.address)
            )
            owners = owners if len(owners) == 1 or lock.owners else ()
            found[spinning] = replace(lock, owners=owners)
        return found

    @staticmethod
    def _has_locked(context: Context, stack: CpuStack, count: int | None) -> bool:
        """Return whether a CPU may have a spinlock."""
        off = stack.flags.get(context.skipped) == "off"
        return context.mode != "user" and (off or bool(count))

    def _owner(self, cpu: int) -> SpinlockOwner:
        current = self._queues[cpu].current
        return SpinlockOwner(
            pid=0 if current is None else current.pid,
            comm="" if current is None else current.comm,
            cpu=cpu,
            confidence="evidence",
        )

    def _waiters(
        self, tasks: TaskTable | None, now: TaskState | None
    ) -> tuple[GracePeriodTask, ...]:
        """Return the tasks that wait for a grace period."""
        if tasks is None or now is None:
            task_reader = self._reader.once(
                TaskReader, lambda: TaskReader(self._reader)
            )
            tasks = task_reader.read_all(self._losses)
            state = tasks["state"]
            asleep = (state & _UNINTERRUPTIBLE != 0) & (state & _NOT_IN_LOAD == 0)
            tasks = tasks.only(asleep)
            collector = StackCollector(self._reader, self._losses)
            now = collect_now(collector, self._reader.prog, tasks, self._clocks)
        return waiters(tasks, now)

    def _stolen(self) -> tuple[int, ...]:
        """Return the CPUs that KVM says it does not run (``kvm_steal_time``)."""
        try:
            addresses = self._percpu.addresses("steal_time")
            member = self._reader.prog.type("struct kvm_steal_time")
            offset = drgn.offsetof(member, "preempted")
        except LookupError:
            return ()
        records, _ = self._reader.read_records(addresses + np.uint64(offset), 1)
        is_out = (records[:, 0] & _PREEMPTED) != 0
        return tuple(
            cpu
            for cpu, is_set in zip(self._numbers, is_out.tolist(), strict=True)
            if is_set and cpu in self._online
        )


def _policy(task: RunnableTask | None) -> str | None:
    """Return the policy of a task that others have to wait for."""
    if task is None or task.sched_class not in ("realtime", "deadline"):
        return None
    if task.rt_priority is None:
        return task.policy
    return f"{task.policy} {task.rt_priority}"


def _is_slow(rcu: GracePeriod) -> bool:
    """Return whether a grace period lasts so long that it is looked at."""
    if rcu.expedited_cpus or rcu.expedited_tasks:
        return True
    return (rcu.age_ns or 0) >= LATE_NS
