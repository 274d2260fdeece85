# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on crashes, the log and the dump, and what is odd and need not be wrong.

The threshold of a rule is a constant beside it; what several rules share is in
:mod:`msatools.report.rule`, and what msa-cpus finds itself in
:mod:`msatools.cpus.diagnostics`.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from msgspec import Struct

from msatools.kernel.report import Loss
from msatools.locks.report import LockRow, LocksReport, Root, Wait
from msatools.memory.model import Check
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
    LONG_NS,
    SHOWN,
    Kind,
    ReportParts,
    VerdictRule,
    ago,
    cause_text,
    count_text,
    explained,
    fault_text,
    is_long,
    is_vfork,
    nested_text,
    pid_text,
    root_text,
    said,
    tasks_text,
    unloaded_text,
    unreclaimable,
    waits_for_text,
    who_text,
)
from msatools.report.rules.memory import MEMORY_UNRECLAIMABLE
from msatools.report.rules.waits import roots_of
from msatools.reports.units import duration, size

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
    # Tasks of other crashes run.
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
# The task that was killed by one leaves its locks locked: who waits for them waits for
# ever, and that is a consequence of the fault.


class _Oopses(Struct, frozen=True):
    events: list[Event]
    parts: ReportParts
    left: list[LockRow]
    """Locks that are still locked, and may be so because of a fault: they name a task
    that it killed; or one that does not have them and began later, so that it may have
    the ``task_struct`` of one that was killed."""


def _oops_when(parts: ReportParts) -> Iterator[_Oopses]:
    crash = parts.crash
    # Those that follow a panic are faults of panic() itself.
    before = list(takewhile(lambda event: not event.is_panic, parts.events))
    survived = [
        event
        for event in (parts.events if crash is None else before)
        if event.cause in OOPSES and not event.is_panic and not _is_told(event, crash)
    ]
    if survived:
        yield _Oopses(survived, parts, _left(parts, survived))


def _is_told(event: Event, crash: CrashDetails | None) -> bool:
    """Return whether an event is what the crash is told as."""
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
    """Map each process to when it began, by CLOCK_MONOTONIC."""
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
"""What a taint says (kernel/panic.c, taint_flags), and which events are that."""


class _Warnings(Struct, frozen=True):
    events: list[Event]
    """Warnings of the log."""

    lost: list[str]
    """What happened by the kernel's taints, and is in no line of the log."""

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
# Of a dump and of a running kernel there are better witnesses: I/O that does not end,
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
        """Number of the first of them in the text."""
        return self.lines[0].line


def device_errors(parts: ReportParts) -> Iterator[DeviceErrors]:
    """Yield the errors of hardware, disks and file systems in a log, by kind."""
    if parts.target.kind != "log":
        return
    found: dict[str, list[LogRecord]] = {kind: [] for kind, _ in _DEVICE_ERRORS}
    # Few targets are logs: compiled when they are imported, all would wait for them.
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
        """Whether the dump is whole, and pages that hold lists were filtered out."""
        target = self.parts.target
        is_whole = not target.truncated and not target.bad_descriptors
        return is_whole and (target.dump_level or 0) > _ZERO_PAGES


def _dump_damaged_when(parts: ReportParts) -> Iterator[_Damage]:
    target = parts.target
    if target.live or target.kind == "log":
        # Of a log that is too long a note says what was not read.
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


# --- What is out of the ordinary and need not be wrong: none of it is a false all-
# clear.
#
# A page that found nothing would send its reader away, although what the commands
# summarize on it is odd.


_MUCH_KERNEL = 0.15
"""Share of managed memory that the kernel itself has and reclaim cannot free."""

_MUCH_UNATTRIBUTED = 0.02
"""Share of managed memory that no owner explains: it is below 0.01 on kernels without
a leak."""

_UNATTRIBUTED_PAGES = 4096
"""Fewer are a driver's in any small machine."""

_SHOWN = 3

_A_WHILE_NS = 2_000_000_000
"""Most I/O takes milliseconds."""


# --- Hung tasks, and the roots that they wait for.


class _HeldUp(Struct, frozen=True):
    locks: LocksReport
    roots: list[Root]
    pids: set[int]


