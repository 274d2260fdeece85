# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-probe: a command as small as can be, to see what all commands have in common.

Run as ``python -m tests.probe``.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from drgn import Program
from drgn.commands import argument

from msatools.cli import Command, Progress, run_console
from msatools.kernel.report import Report
from msatools.render.blocks import Block, text
from msatools.target import Target


@dataclass(frozen=True, kw_only=True)
class ProbeReport(Report):
    schema: ClassVar[str] = "msatools.probe/1"

    jiffies: int
    delta_jiffies: int | None = None


def collect(
    prog: Program, target: Target, args: argparse.Namespace, progress: Progress
) -> ProbeReport:
    print("collecting", file=sys.stderr, flush=True)
    until = time.monotonic() + args.take
    while time.monotonic() < until:
        progress(1, 3)
        time.sleep(0.05)
    if args.fail:
        raise RuntimeError("it failed\x1b[31m\nbadly")
    if args.fault:
        prog.read(0xFFFF_8000_0000_0000 - 1, 1)
    return ProbeReport(
        target=target,
        taken_at_ns=None,
        interval_ns=None,
        coverage={"lost": args.lost},
        notes=(),
        jiffies=prog["jiffies"].value_(),
    )


def blocks(report: ProbeReport, args: argparse.Namespace) -> Iterable[Block]:
    for line in range(args.lines):
        yield text(f"line {line} jiffies {report.jiffies}")


def delta(previous: ProbeReport, current: ProbeReport) -> ProbeReport:
    return replace(current, delta_jiffies=current.jiffies - previous.jiffies)


COMMAND = Command(
    name="probe",
    summary="probe what commands have in common",
    arguments=(
        argument("--take", type=float, default=0.0, help="seconds to take"),
        argument("--lines", type=int, default=1, help="lines to print"),
        argument("--lost", type=int, default=0, help="things to lose"),
        argument("--fail", action="store_true", help="raise an exception"),
        argument("--fault", action="store_true", help="read what is not there"),
    ),
    examples=(("--lines 3", "three lines"),),
    collect=collect,
    blocks=blocks,
    delta=delta,
    problems=lambda report: report.coverage["lost"] > 0,
)

if __name__ == "__main__":
    sys.exit(run_console(COMMAND))
