# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks, signals, messages and times that tasks wait on."""

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext, per_context, signals_of
from msatools.locks.base.model import WaitTarget
from msatools.locks.base.timers import timer_ends
from msatools.locks.events.completions import vforked
from msatools.locks.wait_targets.files import by_file
from msatools.tasks.wait_options import WaitOptsReader

_STOP_SIGNAL = 0xFFFF
"""``JOBCTL_STOP_SIGMASK``."""


def timer(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return when a sleep ends."""
    if case.file is not None:
        return by_file(context, case)
    ends = timer_ends(context, case)
    return WaitTarget(kind="timer", **ends) if ends else None


def child(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the child that is waited for."""
    if case.is_in("do_wait"):
        return _waited(context, case)
    if case.is_in("wait_for_vfork_done", "kernel_clone", "_do_fork"):
        return _vforked(context, case)
    return None


def _waited(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """A child that a task waits for, as it asked for it."""
    wakes = context.layout.symbol("child_wait_callback")
    for entry in case.stack.wait_entries():
        if entry.function != wakes:
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
    """A child that has yet to execute a program: it has a pointer to our stack."""
    task = vforked(context, case.address, lambda done: done in case.stack)
    return (
        WaitTarget(kind="child", pid=context.pid(task, leader=True)) if task else None
    )


def signal(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return which signals are waited for; none are named where any will do."""
    if case.file is not None:
        return by_file(context, case)
    blocked = "blocked.sig[0]"
    if case.is_in("do_sigtimedwait"):
        # The signals that it waits for are not blocked meanwhile.
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
    """Return the queue, or the set of semaphores."""
    ends = timer_ends(context, case)
    number = case.arguments[0] & 0x7FFF_FFFF if case.plain else None
    if case.is_in("do_msgrcv", "do_msgsnd"):
        return WaitTarget(kind="msgqueue", id=number)
    if case.is_in("do_semtimedop", "__do_semtimedop"):
        return WaitTarget(kind="semaphore", id=number, **ends)
    if case.call in ("mq_timedsend", "mq_timedreceive"):
        path = context.path_at(case.file.place) if case.file else None
        return WaitTarget(kind="mqueue", fd=case.fd, path=path, **ends)
    return None


def stopped(context: LockContext, case: BlockedTask) -> WaitTarget:
    """Return the signal that stopped it."""
    number = int(context.tasks["jobctl"][case.row]) & _STOP_SIGNAL
    return WaitTarget(kind="stop", signals=(number,) if number else None)


def traced(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return its tracer."""
    if not int(context.tasks["ptrace"][case.row]):
        return None
    pid = context.pid(int(context.tasks["parent"][case.row]), leader=True)
    return WaitTarget(kind="tracer", pid=pid)


@per_context
def _wait_opts(context: LockContext) -> WaitOptsReader:
    """Read what is waited for by wait()."""
    return WaitOptsReader(context.reader)
