# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks with a wait list, and locks with a pointer to their first waiter (v7.1)."""

from typing import NamedTuple

import pytest

from msatools.locks import sleeping_locks
from msatools.locks.kernel_locks import LIST_LOCKS, KernelLock, KernelLocks, Record
from msatools.locks.report import Holder, Lock, LockTypeName, Mode, QueuedWaiter
from tests.locks.madememory import BASE, SIZE
from tests.locks.sleeping.madekernel import (
    LOCK,
    OTHER_LOCK,
    STACKS,
    TASKS,
    WAITERS,
    MadeKernel,
)

TASK_OFFSET, TYPE_OFFSET = 16, 24
OWNER = TASKS[7]
WAITING = 1
"""The bit in a mutex's owner word that tasks wait; in a rwsem's count it is bit 1."""


class Kind(NamedTuple):
    """A type of lock, and its contents when tasks wait for it."""

    type: LockTypeName
    function: str
    mode: Mode | None
    list_offset: int
    words: tuple[int, ...]
    """The first words of the lock."""

    blocker: int
    """Low bits of ``task_struct.blocker``."""

    owner: int | None


KINDS = [
    Kind("mutex", "__mutex_lock.constprop.0", None, 16, (OWNER | WAITING,), 0, OWNER),
    Kind("ww_mutex", "__ww_mutex_lock", None, 16, (OWNER | WAITING,), 0, OWNER),
    Kind("rwsem", "rwsem_down_read_slowpath", "read", 24, (3, OWNER), 2, OWNER),
    Kind("rwsem", "rwsem_down_write_slowpath", "write", 24, (3, OWNER), 3, OWNER),
    Kind("semaphore", "__down_common", None, 8, (0,), 1, None),
]
MUTEX = KINDS[0]


class Locks(MadeKernel):
    """A kernel with the locks up to v7.0, or with *first* those of v7.1."""

    def __init__(self, *, first: bool = False) -> None:
        super().__init__()
        self.first = first
        name = "first_waiter" if first else "wait_list"
        part = self.pointer if first else self.heads
        self.struct(
            "mutex",
            32,
            owner=(self.atomic, 0),
            wait_lock=(self.u32, 8),
            **{name: (part, 16)},
        )
        self.struct(
            "rw_semaphore",
            40,
            count=(self.atomic, 0),
            owner=(self.atomic, 8),
            wait_lock=(self.u32, 20),
            **{name: (part, 24)},
        )
        self.struct(
            "semaphore",
            24,
            lock=(self.u32, 0),
            count=(self.u32, 4),
            **{name: (part, 8)},
        )
        for waiter in ("mutex_waiter", "semaphore_waiter", "rwsem_waiter"):
            members = {"list": (self.heads, 0), "task": (self.pointer, TASK_OFFSET)}
            if waiter == "rwsem_waiter":
                members["type"] = (self.u32, TYPE_OFFSET)
            self.struct(waiter, 48, **members)

    def wait(self, kind: Kind, *numbers: int, lock: int = LOCK) -> None:
        """Make tasks wait for a lock, in order, with its address on their stacks."""
        nodes = [WAITERS[number] for number in numbers]
        self.write(lock, *kind.words)
        if self.first:
            self.link(*nodes)
            self.write(lock + kind.list_offset, nodes[0])
        else:
            self.link(lock + kind.list_offset, *nodes)
        for number in numbers:
            self.write(WAITERS[number] + TASK_OFFSET, TASKS[number])
            self.write_u32(WAITERS[number] + TYPE_OFFSET, kind.mode == "read")
            # Arguments of the call are further out, those of its callees further in.
            self.push(number, lock)

    def push(self, number: int, *addresses: int) -> None:
        """Write addresses to a stack, below the waiter."""
        self.write(STACKS[number] + 0x40, *addresses, *([0] * (8 - len(addresses))))

    def find(
        self, kind: Kind, number: int, record: Record | None = None, limit: int = 100
    ) -> KernelLock | None:
        names = ("__schedule", "schedule", kind.function, "wants_it")
        return self.locks().find(names, self.stack(number), limit, record)


@pytest.fixture(params=[False, True], ids=["list", "first-waiter"])
def kernel(request: pytest.FixtureRequest) -> Locks:
    return Locks(first=request.param)


kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.function)


@kinds
@pytest.mark.parametrize("numbers", [(2,), (2, 0), (3, 1, 0, 2)])
def test_waiters(kernel: Locks, kind: Kind, numbers: tuple[int, ...]) -> None:
    kernel.wait(kind, *numbers)
    for number in numbers:
        found = kernel.find(kind, number)
        assert found == KernelLock(kind.type, LOCK, kind.mode, len(numbers), kind.owner)
    queue = [QueuedWaiter(TASKS[number], kind.mode) for number in numbers]
    if kind.type != "rwsem":
        queue = [QueuedWaiter(waiter.task) for waiter in queue]
    assert kernel.locks().queue(kind.type, LOCK) == queue
    locks = kernel.locks()
    names = ("schedule", kind.function)
    for number in reversed(numbers):
        locks.find(names, kernel.stack(number))
    assert locks.queue(kind.type, LOCK) == queue
    assert not kernel.losses.lost


