# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on crashes, the log and the dump.

Each threshold is a constant beside its rule. Several rules share code in
:mod:`msatools.report.rule`; the findings of msa-cpus are made in
:mod:`msatools.cpus.diagnostics`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from msgspec import Struct

from msatools.kernel.report import Loss
from msatools.locks.report import LockRow
from msatools.program.description import LogRecord
from msatools.report.log import (
    OOPSES,
    Cause,
    Event,
    Frame,
    faulting,
    parse_frame,
    plain_name,
)
from msatools.report.model import CrashDetails
from msatools.report.rule import (
    ReportParts,
    VerdictRule,
    ago,
    cause_text,
    count_text,
    fault_text,
    nested_text,
    pid_text,
    said,
    tasks_text,
    unloaded_text,
    who_text,
)

# --- The kernel crashed.


_FRAMES = 4
_NESTED = 3


def _panic_when(parts: ReportParts) -> Iterator[CrashDetails]:
    if parts.crash is not None:
        yield parts.crash


def _panic_words(crash: CrashDetails) -> str:
    if crash.cause == "nmi":
        return (
            "the kernel crashed: stopped by an NMI, from an operator or the hardware; "
            "the code that it interrupted is not at fault"
        )
    return f"the kernel crashed: {fault_text(crash)}, {who_text(crash)}"


def _panic_evidence(crash: CrashDetails) -> Iterator[str]:
    if crash.message is not None:
        yield said(crash)
    if gone := unloaded_text(crash):
        yield gone
    if crash.frames and crash.cause != "nmi":
        yield f"stack: {' < '.join(_faulting(crash))}"
    yield f"fingerprint {crash.fingerprint}"
    yield from map(nested_text, crash.nested[:_NESTED])


def _faulting(crash: CrashDetails) -> Sequence[str]:
    """Return the first frames from the faulting function on."""
    frames = [parse_frame(text) for text in crash.frames]
    names = [plain_name(frame.function) if frame else "" for frame in frames]
    first = names.index(crash.function) if crash.function in names else 0
    return crash.frames[first : first + _FRAMES]


def _see(crash: CrashDetails) -> tuple[str, ...]:
    if crash.cause == "hung-task" and crash.pid:
        return ("locks", "-p", str(crash.pid), "--stacks")
    # In other crashes the task at fault was running.
    return ("cpus", "-v")


PANIC = VerdictRule(
    code="panic",
    needs=(),
    when=_panic_when,
    severity="critical",
    confidence=lambda crash: "exact" if crash.has_panicked else "likely",
    words=_panic_words,
    evidence=_panic_evidence,
    see=_see,
)


# --- The kernel had faults that it survived.
#
# A task that a fault killed leaves its locks locked: their waiters wait for ever, as a
# consequence of the fault.


class _Oopses(Struct, frozen=True):
    events: list[Event]
    parts: ReportParts
    left: list[LockRow]
    """Locks that a fault may have left locked: their owner field refers to a task that
    it killed, or to a later task that does not own them and may have reused the killed
    task's ``task_struct``."""


def _oops_when(parts: ReportParts) -> Iterator[_Oopses]:
    crash = parts.crash
    # Events after a panic are faults in panic() itself.
    before = list(takewhile(lambda event: not event.is_panic, parts.events))
    survived = [
        event
        for event in (parts.events if crash is None else before)
        if event.cause in OOPSES and not event.is_panic and not _is_told(event, crash)
    ]
    if survived:
        yield _Oopses(survived, parts, _left(parts, survived))


def _is_told(event: Event, crash: CrashDetails | None) -> bool:
    """Return whether an event is the one that the crash is reported as."""
    told = None if crash is None else (crash.message, crash.cause)
    return (event.message, event.cause) == told


def _left(parts: ReportParts, events: list[Event]) -> list[LockRow]:
    locks = parts.locks.locks if parts.locks is not None else ()
    left = [row for row in locks if row.refuted and not row.owners]
    began = _began_ns(parts)
    return [
        row
        for row in left
        if _names_killed(row, events)
        or any(began.get(own.pid, 0) > events[0].time_ns for own in row.refuted)
    ]


