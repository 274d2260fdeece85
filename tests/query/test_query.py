# SPDX-License-Identifier: LGPL-2.1-or-later

"""The tasks of the Python API, compared with msa-prstat's reports on dumps."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import drgn
import pytest
from drgn import Object, Program
from drgn.helpers.linux.percpu import per_cpu

import msatools
from msatools.program import TargetError
from msatools.query.kernel import (
    Kernel,
    NoSuchTaskError,
    NotThisMachineError,
    UnreadableTaskError,
)
from msatools.query.model import Now, Process, States, Thread, Timers
from msatools.tasks.waits import TaskClass
from tests.prstat.dumps import read_dump
from tests.prstat.reports import on_dump, opened
from tests.support.dumps import TYPES, open_dump
from tests.support.overlay import lose, lose_page, put

NAME = "tasks-6.12"
DUMPS = (NAME, "tasks-on-6.12", "tasks-6.1")
SECTIONS = {"gelato": "timers", "solaris": "states"}
READS = 15
"""Maximum number of reads to look up a thread of a running kernel of two CPUs."""


def kernel(name: str) -> Kernel:
    return msatools.open(opened(name, "btf"))


def test_running_thread_without_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump may lack the registers of a CPU: its thread is in no timer of sleep."""
    dump, asked = read_dump(NAME), kernel(NAME)
    runs = (dump.table["on_cpu"] != 0) & (dump.table["exit_state"] == 0)
    tid = int(dump.table["pid"][runs][0])
    assert asked.thread(tid).now.timer in ("oncpu_usr", "oncpu_sys", "interrupted")
    monkeypatch.setattr(
        "msatools.query.kernel.running_class", lambda prog, task: TaskClass.OTH
    )
    now = asked.thread(tid).now
    assert (now.task_class, now.timer, now.state) == ("OTH", None, None)


def reported(name: str, *words: str) -> list[dict[str, Any]]:
    report = json.loads(on_dump(name, "--states", "--json", *words))
    states: list[dict[str, Any]] = report["states"]
    return states


def compare(
    answer: Thread | Process, now: tuple[Now, ...], states: list[dict[str, Any]]
) -> None:
    """Compare an answer with the command's: times, bounds, reasons, threads in each."""
    for state in states:
        section = SECTIONS[state["family"]]
        name = state["name"].lower()
        time = getattr(getattr(answer, section), name)
        bound = None if state["bound"] == "none" else state["bound"]
        assert (time.ns, time.bound) == (state["ns"], bound), state
        assert time.reason == state["reason"]
        assert (time.ns is None) == (time.source == "")
        here = [one for one in now if getattr(one, section[:-1]) == name]
        if state["now_threads"] is not None:
            assert len(here) == state["now_threads"], state
            assert sum(one.age_ns for one in here) == state["now_ns"]
        else:
            assert not here or name == "tfault"


@pytest.mark.parametrize("name", DUMPS)
def test_processes(name: str) -> None:
    """Every fourth process: with one thread and with many, alive, stopped and dead."""
    dump, asked = read_dump(name), kernel(name)
    tgids = {
        int(dump.table["tgid"][dump.row(task)]): task
        for task in dump.tasks
        if dump.tasks[task]["tid"] in dump.rows
    }
    assert len(tgids) > 20
    largest = 0
    for pid in [*tgids][::4]:
        answer = asked.process(pid)
        assert answer.pid == pid
        compare(answer, answer.now, reported(name, "-p", str(pid)))
        largest = max(largest, len(answer.tids))
    assert largest > 1


@pytest.mark.parametrize("name", DUMPS)
def test_threads(name: str) -> None:
    """Every fourth thread that is not the first of its process."""
    dump, asked = read_dump(name), kernel(name)
    leaders = set(dump.table["pid"][dump.table.leaders].tolist())
    others = {task["tid"] for task in dump.tasks.values()} & dump.rows.keys() - leaders
    assert len(others) > 20
    for tid in sorted(others)[::4]:
        answer = asked.thread(tid)
        compare(answer, (answer.now,), reported(name, "-L", "-p", str(tid)))


@pytest.mark.parametrize("name", [NAME, "tasks-on-6.12"])
def test_every_thread(name: str) -> None:
    """Times and ages equal those of the arrays of all threads."""
    dump, asked = read_dump(name), kernel(name)
    for row, tid in enumerate(dump.table["pid"].tolist()):
        answer = asked.thread(tid)
        lives = dump.lives
        assert answer.lifetime_ns == lives.lifetime_ns[row]
        assert answer.timers.oncpu_usr.ns == lives.user_ns[row]
        assert answer.timers.oncpu_sys.ns == lives.system_ns[row]
        assert answer.timers.onactivequeue.ns == lives.latency_ns[row]
        assert answer.timers.zombie.ns == lives.zombie_ns[row]
        assert answer.pid == dump.table["tgid"][row]
        assert answer.taken_at_ns == dump.clocks.monotonic_ns
        assert answer.now.age_ns == dump.now.age_ns[row]
        assert not answer.notes


@pytest.mark.parametrize("types", TYPES)
def test_classes(types: str) -> None:
    dump, asked = read_dump(NAME), msatools.open(opened(NAME, types))
    rows = json.loads(on_dump(NAME, "-L", "--json"))["tasks"]
    classes = {row["pid"]: row["class"] for row in rows}
    for name in dump.tasks:
        tid = dump.tasks[name]["tid"]
        if tid in classes:
            assert asked.thread(tid).now.task_class == classes[tid], name


