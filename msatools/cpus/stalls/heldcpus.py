# SPDX-License-Identifier: LGPL-2.1-or-later

"""What CPUs that are late, or that hold something up, do: from their stacks."""

from collections.abc import Mapping, Sequence

from msatools.cpus.model import RunnableTask
from msatools.cpus.stalls.contexts import Context, interpret
from msatools.cpus.stalls.cpureader import CpuReader
from msatools.cpus.stalls.evidence import LATE_NS
from msatools.cpus.stalls.model import CrossCall, HeldCpu, WantedLock
from msatools.cpus.stalls.spinlocks import WantedLocks
from msatools.cpus.stalls.watchdogs import Watchdogs
from msatools.tasks.preemptcounts import preemption_count, softirq_count
from msatools.tasks.runningstacks import CpuStack, StackReader, named_frames
from msatools.tasks.table import PF_KTHREAD

_MAX_STACKS = 64
"""Maximum number of CPUs whose stacks are unwound: each takes milliseconds."""

_THREADS = ("ksoftirqd/", "rcu_", "rcuc/", "rcuog/", "rcuop/", "rcuos/", "ktimers/")
"""Beginnings of the names of threads that softirqs and RCU need."""


class HeldCpus:
    """Examines CPUs: what they do, and for whom they wait."""

    def __init__(self, cpus: CpuReader) -> None:
        self._cpus = cpus
        self._locks = WantedLocks(cpus)
        self.halted: set[int] = set()
        """Those that a crashing kernel has stopped, of the examined ones."""

    def read(
        self,
        wanted: Sequence[int],
        dogs: Watchdogs,
        late: Mapping[int, int],
        calls: Sequence[CrossCall],
    ) -> dict[int, HeldCpu]:
        """Examine some CPUs, and those that they wait for.

        :param late: Delay of the timer interrupt of each CPU, in ns.
        """
        if not wanted:
            return {}
        contexts = self._contexts(wanted)
        locks: dict[int, WantedLock] = {}
        if any(each.why == "spins-for-lock" for each, _ in contexts.values()):
            locks = self._locks.locks()
            owners = [
                owner.cpu
                for cpu in contexts
                if cpu in locks
                for owner in locks[cpu].owners
                if owner.cpu in self._cpus.queues
            ]
            wanted = list(dict.fromkeys((*wanted, *owners)))
            contexts |= self._contexts([cpu for cpu in owners if cpu not in contexts])
        counts = self._cpus.counts.by_cpu
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
        running = self._cpus.running
        counts = self._cpus.counts.by_cpu
        stacks = StackReader(self._cpus.reader, self._cpus.text, self._cpus.losses)
        found = {}
        if len(cpus) > _MAX_STACKS:
            text = f"only {_MAX_STACKS} CPUs have their stacks read"
            self._cpus.losses.note("stacks-left-out", text)
        for cpu in cpus[:_MAX_STACKS]:
            task = int(running.addresses[self._cpus.rows[cpu]])
            stack = stacks.read(task) if task else None
            if stack is None:
                continue
            count = counts.get(cpu)
            serves = None if count is None else bool(softirq_count(count) & 1)
            context = interpret(
                stack.names,
                kthread=bool(running.of(cpu, "flags") & PF_KTHREAD),
                late=(self._cpus.delay(cpu) or 0) >= LATE_NS,
                softirq=serves,
                interrupt=self._cpus.counts.in_interrupt(count or 0),
            )
            found[cpu] = context, stack
            if context.halted:
                self.halted.add(cpu)
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
        queue = self._cpus.queues[cpu]
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
            watchdog_ns=dogs.ages_ns[self._cpus.rows[cpu]],
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
            module=None if found is None else self._module(*found),
        )

    def _module(self, context: Context, stack: CpuStack) -> str | None:
        """Return the module of the function that says best what a CPU does."""
        for name, module in named_frames(stack, self._cpus.text):
            if name.partition(".")[0] == context.function:
                return module
        return None


def _policy(task: RunnableTask | None) -> str | None:
    """Return the policy of a task that others have to wait for."""
    if task is None or task.sched_class not in ("realtime", "deadline"):
        return None
    if task.rt_priority is None:
        return task.policy
    return f"{task.policy} {task.rt_priority}"
