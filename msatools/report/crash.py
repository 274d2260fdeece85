# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find how a kernel crashed, from log, registers and stack; and on which machine."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import drgn
from drgn.helpers.linux.mm import totalram_pages
from drgn.helpers.linux.timekeeping import (
    ktime_get_coarse_boottime_ns,
    ktime_get_coarse_real_ns,
)
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.clocks import load_averages
from msatools.kernel.code import stack_trace
from msatools.kernel.percpu import online_cpus
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.program.model import LogSpan, Target
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
    parse_events,
    plain_name,
)
from msatools.report.memory import OutOfMemory
from msatools.report.model import CrashDetails, Machine, NestedFault, Unloaded
from msatools.selfdesc.find import ask, drgn_lookups, find_variable
from msatools.tasks.text import KernelText

if TYPE_CHECKING:
    from msatools.program.log_text import Boot, LogText

# --- How a kernel crashed: by its log, its registers and its variables.
#
# The log comes first: it has the kernel's own words, registers and stack. Where it has
# no stack, or is lost, the stack of the crashed task is unwound.


_BATCH_NS = 5_000_000_000
"""Maximum time between the messages of one fault."""

_OOPS_NS = 60_000_000_000
"""Maximum time to print an oops, on a slow console."""

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
"""Causes by function: if the log is lost, the first that is on the stack counts."""


class CrashLog(Struct, frozen=True):
    """The crashes that the kernel's log records."""

    events: Sequence[Event]
    """The oldest first."""

    oom: OutOfMemory | None
    """The last out-of-memory event."""

    end_ns: int
    """Time of the last message."""


def find_crash(
    reader: Reader | None,
    target: Target,
    log: CrashLog,
    losses: LossLog,
) -> CrashDetails | None:
    """Return how the kernel crashed; ``None`` if it did not.

    :param reader: ``None`` for a log without its kernel.
    """
    # A second panic comes from a fault in panic() itself.
    panic = next((event for event in log.events if event.is_panic), None)
    if reader is None:
        if panic is None and not ends_in_oops(log):
            return None
    elif target.crash is None and (panic is None or target.kind == "kcore"):
        return None
    event = at_fault(panic, log)
    trace = event.backtrace if event else None
    frames = list(trace.frames) if trace else []
    if not frames and panic and (backtrace := panic.backtrace):
        trace, frames = backtrace, list(backtrace.frames)
    if trace is None and reader is None and event:
        # The stack is lost: at least name its task.
        trace = next((each for each in event.backtraces if each.pid is not None), None)
    text = None if reader is None else KernelText(reader, losses)
    if not frames and reader is not None and text is not None:
        frames = _unwound(reader, text)
    if event and not event.is_panic and _is_within(event):
        # A fault in panic(), whose own reason the log has lost: use the stack.
        event = None
    cause = event.cause if event else _by_function(below_panic(frames))
    # The function that an external NMI interrupted is not at fault.
    faulty = [] if cause == "nmi" else faulting(frames, cause)
    first = faulty[0] if faulty else None
    cpu, pid, comm = _who(event, trace, target)
    if cpu is None and panic is not None:
        # Take the CPU that reported the fault, as for a hung task.
        cpu = next((each.cpu for each in panic.backtraces if each.cpu is not None), cpu)
    constraint = log.oom.constraint if log.oom is not None else None
    message = target.crash.message if target.crash and event is None else None
    last = panic or event
    is_jump = trace is not None and trace.is_jump
    unloaded = None if text is None else _unloaded(event, text)
    return CrashDetails(
        cause=cause,
        message=event.message if event else message,
        function=plain_name(first.function) if first else None,
        module=first.module if first else None,
        taints=taints_of(log) if reader is None else read_taints(reader, losses),
        cpu=cpu,
        pid=pid,
        comm=comm,
        frames=tuple(frame.text for frame in frames),
        fingerprint=fingerprint(cause, faulty, constraint),
        time_ns=last.time_ns if last else None,
        is_jump=is_jump,
        unloaded=unloaded,
        nested=tuple(_nested(panic, log)),
        line=event.line or None if event else None,
        has_panicked=reader is not None or panic is not None,
    )


def ends_in_oops(log: CrashLog) -> bool:
    """Return whether a log ends with an oops, after which the kernel did not go on.

    A capture kernel takes over before panic() and before the end of the oops's report.
    """
    oops = at_fault(None, log)
    return oops is not None and oops.is_die and not oops.is_over


def taints_of(log: CrashLog) -> str | None:
    """Return the letters of the taints in the last report of a log.

    The kernel prints it before the fault itself adds a taint. ``None`` if there is no
    report, or the log has lost the line.
    """
    traces = (trace for event in reversed(log.events) for trace in event.backtraces)
    last = next((trace for trace in traces if trace.cpu is not None), None)
    if last is None:
        return None
    # G is for a kernel without proprietary modules, and Red Hat's own are dashes.
    return re.sub("[^A-FH-Z]", "", last.taints or "")