def _began_ns(parts: ReportParts) -> dict[int, int]:
    """Map the PID of each process to its start time, in ns of CLOCK_MONOTONIC."""
    if parts.prstat is None or parts.taken_at_ns is None:
        return {}
    now_ns = parts.taken_at_ns
    return {task.pid: now_ns - task.lifetime_ns for task in parts.prstat.tasks}


def _names_killed(row: LockRow, events: list[Event]) -> bool:
    """Return whether a lock names a task that died in a fault as its owner."""
    killed = {_victim(event) for event in events}
    return any((own.pid, own.comm) in killed for own in row.refuted)


def _victim(event: Event) -> tuple[int | None, str | None]:
    """Return the PID and the name of the task that a fault was in."""
    trace = event.backtrace
    if event.pid is not None or trace is None:
        return event.pid, event.comm
    return trace.pid, trace.comm


def _oops_words(oopses: _Oopses) -> str:
    first = oopses.events[0]
    frames = faulting(first.backtrace.frames, first.cause) if first.backtrace else []
    place = f" in {_function(frames[0])}" if frames else ""
    many = count_text(len(oopses.events), "fault")
    when = ago(oopses.parts, first.time_ns)
    waiters = sum(len(row.waiters) for row in oopses.left)
    wait = "waits" if waiters == 1 else "wait"
    after = f"; {count_text(waiters, 'task')} {wait} for a lock left locked"
    return (
        f"the kernel went on after {many}; the first, {when}: "
        f"{cause_text(first.cause)}{place}{after if waiters else ''}"
    )


def _function(frame: Frame) -> str:
    return frame.function + (f" [{frame.module}]" if frame.module else "")


def _oops_evidence(oopses: _Oopses) -> Iterator[str]:
    for event in oopses.events[:3]:
        pid, comm = _victim(event)
        who = "" if pid is None else f", in {pid_text(pid, comm)}"
        yield f"{said(event)}{who}"
    for row in oopses.left[:3]:
        had = "had" if _names_killed(row, oopses.events) else "may have had"
        waiters = tasks_text(((pid, None) for pid in row.waiters), 3)
        yield (
            f"the task that died {had} {row.type} {row.name or row.id}; "
            f"waiting: {waiters}"
        )


OOPS = VerdictRule(
    code="oops",
    needs=(),
    when=_oops_when,
    severity=lambda oopses: "critical" if oopses.left else "warning",
    confidence=lambda oopses: "likely" if oopses.left else "exact",
    words=_oops_words,
    evidence=_oops_evidence,
    see=lambda oopses: ("report", "--full"),
)


# --- The kernel warned (WARN()), or is tainted by a fault that its log no longer has.


_PLACES = 3

_OF_TAINT: dict[str, tuple[str, frozenset[Cause]]] = {
    "D": ("it had an oops", OOPSES),
    "W": ("it warned", frozenset({"warning"})),
    "M": ("a machine check was reported", frozenset({"machine-check"})),
    "L": ("a CPU was locked up", frozenset({"soft-lockup", "hard-lockup"})),
}
"""Meaning of each taint (kernel/panic.c, taint_flags), and causes of its events."""


class _Warnings(Struct, frozen=True):
    events: list[Event]
    """Warnings of the log."""

    lost: list[str]
    """Events that the kernel's taints record and the log lacks, in words."""

    parts: ReportParts


def _kernel_warnings_when(parts: ReportParts) -> Iterator[_Warnings]:
    found = [
        event
        for event in parts.events
        if event.cause == "warning"
        and not event.is_panic
        and not _is_told(event, parts.crash)
    ]
    causes = {event.cause for event in parts.events}
    lost = [
        f"{text} (taint {letter})"
        for letter, (text, known) in _OF_TAINT.items()
        if parts.log and letter in (parts.machine.taints or "") and not causes & known
    ]
    if found or lost:
        yield _Warnings(found, lost, parts)


def _places(events: list[Event]) -> Iterator[tuple[str, int]]:
    """Yield where the kernel warned, and how often, the most frequent first."""
    places: Counter[str] = Counter()
    for event in events:
        frames = (
            faulting(event.backtrace.frames, event.cause) if event.backtrace else []
        )
        module = f" [{frames[0].module}]" if frames and frames[0].module else ""
        places[f"{frames[0].function}{module}" if frames else event.message] += 1
    yield from places.most_common()


