# SPDX-License-Identifier: LGPL-2.1-or-later

"""Words that several verdicts share. Pure."""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from msatools.locks.report import Root, Wait
from msatools.report.causes import Cause
from msatools.report.model import CrashDetails, NestedFault, VerdictConfidence
from msatools.reports.units import duration
from msatools.tasks.functions import VFORK

if TYPE_CHECKING:
    from msatools.report.parts import ReportParts

CAUSES: dict[Cause, str] = {
    "null-dereference": "NULL dereference",
    "page-fault": "page fault at a bad address",
    "protection-fault": "general protection fault",
    "stack-overflow": "kernel stack overflow",
    "stack-corruption": "kernel stack corruption",
    "bug": "BUG",
    "divide-error": "divide error",
    "invalid-opcode": "invalid opcode",
    "oops": "oops",
    "memory-error": "memory error",
    "warning": "warning (panic_on_warn)",
    "soft-lockup": "soft lockup",
    "hard-lockup": "hard lockup",
    "rcu-stall": "RCU stall",
    "hung-task": "hung task",
    "workqueue-stall": "workqueue stall",
    "out-of-memory": "out of memory",
    "init-killed": "init ended",
    "no-root": "no root file system",
    "sysrq": "crash requested by sysrq",
    "nmi": "NMI",
    "machine-check": "machine check",
    "panic": "panic",
}
JUMPS: dict[Cause, str] = {
    "null-dereference": "jump to NULL",
    "page-fault": "jump to a bad address",
}

DOUBTS: dict[VerdictConfidence, str] = {
    "exact": "",
    "likely": "likely",
    "evidence": "circumstantial",
}
"""How sure a verdict is, in a word; empty if the kernel records what it says."""


def cause_text(cause: Cause) -> str:
    """Return a cause in words."""
    return CAUSES[cause]


def fault_text(crash: CrashDetails) -> str:
    """Return what kind of fault it was, and where."""
    cause = cause_text(crash.cause)
    if not crash.function:
        return cause
    if crash.is_jump and crash.cause in JUMPS:
        return f"{JUMPS[crash.cause]} by {function_text(crash)}"
    return f"{cause} in {function_text(crash)}"


def unloaded_text(crash: CrashDetails) -> str:
    """Return what is known of a bad address where a module was; empty if nothing."""
    if crash.unloaded is None:
        return ""
    what = "code" if crash.is_jump else "data"
    where, last = crash.unloaded.address, crash.unloaded.last
    return (
        f"no module is at {where} now: it may be {what} of one that was unloaded "
        f"(the last: {last}), or that a loaded one had while it was initialized"
    )


def count_text(count: int, one: str, ending: str = "s") -> str:
    """Return a count and a noun."""
    return f"{count:,} {one if count == 1 else one + ending}"


def waited_text(count: int, age_ns: int) -> str:
    """Return how many tasks have waited for something, and for how long."""
    if count == 1:
        return f"1 task has waited for it for {duration(age_ns)}"
    return f"{count:,} tasks have waited for it, the longest {duration(age_ns)}"


def waits_for_text(count: int, what: str) -> str:
    """Return how many tasks wait for something; it alone if none does."""
    if not count:
        return what
    return f"{count_text(count, 'task')} {'waits' if count == 1 else 'wait'} for {what}"


def pid_text(pid: int | None, comm: str | None) -> str:
    """Return a task's ID and name, so that the ID does not read as a count."""
    return f"pid {pid} {comm}" if comm else f"pid {pid}"


def tasks_text(tasks: Iterable[tuple[int | None, str | None]], most: int) -> str:
    """Return the IDs and names of the first tasks: ``pid 1 init, 7 sh, …``."""
    first, left = [*islice(tasks := iter(tasks), most)], any(True for _ in tasks)
    named = ", ".join(pid_text(*task).removeprefix("pid ") for task in first)
    return f"pid {named}{', …' if left else ''}"


def nested_text(fault: NestedFault) -> str:
    """Return a fault in panic() in a few words."""
    place = f" in {function_text(fault)}" if fault.function else ""
    return f"then, in panic(): {cause_text(fault.cause)}{place}: {fault.message}"


def function_text(crash: CrashDetails | NestedFault) -> str:
    """Return the faulting function, with its module."""
    name = crash.function or "-"
    return f"{name} [{crash.module}]" if crash.module else name


def who_text(crash: CrashDetails) -> str:
    """Return the CPU and the task at fault."""
    words = [] if crash.cpu is None else [f"CPU {crash.cpu}"]
    if crash.pid is not None:
        words.append(pid_text(crash.pid, crash.comm))
    return ", ".join(words) or "by an unknown task"


def ago(parts: "ReportParts", time_ns: int) -> str:
    """Return how long ago a time of the log was."""
    if parts.taken_at_ns is None:
        return f"at {time_ns / 1e9:.1f} s"
    return f"{duration(max(parts.taken_at_ns - time_ns, 0))} ago"


def root_text(root: Root) -> str:
    """Return what a root of waits is."""
    if root.pid is not None and root.kind == "task":
        guess = "perhaps " if root.confidence == "evidence" else ""
        return f"{guess}{pid_text(root.pid, root.comm)}: {root.reason}"
    if root.kind == "cycle":
        return f"{tasks_text(((pid, None) for pid in root.waiters), 4)}: {root.reason}"
    return root.reason


def is_vfork(wait: Wait) -> bool:
    """Return whether a task waits for its child of vfork() to call exec or to exit."""
    return wait.task_class == "WAI" and wait.caller in VFORK


def waits_text(parts: "ReportParts", pid: int) -> str:
    """Return what the threads of a process wait for."""
    if parts.locks is None:
        return "-"
    for wait in parts.locks.waits:
        if wait.tgid == pid:
            on = (
                f"child pid {wait.owners[0]}"
                if is_vfork(wait) and wait.owners
                else wait.lock
            )
            what = " for ".join(each for each in (wait.caller, on) if each)
            age = duration(wait.age_ns)
            return f"thread {wait.pid} {wait.state} {age} in {what or wait.task_class}"
    return "it is runnable"