@kinds
def test_lock_whose_word_has_no_waiters_is_rejected(kernel: Locks, kind: Kind) -> None:
    kernel.wait(kind, 0, 1)
    free = (1 << 32,) if kind.type == "semaphore" else (0, 0)
    kernel.write(LOCK, *free)
    assert kernel.find(kind, 0) == KernelLock(kind.type, None, kind.mode, None, None)


@kinds
def test_stale_waiter(kernel: Locks, kind: Kind) -> None:
    """It points to itself, or to the waiters of today."""
    kernel.wait(kind, 0, 1)
    kernel.write(WAITERS[2] + TASK_OFFSET, TASKS[2])
    kernel.push(2, LOCK)
    nothing = KernelLock(kind.type, None, kind.mode, None, None)
    for following, before in (
        (WAITERS[2], WAITERS[2]),
        (WAITERS[0], WAITERS[1]),
        (0, 0),
        (WAITERS[0] + 4, WAITERS[1]),
        (BASE + SIZE, BASE + SIZE),
    ):
        kernel.write(WAITERS[2], following, before)
        assert kernel.find(kind, 2) == nothing
    assert not kernel.losses.lost


@kinds
def test_next_waiter_is_not_taken_for_the_lock(kind: Kind) -> None:
    """Pointers to other waiters are on the stack as well, and lead back."""
    kernel = Locks(first=True)
    kernel.wait(kind, 0, 1, 2)
    kernel.push(0, WAITERS[1], WAITERS[2], LOCK)
    found = kernel.find(kind, 0)
    assert found is not None
    assert found.address == LOCK
    kernel.push(0, WAITERS[1], WAITERS[2])
    assert kernel.find(kind, 0) == KernelLock(kind.type, None, kind.mode, None, None)


def test_two_possible_locks_are_rejected() -> None:
    kernel = Locks(first=True)
    kernel.wait(MUTEX, 0, 1)
    kernel.write(OTHER_LOCK, *MUTEX.words)
    kernel.write(OTHER_LOCK + MUTEX.list_offset, WAITERS[1])
    kernel.push(0, OTHER_LOCK, LOCK)
    assert kernel.find(MUTEX, 0) == KernelLock("mutex", None, None, None, None)


# --- task_struct.blocker and blocked_on


@kinds
def test_blocker(kind: Kind) -> None:
    """The blocker is used if the stack does not have the lock's address."""
    kernel = Locks(first=True)
    kernel.wait(kind, 1, 0)
    kernel.push(0)
    nothing = KernelLock(kind.type, None, kind.mode, None, None)
    assert kernel.find(kind, 0) == nothing
    found = kernel.find(kind, 0, Record(blocker=LOCK | kind.blocker))
    assert found == KernelLock(kind.type, LOCK, kind.mode, 2, kind.owner)
    for other in set(range(4)) - {kind.blocker}:
        assert kernel.find(kind, 0, Record(blocker=LOCK | other)) == nothing


@kinds
def test_stale_blocker(kernel: Locks, kind: Kind) -> None:
    """It points to a lock that the task no longer waits for."""
    kernel.wait(kind, 2, lock=OTHER_LOCK)
    kernel.wait(kind, 0, 1)
    found = kernel.find(kind, 0, Record(blocker=OTHER_LOCK | kind.blocker))
    assert found is not None
    assert (found.address, found.waiters) == (LOCK, 2)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.type)
def test_blocked_on_a_mutex(kind: Kind) -> None:
    kernel = Locks(first=True)
    mutex = kernel.prog.pointer_type(kernel.types["mutex"])
    kernel.add_task_type(blocked_on=(mutex, 64))
    kernel.wait(kind, 1, 0)
    kernel.push(0)
    found = kernel.find(kind, 0, Record(blocked_on=LOCK))
    assert found == KernelLock(kind.type, LOCK, None, 2, OWNER)
    nothing = KernelLock(kind.type, None, None, None, None)
    waking = (1 << 64) - 1
    assert kernel.find(kind, 0, Record(blocked_on=waking)) == nothing
    rwsem = kernel.find(KINDS[2], 0, Record(blocked_on=LOCK))
    assert rwsem == KernelLock("rwsem", None, "read", None, None)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.type)
