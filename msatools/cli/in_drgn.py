# SPDX-License-Identifier: LGPL-2.1-or-later

"""Execution of a command as ``%command`` at drgn's prompt."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Generic

from drgn import Program, ProgramFlags
from drgn.commands import CommandArgumentError, CommandError

from msatools.cli.arguments import make_parser, refuse_excluded
from msatools.cli.command import Answer, Command, R
from msatools.cli.execution import check, chosen, instead, print_answer
from msatools.cli.main import is_expected
from msatools.cli.output import OutputClosed, OutputError
from msatools.cli.runner import RunResult, print_report, run
from msatools.cli.usage import Asked, UsageError
from msatools.cli.words import parse_words
from msatools.faults import fault_of
from msatools.render.blocks import escape
from msatools.render.json import Document
from msatools.reports.presented import Presented
from msatools.selfdesc import is_served_by_btf
from msatools.target import TargetError, describe

_KEPT = "msatools.reports"
"""Key of the program's cache."""

_ABOUT_OUTPUT = ("--json", "--strict")
"""Options on which a report does not depend."""

_WHAT_TO_DO = "send its authors this, and the traceback above"

_SHOWN_AS_TEXT: set[type] = set()


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
    _show_as_text(Presented)
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
    kept = _KeptReports(prog, command, argv, is_kept=args.record is None)
    try:
        if (report := kept.find()) is not None:
            seen.last, seen.incomplete = report, command.problems(report)
            command.keep(report, args)
            print_report(command, report, args)
        else:
            run(command, prog, describe(prog), args, words, seen)
            kept.keep(seen)
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


class _KeptReports(Generic[R]):
    """The last report of a command, which the same command prints again.

    A dump does not change; a running kernel does, and its reports are not kept. Another
    source of types makes other reports.
    """

    def __init__(
        self, prog: Program, command: Command[R], argv: Sequence[str], *, is_kept: bool
    ) -> None:
        self._name = command.name
        self._argv = tuple(word for word in argv if word not in _ABOUT_OUTPUT)
        self._is_kept = is_kept and not prog.flags & ProgramFlags.IS_LIVE
        self._prog = prog
        self._all: dict[str, tuple[Any, R]] = prog.cache.setdefault(_KEPT, {})

    def find(self) -> R | None:
        """Return the report of the same arguments; ``None`` if there is none."""
        if not self._is_kept or self._name not in self._all:
            return None
        key, report = self._all[self._name]
        return report if key == self._key() else None

    def keep(self, seen: RunResult[R]) -> None:
        """Keep a report that no fault of msatools cost a part of."""
        if self._is_kept and seen.last is not None and not seen.faults:
            self._all[self._name] = self._key(), seen.last

    def _key(self) -> tuple[object, ...]:
        return self._argv, is_served_by_btf(self._prog)


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


def _show_as_text(kind: type) -> None:
    """Have drgn's prompt, if there is one, show values of a class as ``str()`` does."""
    display_str = getattr(sys.modules.get("drgn.cli"), "display_str", None)
    if display_str is not None and kind not in _SHOWN_AS_TEXT:
        _SHOWN_AS_TEXT.add(display_str(kind))
