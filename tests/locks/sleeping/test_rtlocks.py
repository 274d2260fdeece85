# SPDX-License-Identifier: LGPL-2.1-or-later

"""rt_mutexes, and the locks that CONFIG_PREEMPT_RT builds on them."""

import pytest

from msatools.locks import sleeping_locks
from msatools.locks.report import (
    Holder,
    Lock,
    LockTypeName,
    Mode,
    QueuedWaiter,
    Request,
)
from tests.locks.sleeping.madekernel import (
    LOCK,
    OTHER_LOCK,
    STACKS,
    TASKS,
    WAITERS,
    MadeKernel,
    per_task,
)

ROOT_OFFSET, OWNER_OFFSET = 8, 24
TASK_OFFSET, LOCK_OFFSET = 48, 56
RIGHT, LEFT = 8, 16
INNER_OFFSET = 8
"""Offset of the rt_mutex in a rwsem, after the count of readers."""

OWNER = TASKS[7]
READER_BIAS, WRITER_BIAS = 1 << 31, 1 << 30


class RtKernel(MadeKernel):
    def __init__(self, *, rt: bool) -> None:
        super().__init__()
        node = self.struct(
            "rb_node",
            24,
            rb_right=(self.pointer, RIGHT),
            rb_left=(self.pointer, LEFT),
        )
        root = self.struct("rb_root", 8, rb_node=(self.pointer, 0))
        cached = self.struct("rb_root_cached", 16, rb_root=(root, 0))
        base = self.struct(
            "rt_mutex_base",
            32,
            waiters=(cached, ROOT_OFFSET),
            owner=(self.pointer, OWNER_OFFSET),
        )
        mutex = self.struct("rt_mutex", 32, rtmutex=(base, 0))
        self.struct(
            "rt_mutex_waiter",
            64,
            tree_entry=(node, 0),
            task=(self.pointer, TASK_OFFSET),
            lock=(self.pointer, LOCK_OFFSET),
        )
        if rt:
            rwbase = self.struct(
                "rwbase_rt", 40, readers=(self.u32, 0), rtmutex=(base, INNER_OFFSET)
            )
            self.struct("rw_semaphore", 40, rwbase=(rwbase, 0))
            self.struct("mutex", 32, rtmutex=(base, 0))
            self.struct("ww_mutex", 40, base=(mutex, 0))
        else:
            words = {"owner": (self.atomic, 0), "wait_list": (self.heads, 16)}
            self.struct("mutex", 32, **words)

    def wait(self, *numbers: int, inner: int = LOCK, owner: int = OWNER | 1) -> None:
        """Make three tasks wait for a lock, in this order."""
        left, middle, right = (WAITERS[number] for number in numbers)
        self.write(inner + ROOT_OFFSET, middle, left)
        self.write(inner + OWNER_OFFSET, owner)
        self.write(middle + RIGHT, right, left)
        for number in numbers:
            self.write(WAITERS[number] + TASK_OFFSET, TASKS[number], inner)
        self.columns["pi_blocked_on"] = per_task({n: WAITERS[n] for n in numbers})


@pytest.fixture
def kernel() -> RtKernel:
    return RtKernel(rt=False)


@pytest.mark.parametrize("word", [0, 1], ids=["free", "handed off"])
def test_rt_mutex_without_an_owner(kernel: RtKernel, word: int) -> None:
    kernel.wait(2, 0, 1, owner=word)
    assert sleeping_locks.holders(kernel.context(), Lock("rt_mutex", LOCK)) == []


@pytest.mark.parametrize("function", ["futex_lock_pi", "futex_wait_requeue_pi"])
def test_rt_mutex_of_a_futex_is_left_out(kernel: RtKernel, function: str) -> None:
    kernel.wait(2, 0, 1)
    case = kernel.case(0, "rt_mutex_wait_proxy_lock", f"{function}.constprop.0")
    assert sleeping_locks.sleeping_request(kernel.context(), case) is None


def test_waiter_of_another_task_or_outside_the_queue(kernel: RtKernel) -> None:
    """On a running kernel, a task's record can be older than the lock."""
    kernel.wait(2, 0, 1)
    case = kernel.case(0, "rt_mutex_slowlock")
    kernel.columns["pi_blocked_on"] = per_task({0: WAITERS[1]})
    assert sleeping_locks.sleeping_request(kernel.context(), case) is None
    kernel.columns["pi_blocked_on"] = per_task({0: WAITERS[0]})
    assert sleeping_locks.sleeping_request(kernel.context(), case) is not None
    kernel.write(LOCK + ROOT_OFFSET, WAITERS[1])
    assert sleeping_locks.sleeping_request(kernel.context(), case) is None