def _kernel_warnings_words(subject: _Warnings) -> str:
    words = []
    if subject.events:
        places = [*_places(subject.events)]
        where = f"in {places[0][0]}" if len(places) == 1 else f"at {len(places)} places"
        last = ago(subject.parts, subject.events[-1].time_ns)
        times = count_text(len(subject.events), "time")
        words.append(f"the kernel warned {times} {where}, last {last}")
    if subject.lost:
        words.append(f"{', '.join(subject.lost)}, which the log no longer has")
    return "; ".join(words)


def _kernel_warnings_evidence(subject: _Warnings) -> Iterator[str]:
    places = [*_places(subject.events)]
    if len(places) > 1:
        for place, count in places[:_PLACES]:
            yield f"{count_text(count, 'time')} in {place}"
    elif subject.events:
        yield said(subject.events[-1])


KERNEL_WARNINGS = VerdictRule(
    code="kernel-warnings",
    needs=(),
    when=_kernel_warnings_when,
    severity="info",
    confidence="exact",
    words=_kernel_warnings_words,
    evidence=_kernel_warnings_evidence,
    see=lambda subject: ("report", "--full"),
)


# --- Errors of hardware, disks and file systems, in a log without its kernel.
#
# For a dump or a running kernel there is better evidence: I/O that does not end,
# poisoned pages, tasks in state D.


_DEVICE_ERRORS: tuple[tuple[str, str], ...] = (
    (
        # drivers/edac, arch/x86/kernel/cpu/mce, drivers/firmware/efi/cper.c
        "hardware error",
        (
            r"mce: \[Hardware Error\]|\{\d+\}\[Hardware Error\]: event severity|"
            r"EDAC \w*\d: \d+ [CU]E |Memory failure: 0x|"
            r".*[Mm]achine check events logged|.*PCIe Bus Error: severity=|"
            r"\S+ [\da-f:.]+: AER: (Multiple )?Uncorrect|"
            r"NVRM: Xid |thermal thermal_zone\d+: .*critical temperature"
        ),
    ),
    (
        # block/blk-core.c, fs/buffer.c, drivers/nvme/host, drivers/scsi, drivers/ata,
        # drivers/md. A virtual machine may have a floppy drive that nobody needs.
        "I/O error",
        (
            r"(blk_update_request: |print_req_error: |end_request: )?"
            r"(I/O|critical \w+) error, dev (?!fd\d)|md/\w+:\w+: Disk failure on |"
            r"Buffer I/O error on dev(ice)? (?!fd\d)|"
            # At each boot: "Shutdown timeout set to 8 seconds".
            r"nvme\w*( nvme\d+)?: .*((?<!Shutdown )timeout|I/O Error|"
            r"controller is down|Device not ready)|"
            r"sd [\d:]+: .*(rejecting I/O|FAILED Result)|"
            r"ata\d+(\.\d+)?: (exception|failed)"
        ),
    ),
    (
        # fs/ext4/super.c, fs/xfs, fs/btrfs, fs/jbd2, net/sunrpc/clnt.c
        "error of a file system",
        (
            r"EXT[234]-fs (error|\(.*Remounting filesystem read-only)|"
            r"Aborting journal on device|JBD2: .*[Ee]rror|"
            r"XFS \(.*(orruption|shut.?down|metadata I/O error|Metadata CRC error)|"
            r"EXT4-fs warning .*: I/O error|SQUASHFS error|"
            r"nfs: server .* not responding|CIFS: .* has not responded|"
            r"BTRFS (error|critical)|F2FS-fs \(.*(orrupt|inconsisten)"
        ),
    ),
)
_ERRORS_SHOWN = 4


class DeviceErrors(Struct, frozen=True):
    """Lines of one kind in a log."""

    kind: str
    lines: list[LogRecord]
    parts: ReportParts

    @property
    def line(self) -> int:
        """Line number of the first error in the text."""
        return self.lines[0].line


