# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-memstat: where the memory is."""

import argparse
from collections.abc import Iterable

from drgn import Program
from drgn.commands import argument

from msatools.cli import Command, Compared, Progress, Session, run_console
from msatools.memory.model import MemstatReport
from msatools.render.blocks import Block
from msatools.target import Target

_GROUPS = ("node", "zone")


def _groups(word: str) -> list[str]:
    groups = word.split(",")
    for group in groups:
        if group not in _GROUPS:
            raise argparse.ArgumentTypeError(f"not node or zone: {group!r}")
    return groups


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[MemstatReport]:
    from msatools.memory.memstat import collect_memstat, delta

    def collect(progress: Progress) -> MemstatReport:
        return collect_memstat(
            prog,
            target=target,
            by=tuple(dict.fromkeys(args.by)),
            sections=args.sections,
            verbose=args.verbose,
            progress=progress,
        )

    return Compared(collect, delta)


def _blocks(report: MemstatReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.memstat import blocks

    return blocks(report)


_LOST = ("excluded_pages", "unreadable_pages", "_unreadable", "_broken", "_lost")


def _problems(report: MemstatReport) -> bool:
    for key, count in report.coverage.items():
        # Free lists of a running kernel change while they are followed.
        moving = key == "pcp_lists_broken" and report.target.live
        if count and key.endswith(_LOST) and not moving:
            return True
    return any(
        check.difference and check.explained_by is None for check in report.checks
    )


COMMAND = Command(
    name="memstat",
    summary="show where the memory is, every page in exactly one class",
    arguments=(
        argument(
            "--by",
            action="extend",
            type=_groups,
            default=[],
            metavar="node|zone",
            help="break the classes down; may be repeated",
        ),
        argument(
            "--sections", action="store_true", help="list the memory sections as well"
        ),
    ),
    examples=(
        ("--by node", "node by node as well"),
        ("--json", "for programs"),
    ),
    start=_start,
    blocks=_blocks,
    problems=_problems,
)


def main() -> int:
    """Run msa-memstat."""
    return run_console(COMMAND)
