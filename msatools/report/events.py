# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the kernel reported in its log: oopses, warnings, stalls and panics.

Lines of several CPUs may be mixed: each line says which thread or CPU wrote it.
"""

import re
from collections.abc import Iterable
from itertools import takewhile

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.report.causes import Cause, event_cause, panic_cause
from msatools.report.frames import Frame, is_entry, parse_frame
from msatools.target.printk import LogRecord

PANIC = "Kernel panic - not syncing: "

MAX_EVENTS = 256
"""Events kept, the latest: a machine may warn for days."""

_CPU = re.compile(
    r"CPU: (?P<cpu>\d{1,10}) (?:UID: \d+ )?PID: (?P<pid>\d{1,10}) Comm: (?P<comm>.*?) "
    r"(?:Kdump: loaded )?(?:Not tainted|Tainted: (?P<taints>[A-Z ]+)) +\d",
    re.DOTALL,
)
_TASK = re.compile(
    r"task:(?P<comm>.*?)\s+state:\S+\s.*?\bpid:\s*(?P<pid>\d{1,10})", re.DOTALL
)
_HUNG = re.compile(r"INFO: task (?P<comm>.*):(?P<pid>\d{1,10}) blocked ", re.DOTALL)
_STUCK = re.compile(
    r"BUG: soft lockup - CPU#(?P<cpu>\d{1,10}) .*\[(?P<comm>.*):(?P<pid>\d{1,10})\]",
    re.DOTALL,
)
_HARD = re.compile(
    r"(?:CPU(?P<cpu>\d{1,10}): )?Watchdog detected hard LOCKUP"
    r"(?: on cpu (?P<on>\d{1,10}))?"
)
_STALLED = re.compile(r"rcu:\s+(?P<cpu>\d{1,10})-\S+ \(")
_KERNEL_RIP = re.compile(r"(?:RIP: 0010:|pc : )(?P<frame>.*)")
_USER_RIP = re.compile(r"RIP: 0033:")
_TRACE = re.compile(r"Call [Tt]race:")
_JUMP = re.compile(
    r"#PF: supervisor instruction fetch|"
    r"\s*EC = 0x21: IABT \(current EL\)|Unable to handle kernel execut"
)
"""The address at which nothing could be executed is that of the fault itself."""

_EXECUTED = ("kernel tried to execute ", "unable to execute userspace code ")
_GUESS = "? "


class Backtrace(Struct):
    """The registers and the stack of one CPU or task."""

    cpu: int | None = None
    pid: int | None = None
    comm: str | None = None
    taints: str | None = None
    at: Frame | None = None
    """The instruction that was executed, if it was the kernel's."""

    calls: list[Frame] = field(default_factory=list)
    """The frames that the kernel is sure of, the innermost first."""

    guesses: list[Frame] = field(default_factory=list)
    """The frames that it marks with a question mark: return addresses that it found on
    the stack, which may be left over from calls that have returned."""

    is_jump: bool = False
    """Whether what was to be executed is no code: then the caller is at fault."""

    @property
    def frames(self) -> list[Frame]:
        """All frames, the innermost first.

        The kernel cannot unwind from where no code is: then those are guesses, up to
        the system call or the like, past which nothing of this call lies.
        """
        at = [self.at] if self.at and not self.is_jump else []
        if self.calls or (at and not self.is_jump):
            return [*at, *self.calls]
        return list(takewhile(lambda frame: not is_entry(frame), self.guesses))


class Event(Struct):
    """A report of the kernel on one fault."""

    cause: Cause
    message: str
    time_ns: int
    is_panic: bool = False
    cpu: int | None = None
    """The CPU at fault, if the message names it."""

    pid: int | None = None
    comm: str | None = None
    backtraces: list[Backtrace] = field(default_factory=list)
    is_jump: bool = False
    """Whether it was a jump to what is no code."""

    @property
    def backtrace(self) -> Backtrace | None:
        """The backtrace of the CPU or task at fault, if there is one."""
        for each in self.backtraces:
            if self.cpu is not None and each.cpu == self.cpu and each.frames:
                return each
        return next((each for each in self.backtraces if each.frames), None)


