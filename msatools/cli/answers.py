# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs without a target: replay, ``--diff``, ``--why``; and ``--self-check``."""

import argparse
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from drgn import Program

from msatools.cli.arguments import Answer, Command, Recorded, given_options, make_parser
from msatools.cli.execution import RunResult, is_incomplete, print_report
from msatools.cli.options import ALL, UnknownName, UsageError, Words, is_recording
from msatools.cli.output import device, output, stop_if_told
from msatools.cli.recording import RecordedSample, Recording, RecordingError
from msatools.cli.screen import Appended, footer
from msatools.kernel.report import R, Session
from msatools.legends import Entry, Group, completable, find, legend_of
from msatools.model import Explained, Explanations
from msatools.program import Target, TargetError
from msatools.render.blocks import Block, escape
from msatools.reports import forms
from msatools.reports.diff import STDIN, ReportFile, Reports, compare, head_of
from msatools.reports.forms import dumps
from msatools.selfcheck.model import SelfCheckReport

if TYPE_CHECKING:
    from msatools.selfcheck.selfcheck import Check

# --- Replay of recordings.


def read_ends(command: Command[R], path: str) -> tuple[R, R]:
    """
    Return the first and last report of a recording: one object if there is just one.

    :raises RecordingError: if the recording is damaged, or of another command
    """
    ends: list[R] = []
    with Recording(path) as recording:
        _refuse_others(command.name, path, recording.header.command)
        for sample in recording.samples(command.recorded.model()):
            ends[1:] = [sample.report]
    return ends[0], ends[-1]


def replay(command: Command[R], path: str, args: Namespace, seen: RunResult[R]) -> None:
    """
    Print the samples of a recording, as selected by the arguments.

    :param seen: Receives the last report, and whether anything was lost.
    :raises UsageError: if the arguments request data that were not recorded
    :raises RecordingError: if the recording is damaged, or of another command
    """
    if option := command.recorded.lacking(args):
        raise UsageError(f"{option}: recordings do not have it")
    absent: TargetError | None = None
    is_there = False
    with Recording(path) as recording:
        _refuse_others(command.name, path, recording.header.command)
        for sample in recording.samples(command.recorded.model()):
            with recording.damaged():
                try:
                    command.recorded.require(sample.report, args)
                    is_there = True
                except TargetError as error:
                    # Another sample may have what the arguments name.
                    absent = error
                if sample.report.interval_ns is None and absent is not None:
                    raise absent
                report = command.recorded.choose(sample.report, args)
                seen.last = report
                seen.incomplete |= command.problems(report)
                stop_if_told()
                _show(command, report, sample, args)
        if recording.cut is not None:
            seen.incomplete = True
            name = f"msa-{command.name}"
            print(f"{name}: {escape(recording.cut)}", file=sys.stderr)
    if absent is not None and not is_there:
        raise absent


def _refuse_others(name: str, path: str, whose: str) -> None:
    if whose != name:
        raise RecordingError(
            path, f"a recording of msa-{whose}", f"see it with msa-{whose} {path}"
        )


def _show(
    command: Command[R], report: R, sample: RecordedSample, args: Namespace
) -> None:
    if report.interval_ns is None:
        print_report(command, report, args)
    elif args.json:
        with output() as out:
            forms.show(report, out)
    else:
        shown: Appended[R] = Appended(
            lambda report: command.blocks(report, args),
            lambda cost: footer(command.name, cost, None),
            partial(device, args),
        )
        shown.show_of(report, sample.taken_s)


# --- --diff: comparison of two reports from files of --json or --record.


T = TypeVar("T")

_NEUTRAL = frozenset(
    ("diff", "rows", "color", "json", "strict", "verbose", "words", "operands")
)
"""Names of the arguments that select nothing from a report."""


def compared(command: Command[Any], args: Namespace) -> Answer:
    """
    Compare the two files of ``--diff``, row by row in the tables of the command.

    :raises UsageError: if the arguments select from reports that are not recordings
    :raises TargetError: if a file cannot be read, or holds no report of the command
    """
    from msatools.render.diff import diff_blocks

    if not all(is_recording(file) for file in args.diff):
        _refuse_choosing(command, args)
    everything = Namespace(**{**vars(args), "rows": None})

    def chosen(report: Any) -> ReportFile:
        command.recorded.require(report, everything)
        shown = command.recorded.choose(report, everything)
        return ReportFile(json.loads(dumps(shown)), "")

    reports = Reports(command.name, f"msatools.{command.name}/1")
    pair = load_pair(command, args.diff, chosen, reports.load)
    found = compare(command.name, command.compared, pair, tuple(args.diff))
    return Answer(
        document=found,
        blocks=diff_blocks(found, getattr(args, "rows", None)),
        incomplete=any(command.problems(head_of(report)) for report in pair),
    )


