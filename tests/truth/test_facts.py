# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every fact of every command, held against every dump that has recorded it."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from msatools.commands.cpus import COMMAND as CPUS
from msatools.commands.locks import COMMAND as LOCKS
from msatools.commands.memstat import COMMAND as MEMSTAT
from msatools.commands.prstat import COMMAND as PRSTAT
from msatools.commands.zombies import COMMAND as ZOMBIES

from fixtures import lab
from fixtures.lab import Run
from msatools.cli.main import Command, run_in_drgn
from tests.support.dumps import open_dump
from tests.truth import cpus, locks, memstat, prstat, zombies
from tests.truth.fact import Fact, Figures, Verdict, judge


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


def cases() -> Iterator[object]:
    """Return each command and dump; other kernels where the code branches."""
    for command, table in TABLES.items():
        marks = [pytest.mark.kernels] if table.branches else []
        for dump in table.dumps:
            yield pytest.param(command, dump, marks=marks)
        for dump in table.others:
            yield pytest.param(command, dump)


TASKS = ("tasks-6.1", "tasks-6.12")
OTHER_TASKS = ("tasks-6.12rt", "tasks-7.x")
LOCK_DUMPS = ("locks", "lockmodule", "lockspin")

TABLES = {
    "cpus": Facts(
        CPUS,
        cpus.FACTS,
        ("cpus-6.1", "cpus-6.12", "cpulock-6.12"),
        ("-i",),
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
        others=("memory-6.12generic", "memory-6.12debug", "memory-6.12small"),
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
        ZOMBIES, zombies.FACTS, ("zombies-6.1", "zombies-6.12"), ("--leaks",)
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


@pytest.mark.parametrize(("command", "dump"), [*cases()])
def test_facts(command: str, dump: str) -> None:
    found = verdicts(command, dump).values()
    assert [line for verdict in found for line in verdict.failed] == []
    # What no dump records proves nothing.
    assert sum(verdict.exact for verdict in found) > 0


@pytest.mark.parametrize("command", TABLES)
def test_each_fact_has_a_name_of_its_own(command: str) -> None:
    names = [fact.name for fact in TABLES[command].facts]
    assert sorted({*names}) == sorted(names)


@pytest.mark.parametrize("command", TABLES)
def test_each_fact_is_recorded_by_some_dump(command: str) -> None:
    table = TABLES[command]
    dumps = [dump for dump in table.dumps if dump.endswith("-6.12")]
    for fact in table.facts:
        found = [verdicts(command, dump)[fact.name] for dump in dumps]
        assert any(verdict.exact or verdict.within for verdict in found), fact


def as_reported(report: Any) -> Figures:
    return {"cpu0": report}


def test_a_fact_that_does_not_hold_fails() -> None:
    run: Any = None
    exact = Fact("load", as_reported, lambda run: {"cpu0": 7})
    loose = Fact("load", as_reported, lambda run: {"cpu0": 7}, lambda run: 2, "a tick")
    assert judge(exact, 7, run).exact == 1
    assert judge(exact, 8, run).failed == ["load of cpu0: 8, recorded 7"]
    assert judge(loose, 9, run).within == 1
    assert judge(loose, 10, run).failed
    assert judge(loose, None, run).failed


def test_what_was_not_recorded_is_no_success() -> None:
    def recorded(run: Run) -> Figures:
        raise KeyError("proc/vmstat")

    run: Any = None
    verdict = judge(Fact("load", as_reported, recorded), 7, run)
    assert verdict.why_not
    assert (verdict.exact, verdict.failed) == (0, [])


def test_a_tolerance_has_a_cause() -> None:
    with pytest.raises(ValueError, match="cause"):
        Fact("load", as_reported, lambda run: {}, lambda run: 1)
