# SPDX-License-Identifier: LGPL-2.1-or-later

"""Crowds that are herds, in dumps and made by hand."""

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.kernel.clocks import read_accounting
from msatools.kernel.report import LossLog
from msatools.locks import herds
from msatools.locks.herds import (
    MIN_SWITCHES,
    MIN_WAITERS,
    TURN_NS,
    Watched,
    confirm,
    find_herds,
    may_be_herds,
)
from msatools.locks.report import Herd, WaitTarget, Waker
from msatools.locks.wait_targets import as_conditions
from msatools.program.model import Address
from msatools.tasks.accounting import bound_of
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import Rows
from msatools.tasks.waits import TaskClass
from tests.locks.seen import TASKS, Seen, seen

SECOND = 10**9


def herds_of(dump: Seen) -> tuple[Herd, ...]:
    return find_herds(dump.table, dump.now, dump.ons, dump.clocks)


def test_the_server_that_broadcasts_has_the_only_herd(tasks: Seen) -> None:
    (herd,) = herds_of(tasks)
    server = tasks.run.workload["servers"]["server-broadcast"]
    assert herd.waiters == len(server["workers"]) == 1000
    assert herd.pids == (server["pid"],)
    assert herd.address is not None
    assert 0 <= herd.address - server["condition"] < server["condition_bytes"]
    assert herd.lock == f"futex {server['pid']}:{herd.address:#x}"
    assert (herd.kind, herd.owner, herd.confidence) == ("futex", None, "one dump")
    assert herd.name is None
    now = tasks.clocks.monotonic_ns
    assert now is not None
    # The maximum difference of the CPUs' clocks, in some guests more than a tick.
    slack = bound_of(read_accounting(tasks.prog, LossLog()))
    assert herd.max_age_ns <= now - server["last_request_ns"] + slack
    assert herd.min_age_ns >= now - server["at_rest_ns"] - slack
    assert herd.nvcsw_median >= server["requests"]
    assert herd.waker is not None
    assert herd.waker.pid == herd.waker.tgid == server["pid"]
    assert herd.waker.comm == "server"


def test_both_futexes_of_a_condition_variable_are_one(tasks: Seen) -> None:
    server = tasks.run.workload["servers"]["server-broadcast"]
    workers = {tasks.rows[tid] for tid in server["workers"]}
    (word,) = {on.address for row, on in enumerate(tasks.ons) if row in workers if on}
    # Make half of them wait on the other futex.
    assert word is not None
    ons = list(tasks.ons)
    for row in sorted(workers)[:500]:
        ons[row] = replace(
            ons[row] or WaitTarget(kind="futex"), address=Address(word ^ 4)
        )
    whole = as_conditions(tasks.context(), ons, MIN_WAITERS)
    (found,) = find_herds(tasks.table, tasks.now, whole, tasks.clocks)
    assert (found.waiters, found.name) == (1000, "condition variable")
    assert found.address == server["condition"]
    assert found.lock == f"futex {server['pid']}:{server['condition']:#x}"
    assert as_conditions(tasks.context(), ons, 1001) == ons


def crowd(
    dump: Seen,
    count: int,
    *,
    apart_ns: int,
    asleep_ns: int,
    life_ns: int,
    switches: int,
    on: WaitTarget | None = None,
    watched: Watched | None = None,
    gap_ns: int = 0,
    late: float = 0.5,
) -> tuple[Herd, ...]:
    """Return the herds that are found after changing how some workers wait."""
    tids = dump.run.workload["servers"]["server-broadcast"]["workers"][:count]
    rows = np.array([dump.rows[tid] for tid in tids])
    # Move the clock so that each worker can have lived for *life_ns*.
    clocks = replace(dump.clocks, local_ns=dump.clocks.local_ns + life_ns)
    now_ns = clocks.monotonic_ns or 0
    records = dump.table.records.copy()
    records["start_ns"][rows] = now_ns - life_ns
    records["nvcsw"][rows] = switches
    ages = dump.now.age_ns.copy()
    ages[rows] = asleep_ns + np.linspace(0, apart_ns, count).astype(np.int64)
    ages[rows[round(count * (1 - late)) :]] += gap_ns
    waiters = set(rows.tolist())
    ons = [(on or was) if row in waiters else None for row, was in enumerate(dump.ons)]
    table = TaskTable(records, dump.table.columns)
    now = replace(dump.now, age_ns=ages)
    found = find_herds(table, now, ons, clocks, watched=watched or Watched())
    # Only those are explained that may be one.
    explained = {*table["pid"][may_be_herds(table, now)].tolist()}
    assert all(explained.issuperset(herd.members) for herd in found)
    return found


