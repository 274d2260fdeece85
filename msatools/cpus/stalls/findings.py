# SPDX-License-Identifier: LGPL-2.1-or-later

"""What follows from the evidence of stalls: culprits and chains. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from msatools.cpus.model import RunnableTask, RunQueue
from msatools.cpus.stalls.model import (
    Confidence,
    CrossCall,
    GracePeriod,
    GracePeriodTask,
    HeldCpu,
    OverdueTimer,
    Stall,
    StallCode,
    StallKind,
    StallLimits,
    StopMachine,
)
from msatools.cpus.stalls.words import (
    cpus_text,
    doing_text,
    functions_text,
    names_text,
    policy_text,
    readers_text,
    starved_text,
    tasks_text,
    waiting_text,
)
from msatools.records import dataclass
from msatools.reports.units import duration

LATE_NS = 1_000_000_000
"""What stands still for less is not looked at: a turn of other tasks, a busy host."""

_QUIET_NS = 2_000_000_000
"""RCU's thread wakes up several times a second while a grace period lasts."""

_FIRST = ("deadline", "realtime")
_KINDS: Sequence[StallKind] = (
    *("no-tick", "no-switch", "stop-machine", "starved", "grace-period"),
    *("cross-call", "timers"),
)
_WEIGHT: Mapping[Confidence, int] = {"exact": 0, "likely": 1, "evidence": 2}
_NAMED = 4
"""Maximum number of readers that are followed."""


@dataclass(frozen=True, kw_only=True)
class StallEvidence:
    """Everything that was read."""

    limits: StallLimits
    cpus: Mapping[int, HeldCpu]
    queues: Sequence[RunQueue]
    rcu: GracePeriod | None
    calls: Sequence[CrossCall]
    stop_machine: StopMachine | None
    timers: Sequence[OverdueTimer]
    halted_ns: int | None = None
    """Time since a crashing kernel stopped its other CPUs: no stall grows by it."""

    found: frozenset[StallKind] = frozenset()
    """What the kernel crashed because of."""


@dataclass(frozen=True)
class _Cause:
    """Where a chain of waits ends, and its steps."""

    steps: tuple[str, ...]
    """Each begins with its CPU."""

    first: str
    """The first step without its CPU."""

    confidence: Confidence
    cpu: int | None
    pid: int | None


def find_stalls(evidence: StallEvidence) -> tuple[Stall, ...]:
    """Return all that stands still, the worst first; below its limit last."""
    finder = _StallFinder(evidence)
    found = [
        *finder.without_ticks(),
        *finder.without_switches(),
        *finder.stop_machine(),
        *finder.starved(),
        *finder.grace_period(),
        *finder.cross_calls(),
        *finder.timers(),
    ]
    return tuple(
        sorted(
            found,
            key=lambda stall: (
                not stall.over_limit,
                _KINDS.index(stall.kind),
                -(stall.for_ns or 0),
            ),
        )
    )


def found_by_kernel(message: str | None) -> frozenset[StallKind]:
    """Return what a kernel says that it crashed because of."""
    kinds: Mapping[str, StallKind] = {
        "softlockup": "no-switch",
        "Hard LOCKUP": "no-tick",
        "RCU Stall": "grace-period",
    }
    return frozenset(kind for word, kind in kinds.items() if word in (message or ""))


