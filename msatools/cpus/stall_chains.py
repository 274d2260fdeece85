# SPDX-License-Identifier: LGPL-2.1-or-later

"""Chains of waits between CPUs, from a CPU that stalls to its cause. Pure.

Also the struct of the evidence, and texts for what CPUs and tasks do.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from msatools.cpus.model import (
    Confidence,
    CrossCall,
    GracePeriod,
    GracePeriodTask,
    HeldCpu,
    OverdueTimer,
    RunnableTask,
    RunQueue,
    StallKind,
    StallLimits,
    StopMachine,
)
from msatools.reports.units import ranges
from msatools.tasks.waits import function_text

# --- The evidence of stalls, as read from the kernel.


STALL_NS = 1_000_000_000
"""Minimum time without progress: less may be a turn of other tasks, or a busy host."""


class StallEvidence(Struct, frozen=True, kw_only=True):
    """The evidence of stalls that was read."""

    limits: StallLimits
    cpus: Mapping[int, HeldCpu]
    """The examined CPUs, by number."""

    queues: Sequence[RunQueue]
    rcu: GracePeriod | None
    calls: Sequence[CrossCall]
    stop_machine: StopMachine | None
    timers: Sequence[OverdueTimer]
    halted_ns: int | None = None
    """Time since a crashing kernel stopped its other CPUs, which no stall includes."""

    found: frozenset[StallKind] = frozenset()
    """The kinds of stall that the kernel itself reported as the reason of its crash."""


# --- Texts for what CPUs and tasks do and wait for.


_NAMED = 4
"""Maximum number of names in one line."""


def functions_text(calls: Sequence[CrossCall]) -> str:
    found = sorted({call.function for call in calls if call.function})
    return ", ".join(found[:_NAMED]) or "a function"


def starved_text(held: HeldCpu) -> str:
    """Return threads of softirqs and RCU that realtime or user mode keeps waiting."""
    if not held.starved or (held.policy is None and held.mode != "user"):
        return ""
    return f", and {', '.join(held.starved[:_NAMED])} could not run"


def doing_text(held: HeldCpu, called: str) -> str:
    """Return what a CPU does: ``pid 98 kworker is in f with interrupts off``.

    :param called: The functions that it waits for other CPUs to run.
    """
    task = "it"
    if held.pid == 0:
        task = "its idle task"
    elif held.pid is not None:
        task = f"pid {held.pid} {held.comm}"
        task += f" ({held.policy})" if held.policy else ""
    function = function_text(held.function, held.module)
    where = f" in {function}" if function else ""
    words = {
        "spins-for-lock": f"spins for {_lock(held)}{where}",
        "waits-for-call": f"waits for {cpus_text(held.calls_cpus) or 'other CPUs'} to "
        f"run {called}{where}",
        "stopped": "has stopped for stop_machine",
        "interrupt": f"was interrupted, and the interrupt is{where or ' not over'}",
        "softirq": f"is in a softirq{where}",
        "system-call": f"is in the system call {held.call}{where}",
        "kernel-thread": f"is{where}" if where else "runs",
        "user-mode": "runs in user mode",
        "host": f"was{where or ' there'} with interrupts on, so the hypervisor has not "
        "run this CPU",
        "panic": "reports the crash",
        None: f"runs{where}",
    }[held.why]
    state = _state(held)
    return f"{task} {words}" + (f" with {state}" if state else "")


def _state(held: HeldCpu) -> str:
    """Return what is disabled: interrupts, else softirqs, else preemption."""
    if held.why in ("host", "interrupt"):
        return ""
    if held.interrupts == "off":
        return "interrupts off"
    if held.why == "softirq" or held.mode == "user":
        return ""
    if held.softirq_count:
        return "softirqs off"
    # Preemption is always off in the idle task.
    if held.preempt_count and held.pid:
        return "preemption off"
    return ""


def _lock(held: HeldCpu) -> str:
    wanted = held.wanted
    if wanted is None:
        return "a spinlock that is not known"
    return f"spinlock {wanted.name or hex(wanted.address)}"


def waiting_text(number: int) -> str:
    if not number:
        return ""
    return "; 1 task waits" if number == 1 else f"; {number:,} tasks wait"


def waiting_tasks_text(tasks: Sequence[RunnableTask]) -> str:
    named = ", ".join(f"{task.pid} {task.comm}" for task in tasks[:_NAMED])
    return f"pid {named}" + (", …" if len(tasks) > _NAMED else "")


def tasks_text(tasks: Sequence[GracePeriodTask]) -> str:
    named = ", ".join(f"pid {task.pid} {task.comm}" for task in tasks[:_NAMED])
    more = len(tasks) - _NAMED
    return named + (f" and {more:,} more" if more > 0 else "")


def readers_text(tasks: Sequence[GracePeriodTask]) -> str:
    return "a reader" if len(tasks) == 1 else "readers"


def policy_text(task: RunnableTask) -> str:
    if task.rt_priority is None:
        return task.policy
    return f"{task.policy} {task.rt_priority}"


def cpus_text(cpus: Sequence[int]) -> str:
    return f"cpu{ranges(sorted(cpus))}" if cpus else ""


# --- Chains of causes, from a CPU without progress to what holds it up.


_WEIGHT: Mapping[Confidence, int] = {"exact": 0, "likely": 1, "evidence": 2}


class StallCause(Struct, frozen=True):
    """The end of a chain of waits, and its steps."""

    steps: tuple[str, ...]
    """The steps to the cause, one line each; each line begins with the CPU's number."""

    first: str
    """The first step without its CPU."""

    confidence: Confidence
    """That of the weakest step."""

    cpu: int | None
    """The CPU at the end; ``None`` if the cause is not known."""

    pid: int | None


