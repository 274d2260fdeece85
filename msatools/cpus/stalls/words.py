# SPDX-License-Identifier: LGPL-2.1-or-later

"""What CPUs and tasks do and wait for, in words."""

from collections.abc import Sequence

from msatools.cpus.model import RunnableTask
from msatools.cpus.stalls.model import CrossCall, GracePeriodTask, HeldCpu
from msatools.kernel.ranges import ranges
from msatools.tasks.functions import function_text

_NAMED = 4
"""Maximum number of names in one line."""


def functions_text(calls: Sequence[CrossCall]) -> str:
    found = sorted({call.function for call in calls if call.function})
    return ", ".join(found[:_NAMED]) or "a function"


def starved_text(held: HeldCpu) -> str:
    """Return which threads a task keeps from its CPU although it may be preempted."""
    if not held.starved or (held.policy is None and held.mode != "user"):
        return ""
    return f", and {', '.join(held.starved[:_NAMED])} could not run"


def doing_text(held: HeldCpu, called: str) -> str:
    """Return what a CPU does: ``pid 98 kworker is in f with interrupts off``.

    :param called: The functions that it waits for, which others are to run.
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
    """Return what is off: interrupts, else softirqs, else preemption."""
    if held.why in ("host", "interrupt"):
        return ""
    if held.interrupts == "off":
        return "interrupts off"
    if held.why == "softirq" or held.mode == "user":
        return ""
    if held.softirq_count:
        return "softirqs off"
    # It is always off in the idle task.
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


def names_text(tasks: Sequence[RunnableTask]) -> str:
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