def device_errors(parts: ReportParts) -> Iterator[DeviceErrors]:
    """Yield the errors of hardware, disks and file systems in a log, by kind."""
    if parts.target.kind != "log":
        return
    found: dict[str, list[LogRecord]] = {kind: [] for kind, _ in _DEVICE_ERRORS}
    # Compiled here, not on import: few targets are logs.
    compiled = [(kind, re.compile(words)) for kind, words in _DEVICE_ERRORS]
    for record in parts.log:
        if record.is_kernel:
            for kind, words in compiled:
                if words.match(record.text):
                    found[kind].append(record)
                    break
    for kind, lines in found.items():
        if lines:
            yield DeviceErrors(kind, lines, parts)


def _device_errors_words(subject: DeviceErrors) -> str:
    kind = subject.kind.partition(" of ")
    what = count_text(len(subject.lines), kind[0]) + kind[1] + kind[2]
    last = ago(subject.parts, subject.lines[-1].time_ns)
    return f"the log has {what}, the last {last}"


def _device_errors_evidence(subject: DeviceErrors) -> Iterator[str]:
    for record in subject.lines[:_ERRORS_SHOWN]:
        yield f"{record.text.strip()} (line {record.line})"
    if left := len(subject.lines[_ERRORS_SHOWN:]):
        yield f"… {count_text(left, 'more line')}"


DEVICE_ERRORS = VerdictRule(
    code="device-errors",
    needs=(),
    when=device_errors,
    severity="warning",
    confidence="exact",
    words=_device_errors_words,
    evidence=_device_errors_evidence,
    see=lambda subject: ("report", "-v"),
)


# --- The dump is cut off or damaged, so that parts are missing.


_LISTS = (Loss.LISTS, Loss.TREES, Loss.TASKS, Loss.NODES, Loss.SECTION_TABLE)
"""Losses that no dump level explains: the kernel's own structures are broken."""

_ZERO_PAGES = 1
"""``makedumpfile -d 1``: only zero pages are excluded."""


class _Damage(Struct, frozen=True):
    parts: ReportParts
    losses: dict[str, int]

    @property
    def is_filtered_too_much(self) -> bool:
        """Whether the file is whole, but more than zero pages were filtered out."""
        target = self.parts.target
        is_whole = not target.truncated and not target.bad_descriptors
        return is_whole and (target.dump_level or 0) > _ZERO_PAGES


def _dump_damaged_when(parts: ReportParts) -> Iterator[_Damage]:
    target = parts.target
    if target.live or target.kind == "log":
        # If a log is too long, a note says how much of it was not read.
        return
    counted = {loss.value: parts.coverage.get(loss.value, 0) for loss in _LISTS}
    losses = {key: count for key, count in counted.items() if count}
    if target.truncated or target.bad_descriptors or losses:
        yield _Damage(parts, losses)


def _dump_damaged_words(subject: _Damage) -> str:
    if subject.parts.target.lacks_parts:
        return "parts of the split dump are missing: put all into one directory"
    if subject.parts.target.truncated:
        return "the dump is cut off: part of memory is missing"
    if subject.parts.target.bad_descriptors:
        return "the dump's file is damaged: some of its pages cannot be read"
    return "lists of the kernel are broken in the dump: some of it is missing here"


def _dump_damaged_evidence(subject: _Damage) -> Iterator[str]:
    bad = subject.parts.target.bad_descriptors
    if bad:
        yield f"{bad:,} pages are not in the file, or have impossible sizes"
    if subject.parts.target.torn:
        yield "the memory was copied while the kernel ran on: it is of many moments"
    for key, count in subject.losses.items():
        yield f"{key.replace('_', ' ')}: {count:,}"
    for part, why in subject.parts.errors.items():
        yield f"{part}: {why}"
    if subject.is_filtered_too_much:
        yield (
            "a makedumpfile that is older than the kernel leaves out pages that are "
            "needed: take the next dump with a newer one, or with -d 1"
        )


DUMP_DAMAGED = VerdictRule(
    code="dump-damaged",
    needs=(),
    when=_dump_damaged_when,
    severity="warning",
    confidence="exact",
    words=_dump_damaged_words,
    evidence=_dump_damaged_evidence,
    see=lambda subject: ("memstat", "-v"),
)
