# SPDX-License-Identifier: LGPL-2.1-or-later

"""The JSON of msa-prstat on each kernel's dumps, held against its guest's /proc."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from msatools.prstat.prstat import _why_impossible
from tests.prstat.dumps import ALL, OFF, ON
from tests.prstat.maderows import MadeThreads
from tests.prstat.reports import (
    MS,
    PAGE,
    TICK_NS,
    Task,
    by_pid,
    report,
    said,
    still,
    still_processes,
)

ROW = {
    *("pid", "tgid", "ppid", "uid", "comm", "cgroup", "kthread", "threads", "state"),
    *("pri", "nice", "cpu", "size_bytes", "rss_bytes", "class", "class_age_ns"),
    *("class_age_bound", "on", "lifetime_ns", "user_ns", "system_ns", "latency_ns"),
    *("latency_bound", "off_cpu_ns", "zombie_ns", "breakdown", "nvcsw", "nivcsw"),
    *("min_flt", "maj_flt", "syscalls", "signals"),
}
"""The keys of a row, by the contract."""

BREAKDOWN = {"iowait_ns", "blocked_ns", "sleep_ns", "stopped_ns", "delays"}
HEAD = {
    *("schema", "target", "taken_at_ns", "interval_ns", "coverage", "notes"),
    *("tasks", "herds"),
}
CLASSES = frozenset(
    [
        *("CPU", "USR", "SYS", "INT", "LAT", "LCK", "KLK", "FLK", "POL", "FLT", "SWP"),
        *("RCL", "DSK", "PIP", "NET", "TMR", "WAI", "SIG", "IPC", "TTY", "URG", "KTW"),
        *("STP", "TRC", "ZMB", "OTH"),
    ]
)
BOUNDS = {"exact", "upper", "estimate"}

NEW = ("tasks-6.12", "tasks-on-6.12", "tasks-midway-6.12")
"""Where threads may sleep on the run queue."""


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def threads(name: str) -> Any:
    return report(name, "-L")


@pytest.fixture
def processes(name: str) -> Any:
    return report(name)


# --- what there is


def test_keys(threads: Any, processes: Any) -> None:
    """No more and no less than the contract has, but for the head's additions."""
    for found in (threads, processes):
        assert set(found) >= HEAD
        assert set(found) - HEAD == {"bound_ns", "accounting", "totals"}
        assert found["schema"] == "msatools.prstat/1"
        assert found["interval_ns"] is None
        assert {key for task in found["tasks"] for key in task} == ROW
        assert all(len(task) == len(ROW) for task in found["tasks"])
        splits = [task["breakdown"] for task in found["tasks"] if task["breakdown"]]
        assert all(set(split) == {*BREAKDOWN, "coverage"} for split in splits)


def test_values(threads: Any, processes: Any) -> None:
    for task in (*threads["tasks"], *processes["tasks"]):
        assert task["syscalls"] is task["signals"] is None
        assert task["class"] in CLASSES
        assert task["class_age_bound"] in BOUNDS
        assert task["latency_bound"] in BOUNDS
        assert task["state"] in "RSDTtZXIP"
        assert (task["class"] == "ZMB") == (task["state"] == "Z")
        assert task["on"] is None or isinstance(task["on"]["kind"], str)
        numbers = [value for key, value in task.items() if key.endswith("_ns")]
        assert all(isinstance(value, int) and value >= 0 for value in numbers)


def test_nothing_is_lost(name: str, threads: Any) -> None:
    coverage = threads["coverage"]
    assert coverage["tasks"] == len(threads["tasks"]) > 2200
    kinds = ("unreadable", "broken", "incomplete", "lost")
    assert not {k: n for k, n in coverage.items() if n and k.endswith(kinds)}
    codes = {note["code"] for note in threads["notes"]}
    # Delayed sleepers have impossible counters of waits for disks.
    assert codes <= ({"breakdown-impossible"} if name in NEW else set())
    assert coverage["latency_impossible"] == 0


