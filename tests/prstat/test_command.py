# SPDX-License-Identifier: LGPL-2.1-or-later

"""Selection, order, views and shares of msa-prstat, on dumps."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msatools.commands.prstat import COMMAND

from msatools.cli.arguments import make_parser
from msatools.prstat.prstat import collect_prstat
from msatools.prstat.select import Options
from tests.prstat.dumps import OFF, ON
from tests.prstat.reports import Task, by_pid, report, said, still, table, text
from tests.support.calls import demo

OLD, NEW = OFF
HOGS = tuple(f"hog-{n}" for n in ("pinned-0", "pinned-1", "pinned-2", "user", "yield"))


@pytest.fixture(params=OFF)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def tasks(*words: str) -> list[Task]:
    found: list[Task] = report(*words)["tasks"]
    return found


def pids(*words: str) -> set[int]:
    return {task["pid"] for task in tasks(*words)}


def tid(dump_name: str, task: str) -> int:
    found: int = said(dump_name).tasks[task]["tid"]
    return found


# --- order


def test_what_is_stuck_comes_first(name: str) -> None:
    """Threads in D, the longest first, then the others as they use CPUs."""
    threads = tasks(name, "-L")
    stuck = [task for task in threads if task["state"] == "D"]
    assert len(threads) > len(stuck) > 2
    assert threads[: len(stuck)] == stuck
    ages = [task["class_age_ns"] for task in stuck]
    assert ages == sorted(ages, reverse=True)
    used = [task["user_ns"] + task["system_ns"] for task in threads[len(stuck) :]]
    lived = [task["lifetime_ns"] for task in threads[len(stuck) :]]
    shares = [ns / life if life else 0.0 for ns, life in zip(used, lived, strict=True)]
    assert shares == sorted(shares, reverse=True)
    # A process is stuck if any of its threads is.
    owners = {task["tgid"] for task in stuck}
    processes = [task["pid"] for task in tasks(name)]
    assert {*processes[: len(owners)]} == owners


def test_stuck_threads_without_a_row_are_counted(name: str) -> None:
    """A row shows the state of the process's first thread."""
    stuck = sum(task["state"] == "D" for task in tasks(name, "-L"))
    shown = text(name, "-n", "1")
    assert f"{stuck} threads in state D: -L --state D lists them" in shown
    assert "in state D" not in "".join(text(name, "-L"))


# --- selection


SELECTIONS: dict[str, Any] = {
    "-u 1000,65534": lambda task: task["uid"] in (1000, 65534),
    "-P 1": lambda task: task["cpu"] == 1,
    "-P 0-1": lambda task: True,
    "--state DZ": lambda task: task["state"] in "DZ",
    "--state t,T": lambda task: task["state"] in "tT",
    "--class KLK,net": lambda task: task["class"] in ("KLK", "NET"),
    "--kernel-threads": lambda task: task["kthread"],
    "--user-tasks": lambda task: not task["kthread"],
    "--state S --class TMR --user-tasks": lambda task: (
        task["state"] == "S" and task["class"] == "TMR" and not task["kthread"]
    ),
}


VIEWS = {"threads": ("-L",), "processes": ()}
BOTH_WAYS = ("-u 1000,65534", "--state DZ", "--class KLK,net")


@pytest.mark.parametrize(
    ("view", "words"),
    [
        *(("threads", words) for words in SELECTIONS),
        *(("processes", words) for words in BOTH_WAYS),
    ],
)
def test_selection(name: str, view: str, words: str) -> None:
    check_selection(name, VIEWS[view], words, SELECTIONS[words])