def test_blocked_on_a_waiter(kernel: Locks, kind: Kind) -> None:
    """It identifies the waiter among several candidates on the stack."""
    waiter = kernel.prog.pointer_type(kernel.types["mutex_waiter"])
    kernel.add_task_type(blocked_on=(waiter, 64))
    kernel.wait(kind, 1, 0)
    stale = STACKS[0] + 0x100
    kernel.write(OTHER_LOCK, *kind.words)
    if kernel.first:
        kernel.link(stale)
        kernel.write(OTHER_LOCK + kind.list_offset, stale)
    else:
        kernel.link(OTHER_LOCK + kind.list_offset, stale)
    kernel.write(stale + TASK_OFFSET, TASKS[0])
    kernel.push(0, LOCK, OTHER_LOCK)
    for start, lock in ((WAITERS[0], LOCK), (stale, OTHER_LOCK)):
        found = kernel.find(kind, 0, Record(blocked_on=start))
        assert found is not None
        assert found.address == lock


# --- damaged and long lists


@kinds
def test_queue_with_an_entry_without_a_task(kernel: Locks, kind: Kind) -> None:
    """A waiter is being woken, or memory is damaged: the queue is unknown."""
    kernel.wait(kind, 0, 1, 2)
    kernel.write(WAITERS[1] + TASK_OFFSET, 0)
    assert kernel.locks().queue(kind.type, LOCK) is None
    assert kernel.losses.lost["waiters_unreadable"] == 1


@kinds
@pytest.mark.parametrize(
    "node",
    [
        pytest.param(0, id="null"),
        pytest.param(WAITERS[0], id="back"),
        pytest.param(WAITERS[1], id="to itself"),
        pytest.param(BASE + SIZE, id="out of memory"),
        pytest.param(WAITERS[4], id="to another"),
    ],
)
def test_damaged_queue(kernel: Locks, kind: Kind, node: int) -> None:
    kernel.wait(kind, 0, 1, 2)
    kernel.write(WAITERS[1], node)
    assert kernel.locks().queue(kind.type, LOCK) is None
    assert kernel.losses.lost["waiters_unreadable"] >= 1
    assert kernel.locks().queue(kind.type, BASE + SIZE) is None


@kinds
def test_walk_of_a_long_queue_is_limited(kernel: Locks, kind: Kind) -> None:
    kernel.wait(kind, 0, 1, 2, 3, 4, 5)
    # Within the limit are two next and one previous entry, but not the lock.
    found = kernel.find(kind, 3, limit=3)
    assert found == KernelLock(kind.type, None, kind.mode, None, None)
    assert {code for code, _ in kernel.losses.notes} == {"lock-not-found"}
    kernel.losses.notes.clear()
    found = kernel.find(kind, 0, limit=3)
    assert found == KernelLock(kind.type, LOCK, kind.mode, None, kind.owner)
    assert kernel.locks().queue(kind.type, LOCK, 3) is None
    assert {code for code, _ in kernel.losses.notes} == {"waiters-not-counted"}
    assert len(kernel.locks().queue(kind.type, LOCK, 6) or ()) == 6
    assert not kernel.losses.lost


def test_long_list_is_walked_once() -> None:
    """This holds even if the lock is not found; otherwise a herd would take forever."""
    for known in (True, False):
        kernel = Locks(first=True)
        kernel.wait(MUTEX, 0, 1)
        nodes = [BASE + 0x8000 + 0x30 * number for number in range(300)]
        for node in nodes:
            kernel.write(node + TASK_OFFSET, TASKS[5])
        kernel.link(*WAITERS[:2], *nodes)
        kernel.push(0, LOCK) if known else kernel.push(0)
        kernel.push(1)
        layout = kernel.layout
        locks = KernelLocks(layout, kernel.losses)
        for number, fewest in ((0, 300), (1, 0)):
            before = layout.reader.reads
            found = locks.find((MUTEX.function,), kernel.stack(number))
            assert found is not None
            assert found.address == (LOCK if known else None)
            reads = layout.reader.reads - before
            assert fewest <= reads < fewest + 20


# --- the words of a lock


@pytest.mark.parametrize(
    ("word", "owner"),
    [
        (0, None),
        (OWNER, OWNER),
        (OWNER | 1, OWNER),
        (OWNER | 3, OWNER),
        pytest.param(1, None, id="just released"),
        pytest.param(OWNER | 5, None, id="handed off, not yet taken"),
        pytest.param(OWNER | 4, None, id="handed off, the last"),
    ],
)
def test_owner_of_a_mutex(kernel: Locks, word: int, owner: int | None) -> None:
    kernel.write(LOCK, word)
    for lock in (LIST_LOCKS["mutex"], LIST_LOCKS["ww_mutex"]):
        assert lock.owner(kernel.layout, LOCK) == owner
        assert lock.last_owner(kernel.layout, LOCK) is None


FAIL = 1 << 63