def load_pair(
    command: Command[Any],
    files: Sequence[str],
    chosen: Callable[[Any], T],
    load: Callable[[str], T],
) -> tuple[T, T]:
    """
    Read the last report of each of two files, or the first and last of one recording.

    :param chosen: Converts a report of a recording for the comparison.
    :param load: Reads a file of ``--json`` for the comparison.
    :raises UsageError: if both files are standard input
    :raises TargetError: if a file cannot be read, or holds no report of the command
    """
    before, after = files
    if before == after == STDIN:
        raise UsageError("-: standard input can be one of the two only")
    if before == after and is_recording(before):
        first, last = read_ends(command, before)
        if first is last:
            text = "a recording of one sample, which cannot differ from itself"
            raise RecordingError(before, text, "name another file as well")
        return chosen(first), chosen(last)

    def read(file: str) -> T:
        return chosen(read_ends(command, file)[1]) if is_recording(file) else load(file)

    return read(before), read(after)


def _refuse_choosing(command: Command[Any], args: Namespace) -> None:
    """Raise UsageError for options that select, which JSON files do not allow."""
    parser = make_parser(command, in_drgn=True)
    for option in parser._actions:
        name = option.dest
        if name in _NEUTRAL or name not in vars(args):
            continue
        if getattr(args, name) != parser.get_default(name):
            text = "chooses from what is recorded, and one file is no recording"
            raise UsageError(f"{option.option_strings[0]}: {text}")


# --- --why: the names in a command's output, explained without a target.


_EXPLANATION_WITH = frozenset(
    (
        *("--why", "--json", "--color", "--debug", "--no-pager"),
        # Options on the target: --why may depend on it (Command.explains_kernel).
        *("-k", "-c", "--qemu", "-s", "--types", "--debuginfod", "--sandbox"),
    )
)
"""Options that have an effect with ``--why``."""


def parse_names(command: str, word: str) -> list[str]:
    """
    Parse names of a command's legend, or ``all``.

    :raises UnknownName: if one is not known
    :raises argparse.ArgumentTypeError: if the command has no legend
    """
    legend = legend_of(command)
    if not legend:
        raise ArgumentTypeError("this command has no legend")
    if word.lower() == ALL:
        return [each.name for group in legend for each in group.entries]
    # Some names contain a comma.
    given = [word] if find(legend, word) else word.split(",")
    for name in given:
        if not find(legend, name):
            raise UnknownName(name, completable(legend), "name")
    return given


def refuse_others(parser: ArgumentParser, args: Namespace, words: Words) -> None:
    """Refuse arguments that have no effect with ``--why``.

    :raises UsageError: if there are any
    """
    for _, option in given_options(parser, args):
        if option not in _EXPLANATION_WITH:
            raise UsageError(f"{option}: no effect with --why, which explains names")
    if words.interval_s is not None:
        raise UsageError("--why: names are explained once, and an interval is named")


def explained(command: str, names: list[str]) -> Answer:
    """Return the explanations of names in the legend of a command."""
    from msatools.render.legend import why_lines

    entries = dict.fromkeys(_entries(command, names))
    document = Explanations(
        command,
        tuple(
            Explained(entry.name, group.kind, entry.meaning, entry.source, entry.bound)
            for group, entry in entries
        ),
    )
    blocks = (
        line
        for group, entry in entries
        for line in why_lines(entry.name, group.kind, entry.text, entry.bound)
    )
    return Answer(document=document, blocks=blocks, incomplete=False)


def _entries(command: str, names: list[str]) -> Iterator[tuple[Group, Entry]]:
    legend = legend_of(command)
    for name in names:
        yield from find(legend, name)


# --- --self-check: a command whose report shows whether numbers can be trusted.


_SELFCHECK_WITH = frozenset(
    {"self_check", "verbose", "color", "json", "strict", "debug"}
    | {"kernel", "core", "qemu", "vmlinux", "types", "debuginfod"}
    | {"kernel_number", "vmcoreinfo"}
)
"""Names of the arguments that have an effect together with ``--self-check``."""


def self_checking(
    command: Command[Any], parser: argparse.ArgumentParser
) -> Command[SelfCheckReport]:
    """Return the command for ``--self-check``, which checks the numbers of *command*.

    :param parser: The parser of *command*; most of its options are refused.
    """

    def start(
        prog: Program, target: Target, args: argparse.Namespace
    ) -> Session[SelfCheckReport]:
        from msatools.selfcheck.selfcheck import SelfChecks

        return SelfChecks(command.name, checks_of(command), prog, target)

    def complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
        if has_interval:
            return "--self-check: it is made once, and an interval is named"
        for name, option in given_options(parser, args):
            if name not in _SELFCHECK_WITH:
                return f"{option}: --self-check has no use for it"
        return None

    return Command(
        name=command.name,
        summary=command.summary,
        arguments=command.arguments,
        examples=command.examples,
        start=start,
        blocks=_blocks,
        recorded=Recorded(model=lambda: SelfCheckReport),
        problems=_problems,
        complaint=complaint,
    )


def checks_of(command: Command[Any]) -> "Sequence[Check]":
    """Return the checks of a command: its own, and those of how memory is read."""
    from msatools.selfcheck import tasks

    return (*command.checks(), *tasks.CHECKS)


def _blocks(report: SelfCheckReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.selfcheck import selfcheck_blocks

    return selfcheck_blocks(report, verbose=args.verbose)


def _problems(report: SelfCheckReport) -> bool:
    return is_incomplete(report) or report.has_failed
