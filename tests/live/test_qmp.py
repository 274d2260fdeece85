# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands on a guest, from outside: it runs, stands, hangs, panics, is gone.

Its threads wait for locks of a module for ever (``lockmodule``), some for each other;
the tests go from one state of the guest to the next, in the order of this file.
"""

import contextlib
import io
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.livecommands import NAMES
from msatools.program import TargetSpec, open_target
from tests.live.following import clocks_ns, gap_ns
from tests.live.hang import control, hang, panic
from tests.support.usage import free_programs

KERNELS = ("6.1", "6.12")
SCRIPTS = Path(sys.executable).parent
INTERVAL_S = 0.3
PATIENCE_SECONDS = 120
PIPE_BYTES = (1 << 16) + io.DEFAULT_BUFFER_SIZE
FRAMES_PER_MIB = 256
POKED = ("asm_sysvec_apic_timer_interrupt", "unknown_nmi_panic", "panic_timeout")

Report = dict[str, Any]


@pytest.fixture(scope="module", params=KERNELS)
def guest(request: pytest.FixtureRequest) -> Iterator[lab.Live]:
    with lab.live(f"lockmodule-{request.param}") as live:
        yield live


@pytest.fixture(scope="module")
def symbols(guest: lab.Live) -> dict[str, int]:
    free_programs()
    prog = open_target(TargetSpec(qemu=str(guest.qmp), types="btf")).prog
    return {name: prog.symbol(name).address for name in POKED}


@pytest.fixture(scope="module")
def hanging(guest: lab.Live, symbols: dict[str, int]) -> lab.Live:
    """None of its CPUs does anything any more, nor takes an interrupt."""
    hang(guest, symbols)
    return guest


@pytest.fixture(scope="module")
def panicked(hanging: lab.Live, symbols: dict[str, int]) -> lab.Live:
    """An NMI, for which an administrator would ask, made it panic; it has halted."""
    panic(hanging, symbols)
    return hanging


@contextmanager
def paused(guest: lab.Live) -> Iterator[None]:
    control(guest, "stop")
    try:
        yield
    finally:
        control(guest, "cont")


@contextmanager
def process_stopped(guest: lab.Live) -> Iterator[int]:
    """QEMU itself stands still: it answers nobody. Its PID."""
    pid = guest.guest._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def line(guest: lab.Live, command: str, *words: object) -> list[str]:
    free_programs()
    more = ["-L"] if command == "prstat" else []
    which = ["--qemu", str(guest.qmp), "--types", "btf", "--json"]
    return [str(SCRIPTS / f"msa-{command}"), *which, *more, *map(str, words)]


def start(guest: lab.Live, command: str, *words: object) -> "subprocess.Popen[str]":
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line(guest, command, *words), text=True, **pipes)


def run(guest: lab.Live, command: str, *words: object) -> list[Report]:
    """The reports of a command that succeeds and has nothing to complain of."""
    running = start(guest, command, *words)
    out, err = running.communicate(timeout=PATIENCE_SECONDS)
    assert (running.returncode, err) == (0, "")
    return [json.loads(each) for each in out.splitlines()]


def failure(running: "subprocess.Popen[str]") -> str:
    """The one line that a command leaves that has failed."""
    _, err = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 1, err
    assert err.count("\n") == 1, err
    return err


def check(guest: lab.Live, command: str, report: Report) -> None:
    """See that a report tells the truth, as far as that stays while the guest runs."""
    target = report["target"]
    assert (target["kind"], target["live"]) == ("qmp", True)
    assert target["release"] == guest.release
    CHECKS[command](guest, report)


def check_memstat(guest: lab.Live, report: Report) -> None:
    assert report["pages"] == guest.guest.machine.mib * FRAMES_PER_MIB
    assert sum(each["pages"] for each in report["classes"]) == report["pages"]
    assert report["coverage"]["unreadable_pages"] == 0
    assert report["scan_ns"] > 0
    changes = report["changes"]
    assert 0 <= changes["changed_folios"] <= changes["changed_pages"]
    assert changes["changed_pages"] < changes["reread_pages"] <= report["pages"]


def check_prstat(guest: lab.Live, report: Report) -> None:
    tasks = {task["pid"]: task for task in report["tasks"]}
    made = [thread["pid"] for thread in guest.workload["threads"]]
    assert len(made) > 50
    for pid in (1, *made):
        name, state, parent = recorded(guest, pid)
        task = tasks[pid]
        told = task["comm"], task["state"], task["ppid"]
        assert told == (name, state, parent)
        parts = ("user", "system", "latency", "off_cpu", "zombie")
        spent = [task[f"{part}_ns"] for part in parts]
        if None not in spent:
            assert sum(spent) == task["lifetime_ns"]


def recorded(guest: lab.Live, pid: int) -> tuple[str, str, int]:
    """The name, state and parent of a task, as the guest's /proc had them."""
    text = guest.truth(f"proc/{pid}/task/{pid}/stat").decode()
    before, _, after = text.rpartition(") ")
    state, parent = after.split()[:2]
    return before.partition("(")[2], state, int(parent)


