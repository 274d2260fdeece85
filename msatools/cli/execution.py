# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the arguments of a command ask for: a report of a target, or an answer without.

This module and those that it calls do what is common to all commands: the target,
intervals, and whether a report is complete.
"""

import argparse
import logging
from functools import partial
from typing import Any

from msatools.cli.arguments import refuse_excluded
from msatools.cli.budget import be_nice
from msatools.cli.command import Answer, Command, R
from msatools.cli.main import EXIT_DONE, EXIT_TARGET, failed, say_faults
from msatools.cli.output import OutputClosed, output, print_blocks
from msatools.cli.recording import is_recording
from msatools.cli.runner import RunResult, run
from msatools.cli.signals import Stopped, stop_if_told, told_first
from msatools.cli.target_arguments import (
    refuse_in_sandbox,
    refuse_kernel,
    refuse_target,
    target_path,
    target_spec,
)
from msatools.cli.usage import UsageError
from msatools.cli.words import Words, named_targets, parse_words
from msatools.render import json
from msatools.target import TargetSpec, open_target

EXIT_INCOMPLETE = 3


def execute(
    command: Command[R], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> int:
    """Do what a shell's arguments ask for, and return the exit status."""
    # drgn's own warnings are for its prompt; our errors have the relevant ones.
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
        from msatools.cli.replay import replay

        replay(command, path, args, seen)
        return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE
    spec = target_spec(args, words)
    refuse_in_sandbox(args, parser, is_live=spec.is_live)
    check(command, args, words)
    if args.sandbox or _is_confined(command, spec, args):
        # It is rarely asked for, and slow to import.
        from msatools.cli.sandbox import in_sandbox

        work = partial(_sandboxed, command, spec, args, words)
        name = f"msa-{command.name}"
        is_paged = not (args.no_pager or args.json)
        return in_sandbox(name, str(spec.path), work, is_paged=is_paged)
    return _report(command, spec, args, words)


def _is_confined(
    command: Command[R], spec: TargetSpec, args: argparse.Namespace
) -> bool:
    """Return whether a command reads the target in the sandbox by default.

    It does not if something is asked for that the sandbox takes away.
    """
    takes_more = args.debuginfod or args.record is not None or command.writes(args)
    if not command.sandboxed or spec.is_live or spec.qemu or takes_more:
        return False
    from msatools.cli.sandbox import binding, is_locked_down

    args.unconfined = binding() is None
    return not args.unconfined and not is_locked_down()


def _sandboxed(
    command: Command[R], spec: TargetSpec, args: argparse.Namespace, words: Words
) -> int:
    try:
        return _report(command, spec, args, words)
    except (Stopped, OutputClosed):
        return EXIT_TARGET  # the parent has stopped as well
    except Exception as error:
        return failed(error, f"msa-{command.name}", debug=args.debug)


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
    if seen.faults:
        name = f"msa-{command.name}"
        return say_faults(seen.faults.values(), name, debug=args.debug)
    return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE


def chosen(
    command: Command[R], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Command[Any]:
    """Return the command that the arguments request: the same, or its self-check."""
    if not args.self_check:
        return command
    from msatools.cli.selfcheck import self_checking

    return self_checking(command, parser)


def instead(
    command: Command[R],
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    words: Words,
    has_target: bool,
) -> Answer | None:
    """Return the answer without a target, if the arguments request that."""
    if args.why:
        from msatools.cli.explanation import explained, refuse_others

        refuse_others(parser, args, words)
        looks = command.explains_kernel and has_target
        return None if looks else explained(command.name, args.why)
    if args.diff is None:
        return None
    refuse_target(args, words)
    check(command, args, words)
    if command.compare is not None:
        return command.compare(args)
    from msatools.cli.comparison import compared

    return compared(command, args)


def print_answer(answer: Answer, args: argparse.Namespace) -> None:
    """Print an answer that needed no target, as text or JSON."""
    stop_if_told()
    with output() as out:
        if args.json:
            json.show(answer.document, out)
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
