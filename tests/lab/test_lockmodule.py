# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the module says of its locks, held against the kernel's own structures."""

import re
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drgn
import pytest
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.rbtree import rbtree_inorder_for_each_entry
from drgn.helpers.linux.sched import task_cpu
from drgn.helpers.linux.slab import slab_object_info

from fixtures import lab
from fixtures.lab import headers, lockmodule
from fixtures.lab.cache import default_cache
from fixtures.lab.errors import LabError
from fixtures.lab.guest import lockmodule as guest
from fixtures.lab.kernels import KERNELS, Installed
from msatools.target import TargetSpec, open_target

KERNEL_NAMES = ("6.1", "6.12")
STOPS = 50
FLAGS = 7
"""Bits of an owner that are not of its address."""
READERS_SHIFT = 8

# The module's function that a waiter is in, by the lock's type and the mode.
FUNCTIONS = {
    ("mutex", None): "lm_lock_mutex",
    ("ww_mutex", None): "lm_lock_ww_mutex",
    ("rwsem", "read"): "lm_read_rwsem",
    ("rwsem", "write"): "lm_write_rwsem",
    ("semaphore", None): "lm_down_semaphore",
    ("rt_mutex", None): "lm_lock_rt_mutex",
    ("percpu_rwsem", "read"): "lm_read_percpu",
    ("percpu_rwsem", "write"): "lm_write_percpu",
    ("completion", None): "lm_wait_completion",
    ("wait_queue", None): "lm_wait_event",
    ("bit_wait", None): "lm_wait_bit",
}
BY_NAME = {"flush-work": "lm_flush_work", "kthread-stop": "lm_stop_thread"}

Lock = dict[str, Any]


@pytest.fixture(scope="module", params=KERNEL_NAMES)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"lockmodule-{request.param}")


@pytest.fixture(scope="module")
def prog(run: lab.Run) -> drgn.Program:
    return program(run)


def program(run: lab.Run) -> drgn.Program:
    prog = drgn.Program()
    assert run.elf
    prog.set_core_dump(run.elf)
    prog.load_debug_info([run.vmlinux])
    return prog


def text(run: lab.Run, pid: int, name: str) -> str:
    return run.truth(f"proc/{pid}/task/{pid}/{name}").decode()


def state(run: lab.Run, pid: int) -> str:
    return text(run, pid, "stat").rpartition(") ")[2][0]


def pids(tasks: list[dict[str, Any]]) -> list[int]:
    return [task["pid"] for task in tasks]


def test_packages_are_of_the_release() -> None:
    kernel = Installed(KERNELS["6.1"], "6.1.0-9-cloud-amd64", "6.1.9-1", Path("/"))
    depends = ["linux-base", "linux-headers-6.1.0-9-common", "gcc-12"]
    found = headers.packages(kernel, [*depends, "linux-kbuild-6.1"])
    assert [str(package) for package in found] == [
        "linux-headers-6.1.0-9-cloud-amd64=6.1.9-1",
        "linux-headers-6.1.0-9-common=6.1.9-1",
        "linux-kbuild-6.1=6.1.9-1",
    ]
    with pytest.raises(LabError, match=r"no linux-headers-6\.1\.0-9-cloud-amd64 in"):
        headers.packages(kernel, depends)


def test_makefile_of_the_headers_finds_its_neighbour() -> None:
    found = headers.relative("include /usr/src/linux-headers-6.1-common/Makefile\n")
    assert found == (
        "include $(dir $(lastword $(MAKEFILE_LIST)))../"
        "linux-headers-6.1-common/Makefile\n"
    )
    with pytest.raises(LabError, match="includes nothing"):
        headers.relative("all:\n")


def test_scenarios_are_modes_of_the_module() -> None:
    source = (lockmodule.SOURCE / "main.c").read_text()
    assert set(guest.MODES) == set(lockmodule.SUMMARIES)
    assert [f"&lm_{mode}" for mode in guest.MODES.values()] == re.findall(
        r"&lm_\w+", source
    )


def test_every_wait_is_in_place(run: lab.Run) -> None:
    waiters = 0
    for lock in run.workload["locks"]:
        for waiter in lock["waiters"]:
            key = (lock["type"], waiter["mode"])
            function = BY_NAME.get(lock["name"]) or FUNCTIONS[key]
            pid = waiter["pid"]
            assert state(run, pid) == "D", waiter
            assert f" {function}+" in text(run, pid, "stack"), waiter
            assert text(run, pid, "comm").strip() == waiter["comm"]
            waiters += 1
    assert waiters == 41
    assert {lock["type"] for lock in run.workload["locks"]} == {
        kind for kind, _ in FUNCTIONS
    }


