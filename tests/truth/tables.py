# SPDX-License-Identifier: LGPL-2.1-or-later

"""The facts of every command, the dumps that recorded them, and the verdicts."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any

from msatools.commands.cpus import COMMAND as CPUS
from msatools.commands.locks import COMMAND as LOCKS
from msatools.commands.memstat import COMMAND as MEMSTAT
from msatools.commands.prstat import COMMAND as PRSTAT
from msatools.commands.report import COMMAND as REPORT
from msatools.commands.whatis import COMMAND as WHATIS
from msatools.commands.zombies import COMMAND as ZOMBIES

from fixtures import lab
from fixtures.lab import Run
from msatools.cli.arguments import Command
from msatools.cli.drgn_prompt import run_in_drgn
from tests.support.dumps import open_dump
from tests.truth import (
    cpus,
    locks,
    memstat,
    prstat,
    stalls,
    whatis,
    workqueues,
    zombies,
)
from tests.truth import io as io_in_flight
from tests.truth import report as report_facts
from tests.truth.fact import Fact, Verdict, judge


@dataclass(frozen=True)
class Facts:
    """The facts of one command, and the dumps that recorded some of them."""

    command: Command[Any]
    facts: Sequence[Fact]
    dumps: Sequence[str]
    words: Sequence[str] = ()
    """Options without which the report lacks figures."""

    branches: bool = False
    """Whether other kernels take other code paths for these figures."""

    others: Sequence[str] = ()
    """Dumps of further kernels, for ``--all-kernels``."""

    asks: Callable[[Run], Sequence[str]] = lambda _: ()
    """Returns more words, of what the guest recorded."""


TASKS = ("tasks-6.1", "tasks-6.12")
OTHER_TASKS = ("tasks-6.12rt", "tasks-7.x", "tasks-6.1arm64", "tasks-6.12arm64")
NEED_DWARF = ("-6.1arm64", "-6.12small")
"""Debian's cloud kernel of arm64 has no symbols of data (CONFIG_KALLSYMS_ALL=n), and
the small kernel has no BTF."""
LOCK_DUMPS = ("locks", "lockmodule", "lockspin", "field")
STALLS = ("stalls-locks", "stalls-rcu", "stalls-stop")

TABLES = {
    "cpus": Facts(
        CPUS,
        cpus.FACTS,
        ("cpus-6.1", "cpus-6.12", "cpulock-6.12"),
        ("-i",),
        branches=True,  # cpusets, interrupts and run queues
        others=("cpus-7.x", "cpus-6.1arm64", "cpus-6.12arm64"),
    ),
    "cpus --stalls": Facts(
        CPUS,
        stalls.FACTS,
        ("stalls-locks-6.1", *(f"{name}-6.12" for name in STALLS)),
        ("--stalls",),
        branches=True,  # preempt counts, cross calls
        others=(*(f"{name}-7.x" for name in STALLS), "stalls-rcu-6.1"),
    ),
    "locks": Facts(
        LOCKS,
        locks.FACTS,
        tuple(f"{name}-{k}" for name in LOCK_DUMPS for k in ("6.1", "6.12")),
        others=("locks-7.x", "field-7.x", "locks-6.1arm64", "locks-6.12arm64"),
    ),
    "locks --workqueues": Facts(
        LOCKS,
        workqueues.FACTS,
        ("workqueues-6.1", "workqueues-6.12"),
        ("--workqueues",),
        branches=True,  # flags of pools and work items
        others=("workqueues-7.x",),
    ),
    "locks --io": Facts(
        LOCKS,
        io_in_flight.FACTS,
        ("inflight-6.1", "inflight-6.12"),
        ("--io",),
        branches=True,  # tags, holders of disks and bios
        others=("inflight-7.x",),
    ),
    "memstat": Facts(
        MEMSTAT,
        memstat.FACTS,
        # The last has 4-level page tables.
        (
            *("memory-6.1", "memory-6.12", "memory-7.x", "memory-6.12arm64"),
            *("owners-6.12", "barepages-6.12"),
        ),
        memstat.WORDS,
        branches=True,  # page types in struct page
        others=(
            *("memory-6.12generic", "memory-6.12rt", "memory-6.1arm64"),
            *("memory-6.12debug", "memory-6.12small"),
        ),
    ),
    "prstat -L": Facts(
        PRSTAT,
        prstat.THREADS,
        TASKS,
        ("-L",),
        branches=True,  # accounting of sleep and latency
        others=OTHER_TASKS,
    ),
    "prstat": Facts(
        PRSTAT, prstat.PROCESSES, TASKS, ("--children",), others=OTHER_TASKS
    ),
    "whatis": Facts(
        WHATIS,
        whatis.FACTS,
        (
            *("memory-6.1", "memory-6.12", "memory-7.x"),
            *("lockmodule-6.1", "lockmodule-6.12", "locks-6.12"),
        ),
        ("--waits",),
        branches=True,  # slabs, page types, areas of vmalloc, reverse mappings
        others=("memory-6.12arm64", "memory-6.12rt", "locks-7.x"),
        asks=whatis.asks,
    ),
    "report": Facts(
        REPORT,
        report_facts.FACTS,
        ("crashes-null-6.1", "crashes-null-6.12"),
    ),
    "zombies": Facts(
        ZOMBIES,
        zombies.FACTS,
        ("zombies-6.1", "zombies-6.12"),
        ("--leaks",),
        others=("zombies-7.x", "zombies-6.1arm64", "zombies-6.12arm64"),
    ),
}


def types_of(dump: str) -> str:
    """Return where the types of a dump's kernel are taken from."""
    return "dwarf" if dump.endswith(NEED_DWARF) else "btf"


@cache
def report(command: str, dump: str) -> Any:
    """Return the JSON that a command prints for a dump."""
    out = io.StringIO()
    table = TABLES[command]
    prog = open_dump(dump, types_of(dump))
    with redirect_stdout(out):
        words = ("--json", *table.words, *table.asks(lab.build(dump)))
        run_in_drgn(table.command, prog, words)
    return json.loads(out.getvalue())


@cache
def verdicts(command: str, dump: str) -> Mapping[str, Verdict]:
    """Judge all facts of a command on a dump."""
    run, found = lab.build(dump), report(command, dump)
    return {fact.name: judge(fact, found, run) for fact in TABLES[command].facts}