def test_children() -> None:
    asked = kernel(NAME)
    rows = json.loads(on_dump(NAME, "--children", "--json"))["tasks"]
    used = 0
    for row in rows:
        answer = asked.children(row["pid"])
        user, system = answer.timers.oncpu_usr, answer.timers.oncpu_sys
        assert user.ns == row["children"]["user_ns"]
        assert system.ns == row["children"]["system_ns"]
        assert (answer.states.user, answer.states.system) == (user, system)
        used += user.ns
        others = [time for time in answer.timers if time.ns is None]
        assert len(others) == 11
        assert all(time.reason and time.bound is None for time in others)
    assert used


def test_names() -> None:
    """The states of the report and of the API are the same, in the same order."""
    states = reported(NAME, "-p", "1")
    for family, model in (("gelato", Timers), ("solaris", States)):
        names = [s["name"].lower() for s in states if s["family"] == family]
        assert names == [*model._fields]


def test_ended_threads() -> None:
    """The command's rows include ended threads, the timers do not."""
    asked = kernel(NAME)
    rows = json.loads(on_dump(NAME, "--json"))["tasks"]
    ended = 0
    for row in rows:
        answer = asked.process(row["pid"])
        user = answer.timers.oncpu_usr.ns
        assert user is not None
        assert user + answer.ended_user_ns == row["user_ns"]
        ended += answer.ended_user_ns + answer.ended_system_ns
    assert ended


@pytest.mark.parametrize("pid", [0, -1, 1 << 21, 1 << 22, 1 << 40])
def test_no_such_task(pid: int) -> None:
    asked = kernel(NAME)
    for ask in (asked.thread, asked.process, asked.children):
        with pytest.raises(NoSuchTaskError, match=f"pid {pid}: no such task"):
            ask(pid)
    assert issubclass(NoSuchTaskError, LookupError)
    assert issubclass(NoSuchTaskError, TargetError)


def test_self_in_a_dump() -> None:
    with pytest.raises(NotThisMachineError):
        kernel(NAME).self()


@pytest.fixture
def damaged() -> Program:
    return open_dump(NAME, "btf")


def task_at(prog: Program, tid: int) -> Object:
    dump = read_dump(NAME)
    address = int(dump.table["address"][dump.rows[tid]])
    return Object(prog, "struct task_struct", address=address)


def test_lost_task(damaged: Program) -> None:
    lose_page(damaged, task_at(damaged, 1).tgid.address_)
    asked = msatools.open(damaged)
    for ask in (asked.thread, asked.process, asked.children):
        with pytest.raises(UnreadableTaskError, match=r"pid 1: .*lost in this test"):
            ask(1)
    assert asked.thread(2).comm == "kthreadd"


@pytest.mark.parametrize(
    ("member", "value"), [("pid", 7), ("utime", 1 << 61), ("tgid", -1)]
)
def test_damaged_task(damaged: Program, member: str, value: int) -> None:
    obj = task_at(damaged, 1).member_(member)
    assert obj.address_ is not None
    size = drgn.sizeof(obj)
    put(damaged, obj.address_, value.to_bytes(size, "little", signed=True))
    with pytest.raises(UnreadableTaskError, match="no task"):
        msatools.open(damaged).thread(1)


def test_lost_counts_of_a_process(damaged: Program) -> None:
    signal = task_at(damaged, 1).signal.value_()
    size = drgn.sizeof(damaged.type("struct signal_struct"))
    lose(damaged, signal, size)
    asked = msatools.open(damaged)
    for ask in (asked.process, asked.children):
        with pytest.raises(UnreadableTaskError):
            ask(1)
    assert asked.thread(1).pid == 1


def test_lost_clocks(damaged: Program) -> None:
    """One clock that cannot be read gives a note; without any, the call fails."""
    for cpu in (0, 1):
        lose(damaged, per_cpu(damaged["runqueues"], cpu).clock.address_, 8)
        asked = Kernel(damaged)
        if cpu == 0:
            assert asked.thread(1).notes == ("CPU 0's run queue cannot be read",)
        else:
            with pytest.raises(UnreadableTaskError, match="clock"):
                asked.thread(1)


def test_few_reads() -> None:
    """Each call reads a running kernel anew; the reads are its cost."""
    asked = Kernel(opened(NAME, "btf"))
    reader = asked.reader
    reader.is_live = True
    for tid in (1, 2, read_dump(NAME).tasks["nanosleep"]["tid"]):
        # What says how its stack is unwound is read once.
        assert asked.thread(tid).now is not None
        before = reader.reads
        answer = asked.thread(tid)
        assert reader.reads - before <= READS
        # Its present state takes no further reads.
        assert answer.now.task_class is not None
        assert reader.reads - before <= READS


@pytest.fixture
def default() -> Iterator[Program]:
    prog = opened(NAME, "btf")
    drgn.set_default_prog(prog)
    yield prog
    drgn.set_default_prog(None)


def test_default_program(default: Program) -> None:
    """At drgn's prompt, the default target is drgn's program."""
    asked = msatools.open(default)
    assert msatools.thread(1) == asked.thread(1)
    assert msatools.process(1) == asked.process(1)
    assert msatools.children(1) == asked.children(1)
    with pytest.raises(NotThisMachineError):
        msatools.self()


def test_import_is_cheap() -> None:
    code = (
        "import sys, msatools; print('drgn' in sys.modules, 'numpy' in sys.modules); "
        "msatools.open; print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\nTrue\n"
