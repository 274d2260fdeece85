# SPDX-License-Identifier: LGPL-2.1-or-later

"""How a kernel crashed, by its log, registers and variables; and on what machine."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import drgn
from drgn.helpers.linux.mm import totalram_pages
from drgn.helpers.linux.timekeeping import (
    ktime_get_coarse_boottime_ns,
    ktime_get_coarse_real_ns,
)
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.clocks import load_averages
from msatools.kernel.code import stack_trace
from msatools.kernel.percpu import online_cpus
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.program.model import Target
from msatools.report.log import (
    EXCEPTION,
    OOPSES,
    PANIC,
    WATCHDOGS,
    Backtrace,
    Cause,
    Event,
    Frame,
    before_panic,
    below_panic,
    faulting,
    fingerprint,
    plain_name,
)
from msatools.report.memory import OutOfMemory
from msatools.report.model import CrashDetails, Machine, NestedFault, Unloaded
from msatools.selfdesc.find import ask, drgn_lookups, find_variable
from msatools.tasks.text import KernelText

# --- How a kernel crashed: by its log, its registers and its variables.
#
# The log comes first: it has the kernel's own words, registers and stack. Where it has
# no stack, or is lost, the stack of the crashed task is unwound.


_BATCH_NS = 5_000_000_000
"""What the kernel reports of one fault comes within so long."""

_OOPS_NS = 60_000_000_000
"""An oops takes so long at most, on a slow console."""

_ADDRESS = re.compile(r"\baddress:? ([0-9a-f]{8,16})\b")
"""The bad address in the first line of an oops."""

_BY_FUNCTION: dict[str, Cause] = {
    "sysrq_handle_crash": "sysrq",
    "out_of_memory": "out-of-memory",
    "watchdog_timer_fn": "soft-lockup",
    "watchdog_hardlockup_check": "hard-lockup",
    "watchdog_overflow_callback": "hard-lockup",
    "rcu_sched_clock_irq": "rcu-stall",
    "check_hung_uninterruptible_tasks": "hung-task",
    "handle_stack_overflow": "stack-overflow",
    "exc_page_fault": "page-fault",
    "exc_general_protection": "protection-fault",
    "exc_invalid_op": "bug",
    "mce_panic": "machine-check",
    "do_exit": "init-killed",
}
"""Causes by a function on the stack, where the log is lost; in this order."""


class CrashLog(Struct, frozen=True):
    """The crashes that the kernel's log records."""

    events: Sequence[Event]
    """The oldest first."""

    oom: OutOfMemory | None
    """The last lack of memory."""

    end_ns: int
    """Time of the last message."""


def find_crash(
    reader: Reader,
    target: Target,
    log: CrashLog,
    losses: LossLog,
) -> CrashDetails | None:
    """Return how the kernel crashed; ``None`` if it did not."""
    # A further one is of a fault in panic() itself.
    panic = next((event for event in log.events if event.is_panic), None)
    if target.crash is None and (panic is None or target.kind == "kcore"):
        return None
    event = at_fault(panic, log)
    trace = event.backtrace if event else None
    frames = list(trace.frames) if trace else []
    if not frames and panic and (backtrace := panic.backtrace):
        trace, frames = backtrace, list(backtrace.frames)
    text = KernelText(reader, losses)
    if not frames:
        frames = _unwound(reader, text)
    if event and not event.is_panic and _is_within(event):
        # A fault in panic(), of which the log has lost the reason: the stack has it.
        event = None
    cause = event.cause if event else _by_function(below_panic(frames))
    # What an NMI from outside has interrupted is at no fault.
    faulty = [] if cause == "nmi" else faulting(frames, cause)
    first = faulty[0] if faulty else None
    cpu, pid, comm = _who(event, trace, target)
    constraint = log.oom.constraint if log.oom is not None else None
    message = target.crash.message if target.crash and event is None else None
    last = panic or event
    is_jump = trace is not None and trace.is_jump
    unloaded = _unloaded(event, text)
    return CrashDetails(
        cause=cause,
        message=event.message if event else message,
        function=plain_name(first.function) if first else None,
        module=first.module if first else None,
        taints=read_taints(reader, losses),
        cpu=cpu,
        pid=pid,
        comm=comm,
        frames=tuple(frame.text for frame in frames),
        fingerprint=fingerprint(cause, faulty, constraint),
        time_ns=last.time_ns if last else None,
        is_jump=is_jump,
        unloaded=unloaded,
        nested=tuple(_nested(panic, log)),
    )


def _is_within(event: Event) -> bool:
    """Return whether a fault is one of what panic() called."""
    frames = event.backtrace.frames if event.backtrace else []
    return before_panic(frames) != frames


def _nested(panic: Event | None, log: CrashLog) -> Iterator[NestedFault]:
    """Yield the faults of what the first panic() called, by their stacks."""
    if panic is None:
        return
    for event in log.events[log.events.index(panic) + 1 :]:
        # Another CPU may report a fault of its own before it is stopped.
        if event.is_panic or not event.backtrace or not _is_within(event):
            continue
        frames = before_panic(event.backtrace.frames)
        faulty = faulting(frames, event.cause)
        first = faulty[0] if faulty else None
        yield NestedFault(
            cause=event.cause,
            message=event.message,
            function=plain_name(first.function) if first else None,
            module=first.module if first else None,
            time_ns=event.time_ns,
        )


