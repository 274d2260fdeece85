# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-memstat: where the memory is."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from msatools.cli.arguments import (
    Answer,
    Command,
    Excluded,
    Recorded,
    argument,
    rows,
    textfile,
)
from msatools.cli.options import HERE, MaybeFile, UsageError, known_names

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Progress, Session
    from msatools.memory.map import MemoryMap
    from msatools.memory.model import MemstatReport
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.selfcheck.selfcheck import Check


_GROUPS = (
    "node",
    "zone",
    "section",
    "cgroup",
    "file",
    "fs",
    "slab",
    "vmalloc",
    "dmabuf",
    "process",
    "order",
)
"""Names of all groupings; listed here, as msatools.memory is slow to import."""

_ROWS = 20


_MAX_WORKERS = 1024


def _workers(word: str) -> int:
    if not (word.isdecimal() and 0 < int(word) <= _MAX_WORKERS):
        raise argparse.ArgumentTypeError(
            f"not a number of workers, 1 to {_MAX_WORKERS}: {word!r}"
        )
    return int(word)


def _groups(word: str) -> list[str]:
    return known_names(word.lower().split(","), _GROUPS, "grouping")


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[MemstatReport]:
    from msatools.memory.memstat import MemstatSession, collect_memstat

    if _has_map_file(args):
        _check_map_file(args.map)
    if args.textfile is not None:
        from msatools.cli.recording import check_textfile

        check_textfile(args.textfile)
    if args.workers is not None and args.workers > 1 and target.kind == "qmp":
        raise UsageError(f"-j {args.workers}: QMP serves one reader at a time")

    def collect(progress: Progress) -> MemstatReport:
        return collect_memstat(
            prog,
            target=target,
            by=tuple(dict.fromkeys(args.by)),
            sections=args.sections,
            unattributed=args.unattributed,
            leaks=args.leaks,
            frag=args.frag,
            memory_map=args.map is not None,
            workers=args.workers,
            verbose=args.verbose,
            read_all=args.strict,
            progress=progress,
        )

    return MemstatSession(collect)


