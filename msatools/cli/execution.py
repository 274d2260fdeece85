# SPDX-License-Identifier: LGPL-2.1-or-later

"""One run of a command: evaluates its arguments, collects and prints reports."""

import argparse
import contextlib
import logging
import os
import random
import re
import resource
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from drgn import Program
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.cli.arguments import Answer, Command, make_parser, refuse_excluded
from msatools.cli.main import EXIT_DONE, EXIT_TARGET, failed, say_faults
from msatools.cli.options import (
    UsageError,
    Words,
    is_recording,
    named_targets,
    parse_words,
    refuse_in_sandbox,
    refuse_kernel,
    refuse_target,
    target_path,
    target_spec,
)
from msatools.cli.output import (
    OutputClosed,
    ProgressLine,
    Stopped,
    device,
    output,
    print_blocks,
    stop_if_told,
    told_first,
    whole,
)
from msatools.errors import UNREADABLE, OwnFault
from msatools.kernel.report import Cost, Note, Progress, R, Report, Session, spoils
from msatools.program import Target, TargetError, TargetSpec, open_target
from msatools.program.model import MovedError, damaged_types, losses_refused
from msatools.render.blocks import Block
from msatools.selfdesc import BtfError

if TYPE_CHECKING:
    from msatools.cli.recording import Recorder
    from msatools.cli.screen import Display
    from msatools.program.log_text import LogBytes

# --- Whether a report is incomplete, for the exit status with --strict.


def is_incomplete(report: Report) -> bool:
    """Return whether anything was lost, or the dump is truncated."""
    live = report.target.live
    lost = any(count and spoils(key, live) for key, count in report.coverage.items())
    return lost or report.target.truncated


# --- CPU time and memory of a run, and the limit of its CPU time.


NICENESS = 5
"""Nice value of a run. A task of nice 0 gets three times as much of a CPU that it
shares with the run; a report still takes only seconds if all CPUs are busy."""

SECOND_NS = 10**9
WINDOW_S = 30.0
"""Length of the sliding window in which a run stays within its share of a CPU."""

_MARK_S = 0.25
"""Minimum time between two kept :class:`CpuMark`."""


class CpuMark(NamedTuple):
    """CPU time used by the run up to a moment."""

    at_s: float
    """The moment, by the monotonic clock."""

    used_s: float


def be_nice() -> None:
    """Raise the nice value, unless the user has changed it."""
    if os.nice(0) == 0:
        os.nice(NICENESS)


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process; ``None`` without /proc.

    getrusage() would count the memory of the parent at fork(), too.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def cpu_ns() -> int:
    """Return the CPU time of this process and its reaped children, in ns."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round(
        (children.ru_utime + children.ru_stime) * SECOND_NS
    )


class Pace:
    """Delays the reports and samples of a run to keep it within its share of a CPU.

    There are two rules. After each report and sample, the run waits until the CPU time
    since the start of the report is within the share: this spreads the load evenly. And
    no window of :data:`WINDOW_S` exceeds the share, if the next report costs as much as
    the last. If a report alone costs more than the share of a whole window, only the
    first rule applies, and the run waits for longer than a window.

    :param share: Maximum share of one CPU; ``None`` for no limit.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._last_ns = time.monotonic_ns(), cpu_ns()
        self._marks: deque[CpuMark] = deque()
        """Marks within the last window, and one before it."""

        self.start()

    def start(self) -> None:
        """Begin a report."""
        self._started = self._mark()
        self._report_s: float | None = None
        """CPU time of the report, once known."""

    @property
    def earliest_s(self) -> float:
        """The earliest start of the next report or sample, by the monotonic clock."""
        if self._share is None:
            return self._started.at_s
        now = self._mark()
        used_s = now.used_s - self._started.used_s
        if self._report_s is None:
            self._report_s = used_s
        within_share_s = self._started.at_s + used_s / self._share
        room_s = self._share * WINDOW_S - self._report_s
        return max(within_share_s, self._window_opens_s(now, room_s))

    def cost(self, began_ns: int) -> Cost:
        """Return the cost of a sample that has just ended.

        :param began_ns: Its start, by the monotonic clock.
        """
        (wall_ns, used_ns), now_ns = self._last_ns, time.monotonic_ns()
        self._last_ns = now_ns, cpu_ns()
        return Cost(
            cpu_ns=self._last_ns[1] - used_ns,
            wall_ns=now_ns - wall_ns,
            elapsed_ns=now_ns - began_ns,
            peak_bytes=peak_bytes(),
        )

    def _mark(self) -> CpuMark:
        """Return the CPU time used until now; keep the mark if the last one is old."""
        now = CpuMark(time.monotonic(), cpu_ns() / SECOND_NS)
        if not self._marks or now.at_s - self._marks[-1].at_s >= _MARK_S:
            self._marks.append(now)
        while len(self._marks) > 1 and self._marks[1].at_s <= now.at_s - WINDOW_S:
            self._marks.popleft()
        return now

    def _window_opens_s(self, now: CpuMark, room_s: float) -> float:
        """Return the monotonic time at which CPU time in the window falls to *room_s*.

        All CPU time between two marks is assumed to be used just before the second.
        """
        first = self._marks[0]
        for mark in self._marks:
            if now.used_s - mark.used_s <= room_s:
                # There was no CPU time before the first mark, or it left the window.
                return mark.at_s + (WINDOW_S if mark is not first else 0.0)
        return first.at_s


