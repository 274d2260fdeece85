# SPDX-License-Identifier: LGPL-2.1-or-later
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from signal import SIGCHLD
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import zombies
from fixtures.lab.cache import Cache
from fixtures.lab.errors import LabError
from fixtures.lab.guest import cases, zombiecases, zombielimits
from fixtures.lab.guest.zombies import Seen, heir_of, masks
from msatools.target.addresses import KERNEL_HALF

VERDICTS = {
    *("leader-exited", "traced", "parent-blocked", "parent-stopped"),
    *("reaper-never-reaps", "sigchld-blocked", "waiting-for-other", "clone-child"),
    *("handler-missed", "never-waits"),
}
"""Those in contract.md, but for being-reaped and unknown."""
Facts = dict[str, Any]


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"zombies-{request.param}")


def stat(run: lab.Run, pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, as they were at rest."""
    line = run.truth(f"proc/{pid}/stat").decode(errors="replace")
    return line.rpartition(") ")[2].split()


def status(run: lab.Run, place: str, name: str) -> list[str]:
    text = run.truth(f"proc/{place}/status").decode(errors="replace")
    found = re.search(rf"^{name}:\t(.*)$", text, re.MULTILINE)
    assert found
    return found[1].split()


def named(run: lab.Run, comm: str) -> Facts:
    (one,) = (one for one in run.workload["zombies"] if one["comm"] == comm)
    return dict(one)


def parents(run: lab.Run, verdict: str) -> Iterator[Facts]:
    return (one for one in run.workload["parents"] if verdict in one["verdicts"])


def pids_in(run: lab.Run) -> list[int]:
    found = (re.fullmatch(r"proc/(\d+)/stat", name) for name in run.truth_names())
    return [int(one[1]) for one in found if one]


# --- the program, and what is made of files


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Facts, Any]]:
    """What a parent of 20 zombies says here, and its log of them."""
    program = zombies.program(Cache(tmp_path_factory.mktemp("cache"), 1 << 30))
    said, say = os.pipe()
    logged, log = os.pipe()
    words = [str(program), str(say), str(log), "20", "400"]
    with subprocess.Popen(words, pass_fds=[say, log]) as process:
        os.close(say)
        os.close(log)
        with open(said) as pipe, open(logged) as entries:
            task = json.loads(pipe.readline())
            yield task, [json.loads(entries.readline()) for _ in range(20)]
        process.kill()


def test_farm_logs_the_end_of_each(farm: tuple[Facts, Any]) -> None:
    task, entries = farm
    for number, entry in enumerate(entries):
        assert (entry["name"], entry["exit_code"]) == (f"farm-{number}", number << 8)
        assert cases.state_of(entry["pid"], entry["pid"]) == "Z"
        fields = cases.text_of(entry["pid"], entry["pid"], "stat")
        assert fields.partition(" (")[2].startswith(f"farm-{number}) Z {task['pid']} ")
        assert entry["told_ns"] < entry["exited_ns"]
        assert entry["verdict"] == task["verdict"]
    span = entries[-1]["exited_ns"] - entries[0]["told_ns"]
    assert span >= 380e6  # they are 20 ms from each other, 19 times


def test_farm_wants_all_its_words(tmp_path_factory: pytest.TempPathFactory) -> None:
    program = zombies.program(Cache(tmp_path_factory.mktemp("cache"), 1 << 30))
    assert subprocess.run([program, "1", "1", "20"], check=False).returncode == 2


def files_of(pid: int, parent: int, ns_pids: str, inode: int) -> dict[str, str]:
    """What Seen needs to know of a process that has a thread."""
    status = f"Uid:\t1\t2\t2\t2\nNSpid:\t{ns_pids}\nNSpgid:\t{ns_pids}\nNSsid:\t0\n"
    status += "SigBlk:\t0000000000010000\nSigIgn:\t0000000000000001\n"
    status += "SigCgt:\t8000000000000000\nSigPnd:\t0\nShdPnd:\t0\n"
    place, line = f"/proc/{pid}", f"{pid} (a) b) S {parent} 0 0"
    return {
        f"{place}/stat": line,
        f"{place}/status": status,
        f"{place}/limits": f"Max processes     {pid}    unlimited  processes",
        f"{place}/ns/pid": f"pid:[{inode}]",
        f"{place}/task/{pid}/stat": line,
        f"{place}/task/{pid}/status": status,
    }


@pytest.fixture
def seen() -> Seen:
    """A process in a namespace in the namespace of all, and its parents."""
    return Seen(
        files_of(1, 0, "1", 100)
        | files_of(5, 1, "5", 100)
        | files_of(6, 5, "6\t1", 200)
        | files_of(7, 6, "7\t2", 200)
    )


def test_numbers_count_in_every_namespace_above(seen: Seen) -> None:
    assert seen.ids() == {100: 4, 200: 2}
    assert seen.namespaces[200] == {"init": 6, "level": 1, "parent": 100}


def test_heirs(seen: Seen) -> None:
    assert heir_of(seen, 5, set()) == 1
    assert heir_of(seen, 7, {5}) == 6  # a subreaper above has no say in there
    assert heir_of(seen, 6, {5}) is None


def test_masks_are_lists_of_signals(seen: Seen) -> None:
    found = masks(seen, 5, 5)
    assert (found["blocked"], found["ignored"]) == ([SIGCHLD], [1])
    assert (found["caught"], found["shared"]) == ([64], [])


def test_lowest_limit_of_a_user(seen: Seen) -> None:
    assert seen.users() == {1: {"processes": 4, "threads": 4, "max_processes": 1}}


# --- the truth of a dump


def test_every_verdict_has_several_zombies(run: lab.Run) -> None:
    assert run.workload["skipped"] == {}
    found = Counter(one["verdict"] for one in run.workload["zombies"])
    assert set(found) == VERDICTS
    assert min(found.values()) >= 3
    for verdict in VERDICTS - {"leader-exited"}:
        assert len([*parents(run, verdict)]) >= 2


def test_all_zombies_are_known_and_no_others(run: lab.Run) -> None:
    dead = {pid for pid in pids_in(run) if stat(run, pid)[0] == "Z"}
    assert {one["pid"] for one in run.workload["zombies"]} == dead
    for one in run.workload["zombies"]:
        fields = stat(run, one["pid"])
        assert (int(fields[1]), int(fields[49])) == (one["ppid"], one["exit_code"])
        assert status(run, one["pid"], "Uid")[:2] == [
            str(one["real_uid"]),
            str(one["uid"]),
        ]
        assert status(run, one["pid"], "NSpid") == [str(n) for n in one["ns_pids"]]
        cgroup = run.truth(f"proc/{one['pid']}/cgroup").decode()
        assert cgroup == f"0::{one['cgroup']}\n"


def test_times_of_ends(run: lab.Run) -> None:
    at_rest = run.workload["times"]["monotonic_ns"]
    for one in run.workload["zombies"]:
        assert one["told_ns"] < one["exited_ns"] < at_rest
        # In USER_HZ: it was started before it was told to end.
        assert int(stat(run, one["pid"])[19]) * 10**7 <= one["exited_ns"]
    farm = [z for z in run.workload["zombies"] if re.match(r"farm-\d", z["comm"])]
    assert len(farm) == zombiecases.FARM
    ends = [one["exited_ns"] for one in farm]
    assert ends == sorted(ends)
    # It naps between them, for a while that is no shorter on a busy host.
    naps = len(farm) - 1
    least_ns = naps * (zombiecases.FARM_MILLISECONDS * 10**6 // len(farm))
    assert ends[-1] - farm[0]["told_ns"] >= least_ns


@pytest.mark.parametrize(
    ("ran_ns", "is_right"),
    [(99, True), (300_000_099, True), (-9_000_000, False), (300_000_101, False)],
)
def test_one_that_ran_at_another_time(ran_ns: int, is_right: bool) -> None:
    """The dump is then made anew."""
    one = {"pid": 5, "comm": "a", "told_ns": 100, "exited_ns": 200_000_100}
    text = f"se.exec_start   :   {ran_ns + 10**9:010}"
    made: Any = SimpleNamespace(
        workload={"zombies": [one], "times": {"scheduler_ahead_ns": 10**9}},
        truth=lambda name: f"{text[:-6]}.{text[-6:]}\n".encode(),
    )
    with nullcontext() if is_right else pytest.raises(LabError, match="a ran"):
        zombies.check(made)


def test_dead_leaders_have_living_threads(run: lab.Run) -> None:
    found = (re.fullmatch(r"proc/(\d+)/task/\d+/stat", n) for n in run.truth_names())
    living = {int(one[1]) for one in found if one and cases_state(run, one[0]) != "Z"}
    for one in run.workload["zombies"]:
        assert (one["pid"] in living) == (one["verdict"] == "leader-exited")
    many = named(run, "leader-many")
    assert int(stat(run, many["pid"])[17]) == zombiecases.THREADS + 1


def cases_state(run: lab.Run, name: str) -> str:
    return run.truth(name).decode(errors="replace").rpartition(") ")[2][0]


def test_tracers_are_others_than_parents(run: lab.Run) -> None:
    for one in run.workload["zombies"] + run.workload["zombie_threads"]:
        by_another = one["tracer"] not in (0, one["ppid"])
        assert by_another == (one["verdict"] == "traced")
    assert named(run, "own-tracee-1")["tracer"] == named(run, "own-tracee-1")["ppid"]
    (thread,) = run.workload["zombie_threads"]
    assert stat(run, thread["tgid"])[0] == "S"
    place = f"{thread['tgid']}/task/{thread['pid']}"
    assert status(run, place, "State")[0] == "Z"


def test_blocked_and_stopped_parents(run: lab.Run) -> None:
    assert {one["state"] for one in parents(run, "parent-blocked")} == {"D"}
    stopped = {one["comm"]: one for one in parents(run, "parent-stopped")}
    states = {name: one["state"] for name, one in stopped.items()}
    assert states.pop("frozen") == "S"
    assert states.pop("debugged") == "t"
    assert set(states.values()) == {"T"}
    events = run.truth("sys/fs/cgroup/frozen/cgroup.events").decode()
    assert "frozen 1\n" in events
    for one in run.workload["parents"]:
        if not {"parent-blocked", "parent-stopped"} & {*one["verdicts"]}:
            threads = [t for t in one["threads"] if t["tid"] != one["pid"]]
            assert all(t["state"] in "SR" for t in threads)
            assert one["state"] in ("Z" if one["comm"] == "leader-parent" else "SR")


def test_reapers_have_orphans(run: lab.Run) -> None:
    found = {one["comm"]: one for one in parents(run, "reaper-never-reaps")}
    levels = {name: len(one["ns_pids"]) for name, one in found.items()}
    assert levels == {
        "subreaper": 1,
        "subreaper-polls": 1,
        "init-1": 2,
        "init-outer": 2,
        "init-inner": 3,
    }
    for one in found.values():
        assert one["ns_pids"][-1] == 1 or one["comm"].startswith("subreaper")
    heirs = {one["comm"]: one["heir"] for one in run.workload["parents"]}
    tasks = run.workload["tasks"]
    assert heirs["below-subreaper"] == tasks["above"]["pid"]
    assert heirs["inner-service"] == tasks["init-inner"]["pid"]
    assert heirs["init-1"] is None
    assert heirs["never-sleeps"] == 1


def test_sigchld_is_pending_where_it_is_blocked(run: lab.Run) -> None:
    before = {"parent-blocked"}  # its verdict comes first
    for one in run.workload["parents"]:
        pending = SIGCHLD in one["masks"]["shared"]
        blocked = all(SIGCHLD in t["masks"]["blocked"] for t in one["threads"])
        assert pending == blocked
        if not before & {*one["verdicts"]}:
            assert blocked == (one["verdict"] == "sigchld-blocked")


def test_handlers(run: lab.Run) -> None:
    for one in parents(run, "handler-missed"):
        assert SIGCHLD in one["masks"]["caught"]
        assert SIGCHLD not in one["masks"]["pending"] + one["masks"]["shared"]
    for verdict in ("never-waits", "waiting-for-other", "clone-child"):
        for one in parents(run, verdict):
            assert SIGCHLD not in one["masks"]["caught"]
    (late,) = (p for p in run.workload["parents"] if p["comm"] == "ignores-late")
    assert SIGCHLD in late["masks"]["ignored"]


def test_waits_for_others(run: lab.Run) -> None:
    """Those that wait have a child that lives, and is none of the zombies."""
    dead = {one["pid"] for one in run.workload["zombies"]}
    for one in parents(run, "waiting-for-other"):
        waiting = [t for t in one["threads"] if t["wchan"] == "do_wait"]
        assert len(waiting) == 1
        living = {c for t in one["threads"] for c in t["children"]} - dead
        assert len(living) == 1
        (task,) = (
            task
            for task in run.workload["tasks"].values()
            if task["tid"] == waiting[0]["tid"]
        )
        assert set(task["waits_for"].values()) <= living | {task["tid"], "stopped"}
    own = {t["comm"]: t for p in run.workload["parents"] for t in p["threads"]}
    assert not dead & set(own["waiter-own"]["children"])
    assert set(own["waiter-first"]["children"]) <= dead


def test_nothing_waits_of_those_that_never_do(run: lab.Run) -> None:
    waiting = {
        one["comm"]
        for one in run.workload["parents"]
        if any(t["wchan"] == "do_wait" for t in one["threads"])
        if one["verdict"] != "waiting-for-other"
    }
    # One for what its tracer must have first, one for any but what it has cloned.
    assert waiting == {"seized-parent", "clone-waits"}


def test_cloned_children_have_other_signals(run: lab.Run) -> None:
    """The 38th field of /proc/PID/stat is the signal that its parent is sent."""
    for one in run.workload["zombies"]:
        number = int(stat(run, one["pid"])[35])
        if one["verdict"] == "clone-child":
            assert number == (10 if "usr1" in one["comm"] else 0)
        elif one["verdict"] != "leader-exited":
            assert number == SIGCHLD


def test_codes(run: lab.Run) -> None:
    found = {one["comm"]: one["exit_code"] for one in run.workload["zombies"]}
    assert [found[f"exit-{code}"] for code in (0, 1, 127)] == [0, 0x100, 0x7F00]
    killed = ("by-SIGKILL", "by-SIGSEGV", "by-SIGSEGV-core")
    assert [found[name] for name in killed] == [9, 11, 0x8B]


def test_kernel_reaps_where_it_is_asked_to(run: lab.Run) -> None:
    there = set(pids_in(run))
    found = {one["comm"]: one for one in run.workload["reaped_by_kernel"]}
    assert set(found) == {"ignores", "no-child-wait"}
    for one in found.values():
        assert len(one["children"]) == 3
        assert not there & set(one["children"])
        assert one["pid"] in there


# --- limits


def limits(run: lab.Run, name: str) -> dict[str, tuple[int, int | None]]:
    rows = (row for row in run.workload["limits"] if row["name"] == name)
    return {row["scope"]: (row["used"], row["max"]) for row in rows}


def test_limits_of_the_system(run: lab.Run) -> None:
    _, most = limits(run, "threads-max")["system"]
    assert most == int(run.truth("proc/sys/kernel/threads-max"))
    spaces = limits(run, "pid_max")
    assert len(spaces) == 4
    for _, most in spaces.values():
        assert most == int(run.truth("proc/sys/kernel/pid_max"))
    # The number of a process group whose first process was reaped.
    assert (
        spaces[f"pid_ns {named(run, 'exit-0')['namespace']}"][0] == threads_in(run) + 1
    )


def threads_in(run: lab.Run) -> int:
    """Count the threads in /proc; that of a dead process has the number 0."""
    return sum(int(stat(run, pid)[17]) or 1 for pid in pids_in(run))


def test_limits_of_control_groups(run: lab.Run) -> None:
    rows = limits(run, "pids.max")
    assert set(rows) == {f"/{group}" for group in zombielimits.GROUPS}
    for scope, (used, most) in rows.items():
        group = f"sys/fs/cgroup{scope}"
        assert used == int(run.truth(f"{group}/pids.current"))
        word = run.truth(f"{group}/pids.max").decode().strip()
        assert word == ("max" if most is None else str(most))
    assert rows["/small"] == (11, 12)
    assert rows["/outer"][0] == rows["/outer/inner"][0] + rows["/outer/beside"][0]
    gone = named(run, "of-gone-1")
    assert gone["cgroup"] == "/gone (deleted)"


def test_limits_of_users(run: lab.Run) -> None:
    rows = limits(run, "RLIMIT_NPROC")
    assert rows["uid 2000"] == (10, zombielimits.MAX_PROCESSES)
    assert rows["uid 1000"][0] == 2
    assert sum(used for used, _ in rows.values()) == threads_in(run)


# --- struct pids


def test_module_leaks_what_it_should(run: lab.Run) -> None:
    leaked = run.workload["tasks"]["leaks"]["leaked"]
    found = {one["pid"]: one for one in run.workload["leaks"]}
    assert set(found) == set(leaked.values())
    there = set(pids_in(run))
    for name, count in zombielimits.LEAKED.items():
        one = found[leaked[name]]
        reaped = name in zombielimits.REAPED
        assert one["leaked"] == count
        # One is the process's own; an inode of /proc may be let go of later.
        assert one["count"] >= count + (not reaped)
        assert one["reaped"] == reaped == (one["pid"] not in there)
        assert one["level"] == (name == "leaked-inner")
    addresses = [one["address"] for one in run.workload["leaks"]]
    assert len(set(addresses)) == len(addresses)
    assert all(int(address, 16) >= KERNEL_HALF for address in addresses)


def test_held_processes_are_gone(run: lab.Run) -> None:
    held = run.workload["held"]
    assert not set(held.values()) & set(pids_in(run))
    groups = [int(stat(run, pid)[2]) for pid in pids_in(run)]
    assert groups.count(held["group"]) == 1


def test_source_of_the_module_is_there() -> None:
    assert {path.name for path in Path(zombies.SOURCE).iterdir()} == {
        "Kbuild",
        "leakmodule.c",
    }
