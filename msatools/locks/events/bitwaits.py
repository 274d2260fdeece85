# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a bit of any word, or for a variable (kernel/sched/wait_bit.c).

Nothing says who is to change it.
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


def bit_of(look: LockContext, case: BlockedTask, entry: WaitEntry) -> BitWait | None:
    """Tell the word that an entry on a task's stack waits for, if it does for one."""
    if entry.function not in _wakers(look):
        return None
    key = _key(look)
    start = entry.address - key.wait
    word, bit = case.stack.word(start + key.of), case.stack.half(start + key.bit)
    if word is None or bit is None or word < KERNEL_HALF:
        return None
    return BitWait(word, _VARIABLE if bit == _BIT else bit)


def inode_of(look: LockContext, wait: BitWait) -> Inode | None:
    """
    Tell the inode whose state a task waits for; ``None`` if it is none.

    :raises drgn.FaultError: if it cannot be read
    """
    # "inode: port __I_NEW to var event" and the like (in v6.12): each bit of the state
    # is a variable, the byte of the state with the bit's number stands for it.
    bits = range(_STATE_BITS) if wait.variable else range(1)
    state = look.layout.offset("inode", "i_state")
    for bit in bits:
        inode = wait.word - bit - state
        if inode % 8 == 0 and look.storage.is_inode(inode):
            return look.storage.inode(inode)
    return None


def request(look: LockContext, case: BlockedTask) -> Request | None:
    """
    Tell the word that a task waits for, and which of its bits.

    The lock's address is the word's, its key the bit's number.

    :raises drgn.FaultError: if it cannot be read
    """
    found = wait_of(look, case)
    wait = bit_of(look, case, found[0]) if found else None
    if found is None or wait is None:
        return None
    lock = Lock("bit_wait", wait.word, wait.bit)
    wait_queues(look).buckets[lock] = found[1].head
    return Request(lock)


def queue(look: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Tell who waits for a bit that :func:`request` has told, in order.

    Waiters for other words may be on the same queue: they are left out.
    """
    return wait_queues(look).bucket(lock, _key(look), _wakers(look))


def _key(look: LockContext) -> QueueKey:
    at, entry = look.layout.offset, "wait_bit_queue_entry"
    return QueueKey(
        at(entry, "wq_entry"), at(entry, "key.flags"), at(entry, "key.bit_nr")
    )


def _wakers(look: LockContext) -> list[int]:
    names = ("wake_bit_function", "var_wake_function")
    found = (look.layout.symbol(name) for name in names)
    return [function for function in found if function is not None]


BIT_WAIT = LockType(
    names=frozenset({"bit_wait"}), requests=at_most_one(request), queue=queue
)
