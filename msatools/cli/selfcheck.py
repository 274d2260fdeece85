# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--self-check``: a command whose report is whether its numbers can be trusted."""

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from drgn import Program

from msatools.cli.arguments import given_options
from msatools.cli.command import Command, Recorded
from msatools.cli.completeness import is_incomplete
from msatools.kernel.session import Session
from msatools.render.blocks import Block
from msatools.selfcheck.model import SelfCheckReport
from msatools.target import Target

if TYPE_CHECKING:
    from msatools.selfcheck.selfcheck import Check

_WITH = frozenset(
    {"self_check", "verbose", "color", "json", "strict", "debug"}
    | {"kernel", "core", "qemu", "vmlinux", "types", "debuginfod"}
    | {"kernel_number", "vmcoreinfo"}
)
"""Names of the arguments that have an effect together with ``--self-check``."""


def self_checking(
    command: Command[Any], parser: argparse.ArgumentParser
) -> Command[SelfCheckReport]:
    """Return the command that checks the numbers of another.

    :param parser: The parser of the other command, whose other options are refused.
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
            if name not in _WITH:
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
    """Return the checks of a command: its own, and of how memory is read."""
    from msatools.selfcheck import reading

    return (*command.checks(), *reading.CHECKS)


def _blocks(report: SelfCheckReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.selfcheck.report import blocks

    return blocks(report, verbose=args.verbose)


def _problems(report: SelfCheckReport) -> bool:
    return is_incomplete(report) or report.has_failed