# --- Reports at intervals, with samples in between, until the user stops them.


T = TypeVar("T")


class Plan(Struct, frozen=True):
    """Interval, number and maximum CPU share of the reports."""

    interval_s: float
    count: int | None = None
    """Number of reports; ``None`` for no limit."""

    share: float | None = None
    """Maximum share of one CPU, kept by delaying reports; ``None`` for no limit."""


class Call(Protocol):
    """Calls a collecting function with a progress line; raises TargetError."""

    def __call__(self, collect: Callable[[Progress], T], /) -> T: ...


def reports(
    session: Session[R],
    plan: Plan,
    call: Call,
    again: Call,
    quit_before: Callable[[float], bool],
) -> Iterator[R]:
    """Yield the report of each interval.

    :param again: Like *call*, but may repeat the function after an error.
    :param quit_before: Waits until a time of the monotonic clock; returns whether the
        user quit before.
    """
    pace = Pace(plan.share)
    again(session.begin)
    due_s = time.monotonic()
    given, lost = 0, 0
    while given != plan.count:
        # A report that takes longer than the interval delays all later reports.
        due_s = max(due_s + plan.interval_s, time.monotonic())
        samples = _Samples(session, call, pace, due_s - time.monotonic())
        try:
            while (at_s := samples.next_s) is not None and at_s < due_s:
                if quit_before(at_s):
                    return
                samples.take()
            if quit_before(max(due_s, pace.earliest_s)):
                return
            pace.start()
            began_ns = time.monotonic_ns()
            report = samples.noted(call(session.advance))
        except MovedError:
            # Memory moved during the interval, so that its data are wrong: start anew.
            again(session.begin)
            lost += 1
            continue
        if lost:
            text = f"{lost} intervals before this are lost: memory came or went"
            report = _noted(report, "interval-lost", text)
        if report.interval_ns == 0:
            text = "the kernel's clock stands still: it is paused, or hangs"
            report = _noted(report, "clock-stands-still", text)
        given, lost = given + 1, 0
        yield replace(report, cost=pace.cost(began_ns))


def _noted(report: R, code: str, text: str) -> R:
    return replace(report, notes=(*report.notes, Note(code, text)))


class _Samples:
    """The samples within one interval: takes them, and counts lost samples."""

    def __init__(
        self, session: Session[Any], call: Call, pace: Pace, left_s: float
    ) -> None:
        self._session = session
        self._call = call
        self._pace = pace
        # The period is at most the interval: each interval has a sample, if in time.
        self._longest_s = left_s
        self._period_starts_s = time.monotonic()
        self._lost = 0
        self._why = ""
        self.next_s = self._next_time()

    def take(self) -> None:
        """Take a sample; if it takes longer than the period, the next is delayed."""
        self._call(self._sample)
        elapsed = self._period_starts_s + (self._period_s or 0)
        self._period_starts_s = max(elapsed, time.monotonic())
        self.next_s = self._next_time()

    def noted(self, report: R) -> R:
        """Return the interval's report, with a note if samples were lost."""
        if not self._lost:
            return report
        text = f"{self._lost} samples within the interval are lost: {self._why}"
        return _noted(report, "samples-lost", text)

    def _sample(self, progress: Progress) -> None:
        try:
            self._session.sample()
        except UNREADABLE as error:
            self._lost += 1
            self._why = str(error)

    @property
    def _period_s(self) -> float | None:
        period_s = self._session.period_s
        return None if period_s is None else min(period_s, self._longest_s)

    def _next_time(self) -> float | None:
        """Return a random monotonic time in the period; ``None`` without samples.

        Regular samples would always or never catch periodic work of tasks.
        """
        period_s = self._period_s
        if period_s is None:
            return None
        at_s = self._period_starts_s + random.random() * period_s
        return max(at_s, self._pace.earliest_s)


