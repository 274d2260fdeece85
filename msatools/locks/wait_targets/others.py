# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets of tasks that wait for tasks, signals, messages or timers."""

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext, per_context, signals_of
from msatools.locks.base.model import WaitTarget
from msatools.locks.base.timers import timer_ends
from msatools.locks.events.completions import vforked
from msatools.locks.wait_targets.files import by_file
from msatools.tasks.functions import VFORK
from msatools.tasks.wait_options import WaitOptsReader

_STOP_SIGNAL = 0xFFFF
"""``JOBCTL_STOP_SIGMASK``."""


def timer(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the timer that ends a sleep."""
    if case.file is not None:
        return by_file(context, case)
    ends = timer_ends(context, case)
    return WaitTarget(kind="timer", **ends) if ends else None


def child(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the child that a task waits for."""
    if case.is_in("do_wait"):
        return _waited(context, case)
    if case.is_in(*VFORK):
        return _vforked(context, case)
    return None


def _waited(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the child of a wait(), by its arguments."""
    wake_function = context.layout.symbol("child_wait_callback")
    for entry in case.stack.wait_entries():
        if entry.function != wake_function:
            continue
        wait = _wait_opts(context).of_entry(entry.address)
        if wait.kind == "any":
            return WaitTarget(kind="child")
        if wait.number is None:
            return None
        if wait.kind == "pid":
            return WaitTarget(kind="child", pid=wait.number)
        return WaitTarget(kind="child", pgid=wait.number)
    return None


def _vforked(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the vforked child, which has a pointer to the stack of the task."""
    task = vforked(context, case.address, lambda done: done in case.stack)
    return (
        WaitTarget(kind="child", pid=context.pid(task, leader=True)) if task else None
    )


def signal(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the signals that a task waits for; ``None`` if any of them will do."""
    if case.file is not None:
        return by_file(context, case)
    blocked = "blocked.sig[0]"
    if case.is_in("do_sigtimedwait"):
        # The signals of the call are unblocked while it waits.
        names = (blocked, "real_blocked.sig[0]")
        now, before = context.layout.members(case.address, "task_struct", *names)
        signals = signals_of(before & ~now)
        return WaitTarget(
            kind="signals", signals=signals or None, **timer_ends(context, case)
        )
    if case.is_in("sigsuspend", "__do_sys_rt_sigsuspend"):
        mask = context.layout.member(case.address, "task_struct", blocked)
        return WaitTarget(kind="signals", signals=signals_of(~mask) if mask else None)
    return WaitTarget(kind="signals")


def message(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the message queue or the set of semaphores that a task waits on."""
    ends = timer_ends(context, case)
    id_ = case.arguments[0] & 0x7FFF_FFFF if case.plain else None
    if case.is_in("do_msgrcv", "do_msgsnd"):
        return WaitTarget(kind="msgqueue", id=id_)
    if case.is_in("do_semtimedop", "__do_semtimedop"):
        return WaitTarget(kind="semaphore", id=id_, **ends)
    if case.call in ("mq_timedsend", "mq_timedreceive"):
        path = context.path_at(case.file.place) if case.file else None
        return WaitTarget(kind="mqueue", fd=case.fd, path=path, **ends)
    return None


def stopped(context: LockContext, case: BlockedTask) -> WaitTarget:
    """Return the signal that stopped a task."""
    number = int(context.tasks["jobctl"][case.row]) & _STOP_SIGNAL
    return WaitTarget(kind="stop", signals=(number,) if number else None)


def traced(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the tracer of a task."""
    if not int(context.tasks["ptrace"][case.row]):
        return None
    pid = context.pid(int(context.tasks["parent"][case.row]), leader=True)
    return WaitTarget(kind="tracer", pid=pid)


@per_context
def _wait_opts(context: LockContext) -> WaitOptsReader:
    """Return the reader of arguments of wait()."""
    return WaitOptsReader(context.reader)
