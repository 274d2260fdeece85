# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait queues that tasks wait on, and their owners."""

import struct
from functools import partial

from msatools.kernel.report import LossLog
from msatools.locks import wait_queues as waitqueues
from msatools.locks.report import Lock
from msatools.locks.wait_queues import WaitQueues, wait_queues
from tests.locks.events.waits import Waits, waits
from tests.locks.madememory import BASE, SIZE, MadeMemory
from tests.locks.seen import Seen, damaged
from tests.support.overlay import lose_page, put


def test_commit_of_a_journal_is_owned_by_its_thread(tasks: Seen) -> None:
    found, tid = waits(tasks), tasks.tid("file-fsync")
    lock = found.requests[tid].lock
    assert lock.type == "wait_queue"
    assert found.queue(lock) == [tid]
    assert found.holders(lock) == [(tasks.tid("journal-thread"), "exact")]


def test_journal_with_a_barrier(tasks: Seen) -> None:
    """A writer waits for the journal's thread, or for the task with the barrier."""
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


def test_owner_of_a_lookup(tasks: Seen) -> None:
    """The wait queue of a parallel lookup is on the stack of the task that does it."""
    context = tasks.context()
    stack = int(tasks.table["stack"][tasks.row("wait4")])
    for offset in (0, wait_queues(context).stack_bytes - 8):
        lock = Lock("wait_queue", stack + offset)
        wait_queues(context).lookups.add(lock)
        holders = waitqueues.holders(context, lock)
        assert [holder.task for holder in holders] == [tasks.address("wait4")]


def test_waiter_that_cannot_be_read(module: Seen) -> None:
    """The list is broken, so no waiter is reported rather than a wrong one."""
    (lock,) = module.locks("wait_queue")
    gone, other = (waiter["pid"] for waiter in lock["waiters"])
    found = wait_queues(waits(module).context).innermost(module.case(gone).stack)
    assert found is not None
    dump = damaged(module.run.name)
    lose_page(dump.prog, found[0].address)
    requests = Waits(dump).requests
    assert set(requests) == set(waits(module).requests) - {gone, other}


def test_walk_of_a_queue_is_limited(module: Seen) -> None:
    """Two tasks wait; a walk limited to one other node must not give a wrong queue."""
    (truth,) = module.locks("wait_queue")
    layout = module.context().layout
    lock = waits(module).requests[truth["waiters"][0]["pid"]].lock
    heads, codes = set(), set()
    for waiter in truth["waiters"]:
        losses = LossLog()
        queues = WaitQueues(layout, losses, limit=1)
        found = queues.innermost(module.case(waiter["pid"]).stack)
        codes |= {code for code, _ in losses.notes}
        if found is not None:
            assert found[1].waiters is None
            heads.add(found[1].head - layout.offset("wait_queue_head", "head"))
    # Only one of the waiters is next to the head.
    assert heads == {lock.address}
    assert codes == {"waiters-not-counted", "lock-not-found"}


def test_broken_queue_is_walked_once() -> None:
    """Otherwise each of its waiters would walk it up to the break."""
    kernel = MadeMemory()
    kernel.struct(
        "wait_queue_entry",
        40,
        flags=(kernel.u32, 0),
        private=(kernel.pointer, 8),
        func=(kernel.pointer, 16),
        entry=(kernel.heads, 24),
    )
    nodes = [BASE + 0x8000 + 40 * number + 24 for number in range(300)]
    kernel.link(*nodes)
    kernel.write(nodes[-1], BASE + SIZE)  # not mapped
    layout = kernel.layout
    queues = WaitQueues(layout, kernel.losses, 1000)
    assert {queues.of_head(node) for node in nodes} == {None}
    assert layout.reader.reads < 5 * len(nodes)
    assert kernel.losses.lost