# --- One run of a command on an opened target: its reports, until it ends.


_TRIES = 3
"""Maximum attempts if memory is added or removed during a collection, and if a running
kernel changed data while they were read, so that they are inconsistent."""

_SCREEN_ROWS = 10_000
"""Default maximum of rows for the live screen, among which keys scroll and sort."""


class RunResult(Struct, Generic[R]):
    """The result of a run so far, which is valid however the run ends."""

    last: R | None = None
    incomplete: bool = False
    faults: dict[str, OwnFault] = field(default_factory=dict)
    """Faults of msatools that cost parts of a report, by their text."""

    retried: int = 0
    """Failed attempts at the next report, because the kernel changed."""


def run(
    command: Command[R],
    prog: Program,
    target: Target,
    args: Namespace,
    words: Words,
    seen: RunResult[R],
) -> None:
    """Collect and print one report, or one after each interval until the end."""

    def call_once(collect: Callable[[Progress], T]) -> T:
        with (
            _errors_of(target),
            _steady(prog, target),
            ProgressLine(command.name, sys.stderr) as progress,
        ):
            return collect(progress)

    def call(collect: Callable[[Progress], T]) -> T:
        for _ in range(_TRIES - 1 if target.live else 0):
            try:
                return call_once(collect)
            except TargetError as error:
                # A running kernel may have changed the data while they were read.
                if not isinstance(error.__cause__, UNREADABLE):
                    raise
                seen.retried += 1
        return call_once(collect)

    def again(collect: Callable[[Progress], T]) -> T:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(MovedError):
                return call(collect)
        return call(collect)

    def saw(report: R) -> R:
        if seen.retried:
            coverage = {**report.coverage, "samples_retried": seen.retried}
            report, seen.retried = replace(report, coverage=coverage), 0
        if recorder is not None:
            if seen.last is None:
                recorded.require(report, args)
            recorder.add(report)
            report = recorded.choose(report, args)
        seen.last = report
        seen.incomplete |= command.problems(report)
        seen.faults.update({fault.text: fault for fault in report.faults})
        command.keep(report, args)
        return report

    recorded = command.recorded
    display = _display(command, args, words.interval_s) if words.interval_s else None
    with recording(command.name, args.record) as recorder:
        asked = args if recorder is None else _unchosen(command, args)
        session = again(lambda _: command.start(prog, target, asked))
        if display is None or words.interval_s is None:
            report = saw(again(session.report))
            stop_if_told()
            print_report(command, report, args)
            return
        plan = Plan(words.interval_s, words.count, args.budget)
        # The terminal is restored before anything else, however the run ends.
        with display:
            for report in reports(session, plan, call, again, display.quit_before):
                # An incomplete line of JSON would break its reader.
                with whole():
                    display.show(saw(report))


def _steady(prog: Program, target: Target) -> contextlib.AbstractContextManager[None]:
    """Return a context that checks that a live target stays the same kernel."""
    if not target.live and target.kind != "qmp":
        return contextlib.nullcontext()
    from msatools.program import live

    return live.steady(prog)


def print_report(command: Command[R], report: R, args: Namespace) -> None:
    """Print the only report of a run."""
    with output() as out:
        if args.json:
            from msatools.reports import forms

            forms.show(report, out)
        else:
            print_blocks(shown_blocks(command, report, args), out, args)


# The functions below import answers, legends, live_view, recording, sandbox, screen and
# forms only if needed: these take 20 ms.


