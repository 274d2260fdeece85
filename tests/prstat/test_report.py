# SPDX-License-Identifier: LGPL-2.1-or-later

"""The JSON of msa-prstat on each kernel's dumps."""

from collections import Counter
from typing import Any

import pytest

from tests.prstat.dumps import MIDWAY, OFF, ON, long
from tests.prstat.reports import SECOND, Task, by_pid, report, said
from tests.support.dumps import TYPES


@pytest.fixture(params=[*OFF, *long(*ON, *MIDWAY)])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def threads(name: str) -> Any:
    return report(name, "-L")


@pytest.fixture
def processes(name: str) -> Any:
    return report(name)


def test_every_thread_and_process_once(threads: Any, processes: Any) -> None:
    """Rows are unique; ``tests.truth`` compares them with the guest's files."""
    found = [task["pid"] for task in threads["tasks"]]
    assert len(found) == len(set(found)) > 2200
    pids = [task["pid"] for task in processes["tasks"]]
    assert sorted(pids) == sorted({task["tgid"] for task in threads["tasks"]})
    assert all(task["pid"] == task["tgid"] for task in processes["tasks"])


def test_nothing_is_lost(threads: Any) -> None:
    coverage = threads["coverage"]
    assert coverage["tasks"] == len(threads["tasks"]) > 2200
    kinds = ("unreadable", "broken", "incomplete", "lost")
    assert not {k: n for k, n in coverage.items() if n and k.endswith(kinds)}
    codes = {note["code"] for note in threads["notes"]}
    # Delayed sleepers and CPUs with different clocks have impossible counters. Their
    # number varies, but they must be noted.
    impossible = {
        f"{key}-impossible"
        for key in ("latency", "breakdown")
        if coverage[f"{key}_impossible"]
    }
    assert codes == impossible


# --- states of threads


def test_ages_that_are_bounds(name: str, threads: Any) -> None:
    """Only threads that sleep on the run queue lose the start of their wait."""
    bounds = [task["class_age_bound"] for task in threads["tasks"]]
    assert bounds.count("estimate") == sum(t["state"] == "Z" for t in threads["tasks"])
    delays = name.endswith("6.12")
    waiting = {t["class_age_bound"] for t in threads["tasks"] if t["class"] == "LAT"}
    assert waiting == {"upper" if delays else "exact"}
    asleep = {t["class_age_bound"] for t in threads["tasks"] if t["state"] in "SD"}
    assert ("upper" in asleep) <= delays


def test_herds(name: str, threads: Any, processes: Any) -> None:
    """The server that wakes all its workers is a herd, the other one is not."""
    server = said(name).run.workload["servers"]["server-broadcast"]
    for found in (threads, processes):
        (herd,) = found["herds"]
        assert herd.keys() >= {"lock", "waiters", "owner"}
        assert herd["pids"] == [server["pid"]]
        assert herd["waiters"] == len(server["workers"])
        assert herd["owner"] is None
        assert herd["lock"].startswith(f"futex {server['pid']}:0x")


# --- processes


def of_process(found: Any, pid: int) -> list[Task]:
    return [task for task in found["tasks"] if task["tgid"] == pid]


SUMMED = ("nvcsw", "nivcsw", "user_ns", "system_ns")


def test_processes_are_sums_of_their_threads(threads: Any, processes: Any) -> None:
    """Sums are exact for processes without ended threads."""
    dead = more = 0
    for task in processes["tasks"]:
        of = of_process(threads, task["pid"])
        summed = {key: sum(t[key] for t in of) for key in SUMMED}
        # A dead leader's counters are not in the process's row, unless all are dead.
        living = [t for t in of if t["class"] != "ZMB"] or of
        for key in ("latency_ns", "off_cpu_ns"):
            assert task[key] == sum(t[key] for t in living), key
        ended = {key: task[key] - summed[key] for key in SUMMED}
        assert min(ended.values()) >= 0
        dead += any(ended.values())
        more += len(of) > 1
    assert dead >= 1
    assert more > 8


