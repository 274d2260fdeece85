# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who holds up a grace period of RCU. Pure."""

from collections.abc import Sequence

from msatools.cpus.stalls.chains import StallCause, WaitChains
from msatools.cpus.stalls.evidence import LATE_NS
from msatools.cpus.stalls.model import CrossCall, GracePeriod, GracePeriodTask
from msatools.cpus.stalls.words import cpus_text, readers_text, tasks_text
from msatools.reports.units import duration

_QUIET_NS = 2_000_000_000
"""RCU's thread wakes up several times a second while a grace period lasts."""

_NAMED = 4
"""Maximum number of readers that are followed."""


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
        unknown = StallCause((), "", "exact", None, None)
        if awake:
            text = f"{cpus_text(awake)} held up RCU for {for_age}, why is not known"
            return text, unknown, ()
        text = f"RCU has not ended a grace period for {for_age}, why is not known"
        return text, unknown, ()

    def _reader(self, task: GracePeriodTask) -> str:
        """Return what a reader that has left its CPU does."""
        blocker = self._chains.runs_instead(task)
        if blocker is not None:
            return (
                f"pid {task.pid} {task.comm} was preempted, and waits for "
                f"cpu{blocker.cpu}, which runs pid {blocker.pid} {blocker.comm}"
            )
        state = f" in state {task.state}" if task.state else ""
        since = "" if task.wait_ns is None else f" for {duration(task.wait_ns)}"
        return f"pid {task.pid} {task.comm} has slept{state}{since}"

    def _reader_culprit(self, task: GracePeriodTask) -> StallCause:
        blocker = self._chains.runs_instead(task)
        if blocker is None:
            return StallCause((), "", "exact", None, task.pid)
        return StallCause((), "", "exact", blocker.cpu, blocker.pid)

    def _keeps_from_running(
        self, thread: GracePeriodTask | None
    ) -> tuple[StallCause, str] | None:
        """Return what keeps RCU's thread from running, if something does."""
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
        # Its timer is with a CPU that takes no interrupts.
        if thread.cpu is not None and self._chains.late(thread.cpu) >= LATE_NS:
            cause = self._chains.cause(thread.cpu)
            return cause, cause.steps[0]
        return None

    def _wakes(self, pid: int) -> CrossCall | None:
        """Return the wake-up of a task that a CPU does not do, as it is late."""
        return next(
            (
                call
                for call in self._calls
                if call.pid == pid and self._chains.late(call.cpu) >= LATE_NS
            ),
            None,
        )
