# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a bit of a word, or for a variable (kernel/sched/wait_bit.c).

The kernel does not record the task that will change it.
"""

from msgspec import Struct

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.ownstack import WaitEntry
from msatools.locks.base.storage import Inode
from msatools.locks.base.wait_queues import QueueKey, wait_queues
from msatools.locks.events.events import wait_of
from msatools.target.addresses import KERNEL_HALF

_VARIABLE = -1
"""The bit of a wait for a variable."""

_STATE_BITS = 3
"""Number of bits of an inode's state that may be waited for; they are the lowest."""

_VARIABLE_U32 = (1 << 32) - 1


class BitWait(Struct, frozen=True):
    """The key of a waiter."""

    word: int
    """Address of the word or the variable, which may be a byte of a larger member."""

    bit: int
    """Number of the bit; -1 for a variable."""

    @property
    def variable(self) -> bool:
        """Whether this is a wait for a variable."""
        return self.bit == _VARIABLE


def bit_of(context: LockContext, case: BlockedTask, entry: WaitEntry) -> BitWait | None:
    """Return the key of an entry on a task's stack; ``None`` if it has no such key."""
    if entry.function not in _wake_functions(context):
        return None
    key = _key(context)
    start = entry.address - key.wait
    word, bit = case.stack.word(start + key.of), case.stack.half(start + key.bit)
    if word is None or bit is None or word < KERNEL_HALF:
        return None
    return BitWait(word, _VARIABLE if bit == _VARIABLE_U32 else bit)


def inode_of(context: LockContext, wait: BitWait) -> Inode | None:
    """
    Return the inode whose state a task waits for; ``None`` if the word is not a state.

    :raises drgn.FaultError: if the inode cannot be read
    """
    # "inode: port __I_NEW to var event" and the like (in v6.12): each bit of the state
    # is a variable. Its address is that of the byte with the number of the bit.
    bits = range(_STATE_BITS) if wait.variable else range(1)
    state = context.layout.offset("inode", "i_state")
    for bit in bits:
        inode = wait.word - bit - state
        if inode % 8 == 0 and context.storage.is_inode(inode):
            return context.storage.inode(inode)
    return None


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the bit that a task waits for.

    The address of the lock is that of the word, its key the number of the bit.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    queued = wait_of(context, case)
    if queued is None:
        return None
    entry, bucket = queued
    wait = bit_of(context, case, entry)
    if wait is None:
        return None
    lock = Lock("bit_wait", wait.word, wait.bit)
    wait_queues(context).buckets[lock] = bucket.head
    return Request(lock)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters for a bit that :func:`request` found, in order.

    The queue is a hashed bucket: waiters for other words are left out.
    """
    return wait_queues(context).bucket(lock, _key(context), _wake_functions(context))


def _key(context: LockContext) -> QueueKey:
    offset, entry = context.layout.offset, "wait_bit_queue_entry"
    return QueueKey(
        wait=offset(entry, "wq_entry"),
        of=offset(entry, "key.flags"),
        bit=offset(entry, "key.bit_nr"),
    )


def _wake_functions(context: LockContext) -> list[int]:
    names = ("wake_bit_function", "var_wake_function")
    functions = (context.layout.symbol(name) for name in names)
    return [function for function in functions if function is not None]


BIT_WAIT = LockType(
    names=frozenset({"bit_wait"}), requests=at_most_one(request), queue=queue
)