def test_threads_that_hardly_ever_slept_are_in_no_herd(tasks: Seen) -> None:
    records = tasks.table.records.copy()
    table = TaskTable(records, tasks.table.columns)
    records["nvcsw"] = MIN_SWITCHES - 1
    assert not may_be_herds(table, tasks.now).any()
    (waits,) = np.nonzero(tasks.now.classes == TaskClass.LCK)
    records["nvcsw"][waits[: MIN_WAITERS // 2]] = MIN_SWITCHES
    assert may_be_herds(table, tasks.now)[waits].all()
    assert not may_be_herds(table, tasks.now)[tasks.now.classes == TaskClass.POL].any()


HERD = {
    "apart_ns": 300 * TURN_NS // 2,
    "asleep_ns": 2 * SECOND,
    "life_ns": 20 * SECOND,
    "switches": 400,
}


@pytest.fixture
def dump() -> Seen:
    return seen(TASKS[1])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"switches": 2}, id="hardly ever slept before"),
        pytest.param({"apart_ns": 600 * TURN_NS}, id="went to sleep one by one"),
        pytest.param({"life_ns": 2 * SECOND}, id="wait since they were made"),
        pytest.param({"count": MIN_WAITERS - 1, "apart_ns": 0}, id="are few"),
    ],
)
def test_crowd_that_is_not_a_herd(dump: Seen, change: dict[str, int]) -> None:
    values = {"count": 300, **HERD, **change}
    assert crowd(dump, values.pop("count"), **values) == ()


@pytest.mark.parametrize(
    ("apart_ns", "gap_ns", "found"),
    [
        (290 * TURN_NS, 0, 1),
        (290 * TURN_NS, 100 * TURN_NS, 0),
        (290 * TURN_NS, 160 * TURN_NS, 1),
        (290 * TURN_NS, 3000 * TURN_NS, 1),
        (600 * TURN_NS, 3000 * TURN_NS, 0),
    ],
)
def test_crowd_with_a_part_that_waited_for_a_cpu(
    dump: Seen, apart_ns: int, gap_ns: int, found: int
) -> None:
    """The two parts fell asleep at well separated times, each part at once."""
    values = {**HERD, "apart_ns": apart_ns, "gap_ns": gap_ns}
    assert len(crowd(dump, 300, **values)) == found


def waker_of(dump: Seen, **values: int) -> Waker | None:
    """Return the waker that is found after changing the server's wakee fields."""
    row = dump.rows[dump.run.workload["servers"]["server-broadcast"]["pid"]]
    records = dump.table.records.copy()
    for name, value in values.items():
        records[name][row] = value
    table = TaskTable(records, dump.table.columns)
    (herd,) = find_herds(table, dump.now, dump.ons, dump.clocks)
    return herd.waker


def test_waker_that_was_interrupted(dump: Seen) -> None:
    """last_wakee can be any task; wakee_flips still identifies the waker."""
    other = int(dump.table["address"][0])
    waker = waker_of(dump, last_wakee=other)
    assert waker is not None
    assert waker == waker_of(dump)
    assert waker_of(dump, last_wakee=other, wakee_flips=499) is None


