# SPDX-License-Identifier: LGPL-2.1-or-later

"""The tasks of a dump, and the dead among them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskReader, TaskTable
from msatools.zombies.dead import zombie_rows
from tests.support.dumps import open_dump

ZOMBIES = ("zombies-6.1", "zombies-6.12")


@dataclass
class Dump:
    run: lab.Run
    reader: Reader
    tasks: TaskTable
    dead: Rows

    @property
    def workload(self) -> dict[str, Any]:
        return self.run.workload

    def all_dead(self) -> list[dict[str, Any]]:
        """What the guest knows of each: processes, and threads that are traced."""
        return [*self.workload["zombies"], *self.workload["zombie_threads"]]

    def pids(self) -> set[int]:
        """The IDs of all threads, as /proc has them."""
        names = (name.split("/") for name in self.run.truth_names())
        return {
            int(part)
            for name in names
            if name[0] == "proc"
            for part in (name[1:2] + name[3:4])
            if part.isdigit()
        }


@lru_cache(maxsize=2)
def read_dump(name: str, types: str) -> Dump:
    reader, findings = Reader(open_dump(name, types)), Findings()
    tasks = TaskReader(reader).read_all(findings)
    assert not findings.notes
    return Dump(lab.build(name), reader, tasks, zombie_rows(tasks))


def with_above(counts: Counter[str]) -> Iterator[tuple[str, int]]:
    """Give groups by path with what is in them and below; not the first of all."""
    above: Counter[str] = Counter()
    for path, count in counts.items():
        parts = path.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            above["/" + "/".join(parts[:depth])] += count
    above.pop("/", None)
    yield from above.items()
