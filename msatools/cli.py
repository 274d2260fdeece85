# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run a command, for its console script and as ``%command`` at drgn's prompt.

A command is a table (:class:`Command`): its arguments, what starts its runs, what
renders its reports. All that commands have in common is here and in what this calls:
the words they take, the target, intervals, exit status and signals.
"""

import argparse
import contextlib
import logging
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from drgn import FaultError, Program, ProgramFlags
from drgn.commands import CommandArgumentError, CommandError

from msatools.arguments import (
    Asked,
    UsageError,
    Words,
    make_parser,
    parse_words,
    target_spec,
)
from msatools.command import Command, Compared, Progress, R, Session
from msatools.intervals import reports
from msatools.output import OutputClosed, OutputError, ProgressLine, output
from msatools.render import json, show
from msatools.render.blocks import escape, text
from msatools.selfdesc import BtfError
from msatools.signals import Stopped, end_by, stop_on_signals
from msatools.target import Target, TargetError, describe, open_target
from msatools.target.errors import DamagedDumpError, damaged_types

__all__ = [
    "Command",
    "Compared",
    "Progress",
    "Session",
    "UsageError",
    "Words",
    "make_parser",
    "parse_words",
    "run_console",
    "run_in_drgn",
]

EXIT_DONE = 0
EXIT_TARGET = 1
EXIT_USAGE = 2
EXIT_INCOMPLETE = 3

T = TypeVar("T")


def run_console(command: Command[R], argv: Sequence[str] | None = None) -> int:
    """Run a command with a shell's words, and give its exit status.

    A signal that stops a run without an interval ends the process, as it would have.

    :param argv: the words after the command's name, those of the process by default
    """
    argv = sys.argv[1:] if argv is None else argv
    name = f"msa-{command.name}"
    debug = "--debug" in argv
    # drgn's own warnings are for its prompt; what matters of them is in our errors.
    logging.getLogger("drgn").setLevel(
        logging.WARNING if debug else logging.CRITICAL + 1
    )
    try:
        with stop_on_signals() as came:
            return _run(command, argv, came)
    except Stopped as stopped:
        return end_by(stopped.number)
    except OutputClosed:
        return end_by(signal.SIGPIPE)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"{name}: {escape(_explain(error, name))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_TARGET


def _explain(error: Exception, name: str) -> str:
    if isinstance(error, UsageError):
        return f"{error}; see {name} --help"
    if isinstance(error, (TargetError, OutputError)):
        return str(error)
    kind = type(error).__name__
    return f"unexpected {kind}: {error}; run it with --debug and report this"


def _run(command: Command[R], argv: Sequence[str], came: list[int]) -> int:
    try:
        args = make_parser(command, in_drgn=False).parse_intermixed_args(argv)
    except Asked as asked:
        with output() as out:
            out.write(str(asked))
        return EXIT_DONE
    words = parse_words(args.words)
    spec = target_spec(args, words)
    _check(command, args, words)
    seen: _Seen[R] = _Seen()
    try:
        opened = open_target(spec)
        if came:
            raise Stopped(came[0])
        _report(command, opened.prog, opened.target, args, words, seen)
    except Stopped:
        if words.interval_s is None:
            raise
    return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE


def _check(command: Command[R], args: argparse.Namespace, words: Words) -> None:
    complaint = command.complaint(args, words.interval_s is not None)
    if complaint is not None:
        raise UsageError(complaint)


def run_in_drgn(command: Command[R], prog: Program, argv: Sequence[str]) -> R | None:
    """Run a command on drgn's program, and give its (last) report.

    :param argv: the words after the command's name
    :raises CommandArgumentError: for wrong usage, a target included
    :raises CommandError: with ``--strict``, if the report is not complete
    :raises TargetError: if the program is no kernel, or has no types
    """
    try:
        args = make_parser(command, in_drgn=True).parse_intermixed_args(argv)
        words = parse_words(args.words)
        if words.target is not None:
            raise UsageError(f"{words.target}: the target is drgn's own")
        if words.interval_s is not None and not prog.flags & ProgramFlags.IS_LIVE:
            raise UsageError("prog: a dump does not change in an interval")
        _check(command, args, words)
    except Asked as asked:
        sys.stdout.write(str(asked))
        return None
    except UsageError as error:
        raise CommandArgumentError(f"%{command.name}: {escape(str(error))}") from None

    seen: _Seen[R] = _Seen()
    try:
        _report(command, prog, describe(prog), args, words, seen)
    except OutputClosed:
        # As with `| head`, which is no reason to lose the report.
        pass
    except KeyboardInterrupt:
        if words.interval_s is None:
            raise
    if args.strict and seen.incomplete:
        raise CommandError(f"%{command.name}: the report is not complete")
    return seen.last


@dataclass
class _Seen(Generic[R]):
    """What is known of the reports so far, however the run ends."""

    last: R | None = None
    incomplete: bool = False


def _report(
    command: Command[R],
    prog: Program,
    target: Target,
    args: Namespace,
    words: Words,
    seen: _Seen[R],
) -> None:
    """Collect and print one report, or one after each interval until the end."""

    def call(collect: Callable[[Progress], T]) -> T:
        with (
            _errors_of(target),
            ProgressLine(command.name, sys.stderr) as progress,
        ):
            return collect(progress)

    def deliver(report: R) -> None:
        seen.last = report
        seen.incomplete |= command.problems(report)
        with output() as out:
            if args.json:
                json.show(report, out)
            else:
                if words.interval_s is not None:
                    show([text(time.strftime("%H:%M:%S"))], out)
                show(command.blocks(report, args), out)

    session = call(lambda _: command.start(prog, target, args))
    if words.interval_s is None:
        deliver(call(session.report))
        return
    each = reports(session, words.interval_s, words.count, call)
    # However it ends, the terminal is as it was before anything else happens.
    with contextlib.closing(each):
        for report in each:
            deliver(report)


@contextlib.contextmanager
def _errors_of(target: Target) -> Iterator[None]:
    """Put into words what keeps a report of a target from being made."""
    try:
        yield
    except FaultError as error:
        raise _unreadable(target, error) from error
    except LookupError as error:
        raise TargetError(
            target.path,
            f"its kernel or its types lack something ({error})",
            "name the full vmlinux with -s, if you did not",
        ) from error
    except BtfError as error:
        raise damaged_types(target.path, error) from error
    except OSError as error:
        if not target.live:
            raise
        raise TargetError(
            target.path, f"the kernel is gone: {error.strerror}", "start it again"
        ) from error


def _unreadable(target: Target, error: FaultError) -> TargetError:
    """Put into words that what no report can do without is not there."""
    if target.truncated:
        return DamagedDumpError(
            target.path, "cut off, and too little is left", "copy the dump again"
        )
    return TargetError(
        target.path,
        f"it lacks memory that the report needs ({error})",
        "take a dump that leaves less out" if not target.live else "try again",
    )
