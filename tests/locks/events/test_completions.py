# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completions that tasks wait for, and the tasks expected to complete them."""

from tests.locks.events.waits import Waits, waits
from tests.locks.seen import Seen, damaged
from tests.support.overlay import lose_page


def test_purpose_of_a_completion(module: Seen) -> None:
    found = waits(module)
    truths = {lock["name"]: lock for lock in module.locks("completion")}
    worker, thread = (
        truths[name]["owners"][0]["pid"] for name in ("flush-work", "kthread-stop")
    )
    words = {
        name: found.what(lock["waiters"][-1]["pid"]) for name, lock in truths.items()
    }
    assert words == {
        "completion": None,
        "flush-work": f"work lm_work of thread {worker}",
        "kthread-stop": f"thread {thread} to stop",
    }


def test_vfork_child_that_has_not_called_exec(tasks: Seen) -> None:
    """The child is found even if only its parent is read."""
    parent, child = tasks.tid("vfork"), tasks.tid("execute")
    alone = Waits(tasks.only(parent))
    assert alone.requests.keys() == {parent}
    for found in (waits(tasks), alone):
        lock = found.requests[parent].lock
        assert lock.type == "completion"
        assert found.queue(lock) == [parent]
        assert found.holders(lock) == [(child, "exact")]
        assert found.what(parent) == f"child {child} to exec"
    assert not alone.losses.notes


def test_vfork_child_that_cannot_be_read(tasks: Seen) -> None:
    """The owner is unknown, with a note; the waiter and its lock are still known."""
    parent = tasks.tid("vfork")
    dump = damaged(tasks.run.name)
    member = tasks.context().layout.offset("task_struct", "vfork_done")
    lose_page(dump.prog, tasks.address("execute") + member)
    found = Waits(dump)
    lock = found.requests[parent].lock
    assert lock == waits(tasks).requests[parent].lock
    assert found.queue(lock) == [parent]
    assert found.holders(lock) == []
    assert found.losses.lost["completions_unreadable"] > 0
