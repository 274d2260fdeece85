# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes what a task that others wait for is doing, in a few words."""

import signal
from collections.abc import Callable

import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.traces import stack_trace
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import WaitTarget
from msatools.locks.events.current_work import current_work
from msatools.locks.externals import External
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.functions import function_text
from msatools.tasks.identity import comm_text
from msatools.tasks.standing import MAX_RT_PRIO, policy_text
from msatools.tasks.states import TRAP_FREEZE, read_frozen
from msatools.tasks.table import PF_EXITING, TaskTable
from msatools.tasks.task_state import TaskState

_EXIT_DEAD = 0x10
"""``EXIT_DEAD`` of ``task_struct.exit_state``: the task is being reaped."""

_STOP_SIGNAL = 0xFFFF
"""``JOBCTL_STOP_SIGMASK`` of ``task_struct.jobctl``."""

_BELOW_WORK = "process_one_work"
"""The function that calls those of work items."""

_OF_DATA = frozenset({TaskClass.DSK, TaskClass.FLT, TaskClass.SWP})
"""Classes for which the owner of the data is described rather than the lock."""


def reason(
    context: LockContext,
    row: int,
    now: TaskState,
    case: BlockedTask | None,
    on: WaitTarget | None,
    what: str | None,
) -> str:
    """
    Describe what a task is doing, without its duration.

    :param case: Its stack and system call, if it sleeps.
    :param on: Its wait target, if known.
    :param what: Description of its wait for a lock without an owner.
    """
    task_class = TaskClass(int(now.classes[row]))
    if task_class is TaskClass.ZMB:
        return _dead(context, row)
    # Its class is unknown if it runs on a CPU of which a dump has no registers.
    if task_class in _AWAKE or context.tasks["on_cpu"][row]:
        text = _awake(context, row, task_class)
    else:
        text = _asleep(context, row, now, case, on, what, task_class)
    work = current_work(context, row)
    if work is not None:
        # The function of the work item may have ended with a jump.
        for function in (_BELOW_WORK, work.partition(" of ")[0]):
            before, found, module = text.rpartition(f" in {function}")
            if found and (not module or module.startswith(" [")):
                return f"{before} in work {work}"
        return f"{text}, in work {work}"
    exits = int(context.tasks["flags"][row]) & PF_EXITING
    return f"exiting, {text}" if exits else text


def wait_text(task_class: TaskClass, on: WaitTarget | None) -> str | None:
    """Describe what tasks of a class wait for; ``None`` if the class does not say."""
    describe = _BY_CLASS.get(task_class)
    return describe(on) if describe else None


def external_reason(external: External, doing: str | None) -> str:
    """
    Describe something outside of all tasks, and what its server is doing.

    :param doing: Description of what ``external.pid`` is doing.
    """
    exact = all(server.confidence == "exact" for server in external.servers)
    if external.pid is None or doing is None or exact:
        return external.text
    return f"{external.text}, {doing}"


def _dead(context: LockContext, row: int) -> str:
    reaped = int(context.tasks["exit_state"][row]) & _EXIT_DEAD
    return "dead, being reaped" if reaped else "dead, not reaped"


_AWAKE = frozenset(
    {TaskClass.CPU, TaskClass.USR, TaskClass.SYS, TaskClass.INT, TaskClass.LAT}
)


def standing(context: LockContext, row: int) -> str | None:
    """Describe how a task stands with the scheduler; ``None`` if it sleeps."""
    tasks = context.tasks
    cpu = int(tasks["cpu"][row])
    if tasks["on_cpu"][row]:
        return f"runs on CPU {cpu}"
    if tasks["state"][row] or tasks["exit_state"][row]:
        return None
    throttle = context.throttles.of(row, context.local_ns)
    if throttle is not None:
        return throttle.text
    return f"waits for CPU {cpu}{_policy(context, row)}{_urgent(context, row)}"


def _awake(context: LockContext, row: int, task_class: TaskClass) -> str:
    found = standing(context, row) if task_class is TaskClass.LAT else None
    if found is not None:
        return found
    where = {
        TaskClass.USR: " in user mode",
        TaskClass.INT: " in an interrupt",
        TaskClass.SYS: _running_in(context, row),
    }
    return f"runs on CPU {context.tasks['cpu'][row]}{where.get(task_class, '')}"


def _policy(context: LockContext, row: int) -> str:
    """Return the policy of a task that has fewer turns than others by it."""
    tasks = context.tasks
    if tasks["prio"][row] < MAX_RT_PRIO:
        return ""
    words = policy_text(
        *(int(tasks[name][row]) for name in ("policy", "rt_priority", "static_prio"))
    )
    return f" ({words})" if words else ""


def _urgent(context: LockContext, row: int) -> str:
    """Return the real-time task that keeps an ordinary one from its CPU."""
    tasks = context.tasks
    prio = tasks["prio"]
    if prio[row] < MAX_RT_PRIO:
        return ""
    runs = (tasks["on_cpu"] != 0) & (tasks["cpu"] == tasks["cpu"][row])
    for found in np.flatnonzero(runs & (prio < MAX_RT_PRIO)).tolist():
        comm = comm_text(tasks["comm"][found])
        return f", which real-time task {int(tasks['pid'][found])} {comm} has"
    return ""


