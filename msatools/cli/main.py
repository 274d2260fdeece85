# SPDX-License-Identifier: LGPL-2.1-or-later

"""Execution of a command, as a console script and as ``%command`` at drgn's prompt.

A command is described by a :class:`Command`: its arguments, the function that starts a
run, and the one that renders a report. This module and those that it calls do what is
common to all commands: arguments, the target, intervals, exit status and signals.
"""

import argparse
import contextlib
import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

from drgn import Program, ProgramFlags
from drgn.commands import CommandArgumentError, CommandError

from msatools.cli.arguments import (
    Asked,
    UsageError,
    Words,
    make_parser,
    parse_words,
    refuse_in_sandbox,
    refuse_kernel,
    refuse_target,
    target_path,
    target_spec,
)
from msatools.cli.budget import be_nice
from msatools.cli.command import Answer, Command
from msatools.cli.comparison import compared
from msatools.cli.output import OutputClosed, OutputError, output
from msatools.cli.recording import is_recording
from msatools.cli.replay import replay
from msatools.cli.runner import RunResult, run
from msatools.cli.selfcheck import self_checking
from msatools.cli.signals import (
    Stopped,
    end_by,
    stop_if_told,
    stop_on_signals,
    told_first,
)
from msatools.kernel.session import R
from msatools.render import json, show
from msatools.render.blocks import escape
from msatools.render.json import Document
from msatools.target import TargetError, TargetSpec, describe, open_target

__all__ = [
    "Command",
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


def run_console(command: Command[R], argv: Sequence[str] | None = None) -> int:
    """Run a command with a shell's arguments, and return its exit status.

    A signal that stops a run without an interval also ends the process.

    :param argv: Arguments after the command's name; by default those of the process.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = f"msa-{command.name}"
    debug = "--debug" in argv
    # drgn's own warnings are for its prompt; our errors have the relevant ones.
    logging.getLogger("drgn").setLevel(
        logging.WARNING if debug else logging.CRITICAL + 1
    )
    try:
        with stop_on_signals():
            return _run(command, argv)
    except Stopped as stopped:
        return end_by(stopped.number)
    except OutputClosed:
        return end_by(signal.SIGPIPE)
    except Exception as error:
        return _failed(error, name, debug)


def _failed(error: Exception, name: str, debug: bool) -> int:
    """Say why a run failed, and return its exit status."""
    if debug:
        traceback.print_exc()
    if sys.stderr is not None:
        # print(file=None) would print to standard output.
        print(f"{name}: {escape(_explain(error, name))}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_TARGET


def _explain(error: Exception, name: str) -> str:
    if isinstance(error, UsageError):
        return f"{error}; see {name} --help"
    if isinstance(error, (TargetError, OutputError)):
        return str(error)
    kind = type(error).__name__
    return f"unexpected {kind}: {error}; run it with --debug and report this"


def _run(command: Command[R], argv: Sequence[str]) -> int:
    try:
        parser = make_parser(command, in_drgn=False)
        args = parser.parse_intermixed_args(argv)
    except Asked as asked:
        with output() as out:
            out.write(str(asked))
        return EXIT_DONE
    command = _chosen(command, parser, args)
    words = parse_words(args.words)
    if (answer := _instead(command, args, words)) is not None:
        _print_answer(answer, args)
        return EXIT_INCOMPLETE if args.strict and answer.incomplete else EXIT_DONE
    path = target_path(args, words)
    if path is not None and is_recording(path):
        refuse_kernel(args, words, path)
        _check(command, args, words)
        seen: RunResult[R] = RunResult()
        replay(command, path, args, seen)
        return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE
    spec = target_spec(args, words)
    refuse_in_sandbox(args, parser, is_live=spec.is_live)
    _check(command, args, words)
    if args.sandbox:
        # It is rarely asked for, and slow to import.
        from msatools.cli.sandbox import in_sandbox

        work = partial(_sandboxed, command, spec, args, words)
        return in_sandbox(f"msa-{command.name}", str(spec.path), work)
    return _report(command, spec, args, words)


def _sandboxed(
    command: Command[R], spec: TargetSpec, args: argparse.Namespace, words: Words
) -> int:
    try:
        return _report(command, spec, args, words)
    except (Stopped, OutputClosed):
        return EXIT_TARGET  # the parent has stopped as well
    except Exception as error:
        return _failed(error, f"msa-{command.name}", args.debug)


def _report(
    command: Command[R], spec: TargetSpec, args: argparse.Namespace, words: Words
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
    return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE


def _chosen(
    command: Command[R], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Command[Any]:
    """Return the command that the arguments request: the same, or its self-check."""
    return self_checking(command, parser) if args.self_check else command


def _instead(
    command: Command[R], args: argparse.Namespace, words: Words
) -> Answer | None:
    """Return the answer without a target, if the arguments request that."""
    answer = command.instead(args)
    if answer is None and args.diff is not None:
        answer = partial(compared, command, args)
    if answer is None:
        return None
    refuse_target(args, words)
    _check(command, args, words)
    return answer()


def _print_answer(answer: Answer, args: argparse.Namespace) -> None:
    stop_if_told()
    with output() as out:
        if args.json:
            json.show(answer.document, out)
        else:
            show(answer.blocks, out)


def _check(command: Command[R], args: argparse.Namespace, words: Words) -> None:
    has_interval = words.interval_s is not None
    if args.budget is not None and not has_interval:
        raise UsageError("--budget: it is for samples, and no INTERVAL is named")
    if args.record is not None and (option := command.recorded.lacking(args)):
        raise UsageError(f"{option}: recordings do not have it")
    complaint = command.complaint(args, has_interval)
    if complaint is not None:
        raise UsageError(complaint)


def run_in_drgn(
    command: Command[R], prog: Program, argv: Sequence[str]
) -> R | Document | None:
    """Run a command on drgn's program, and return its last report.

    If the arguments request an answer without a target, return that.

    :param argv: Arguments after the command's name.
    :raises CommandArgumentError: for wrong usage, such as a target
    :raises CommandError: if the report is not complete, with ``--strict``; if a file to
        compare cannot be read, or a file cannot be written
    :raises TargetError: if the program is not a kernel, or has no types
    """
    try:
        parser = make_parser(command, in_drgn=True)
        args = parser.parse_intermixed_args(argv)
        command = _chosen(command, parser, args)
        words = parse_words(args.words)
        if (answer := _instead(command, args, words)) is not None:
            return _answer_in_drgn(command, answer, args)
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
    except TargetError as error:
        raise CommandError(f"%{command.name}: {escape(str(error))}") from None

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
        raise CommandError(f"%{command.name}: {escape(str(error))}") from None
    except KeyboardInterrupt:
        if words.interval_s is None:
            raise
    _require_complete(command, args, seen.incomplete)
    return seen.last


def _answer_in_drgn(
    command: Command[R], answer: Answer, args: argparse.Namespace
) -> Document:
    with contextlib.suppress(OutputClosed):
        _print_answer(answer, args)
    _require_complete(command, args, answer.incomplete)
    return answer.document


def _require_complete(
    command: Command[R], args: argparse.Namespace, incomplete: bool
) -> None:
    if args.strict and incomplete:
        raise CommandError(f"%{command.name}: the report is not complete")
