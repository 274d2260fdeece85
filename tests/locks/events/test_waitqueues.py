# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait queues that tasks wait on."""

import struct
from functools import partial

from msatools.kernel.report import LossLog
from msatools.locks.base.lock import Lock
from msatools.locks.base.wait_queues import WaitQueues, wait_queues
from msatools.locks.events import waitqueues
from tests.locks.events.waits import Waits, waits
from tests.locks.madememory import BASE, SIZE, MadeMemory
from tests.locks.seen import Seen, damaged
from tests.support.overlay import lose_page, put


def test_a_journal_is_committed_by_its_thread(tasks: Seen) -> None:
    found, tid = waits(tasks), tasks.tid("file-fsync")
    lock = found.requests[tid].lock
    assert lock.type == "wait_queue"
    assert found.queue(lock) == [tid]
    assert found.holders(lock) == [(tasks.tid("journal-thread"), "exact")]


def test_a_journal_with_a_barrier(tasks: Seen) -> None:
    """Who wants to write waits for its thread, or for whoever put the barrier up."""
    done = waits(tasks).requests[tasks.tid("file-fsync")].lock
    at = partial(tasks.context().layout.offset, "journal_s")
    journal = (done.address or 0) - at("j_wait_done_commit")
    locked = Lock("wait_queue", journal + at("j_wait_transaction_locked"))
    thread = [(tasks.tid("journal-thread"), "exact")]
    assert waits(tasks).holders(locked) == thread
    dump = damaged(tasks.run.name)
    put(dump.prog, journal + at("j_barrier_count"), struct.pack("<I", 1))
    found = Waits(dump)
    assert found.holders(locked) == []
    assert found.holders(done) == thread


def test_who_looks_up_a_name_that_others_want_too(tasks: Seen) -> None:
    """It has their queue on its own stack."""
    context = tasks.context()
    stack = int(tasks.table["stack"][tasks.row("wait4")])
    for place in (0, wait_queues(context).stack_bytes - 8):
        lock = Lock("wait_queue", stack + place)
        wait_queues(context).lookups.add(lock)
        holders = waitqueues.holders(context, lock)
        assert [holder.task for holder in holders] == [tasks.address("wait4")]


def test_what_is_no_wait_queue(tasks: Seen) -> None:
    """Locks, polls, children, and what waits for no queue at all."""
    others = ("pipe-mutex", "directory-read", "frozen-write", "poll", "epoll-wait")
    for task in (*others, "wait4", "over-high", "futex-wait", "file-direct-read"):
        assert tasks.tid(task) not in waits(tasks).requests, task


def test_a_waiter_that_is_lost(module: Seen) -> None:
    """It breaks the ring: then nobody is told to wait there, rather than wrong."""
    (lock,) = module.locks("wait_queue")
    gone, other = (waiter["pid"] for waiter in lock["waiters"])
    found = wait_queues(waits(module).context).innermost(module.case(gone).stack)
    assert found is not None
    dump = damaged(module.run.name)
    lose_page(dump.prog, found[0].address)
    requests = Waits(dump).requests
    assert set(requests) == set(waits(module).requests) - {gone, other}


def test_a_long_queue_is_cut(module: Seen) -> None:
    """Two wait; who may look at one other node only must not tell a wrong queue."""
    (said,) = module.locks("wait_queue")
    layout = module.context().layout
    lock = waits(module).requests[said["waiters"][0]["pid"]].lock
    heads, codes = set(), set()
    for waiter in said["waiters"]:
        losses = LossLog()
        queues = WaitQueues(layout, losses, limit=1)
        found = queues.innermost(module.case(waiter["pid"]).stack)
        codes |= {code for code, _ in losses.notes}
        if found is not None:
            assert found[1].waiters is None
            heads.add(found[1].head - layout.offset("wait_queue_head", "head"))
    # One has the head next to it, the other has not.
    assert heads == {lock.address}
    assert codes == {"waiters-not-counted", "lock-not-found"}


def test_a_long_queue_that_is_lost_is_followed_once() -> None:
    """Each of its waiters would follow it as far as it goes."""
    kernel = MadeMemory()
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
    queues = WaitQueues(layout, kernel.losses, 1000)
    assert {queues.of_head(node) for node in nodes} == {None}
    assert layout.reader.reads < 5 * len(nodes)
    assert kernel.losses.lost