def _running_in(context: LockContext, row: int) -> str:
    """Return the function that a running task is in, by the registers in a dump."""
    frames = stack_trace(context.reader.prog, int(context.tasks["address"][row])) or ()
    for frame in frames:
        name = context.function(frame) if frame.pc >= KERNEL_HALF else None
        if name:
            return f" in {function_text(name, context.text.module_name(frame.pc))}"
    return ""


def _asleep(
    context: LockContext,
    row: int,
    now: TaskState,
    case: BlockedTask | None,
    on: WaitTarget | None,
    what: str | None,
    task_class: TaskClass,
) -> str:
    if task_class is TaskClass.STP:
        return _stopped(context, row)
    if task_class is TaskClass.TRC:
        tracer = on.pid if on else None
        return "stopped by a tracer" if tracer is None else f"traced by {tracer}"
    if what is not None and task_class is TaskClass.LCK:
        return what  # the description of a futex is a whole sentence
    text = wait_text(task_class, on)
    if what is not None and (text is None or task_class not in _OF_DATA):
        return f"waits for {what}"
    if text is not None:
        return text
    function = _function(now, row, case)
    file = _file(on) if on is not None else None
    if function is None:
        return f"waits for {file}" if file else "asleep"
    return f"asleep in {function} of {file}" if file else f"asleep in {function}"


def _stopped(context: LockContext, row: int) -> str:
    tasks = TaskTable(context.tasks.records[[row]], context.tasks.columns)
    jobctl = int(tasks["jobctl"][0])
    if read_frozen(context.reader, tasks)[0]:
        # The whole machine is frozen before it sleeps; version 1 has no such bit.
        by_group = jobctl & TRAP_FREEZE or not _all_frozen(context)
        return "frozen by its control group" if by_group else "frozen"
    number = jobctl & _STOP_SIGNAL
    return f"stopped by {_signal(number)}" if number else "stopped"


def _all_frozen(context: LockContext) -> bool:
    """Return whether all processes are being frozen (kernel/power/process.c)."""
    address = context.layout.symbol("pm_freezing")
    if address is None:
        return True
    try:
        return context.reader.read(address, 1) != b"\0"
    except UNREADABLE as error:
        context.losses.lose(
            Loss.LOCK_NAMES, f"cannot determine who has frozen a task: {error}"
        )
        return True


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _function(now: TaskState, row: int, case: BlockedTask | None) -> str | None:
    """Return the system call that a task sleeps in, or else the function."""
    if case is not None and case.call is not None:
        return case.call
    wait = now.waits[int(now.stacks.index[row])]
    name = wait.caller or wait.function
    return wait.call or function_text(name, now.stacks.module(now.stacks[row], name))


def _data(on: WaitTarget | None) -> str | None:
    """Describe a wait for data: by its device, file or journal."""
    if on is None:
        return None
    if on.kind == "userfaultfd":
        return "waits for a page of a userfaultfd"
    if on.kind == "journal":
        thread = f" by {on.pid}" if on.pid else ""
        return f"waits for a commit of {on.device or 'a journal'}{thread}"
    if on.device is not None:
        return f"I/O on {on.device}"
    if on.path is not None:
        return f"I/O on {on.path}"
    return "waits for a page of memory" if on.kind == "page" else None


def _swap(on: WaitTarget | None) -> str:
    return f"swap on {on.device}" if on and on.device else "waits for swap"


def _memory(on: WaitTarget | None) -> str:
    where = f" of control group {on.path}" if on and on.path else ""
    return f"waits for memory{where}"


def _lock(on: WaitTarget | None) -> str | None:
    if on is None or on.kind != "lock":
        return None
    name = on.name or (None if on.address is None else f"{on.address:#x}")
    words = (on.type, name, on.path)
    return "waits for " + " ".join(word for word in words if word)


def _futex(on: WaitTarget | None) -> str:
    if on is not None and on.addresses:
        return f"waits for any of {len(on.addresses)} futexes"
    if on is None or on.address is None:
        return "waits for a futex"
    return f"waits for futex {on.address:#x}"


def _file_lock(on: WaitTarget | None) -> str:
    if on is None:
        return "waits for a lock of a file"
    return f"waits for {on.kind} {on.path or ''}".rstrip()


def _child(on: WaitTarget | None) -> str | None:
    if on is None or on.kind != "child":
        return None
    if on.pid is not None:
        return f"waits for child {on.pid}"
    group = "" if on.pgid is None else f" of group {on.pgid}"
    return f"waits for a child{group}"


_BY_CLASS: dict[TaskClass, Callable[[WaitTarget | None], str | None]] = {
    TaskClass.LCK: _futex,
    TaskClass.KLK: _lock,
    TaskClass.FLK: _file_lock,
    TaskClass.DSK: _data,
    TaskClass.FLT: _data,
    TaskClass.SWP: _swap,
    TaskClass.RCL: _memory,
    TaskClass.WAI: _child,
}


def _file(on: WaitTarget) -> str | None:
    """Return the file that a system call waits on; ``None`` if it waits on no file."""
    if on.kind in ("pipe", "socket") and on.path is None:
        return None if on.inode is None else f"{on.kind}:[{on.inode}]"
    if on.path is not None:
        return on.path
    if on.kind in _NO_FILES or on.fd is None:
        return None
    return on.kind if on.kind not in ("file", "device", "disk") else f"fd {on.fd}"


_NO_FILES = frozenset({"timer", "signals", "poll", "epoll", "futex", "lock"})