def test_every_thread_once(name: str, threads: Any) -> None:
    listed = {int(tid) for tid in re.findall(r"/task/(\d+)/stat\b", said(name).listed)}
    found = [task["pid"] for task in threads["tasks"]]
    assert len(found) == len(set(found))
    assert len(listed) > 2200
    assert listed <= set(found)


def test_every_process_once(name: str, threads: Any, processes: Any) -> None:
    pids = [task["pid"] for task in processes["tasks"]]
    assert sorted(pids) == sorted({task["tgid"] for task in threads["tasks"]})
    listed = {int(pid) for pid in re.findall(r"proc/(\d+)/io\b", said(name).listed)}
    assert len(listed) > 150
    assert listed <= set(pids)
    assert all(task["pid"] == task["tgid"] for task in processes["tasks"])


# --- what each is doing


def test_class_and_age_of_every_named_task(name: str, threads: Any) -> None:
    """A wait never seems to have begun before it was announced."""
    found, wrong, kinds, exact = by_pid(threads), {}, set(), 0
    for task_name, told in said(name).tasks.items():
        row = found[told["tid"]]
        if row["class"] not in (told["class"], *told.get("also", ())):
            wrong[task_name] = row["class"], told["class"]
            continue
        kinds.add(task_name.rstrip("0123456789"))
        if not told["steady"] or not told.get("start_ns"):
            continue
        began = threads["taken_at_ns"] - row["class_age_ns"]
        latest = told["in_place_ns"] + threads["bound_ns"]
        assert began <= latest, task_name
        if row["class_age_bound"] != "upper":
            # An upper bound is when it came to the CPU before: a little earlier.
            assert began >= told["start_ns"] - threads["bound_ns"], task_name
            exact += 1
    assert wrong == {}
    assert len(kinds) > 120
    assert exact > 150
    assert {told["class"] for told in said(name).tasks.values()} <= CLASSES


def test_ages_that_are_bounds(name: str, threads: Any) -> None:
    """Only threads that sleep on the run queue lose when their wait began."""
    bounds = [task["class_age_bound"] for task in threads["tasks"]]
    assert bounds.count("estimate") == sum(t["state"] == "Z" for t in threads["tasks"])
    delays = name.endswith("6.12")
    waiting = {t["class_age_bound"] for t in threads["tasks"] if t["class"] == "LAT"}
    assert waiting == {"upper" if delays else "exact"}
    asleep = {t["class_age_bound"] for t in threads["tasks"] if t["state"] in "SD"}
    assert ("upper" in asleep) <= delays


def test_herds(name: str, threads: Any, processes: Any) -> None:
    """The server that wakes all its workers is one, the other one is not."""
    server = said(name).run.workload["servers"]["server-broadcast"]
    for found in (threads, processes):
        (herd,) = found["herds"]
        assert herd.keys() >= {"lock", "waiters", "owner"}
        assert herd["pids"] == [server["pid"]]
        assert herd["waiters"] == len(server["workers"])
        assert herd["owner"] is None
        assert herd["lock"].startswith(f"futex {server['pid']}:0x")


# --- what /proc says of threads


def test_as_proc_says_of_threads(name: str, threads: Any) -> None:
    compared = 0
    for task, place in still(name, threads):
        fields = said(name).stat(place)
        state = fields[3]
        assert task["state"] == state, place
        assert task["ppid"] == int(fields[4]), place
        assert task["pri"] == int(fields[18]), place
        assert task["nice"] == int(fields[19]), place
        assert task["threads"] == int(fields[20]), place
        assert task["cpu"] == int(fields[39]), place
        assert task["min_flt"] == int(fields[10]), place
        assert task["maj_flt"] == int(fields[12]), place
        if state != "Z":
            assert task["size_bytes"] == int(fields[23]), place
        compared += 1
    assert compared > 1800