@pytest.mark.parametrize(
    ("on", "lock"),
    [
        (WaitTarget(kind="socket", inode=7), "socket:[7]"),
        (WaitTarget(kind="semaphore", id=3), "semaphore 3"),
        (WaitTarget(kind="lock", type="mutex", address=Address(0xFF10)), "lock 0xff10"),
        (
            WaitTarget(kind="futex", address=Address(16), inode=3),
            "futex 0x10 of inode 3",
        ),
        (WaitTarget(kind="flock", inode=3, device="vda 254:0"), "flock 3 of vda 254:0"),
    ],
)
def test_herds_of_other_queues(dump: Seen, on: WaitTarget, lock: str) -> None:
    (herd,) = crowd(dump, 300, on=on, **HERD)
    assert herd.lock == lock
    assert herd.address == on.address


@pytest.mark.parametrize(
    "on",
    [
        WaitTarget(kind="timer"),
        WaitTarget(kind="futex"),
        WaitTarget(kind="poll", count=3),
        WaitTarget(kind="tty"),
    ],
)
def test_waits_without_a_common_object_are_no_herd(dump: Seen, on: WaitTarget) -> None:
    assert crowd(dump, 300, on=on, **HERD) == ()


def test_confirmed_if_all_but_a_few_were_woken(dump: Seen) -> None:
    (herd,) = herds_of(dump)
    slept = np.ones(1000, np.int64)
    assert confirm(herd, slept).confidence == "confirmed"
    slept[:50] = 0
    assert confirm(herd, slept).confidence == "confirmed"
    slept[50] = 0
    assert confirm(herd, slept).confidence == "one dump"
    assert confirm(herd, slept[:0]) == herd


def test_herd_within_an_interval(dump: Seen) -> None:
    slept = dump.table["nvcsw"].astype(np.int64)
    arguments = dump.table, dump.now, dump.ons, dump.clocks
    (herd, *_) = find_herds(*arguments, watched=Watched(slept))
    assert herd.confidence == "confirmed"
    assert herd.wakeups is not None
    assert herd.wakeups >= herd.waiters
    assert herd.in_vain is not None
    assert 0.9 < herd.in_vain < 1
    (herd, *_) = find_herds(*arguments, watched=Watched(0 * slept))
    assert herd.confidence == "one dump"


@pytest.mark.parametrize(
    ("slept", "asleep_ns", "looks"),
    [(0, SECOND, 0), (1, 6 * SECOND, 1), (None, SECOND, 1), (None, 6 * SECOND, 0)],
)
def test_idle_crowd_is_not_read_again(
    dump: Seen, slept: int | None, asleep_ns: int, looks: int
) -> None:
    """Reading again costs time, and an idle crowd cannot be within a round."""
    counts_read = []

    def again(rows: Rows) -> Iterator[TaskTable]:
        counts_read.append(len(rows))
        return iter(())

    counts = None if slept is None else np.full(len(dump.table), slept, np.int64)
    values = {**HERD, "apart_ns": 600 * TURN_NS, "asleep_ns": asleep_ns}
    assert crowd(dump, 300, watched=Watched(counts, again), **values) == ()
    assert counts_read == [300] * looks


def test_repeated_reads_of_crowds_are_bounded(
    dump: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(herds.time, "sleep", lambda _: None)
    again = herds.read_again(TaskReader(dump.reader), dump.table)
    rows = np.arange(1000)
    tables = [list(again(rows)) for _ in range(6)]
    assert [len(each) for each in tables] == [8, 8, 8, 8, 0, 0]
    assert {len(table) for each in tables for table in each} == {250}


def test_crowd_woken_for_separate_work_is_not_a_herd(dump: Seen) -> None:
    """The server wakes its workers one by one, each for its own work."""
    (herd, *_) = herds_of(dump)
    server = dump.run.workload["servers"]["server-signal"]
    rows = np.array([dump.rows[tid] for tid in server["workers"]])
    on = WaitTarget(kind="futex", address=herd.address)
    slept = np.ones(len(dump.table), np.int64)
    watched = Watched(slept)
    arguments = dump.table, dump.now, rows, dump.clocks
    found = herds.crowd_of("futex", on, *arguments, watched=watched)
    assert found.confidence == "none"
    assert (found.wakeups, found.in_vain) == (None, None)