def shown_blocks(command: Command[R], report: R, args: Namespace) -> Iterable[Block]:
    """Return the blocks of a report, with -v followed by the meanings of its names."""
    blocks = command.blocks(report, args)
    if not args.verbose:
        return blocks
    from msatools.legends import legend_of
    from msatools.render.legend import with_key

    return with_key(blocks, legend_of(command.name))


def recording(
    name: str, path: str | None
) -> contextlib.AbstractContextManager["Recorder | None"]:
    """Return a context with the recorder of *path*, or ``None`` without a path."""
    if path is None:
        return contextlib.nullcontext()
    from msatools.cli.recording import Recorder

    return Recorder(path, name)


def _unchosen(command: Command[R], args: Namespace) -> Namespace:
    """Return the arguments with defaults for those that select: recordings have all."""
    parser = make_parser(command, in_drgn=True)
    defaults = {name: parser.get_default(name) for name in command.recorded.choosing}
    return Namespace(**{**vars(args), **defaults})


def _display(command: Command[R], args: Namespace, interval_s: float) -> "Display[R]":
    from msatools.cli.screen import Appended, JsonLines, Screen, can_redraw, footer

    if args.json:
        return JsonLines()

    def blocks(report: R) -> Iterable[Block]:
        return command.blocks(report, args)

    def words(cost: Cost) -> str:
        return footer(command.name, cost, args.budget)

    look = partial(device, args)
    if args.no_redraw or not can_redraw():
        return Appended(blocks, words, look)
    if getattr(args, "rows", _SCREEN_ROWS) is None:
        args.rows = _SCREEN_ROWS
    first = f"msa-{command.name}: the first sample comes after {interval_s:g} s"
    from msatools.cli.live_view import LiveView
    from msatools.legends import legend_of

    view = LiveView(legend_of(command.name), _column_chooser(command, args))
    return Screen(blocks, words, look, first, view)


def _column_chooser(
    command: Command[R], args: Namespace
) -> Callable[[str], str | None] | None:
    """Return a function that sets the columns to show; ``None`` without ``-o``.

    The function returns an error message, or ``None``.
    """
    parser = make_parser(command, in_drgn=True)
    option = next((each for each in parser._actions if each.dest == "columns"), None)
    parse = None if option is None else option.type
    if not callable(parse):
        return None
    usual = args.columns

    def choose(names: str) -> str | None:
        try:
            args.columns = parse(names) if names else usual
        except (ArgumentTypeError, ValueError) as error:
            return str(error)
        return None

    return choose


@contextlib.contextmanager
def _errors_of(target: Target) -> Iterator[None]:
    """Convert errors about missing or damaged data to :class:`TargetError`."""
    with losses_refused(target.path, live=target.live, truncated=target.truncated):
        try:
            yield
        except BtfError as error:
            raise damaged_types(target.path, error) from error


# --- Executes the arguments of a command: a report of a target, or an answer without.
#
# This module handles the parts common to all commands: the target, intervals, and
# whether a report is complete.


EXIT_INCOMPLETE = 3

STDIN = "-"
"""The target that is standard input, of commands that read logs."""


def execute(
    command: Command[R],
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
) -> int:
    """Execute a command with parsed shell arguments, and return the exit status."""
    # drgn's warnings are for its prompt; our errors include the relevant ones.
    logging.getLogger("drgn").setLevel(
        logging.WARNING if args.debug else logging.CRITICAL + 1
    )
    command = chosen(command, parser, args)
    words = parse_words(args.words)
    refuse_excluded(command, parser, args)
    answer = instead(command, parser, args, words, bool(named_targets(args)))
    if answer is not None:
        print_answer(answer, args)
        return EXIT_INCOMPLETE if args.strict and answer.incomplete else EXIT_DONE
    path = target_path(args, words)
    if path is not None and is_recording(path):
        refuse_kernel(args, words, path)
        check(command, args, words)
        seen: RunResult[R] = RunResult()
        from msatools.cli.answers import replay

        replay(command, path, args, seen)
        return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE
    spec = target_spec(args, words)
    if command.reads_logs:
        spec = replace(spec, takes_logs=True, text=_standard_input(spec))
    refuse_in_sandbox(args, parser, is_live=spec.is_live)
    check(command, args, words)
    if args.sandbox or _is_confined(command, spec, args):
        from msatools.cli.sandbox import in_sandbox

        work = partial(_sandboxed, command, spec, args, words)
        name = f"msa-{command.name}"
        is_paged = not (args.no_pager or args.json)
        return in_sandbox(name, str(spec.path), work, is_paged=is_paged)
    return _report(command, spec, args, words)


