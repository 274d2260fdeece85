# SPDX-License-Identifier: LGPL-2.1-or-later

"""Figures of processes are those in each guest's /proc."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.files import _path
from msatools.kernel.percpu import sum_parts
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.accounting import (
    Delays,
    Processes,
    ProcessSums,
    TaskMemory,
    read_delays,
    read_memory,
    read_processes,
    read_reaped,
)
from msatools.tasks.identity import (
    Identities,
    TaskCgroups,
    read_cgroups,
    read_identities,
)
from msatools.tasks.table import TaskReader, TaskTable
from tests.prstat.dumps import MIDWAY, OFF, ON, long
from tests.support.dumps import open_dump


@dataclass
class Read:
    """Everything that is read from one dump."""

    run: lab.Run
    reader: Reader
    losses: LossLog
    table: TaskTable
    identities: Identities
    processes: Processes
    memory: TaskMemory
    cgroups: TaskCgroups
    delays: Delays
    reaped: ProcessSums

    def row(self, tid: int) -> int:
        (found,) = np.flatnonzero(self.table["pid"] == tid)
        return int(found)


def read(name: str, types: str = "btf") -> Read:
    reader, losses = Reader(open_dump(name, types)), LossLog()
    table = TaskReader(reader).read_all(losses)
    found = parts_of(reader, table, losses)
    return Read(lab.build(name), reader, losses, table, *found)


def parts_of(reader: Reader, table: TaskTable, losses: LossLog) -> list[Any]:
    parts = (read_identities, read_processes, read_memory, read_cgroups, read_delays)
    parts += (read_reaped,)
    return [part(reader, table, losses) for part in parts]


@pytest.fixture(scope="module", params=[*OFF, *ON])
def dump(request: pytest.FixtureRequest) -> Read:
    return read(request.param)


def names(dump: Read, pattern: str) -> Iterator[tuple[str, int]]:
    """Yield recorded files that match, with the last number in their paths."""
    for name in dump.run.truth_names():
        if re.fullmatch(pattern, name):
            yield name, int(re.findall(r"/(\d+)/", name)[-1])


def test_nothing_is_lost(dump: Read) -> None:
    assert not dump.losses.notes
    assert not dump.losses.coverage
    assert dump.processes.known.all()
    assert (dump.memory.known == dump.memory.has_mm).all()
    assert (dump.memory.rss_known == dump.memory.has_mm).all()


@pytest.mark.parametrize("name", ["memory-5.10", "memory-6.1", "memory-6.12"])
def test_resident_by_page_tables(name: str) -> None:
    """Rss in smaps_rollup, counted page by page, equals the sum of the counters."""
    dump = read(name)
    compared = counted_less = 0
    for file, pid in names(dump, r"proc/\d+/smaps_rollup"):
        text = dump.run.truth(file)
        listed = re.search(rb"^Rss: +(\d+) kB$", text, re.MULTILINE)
        assert listed
        row = dump.row(pid)
        assert dump.memory.rss_bytes[row] == int(listed[1]) << 10, text
        counted_less += dump.memory.rss_counted_bytes[row] < dump.memory.rss_bytes[row]
        compared += 1
    assert compared > 20
    assert counted_less > 0


def test_delays(dump: Read) -> None:
    """Delays of sleeping tasks are those that taskstats reported."""
    steady = {t["tid"] for t in dump.run.workload["tasks"].values() if t["steady"]}
    totals = dict.fromkeys(dump.delays.delay_ns, 0)
    compared = 0
    for tid, stats in dump.run.workload["taskstats"].items():
        kinds = {name[:-3] for name in stats if name.endswith("_ns")}
        assert totals.keys() == kinds - {"cpu"}
        if int(tid) not in steady:
            continue
        compared += 1
        row = dump.row(int(tid))
        for kind, delay in dump.delays.delay_ns.items():
            assert delay[row] == stats[f"{kind}_ns"], (tid, kind)
            assert dump.delays.count[kind][row] == stats[f"{kind}_count"], (tid, kind)
            totals[kind] += int(delay[row])
    assert compared > 150
    on = dump.run.name in ON
    assert (dump.delays.has == on).all()
    for kind in ("blkio", "swapin", "freepages", "wpcopy"):
        assert (totals[kind] > 0) == on, kind


@pytest.mark.parametrize("name", long(*MIDWAY))
def test_delays_switched_on_midway(name: str) -> None:
    """Only tasks forked since then have delays."""
    dump = read(name)
    later = dump.table["start_ns"] > dump.run.workload["times"]["switched_on_ns"]
    assert 10 < np.count_nonzero(later) < len(later) - 10
    assert (dump.delays.has == later).all()


NOWHERE = 0xFFFF_DEAD_0000_0000
COLUMNS = ("cred", "real_parent", "signal", "mm", "cgroups", "delays")


def test_pointers_to_nowhere() -> None:
    """A bad pointer is counted once, not per task, and affects no other row."""
    good = read("tasks-on-6.12")
    records = good.table.records.copy()
    for column in COLUMNS:
        records[column][5:8] = NOWHERE
    table, losses = TaskTable(records, good.table.columns), LossLog()
    found = Read(
        good.run, good.reader, losses, table, *parts_of(good.reader, table, losses)
    )
    for column in (found.identities.uid, found.identities.euid, found.identities.ppid):
        assert (column[5:8] == -1).all()
    for known in (found.processes.known, found.memory.known, found.delays.has):
        assert not known[5:8].any()
    assert found.cgroups.path(6) is None
    types = ("cred", "task_struct", "signal_struct", "mm_struct", "css_set")
    lost = {f"{name}_unreadable": 1 for name in (*types, "task_delay_info")}
    assert losses.lost == losses.coverage == lost
    assert len(losses.notes) == len(lost)
    rest = np.ones(len(table), np.bool_)
    rest[5:8] = False
    assert (found.identities.ppid == good.identities.ppid)[rest].all()
    assert (found.memory.rss_bytes == good.memory.rss_bytes)[rest].all()
    assert (found.processes.known & found.delays.has)[rest].all()
    for row in np.flatnonzero(rest).tolist():
        assert found.cgroups.path(row) == good.cgroups.path(row)


def test_percpu_parts_that_cannot_be_read() -> None:
    reader, losses = Reader(open_dump("tasks-6.12", "btf")), LossLog()
    sums = sum_parts(reader, np.array([NOWHERE, 0, NOWHERE], np.uint64), losses)
    assert sums.tolist() == [0, 0, 0]
    assert losses.lost == {"percpu_counter_unreadable": 2}  # one a CPU


def test_directories_in_a_loop() -> None:
    nodes = {1: (0, ""), 2: (1, "a"), 3: (2, "b"), 4: (5, "c"), 5: (4, "d"), 6: (7, "")}
    paths = [_path(nodes, node) for node in (1, 2, 3, 4, 6, 0)]
    assert paths == ["/", "/a", "/a/b", None, None, None]
