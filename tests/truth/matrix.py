# SPDX-License-Identifier: LGPL-2.1-or-later

"""
All facts of all commands on each kernel and machine, written to docs/kernels.md.

A cell is a machine and a kernel, such as ``nokaslr-6.12``. The cells of ``plain`` have
the dumps of all scenarios on that kernel that have recorded facts; the others have one,
with facts of all commands in it.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fixtures import lab
from fixtures.lab.errors import LabError
from fixtures.lab.kernels import KERNELS
from fixtures.lab.machines import MACHINES
from msatools.cli.answers import checks_of
from msatools.kernel.report import quietly
from msatools.program import describe
from msatools.registry import load
from msatools.selfcheck.selfcheck import SelfChecks
from tests.support.dumps import open_dump
from tests.truth.tables import TABLES, types_of, verdicts

PAGE = Path(__file__).parents[2] / "docs/kernels.md"
PLAIN = "plain"
COMMANDS = ("memstat", "prstat", "locks", "zombies", "cpus", "whatis", "report")
ABOUT = """\
# Kernels and machines

Written by `make test-matrix`. Guests record what the kernel says of itself in /proc
and /sys and what their workload has made.

Kernels are Debian's own packages, except those that are built from Debian's source
with options that its packages do not have: 6.12debug keeps who allocated each page,
checks locking (lockdep) and unmaps free pages; 6.12small has no BTF, no control
groups' memory, no NUMA and the small slab allocator. The cells of `plain` have the
dumps of all scenarios on that kernel.

Each figure of a report that a guest has recorded as well has to be the same (exact),
or off by no more than a cause explains that is named below (explained). Checks are
those of the command's own `--self-check` that hold. `make test-matrix CELL=NAME`
tries one machine and kernel, such as `nokaslr-6.12`.
"""


@dataclass
class Result:
    """How a command did in a cell."""

    exact: int = 0
    explained: int = 0
    failed: list[str] = field(default_factory=list)
    causes: dict[str, int] = field(default_factory=dict)
    """Facts with figures that are explained, and how many."""

    why_not: dict[str, str] = field(default_factory=dict)
    """Facts that do not apply, and why."""

    checks: int = 0
    """Checks of ``--self-check`` that hold."""

    def __str__(self) -> str:
        parts = [f"{self.exact:,} exact"]
        if self.explained:
            parts.append(f"{self.explained:,} explained")
        if self.checks:
            parts.append(f"{self.checks} checks")
        if self.failed:
            parts.append(f"**{len(self.failed):,} failed**")
        return ", ".join(parts)


@dataclass(frozen=True)
class Cell:
    """A machine and a kernel."""

    machine: str
    kernel: str

    @property
    def name(self) -> str:
        return f"{self.machine}-{self.kernel}"

    def dumps(self, table: str) -> Iterator[str]:
        """Yield the dumps with facts of a table."""
        if self.machine == PLAIN:
            listed = (*TABLES[table].dumps, *TABLES[table].others)
            names = dict.fromkeys(dump.rpartition("-")[0] for dump in listed)
            there = lab.scenarios()
            dumps = (f"{name}-{self.kernel}" for name in names)
            yield from (dump for dump in dumps if dump in there)
        yield self.name


def cells() -> list[Cell]:
    """List all cells, the plain machine on each kernel first."""
    machines = {row.name: row for row in MACHINES}
    found = [Cell(PLAIN, kernel) for kernel in KERNELS]
    return [
        *(cell for cell in found if cell.name in lab.scenarios()),
        *(
            Cell(row.name, row.kernel)
            for name, row in machines.items()
            if name != PLAIN
        ),
    ]


def build(dump: str) -> str:
    """Build a dump; what went wrong, or nothing."""
    try:
        lab.build(dump)
    except LabError as error:
        print(f"{dump} cannot be built: {error}", file=sys.stderr, flush=True)
        return str(error).splitlines()[0]
    return ""


def judge(cell: Cell, unbuilt: Mapping[str, str]) -> dict[str, Result]:
    """Judge all facts in a cell, by command."""
    results = {command: Result() for command in COMMANDS}
    for table in TABLES:
        result = results[table.partition(" ")[0]]
        applied: set[str] = set()
        why_not: dict[str, str] = {}
        for dump in cell.dumps(table):
            if dump in unbuilt:
                result.failed.append(f"{dump} cannot be built: {unbuilt[dump]}")
                continue
            try:
                found = verdicts(table, dump)
            except Exception as error:
                result.failed.append(f"{dump}: {type(error).__name__}: {error}")
                continue
            for name, verdict in found.items():
                result.exact += verdict.exact
                result.explained += verdict.within
                result.failed += [f"{dump}: {line}" for line in verdict.failed]
                if verdict.within:
                    result.causes[name] = result.causes.get(name, 0) + verdict.within
                if verdict.why_not:
                    why_not[name] = verdict.why_not
                else:
                    applied.add(name)
        result.why_not |= {n: why for n, why in why_not.items() if n not in applied}
    if cell.name not in unbuilt:
        for command, result in results.items():
            self_check(command, cell.name, result)
    return results


def self_check(command: str, dump: str, result: Result) -> None:
    """Add the verdicts of a command's ``--self-check`` on a dump."""
    try:
        prog = open_dump(dump, types_of(dump))
        checks = checks_of(load(command))
        found = SelfChecks(command, checks, prog, describe(prog)).report(quietly)
    except Exception as error:
        failure = f"{dump}: --self-check: {type(error).__name__}: {error}"
        result.failed.append(failure)
        return
    for check in found.checks:
        if check.verdict == "ok":
            result.checks += 1
        elif check.has_failed:
            result.failed.append(
                f"{dump}: {check.name} {check.verdict}: {check.left_value} of "
                f"{check.left}, {check.right_value} of {check.right}"
            )


