# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of msa-prstat for the lab's dumps, and each guest's /proc."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache, cached_property
from typing import Any

from drgn import Program
from msatools.commands.prstat import COMMAND

from fixtures import lab
from msatools.cli.drgn_prompt import run_in_drgn
from tests.support.dumps import open_dump

MS = 1_000_000
SECOND = 1000 * MS
TICK_NS = 10 * MS
"""Unit of times in /proc: USER_HZ is 100."""

Task = dict[str, Any]
"""A row of a report's ``tasks``."""


@cache
def opened(name: str, types: str) -> Program:
    return open_dump(name, types)


@cache
def on_dump(name: str, *words: str, types: str = "btf") -> str:
    """Return the output of ``%prstat`` for one of the lab's dumps."""
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, opened(name, types), words)
    return out.getvalue()


def text(name: str, *words: str) -> list[str]:
    return on_dump(name, *words).splitlines()


def report(name: str, *words: str, types: str = "btf") -> Any:
    """Return a report's JSON; tests must not change it."""
    return _parsed(on_dump(name, "--json", *words, types=types))


@cache
def _parsed(out: str) -> Any:
    (line,) = out.splitlines()
    return json.loads(line)


def table(lines: list[str], first: str) -> list[dict[str, str]]:
    """Return the rows of the table with this first column.

    Cells of the last column and of ON can contain spaces.
    """
    (start,) = (n for n, line in enumerate(lines) if line.split()[:1] == [first])
    head, rows = lines[start], []
    names = head.split()
    for line in lines[start + 1 :]:
        if line.startswith(("Total:", "NPROC", "~ ")):
            break
        cells: list[str] = []
        rest, left = line, len(names)
        if "ON" in names:
            start, end = head.index(" ON ") + 1, head.index(" VCX ") + len(" VCX")
            cells = [*line[:start].split(), *line[start:end].rsplit(None, 1)]
            rest, left = line[end:], len(names) - len(cells)
        cells += rest.split(None, left - 1)
        rows.append(dict(zip(names, cells, strict=False)))
    return rows


class Said:
    """A guest's record of its tasks."""

    def __init__(self, name: str) -> None:
        self.run = lab.build(name)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.run.truth_names())

    @property
    def tasks(self) -> dict[str, Task]:
        named: dict[str, Task] = self.run.workload["tasks"]
        return named

    def has(self, name: str) -> bool:
        return name in self.names

    def stat(self, path: str) -> list[str]:
        """Return the fields of a stat file, from 1."""
        after = self.run.truth(f"{path}/stat").rpartition(b") ")[2]
        return ["", "", "", *after.decode().split()]

    def status(self, path: str) -> dict[str, list[str]]:
        whole = self.run.truth(f"{path}/status").decode("utf-8", "replace")
        lines = (line.partition(":") for line in whole.split("\n"))
        return {key: value.split() for key, _, value in lines}

    def schedstat(self, path: str) -> list[int]:
        return list(map(int, self.run.truth(f"{path}/schedstat").split()))


@cache
def said(name: str) -> Said:
    return Said(name)


def by_pid(found: Any) -> dict[int, Task]:
    return {task["pid"]: task for task in found["tasks"]}


def still(name: str, found: Any) -> Iterator[tuple[Task, str]]:
    """Yield threads whose present wait began before the guest read their files.

    Each item is a row and a directory in /proc. Differences of clocks are allowed for.
    """
    truth = said(name)
    recorded_ns = truth.run.workload["times"]["monotonic_ns"]
    for task in found["tasks"]:
        began_ns = found["taken_at_ns"] - task["class_age_ns"]
        path = f"proc/{task['tgid']}/task/{task['pid']}"
        if task["class_age_bound"] == "upper" or not truth.has(f"{path}/stat"):
            continue
        if began_ns < recorded_ns - found["bound_ns"] and task["state"] != "R":
            yield task, path