def _is_within(event: Event) -> bool:
    """Return whether a fault occurred in a function that panic() called."""
    frames = event.backtrace.frames if event.backtrace else []
    return before_panic(frames) != frames


def _nested(panic: Event | None, log: CrashLog) -> Iterator[NestedFault]:
    """Yield the faults in functions that the first panic() called, by their stacks."""
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
    """Return the event that made the kernel panic; else an oops at the log's end."""
    if panic is None:
        # With a capture kernel an oops does not reach panic().
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
    """Return the bad address and the last unloaded module, if its code was there."""
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
            # A jump to an address without code: the call left its return address.
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


# --- A log as a text, without a dump: the boot to report, and the machine.


LOG_ALONE = "not in a log: a dump of the crash (vmcore) has it"
"""Error of the other commands, for which a log has no data."""


class BootChoice(Struct, frozen=True):
    """The boot that is reported, of those in a text."""

    boot: "Boot"
    number: int
    """Number of the boot in the text, from 1."""

    events: tuple[Event, ...]


def choose_boot(text: "LogText") -> BootChoice:
    """Return the boot that was asked for; else the last with a crash, or the last."""
    number = len(text.boots)
    if text.chosen is not None:
        return _choice(text, text.chosen)
    last = _choice(text, number)
    for each in range(number, 0, -1):
        found = last if each == number else _choice(text, each)
        if has_crash(found):
            return found
    return last


def _choice(text: "LogText", number: int) -> BootChoice:
    boot = text.boots[number - 1]
    return BootChoice(boot, number, tuple(parse_events(boot.records)))


def has_crash(choice: BootChoice) -> bool:
    """Return whether the kernel of a boot crashed."""
    end_ns = choice.boot.records[-1].time_ns
    log = CrashLog(events=choice.events, oom=None, end_ns=end_ns)
    return any(event.is_panic for event in choice.events) or ends_in_oops(log)


def target_of_log(target: Target, text: "LogText", choice: BootChoice) -> Target:
    """Return *target* with the release, architecture and page size from a log."""
    from msatools.program.log_text import facts_of

    boot, facts = choice.boot, facts_of(choice.boot)
    return replace(
        target,
        release=facts.release,
        arch=facts.arch,
        page_size=facts.page_bytes or target.page_size,
        log=LogSpan(
            lines=text.lines,
            first_line=boot.first,
            last_line=boot.last,
            begins=boot.begins or None,
            ends=boot.ends or None,
            boot=choice.number,
            boots=len(text.boots),
        ),
    )


def machine_of_log(choice: BootChoice) -> Machine:
    """Return the machine that a log describes; unknown fields are ``None``."""
    from msatools.program.log_text import facts_of

    boot, facts = choice.boot, facts_of(choice.boot)
    log = CrashLog(events=choice.events, oom=None, end_ns=0)
    return replace(
        UNKNOWN,
        host=boot.host,
        build=facts.build,
        time_ns=boot.end_day_ns,
        taints=taints_of(log),
    )


def note_log(
    text: "LogText", target: Target, choice: BootChoice, losses: LossLog
) -> None:
    """Note a log's limits: skipped bytes, other boots, missing times or writers."""
    losses.lose(
        Loss.LOG,
        f"the first {text.skipped_bytes:,} bytes of the text are not read: it is too "
        "long",
        count=int(text.skipped_bytes > 0),
    )
    boots = len(text.boots)
    if boots > 1:
        which = "the last one with a crash" if has_crash(choice) else "the last one"
        which = which if text.chosen is None else "as asked for"
        hosts = len({boot.host for boot in text.boots if boot.host})
        of_hosts = f" of {hosts} hosts" if hosts > 1 else ""
        losses.note(
            "boots",
            f"the text has {boots} boots{of_hosts}; this is number {choice.number}, "
            f"{which}; --kernel N shows another",
        )
    if choice.boot.clock is None:
        losses.note("no-times", "the log has no times: what came when is not known")
    has_panicked = any(event.is_panic for event in choice.events)
    if has_crash(choice) and not has_panicked:
        losses.note(
            "no-panic",
            "the log ends in an oops and has no panic: a capture kernel took over, or "
            "the text is cut off",
        )
    has_writers = any(
        record.tid is not None or record.cpu is not None
        for record in choice.boot.records
    )
    if not has_writers and len(choice.events) > 1:
        losses.note(
            "no-writers",
            "the log does not say which CPU wrote each line: where several wrote at "
            "once, a line may count for another's report",
        )
    if target.arch is None:
        losses.note(
            "page-size",
            f"the log does not say what machine it is of: pages are taken as of "
            f"{target.page_size:,} bytes",
        )


# --- The machine that a report is of: its name, its build, and how long it ran.


UNKNOWN = Machine(
    host=None,
    build=None,
    uptime_ns=None,
    time_ns=None,
    cpus=None,
    ram_bytes=None,
    load=None,
    taints=None,
)
"""A machine without any known field."""


def read_machine(reader: Reader, target: Target, losses: LossLog) -> Machine:
    """Read the description of the machine; fields that cannot be read are ``None``."""
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