@pytest.mark.parametrize("view", VIEWS)
def test_selection_by_age(name: str, view: str) -> None:
    ages = sorted(task["class_age_ns"] for task in tasks(name, *VIEWS[view]))
    low, high = (ages[len(ages) * part // 4] for part in (1, 3))
    least = f"--min-age {low}ns"
    for words, most in ((least, ages[-1]), (f"{least} --max-age {high}ns", high)):
        check_selection(
            name,
            VIEWS[view],
            words,
            lambda task, most=most: low <= task["class_age_ns"] <= most,
        )


def check_selection(
    name: str, view: tuple[str, ...], words: str, fits: Callable[[Task], bool]
) -> None:
    """Check that exactly the matching rows are listed, and that totals are theirs."""
    everything, found = report(name, *view), report(name, *view, *words.split())
    if view or not words.startswith(("--class", "--state")):
        wanted = [task for task in everything["tasks"] if fits(task)]
    else:
        # A process matches if any of its threads does.
        threads = {task["tgid"] for task in tasks(name, "-L") if fits(task)}
        wanted = [task for task in everything["tasks"] if task["pid"] in threads]
    assert by_pid(found) == by_pid({"tasks": wanted})
    assert len(found["tasks"]) == len(wanted) > 0
    counted = "threads" if view else "processes"
    assert found["totals"][counted] == len(wanted)


def test_first_rows(name: str) -> None:
    whole = report(name, "-L")
    found = report(name, "-L", "-n", "7")
    assert found["tasks"] == whole["tasks"][:7]
    assert found["totals"] == whole["totals"]
    assert report(name, "-L", "-n", "999999")["tasks"] == whole["tasks"]


def test_order(name: str) -> None:
    """Rows are sorted by CPU share by default, then by PID."""
    used = [(t["user_ns"] + t["system_ns"]) / t["lifetime_ns"] for t in tasks(name)]
    assert used == sorted(used, reverse=True)
    found = tasks(name, "-L", "--sort", "STATE,-MAJ")
    kinds = [(task["state"], -task["maj_flt"], task["pid"]) for task in found]
    assert kinds == sorted(kinds)
    found = tasks(name, "--children", "--sort", "CSYS")
    reaped = [task["children"]["system_ns"] for task in found]
    assert reaped == sorted(reaped, reverse=True)
    assert len(set(reaped)) > 2


# --- PIDs


def test_one_process(name: str) -> None:
    """A process has the same sums as in the full report, without reading others."""
    server = said(name).run.workload["servers"]["server-broadcast"]
    found = report(name, "-p", str(server["pid"]))
    assert found["tasks"] == [by_pid(report(name))[server["pid"]]]
    assert found["totals"]["threads"] == len(server["workers"]) + 1
    assert len(found["herds"]) == 1
    alone = report(name, "-p", str(tid(name, "pause")))
    assert alone["totals"]["threads"] == alone["coverage"]["tasks"] == 1
    assert alone["coverage"]["reads"] < 100


def test_threads_of_a_process(name: str) -> None:
    """-L -p with a PID selects all threads of the process, with a TID one thread."""
    process, rows = said(name).tasks["threads"]["pid"], by_pid(report(name, "-L"))
    found = by_pid(report(name, "-L", "-p", str(process)))
    assert found == {n: task for n, task in rows.items() if task["tgid"] == process}
    assert len(found) == 51
    thread = tid(name, "threads-07")
    assert pids(name, "-L", "-p", f"{thread}") == {thread}
    assert pids(name, "-L", "-p", f"{thread},{process}") == set(found)
    pause = tid(name, "pause")
    assert pids(name, "-L", "-p", f"{thread},{pause}") == {thread, pause}


def test_process_with_a_dead_leader(name: str) -> None:
    task = said(name).tasks["leaderless"]
    both = {row["pid"] for row in tasks(name, "-L", "-p", str(task["pid"]))}
    assert both == {task["pid"], task["tid"]}
    (process,) = tasks(name, "-p", str(task["tid"]))
    assert (process["pid"], process["class"]) == (task["pid"], "SIG")


# --- microstates


def number(cell: str) -> float:
    return float(cell.lstrip("~<>"))


SHARES = "USR,SYS,LAT,OFF,ZMB,SCL,SIG,TRP"


@pytest.mark.parametrize("dump_name", [*OFF, *ON])
def test_shares_sum_to_100(dump_name: str) -> None:
    """Each share is rounded to a tenth, or to a whole number if it is 100."""
    for words in (("-L",), ()):
        rows = table(text(dump_name, *words, "-o", SHARES), "USR")
        assert len(rows) > 80
        for row in rows:
            shares = [row[name] for name in ("USR", "SYS", "LAT", "OFF", "ZMB")]
            assert abs(sum(map(number, shares)) - 100) <= 0.2501, row
            assert row["SCL"] == row["SIG"] == row["TRP"] == "-"


# --- why


def test_why_of_every_column(name: str) -> None:
    from msatools.legends.prstat import FIELDS
    from msatools.render.prstat.columns import COLUMNS

    assert set(FIELDS) == set(COLUMNS)
    # NOW and STATE stand for what is in them, too: of a name, the column is first.
    names = [field for field in FIELDS if field not in ("NOW", "STATE")]
    found = report(name, "--why", ",".join((*names, "NOW", "STATE")))["why"]
    assert {*FIELDS} <= {why["field"] for why in found}
    bounds = {why["field"]: why["bound"] for why in reversed(found)}
    assert set(bounds.values()) <= {"exact", "estimate", "upper", "lower", "not kept"}
    assert all(len(why["text"]) > 10 for why in found)
    is_new = name == NEW
    assert bounds["LAT"] == ("upper" if is_new else "exact")
    assert bounds["OFF"] == bounds["OFF/VCX"] == ("lower" if is_new else "exact")
    for field in ("SCL", "SIG", "TRP", "INT", "BLK", "IOW", "STP", "COV", "BIO", "COW"):
        assert bounds[field] == "not kept", field
    assert bounds["USR"] == bounds["SYS"] == "estimate"


@pytest.mark.parametrize(
    ("dump_name", "kept"), list(zip(ON, ("exact", "lower"), strict=True))
)
def test_why_with_statistics(dump_name: str, kept: str) -> None:
    found = report(dump_name, "--why", "IOW,BLK,INT,BIO,IRQ")["why"]
    # Of a name that is also that of a class, the column comes first.
    bounds = {why["field"]: why["bound"] for why in reversed(found)}
    assert {bounds[field] for field in ("IOW", "BLK", "INT")} == {kept}
    assert bounds["BIO"] == "exact"
    # The lab's kernels have no IRQ_TIME_ACCOUNTING.
    assert bounds["IRQ"] == "not kept"


# --- load


def test_load_is_threads_in_r_and_d(name: str) -> None:
    """Threads that never sleep and those in D in /proc are in the load.

    A thread that runs while /proc is read can sleep when the dump is made. Then it may
    have the state already while it is still on its CPU, or on the queue for it: it
    counts as runnable.
    """
    found = report(name, "--load", "-L")
    load, groups = found["load"], found["load"]["groups"]
    in_state = {
        state: {task["pid"] for task in found["tasks"] if task["state"] == state}
        for state in "RD"
    }
    runs, waits = pids_of(groups, "R"), pids_of(groups, "D")
    assert load["runnable"] == sum_of(groups, "R") == len(runs)
    assert load["uninterruptible"] == sum_of(groups, "D") == len(waits)
    falling_asleep = runs - in_state["R"]
    # Who is throttled is runnable, and the kernel does not count it.
    throttled = {
        task["pid"]
        for task in found["tasks"]
        if task["on"] and task["on"]["kind"] == "quota"
    }
    assert not runs & throttled
    assert runs >= in_state["R"] - throttled
    assert waits == in_state["D"] - falling_asleep
    assert not falling_asleep & {task["pid"] for task, _ in still(name, found)}
    assert runs >= {tid(name, hog) for hog in HOGS}
    blocked = {
        task["pid"]
        for task, place in still(name, found)
        if said(name).stat(place)[3] == "D"
    }
    assert waits >= blocked
    assert len(blocked) > 20


def sum_of(groups: list[Any], state: str) -> int:
    return sum(len(group["pids"]) for group in groups if group["state"] == state)


def pids_of(groups: list[Any], state: str) -> set[int]:
    return {pid for g in groups if g["state"] == state for pid in g["pids"]}


def test_load_has_wait_targets(name: str) -> None:
    rows = report(name, "-L")
    for group in report(name, "--load")["load"]["groups"]:
        members = [by_pid(rows)[pid] for pid in group["pids"]]
        assert {task["comm"] for task in members} == {group["comm"]}
        assert {task["class"] for task in members} == {group["class"]}
        assert group["max_age_ns"] == max(task["class_age_ns"] for task in members)
        if group["state"] == "D":
            assert {json.dumps(task["on"]) for task in members} == {
                json.dumps(group["on"])
            }
            assert group["function"]
    lines = text(name, "--load")
    averages = report(name)["totals"]["load_averages"]
    assert lines[1].startswith(f"Load averages {averages[0]:.2f} ")
    assert lines[2].split() == [
        *("COUNT", "STATE", "NOW", "OLDEST", "COMMAND", "ON", "FUNCTION", "PIDS")
    ]
    assert any("s_vfs_rename_mutex" in line for line in lines)


# --- users and control groups


@pytest.mark.parametrize("option", ["-a", "-Z"])
@pytest.mark.parametrize("words", [(), ("-L",), ("-n", "3")], ids=str)
def test_groups_sum_to_the_total(
    name: str, option: str, words: tuple[str, ...]
) -> None:
    found = report(name, option, *words)
    groups = found["users" if option == "-a" else "cgroups"]
    assert sum(group["processes"] for group in groups) == found["totals"]["processes"]
    assert sum(group["threads"] for group in groups) == found["totals"]["threads"]
    for key, values in (("size_bytes", "size_bytes"), ("rss_bytes", "rss_bytes")):
        assert sum(g[key] for g in groups) == sum(t[values] for t in tasks(name))
    rows = tasks(name, *(word for word in words if word == "-L"))
    used = sum(task["user_ns"] + task["system_ns"] for task in rows)
    assert sum(group["cpu_ns"] for group in groups) == used
    field = "uid" if option == "-a" else "cgroup"
    counts = Counter(str(task[field]) for task in tasks(name))
    assert {group["key"]: group["processes"] for group in groups} == counts


# --- stacks


def test_stacks_of_all_threads(name: str) -> None:
    """Threads that wait for a CPU are included, and those that run, by registers."""
    found = report(name, "--stacks", "-L")
    rows, seen = by_pid(found), []
    for group in found["stacks"]:
        assert set(group) == {"frames", "class", "pids", "min_age_ns", "max_age_ns"}
        ages = [rows[pid]["class_age_ns"] for pid in group["pids"]]
        assert (group["min_age_ns"], group["max_age_ns"]) == (min(ages), max(ages))
        assert {rows[pid]["class"] for pid in group["pids"]} == {group["class"]}
        seen += group["pids"]
    have = [t["pid"] for t in found["tasks"] if t["class"] not in ("OTH", "ZMB")]
    assert sorted(seen) == sorted(have)
    assert any(group["class"] == "LAT" for group in found["stacks"])
    sizes = [len(group["pids"]) for group in found["stacks"]]
    assert sizes == sorted(sizes, reverse=True)
    keys = [(tuple(g["frames"]), g["class"]) for g in found["stacks"]]
    assert len(keys) == len(set(keys))
    running = ("USR", "SYS", "INT")
    asleep = {frames[0] for frames, task_class in keys if task_class not in running}
    assert asleep == {"__schedule"}


def test_stacks_with_a_function(name: str) -> None:
    found = report(name, "--stacks", "--function", "do_nanosleep,pipe_read")["stacks"]
    assert found
    for group in found:
        assert {"do_nanosleep", "pipe_read"} & set(group["frames"])
    several = report(name, "--function", "do_nanosleep", "--function", "pipe_read")
    assert several["stacks"] == found
    assert report(name, "--function", "no_such_function")["stacks"] == []


def test_stacks_by_state(name: str) -> None:
    """Threads are selected by their own state, not their leader's."""
    found = report(name, "--stacks", "--state", "D")["stacks"]
    pids = {pid for group in found for pid in group["pids"]}
    asleep = tasks(name, "-L", "--state", "D")
    assert pids == {task["pid"] for task in asleep}
    assert any(task["pid"] != task["tgid"] for task in asleep)


@pytest.mark.parametrize("weight", ["count", "age"])
def test_folded(name: str, weight: str) -> None:
    """Lines for flame graph tools: names joined by semicolons, a space, a number."""
    found = report(name, "--stacks", "-L")
    rows = by_pid(found)
    expected: Counter[tuple[str, ...]] = Counter()
    for group in found["stacks"]:
        ages = [rows[pid]["class_age_ns"] // 1000 for pid in group["pids"]]
        expected[tuple(group["frames"])] += sum(ages) if weight == "age" else len(ages)
    by_stack: Counter[tuple[str, ...]] = Counter()
    for line in text(name, "--folded", weight):
        names, _, number = line.rpartition(" ")
        by_stack[tuple(reversed(names.split(";")[1:]))] += int(number)
    assert by_stack == expected
    assert by_stack.total() > 2000


# --- shares

PARTS = ("USR", "SYS", "TRP", "TFL", "DFL", "LCK", "SLP", "LAT", "STP", "ZMB")
ROUNDED = 0.05 + 1e-9
"""Rounding error of a share with one decimal, in percent."""


def bounds(cell: str) -> tuple[float, float]:
    """Return the least and the largest share that a cell can stand for."""
    if cell == "-":
        return 0, 100
    share, mark = float(cell.lstrip("~<>")), cell[0]
    least = 0 if mark == "<" else share - ROUNDED
    return least, 100 if mark == ">" else share + ROUNDED


@pytest.mark.parametrize("dump", [*OFF, "tasks-on-6.12"])
@pytest.mark.parametrize("view", VIEWS)
def test_splits_sum_to_100(dump: str, view: str) -> None:
    first = "PID/TID" if view == "threads" else "PID"
    rows = table(text(dump, "-m", *VIEWS[view]), first)
    exact = 0
    for row in rows:
        cells = [row[part] for part in PARTS if part in row and part != "TRP"]
        found = [bounds(cell) for cell in cells]
        assert sum(least for least, _ in found) <= 100, row
        assert sum(most for _, most in found) >= 100, row
        exact += not any(cell.startswith(("<", ">", "-")) for cell in cells)
    assert exact


# --- what threads wait on


@pytest.mark.parametrize(
    ("words", "in_drgn", "is_whole"),
    [
        (["-L"], False, False),
        (["-L", "-a", "--sort", "LCK"], False, False),
        (["-L", "-m"], False, True),
        (["-L", "-o", "ON"], False, True),
        (["-L", "--json"], False, True),
        (["-L", "--sort", "TFL"], False, True),
        # A live screen may be asked for any column, and drgn's prompt has the report.
        (["-L", "5"], False, True),
        (["-L"], True, True),
    ],
)
def test_waits_are_found_where_they_may_be_shown(
    words: list[str], in_drgn: bool, is_whole: bool
) -> None:
    opened = demo()
    everything = collect_prstat(
        opened.prog, target=opened.target, options=Options(per_thread=True)
    )
    args = make_parser(COMMAND, in_drgn=in_drgn).parse_intermixed_args(words)
    session = COMMAND.start(opened.prog, opened.target, args)
    found = session.report(lambda *_: None)
    assert found.herds == everything.herds
    waits = {row.pid: row.on for row in everything.tasks if row.on}
    ons = {row.pid: row.on for row in found.tasks if row.on}
    assert ons.items() <= waits.items()
    assert (len(ons) == len(waits)) is is_whole