class _StallFinder:
    """Finds the stalls of each kind; each CPU is reported once, if it stalls itself."""

    def __init__(self, evidence: StallEvidence) -> None:
        self._evidence = evidence
        self._limits = evidence.limits
        self._cpus = evidence.cpus
        self._queues = {queue.cpu: queue for queue in evidence.queues}
        self._done: set[int] = set()
        self._causes: dict[int, _Cause] = {}
        stop = evidence.stop_machine
        # These wait for others, and have no other way.
        self._stopped = {*stop.stopped} if stop and stop.missing else set()

    def _lasted(self, span_ns: int | None) -> int:
        """Return how long something had lasted when the kernel crashed, if it did."""
        return max((span_ns or 0) - (self._evidence.halted_ns or 0), 0)

    def _late(self, cpu: int) -> int:
        """Return the delay of a CPU's timer interrupt; 0 if unknown."""
        held = self._cpus.get(cpu)
        return 0 if held is None else self._lasted(held.tick_late_ns)

    def _waiting(self, queue: RunQueue) -> list[RunnableTask]:
        """Return the tasks that have waited for a CPU for long."""
        tasks = _runnable(queue)
        return [task for task in tasks if self._lasted(task.wait_ns) >= LATE_NS]

    # --- CPUs

    def without_ticks(self) -> Iterator[Stall]:
        for cpu, held in self._cpus.items():
            late = self._late(cpu)
            if late < LATE_NS or cpu in self._stopped or held.why == "panic":
                continue
            self._done.add(cpu)
            cause = self._cause(cpu)
            waits = waiting_text(held.waiting) + self._depends(cpu)
            yield self._stall(
                "cpu-stalled",
                "no-tick",
                f"cpu{cpu} has had no tick for {duration(late)}: {cause.first}{waits}",
                cause,
                late,
                self._limits.no_tick_ns,
                cpus=(cpu,),
                waiting=held.waiting,
            )

    def without_switches(self) -> Iterator[Stall]:
        for cpu, held in self._cpus.items():
            queue = self._queues.get(cpu)
            if cpu in self._done or cpu in self._stopped or queue is None:
                continue
            current, ran = queue.current, self._lasted(queue.switched_ns)
            if current is None or current.sched_class in ("idle", *_FIRST):
                continue
            late = self._waiting(queue)
            if ran < LATE_NS or not late or held.why == "panic":
                continue
            self._done.add(cpu)
            cause = self._cause(cpu)
            yield self._stall(
                "cpu-stalled",
                "no-switch",
                f"cpu{cpu} has not switched for {duration(ran)}: "
                f"{cause.first}{waiting_text(len(late))}{self._depends(cpu)}",
                cause,
                ran,
                self._limits.no_switch_ns,
                cpus=(cpu,),
                waiting=len(late),
            )

    def starved(self) -> Iterator[Stall]:
        for cpu, queue in self._queues.items():
            current = queue.current
            if cpu in self._done or current is None:
                continue
            if current.sched_class not in _FIRST:
                continue
            late = self._waiting(queue)
            if not late:
                continue
            late.sort(key=lambda task: -(task.wait_ns or 0))
            longest = self._lasted(late[0].wait_ns)
            bound = "at most " if late[0].wait_bound == "upper" else ""
            names = names_text(late)
            tasks = "1 task has" if len(late) == 1 else f"{len(late):,} tasks have"
            yield self._stall(
                "cpu-starved",
                "starved",
                f"cpu{cpu} runs pid {current.pid} {current.comm} "
                f"({policy_text(current)}), and {tasks} had no turn for {bound}"
                f"{duration(longest)}: {names}",
                _Cause((), "", "exact", cpu, current.pid),
                longest,
                self._limits.no_switch_ns,
                cpus=(cpu,),
                waiting=len(late),
            )

    # --- what CPUs do together

    def stop_machine(self) -> Iterator[Stall]:
        stop = self._evidence.stop_machine
        if stop is None or not stop.missing or not stop.stopped:
            return
        since = self._lasted(stop.since_ns)
        if since < LATE_NS:
            return
        what = f" to run {stop.function}" if stop.function else ""
        cause = self._cause(stop.missing[0])
        are = "is" if len(stop.missing) == 1 else "are"
        yield self._stall(
            "cpu-stalled",
            "stop-machine",
            f"{cpus_text(stop.stopped)} stopped{what} (stop_machine) "
            f"{duration(since)} ago, and {cpus_text(stop.missing)} {are} awaited: "
            f"{cause.steps[0]}",
            cause,
            since,
            self._limits.no_tick_ns,
            cpus=(*stop.stopped, *stop.missing),
            waiting=0,
        )

    def cross_calls(self) -> Iterator[Stall]:
        by_cpu: dict[int, list[CrossCall]] = {}
        for call in self._evidence.calls:
            if call.kind == "call":
                by_cpu.setdefault(call.cpu, []).append(call)
        for cpu, calls in by_cpu.items():
            late = self._late(cpu)
            if late < LATE_NS:
                continue
            callers = sorted({call.caller for call in calls if call.caller is not None})
            waits = min(late, self._called_for(callers, late))
            who = f"{cpus_text(callers)} {'waits' if len(callers) == 1 else 'wait'}"
            if not callers:
                who = "a task that does not run waits"
            cause = self._cause(cpu)
            yield self._stall(
                "cpu-stalled",
                "cross-call",
                f"{who} for cpu{cpu} to run "
                f"{functions_text(calls)}, for at most {duration(waits)}: "
                f"{cause.steps[0]}",
                cause,
                waits,
                self._limits.call_ns,
                cpus=(cpu, *callers),
                waiting=len(callers),
            )

    def _called_for(self, callers: Sequence[int], late: int) -> int:
        """Return the longest time that CPUs can have waited for a call.

        With preemption off it is at most the time that they have run the same task.
        Newer kernels wait for some calls with preemption on.
        """
        ran = [late]
        for caller in callers:
            held, queue = self._cpus.get(caller), self._queues.get(caller)
            if held is None or queue is None or not held.preempt_count:
                return late
            ran.append(self._lasted(queue.switched_ns))
        return max(ran[1:], default=late)

    def timers(self) -> Iterator[Stall]:
        """Find CPUs that tick and switch, but do not run their timers."""
        for timer in self._evidence.timers:
            if timer.cpu in self._done or timer.cpu in self._stopped:
                continue
            late = self._lasted(timer.late_ns)
            if timer.kind != "timer" or late < LATE_NS:
                continue
            what = f" (the first is {timer.function})" if timer.function else ""
            cause = self._cause(timer.cpu)
            self._done.add(timer.cpu)
            held = self._cpus.get(timer.cpu)
            # The thread for softirqs gets no turn there.
            is_starved = held is not None and held.policy is not None
            yield self._stall(
                "cpu-starved" if is_starved else "cpu-stalled",
                "timers",
                f"cpu{timer.cpu} has not run its timers for {duration(late)}"
                f"{what}: {cause.first}",
                cause,
                late,
                self._limits.no_tick_ns,
                cpus=(timer.cpu,),
                waiting=0,
            )

    # --- RCU

    def grace_period(self) -> Iterator[Stall]:
        rcu = self._evidence.rcu
        if rcu is None:
            return
        age, cpus, tasks = rcu.age_ns, rcu.cpus, rcu.tasks
        limit = self._limits.rcu_ns
        if age is None and (rcu.expedited_cpus or rcu.expedited_tasks):
            # It has no time of its own, but those who wait for it have.
            expedited = [task for task in rcu.waiters or () if task.expedited]
            age = max((task.wait_ns or 0 for task in expedited), default=None)
            cpus, tasks = rcu.expedited_cpus, rcu.expedited_tasks
        age = self._lasted(age)
        if age < LATE_NS:
            return
        waiters = rcu.waiters or ()
        text, cause, steps = self._who_holds_up(rcu, cpus, tasks, age)
        number = len(waiters)
        if number:
            verb = "task waits" if number == 1 else "tasks wait"
            text += f"; {number:,} {verb} for the grace period"
        yield self._stall(
            "rcu-stalled",
            "grace-period",
            text,
            replace(cause, steps=steps),
            age,
            limit,
            cpus=cpus,
            waiting=number,
        )

    def _who_holds_up(
        self,
        rcu: GracePeriod,
        cpus: Sequence[int],
        tasks: Sequence[GracePeriodTask],
        age: int,
    ) -> tuple[str, _Cause, tuple[str, ...]]:
        """Return the text, the cause and the steps of a grace period's stall."""
        thread = rcu.thread
        starved = self._keeps_from_running(thread)
        for_age = duration(age)
        # CPUs that are idle pass a quiescent state as soon as RCU's thread looks.
        awake = [cpu for cpu in cpus if not self._is_idle(cpu)]
        held = [cpu for cpu in awake if cpu in self._cpus]
        if starved is not None and thread is not None:
            cause, why = starved
            text = (
                f"RCU makes no progress for {for_age}: its thread {thread.pid} "
                f"{thread.comm} has had no turn, as {why}"
            )
            return text, cause, cause.steps
        causes = [(cpu, self._cause(cpu)) for cpu in held]
        if causes:
            roots = [cause.cpu for _, cause in causes]
            # The CPU at the end of most chains; of these, the one with most steps.
            _, cause = max(
                causes, key=lambda each: (roots.count(each[1].cpu), len(each[1].steps))
            )
            verb = "holds" if len(held) == 1 else "hold"
            why = cause.first if len(held) == 1 else cause.steps[0]
            text = f"{cpus_text(held)} {verb} up RCU for {for_age}: {why}"
            readers = tuple(self._reader(task) for task in tasks[:_NAMED])
            all_steps = [cause.steps, *(each.steps for _, each in causes), readers]
            steps = tuple(dict.fromkeys(step for each in all_steps for step in each))
            if tasks:
                verb = "does" if len(tasks) == 1 else "do"
                text += f"; so {verb} {tasks_text(tasks)} as {readers_text(tasks)}"
            return text, cause, steps
        if tasks:
            task = tasks[0]
            steps = tuple(self._reader(each) for each in tasks[:_NAMED])
            verb = "holds" if len(tasks) == 1 else "hold"
            text = (
                f"{tasks_text(tasks)} {verb} up RCU for {for_age} as "
                f"{readers_text(tasks)}: "
                f"{steps[0]}"
            )
            culprit = self._reader_culprit(task)
            return text, culprit, steps
        unknown = _Cause((), "", "exact", None, None)
        if awake:
            text = f"{cpus_text(awake)} held up RCU for {for_age}, why is not known"
            return text, unknown, ()
        text = f"RCU has not ended a grace period for {for_age}, why is not known"
        return text, unknown, ()

    def _reader(self, task: GracePeriodTask) -> str:
        """Return what a reader that has left its CPU does."""
        blocker = self._runs_instead(task)
        if blocker is not None:
            return (
                f"pid {task.pid} {task.comm} was preempted, and waits for "
                f"cpu{blocker.cpu}, which runs pid {blocker.pid} {blocker.comm}"
            )
        state = f" in state {task.state}" if task.state else ""
        since = "" if task.wait_ns is None else f" for {duration(task.wait_ns)}"
        return f"pid {task.pid} {task.comm} has slept{state}{since}"

    def _reader_culprit(self, task: GracePeriodTask) -> _Cause:
        blocker = self._runs_instead(task)
        if blocker is None:
            return _Cause((), "", "exact", None, task.pid)
        return _Cause((), "", "exact", blocker.cpu, blocker.pid)

    def _runs_instead(self, task: GracePeriodTask) -> "_Runs | None":
        """Return the task that has the CPU which another one waits for."""
        for cpu, queue in self._queues.items():
            if any(each.pid == task.pid for each in queue.waiting):
                current = queue.current
                if current is None or current.sched_class == "idle":
                    return None
                return _Runs(cpu, current.pid, current.comm)
        return None

    def _keeps_from_running(
        self, thread: GracePeriodTask | None
    ) -> tuple[_Cause, str] | None:
        """Return what keeps RCU's thread from running, if something does."""
        if thread is None or (thread.wait_ns or 0) < _QUIET_NS:
            return None
        blocker = self._runs_instead(thread)
        if blocker is not None:
            held = self._cpus.get(blocker.cpu)
            cause = self._cause(blocker.cpu) if held else None
            of = f" ({held.policy})" if held and held.policy else ""
            why = f"cpu{blocker.cpu} runs pid {blocker.pid} {blocker.comm}{of}"
            steps = cause.steps if cause else ()
            confidence = cause.confidence if cause else "exact"
            return _Cause(steps, why, confidence, blocker.cpu, blocker.pid), why
        call = self._wakes(thread.pid)
        if call is not None:
            cause = self._cause(call.cpu)
            return cause, f"cpu{call.cpu} is to wake it: {cause.first}"
        # Its timer is with a CPU that takes no interrupts.
        if thread.cpu is not None and self._late(thread.cpu) >= LATE_NS:
            cause = self._cause(thread.cpu)
            return cause, cause.steps[0]
        return None

    def _wakes(self, pid: int) -> CrossCall | None:
        """Return the wake-up of a task that a CPU does not do, as it is late."""
        return next(
            (
                call
                for call in self._evidence.calls
                if call.pid == pid and self._late(call.cpu) >= LATE_NS
            ),
            None,
        )

    def _is_idle(self, cpu: int) -> bool:
        queue = self._queues.get(cpu)
        if self._late(cpu) >= LATE_NS:
            return False
        current = queue.current if queue else None
        return current is not None and current.sched_class == "idle"

    # --- chains

    def _depends(self, cpu: int) -> str:
        """Return which CPUs wait for another one."""
        others = [
            other
            for other, held in self._cpus.items()
            if other != cpu and _is_open(held) and self._cause(other).cpu == cpu
        ]
        if not others:
            return ""
        return f"; {cpus_text(others)} {'waits' if len(others) == 1 else 'wait'} for it"

    def _cause(self, cpu: int) -> _Cause:
        """Follow what a CPU waits for to where it ends."""
        if cpu not in self._causes:
            self._causes[cpu] = self._follow(cpu)
        return self._causes[cpu]

    def _follow(self, cpu: int) -> _Cause:
        steps: list[str] = []
        first = ""
        confidence: Confidence = "exact"
        seen: list[int] = []
        at: int | None = cpu
        while at is not None:
            held = self._cpus.get(at)
            if held is None:
                first = first or "what it does is not known"
                steps.append(f"cpu{at}: what it does is not known")
                return _Cause(tuple(steps), first, confidence, None, None)
            if at in seen:
                around = " and ".join(f"cpu{each}" for each in seen[seen.index(at) :])
                steps.append(f"{around} wait for each other")
                return _Cause(tuple(steps), first, confidence, at, held.pid)
            seen.append(at)
            step, following, how = self._step(held)
            first = first or step
            steps.append(f"cpu{at}: {step}")
            confidence = max(confidence, how, key=lambda each: _WEIGHT[each])
            if following is None:
                # On a running kernel what a CPU does is not known.
                is_known = held.mode is not None and not _is_open(held)
                return _Cause(
                    tuple(steps),
                    first,
                    confidence,
                    at if is_known else None,
                    held.pid if is_known else None,
                )
            at = following
        raise AssertionError("a chain ends at a CPU")

    def _step(self, held: HeldCpu) -> tuple[str, int | None, Confidence]:
        """Return a step of a chain, the CPU of the next one, and how it is known."""
        starved = starved_text(held)
        wanted = held.wanted
        text = doing_text(held, self._called(held.cpu))
        if wanted is not None and len(wanted.owners) == 1:
            (owner,) = wanted.owners
            if owner.cpu is not None and owner.cpu != held.cpu:
                other = self._cpus.get(owner.cpu)
                off = (
                    " with interrupts off"
                    if other is not None and other.interrupts == "off"
                    else ""
                )
                has = f"which cpu{owner.cpu}'s pid {owner.pid} {owner.comm} has{off}"
                return f"{text}, {has}{starved}", owner.cpu, owner.confidence
        if held.why == "waits-for-call":
            late = [cpu for cpu in held.calls_cpus if self._late(cpu) >= LATE_NS]
            if late:
                return text, late[0], "exact"
        stop = self._evidence.stop_machine
        if held.why == "stopped" and stop is not None and stop.missing:
            missing = stop.missing[0]
            if missing != held.cpu and missing in self._cpus:
                return text, missing, "exact"
        # A stack shows one moment only: who ticks may be elsewhere at the next.
        is_moment = held.why == "interrupt" and self._late(held.cpu) < LATE_NS
        return text + starved, None, "evidence" if is_moment else "exact"

    def _called(self, cpu: int) -> str:
        """Return the functions that a CPU waits for, which others are to run."""
        calls = [call for call in self._evidence.calls if call.caller == cpu]
        return functions_text(calls)

    def _is_found(
        self, kind: StallKind, for_ns: int, limit_ns: int, cpus: Sequence[int]
    ) -> bool:
        """Return whether the kernel itself takes it for a stall.

        Its detectors take samples, so they may find one that lasts for as little as
        three fifths of the limit: the time since the last sample counts, too.
        """
        if 5 * for_ns < 3 * limit_ns:
            return False
        if kind in self._evidence.found:
            return True
        held = self._cpus.get(cpus[0]) if cpus else None
        age = held.watchdog_ns if held and kind == "no-switch" else None
        return self._lasted(age) >= limit_ns

    def _stall(
        self,
        code: StallCode,
        kind: StallKind,
        text: str,
        cause: _Cause,
        for_ns: int,
        limit_ns: int,
        *,
        cpus: Sequence[int],
        waiting: int,
    ) -> Stall:
        return Stall(
            code=code,
            kind=kind,
            text=text,
            # A single step is in the text.
            chain=cause.steps if len(cause.steps) > 1 else (),
            confidence=cause.confidence,
            for_ns=for_ns,
            limit_ns=limit_ns,
            over_limit=for_ns >= limit_ns
            or self._is_found(kind, for_ns, limit_ns, cpus),
            cpus=tuple(cpus),
            culprit_cpu=cause.cpu,
            culprit_pid=cause.pid,
            waiting=waiting,
        )


@dataclass(frozen=True)
class _Runs:
    """The task that a CPU runs."""

    cpu: int
    pid: int
    comm: str


def _is_open(held: HeldCpu) -> bool:
    """Return whether a CPU waits for something whose owner is not known."""
    return held.why in ("spins-for-lock", "waits-for-call", "stopped")


def _runnable(queue: RunQueue) -> list[RunnableTask]:
    """Return the waiting tasks that are not throttled."""
    return [task for task in queue.waiting if not task.throttled]
