# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the module says of its locks, held against the kernel's own structures."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import drgn
import pytest
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.sched import task_cpu
from drgn.helpers.linux.slab import slab_object_info

from fixtures import lab
from fixtures.lab import headers, lockmodule
from fixtures.lab.cache import default_cache
from fixtures.lab.errors import LabError
from fixtures.lab.guest import lockmodule as guest
from fixtures.lab.kernels import KERNELS, Installed
from tests.support.kernellocks import QUEUES, owner

KERNEL_NAMES = ("6.1", "6.12")


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


def test_there_are_locks_of_every_type(run: lab.Run) -> None:
    waiters = [one for lock in run.workload["locks"] for one in lock["waiters"]]
    for waiter in waiters:
        assert text(run, waiter["pid"], "comm").strip() == waiter["comm"]
    assert len(waiters) == 41
    assert {lock["type"] for lock in run.workload["locks"]} == {
        kind for kind, _ in lockmodule.FUNCTIONS
    }


def test_a_guest_whose_threads_do_not_wait_is_built_anew(run: lab.Run) -> None:
    lockmodule.check_waits(run)
    locks = run.workload["locks"]
    waits = {one["pid"] for lock in locks for one in lock["waiters"]}
    (idle, *_) = (one for one in run.workload["threads"] if one["pid"] not in waits)
    other = replace(run)
    for wrong in (
        [*locks, locks[0] | {"waiters": [idle | {"mode": None}]}],
        locks[1:],
    ):
        other.__dict__["workload"] = run.workload | {"locks": wrong}
        with pytest.raises(LabError, match="is not in lm_"):
            lockmodule.check_waits(other)


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