def test_who_waits_for_nothing_sleeps(run: lab.Run) -> None:
    waiting = {w["pid"] for lock in run.workload["locks"] for w in lock["waiters"]}
    states = set()
    for thread in run.workload["threads"]:
        if thread["pid"] not in waiting:
            assert " lm_sleep+" in text(run, thread["pid"], "stack"), thread
            states.add(state(run, thread["pid"]))
    assert states == {"S", "D"}


def test_waits_began_one_after_the_other(run: lab.Run) -> None:
    for lock in run.workload["locks"]:
        starts = [waiter["start_ns"] for waiter in lock["waiters"]]
        assert all(
            0 < start < run.workload["times"]["monotonic_ns"] for start in starts
        )
        assert len(set(starts)) == len(starts)
        if lock["type"] not in ("rt_mutex", "wait_queue"):
            assert starts == sorted(starts), lock["name"]


def test_symbols_lie_where_the_module_was_loaded(run: lab.Run) -> None:
    found = symbols_of(lockmodule.module(run.kernel, default_cache()))
    sections = run.workload["sections"]
    named = [lock for lock in run.workload["locks"] if lock["symbol"]]
    for lock in named:
        section, offset = found[lock["symbol"]]
        assert int(lock["address"], 16) == int(sections[section], 16) + offset
        assert run.workload["symbols"][lock["symbol"]] == lock["address"]
    assert len(named) == 13


