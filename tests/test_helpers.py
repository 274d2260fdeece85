# SPDX-License-Identifier: LGPL-2.1-or-later

"""The public helpers, held against what the guests say of themselves."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import drgn
import pytest
from drgn import Object, Program
from drgn.helpers.linux.mm import pfn_to_page
from drgn.helpers.linux.pid import find_task

from fixtures import lab
from msatools import helpers
from msatools.memory.memstat import collect_memstat
from msatools.program import TargetSpec, open_target

IN_QUEUE = ("mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex")
"""Types of locks that keep a list of those who wait."""

RECORDED = ("mutex", "ww_mutex", "rt_mutex")
"""Types of locks that record their owner."""


@cache
def program(dump: str) -> Program:
    path = str(lab.build(dump).kept)
    return open_target(TargetSpec(path=path, types="btf")).prog


def locks(*types: str) -> Iterator[tuple[dict[str, Any], Object]]:
    """Yield what the guest says of its kernel's locks, and the locks."""
    run, prog = lab.build("lockmodule-6.12"), program("lockmodule-6.12")
    for said in run.workload["locks"]:
        if said["type"] in types:
            waiter = find_task(prog, said["waiters"][0]["pid"])
            lock = helpers.wait_lock(waiter)
            assert lock is not None
            assert lock.address_ == int(said["address"], 16)
            yield said, lock


def pids(tasks: Iterator[Object] | list[Object]) -> list[int]:
    return [task.pid.value_() for task in tasks]


def test_owners() -> None:
    seen = set()
    for said, lock in locks(*RECORDED):
        owner = helpers.lock_owner(lock)
        assert owner is not None
        assert owner.pid.value_() in {each["pid"] for each in said["owners"]}
        assert helpers.lock_owner(lock.address_of_()).value_() == owner.value_()
        seen.add(said["type"])
    assert seen == {*RECORDED}


def test_waiters() -> None:
    seen = set()
    for said, lock in locks(*IN_QUEUE):
        assert pids(helpers.lock_waiters(lock)) == [
            each["pid"] for each in said["waiters"]
        ]
        seen.add(said["type"])
    assert seen == {*IN_QUEUE}


def test_what_is_no_lock() -> None:
    task = find_task(program("lockmodule-6.12"), 1)
    for wrong in (task, task.pid, Object(task.prog_, "int", 1)):
        with pytest.raises(TypeError, match="not a lock in memory"):
            helpers.lock_owner(wrong)


def test_chains_and_deadlocks() -> None:
    run, prog = lab.build("locks-6.12"), program("locks-6.12")
    (deadlock,) = helpers.deadlocks(prog, possible=True)
    first, second = pids(deadlock)
    assert pids(helpers.wait_chain(deadlock[0])) == [first, second]
    assert pids(helpers.wait_chain(deadlock[1])) == [second, first]
    said = {lock["name"]: lock for lock in run.workload["locks"]}["normal"]
    for waiter in said["waiters"]:
        task = find_task(prog, waiter["pid"])
        assert pids(helpers.wait_chain(task))[:2] == [waiter["pid"], *said["holders"]]
        target = helpers.wait_target(task)
        assert target is not None
        assert (target.kind, target.address) == ("futex", int(said["address"], 16))
    blocked = pids(helpers.blocked_tasks(prog))
    assert {waiter["pid"] for waiter in said["waiters"]} <= {*blocked}
    assert not {*said["holders"]} & {*blocked}


def test_zombies() -> None:
    run, prog = lab.build("zombies-6.12"), program("zombies-6.12")
    for said in run.workload["zombies"][::20]:
        assert helpers.zombie_reason(find_task(prog, said["pid"])) == said["verdict"]
    assert helpers.zombie_reason(find_task(prog, 1)) is None


def test_memory() -> None:
    prog = program("memory-6.12")
    report = collect_memstat(prog, by=("slab",))
    assert helpers.memory_classes(prog) == {
        count.name: count.pages for count in report.classes
    }
    caches = helpers.slab_caches(prog)
    slabs = sum(cache.pages for cache in caches)
    classes = helpers.memory_classes(prog)
    assert slabs == sum(
        pages for name, pages in classes.items() if name.startswith("kernel.slab")
    )
    for at in (caches[0].kmem_cache, prog["init_task"].address_):
        found = helpers.what_is(prog, int(at or 0))
        assert found.page is not None
        page = pfn_to_page(prog, found.page.pfn)
        assert helpers.page_class(page) == found.page.page_class
    assert helpers.page_class(drgn.NULL(prog, "struct page *")) is None


def test_cpus_and_times() -> None:
    prog = program("memory-6.12")
    online = {cpu for each in helpers.processor_sets(prog) for cpu in each.cpus}
    assert online == {0, 1}
    init = helpers.microstates(find_task(prog, 1))
    assert (init.timers.oncpu_usr.ns or 0) > 0


def test_lock_that_cannot_be_read() -> None:
    prog = program("lockmodule-6.12")
    lock = Object(prog, "struct mutex", address=0xFFFF_FFFF_FFFF_0000)
    for helper in (helpers.lock_owner, helpers.lock_waiters):
        with pytest.raises(drgn.FaultError):
            helper(lock)


def test_possible_deadlocks_are_asked_for() -> None:
    prog = program("lockmodule-6.12")
    exact = [pids(tasks) for tasks in helpers.deadlocks(prog)]
    possible = [pids(tasks) for tasks in helpers.deadlocks(prog, possible=True)]
    assert exact
    assert len(possible) > len(exact)


def test_the_idle_task_waits_for_nobody() -> None:
    idle = program("lockmodule-6.12")["init_task"].address_of_()
    assert helpers.wait_chain(idle) == [idle]
    assert helpers.wait_target(idle) is None


TASKS = ("microstates", "wait_chain", "wait_lock", "wait_target", "zombie_reason")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            TASKS,
            r"task must be .*struct task_struct \*, such as find_task\(prog, PID\)",
        ),
        (("page_class",), r"page must be .*struct page \*, such as pfn_to_page"),
        (("lock_owner", "lock_waiters"), "lock must be .*a lock or a pointer to one"),
    ],
)
def test_a_wrong_argument_is_told_what_is_wanted(
    names: tuple[str, ...], wanted: str
) -> None:
    prog = program("lockmodule-6.12")
    given: list[tuple[Any, str]] = [(5, "0x5"), ("1", "str"), (None, "NoneType")]
    given.append((prog, "Program"))
    if "lock_owner" not in names:
        mutex = Object(
            prog, "struct mutex", address=prog.symbol("cgroup_mutex").address
        )
        given += [(mutex, "struct mutex"), (mutex.address_of_(), r"struct mutex \*")]
    for name in names:
        for each, kind in given:
            with pytest.raises(TypeError, match=f"{wanted}.*, not {kind}$"):
                getattr(helpers, name)(each)


@pytest.mark.parametrize("address", ["init_task", None, 1.5, -1, 1 << 64])
def test_an_address_is_a_number(address: Any) -> None:
    with pytest.raises(TypeError, match="address must be an int of 64 bits"):
        helpers.what_is(program("lockmodule-6.12"), address)
    with pytest.raises(TypeError, match=r"prog must be a drgn.Program"):
        helpers.what_is(address, 5)
