# SPDX-License-Identifier: LGPL-2.1-or-later

"""Replay of recordings."""

import sys
from argparse import Namespace
from functools import partial

from msatools.cli.command import Command
from msatools.cli.output import device, output
from msatools.cli.recording import RecordedSample, Recording, RecordingError
from msatools.cli.runner import RunResult, print_report
from msatools.cli.screen import Appended, footer
from msatools.cli.signals import stop_if_told
from msatools.cli.usage import UsageError
from msatools.kernel.session import R
from msatools.render import json
from msatools.render.blocks import escape
from msatools.target import TargetError


def read_ends(command: Command[R], path: str) -> tuple[R, R]:
    """
    Return the first and the last report of a recording; they may be the same.

    :raises RecordingError: if it is damaged, or of another command
    """
    ends: list[R] = []
    with Recording(path) as recording:
        _refuse_others(command.name, path, recording.header.command)
        for sample in recording.samples(command.recorded.model()):
            ends[1:] = [sample.report]
    return ends[0], ends[-1]


def replay(command: Command[R], path: str, args: Namespace, seen: RunResult[R]) -> None:
    """
    Print the samples of a recording, with the selection of the arguments.

    :raises UsageError: if the arguments request data that were not recorded
    :raises RecordingError: if it is damaged, or of another command
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
                    # It may exist in another sample.
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
            json.show(report, out)
    else:
        shown: Appended[R] = Appended(
            lambda report: command.blocks(report, args),
            lambda cost: footer(command.name, cost, None),
            partial(device, args),
        )
        shown.show_of(report, sample.taken_s)