def test_as_status_says_of_threads(name: str, threads: Any) -> None:
    compared, users = 0, set()
    for task, place in still(name, threads):
        if not said(name).has(f"{place}/status"):
            continue
        listed = said(name).status(place)
        assert task["uid"] == int(listed["Uid"][0]), place
        assert task["nvcsw"] == int(listed["voluntary_ctxt_switches"][0]), place
        assert task["nivcsw"] == int(listed["nonvoluntary_ctxt_switches"][0]), place
        if "VmRSS" in listed:
            # It lacks what threads (6.1) or CPUs have not passed on of each of three
            # counters: less than 64 pages.
            resident = int(listed["VmRSS"][0]) << 10
            holders = max(task["threads"], 2)
            assert abs(task["rss_bytes"] - resident) <= 3 * 64 * PAGE * holders, place
            assert task["size_bytes"] == int(listed["VmSize"][0]) << 10, place
        else:
            assert task["rss_bytes"] == task["size_bytes"] == 0, place
        users.add(task["uid"])
        compared += 1
    assert compared > 200
    assert users >= {0, 1000, 1001, 65534}


def test_control_groups(name: str, threads: Any) -> None:
    found, paths = by_pid(threads), set()
    for file in said(name).names:
        if file.endswith("/cgroup") and "/task/" in file:
            task = found[int(file.split("/")[3])]
            told = said(name).run.truth(file)
            assert f"0::{task['cgroup']}\n".encode() == told, file
            paths.add(task["cgroup"])
    assert len(paths) > 5


def test_names(name: str, threads: Any) -> None:
    """The bytes that the kernel has; the kernel's own have what they do after them."""
    compared = 0
    for task in threads["tasks"]:
        file = f"proc/{task['tgid']}/task/{task['pid']}/comm"
        if not said(name).has(file):
            continue
        told = said(name).run.truth(file)[:-1].decode("utf-8", "backslashreplace")
        if task["kthread"]:
            assert told.startswith(task["comm"]), file
        else:
            assert task["comm"] == told, file
        compared += 1
    assert compared > 200
    comms = {task["comm"] for task in threads["tasks"]}
    assert {"a\x1b[31m\r\nb\x7f\tc", "[bold]) R 1 (x", ""} <= comms
    assert "\\xff\\xfe\\xc3(\\x80caf\\xe9" in comms