Results = Mapping[Cell, Mapping[str, Result]]


def releases(chosen: Iterable[Cell]) -> dict[str, str]:
    """Return what ``uname -r`` prints on the kernels that have been built."""
    found = {cell.kernel: lab.cached(cell.name) for cell in chosen}
    return {kernel: run.release for kernel, run in found.items() if run}


def page(results: Results, release: Mapping[str, str]) -> str:
    """Return the text of docs/kernels.md.

    :param release: What ``uname -r`` prints, by kernel.
    """
    parts = [ABOUT, "## Kernels\n"]
    parts += [f"- {kernel}: {name}" for kernel, name in release.items()]
    parts += ["\n## Figures\n", *table(results), "\n## Explained\n"]
    parts += [*explained(results), "\n## Not applicable\n", *not_applicable(results)]
    if untried := [cell.name for cell in cells() if cell not in results]:
        parts += ["\n## Not tried\n", f"{', '.join(untried)}."]
    return "\n".join(parts) + "\n"


def summary(cell: Cell) -> str:
    if KERNELS[cell.kernel].arch == "arm64":
        return "2 CPUs, QEMU's `virt`"
    return next(row.summary for row in MACHINES if row.name == cell.machine)


def table(results: Results) -> Iterator[str]:
    yield f"| Cell | Machine | {' | '.join(f'msa-{name}' for name in COMMANDS)} |"
    yield "|" + "---|" * (2 + len(COMMANDS))
    for cell, by_command in results.items():
        figures = " | ".join(str(by_command[command]) for command in COMMANDS)
        yield f"| {cell.name} | {summary(cell)} | {figures} |"


def explained(results: Results) -> Iterator[str]:
    """Yield each fact with figures that are off, how many, and the cause."""
    for name, rows in TABLES.items():
        for fact in rows.facts:
            command = name.partition(" ")[0]
            count = sum(by[command].causes.get(fact.name, 0) for by in results.values())
            if count:
                yield f"- msa-{command}, {fact.name} ({count:,}): {fact.cause}."


def not_applicable(results: Results) -> Iterator[str]:
    """Yield which facts no guest of a cell has recorded, and why."""
    for command in COMMANDS:
        where: dict[tuple[str, str], list[str]] = {}
        for cell, by_command in results.items():
            for fact, why in by_command[command].why_not.items():
                where.setdefault((fact, why), []).append(cell.name)
        together: dict[tuple[str, str], list[str]] = {}
        for (fact, why), names in where.items():
            together.setdefault((why, in_short(names, results)), []).append(fact)
        for (why, names), facts in together.items():
            yield f"- msa-{command}, {'; '.join(facts)}: {why} ({names})."


def in_short(names: Sequence[str], results: Results) -> str:
    """Name cells, or those that are not among them if these are fewer."""
    others = [cell.name for cell in results if cell.name not in names]
    if len(others) >= len(names):
        return ", ".join(names)
    return f"all but {', '.join(others)}" if others else "all"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.truth.matrix", description=__doc__
    )
    parser.add_argument("cell", nargs="*", help="try only these, and write nothing")
    known = {cell.name: cell for cell in cells()}
    args = parser.parse_args()
    if unknown := {*args.cell} - {*known}:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in args.cell] or list(known.values())
    dumps = dict.fromkeys(
        dump for cell in chosen for table in TABLES for dump in cell.dumps(table)
    )
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        began = time.monotonic()
        failures = zip(dumps, pool.map(build, dumps), strict=True)
        unbuilt = {dump: why for dump, why in failures if why}
        built = time.monotonic()
        judged = pool.map(judge, chosen, [unbuilt] * len(chosen))
        results: Results = dict(zip(chosen, judged, strict=True))
    print("\n".join(table(results)))
    failed = [
        f"{cell.name}: msa-{command}: {line}"
        for cell, by_command in results.items()
        for command, result in by_command.items()
        for line in result.failed
    ]
    print("\n".join(failed))
    ended = time.monotonic()
    print(f"dumps {built - began:.0f} s, facts {ended - built:.0f} s")
    if not args.cell:
        PAGE.write_text(page(results, releases(results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
