# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-memstat: where the memory is."""

import argparse
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from drgn import Program
from drgn.commands import argument

from msatools.cli.arguments import HERE, MaybeFile, UsageError
from msatools.cli.command import Answer, Command, Recorded
from msatools.cli.comparison import load_pair
from msatools.cli.completeness import is_incomplete
from msatools.cli.output import OutputError, check_writable, replace_file
from msatools.kernel.session import Progress, Session
from msatools.memory.model import MemstatReport
from msatools.render.blocks import Block, text
from msatools.target import Target

if TYPE_CHECKING:
    # It needs numpy, which is slow to import.
    from msatools.memory.map.model import MemoryMap

_GROUPS = (
    "node",
    "zone",
    "section",
    "cgroup",
    "file",
    "fs",
    "slab",
    "vmalloc",
    "process",
    "order",
)
"""All groupings of msatools.memory.by, which is slow to import."""

_TOP = 20


_MAX_WORKERS = 1024


def _rows(word: str) -> int:
    if not (word.isdecimal() and 0 < int(word) < 1 << 32):
        raise argparse.ArgumentTypeError(f"not a number of rows: {word!r}")
    return int(word)


def _workers(word: str) -> int:
    if not (word.isdecimal() and 0 < int(word) <= _MAX_WORKERS):
        raise argparse.ArgumentTypeError(
            f"not a number of workers, 1 to {_MAX_WORKERS}: {word!r}"
        )
    return int(word)


def _groups(word: str) -> list[str]:
    groups = word.split(",")
    for group in groups:
        if group not in _GROUPS:
            known = ", ".join(_GROUPS)
            raise argparse.ArgumentTypeError(f"not one of {known}: {group!r}")
    return groups


class _Memstat(Session[MemstatReport]):
    """A run of reports on one kernel."""

    def __init__(self, prog: Program, target: Target, args: argparse.Namespace) -> None:
        self._prog = prog
        self._target = target
        self._args = args

    def report(self, progress: Progress) -> MemstatReport:
        """Return a report of where the memory is now."""
        from msatools.memory.memstat import collect_memstat

        args = self._args
        return collect_memstat(
            self._prog,
            target=self._target,
            by=tuple(dict.fromkeys(args.by)),
            sections=args.sections,
            unattributed=args.unattributed,
            frag=args.frag,
            memory_map=args.map is not None,
            workers=args.workers,
            verbose=args.verbose,
            progress=progress,
        )

    def delta(self, previous: MemstatReport, current: MemstatReport) -> MemstatReport:
        """Return the current report with the change of each class."""
        from msatools.memory.memstat import delta

        return delta(previous, current)


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[MemstatReport]:
    if _has_map_file(args):
        _check_map_file(args.map)
    if args.workers is not None and args.workers > 1 and target.kind == "qmp":
        raise UsageError(f"-j {args.workers}: one at a time reads over QMP")
    return _Memstat(prog, target, args)