def test_states_have_the_time_of_ended_threads(
    name: str, threads: Any, processes: Any
) -> None:
    """It is the time in processes' rows that is not in their threads' rows."""
    of_processes, of_threads = (
        sum(task["user_ns"] + task["system_ns"] for task in found["tasks"])
        for found in (processes, threads)
    )
    code = "states-without-ended"
    (text,) = (
        note["text"]
        for note in report(name, "--states")["notes"]
        if note["code"] == code
    )
    assert f": {(of_processes - of_threads) / SECOND:.3f} s on the CPU" in text
    of_init = report(name, "--states", "-p", "1")["notes"]
    assert code not in {note["code"] for note in of_init}


def test_process_whose_leader_is_dead(name: str, threads: Any, processes: Any) -> None:
    """It has the class of its oldest living thread."""
    task = said(name).tasks["leaderless"]
    process, rows = by_pid(processes)[task["pid"]], by_pid(threads)
    leader, thread = rows[task["pid"]], rows[task["tid"]]
    assert (leader["class"], leader["state"]) == ("ZMB", "Z")
    for key in ("class", "class_age_ns", "class_age_bound", "state", "on"):
        assert process[key] == thread[key], key
    assert process["class"] == "SIG"
    for key in ("comm", "lifetime_ns", "ppid", "uid", "pid"):
        assert process[key] == leader[key], key
    assert process["zombie_ns"] == 0 < leader["zombie_ns"]
    assert process["size_bytes"] == thread["size_bytes"] > 0
    assert process["rss_bytes"] == thread["rss_bytes"] > 0


# --- totals


def test_totals(threads: Any, processes: Any) -> None:
    totals, tasks = threads["totals"], threads["tasks"]
    assert totals == processes["totals"]
    assert totals["threads"] == len(tasks)
    assert totals["processes"] == len(processes["tasks"])
    assert totals["cpus"] == 2
    for key, column in (("states", "state"), ("classes", "class")):
        counts = Counter(task[column] for task in tasks)
        assert counts == {name: n for name, n in totals[key].items() if n}


@pytest.mark.parametrize("name", [*OFF, *ON, *long(*MIDWAY)])
def test_accounting(name: str) -> None:
    """Without statistics, values are null, not 0; with them, parts fit into sums."""
    found = report(name, "-L")
    splits = [task["breakdown"] for task in found["tasks"]]
    if name in OFF:
        assert set(splits) == {None}
        return
    assert found["accounting"]["schedstats"]
    assert None not in splits
    delays = {kind for split in splits for kind in split["delays"]}
    assert {"blkio", "swapin", "freepages", "thrashing", "compact", "wpcopy"} <= delays
    lack = sum(None in split["delays"].values() for split in splits)
    impossible = found["coverage"]["breakdown_impossible"]
    # With accounting since boot, all threads have values, except impossible ones.
    assert lack <= impossible if name in ON else impossible < lack < len(splits)
    asleep = [task for task in found["tasks"] if task["state"] in "SDI"]
    assert len(asleep) > 2000
    for task in asleep:
        split = task["breakdown"]
        kinds = [split[key] for key in ("iowait_ns", "blocked_ns", "sleep_ns")]
        if None in kinds:
            impossible -= 1
        else:
            assert sum(kinds) >= task["class_age_ns"]
    assert impossible >= 0


@pytest.mark.parametrize("name", OFF)
def test_dwarf_gives_the_same(name: str) -> None:
    """All numbers are the same."""
    one, other = (dict(report(name, "-L", "--children", types=kind)) for kind in TYPES)
    kinds = one.pop("target"), other.pop("target")
    assert [kind["types"] for kind in kinds] == ["btf", "dwarf"]
    assert {**kinds[0], "types": None} == {**kinds[1], "types": None}
    reads = {"reads", "bytes_read"}
    for coverage in (one["coverage"], other["coverage"]):
        assert reads <= coverage.keys()
    counts = [
        {key: count for key, count in found.pop("coverage").items() if key not in reads}
        for found in (one, other)
    ]
    assert counts[0] == counts[1]
    assert one == other
    assert len(one["tasks"]) > 190
