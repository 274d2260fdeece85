# SPDX-License-Identifier: LGPL-2.1-or-later

"""How a kernel died, as far as its dump tells."""

from drgn import FaultError, Object, Program, ProgramFlags

from msatools.target.model import Crash


def crash_of(prog: Program) -> Crash | None:
    """Tell how the kernel died; ``None`` if it did not, or is not known to have.

    A guest that panicked and was not started anew can still be looked at.
    """
    if prog.flags & ProgramFlags.IS_LOCAL:
        return None
    try:
        # The CPU that went into panic() or crash_kexec(), else PANIC_CPU_INVALID, -1.
        # Since Linux kernel commit 1717f2096b54 ("panic, x86: Fix re-entrance problem
        # due to panic on NMI") (in v4.5). A guest that was dumped while it ran has -1.
        cpu: int = prog["panic_cpu"].counter.value_()
    except (LookupError, FaultError):
        return None
    if cpu < 0:
        return None
    task = _crashed_task(prog, cpu)
    return Crash(
        message=_panic_message(prog),
        cpu=cpu,
        pid=None if task is None else _pid(task),
        comm=None if task is None else _comm(task),
    )


def _crashed_task(prog: Program, cpu: int) -> Object | None:
    try:
        if prog.flags & ProgramFlags.IS_LIVE:
            # The helpers take long to import, and few targets are crashes.
            from drgn.helpers.linux.sched import cpu_curr

            return cpu_curr(prog, cpu)
        return prog.crashed_thread().object
    except (LookupError, FaultError):
        return None


def _pid(task: Object) -> int | None:
    try:
        pid: int = task.pid.value_()
    except FaultError:
        return None
    return pid


def _comm(task: Object) -> str | None:
    try:
        comm: bytes = task.comm.string_()
    except FaultError:
        return None
    return comm.decode("utf-8", "backslashreplace")


def _panic_message(prog: Program) -> str | None:
    # The helpers take long to import, and few targets are crashes.
    from drgn.helpers.linux.panic import panic_message

    try:
        message = panic_message(prog)
    except (LookupError, FaultError, ValueError):
        # The log's buffer may be filtered, cut off, or overwritten.
        return None
    return None if message is None else message.decode("utf-8", "backslashreplace")