def _blocks(report: MemstatReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.memstat.report import blocks

    yield from blocks(report, args.top)
    if _has_map_file(args):
        yield text(f"map written to {args.map}")
    elif report.map is not None:
        from msatools.render.memstat import map_text

        yield from map_text.blocks(report.map, report.target.page_size)


def _instead(args: argparse.Namespace) -> Callable[[], Answer] | None:
    return None if args.diff is None else lambda: _diff(args)


def _diff(args: argparse.Namespace) -> Answer:
    from msatools.memory.diff import compare
    from msatools.memory.recorded import load_snapshot, whole
    from msatools.render.memstat.diff import blocks

    before, after = load_pair(COMMAND, args.diff, whole, load_snapshot)
    found = compare(before, after, tuple(args.diff))
    return Answer(
        document=found,
        blocks=blocks(found, args.top),
        incomplete=_problems(before) or _problems(after),
    )


_SCANNING = {
    "by": "--by",
    "sections": "--sections",
    "unattributed": "--unattributed",
    "frag": "--frag",
    "map": "--map",
    "workers": "-j",
}
"""Options that require a scan."""


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.diff is None:
        return None
    for name, option in _SCANNING.items():
        if getattr(args, name):
            return f"{option}: asks for a scan, and --diff makes none"
    return None


def _has_map_file(args: argparse.Namespace) -> bool:
    return args.map not in (None, HERE)


def _keep(report: MemstatReport, args: argparse.Namespace) -> None:
    if _has_map_file(args) and report.map is not None:
        target = report.target
        _write_map(args.map, report.map, target.page_size, target.release)


def _check_map_file(path: str) -> None:
    """Check that a map can be written, before memory is scanned.

    :raises OutputError: if it cannot be written
    """
    check_writable(path)
    if _is_png(path) and find_spec("PIL") is None:
        raise OutputError(
            f"{path}: Pillow is missing, which draws PNG files; install "
            "msatools[pictures], or name a .svg file"
        )


def _write_map(path: str, memory: "MemoryMap", page_size: int, release: str) -> None:
    """Write a map to a file: PNG if it has that suffix, else SVG.

    :raises OutputError: if it cannot be written
    """
    from msatools.render.memstat.map_picture import picture
    from msatools.render.memstat.picture import png, svg

    drawn = picture(memory, page_size, release)
    replace_file(path, png(drawn) if _is_png(path) else svg(drawn))


def _is_png(path: str) -> bool:
    return PurePath(path).suffix.lower() == ".png"


def _problems(report: MemstatReport) -> bool:
    return is_incomplete(report) or any(
        check.difference and check.explained_by is None for check in report.checks
    )


def _model() -> Any:
    from msatools.memory.recorded import RecordedMemstat

    return RecordedMemstat


def _choose(report: MemstatReport, args: argparse.Namespace) -> MemstatReport:
    from msatools.memory.recorded import RecordedMemstat, choose, lacking, whole

    if isinstance(report, RecordedMemstat):
        report = whole(report)
    names = ("sections", "unattributed", "frag")
    asked = {name: f"--{name}" for name in names if getattr(args, name)}
    if args.verbose:
        asked["vmalloc"] = "-v"
    by = tuple(dict.fromkeys(args.by))
    if (option := lacking(report, by, asked)) is not None:
        raise UsageError(f"{option}: was not recorded")
    return choose(report, by, asked)


def _lacks(args: argparse.Namespace) -> dict[str, object]:
    return {"--map": args.map is not None}


COMMAND = Command(
    name="memstat",
    summary="show where the memory is, every page in exactly one class",
    arguments=(
        argument(
            "--by",
            action="extend",
            type=_groups,
            default=[],
            metavar="X[,X...]",
            help="break the classes down by " + ", ".join(_GROUPS),
        ),
        argument(
            "--top",
            type=_rows,
            default=_TOP,
            metavar="N",
            help=f"rows of each list ({_TOP}; --by node or zone, and --json, has all)",
        ),
        argument(
            "-j",
            dest="workers",
            type=_workers,
            metavar="N",
            help="scan with N workers (else one if live, up to one a CPU if not)",
        ),
        argument(
            "--sections", action="store_true", help="list the memory sections as well"
        ),
        argument(
            "--unattributed",
            action="store_true",
            help="list the pages that no owner explains, and what they point to",
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
    ),
    examples=(
        ("--by process,file", "whose it is, too: the 20 largest of each"),
        ("--unattributed", "what no owner explains, too"),
        ("--json", "for programs, and for --diff"),
        ("--diff a b", "what changed from one --json to another"),
    ),
    start=_start,
    blocks=_blocks,
    problems=_problems,
    complaint=_complaint,
    recorded=Recorded(model=_model, choose=_choose, lacks=_lacks),
    keep=_keep,
    instead=_instead,
)
