# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run commands as their console scripts do, on a demo core that is already open.

Opening a dump takes longer than most reports. A target that is a running guest is
replaced by the demo core as well; its clock does not advance.
"""

import io
import json
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

from drgn import Program
from msgspec.structs import replace

from fixtures.demo import DEMOS
from msatools.cli.arguments import Command
from msatools.cli.main import run_console
from msatools.program import Opened, Target, TargetSpec, open_target
from tests.support.forked import forked
from tests.support.schemas import check_schema
from tests.support.tiers import KERNEL

CORE = str(DEMOS[KERNEL].core)
GUEST = ("--qemu", "still.sock")
"""Arguments to open the core as a running guest."""

Open = Callable[[TargetSpec], Opened]

OPERANDS = {"whatis": ("init_task+8", "pfn:4096")}
"""Words that commands need besides a target, by name: what every demo has."""

MADE = Target(
    path="vmcore",
    kind="elf",
    live=False,
    release="6.12.0",
    arch="x86_64",
    page_size=4096,
    types="btf",
    dump_level=None,
    truncated=False,
    crash=None,
)


@dataclass(frozen=True)
class Ran:
    """The exit status and the output of a run."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one report printed."""
        (found,) = self.samples
        return found

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The reports printed, one per line; each has to match its schema.

        The probe's have none: it is a command of the tests.
        """
        found = [json.loads(line) for line in self.out.splitlines()]
        for each in found:
            if each["schema"] != "msatools.probe/1":
                check_schema(each)
        return found


@cache
def demo() -> Opened:
    """Return the demo core, opened once."""
    return open_target(TargetSpec(path=CORE, types="btf"))


def open_demo(spec: TargetSpec) -> Opened:
    """Return the demo core, described as the target that *spec* names."""
    found = demo()
    return Opened(found.prog, as_named(found.target, spec))


def open_nothing(spec: TargetSpec) -> Opened:
    """Return a program without memory, for commands that read none."""
    return Opened(Program(), as_named(MADE, spec))


def as_named(target: Target, spec: TargetSpec) -> Target:
    """Return *target* described as the one that *spec* names."""
    if spec.is_live:
        kind = "kcore" if spec.qemu is None else "qmp"
        path = spec.qemu or "/proc/kcore"
        return replace(
            target, live=True, kind=kind, path=path, format="", dump_level=None
        )
    return replace(target, path=spec.path or "")


def with_operands(command: Command[Any], *words: str) -> tuple[str, ...]:
    """Return arguments with the words that a command needs, unless they have some."""
    operands = command.operands
    if operands is None or "--diff" in words or any(map(operands.describes, words)):
        return words
    return (*OPERANDS[command.name], *words)


def call(command: Command[Any], *words: str, opening: Open = open_demo) -> Ran:
    """Run a command in this process, with the words that it needs."""
    words = with_operands(command, *words)
    out, err = io.StringIO(), io.StringIO()
    with (
        patch("msatools.cli.execution.open_target", opening),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        status = run_console(command, words)
    return Ran(status, out.getvalue(), err.getvalue())


def start(
    command: Command[Any],
    *words: str,
    opening: Open = open_demo,
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> "subprocess.Popen[str]":
    """Start a command in its own process, with the words that it needs.

    :param before: Called in the process first.
    :param options: Passed to :func:`forked`.
    """

    given = with_operands(command, *words)

    def work() -> int:
        before()
        with patch("msatools.cli.execution.open_target", opening):
            return run_console(command, given)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forked(work, **{**pipes, **options})


def end(process: "subprocess.Popen[str]") -> Ran:
    """Wait for a process to end."""
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, out, err)