class RunningTask(Struct, frozen=True):
    """The task that a CPU runs."""

    cpu: int
    pid: int
    comm: str


class WaitChains:
    """Follows what CPUs wait for, to the CPU or task at the end."""

    def __init__(self, evidence: StallEvidence) -> None:
        self._evidence = evidence
        self.cpus = evidence.cpus
        """CPUs that were examined, by number."""

        self.queues = {queue.cpu: queue for queue in evidence.queues}
        """Run queues by CPU."""

        self._causes: dict[int, StallCause] = {}

    def lasted(self, span_ns: int | None) -> int:
        """Return a span less the time since a crash stopped the CPUs; 0 if ``None``."""
        return max((span_ns or 0) - (self._evidence.halted_ns or 0), 0)

    def late(self, cpu: int) -> int:
        """Return the delay of a CPU's timer interrupt in ns; 0 if unknown."""
        held = self.cpus.get(cpu)
        return 0 if held is None else self.lasted(held.tick_late_ns)

    def waiting(self, queue: RunQueue) -> list[RunnableTask]:
        """Return the tasks that have waited for a CPU for ``STALL_NS`` or longer."""
        return [
            task
            for task in queue.waiting
            if not task.throttled and self.lasted(task.wait_ns) >= STALL_NS
        ]

    def is_idle(self, cpu: int) -> bool:
        """Return whether a CPU is idle, and takes its timer interrupts."""
        queue = self.queues.get(cpu)
        if self.late(cpu) >= STALL_NS:
            return False
        current = queue.current if queue else None
        return current is not None and current.sched_class == "idle"

    def runs_instead(self, task: GracePeriodTask) -> RunningTask | None:
        """Return the task that runs on the CPU for which *task* waits; ``None`` if it
        waits for none, or the CPU is idle."""
        for cpu, queue in self.queues.items():
            if any(each.pid == task.pid for each in queue.waiting):
                current = queue.current
                if current is None or current.sched_class == "idle":
                    return None
                return RunningTask(cpu, current.pid, current.comm)
        return None

    def depends(self, cpu: int) -> str:
        """Return ``; cpu2-3 wait for it``: the CPUs whose chains end at *cpu*; else
        empty."""
        others = [
            other
            for other, held in self.cpus.items()
            if other != cpu and _is_open(held) and self.cause(other).cpu == cpu
        ]
        if not others:
            return ""
        return f"; {cpus_text(others)} {'waits' if len(others) == 1 else 'wait'} for it"

    def cause(self, cpu: int) -> StallCause:
        """Return the end of the chain of waits that begins at a CPU."""
        if cpu not in self._causes:
            self._causes[cpu] = self._follow(cpu)
        return self._causes[cpu]

    def _follow(self, cpu: int) -> StallCause:
        """Follow the chain of waits that begins at a CPU, a step at a time."""
        steps: list[str] = []
        first = ""
        confidence: Confidence = "exact"
        seen: list[int] = []
        at: int | None = cpu
        while at is not None:
            held = self.cpus.get(at)
            if held is None:
                first = first or "what it does is not known"
                steps.append(f"cpu{at}: what it does is not known")
                return StallCause(tuple(steps), first, confidence, None, None)
            if at in seen:
                around = " and ".join(f"cpu{each}" for each in seen[seen.index(at) :])
                steps.append(f"{around} wait for each other")
                return StallCause(tuple(steps), first, confidence, at, held.pid)
            seen.append(at)
            step, following, how = self._step(held)
            first = first or step
            steps.append(f"cpu{at}: {step}")
            confidence = max(confidence, how, key=lambda each: _WEIGHT[each])
            if following is None:
                # On a running kernel the registers of a CPU are not known.
                is_known = held.mode is not None and not _is_open(held)
                return StallCause(
                    tuple(steps),
                    first,
                    confidence,
                    at if is_known else None,
                    held.pid if is_known else None,
                )
            at = following
        raise AssertionError("a chain ends at a CPU")

    def _step(self, held: HeldCpu) -> tuple[str, int | None, Confidence]:
        """Return a step of a chain, the CPU that this one waits for, if any, and the
        confidence."""
        starved = starved_text(held)
        wanted = held.wanted
        text = doing_text(held, self._called(held.cpu))
        if wanted is not None and len(wanted.owners) == 1:
            (owner,) = wanted.owners
            if owner.cpu is not None and owner.cpu != held.cpu:
                other = self.cpus.get(owner.cpu)
                off = (
                    " with interrupts off"
                    if other is not None and other.interrupts == "off"
                    else ""
                )
                has = f"which cpu{owner.cpu}'s pid {owner.pid} {owner.comm} has{off}"
                return f"{text}, {has}{starved}", owner.cpu, owner.confidence
        if held.why == "waits-for-call":
            late = [cpu for cpu in held.calls_cpus if self.late(cpu) >= STALL_NS]
            if late:
                return text, late[0], "exact"
        stop = self._evidence.stop_machine
        if held.why == "stopped" and stop is not None and stop.missing:
            missing = stop.missing[0]
            if missing != held.cpu and missing in self.cpus:
                return text, missing, "exact"
        # A stack shows one moment: a CPU that takes ticks may soon do something else.
        is_moment = held.why == "interrupt" and self.late(held.cpu) < STALL_NS
        return text + starved, None, "evidence" if is_moment else "exact"

    def _called(self, cpu: int) -> str:
        """Return the functions that a CPU waits for other CPUs to run."""
        calls = [call for call in self._evidence.calls if call.caller == cpu]
        return functions_text(calls)


def _is_open(held: HeldCpu) -> bool:
    """Return whether a CPU waits for something whose owner is not known."""
    return held.why in ("spins-for-lock", "waits-for-call", "stopped")
