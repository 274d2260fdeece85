# SPDX-License-Identifier: LGPL-2.1-or-later

"""The facts of every command, the dumps that have recorded some, and the verdicts."""

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any

from msatools.commands.cpus import COMMAND as CPUS
from msatools.commands.locks import COMMAND as LOCKS
from msatools.commands.memstat import COMMAND as MEMSTAT
from msatools.commands.prstat import COMMAND as PRSTAT
from msatools.commands.zombies import COMMAND as ZOMBIES

from fixtures import lab
from msatools.cli.main import Command, run_in_drgn
from tests.support.dumps import open_dump
from tests.truth import cpus, locks, memstat, prstat, zombies
from tests.truth.fact import Fact, Verdict, judge


@dataclass(frozen=True)
class Facts:
    """The facts of one command, and the dumps that have recorded some of them."""

    command: Command[Any]
    facts: Sequence[Fact]
    dumps: Sequence[str]
    words: Sequence[str] = ()
    """Options without which the report lacks figures."""

    branches: bool = False
    """Whether these figures come by other code on other kernels."""

    others: Sequence[str] = ()
    """Dumps of more kernels, which only ``--all-kernels`` takes."""


TASKS = ("tasks-6.1", "tasks-6.12")
OTHER_TASKS = ("tasks-6.12rt", "tasks-7.x")
LOCK_DUMPS = ("locks", "lockmodule", "lockspin")

TABLES = {
    "cpus": Facts(
        CPUS,
        cpus.FACTS,
        ("cpus-6.1", "cpus-6.12", "cpulock-6.12"),
        # -v has all tasks read: from 6.18 on, throttled ones are on no queue.
        ("-i", "-v"),
        branches=True,  # on how cpusets, interrupts and run queues are kept
        others=("cpus-7.x",),
    ),
    "locks": Facts(
        LOCKS,
        locks.FACTS,
        tuple(f"{name}-{k}" for name in LOCK_DUMPS for k in ("6.1", "6.12")),
        others=("locks-7.x",),
    ),
    "memstat": Facts(
        MEMSTAT,
        memstat.FACTS,
        # The last has 4-level page tables.
        ("memory-6.1", "memory-6.12", "memory-7.x", "owners-6.12", "barepages-6.12"),
        memstat.WORDS,
        branches=True,  # on how struct page tells what a page is
        others=("memory-6.12generic", "memory-6.12rt"),
    ),
    "prstat -L": Facts(
        PRSTAT,
        prstat.THREADS,
        TASKS,
        ("-L",),
        branches=True,  # on what the kernel counts as sleep and as latency
        others=OTHER_TASKS,
    ),
    "prstat": Facts(
        PRSTAT, prstat.PROCESSES, TASKS, ("--children",), others=OTHER_TASKS
    ),
    "zombies": Facts(
        ZOMBIES,
        zombies.FACTS,
        ("zombies-6.1", "zombies-6.12"),
        ("--leaks",),
        others=("zombies-7.x",),
    ),
}


@cache
def report(command: str, dump: str) -> Any:
    """Return the JSON that a command prints of a dump."""
    out = io.StringIO()
    table = TABLES[command]
    with redirect_stdout(out):
        run_in_drgn(table.command, open_dump(dump, "btf"), ["--json", *table.words])
    return json.loads(out.getvalue())


@cache
def verdicts(command: str, dump: str) -> Mapping[str, Verdict]:
    """Judge all facts of a command on a dump."""
    run, found = lab.build(dump), report(command, dump)
    return {fact.name: judge(fact, found, run) for fact in TABLES[command].facts}