def at_fault(panic: Event | None, log: CrashLog) -> Event | None:
    """Return the event that the kernel died of, by the panic that it ended in."""
    if panic is None:
        # With a capture kernel an oops does not come to panic().
        oops = _last(log.events, OOPSES)
        return oops if oops and log.end_ns - oops.time_ns < _OOPS_NS else None
    before = log.events[: log.events.index(panic)]
    recent = [each for each in before if each.time_ns >= panic.time_ns - _BATCH_NS]
    if EXCEPTION.match(panic.message.removeprefix(PANIC)):
        return _last(before, OOPSES) or panic
    if panic.cause == "init-killed":
        oops = _last(recent, OOPSES)
        return oops if oops and oops.backtrace and oops.backtrace.pid == 1 else panic
    if panic.cause == "hung-task":
        tasks = (each for each in recent if each.cause == panic.cause)
        return next(tasks, panic)
    if panic.cause == "warning":
        return _last(before, OOPSES | {"warning"}) or panic
    if panic.cause in WATCHDOGS or panic.cause in OOPSES:
        return _last(before, {panic.cause}) or panic
    return panic


def _last(events: Sequence[Event], causes: Collection[Cause]) -> Event | None:
    found = (event for event in reversed(events) if event.cause in causes)
    return next(found, None)


def _who(
    event: Event | None, trace: Backtrace | None, target: Target
) -> tuple[int | None, int | None, str | None]:
    """Return the CPU, and PID and name of the task at fault."""
    crash = target.crash
    cpu = (event.cpu if event else None) if trace is None else trace.cpu
    if cpu is None and crash is not None:
        cpu = crash.cpu
    for each in (event, trace, crash):
        if each is not None and each.pid is not None:
            return cpu, each.pid, each.comm
    return cpu, None, None


def _by_function(frames: Sequence[Frame]) -> Cause:
    names = {plain_name(frame.function) for frame in frames}
    causes = (cause for name, cause in _BY_FUNCTION.items() if name in names)
    return next(causes, "panic")


def _unloaded(event: Event | None, text: KernelText) -> Unloaded | None:
    """Return what is known of the bad address, if it is where a module was."""
    found = _ADDRESS.search(event.message) if event else None
    if found is None:
        return None
    last = text.unloaded(int(found[1], 16))
    return None if last is None else Unloaded(address=found[1], last=last)


def _unwound(reader: Reader, text: KernelText) -> list[Frame]:
    """Unwind the stack of the crashed task, by its registers in the dump."""
    prog = reader.prog
    try:
        task = ask(prog.crashed_thread).object
        trace = stack_trace(prog, task) or ()
    except LOST:
        return []
    frames = []
    for frame in trace:
        if frame.is_inline:
            continue
        pc, address = frame.pc, frame.pc if frame.interrupted else frame.pc - 1
        symbol = text.symbol(address)
        if symbol is None and frame.interrupted:
            # A jump to what is no code: the call has left the address of its caller.
            pc = _word(reader, frame.sp)
            address = pc - 1
            symbol = text.symbol(address)
        if symbol is None:
            continue
        name = text.module_name(address)
        place = f"{symbol.name}+{pc - symbol.address:#x}"
        where = place if name is None else f"{place} [{name}]"
        frames.append(Frame(symbol.name, where, name))
    return frames


def _word(reader: Reader, address: int) -> int:
    """Read a word of a stack; 0 if it cannot be read."""
    try:
        return int(reader.words(address, 1)[0])
    except UNREADABLE:
        return 0


def read_taints(reader: Reader, losses: LossLog) -> str | None:
    """Return the letters of the kernel's taints; ``None`` if they cannot be read.

    drgn's helper needs the length of ``taint_flags``, which BTF does not have.
    """
    try:
        mask = int(find_variable(reader.prog, "tainted_mask").value_())
        flags = find_variable(reader.prog, "taint_flags")
        letters = [
            int(flags[bit].c_true.value_()) & 0xFF
            for bit in range(mask.bit_length())
            if mask >> bit & 1
        ]
    except MissingError:
        return None
    except UNREADABLE as error:
        losses.note("taints-lost", f"the kernel's taints cannot be read: {error}")
        return None
    return "".join(chr(each) if 0x20 < each < 0x7F else "?" for each in letters)


# --- The machine that a report is of: its name, its build, and how long it ran.


def read_machine(reader: Reader, target: Target, losses: LossLog) -> Machine:
    """Read what is known of the machine; what cannot be read is ``None``."""
    prog = reader.prog

    def clock(read: Callable[[drgn.Program], drgn.Object]) -> int | None:
        try:
            return int(ask(read, prog).value_())
        except MissingError:
            return None
        except UNREADABLE as error:
            losses.lose(Loss.CLOCKS, f"the time cannot be read: {error}", about="now")
            return None

    try:
        ram: int | None = int(ask(totalram_pages, prog)) * target.page_size
    except LOST:
        ram = None
    return Machine(
        host=_name(prog, "nodename"),
        build=_name(prog, "version"),
        uptime_ns=clock(ktime_get_coarse_boottime_ns),
        time_ns=clock(ktime_get_coarse_real_ns),
        cpus=len(online_cpus(reader, losses)) or None,
        ram_bytes=ram,
        load=load_averages(prog, losses),
        taints=read_taints(reader, losses),
    )


def _name(prog: drgn.Program, member: str) -> str | None:
    try:
        with drgn_lookups:
            names = find_variable(prog, "init_uts_ns").name
            text: bytes = names.member_(member).string_()
    except LOST:
        return None
    return text.decode("utf-8", "backslashreplace")
