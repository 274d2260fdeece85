# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--diff``: comparison of two reports from files of ``--json`` or ``--record``."""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msatools.cli.arguments import make_parser
from msatools.cli.command import Answer, Command
from msatools.cli.recording import RecordingError, is_recording
from msatools.cli.replay import read_ends
from msatools.cli.usage import UsageError
from msatools.render.json import dumps
from msatools.reports.json_file import STDIN, ReportFile, Reports, head_of

T = TypeVar("T")

_NEUTRAL = frozenset(
    ("diff", "rows", "color", "json", "strict", "verbose", "words", "operands")
)
"""Names of the arguments that select nothing from a report."""


def compared(command: Command[Any], args: Namespace) -> Answer:
    """
    Compare two files, by the tables of the command.

    :raises UsageError: if the arguments select from reports that are not recordings
    :raises TargetError: if a file cannot be read, or holds no report of the command
    """
    from msatools.render.diff import blocks
    from msatools.reports.diff import compare

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
        blocks=blocks(found, getattr(args, "rows", None)),
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

    :param chosen: Converts a recorded report for the comparison.
    :param load: Loads a file of JSON for the comparison.
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
    """Refuse options that do not apply to a file of JSON."""
    parser = make_parser(command, in_drgn=True)
    for option in parser._actions:
        name = option.dest
        if name in _NEUTRAL or name not in vars(args):
            continue
        if getattr(args, name) != parser.get_default(name):
            text = "chooses from what is recorded, and one file is no recording"
            raise UsageError(f"{option.option_strings[0]}: {text}")