@pytest.mark.parametrize(
    ("count", "word", "owner", "last", "readers"),
    [
        pytest.param(0, 0, None, None, 0, id="new"),
        pytest.param(1, OWNER, OWNER, None, 0, id="a writer"),
        pytest.param(3, OWNER, OWNER, None, 0, id="a writer, others wait"),
        pytest.param(7, OWNER, OWNER, None, 0, id="a writer, one is next"),
        pytest.param(1, OWNER | 1, None, None, 0, id="a writer, after a reader"),
        pytest.param(1, OWNER | 3, None, None, 0, id="the same, nobody spins"),
        pytest.param(1, 0, None, None, 0, id="a writer before it sets the owner"),
        pytest.param(1, OWNER | 2, OWNER, None, 0, id="a writer, nobody spins"),
        pytest.param(1, OWNER | 4, OWNER, None, 0, id="the same, v5.3 to v5.10"),
        pytest.param(0, OWNER | 1, None, None, 0, id="a former reader"),
        pytest.param(2, OWNER | 1, None, None, 0, id="the same, one waits"),
        pytest.param(0x100, OWNER | 1, None, OWNER, 1, id="a reader"),
        pytest.param(0x302, OWNER | 1, None, OWNER, 3, id="readers, one waits"),
        pytest.param(0x102, OWNER | 7, None, OWNER, 1, id="all flags"),
        pytest.param(0x102, OWNER, None, OWNER, 1, id="a writer turned reader"),
        pytest.param(0x102, 1, None, None, 1, id="an unknown reader"),
        pytest.param(FAIL | 0x100, OWNER | 1, None, OWNER, 1, id="too many readers"),
        pytest.param(0x101, OWNER, OWNER, None, 0, id="a reader that backs off"),
    ],
)
def test_words_of_a_rwsem(
    kernel: Locks,
    count: int,
    word: int,
    owner: int | None,
    last: int | None,
    readers: int,
) -> None:
    kernel.write(LOCK, count, word)
    layout = kernel.layout
    assert LIST_LOCKS["rwsem"].owner(layout, LOCK) == owner
    assert LIST_LOCKS["rwsem"].last_owner(layout, LOCK) == last
    assert LIST_LOCKS["rwsem"].readers(layout, LOCK) == readers
    held = [Holder(owner, "exact")] if owner else []
    held = [Holder(last, "likely")] if last else held
    kernel.link(LOCK + 24)
    if kernel.first:
        kernel.write(LOCK + 24, 0)
    assert sleeping_locks.holders(kernel.context(), Lock("rwsem", LOCK)) == held


def test_rwsem_before_5_3(kernel: Locks) -> None:
    """Its count has another format and its owner is a pointer: both are unknown."""
    old = {"count": (kernel.atomic, 0), "owner": (kernel.pointer, 8)}
    kernel.struct("rw_semaphore", 40, **old, wait_list=(kernel.heads, 24))
    kernel.write(LOCK, 0x101, OWNER)
    layout = kernel.layout
    assert LIST_LOCKS["rwsem"].owner(layout, LOCK) is None
    assert LIST_LOCKS["rwsem"].last_owner(layout, LOCK) is None
    assert LIST_LOCKS["rwsem"].readers(layout, LOCK) is None


def test_last_reader_that_waits_itself_is_not_an_owner(kernel: Locks) -> None:
    read = KINDS[2]
    kernel.wait(read, 0, 1)
    kernel.write(LOCK, 0x102, TASKS[1] | 1)
    lock = Lock("rwsem", LOCK)
    assert sleeping_locks.holders(kernel.context(), lock) == []
    kernel.write(LOCK, 0x102, TASKS[2] | 1)
    assert sleeping_locks.holders(kernel.context(), lock) == [
        Holder(TASKS[2], "likely")
    ]


def test_owner_of_a_semaphore(kernel: Locks) -> None:
    lock = Lock("semaphore", LOCK)
    kernel.wait(KINDS[4], 0)
    assert sleeping_locks.holders(kernel.context(), lock) == []
    members = {"count": (kernel.u32, 4), "last_holder": (kernel.u64, 32)}
    name = "first_waiter" if kernel.first else "wait_list"
    part = kernel.pointer if kernel.first else kernel.heads
    kernel.struct("semaphore", 40, **members, **{name: (part, 8)})
    kernel.write(LOCK + 32, OWNER)
    assert sleeping_locks.holders(kernel.context(), lock) == [Holder(OWNER, "likely")]
    kernel.write(LOCK + 32, 0)
    assert sleeping_locks.holders(kernel.context(), lock) == []


@pytest.mark.parametrize("word", [BASE + 0x3000, OWNER + 8, 0x1000], ids=hex)
def test_owner_that_is_not_a_task(kernel: Locks, word: int) -> None:
    kernel.write(LOCK, word)
    assert sleeping_locks.holders(kernel.context(), Lock("mutex", LOCK)) == []
