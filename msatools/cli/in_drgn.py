# SPDX-License-Identifier: LGPL-2.1-or-later

"""Execution of a command as ``%command`` at drgn's prompt."""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from drgn import Program, ProgramFlags
from drgn.commands import CommandArgumentError, CommandError

from msatools.cli.arguments import make_parser, refuse_excluded
from msatools.cli.command import Answer, Command, R
from msatools.cli.execution import check, chosen, instead, print_answer
from msatools.cli.main import is_expected
from msatools.cli.output import OutputClosed, OutputError
from msatools.cli.runner import RunResult, run
from msatools.cli.usage import Asked, UsageError
from msatools.cli.words import parse_words
from msatools.faults import fault_of
from msatools.render.blocks import escape
from msatools.render.json import Document
from msatools.target import TargetError, describe

_WHAT_TO_DO = "send its authors this, and the traceback above"


def run_in_drgn(
    command: Command[R], prog: Program, argv: Sequence[str]
) -> R | Document | None:
    """Run a command on drgn's program, and return its last report.

    If the arguments request an answer without a target, return that.

    :param argv: Arguments after the command's name.
    :raises CommandArgumentError: for wrong usage, such as a target
    :raises CommandError: if the report is not complete, with ``--strict``; if a file to
        compare cannot be read, or a file cannot be written
    :raises CommandError: for a fault of msatools, which it names
    :raises TargetError: if the program is not a kernel, or has no types
    """
    try:
        return _run(command, prog, argv)
    except Exception as error:
        if isinstance(error, CommandError) or is_expected(error):
            raise
        raise _error_of(command, f"{fault_of(error)}; {_WHAT_TO_DO}") from error


def _run(
    command: Command[R], prog: Program, argv: Sequence[str]
) -> R | Document | None:
    try:
        parser = make_parser(command, in_drgn=True)
        args = parser.parse_intermixed_args(argv)
        command = chosen(command, parser, args)
        words = parse_words(args.words)
        refuse_excluded(command, parser, args)
        if (answer := instead(command, parser, args, words, True)) is not None:
            return _answer_in_drgn(command, answer, args)
        if words.target is not None:
            raise UsageError(f"{words.target}: the target is drgn's own")
        if words.interval_s is not None and not prog.flags & ProgramFlags.IS_LIVE:
            text = f"{words.interval_s:g}: the dump does not change in an interval"
            raise UsageError(text)
        check(command, args, words)
    except Asked as asked:
        sys.stdout.write(str(asked))
        return None
    except UsageError as error:
        raise CommandArgumentError(f"%{command.name}: {escape(str(error))}") from None
    except TargetError as error:
        raise _error_of(command, str(error)) from None

    seen: RunResult[R] = RunResult()
    try:
        run(command, prog, describe(prog), args, words, seen)
    except OutputClosed:
        # As with `| head`: the report is returned all the same.
        pass
    except UsageError as error:
        # Some arguments are wrong for this target only.
        raise CommandArgumentError(f"%{command.name}: {escape(str(error))}") from None
    except OutputError as error:
        raise _error_of(command, str(error)) from None
    except KeyboardInterrupt:
        if words.interval_s is None:
            raise
    for fault in seen.faults.values():
        sys.stderr.write(fault.traceback)
        raise _error_of(command, f"{fault}; {_WHAT_TO_DO}")
    _require_complete(command, args, seen.incomplete)
    return seen.last


def _error_of(command: Command[R], why: str) -> CommandError:
    return CommandError(f"%{command.name}: {escape(why)}")


def _answer_in_drgn(
    command: Command[R], answer: Answer, args: argparse.Namespace
) -> Document:
    with contextlib.suppress(OutputClosed):
        print_answer(answer, args)
    _require_complete(command, args, answer.incomplete)
    return answer.document


def _require_complete(
    command: Command[R], args: argparse.Namespace, incomplete: bool
) -> None:
    if args.strict and incomplete:
        raise CommandError(f"%{command.name}: the report is not complete")