def check_locks(guest: lab.Live, report: Report) -> None:
    waiting = {wait["pid"] for wait in report["waits"]}
    for lock in guest.workload["locks"]:
        assert waiting >= {waiter["pid"] for waiter in lock["waiters"]}, lock["name"]
    made = {
        ("exact" if each["exact"] else "possible", frozenset(each["pids"]))
        for each in guest.workload["deadlocks"]
    }
    assert len(made) == 3
    assert made == {
        (each["confidence"], frozenset(each["pids"])) for each in report["deadlocks"]
    }


def check_zombies(guest: lab.Live, report: Report) -> None:
    assert report["zombies"] == []
    assert report["coverage"]["tasks"] >= len(guest.workload["threads"])


def check_cpus(guest: lab.Live, report: Report) -> None:
    assert [each["cpu"] for each in report["cpus"]] == [0, 1]
    assert report["coverage"]["cpus_unreadable"] == 0


CHECKS = {
    "memstat": check_memstat,
    "prstat": check_prstat,
    "locks": check_locks,
    "zombies": check_zombies,
    "cpus": check_cpus,
}


# --- it runs


@pytest.mark.parametrize("command", NAMES)
def test_once(guest: lab.Live, command: str) -> None:
    (report,) = run(guest, command)
    assert report["interval_ns"] is None
    check(guest, command, report)


def test_report_once(guest: lab.Live) -> None:
    """The module's deadlocks are what is wrong."""
    (report,) = run(guest, "report")
    assert report["target"]["kind"] == "qmp"
    assert report["crash"] is None
    found = {verdict["code"]: verdict for verdict in report["verdicts"]}
    assert found["deadlock"]["severity"] == "critical"
    assert all("error" not in part for part in report["sections"].values())


def test_whatis_once(guest: lab.Live) -> None:
    (report,) = run(guest, "whatis", "init_task+0")
    (answer,) = report["answers"]
    assert (answer["kind"], answer["task"]["pid"]) == ("task", 0)


@pytest.mark.parametrize("command", NAMES)
def test_intervals(guest: lab.Live, command: str) -> None:
    reports = run(guest, command, INTERVAL_S, 3)
    assert len(reports) == 3
    for report in reports:
        check(guest, command, report)
    for before, after in itertools.pairwise(reports):
        assert abs(gap_ns(before, after)) <= clocks_ns(after)
        assert after["taken_at_ns"] >= before["taken_at_ns"]
    # An idle guest looks at its clock rarely, but does.
    assert sum(report["interval_ns"] for report in reports) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_it_waits(guest: lab.Live, number: signal.Signals) -> None:
    """For a socket that another client holds: the signal ends it, no time-out."""
    holder = start(guest, "cpus", INTERVAL_S)
    assert holder.stdout
    holder.stdout.readline()
    running = start(guest, "cpus")
    while not has_socket(running.pid):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    _, err = running.communicate(timeout=PATIENCE_SECONDS)
    assert (running.returncode, err) == (-number, "")
    holder.terminate()
    holder.communicate(timeout=PATIENCE_SECONDS)


def has_socket(pid: int) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith("socket:"):
                return True
    return False


# --- it stands still