def _standard_input(spec: TargetSpec) -> "LogBytes | None":
    """Return the last part of standard input; ``None`` if it is not the target."""
    if spec.path != STDIN:
        return None
    # Imported here, because few targets are logs.
    from msatools.program.log_text import read_end

    if sys.stdin is None:
        raise UsageError(f"{STDIN}: standard input is closed")
    return read_end(sys.stdin.buffer)


def _is_confined(
    command: Command[R], spec: TargetSpec, args: argparse.Namespace
) -> bool:
    """Return whether a command reads the target in the sandbox by default.

    It does not if an option needs the network or writes files.
    """
    takes_more = args.debuginfod or args.record is not None or command.writes(args)
    if not command.sandboxed or spec.is_live or spec.qemu or takes_more:
        return False
    from msatools.cli.sandbox import binding, is_locked_down

    args.unconfined = binding() is None
    return not args.unconfined and not is_locked_down()


def _sandboxed(
    command: Command[R],
    spec: TargetSpec,
    args: argparse.Namespace,
    words: Words,
) -> int:
    try:
        return _report(command, spec, args, words)
    except (Stopped, OutputClosed):
        return EXIT_TARGET  # the parent has stopped as well
    except Exception as error:
        return failed(error, f"msa-{command.name}", debug=args.debug)


def _report(
    command: Command[R],
    spec: TargetSpec,
    args: argparse.Namespace,
    words: Words,
) -> int:
    """Open a target, print what was requested, and return the exit status."""
    seen: RunResult[R] = RunResult()
    if spec.is_live and spec.qemu is None:
        be_nice()
    try:
        with told_first():
            opened = open_target(spec)
            stop_if_told()
            run(command, opened.prog, opened.target, args, words, seen)
    except Stopped:
        if words.interval_s is None:
            raise
    if seen.faults:
        name = f"msa-{command.name}"
        return say_faults(seen.faults.values(), name, debug=args.debug)
    return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE


def chosen(
    command: Command[R],
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
) -> Command[Any]:
    """Return the command that the arguments request: the same, or its self-check."""
    if not args.self_check:
        return command
    from msatools.cli.answers import self_checking

    return self_checking(command, parser)


def instead(
    command: Command[R],
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    words: Words,
    has_target: bool,
) -> Answer | None:
    """Return the answer to ``--why`` or ``--diff``; ``None`` without them.

    :param has_target: Whether a target is named, which ``--why`` may depend on.
    """
    if args.why:
        from msatools.cli.answers import explained, refuse_others

        refuse_others(parser, args, words)
        looks = command.explains_kernel and has_target
        return None if looks else explained(command.name, args.why)
    if args.diff is None:
        return None
    refuse_target(args, words)
    check(command, args, words)
    if command.compare is not None:
        return command.compare(args)
    from msatools.cli.answers import compared

    return compared(command, args)


def print_answer(answer: Answer, args: argparse.Namespace) -> None:
    """Print an answer that needed no target, as text or JSON."""
    stop_if_told()
    with output() as out:
        if args.json:
            from msatools.reports import forms

            forms.show(answer.document, out)
        else:
            print_blocks(answer.blocks, out, args)


def check(command: Command[R], args: argparse.Namespace, words: Words) -> None:
    """Check the arguments together.

    :raises UsageError: if they contradict each other
    """
    has_interval = words.interval_s is not None
    for name, option in (("budget", "--budget"), ("no_redraw", "--no-redraw")):
        if getattr(args, name) and not has_interval:
            raise UsageError(f"{option}: it is for samples, and no INTERVAL is named")
    if has_interval and getattr(args, "no_pager", False):
        raise UsageError(
            "--no-pager: samples are never paged, and an INTERVAL is named"
        )
    if args.record is not None and (lacking := command.recorded.lacking(args)):
        raise UsageError(f"{lacking}: recordings do not have it")
    complaint = command.complaint(args, has_interval)
    if complaint is not None:
        raise UsageError(complaint)
