# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a bit of any word, or for a variable (kernel/sched/wait_bit.c).

Nothing records who will change it.
"""

from dataclasses import dataclass

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
"""The bit of who waits for a variable."""

_STATE_BITS = 3
"""Of an inode's state that are waited for, all below this."""

_BIT = (1 << 32) - 1


@dataclass(frozen=True)
class BitWait:
    """What an entry of a wait queue stands for."""

    word: int
    """The address of the word, or of the variable: any within what it is of."""

    bit: int
    """Of the word; -1 if it is a variable that is waited for."""

    @property
    def variable(self) -> bool:
        """Whether it is a variable that is waited for."""
        return self.bit == _VARIABLE


def bit_of(context: LockContext, case: BlockedTask, entry: WaitEntry) -> BitWait | None:
    """Return the word that an entry on a task's stack waits for, if it does for one."""
    if entry.function not in _wakers(context):
        return None
    key = _key(context)
    start = entry.address - key.wait
    word, bit = case.stack.word(start + key.of), case.stack.half(start + key.bit)
    if word is None or bit is None or word < KERNEL_HALF:
        return None
    return BitWait(word, _VARIABLE if bit == _BIT else bit)


def inode_of(context: LockContext, wait: BitWait) -> Inode | None:
    """
    Return the inode whose state a task waits for; ``None`` if it is none.

    :raises drgn.FaultError: if it cannot be read
    """
    # "inode: port __I_NEW to var event" and the like (in v6.12): each bit of the state
    # is a variable, the byte of the state with the bit's number stands for it.
    bits = range(_STATE_BITS) if wait.variable else range(1)
    state = context.layout.offset("inode", "i_state")
    for bit in bits:
        inode = wait.word - bit - state
        if inode % 8 == 0 and context.storage.is_inode(inode):
            return context.storage.inode(inode)
    return None


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the word that a task waits for, and which of its bits.

    The lock's address is the word's, its key the bit's number.

    :raises drgn.FaultError: if it cannot be read
    """
    found = wait_of(context, case)
    wait = bit_of(context, case, found[0]) if found else None
    if found is None or wait is None:
        return None
    lock = Lock("bit_wait", wait.word, wait.bit)
    wait_queues(context).buckets[lock] = found[1].head
    return Request(lock)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters for a bit that :func:`request` found, in order.

    Waiters for other words may be on the same queue: they are left out.
    """
    return wait_queues(context).bucket(lock, _key(context), _wakers(context))


def _key(context: LockContext) -> QueueKey:
    at, entry = context.layout.offset, "wait_bit_queue_entry"
    return QueueKey(
        at(entry, "wq_entry"), at(entry, "key.flags"), at(entry, "key.bit_nr")
    )


def _wakers(context: LockContext) -> list[int]:
    names = ("wake_bit_function", "var_wake_function")
    found = (context.layout.symbol(name) for name in names)
    return [function for function in found if function is not None]


BIT_WAIT = LockType(
    names=frozenset({"bit_wait"}), requests=at_most_one(request), queue=queue
)