def _held_up(parts: ReportParts) -> Iterator[_HeldUp]:
    """Yield the tasks that have long waited for others, and that no verdict names."""
    locks = parts.locks
    assert locks is not None
    named = explained(parts)
    waits = {
        wait.pid
        for wait in locks.waits
        # Those in state D are hung tasks.
        if is_long(wait) and wait.state != "D" and wait.pid not in named
    }
    # What hung tasks wait for is named with them.
    hung = {wait.pid for wait in locks.waits if _is_hung(wait, named)}
    roots = [
        root
        for root in locks.roots
        if root.kind == "task" and root.external is None and waits & _held_up_by(root)
        if not hung & {*root.behind}
    ]
    pids = {pid for root in roots for pid in _held_up_by(root) & waits}
    if pids:
        yield _HeldUp(locks, roots, pids)


def _is_hung(wait: Wait, named: Container[int]) -> bool:
    """Return whether hung-tasks has a wait.

    :param named: The tasks whose waits other verdicts explain.
    """
    return is_long(wait) and wait.state == "D" and wait.pid not in named


def _behind(locks: LocksReport, root: Root) -> Iterator[Wait]:
    behind = {*root.behind}
    yield from (wait for wait in locks.waits if wait.pid in behind)


def _held_up_by(root: Root) -> set[int]:
    """Return the IDs of the tasks that wait for a task, directly or not."""
    return {*root.behind} - {root.pid}


def _held_up_text(subject: _HeldUp) -> str:
    ages = [wait.age_ns for wait in subject.locks.waits if wait.pid in subject.pids]
    count = len(subject.pids)
    have = "has" if count == 1 else "have"
    return (
        f"{count_text(count, 'task')} {have} waited for "
        f"{count_text(len(subject.roots), 'other task')} for {duration(LONG_NS)} or "
        f"longer; the longest for {duration(max(ages))}"
    )


def _held_up_evidence(subject: _HeldUp) -> Iterator[str]:
    for root in subject.roots[:_SHOWN]:
        count = len(subject.pids & _held_up_by(root))
        yield waits_for_text(count, root_text(root))
    left = len(subject.roots) - _SHOWN
    if left > 0:
        yield f"… {count_text(left, 'more task')} that others wait for"


class _Uninterruptible(Struct, frozen=True):
    locks: LocksReport
    waits: list[Wait]
    """The longest first."""


def _uninterruptible(parts: ReportParts) -> Iterator[_Uninterruptible]:
    """Yield the tasks in state D for a while, which are no hung tasks yet."""
    assert parts.locks is not None
    named = explained(parts)
    for root in parts.locks.roots:
        # What hung tasks wait for is named with them.
        if any(_is_hung(wait, named) for wait in _behind(parts.locks, root)):
            named |= {*root.behind}
    waits = [
        wait
        for wait in parts.locks.waits
        if wait.state == "D"
        and is_long(wait, _A_WHILE_NS)
        and wait.age_ns < LONG_NS
        and wait.pid not in named
        and not is_vfork(wait)
    ]
    if waits:
        waits.sort(key=lambda wait: -wait.age_ns)
        yield _Uninterruptible(parts.locks, waits)


def _uninterruptible_text(subject: _Uninterruptible) -> str:
    count, oldest = len(subject.waits), subject.waits[0]
    if count == 1:
        who = pid_text(oldest.pid, oldest.comm)
        return f"{who} has been in state D for {duration(oldest.age_ns)}"
    return (
        f"{count_text(count, 'task')} have been in state D for "
        f"{duration(_A_WHILE_NS)} or longer; the longest is "
        f"{pid_text(oldest.pid, oldest.comm)}, {duration(oldest.age_ns)}"
    )


def _uninterruptible_evidence(subject: _Uninterruptible) -> Iterator[str]:
    lines = [*roots_of(subject.locks, subject.waits)]
    yield from lines[:_SHOWN]
    if left := len(lines[_SHOWN:]):
        yield f"… {count_text(left, 'more root')} of waits"


# --- memory


class _KernelMemory(Struct, frozen=True):
    parts: ReportParts
    largest: Kind
    pages: int
    managed: int