def symbols_of(module: Path) -> dict[str, tuple[str, int]]:
    """The section of each symbol and its offset there, which ``nm`` does not tell."""
    output = subprocess.run(
        ["readelf", "--sections", "--syms", "--wide", module],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = dict(re.findall(r"^ +\[ *(\d+)\] (\.\S+)", output, re.MULTILINE))
    line = r"^ +\d+: ([0-9a-f]+) .* (\d+) (lm_\w+)$"
    found = re.findall(line, output, re.MULTILINE)
    return {name: (names[number], int(at, 16)) for at, number, name in found}


def test_other_locks_lie_in_slabs(run: lab.Run, prog: drgn.Program) -> None:
    caches = set()
    for lock in run.workload["locks"]:
        if not lock["cache"]:
            continue
        info = slab_object_info(prog, int(lock["address"], 16))
        assert info
        assert info.slab_cache.name.string_().decode() == lock["cache"]
        assert info.address == int(lock["object"], 16)
        assert info.allocated
        caches.add(lock["cache"])
    assert caches == {"kmalloc-512", "lm_objects"}


def test_waiters_are_in_the_order_of_the_kernel(
    run: lab.Run, prog: drgn.Program
) -> None:
    for lock in run.workload["locks"]:
        if lock["address"]:
            at = int(lock["address"], 16)
            assert QUEUES[lock["type"]](prog, at) == pids(lock["waiters"]), lock["name"]


def test_owners_are_those_of_the_kernel(run: lab.Run, prog: drgn.Program) -> None:
    for lock in run.workload["locks"]:
        if found := owner(prog, lock):
            named = lock["owners"][-1]["pid"]
            assert found == (lock.get("last_reader", named), lock["readers"]), lock


def test_last_reader_may_have_gone(run: lab.Run) -> None:
    gone = {
        lock["name"]: text(run, lock["last_reader"], "comm").strip()
        for lock in run.workload["locks"]
        if lock.get("last_reader", 0) not in [0, *pids(lock["owners"])]
    }
    assert gone == {"stale-rwsem": "lm-stale-gone"}


def test_cycles_are_closed(run: lab.Run) -> None:
    locks = {lock["name"]: lock for lock in run.workload["locks"]}
    for deadlock in run.workload["deadlocks"]:
        around = [locks[name] for name in deadlock["locks"]]
        assert {lock["name"] for lock in around} == {
            name for name, lock in locks.items() if lock["cycle"] == deadlock["name"]
        }
        held = [o["pid"] for lock in around for o in lock["owners"]]
        wanted = [w["pid"] for lock in around for w in lock["waiters"]]
        assert sorted(held) == sorted(wanted) == sorted(deadlock["pids"])
        assert deadlock["exact"] == all(lock["readers"] == 0 for lock in around)
    assert [d["exact"] for d in run.workload["deadlocks"]] == [True, True, False]


def test_no_other_cycle(run: lab.Run) -> None:
    waits = {
        waiter["pid"]: pids(lock["owners"])
        for lock in run.workload["locks"]
        for waiter in lock["waiters"]
    }
    inside = {pid for d in run.workload["deadlocks"] for pid in d["pids"]}

    def follow(pid: int, seen: tuple[int, ...]) -> None:
        assert pid not in seen
        for other in waits.get(pid, []):
            if other not in inside:
                follow(other, (*seen, pid))

    for pid in waits.keys() - inside:
        follow(pid, ())


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_cpus_that_spin(kernel: str) -> None:
    run = lab.build(f"lockspin-{kernel}")
    prog = program(run)
    spin, rw = run.workload["locks"]
    for lock in (spin, rw):
        for task in lock["owners"] + lock["waiters"]:
            found = find_task(prog, task["pid"])
            assert (task_cpu(found), found.on_cpu.value_()) == (task["cpu"], 1)
            frames = [frame.name for frame in prog.stack_trace(found)]
            slow = any("_lock_slowpath" in name for name in frames)
            assert slow == (task in lock["waiters"]), frames
    at = int(spin["address"], 16)
    word = drgn.Object(prog, "spinlock_t", address=at).rlock.raw_lock
    assert (word.locked.value_(), word.pending.value_()) == (1, 1)
    # CPUs count from 1 there, above two bits for nested contexts.
    assert (word.tail.value_() >> 2) - 1 == spin["waiters"][1]["cpu"]
    counts = drgn.Object(prog, "rwlock_t", address=int(rw["address"], 16)).raw_lock
    assert counts.wlocked.value_() == 0xFF


@pytest.fixture(scope="module", params=KERNEL_NAMES)
def race(request: pytest.FixtureRequest) -> Iterator[lab.Live]:
    with lab.live(f"lockrace-{request.param}") as live:
        yield live


@pytest.mark.live
def test_records_are_right_at_any_moment(race: lab.Live) -> None:
    spec = TargetSpec(qemu=str(race.qmp), vmlinux=str(race.vmlinux))
    prog, _ = open_target(spec)
    assert int(race.workload["symbols"]["lm_records"], 16) == int(
        race.workload["records"]["address"], 16
    )
    racers = set(pids(race.workload["threads"]))
    locks = race.workload["locks"]
    held = dict.fromkeys((lock["name"] for lock in locks), 0)
    waiting = {lock["type"]: 0 for lock in locks}
    taken = []
    for _ in range(STOPS):
        with race.stopped():
            records = read_records(prog, race)
            time.sleep(0.002)
            assert read_records(prog, race) == records
            for lock, record in zip(locks, records, strict=True):
                assert record["lock"] == int(lock["address"], 16)
                assert record["pid"] in racers | {0}
                check_holders(prog, lock, record)
                held[lock["name"]] += bool(record["pid"] or record["readers"])
                queue = QUEUES[lock["type"]](prog, record["lock"])
                assert set(queue) <= racers
                waiting[lock["type"]] += len(queue)
        taken.append(sum(record["taken"] for record in records))
        time.sleep(0.01)
    assert taken == sorted(taken)
    assert taken[-1] > taken[0]
    assert min(held.values()) > 0
    assert min(waiting.values()) > 0


def read_records(prog: drgn.Program, race: lab.Live) -> list[dict[str, int]]:
    about = race.workload["records"]
    data = prog.read(int(about["address"], 16), about["stride"] * about["count"])
    formats = {4: "<i", 8: "<Q"}
    return [
        {
            name: struct.unpack_from(formats[size], data, start + offset)[0]
            for name, (offset, size) in about["fields"].items()
        }
        for start in range(0, len(data), about["stride"])
    ]


def check_holders(prog: drgn.Program, lock: Lock, record: dict[str, int]) -> None:
    """A record names who holds a lock, but not always everyone."""
    found = owner(prog, lock)
    if not found:
        return
    pid, readers = found
    assert record["readers"] <= readers
    if record["pid"]:
        assert (pid, readers) == (record["pid"], 0), lock["name"]


def pid_at(prog: drgn.Program, pointer: int) -> int:
    address = pointer & ~FLAGS
    if not address:
        return 0
    return int(drgn.Object(prog, "struct task_struct *", address).pid)


def owner(prog: drgn.Program, lock: Lock) -> tuple[int, int] | None:
    """Who the lock itself says holds it, and how many readers; None if it cannot.

    Of readers it is the last that has come, who may have gone.
    """
    if lock["type"] in ("mutex", "ww_mutex"):
        mutex = drgn.Object(prog, "struct mutex", address=int(lock["address"], 16))
        return pid_at(prog, int(mutex.owner.counter)), 0
    if lock["type"] == "rt_mutex":
        mutex = drgn.Object(prog, "struct rt_mutex", address=int(lock["address"], 16))
        return pid_at(prog, int(mutex.rtmutex.owner)), 0
    if lock["type"] == "rwsem":
        at = int(lock["address"], 16)
        sem = drgn.Object(prog, "struct rw_semaphore", address=at)
        count = int(sem.count.counter)
        return pid_at(prog, int(sem.owner.counter)), count >> READERS_SHIFT
    return None


def tasks_in(
    head: drgn.Object, waiter: str, link: str, task: str = "task"
) -> list[int]:
    """PIDs of a list of waiters."""
    return [
        pid_at(head.prog_, int(entry.member_(task)))
        for entry in list_for_each_entry(f"struct {waiter}", head, link)
    ]


def mutex_queue(prog: drgn.Program, at: int) -> list[int]:
    mutex = drgn.Object(prog, "struct mutex", address=at)
    return tasks_in(mutex.wait_list.address_of_(), "mutex_waiter", "list")


def rwsem_queue(prog: drgn.Program, at: int) -> list[int]:
    sem = drgn.Object(prog, "struct rw_semaphore", address=at)
    return tasks_in(sem.wait_list.address_of_(), "rwsem_waiter", "list")


def semaphore_queue(prog: drgn.Program, at: int) -> list[int]:
    sem = drgn.Object(prog, "struct semaphore", address=at)
    return tasks_in(sem.wait_list.address_of_(), "semaphore_waiter", "list")


def rt_mutex_queue(prog: drgn.Program, at: int) -> list[int]:
    mutex = drgn.Object(prog, "struct rt_mutex", address=at).rtmutex
    waiter = prog.type("struct rt_mutex_waiter")
    # Since 6.6 both of a waiter's nodes have what they are sorted by with them.
    link = "tree.entry" if waiter.has_member("tree") else "tree_entry"
    root = mutex.waiters.rb_root.address_of_()
    return [
        pid_at(prog, int(entry.task))
        for entry in rbtree_inorder_for_each_entry(waiter, root, link)
    ]


def percpu_queue(prog: drgn.Program, at: int) -> list[int]:
    """The writer that waits for readers first, who is in no queue."""
    sem = drgn.Object(prog, "struct percpu_rw_semaphore", address=at)
    writer = pid_at(prog, int(sem.writer.task))
    queue = wait_queue(prog, int(sem.waiters.address_of_()))
    return [writer, *queue] if writer else queue


def completion_queue(prog: drgn.Program, at: int) -> list[int]:
    head = drgn.Object(prog, "struct completion", address=at).wait.task_list
    return tasks_in(head.address_of_(), "swait_queue", "task_list")


def wait_queue(prog: drgn.Program, at: int) -> list[int]:
    head = drgn.Object(prog, "struct wait_queue_head", address=at).head
    return tasks_in(head.address_of_(), "wait_queue_entry", "entry", "private")


def bit_queue(prog: drgn.Program, at: int) -> list[int]:
    """Who waits for a bit of the word; the table has waiters of other words too."""
    return [
        pid_at(prog, int(entry.wq_entry.private))
        for bucket in prog["bit_wait_table"]
        for entry in list_for_each_entry(
            "struct wait_bit_queue_entry", bucket.head.address_of_(), "wq_entry.entry"
        )
        if int(entry.key.flags) == at
    ]


QUEUES = {
    "mutex": mutex_queue,
    "ww_mutex": mutex_queue,
    "rwsem": rwsem_queue,
    "semaphore": semaphore_queue,
    "rt_mutex": rt_mutex_queue,
    "percpu_rwsem": percpu_queue,
    "completion": completion_queue,
    "wait_queue": wait_queue,
    "bit_wait": bit_queue,
}