def test_times_of_threads(name: str, threads: Any) -> None:
    """On the CPU to the nanosecond; and all parts of a life make up the whole."""
    compared = 0
    for task in threads["tasks"]:
        parts = ("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "zombie_ns")
        assert sum(task[part] for part in parts) == task["lifetime_ns"]
        if task["kthread"]:
            assert task["user_ns"] == 0
    for task, place in still(name, threads):
        on_cpu, latency, _ = said(name).schedstat(place)
        assert task["user_ns"] + task["system_ns"] == on_cpu, place
        if task["latency_bound"] == "exact" and task["latency_ns"] != latency:
            # More was counted than there was time for, as clocks go apart; it is cut.
            assert task["off_cpu_ns"] == 0, place
            assert 0 < latency - task["latency_ns"] < threads["bound_ns"], place
        compared += 1
    assert compared > 1800


def test_latency_that_is_a_bound(name: str, threads: Any) -> None:
    bounds = {t["latency_bound"] for t in threads["tasks"] if t["latency_ns"]}
    assert bounds == ({"upper"} if name in NEW else {"exact"})
    none = {t["latency_bound"] for t in threads["tasks"] if not t["latency_ns"]}
    assert none <= {"exact"}


# --- and of processes


def test_as_proc_says_of_processes(name: str, threads: Any, processes: Any) -> None:
    """With what threads did that have ended."""
    compared = with_threads = 0
    for task, place in still_processes(name, processes, threads):
        fields = said(name).stat(place)
        assert task["min_flt"] == int(fields[10]), place
        assert task["maj_flt"] == int(fields[12]), place
        on_cpu = task["user_ns"] + task["system_ns"]
        # The kernel cuts off what is below a tick, of each.
        shown = (int(fields[14]) + int(fields[15])) * TICK_NS
        assert 0 <= on_cpu - shown < 2 * TICK_NS, place
        assert task["threads"] == int(fields[20]), place
        compared += 1
        with_threads += task["threads"] > 1
    assert compared > 150
    assert with_threads > 5


def of_process(found: Any, pid: int) -> list[Task]:
    return [task for task in found["tasks"] if task["tgid"] == pid]


SUMMED = ("nvcsw", "nivcsw", "user_ns", "system_ns")


def test_processes_are_sums_of_their_threads(threads: Any, processes: Any) -> None:
    """Of all that live, exactly, where none has ended."""
    dead = more = 0
    for task in processes["tasks"]:
        of = of_process(threads, task["pid"])
        summed = {key: sum(t[key] for t in of) for key in SUMMED}
        # Those of a dead leader are no longer its process's, unless all are dead.
        living = [t for t in of if t["class"] != "ZMB"] or of
        for key in ("latency_ns", "off_cpu_ns"):
            assert task[key] == sum(t[key] for t in living), key
        ended = {key: task[key] - summed[key] for key in SUMMED}
        assert min(ended.values()) >= 0
        dead += any(ended.values())
        more += len(of) > 1
    assert 1 <= dead < 40
    assert more > 8


def test_threads_that_have_ended(name: str, threads: Any, processes: Any) -> None:
    told = said(name).tasks["dead-threads"]
    task = by_pid(processes)[told["pid"]]
    of = of_process(threads, told["pid"])
    gone = task["user_ns"] + task["system_ns"]
    gone -= sum(t["user_ns"] + t["system_ns"] for t in of)
    # Its threads also began and ended.
    assert sum(told["used_ns"]) < gone < 2 * sum(told["used_ns"])
    assert task["nvcsw"] + task["nivcsw"] >= len(told["used_ns"])


def test_process_whose_leader_is_dead(name: str, threads: Any, processes: Any) -> None:
    """What it is doing is what its oldest living thread is."""
    told = said(name).tasks["leaderless"]
    process, rows = by_pid(processes)[told["pid"]], by_pid(threads)
    leader, thread = rows[told["pid"]], rows[told["tid"]]
    assert (leader["class"], leader["state"]) == ("ZMB", "Z")
    for key in ("class", "class_age_ns", "class_age_bound", "state", "on"):
        assert process[key] == thread[key], key
    assert process["class"] == "SIG"
    for key in ("comm", "lifetime_ns", "ppid", "uid", "pid"):
        assert process[key] == leader[key], key
    assert process["zombie_ns"] == 0 < leader["zombie_ns"]
    assert process["size_bytes"] == thread["size_bytes"] > 0
    assert process["rss_bytes"] == thread["rss_bytes"] > 0


def test_other_processes_are_as_their_leaders(threads: Any, processes: Any) -> None:
    rows = by_pid(threads)
    compared = 0
    for task in processes["tasks"]:
        leader = rows[task["pid"]]
        if leader["state"] == "Z" and task["state"] != "Z":
            continue
        keys = ("class", "class_age_ns", "state", "pri", "nice", "cpu", "comm", "on")
        assert all(task[key] == leader[key] for key in keys)
        assert task["zombie_ns"] == leader["zombie_ns"]
        compared += 1
    assert compared > 190


@pytest.mark.parametrize("name", OFF)
def test_children_that_were_waited_for(name: str) -> None:
    found = report(name, "--children")
    assert {key for task in found["tasks"] for key in task} == {*ROW, "children"}
    told = said(name).tasks["reaped"]
    children = by_pid(found)[told["pid"]]["children"]
    # getrusage() cuts off what is below a microsecond.
    used = [children[key] // 1000 for key in ("user_ns", "system_ns")]
    assert used == [round(seconds * 1e6) for seconds in told["reaped_s"]]
    threads, seen = report(name, "-L"), 0
    for task, place in still_processes(name, found, threads):
        fields, children = said(name).stat(place), task["children"]
        assert children["user_ns"] // TICK_NS == int(fields[16]), place
        assert children["system_ns"] // TICK_NS == int(fields[17]), place
        assert children["min_flt"] == int(fields[11]), place
        assert children["maj_flt"] == int(fields[13]), place
        seen += children["user_ns"] > 0
    assert seen


# --- the whole


def test_totals(name: str, threads: Any, processes: Any) -> None:
    totals = threads["totals"]
    assert totals == processes["totals"]
    tasks = threads["tasks"]
    assert totals["threads"] == len(tasks)
    assert totals["processes"] == len(processes["tasks"])
    assert totals["cpus"] == 2
    for key, column in (("states", "state"), ("classes", "class")):
        counts = totals[key]
        assert all(
            count == sum(task[column] == value for task in tasks)
            for value, count in counts.items()
        )
        assert sum(counts.values()) == len(tasks)
    (listed,) = (
        line.split()[1]
        for line in said(name).run.truth("proc/meminfo").decode().splitlines()
        if line.startswith("MemTotal:")
    )
    assert totals["ram_bytes"] == int(listed) << 10


FIXED_1 = 1 << 11
LOAD_FACTORS = (1884, 2014, 2037)
"""EXP_1, EXP_5 and EXP_15 of include/linux/sched/loadavg.h."""


def test_load_averages(name: str, threads: Any) -> None:
    """/proc cuts off what is below a hundredth, and adds half of one before.

    Each five seconds they are brought up to date (calc_load()), maybe since /proc was
    read as well: with as many tasks as there are at most.
    """
    told = [float(word) for word in said(name).run.truth("proc/loadavg").split()[:3]]
    found = threads["totals"]["load_averages"]
    assert len(found) == 3
    again = [int((value + 0.005) * 100) / 100 for value in found]
    if again == told:
        return
    ran = [
        (after * FIXED_1 - before * factor) / (FIXED_1 - factor)
        for before, after, factor in zip(told, found, LOAD_FACTORS, strict=True)
    ]
    # What /proc cuts off weighs the more the slower the average is.
    for count, factor in zip(ran, LOAD_FACTORS, strict=True):
        slack = 0.01 * FIXED_1 / (FIXED_1 - factor)
        assert -slack <= count <= threads["totals"]["threads"] + slack


def test_accounting(name: str, threads: Any) -> None:
    """Whether statistics are on, as sysctl says; and without them, nothing is 0."""
    kept = threads["accounting"]
    for key, file in (("schedstats", "sched_schedstats"), ("delayacct", None)):
        file = f"proc/sys/kernel/{file or 'task_delayacct'}"
        assert kept[key] == (said(name).run.truth(file).strip() == b"1")
    splits = [task["breakdown"] for task in threads["tasks"]]
    if name in OFF:
        assert set(splits) == {None}
        return
    assert None not in splits
    delays = {kind for split in splits for kind in split["delays"]}
    assert {"blkio", "swapin", "freepages", "thrashing", "compact", "wpcopy"} <= delays
    known = [all(v is not None for v in split["delays"].values()) for split in splits]
    # With accounting on from boot all threads have them, but for impossible ones.
    assert sum(known) >= len(known) - 10 if name in ON else 10 < sum(known) < 1500


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("words", [("-L",), ("--children",)], ids=" ".join)
def test_debug_info_says_the_same(name: str, words: tuple[str, ...]) -> None:
    """Number for number, but for how the types were found."""
    one, other = (dict(report(name, *words, types=t)) for t in ("btf", "dwarf"))
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


def test_ages_with_statistics(threads: Any) -> None:
    """What lasts is a part of what has been: no wait is longer than all waits."""
    asleep = [t for t in threads["tasks"] if t["state"] in "SDI" and t["breakdown"]]
    for task in asleep:
        split = task["breakdown"]
        kinds = [split[key] for key in ("iowait_ns", "blocked_ns", "sleep_ns")]
        assert None not in kinds
        assert sum(kinds) >= task["class_age_ns"] - MS
    assert len(asleep) > 2000 or threads["accounting"]["schedstats"] is False


@pytest.mark.parametrize(
    ("is_bound", "told"),
    [
        (True, "sleep on the run queue counts, since 6.12"),
        (False, "the clocks of the CPUs have been 128 ms apart, or more"),
    ],
)
def test_why_latency_is_impossible(is_bound: bool, told: str) -> None:
    """Only a kernel that delays dequeues counts sleep; else it is the clocks."""
    made = MadeThreads({"pid": 1}, {"pid": 2}, latency_is_bound=is_bound)
    lives = replace(made.lives, missed_ns=np.array([127_537_310, 5]))
    assert _why_impossible(lives) == told