@pytest.mark.parametrize("command", NAMES)
def test_paused(guest: lab.Live, command: str) -> None:
    """All is as it was; the next interval has the time that has passed for it."""
    with paused(guest):
        reports = run(guest, command, INTERVAL_S, 2)
    assert [report["interval_ns"] for report in reports] == [0, 0]
    for report in reports:
        check(guest, command, report)
        is_at_rest(report)


def is_at_rest(report: Report) -> None:
    """See that a guest was looked at in which nothing moves."""
    assert [note["code"] for note in report["notes"]] == ["clock-stands-still"]
    for each in report.get("checks", ()):
        assert not each["difference"] or each["explained_by"], each
    if "scan_ns" in report:
        changes = report["changes"]
        assert {**changes, "reread_pages": 0} == dict.fromkeys(changes, 0)


def printed(running: "subprocess.Popen[str]") -> Report:
    """Read the next report of a command that goes on."""
    assert running.stdout
    report: Report = json.loads(running.stdout.readline())
    return report


def still(running: "subprocess.Popen[str]") -> list[Report]:
    """Return reports of looks that began once the guest stood still.

    As much as the pipe and what reads it hold may be of looks before, and so may be
    what is printed next.
    """
    assert running.stdout
    left = PIPE_BYTES
    while left > 0:
        left -= len(running.stdout.readline())
    printed(running)
    return [printed(running) for _ in range(2)]


def test_paused_in_between(guest: lab.Live) -> None:
    running = start(guest, "prstat", INTERVAL_S)
    first = printed(running)
    with paused(guest):
        reports = still(running)
    while (last := printed(running))["interval_ns"] == 0:
        pass
    running.terminate()
    assert running.wait(PATIENCE_SECONDS) == 0
    assert [report["interval_ns"] for report in reports] == [0, 0]
    assert last["taken_at_ns"] > reports[-1]["taken_at_ns"] >= first["taken_at_ns"]
    check(guest, "prstat", last)


def test_stopped_qemu(guest: lab.Live) -> None:
    """Who comes then is told at once what to do."""
    with process_stopped(guest) as pid:
        said = failure(start(guest, "locks"))
    assert said.endswith(f": process {pid} is stopped; kill -CONT {pid}\n")


def test_qemu_that_stops_in_between(guest: lab.Live) -> None:
    """Its memory can be read all the same: the guest stands still, no more."""
    running = start(guest, "locks", INTERVAL_S)
    printed(running)
    with process_stopped(guest):
        reports = still(running)
        running.terminate()
        assert running.wait(PATIENCE_SECONDS) == 0
    assert [report["interval_ns"] for report in reports] == [0, 0]
    check(guest, "locks", reports[-1])


# --- it does not come back


@pytest.mark.parametrize("command", NAMES)
def test_hanging(hanging: lab.Live, command: str) -> None:
    (report,) = run(hanging, command, INTERVAL_S, 1)
    assert report["interval_ns"] == 0
    assert report["target"]["crash"] is None
    check(hanging, command, report)
    is_at_rest(report)


@pytest.mark.parametrize("command", NAMES)
def test_panicked(panicked: lab.Live, command: str) -> None:
    (report,) = run(panicked, command)
    crash = report["target"]["crash"]
    assert crash["message"] == "Kernel panic - not syncing: NMI: Not continuing"
    assert (crash["cpu"], crash["pid"]) == (0, 0)
    if command == "cpus":
        # It has taken those that it stopped out of the online mask.
        assert all(cpu["online"] for cpu in report["cpus"])
    check(panicked, command, report)


def test_end(panicked: lab.Live) -> None:
    """It is started anew, or QEMU is killed, while samples are taken of it."""
    anew = panicked.name.endswith("6.12")
    running = start(panicked, "prstat" if anew else "memstat", INTERVAL_S)
    assert running.stdout
    running.stdout.readline()
    if anew:
        control(panicked, "set-action", reboot="reset")
        control(panicked, "system_reset")
        expected = "the guest has been reset or started anew"
    else:
        panicked.guest._process.kill()
        expected = "QEMU has ended or closed the connection"
    rest = running.stdout
    while select.select([rest], [], [], PATIENCE_SECONDS)[0] and rest.readline():
        pass
    assert f"{panicked.qmp}: {expected}; " in failure(running)