RT = [
    ("mutex", 0, None, ("mutex_lock",)),
    (
        "mutex",
        0,
        None,
        ("__mutex_lock.isra.0", "mutex_lock_killable"),
    ),
    ("ww_mutex", 0, None, ("__ww_mutex_lock.constprop.0", "ww_mutex_lock")),
    ("rwsem", INNER_OFFSET, "read", ("__rwbase_read_lock", "down_read", "mutex_lock")),
    ("rwsem", INNER_OFFSET, "write", ("rwbase_write_lock", "down_write_killable")),
    ("rt_mutex", 0, None, ("rtlock_slowlock_locked", "rt_spin_lock", "mutex_lock")),
    ("rt_mutex", 0, None, ("__rwbase_read_lock", "rt_read_lock", "down_read")),
    ("rt_mutex", 0, None, ("rt_mutex_lock",)),
    # As on 6.1, where outer functions are missing because of tail calls.
    ("rwsem", INNER_OFFSET, "read", ("__rwbase_read_lock", "wants_it", "mutex_lock")),
    (
        "rwsem",
        INNER_OFFSET,
        "write",
        ("rwbase_write_lock", "wants_it", "rt_write_lock"),
    ),
    ("ww_mutex", 0, None, ("__ww_rt_mutex_lock.constprop.0", "wants_it")),
    ("rt_mutex", 0, None, ("rwbase_write_lock", "rt_write_lock", "down_read")),
]


@pytest.mark.parametrize(("type_", "inner_offset", "mode", "names"), RT)
def test_locks_of_preempt_rt(
    type_: LockTypeName, inner_offset: int, mode: Mode | None, names: tuple[str, ...]
) -> None:
    """The innermost known function determines the lock's type."""
    kernel = RtKernel(rt=True)
    kernel.wait(2, 0, 1, inner=LOCK + inner_offset)
    kernel.write_u32(LOCK, WRITER_BIAS) if inner_offset else None
    context, case = kernel.context(), kernel.case(0, "rt_mutex_slowlock", *names)
    lock = Lock(type_, LOCK)
    assert sleeping_locks.sleeping_request(context, case) == Request(lock, mode)
    queue = [QueuedWaiter(TASKS[number]) for number in (2, 0, 1)]
    assert sleeping_locks.sleeping_queue(context, lock) == queue
    assert sleeping_locks.holders(context, lock) == [Holder(OWNER, "exact")]
    assert sleeping_locks.sleeping_readers(context, lock) == (
        0 if type_ == "rwsem" else None
    )


def test_writer_that_waits_for_readers() -> None:
    """It owns the inner lock and is in no queue itself."""
    kernel = RtKernel(rt=True)
    kernel.wait(2, 0, 1, inner=LOCK + INNER_OFFSET, owner=TASKS[3] | 1)
    kernel.write_u32(LOCK, 2)
    kernel.write(STACKS[3] + 0x40, OTHER_LOCK, LOCK)
    context, lock = kernel.context(), Lock("rwsem", LOCK)
    case = kernel.case(3, "rwbase_write_lock", "down_write", "wants_it")
    assert sleeping_locks.sleeping_request(context, case) == Request(lock, "write")
    queue = [
        QueuedWaiter(TASKS[3], "write"),
        *(QueuedWaiter(TASKS[n]) for n in (2, 0, 1)),
    ]
    assert sleeping_locks.sleeping_queue(context, lock) == queue
    assert sleeping_locks.holders(context, lock) == [Holder(TASKS[3], "exact")]
    assert sleeping_locks.sleeping_readers(context, lock) == 2
    # Once the readers have left, it has the lock and waits for something else; a reader
    # in the slow path also owns the inner lock briefly.
    for count in (WRITER_BIAS, READER_BIAS + 2):
        kernel.write_u32(LOCK, count)
        assert sleeping_locks.sleeping_request(kernel.context(), case) is None
        assert sleeping_locks.sleeping_queue(kernel.context(), lock) == queue[1:]


@pytest.mark.parametrize(
    ("count", "readers"),
    [(READER_BIAS, 0), (READER_BIAS + 3, 3), (2, 2), (0, 0), (WRITER_BIAS, 0)],
)
def test_readers_of_preempt_rt(count: int, readers: int) -> None:
    kernel = RtKernel(rt=True)
    kernel.write_u32(LOCK, count)
    assert (
        sleeping_locks.sleeping_readers(kernel.context(), Lock("rwsem", LOCK))
        == readers
    )
