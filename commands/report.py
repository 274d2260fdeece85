# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-report: what happened, and what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from msatools.cli.arguments import Command, Excluded, Recorded, argument, rows, textfile
from msatools.model import DiffRows

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Session
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.report.model import TriageReport
    from msatools.selfcheck.selfcheck import Check


def _start(
    prog: Program, target: Target, args: argparse.Namespace
) -> Session[TriageReport]:
    from msatools.program.model import TargetError
    from msatools.report.model import ReportOptions
    from msatools.report.report import Triage

    keep = args.record is None and (args.full or args.html is not None)
    options = ReportOptions(
        crash_only=args.fingerprint,
        keep_parts=keep,
        memory_map=args.html is not None,
        stacks=args.html is not None,
        unconfined=getattr(args, "unconfined", False),
    )
    if target.kind == "log" and args.full:
        raise TargetError(
            target.path, "a kernel's log, without other commands", "leave out --full"
        )
    if args.html is not None:
        _check_html(args.html)
    if args.textfile is not None:
        from msatools.cli.recording import check_textfile

        check_textfile(args.textfile)
    return Triage(prog, target, options)


def _blocks(report: TriageReport, args: argparse.Namespace) -> Iterable[Block]:
    from msatools.render.blocks import line
    from msatools.render.report.report import crash_text, report_blocks

    if args.fingerprint:
        yield line(crash_text(report))
        return
    yield from report_blocks(
        report, rows=args.rows, verbose=args.verbose, full=args.full
    )
    if args.html is not None:
        yield line(f"page written to {args.html}")


def _check_html(path: str) -> None:
    """Check that a page can be made and written, before anything is read.

    :raises OutputError: if it cannot be written, or Jinja2 is missing
    """
    from msatools.cli.output import OutputError, check_writable

    check_writable(path)
    if find_spec("jinja2") is None:
        raise OutputError(
            f"{path}: Jinja2 is missing, which makes pages; install msatools[html]"
        )


def _keep(report: TriageReport, args: argparse.Namespace) -> None:
    if args.textfile is not None:
        from msatools.cli.recording import write_textfile
        from msatools.report.model import gauges

        write_textfile(args.textfile, gauges(report))
    if args.html is None or report.parts is None:
        return
    from msatools.cli.output import replace_file
    from msatools.render.report.html import page

    replace_file(args.html, page(report).encode())


def _complaint(args: argparse.Namespace, has_interval: bool) -> str | None:
    if args.html is not None and has_interval:
        return "--html: a page is of one moment, and an interval is named"
    if args.html is not None and getattr(args, "sandbox", False):
        return "--html: no file is written with --sandbox"
    from msatools.cli.options import textfile_complaint

    return textfile_complaint(args)


def _model() -> type[TriageReport]:
    from msatools.report.model import RecordedTriage

    return RecordedTriage


def _lacks(args: argparse.Namespace) -> dict[str, object]:
    return {
        "--full": args.full,
        "--html": args.html is not None,
        "--fingerprint": args.fingerprint,
    }


_EXCLUDED = (
    Excluded("--json", ("-n", "--full", "--fingerprint"), "has all in one form"),
    Excluded(
        "--fingerprint",
        ("--full", "--html", "--textfile", "-n", "-v"),
        "prints it alone",
    ),
    Excluded(
        "--diff",
        ("--full", "--html", "--textfile", "--fingerprint"),
        "has tables of its own",
    ),
)

_COMPARED = (
    DiffRows(
        name="verdicts",
        by=("code", "text"),
        facts=("severity", "confidence"),
    ),
)


def _checks() -> Sequence[Check]:
    from msatools.selfcheck import commands, memory, tasks

    return (
        *memory.CHECKS,
        *tasks.ALL,
        *tasks.DEAD,
        *tasks.LIVES,
        *tasks.QUEUED,
        *commands.LOCKS_CHECKS,
        *commands.CPUS_CHECKS,
        *tasks.STACKS,
    )


COMMAND = Command(
    name="report",
    summary="show what happened and what is wrong, on one page",
    arguments=(
        argument(
            "--full",
            action="store_true",
            help="show the first page of each command, too",
        ),
        argument(
            "--html",
            metavar="FILE",
            help="also write the whole report to FILE, as one HTML page for a ticket",
        ),
        argument(
            "--fingerprint",
            action="store_true",
            help="print only the fingerprint of the crash",
        ),
        textfile(),
        rows(" of verdicts"),
    ),
    examples=(
        ("-v", "with whole stacks"),
        ("--html report.html", "one file for the ticket"),
        ("--fingerprint", "the same for the same fault, on any build"),
        ("--full", "the first page of each command behind it"),
    ),
    start=_start,
    blocks=_blocks,
    complaint=_complaint,
    excluded=_EXCLUDED,
    checks=_checks,
    compared=_COMPARED,
    recorded=Recorded(model=_model, lacks=_lacks),
    keep=_keep,
    writes=lambda args: args.html is not None or args.textfile is not None,
    sandboxed=True,
    reads_logs=True,
)
