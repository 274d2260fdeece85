# SPDX-License-Identifier: LGPL-2.1-or-later

"""One run of a command on an opened target: its reports, until it ends."""

import contextlib
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar

from drgn import Program
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.cli.arguments import make_parser
from msatools.cli.command import Command
from msatools.cli.intervals import Plan, reports
from msatools.cli.output import ProgressLine, device, output, print_blocks
from msatools.cli.recording import Recorder
from msatools.cli.screen import Appended, Display, JsonLines, Screen, can_redraw, footer
from msatools.cli.signals import stop_if_told, whole
from msatools.cli.words import Words
from msatools.errors import UNREADABLE
from msatools.faults import OwnFault
from msatools.kernel.report import Cost
from msatools.kernel.session import Progress, R
from msatools.render import json
from msatools.render.blocks import Block
from msatools.selfdesc import BtfError
from msatools.target import Target, TargetError, kcore, qmp
from msatools.target.errors import damaged_types, losses_refused

T = TypeVar("T")

_TRIES = 3
"""Maximum number of attempts if memory is added or removed meanwhile, and if a running
kernel changed what is read so that it cannot be right."""

_SCREEN_ROWS = 10_000
"""Maximum number of rows for a screen by default: those that it can be scrolled and
sorted by keys among."""


class RunResult(Struct, Generic[R]):
    """The result so far, which is valid however the run ends."""

    last: R | None = None
    incomplete: bool = False
    faults: dict[str, OwnFault] = field(default_factory=dict)
    """Faults of msatools that cost a part of a report, by their text."""

    retried: int = 0
    """Attempts at the next report that came to nothing, as the kernel changed."""


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
            kcore.steady(prog),
            qmp.steady(prog),
            ProgressLine(command.name, sys.stderr) as progress,
        ):
            return collect(progress)

    def call(collect: Callable[[Progress], T]) -> T:
        for _ in range(_TRIES - 1 if target.live else 0):
            try:
                return call_once(collect)
            except TargetError as error:
                # A running kernel may have changed them while they were read.
                if not isinstance(error.__cause__, UNREADABLE):
                    raise
                seen.retried += 1
        return call_once(collect)

    def again(collect: Callable[[Progress], T]) -> T:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(kcore.MovedError):
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


def print_report(command: Command[R], report: R, args: Namespace) -> None:
    """Print the only report of a run."""
    with output() as out:
        if args.json:
            json.show(report, out)
        else:
            print_blocks(shown_blocks(command, report, args), out, args)


def shown_blocks(command: Command[R], report: R, args: Namespace) -> Iterable[Block]:
    """Return the blocks of a report, with -v what the names in them mean."""
    blocks = command.blocks(report, args)
    if not args.verbose:
        return blocks
    from msatools.legends import legend_of
    from msatools.render.legend import with_key

    return with_key(blocks, legend_of(command.name))


def recording(
    name: str, path: str | None
) -> contextlib.AbstractContextManager["Recorder | None"]:
    """Begin a recording, if one was requested."""
    return contextlib.nullcontext() if path is None else Recorder(path, name)


def _unchosen(command: Command[R], args: Namespace) -> Namespace:
    """Return the arguments without those that select, which are applied later."""
    parser = make_parser(command, in_drgn=True)
    defaults = {name: parser.get_default(name) for name in command.recorded.choosing}
    return Namespace(**{**vars(args), **defaults})


def _display(command: Command[R], args: Namespace, interval_s: float) -> Display[R]:
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
    """Return what has a command show other columns; ``None`` if it has no ``-o``."""
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
    """Convert what the target lacks or has damaged to :class:`TargetError`."""
    with losses_refused(target.path, live=target.live, truncated=target.truncated):
        try:
            yield
        except BtfError as error:
            raise damaged_types(target.path, error) from error