def _kernel_memory(parts: ReportParts) -> Iterator[_KernelMemory]:
    assert parts.memory is not None
    managed = sum(zone.managed for zone in parts.memory.zones)
    kinds = [kind for kind in unreclaimable(parts) if kind.is_kernel]
    pages = sum(kind.pages for kind in kinds)
    # What cannot be reclaimed where memory is low is a verdict of its own.
    if managed and pages >= _MUCH_KERNEL * managed and not any(_worse(parts)):
        yield _KernelMemory(parts, kinds[0], pages, managed)


def _worse(parts: ReportParts) -> Iterable[object]:
    return MEMORY_UNRECLAIMABLE.when(parts)


def _kernel_text(subject: _KernelMemory) -> str:
    page = subject.parts.target.page_size
    return (
        f"the kernel itself holds {size(subject.pages * page)} "
        f"({100 * subject.pages / subject.managed:.0f} % of memory), which cannot be "
        f"reclaimed; the largest part is {subject.largest.name}, "
        f"{size(subject.largest.pages * page)}"
    )


def _kernel_evidence(subject: _KernelMemory) -> Iterator[str]:
    """Yield the kernel's own parts: what is locked or anonymous is not of it."""
    page = subject.parts.target.page_size
    kinds = [kind for kind in unreclaimable(subject.parts) if kind.is_kernel]
    yield "; ".join(f"{size(k.pages * page)} {k.name}" for k in kinds[:SHOWN])


def _kernel_see(subject: _KernelMemory) -> tuple[str, ...]:
    return ("memstat", *subject.largest.view)


class _Unattributed(Struct, frozen=True):
    pages: int
    managed: int
    page_size: int


def _unattributed(parts: ReportParts) -> Iterator[_Unattributed]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}
    managed, found = parts.memstat.managed_pages, pages["kernel.unattributed"]
    limit = max(_MUCH_UNATTRIBUTED * (managed or 0), _UNATTRIBUTED_PAGES)
    if managed and found >= limit:
        yield _Unattributed(found, managed, parts.target.page_size)


def _unattributed_text(subject: _Unattributed) -> str:
    share = 100 * subject.pages / subject.managed
    return (
        f"{size(subject.pages * subject.page_size)} of kernel memory ({share:.1f} % of "
        "memory) have no known owner"
    )


def _unexplained(parts: ReportParts) -> Iterator[tuple[Check, bool]]:
    assert parts.memstat is not None
    for check in parts.memstat.checks:
        if check.difference and check.explained_by is None:
            yield check, bool(parts.target.torn)


def _unexplained_text(found: tuple[Check, bool]) -> str:
    check, is_torn = found
    text = (
        f"{check.name}: the scan found {check.walk_pages:,} pages, the kernel's "
        f"counter {check.counter} says {check.kernel_pages or 0:,} "
        f"({check.difference or 0:+,})"
    )
    return text if is_torn else f"{text}, and no known reason explains it"


OBSERVATIONS: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="blocked-tasks",
        needs=("locks",),
        when=_held_up,
        severity="info",
        confidence="likely",
        words=_held_up_text,
        evidence=_held_up_evidence,
        see=lambda subject: ("locks", "--chains"),
    ),
    VerdictRule(
        code="blocked-tasks",
        needs=("locks",),
        when=_uninterruptible,
        severity="info",
        confidence="exact",
        words=_uninterruptible_text,
        evidence=_uninterruptible_evidence,
        see=lambda subject: ("locks", "--chains", "--state", "D"),
    ),
    VerdictRule(
        code="kernel-memory",
        needs=("memory", "memstat"),
        when=_kernel_memory,
        severity="info",
        confidence="exact",
        words=_kernel_text,
        evidence=_kernel_evidence,
        see=_kernel_see,
    ),
    VerdictRule(
        code="memory-unattributed",
        needs=("memstat",),
        when=_unattributed,
        severity="info",
        confidence="exact",
        words=_unattributed_text,
        evidence=lambda subject: (
            "a driver's own pages, or pages that a module leaked",
        ),
        see=lambda subject: ("memstat", "--unattributed"),
    ),
    VerdictRule(
        code="counter-unexplained",
        needs=("memstat",),
        when=_unexplained,
        severity="info",
        confidence="exact",
        words=_unexplained_text,
        evidence=lambda found: (
            "the memory is torn: pages and counters are of different moments"
            if found[1]
            else "damage, a race with a running kernel, or a fault of msatools",
        ),
        see=lambda found: ("memstat", "-v"),
    ),
)
