# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-fleet: report on many dumps, and group them by bug."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from msatools.cli.arguments import argument, rows, textfile
from msatools.cli.options import (
    UsageError,
    byte_size,
    duration_ns,
    moment_ns,
    positive_number,
)
from msatools.cli.subcommands import CommandGroup, Subcommand

if TYPE_CHECKING:
    from distributed import Client

    from msatools.fleet.buckets import Choice
    from msatools.fleet.run import Progress
    from msatools.fleet.single import Bounds, FleetNote
    from msatools.render.blocks import Block

_MODULES = ("cryptography", "distributed", "duckdb", "pyarrow")
_STATUS_INCOMPLETE = 3


def _run(args: argparse.Namespace) -> int:
    from msatools.fleet.single import FleetError, require

    require(*_MODULES)
    from msatools.cli.subcommands import FleetProgress
    from msatools.fleet.dumps import Told, find_dumps
    from msatools.fleet.run import Run, dashboard_of
    from msatools.fleet.single import report_dump
    from msatools.fleet.store import Results

    if args.scheduler is not None and args.workers is not None:
        raise UsageError("-j: no effect with --scheduler, which has its own workers")
    _check_textfile(args)
    results = Results(args.results)
    unread: list[OSError] = []
    left_out: list[tuple[str, str]] = []
    told = Told(unread.append, lambda *file: left_out.append(file))
    found = find_dumps(args.dumps, _listed(), told)
    # Workers have a current directory of their own.
    paths = [*map(os.path.abspath, found)]
    for error in unread:
        _warn(f"{error.filename}: {error.strerror}; its dumps are left out")
    for line in _left_out_text(left_out):
        _warn(line)
    if not paths:
        raise FleetError(f"{', '.join(args.dumps)}: no dump; name files or folders")
    results.create()
    done = results.done(only_reports=args.retry)
    unread_results = results.notes
    _warn_of(unread_results)
    bounds = _bounds(args)
    report = partial(report_dump, bounds=bounds)
    with FleetProgress(sys.stderr) as shown, _cluster(args, bounds) as client:
        shown.dashboard(dashboard_of(client))
        progress = Run(client, results, report, done, shown.update).run(paths)
    _print_line(_run_text(progress, args.results))
    _write_textfile(args)
    return _status(args, bool(progress.failed or unread or unread_results))


