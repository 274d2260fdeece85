# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait queues that tasks wait on."""

from typing import Any

import pytest

from msatools.kernel.report import Findings
from msatools.locks.events.queues import Queues
from msatools.locks.lock import Lock
from tests.locks.events.test_completions import ALL_KINDS, lose
from tests.locks.events.waits import MODULE, TASKS, check_locks, look_for, waits
from tests.locks.sleeping.madekernel import BASE, SIZE, MadeKernel
from tests.support.dumps import open_dump


@pytest.mark.parametrize(("name", "types"), ALL_KINDS)
def test_waiters_in_order(name: str, types: str) -> None:
    """Who waits exclusively comes last, whenever it came."""
    seen = waits(name, types)

    def check(said: dict[str, Any], lock: Lock) -> None:
        assert seen.holders(lock) == []

    assert check_locks(seen, "wait_queue", check) >= 1
    assert not seen.findings.lost


@pytest.mark.parametrize("name", TASKS)
def test_a_journal_is_committed_by_its_thread(name: str) -> None:
    seen = waits(name)
    pid = seen.named("file-fsync")
    lock = seen.requests[pid].lock
    assert lock.type == "wait_queue"
    assert seen.queue(lock) == [pid]
    assert seen.holders(lock) == [(seen.named("journal-thread"), "exact")]


@pytest.mark.parametrize("name", TASKS)
def test_what_is_no_wait_queue(name: str) -> None:
    """Locks, polls, children, and what waits for no queue at all."""
    seen = waits(name)
    others = ("pipe-mutex", "directory-read", "frozen-write", "poll", "epoll-wait")
    for task in (*others, "wait4", "over-high", "futex-wait", "file-direct-read"):
        assert seen.named(task) not in seen.requests, task


@pytest.mark.parametrize("name", MODULE)
def test_a_waiter_that_is_lost(name: str) -> None:
    """It breaks the ring: then nobody is told to wait there, rather than wrong."""
    whole = waits(name)
    (lock,) = whole.locks("wait_queue")
    gone, other = (waiter["pid"] for waiter in lock["waiters"])
    prog = open_dump(name, "btf")
    found = whole.look.queues.innermost(whole.cases[gone].stack)
    assert found is not None
    lose(prog, found[0].address)
    damaged = look_for(prog, name)
    assert gone not in damaged.requests
    assert other not in damaged.requests
    assert set(damaged.requests) == set(whole.requests) - {gone, other}


@pytest.mark.parametrize("name", MODULE)
def test_a_long_queue_is_cut(name: str) -> None:
    """Two wait; who may look at one other node only must not tell a wrong queue."""
    seen = waits(name)
    (said,) = seen.locks("wait_queue")
    lock = seen.requests[said["waiters"][0]["pid"]].lock
    heads, codes = set(), set()
    for waiter in said["waiters"]:
        findings = Findings()
        queues = Queues(seen.look.layout, findings, limit=1)
        found = queues.innermost(seen.cases[waiter["pid"]].stack)
        codes |= {code for code, _ in findings.notes}
        if found is not None:
            assert found[1].waiters is None
            heads.add(
                found[1].head - seen.look.layout.offset("wait_queue_head", "head")
            )
    # One has the head next to it, the other has not.
    assert heads == {lock.address}
    assert codes == {"waiters-not-counted", "lock-not-found"}


def test_a_long_queue_that_is_lost_is_followed_once() -> None:
    """Each of its waiters would follow it as far as it goes."""
    kernel = MadeKernel()
    kernel.struct(
        "wait_queue_entry",
        40,
        flags=(kernel.half, 0),
        private=(kernel.pointer, 8),
        func=(kernel.pointer, 16),
        entry=(kernel.heads, 24),
    )
    nodes = [BASE + 0x8000 + 40 * number + 24 for number in range(300)]
    kernel.link(*nodes)
    kernel.write(nodes[-1], BASE + SIZE)  # where nothing is
    layout = kernel.layout
    queues = Queues(layout, kernel.findings, 1000)
    assert {queues.of_head(node) for node in nodes} == {None}
    assert layout.reader.reads < 5 * len(nodes)
    assert kernel.findings.lost