class _EventParser:
    """Collects the events of a log, line by line."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._open: dict[tuple[int | None, int | None], Backtrace] = {}
        """The backtrace that each thread or CPU is just writing."""

        self._in_trace: set[tuple[int | None, int | None]] = set()
        self._jumps: set[tuple[int | None, int | None]] = set()
        """Threads or CPUs that have just jumped to what is no code."""

    def add(self, record: LogRecord, line: str) -> None:
        writer = record.tid, record.cpu
        if line.startswith(_EXECUTED):
            # The fault itself is reported next.
            self._jumps.add(writer)
            return
        if line.startswith(PANIC):
            words = line.removeprefix(PANIC)
            event = Event(panic_cause(words), line, record.time_ns, is_panic=True)
            self._begin(event, writer)
        elif (cause := event_cause(line)) and not self._continues(cause, record):
            self._begin(_event(cause, line, record), writer)
        elif self.events:
            self._detail(self.events[-1], writer, line)

    def _continues(self, cause: Cause, record: LogRecord) -> bool:
        """Return whether a line of die() belongs to the event before."""
        if cause not in ("oops", "invalid-opcode") or not self.events:
            return False
        last = self.events[-1]
        # A second oops begins with lines of its own.
        return not last.is_panic and not any(b.frames for b in last.backtraces)

    def _begin(self, event: Event, writer: tuple[int | None, int | None]) -> None:
        event.is_jump = writer in self._jumps
        self._jumps.discard(writer)
        self.events.append(event)
        del self.events[:-MAX_EVENTS]
        self._open.pop(writer, None)
        self._in_trace.discard(writer)

    def _detail(
        self, event: Event, writer: tuple[int | None, int | None], line: str
    ) -> None:
        if found := _CPU.match(line):
            backtrace = Backtrace(
                cpu=int(found["cpu"]),
                pid=int(found["pid"]),
                comm=found["comm"],
                taints=found["taints"],
            )
            self._new(event, writer, backtrace)
        elif found := _TASK.match(line):
            backtrace = Backtrace(pid=int(found["pid"]), comm=found["comm"])
            self._new(event, writer, backtrace)
        elif _JUMP.match(line):
            event.is_jump = True
        elif found := _STALLED.match(line):
            event.cpu = int(found["cpu"]) if event.cpu is None else event.cpu
        elif _TRACE.match(line):
            if writer not in self._open:
                self._new(event, writer, Backtrace())
            self._in_trace.add(writer)
        elif writer in self._open:
            self._frame(writer, line)

    def _new(
        self, event: Event, writer: tuple[int | None, int | None], trace: Backtrace
    ) -> None:
        trace.is_jump = event.is_jump and not event.backtraces
        event.backtraces.append(trace)
        self._open[writer] = trace
        self._in_trace.discard(writer)

    def _frame(self, writer: tuple[int | None, int | None], line: str) -> None:
        trace, in_trace = self._open[writer], writer in self._in_trace
        if found := _KERNEL_RIP.match(line):
            frame = parse_frame(found["frame"].strip())
            if frame is None:
                return
            if in_trace:
                trace.calls.append(frame)
            elif trace.at is None:
                trace.at = frame
        elif in_trace:
            if _USER_RIP.match(line) or line.startswith(("Modules linked in", "---[")):
                self._in_trace.discard(writer)
            elif frame := parse_frame(line.strip()):
                trace.calls.append(frame)
            elif frame := parse_frame(line.strip().removeprefix(_GUESS)):
                trace.guesses.append(replace(frame, text=f"{_GUESS}{frame.text}"))


def _event(cause: Cause, line: str, record: LogRecord) -> Event:
    event = Event(cause, line, record.time_ns)
    if found := _HUNG.search(line) or _STUCK.search(line):
        event.pid, event.comm = int(found["pid"]), found["comm"]
    if found := _STUCK.search(line):
        event.cpu = int(found["cpu"])
    elif found := _HARD.search(line):
        number = found["cpu"] or found["on"]
        event.cpu = None if number is None else int(number)
    return event


def parse_events(log: Iterable[LogRecord]) -> list[Event]:
    """Return the events of a log, the oldest first; :data:`MAX_EVENTS` at most."""
    parser = _EventParser()
    for record in log:
        # The kernel logs each line of a report by itself: a line feed in one comes from
        # a task's name.
        if record.is_kernel:
            parser.add(record, record.text)
    return parser.events