def _left_out_text(files: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each kind of file that was left out as no dump."""
    kinds: dict[str, list[str]] = {}
    for path, what in files:
        kinds.setdefault(what, []).append(path)
    for what, paths in sorted(kinds.items()):
        others = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        yield f"{paths[0]}{others}: {what}; left out"


def _listed() -> Iterable[str]:
    """Return the lines of standard input, in which a path may have any bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    # sys.stdin is None if standard input is closed.
    return sys.stdin or ()


def _bounds(args: argparse.Namespace) -> Bounds:
    from msatools.cli.sandbox import MEMORY_BYTES, SECONDS
    from msatools.fleet import run
    from msatools.fleet.single import Bounds

    memory_bytes = args.memory
    if memory_bytes is None:
        memory_bytes = MEMORY_BYTES
        if args.scheduler is None:
            workers = args.workers or run.cores()
            memory_bytes = min(memory_bytes, run.memory_for(workers))
    seconds = SECONDS if args.timeout is None else -(-args.timeout // 10**9)
    return Bounds(memory_bytes=memory_bytes, seconds=max(seconds, 1))


def _cluster(
    args: argparse.Namespace, bounds: Bounds
) -> AbstractContextManager[Client]:
    from msatools.fleet import run

    if args.scheduler is not None:
        return run.remote(args.scheduler)
    return run.local(args.workers or run.cores(), bounds)


def _run_text(progress: Progress, results: str) -> str:
    words = [f"{progress.finished:,} dumps read"]
    words += (f"{count:,} {state}" for state, count in sorted(progress.states.items()))
    if progress.skipped:
        words.append(f"{progress.skipped:,} known before")
    return f"{', '.join(words)}; msa-fleet show {results}"


def _show(args: argparse.Namespace) -> int:
    from msatools.fleet.single import require

    require(*_MODULES)
    from msatools.cli.output import check_writable, device, output, replace_file
    from msatools.fleet.buckets import read_fleet
    from msatools.fleet.store import Results
    from msatools.render.device import show
    from msatools.render.fleet.fleet import fleet_blocks
    from msatools.reports import forms

    for option, value in (("--color", args.color != "auto"), ("-n", args.rows)):
        if args.json and value:
            raise UsageError(f"{option}: no effect with --json, which has all")
    _check_textfile(args)
    if args.html is not None:
        require("jinja2")
        check_writable(args.html)
    report = read_fleet(Results(args.results), _choice(args), with_reports=args.json)

    def shown() -> Iterator[Block]:
        yield from fleet_blocks(
            report, name=args.results, rows=args.rows, verbose=args.verbose
        )

    if args.html is not None:
        from msatools.render.fleet.fleet import page

        replace_file(args.html, page(report, args.results).encode())
    with output() as out:
        if args.json:
            forms.show(report, out)
        else:
            show(shown(), out, device(args, out))
    _write_textfile(args)
    return _status(args, bool(report.notes))


def _choice(args: argparse.Namespace) -> Choice:
    from msatools.fleet.buckets import Choice

    return Choice(
        host=args.host,
        release=args.kernel,
        verdict=args.verdict,
        new_since_ns=args.new_since,
    )


def _sql(args: argparse.Namespace) -> int:
    from msatools.fleet.single import require

    require(*_MODULES)
    from msatools.cli.output import device, output
    from msatools.fleet.store import Results, query
    from msatools.render.device import show
    from msatools.render.fleet.fleet import json_lines, table

    if args.json and args.color != "auto":
        raise UsageError("--color: no effect with --json, which has no colours")
    results = Results(args.results)
    answer = query(results, args.query)
    # Rows have no place for notes.
    _warn_of(results.notes)
    with output() as out:
        if args.json:
            out.writelines(json_lines(answer))
        else:
            show(table(answer), out, device(args, out))
    return _status(args, bool(results.notes))


def _status(args: argparse.Namespace, is_incomplete: bool) -> int:
    return _STATUS_INCOMPLETE if args.strict and is_incomplete else 0


def _check_textfile(args: argparse.Namespace) -> None:
    """Check that metrics can be written, before anything is read."""
    if args.textfile is not None:
        from msatools.cli.recording import check_textfile

        check_textfile(args.textfile)


def _write_textfile(args: argparse.Namespace) -> None:
    if args.textfile is None:
        return
    from msatools.cli.recording import write_textfile
    from msatools.fleet.buckets import Choice, gauges, read_fleet
    from msatools.fleet.store import Results

    # Gauges count all dumps, whatever was selected: a gauge has one meaning.
    write_textfile(args.textfile, gauges(read_fleet(Results(args.results), Choice())))


def _warn_of(notes: Iterable[FleetNote]) -> None:
    for note in notes:
        _warn(f"note: {note.text}")


def _warn(line: str) -> None:
    from msatools.render.blocks import escape

    if sys.stderr is not None:
        print(f"msa-fleet: {escape(line)}", file=sys.stderr)


def _print_line(line: str) -> None:
    from msatools.cli.output import output
    from msatools.render.blocks import escape

    with output() as out:
        out.write(escape(line) + "\n")


_RESULTS = argument("results", metavar="RESULTS")
_STRICT = argument(
    "--strict",
    action="store_true",
    help="fail (status 3) if a file of results cannot be read",
)
_COLOR = argument(
    "--color",
    choices=("auto", "always", "never"),
    default="auto",
    help="colours and bold text (auto: on a terminal, unless NO_COLOR is set)",
)

_RUN = Subcommand(
    name="run",
    summary="report on many dumps, and keep the results",
    operands="DUMP... -o RESULTS",
    positional=(argument("dumps", nargs="+", metavar="DUMP"),),
    arguments=(
        argument(
            "-o",
            dest="results",
            metavar="RESULTS",
            required=True,
            help="folder of the results, made if it is not there; dumps in it are not "
            "read again",
        ),
        argument(
            "-j",
            dest="workers",
            metavar="N",
            type=positive_number,
            help="read N dumps at once (as many as there are cores)",
        ),
        argument(
            "--scheduler",
            metavar="ADDRESS",
            help="have the workers of this Dask scheduler read them; they need "
            "msatools, and the same paths",
        ),
        argument(
            "--timeout",
            metavar="TIME",
            type=duration_ns,
            help="time limit for one dump: 90 (seconds), 5m (10m)",
        ),
        argument(
            "--memory",
            metavar="SIZE",
            type=byte_size,
            help="memory limit for one dump: 2G, 512M (4G, or what the machine has "
            "for each)",
        ),
        argument(
            "--retry",
            action="store_true",
            help="read dumps again that had no report",
        ),
        argument(
            "--strict",
            action="store_true",
            help="fail (status 3) if a dump that was read has no report, or a folder "
            "or a file of results could not be read",
        ),
        textfile(),
    ),
    examples=(
        ("/var/crash -o results", "all dumps below a folder"),
        ("'/mnt/*/vmcore' -o results", "those that match"),
        ("- -o results < list", "those in a list, one a line"),
        (
            "/nfs -o results --scheduler tcp://head:8786",
            "on a cluster",
        ),
    ),
    run=_run,
)

_SHOW = Subcommand(
    name="show",
    summary="show which bugs there are, how often, where and since when",
    operands="RESULTS",
    positional=(_RESULTS,),
    arguments=(
        argument(
            "--new-since",
            metavar="TIME",
            type=moment_ns,
            help="only bugs first seen since: 2026-11-20, 2026-11-20T15:30 (UTC), or "
            "7d for the last 7 days",
        ),
        argument(
            "--host",
            metavar="PATTERN",
            help="only dumps of these hosts, such as 'web*'",
        ),
        argument(
            "--kernel",
            metavar="PATTERN",
            help="only dumps of these kernels, such as '6.12.*'",
        ),
        argument(
            "--verdict",
            metavar="CODE",
            help="only dumps with this verdict, such as deadlock",
        ),
        rows(" of each table"),
        argument(
            "-v",
            dest="verbose",
            action="store_true",
            help="show all of each bucket: verdicts, kernels, hosts",
        ),
        argument("--json", action="store_true", help="print JSON, with all reports"),
        argument("--html", metavar="FILE", help="write it to a page as well"),
        _STRICT,
        textfile(),
        _COLOR,
    ),
    examples=(
        ("results", "what there is"),
        ("results --new-since 7d", "what is new this week"),
        ("results --verdict deadlock -v", "all deadlocks, in full"),
    ),
    run=_show,
)

_SQL = Subcommand(
    name="sql",
    summary="ask the tables dumps and verdicts by SQL",
    operands="RESULTS QUERY",
    positional=(_RESULTS, argument("query", metavar="QUERY")),
    arguments=(
        argument("--json", action="store_true", help="print JSON, one object a row"),
        _STRICT,
        _COLOR,
        argument(
            "-v", dest="verbose", action="store_true", help="show all of wide rows"
        ),
    ),
    examples=(
        ("results 'SELECT host, count(*) FROM dumps GROUP BY 1'", "dumps by host"),
        ("results 'DESCRIBE dumps'", "the columns"),
    ),
    run=_sql,
)

COMMAND = CommandGroup(
    name="fleet",
    summary="report on many dumps, and show which are of one bug",
    subcommands=(_RUN, _SHOW, _SQL),
)
