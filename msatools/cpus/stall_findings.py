# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find stalls of CPUs, RCU's grace periods and timers in the evidence. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from msatools.cpus.model import (
    CrossCall,
    GracePeriod,
    GracePeriodTask,
    Stall,
    StallCode,
    StallKind,
)
from msatools.cpus.stall_chains import (
    STALL_NS,
    RunningTask,
    StallCause,
    StallEvidence,
    WaitChains,
    cpus_text,
    functions_text,
    policy_text,
    readers_text,
    tasks_text,
    waiting_tasks_text,
    waiting_text,
)
from msatools.reports.units import duration

# --- The CPUs and readers that hold up a grace period of RCU. Pure.


_QUIET_NS = 2_000_000_000
"""Minimum time without activity of RCU's thread that means that it cannot run:
it wakes up several times a second while a grace period lasts."""

_NAMED = 4
"""Maximum number of readers for which there is a step."""


class GracePeriodHolders:
    """Finds the CPUs and readers that hold up a grace period."""

    def __init__(self, chains: WaitChains, calls: Sequence[CrossCall]) -> None:
        self._chains = chains
        self._calls = calls

    def find(
        self,
        rcu: GracePeriod,
        cpus: Sequence[int],
        tasks: Sequence[GracePeriodTask],
        age: int,
    ) -> tuple[str, StallCause, tuple[str, ...]]:
        """Return the text, the cause and the steps of a grace period's stall.

        :param cpus: CPUs that have not passed a quiescent state.
        :param tasks: Readers that have left their CPUs.
        :param age: Age of the grace period, in ns.
        """
        thread = rcu.thread
        starved = self._keeps_from_running(thread)
        for_age = duration(age)
        # CPUs that are idle pass a quiescent state as soon as RCU's thread looks.
        awake = [cpu for cpu in cpus if not self._chains.is_idle(cpu)]
        held = [cpu for cpu in awake if cpu in self._chains.cpus]
        if starved is not None and thread is not None:
            cause, why = starved
            text = (
                f"RCU makes no progress for {for_age}: its thread {thread.pid} "
                f"{thread.comm} has not run, as {why}"
            )
            return text, cause, cause.steps
        causes = [(cpu, self._chains.cause(cpu)) for cpu in held]
        if causes:
            roots = [cause.cpu for _, cause in causes]
            # The CPU at which most chains end; of these chains, the longest.
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
        unknown = StallCause((), "", "exact", None, None)
        if awake:
            text = f"{cpus_text(awake)} held up RCU for {for_age}, why is not known"
            return text, unknown, ()
        text = f"RCU has not ended a grace period for {for_age}, why is not known"
        return text, unknown, ()

    def _reader(self, task: GracePeriodTask) -> str:
        """Return what a reader that was preempted, or sleeps, does now."""
        blocker = self._in_the_way(task)
        if blocker is not None:
            return (
                f"pid {task.pid} {task.comm} was preempted, and waits for "
                f"cpu{blocker.cpu}, which runs pid {blocker.pid} {blocker.comm}"
            )
        since = "" if task.wait_ns is None else f" for {duration(task.wait_ns)}"
        if task.cpu is not None:
            # RCU records the reader until it has ended, also when it runs again.
            queue = self._chains.queues.get(task.cpu)
            current = None if queue is None else queue.current
            does = f"has had no turn on cpu{task.cpu}{since}"
            if current is not None and current.pid == task.pid:
                does = f"runs on cpu{task.cpu}"
            elif (task.wait_ns or 0) < STALL_NS:
                does = f"gets turns on cpu{task.cpu}"
            return f"pid {task.pid} {task.comm} is still one, and {does}"
        state = f" in state {task.state}" if task.state else ""
        return f"pid {task.pid} {task.comm} has slept{state}{since}"

    def _reader_culprit(self, task: GracePeriodTask) -> StallCause:
        blocker = self._in_the_way(task)
        if blocker is None:
            return StallCause((), "", "exact", task.cpu, task.pid)
        return StallCause((), "", "exact", blocker.cpu, blocker.pid)

    def _in_the_way(self, task: GracePeriodTask) -> RunningTask | None:
        """Return the task that runs instead of a reader that has waited for long."""
        if task.wait_ns is not None and task.wait_ns < STALL_NS:
            return None
        return self._chains.runs_instead(task)

    def _keeps_from_running(
        self, thread: GracePeriodTask | None
    ) -> tuple[StallCause, str] | None:
        """Return what keeps RCU's thread from running, and a text, if anything does."""
        if thread is None or (thread.wait_ns or 0) < _QUIET_NS:
            return None
        blocker = self._chains.runs_instead(thread)
        if blocker is not None:
            held = self._chains.cpus.get(blocker.cpu)
            cause = self._chains.cause(blocker.cpu) if held else None
            of = f" ({held.policy})" if held and held.policy else ""
            why = f"cpu{blocker.cpu} runs pid {blocker.pid} {blocker.comm}{of}"
            steps = cause.steps if cause else ()
            confidence = cause.confidence if cause else "exact"
            return StallCause(steps, why, confidence, blocker.cpu, blocker.pid), why
        call = self._wakes(thread.pid)
        if call is not None:
            cause = self._chains.cause(call.cpu)
            return cause, f"cpu{call.cpu} is to wake it: {cause.first}"
        # The timer that is to wake the thread is on a CPU that takes no interrupts.
        if thread.cpu is not None and self._chains.late(thread.cpu) >= STALL_NS:
            cause = self._chains.cause(thread.cpu)
            return cause, cause.steps[0]
        return None

    def _wakes(self, pid: int) -> CrossCall | None:
        """Return the queued wake-up of a task on a CPU that takes no interrupts."""
        return next(
            (
                call
                for call in self._calls
                if call.pid == pid and self._chains.late(call.cpu) >= STALL_NS
            ),
            None,
        )