def _blocks(report: MemstatReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.blocks import line
    from msatools.render.memstat.report import memstat_blocks

    yield from memstat_blocks(report, args.rows)
    if _has_map_file(args):
        yield line(f"map written to {args.map}")
    elif report.map is not None:
        from msatools.render.memstat.map import map_blocks

        yield from map_blocks(report.map, report.target.page_size)


def _compare(args: argparse.Namespace) -> Answer:
    from msatools.cli.answers import load_pair
    from msatools.memory.diff import compare, load_snapshot, whole
    from msatools.render.memstat.diff import memstat_diff_blocks

    before, after = load_pair(COMMAND, args.diff, whole, load_snapshot)
    found = compare(before, after, tuple(args.diff))
    return Answer(
        document=found,
        blocks=memstat_diff_blocks(found, args.rows),
        incomplete=_problems(before) or _problems(after),
    )


_EXCLUDED = (
    Excluded("--json", ("-n",), "has all rows"),
    Excluded(
        "--diff",
        (
            *("--by", "--sections", "--unattributed", "--leaks", "--frag", "--map"),
            *("--textfile", "-j"),
        ),
        "compares what was scanned before",
    ),
)

_ACROSS = frozenset(("node", "zone"))
"""Groupings whose groups are columns, not rows."""


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    lists = {*args.by} - _ACROSS or args.sections or args.unattributed or args.verbose
    lists = lists or args.leaks
    if args.rows != _ROWS and not (lists or args.diff):
        return (
            "-n: rows of lists, and there is none without --by, --sections, "
            "--unattributed, --leaks or -v"
        )
    from msatools.cli.options import textfile_complaint

    return textfile_complaint(args)


def _has_map_file(args: argparse.Namespace) -> bool:
    return args.map not in (None, HERE)


def _keep(report: MemstatReport, args: argparse.Namespace) -> None:
    if _has_map_file(args) and report.map is not None:
        target = report.target
        _write_map(args.map, report.map, target.page_size, target.release or "-")
    if args.textfile is not None:
        from msatools.cli.recording import write_textfile
        from msatools.memory.diff import gauges

        write_textfile(args.textfile, gauges(report))


def _check_map_file(path: str) -> None:
    """Check that a map can be written, before memory is scanned.

    :raises OutputError: if it cannot be written
    """
    from msatools.cli.output import OutputError, check_writable

    check_writable(path)
    if _is_png(path) and find_spec("PIL") is None:
        raise OutputError(
            f"{path}: Pillow is missing, which draws PNG files; install "
            "msatools[pictures], or name a .svg file"
        )


def _write_map(path: str, memory: MemoryMap, page_size: int, release: str) -> None:
    """Write a map to a file: PNG if it has that suffix, else SVG.

    :raises OutputError: if it cannot be written
    """
    from msatools.cli.output import replace_file
    from msatools.render.memstat.picture import picture, png, svg

    drawn = picture(memory, page_size, release)
    replace_file(path, png(drawn) if _is_png(path) else svg(drawn))


def _is_png(path: str) -> bool:
    return PurePath(path).suffix.lower() == ".png"


def _problems(report: MemstatReport) -> bool:
    from msatools.cli.execution import is_incomplete

    return is_incomplete(report) or any(
        check.difference and check.explained_by is None for check in report.checks
    )


def _model() -> Any:
    from msatools.memory.diff import RecordedMemstat

    return RecordedMemstat


def _choose(report: MemstatReport, args: argparse.Namespace) -> MemstatReport:
    from msatools.memory.diff import RecordedMemstat, choose, lacking, whole

    if isinstance(report, RecordedMemstat):
        report = whole(report)
    names = ("sections", "unattributed", "leaks", "frag")
    asked = {name: f"--{name}" for name in names if getattr(args, name)}
    if args.verbose:
        asked["vmalloc"] = "-v"
    by = tuple(dict.fromkeys(args.by))
    if (option := lacking(report, by, asked)) is not None:
        raise UsageError(f"{option}: was not recorded")
    return choose(report, by, asked)


def _lacks(args: argparse.Namespace) -> dict[str, object]:
    return {"--map": args.map is not None}


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import memory

    return memory.CHECKS


COMMAND = Command(
    name="memstat",
    summary="show where the memory is, every page in exactly one class",
    arguments=(
        argument(
            "--by",
            action="extend",
            type=_groups,
            default=[],
            metavar="X,...",
            help="sum up by " + ", ".join(_GROUPS) + ", too",
        ),
        argument(
            "--sections", action="store_true", help="show the memory sections, too"
        ),
        argument(
            "--unattributed",
            action="store_true",
            help="show the pages that no owner explains, and what they point to",
        ),
        argument(
            "--leaks",
            action="store_true",
            help="show the slab objects, vmalloc areas and pages of each module",
        ),
        argument(
            "--frag",
            action="store_true",
            help="show what keeps blocks of memory from being free",
        ),
        argument(
            "--map",
            action=MaybeFile,
            endings=(".svg", ".png"),
            metavar="[FILE.svg|.png]",
            help="draw what is where, on the terminal or to a file",
        ),
        textfile(),
        rows(" of each list", default=_ROWS),
        argument(
            "-j",
            dest="workers",
            type=_workers,
            metavar="N",
            help="scan with N workers (default: one if live, else up to one a CPU)",
        ),
    ),
    examples=(
        ("--by process,file", "whose it is, too: the 20 largest of each"),
        ("--unattributed", "what no owner explains, too"),
        ("--leaks", "how much memory each module has"),
        ("--json", "for programs, and for --diff"),
        ("--diff a b", "what changed from one --json to another"),
    ),
    start=_start,
    blocks=_blocks,
    problems=_problems,
    complaint=_complaint,
    excluded=_EXCLUDED,
    recorded=Recorded(model=_model, choose=_choose, lacks=_lacks),
    keep=_keep,
    checks=_checks,
    compare=_compare,
)
