# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks whose types BTF does not have, known by those who wait for them."""

from functools import cache
from struct import pack
from typing import Any

import pytest
from drgn.helpers.linux.sched import idle_task

from msatools.locks.locks import collect_locks
from msatools.locks.report import LockRow
from tests.support import overlay
from tests.support.dumps import open_dump
from tests.support.prompt import reported

DUMPS = ["locks-6.12", "locks-6.1", "locks-7.x", "locks-6.12arm64"]

pytestmark = pytest.mark.parametrize("dump", DUMPS)


def ask(dump: str, *words: str) -> Any:
    return reported(open_dump(dump, "btf"), "whatis", *words)


@cache
def rows(dump: str) -> dict[int, LockRow]:
    """The locks that tasks wait for, in the waits of all tasks."""
    found = collect_locks(open_dump(dump, "btf")).locks
    return {row.address: row for row in found if row.address is not None}


def test_global_mutex(dump: str) -> None:
    """acct() on a file system that does not answer keeps it, and others wait."""
    start = open_dump(dump, "btf").symbol("acct_on_mutex").address
    row = rows(dump)[start]
    (owner,) = row.owners
    assert (row.type, owner.comm) == ("mutex", "acct-owner")
    asked = ask(dump, "acct_on_mutex+0", f"{start:x}", "acct_on_mutex+10")
    assert [answer["lock"] for answer in asked["answers"]] == [row.id] * 3
    assert asked["answers"][0]["text"] == "acct_on_mutex (mutex)"
    (lock,) = asked["locks"]
    assert (lock["type"], lock["address"]) == ("mutex", f"{start:#x}")
    assert [each["pid"] for each in lock["owners"]] == [owner.pid]
    assert lock["owners"][0]["confidence"] == owner.confidence == "exact"
    assert tuple(lock["waiters"]) == row.waiters != ()


def test_global_mutex_by_its_physical_address(dump: str) -> None:
    prog = open_dump(dump, "btf")
    start = prog.symbol("acct_on_mutex").address
    (there,) = ask(dump, f"{start:x}")["answers"]
    physical = there["page"]["pfn"] * prog["PAGE_SIZE"] + start % prog["PAGE_SIZE"]
    asked = ask(dump, f"phys:{physical.value_():x}", f"phys:{physical.value_() + 16:x}")
    assert [answer["lock"] for answer in asked["answers"]] == [there["lock"]] * 2


def test_words_that_point_to_the_stack_of_an_idle_task(dump: str) -> None:
    """It has no PID, and waits for nothing: that is no loss."""
    prog = open_dump(dump, "btf")
    start = prog.symbol("acct_on_mutex").address
    stack = idle_task(prog, 0).stack.value_()
    overlay.put(prog, start + 16, pack("<QQ", stack + 256, stack + 256))
    asked = reported(prog, "whatis", f"{start:x}")
    assert (asked["locks"], asked["notes"]) == ([], [])


def test_mutexes_that_nobody_waits_for(dump: str) -> None:
    """Nothing shows that they are any."""
    names = ("cgroup_mutex+0", "rtnl_mutex+0", "schedule+0", "jiffies+0")
    asked = ask(dump, *names)
    assert asked["locks"] == []
    assert not any(answer.get("lock") for answer in asked["answers"])
    # The variable after it.
    end = open_dump(dump, "btf").symbol("acct_on_mutex").address + 0x20
    assert ask(dump, f"{end:x}")["locks"] == []


def test_each_lock_of_a_kernel_is_found_by_its_address(dump: str) -> None:
    wanted = {
        address: row
        for address, row in rows(dump).items()
        if row.type in ("mutex", "percpu_rwsem", "wait_queue") and address >> 63
    }
    assert len(wanted) >= 8
    asked = ask(dump, *(f"{address:x}" for address in wanted))
    found = {int(lock["address"], 16): lock for lock in asked["locks"]}
    assert found.keys() == wanted.keys()
    for address, lock in found.items():
        row = wanted[address]
        assert lock["type"] == row.type
        assert {each["pid"] for each in lock["owners"]} == {
            each.pid for each in row.owners
        }
        assert tuple(lock["waiters"]) == row.waiters