# --- The stalls of each kind. Pure.


_FIRST = ("deadline", "realtime")
"""Classes whose tasks may run for any time while others wait."""

_KINDS: Sequence[StallKind] = (
    *("no-tick", "no-switch", "stop-machine", "starved", "grace-period"),
    *("cross-call", "timers"),
)


def find_stalls(evidence: StallEvidence) -> tuple[Stall, ...]:
    """Return all stalls, the worst first; those below their limit last."""
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
    """Return the kinds of stall that the message of a crash names as its reason."""
    kinds: Mapping[str, StallKind] = {
        "softlockup": "no-switch",
        "Hard LOCKUP": "no-tick",
        "RCU Stall": "grace-period",
    }
    return frozenset(kind for word, kind in kinds.items() if word in (message or ""))


class _StallFinder:
    """Finds the stalls of each kind; a CPU that itself stalls is reported once."""

    def __init__(self, evidence: StallEvidence) -> None:
        self._evidence = evidence
        self._limits = evidence.limits
        self._chains = WaitChains(evidence)
        self._done: set[int] = set()
        stop = evidence.stop_machine
        # CPUs in stop_machine() wait for the missing ones: no stalls of their own.
        self._stopped = {*stop.stopped} if stop and stop.missing else set()

    # --- CPUs

    def without_ticks(self) -> Iterator[Stall]:
        for cpu, held in self._chains.cpus.items():
            late = self._chains.late(cpu)
            if late < STALL_NS or cpu in self._stopped or held.why == "panic":
                continue
            self._done.add(cpu)
            cause = self._chains.cause(cpu)
            waits = waiting_text(held.waiting) + self._chains.depends(cpu)
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
        for cpu, held in self._chains.cpus.items():
            queue = self._chains.queues.get(cpu)
            if cpu in self._done or cpu in self._stopped or queue is None:
                continue
            current, ran = queue.current, self._chains.lasted(queue.switched_ns)
            if current is None or current.sched_class in ("idle", *_FIRST):
                continue
            late = self._chains.waiting(queue)
            if ran < STALL_NS or not late or held.why == "panic":
                continue
            self._done.add(cpu)
            cause = self._chains.cause(cpu)
            yield self._stall(
                "cpu-stalled",
                "no-switch",
                f"cpu{cpu} has not switched for {duration(ran)}: "
                f"{cause.first}{waiting_text(len(late))}{self._chains.depends(cpu)}",
                cause,
                ran,
                self._limits.no_switch_ns,
                cpus=(cpu,),
                waiting=len(late),
            )

    def starved(self) -> Iterator[Stall]:
        for cpu, queue in self._chains.queues.items():
            current = queue.current
            if cpu in self._done or current is None:
                continue
            if current.sched_class not in _FIRST:
                continue
            late = self._chains.waiting(queue)
            if not late:
                continue
            late.sort(key=lambda task: -(task.wait_ns or 0))
            longest = self._chains.lasted(late[0].wait_ns)
            bound = "at most " if late[0].wait_bound == "upper" else ""
            names = waiting_tasks_text(late)
            tasks = "1 task has" if len(late) == 1 else f"{len(late):,} tasks have"
            yield self._stall(
                "cpu-starved",
                "starved",
                f"cpu{cpu} runs pid {current.pid} {current.comm} "
                f"({policy_text(current)}), and {tasks} not run for {bound}"
                f"{duration(longest)}: {names}",
                StallCause((), "", "exact", cpu, current.pid),
                longest,
                self._limits.no_switch_ns,
                cpus=(cpu,),
                waiting=len(late),
            )

    # --- several CPUs

    def stop_machine(self) -> Iterator[Stall]:
        stop = self._evidence.stop_machine
        if stop is None or not stop.missing or not stop.stopped:
            return
        since = self._chains.lasted(stop.since_ns)
        if since < STALL_NS:
            return
        what = f" to run {stop.function}" if stop.function else ""
        cause = self._chains.cause(stop.missing[0])
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
            late = self._chains.late(cpu)
            if late < STALL_NS:
                continue
            callers = sorted({call.caller for call in calls if call.caller is not None})
            waits = min(late, self._called_for(callers, late))
            who = f"{cpus_text(callers)} {'waits' if len(callers) == 1 else 'wait'}"
            if not callers:
                who = "a task that does not run waits"
            cause = self._chains.cause(cpu)
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
        """Return the longest time that CPUs can have waited for a call, in ns.

        With preemption off it is at most the time that they have run the same task.
        Newer kernels wait for some calls with preemption on: then it is *late*.

        :param late: Delay of the timer interrupt of the CPU that was called.
        """
        ran = [late]
        for caller in callers:
            held, queue = self._chains.cpus.get(caller), self._chains.queues.get(caller)
            if held is None or queue is None or not held.preempt_count:
                return late
            ran.append(self._chains.lasted(queue.switched_ns))
        return max(ran[1:], default=late)

    def timers(self) -> Iterator[Stall]:
        """Yield CPUs that tick and switch tasks, but do not run their timers."""
        for timer in self._evidence.timers:
            if timer.cpu in self._done or timer.cpu in self._stopped:
                continue
            late = self._chains.lasted(timer.late_ns)
            if timer.kind != "timer" or late < STALL_NS:
                continue
            what = f" (the first is {timer.function})" if timer.function else ""
            cause = self._chains.cause(timer.cpu)
            self._done.add(timer.cpu)
            held = self._chains.cpus.get(timer.cpu)
            # A realtime task keeps ksoftirqd, which runs timers, off the CPU.
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
        others = [task for task in rcu.waiters or () if task.expedited]
        waiters = [task for task in rcu.waiters or () if not task.expedited]
        if age is None and (rcu.expedited_cpus or rcu.expedited_tasks):
            # The kernel stores no start of an expedited grace period: its age is the
            # longest wait for it.
            waiters, others = others, []
            age = max((task.wait_ns or 0 for task in waiters), default=None)
            cpus, tasks = rcu.expedited_cpus, rcu.expedited_tasks
        age = self._chains.lasted(age)
        if age < STALL_NS:
            return
        holders = GracePeriodHolders(self._chains, self._evidence.calls)
        text, cause, steps = holders.find(rcu, cpus, tasks, age)
        number = len(waiters)
        if number:
            verb = "task waits" if number == 1 else "tasks wait"
            text += f"; {number:,} {verb} for the grace period"
        if others:
            verb = "waits" if len(others) == 1 else "wait"
            text += f"; {len(others):,} {verb} for an expedited one"
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

    def _is_found(
        self, kind: StallKind, for_ns: int, limit_ns: int, cpus: Sequence[int]
    ) -> bool:
        """Return whether the kernel's own detectors take this for a stall.

        They take samples, and may report a stall after as little as three fifths of the
        limit, as they count from the sample before it began.
        """
        if 5 * for_ns < 3 * limit_ns:
            return False
        if kind in self._evidence.found:
            return True
        held = self._chains.cpus.get(cpus[0]) if cpus else None
        age = held.watchdog_ns if held and kind == "no-switch" else None
        return self._chains.lasted(age) >= limit_ns

    def _stall(
        self,
        code: StallCode,
        kind: StallKind,
        text: str,
        cause: StallCause,
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
