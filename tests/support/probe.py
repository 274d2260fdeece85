# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-probe: a minimal command, to test what all commands have in common."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, ClassVar
from unittest.mock import patch

from drgn import Program
from msgspec.structs import replace

from msatools.cli.arguments import Command, Recorded, argument
from msatools.cli.main import run_console
from msatools.kernel.report import Progress, Report, Session
from msatools.program import Target
from msatools.render.blocks import Block, line
from tests.support.calls import Ran, end, open_nothing, start
from tests.support.terminal import Terminal


class ProbeReport(Report, frozen=True, kw_only=True):
    schema: ClassVar[str] = "msatools.probe/1"

    number: int
    since: int | None = None
    """The number of the previous report."""

    samples: int | None = None


class Probe(Session[ProbeReport]):
    """A session that counts the samples in each interval."""

    def __init__(self, prog: Program, target: Target, args: argparse.Namespace) -> None:
        self._prog = prog
        self._target = target
        self._args = args
        self._samples = 0
        self._reports = 0

    @property
    def period_s(self) -> float | None:
        period_s: float | None = self._args.period
        return period_s

    def report(self, progress: Progress) -> ProbeReport:
        print("collecting", file=sys.stderr, flush=True)
        until = time.monotonic() + self._args.take
        while time.monotonic() < until:
            progress(1, 3)
            time.sleep(0.05)
        spin(self._args.spin)
        self._reports += 1
        if self._args.fail or self._reports == self._args.fail_at:
            raise RuntimeError("it failed\x1b[31m\nbadly")
        if self._args.fault:
            read_nothing(self._prog)
        return ProbeReport(
            target=self._target,
            taken_at_ns=None,
            interval_ns=None,
            coverage={"lost": int(self._reports == self._args.lose_at)},
            notes=(),
            number=self._reports,
        )

    def sample(self) -> None:
        self._samples += 1
        time.sleep(self._args.sample_take)
        spin(self._args.sample_spin)
        if self._args.sample_fault:
            read_nothing(self._prog)

    def delta(self, previous: ProbeReport, current: ProbeReport) -> ProbeReport:
        samples, self._samples = self._samples, 0
        return replace(current, since=previous.number, samples=samples)


def spin(seconds: float) -> None:
    """Use CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def read_nothing(prog: Program) -> None:
    prog.read(0xFFFF_8000_0000_0000 - 1, 1)


def blocks(report: ProbeReport, args: argparse.Namespace) -> Iterable[Block]:
    for number in range(args.lines):
        yield line(f"line {number} of report {report.number}")


COMMAND = Command(
    name="probe",
    summary="probe what commands have in common",
    arguments=(
        argument("--take", type=float, default=0.0, help="seconds to take"),
        argument("--spin", type=float, default=0.0, help="seconds of CPU to take"),
        argument("--sample-spin", type=float, default=0.0, help="the same of samples"),
        argument("--lines", type=int, default=1, help="lines to print"),
        argument("--lose-at", type=int, help="lose something in this report"),
        argument("--fail", action="store_true", help="raise an exception"),
        argument("--fail-at", type=int, help="do it in this report"),
        argument("--fault", action="store_true", help="read what is not there"),
        argument("--period", type=float, help="seconds from sample to sample"),
        argument("--sample-take", type=float, default=0.0, help="seconds each takes"),
        argument("--sample-fault", action="store_true", help="fail in each of them"),
    ),
    examples=(("--lines 3", "three lines"),),
    start=Probe,
    recorded=Recorded(model=lambda: ProbeReport),
    blocks=blocks,
    problems=lambda report: report.coverage["lost"] > 0,
)

DUMP = "vmcore"
GUEST = ("--qemu", "guest.sock")


def run(*words: str, **options: Any) -> Ran:
    """Run msa-probe to its end in its own process."""
    return end(start(COMMAND, *words, opening=open_nothing, **options))


def start_probe(*words: str, **options: Any) -> "subprocess.Popen[str]":
    """Start msa-probe and wait until it collects."""
    process = start(COMMAND, *words, opening=open_nothing, **options)
    assert process.stderr is not None
    assert process.stderr.readline() == "collecting\n"
    return process


def on_terminal(
    *words: str, command: Command[ProbeReport] = COMMAND, **options: Any
) -> Terminal:
    """Start msa-probe on a terminal."""

    def work() -> int:
        with patch("msatools.cli.execution.open_target", open_nothing):
            return run_console(command, words)

    return Terminal(work, **options)
