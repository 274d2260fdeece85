# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets of tasks that wait on futexes, condition variables or kernel locks."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock_context import FEW_READS, LockContext
from msatools.locks.base.model import CONDITION, WaitTarget
from msatools.locks.base.timers import timer_ends
from msatools.locks.names.described import describe
from msatools.locks.names.names import find_place
from msatools.locks.sleeping import sleeplocks
from msatools.locks.sleeping.kernellocks import KernelLock
from msatools.locks.user.futexcontent import condition_at
from msatools.locks.user.futexes import Waiter
from msatools.locks.user.futexwaits import waiters_of
from msatools.locks.user.usermemory import mapping_at
from msatools.target.model import Address

_COMMAND = 0x7F
_WAITS = (0, 6, 9, 11, 13)
"""Operations of futex(): FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET,
FUTEX_WAIT_REQUEUE_PI, FUTEX_LOCK_PI2."""


def futex(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the futex or futexes that a task waits on."""
    waiters, counts = waiters_of(context, case)
    if not waiters:
        return asked_for(case)
    ends = timer_ends(context, case)
    if len(waiters) > 1:
        addresses = [waiter.key.address for waiter in waiters]
        known = tuple(Address(address) for address in addresses if address is not None)
        return WaitTarget(
            kind="futex",
            addresses=known if len(known) == len(waiters) else None,
            count=len(waiters),
            **ends,
        )
    (waiter,) = waiters
    if counts is None and case.call != "futex_waitv":
        context.losses.note(
            "waiters-not-counted",
            f"{FEW_READS} or more wait in the bucket of one futex; they were not "
            "counted",
        )
    key = waiter.key
    address, inode = key.address, None
    if key.of_inode:
        address, inode = _in_file(context, case, key)
    owner = _pi_owner(context, waiter)
    return WaitTarget(
        kind="futex",
        type="pi_futex" if waiter.pi_state else None,
        address=None if address is None else Address(address),
        shared=key.shared,
        inode=inode,
        waiters=counts.get(key) if counts is not None else None,
        owner=owner,
        **ends,
    )


def asked_for(case: BlockedTask) -> WaitTarget | None:
    """Return the futex of a task's system call, if that call waits.

    A task that is not in the queue of the futex was woken, or is about to sleep.
    """
    if case.call not in ("futex", "futex_time32") or not case.plain:
        return None
    if case.arguments[1] & _COMMAND not in _WAITS:
        return None
    return WaitTarget(kind="futex", address=Address(case.arguments[0]))


def is_off_queue(on: WaitTarget) -> bool:
    """Return whether a target is by :func:`asked_for`: the task is in no queue."""
    return on.kind == "futex" and on.address is not None and on.shared is None


def _pi_owner(context: LockContext, waiter: Waiter) -> int | None:
    if not waiter.pi_state:
        return None
    owner = context.layout.member(waiter.pi_state, "futex_pi_state", "owner")
    return context.pid(owner) if owner else None


def _in_file(
    context: LockContext, case: BlockedTask, key: FutexKey
) -> tuple[int | None, int | None]:
    """Return address and inode number of a futex in a file, by the system call.

    The mapping at that address may have changed, so it has to match the key.
    """
    if case.call not in ("futex", "futex_wait"):
        return None, None
    address = case.arguments[0]
    mapping = mapping_at(context.layout, case.mm, address)
    if mapping is None or not mapping.file:
        return None, None
    if mapping.file_offset(address) != key.file_offset:
        return None, None
    inode = context.layout.member(mapping.file, "file", "f_inode")
    if context.layout.member(inode, "inode", "i_sequence") != key.object:
        return None, None
    return address, context.storage.inode(inode).number


Ons = Sequence[WaitTarget | None]


def as_conditions(
    context: LockContext, ons: Ons, least: int
) -> list[WaitTarget | None]:
    """
    Replace futexes of condition variables by the condition variables.

    :param ons: The present or last wait target of each task of the context.
    :param least: Minimum number of waiters for which memory is read.
    """
    mms: list[int] = context.tasks["mm"].tolist()
    words = [_word_of(mm, on) for mm, on in zip(mms, ons, strict=True)]
    starts = {
        word: condition_at(context, *word)
        for word, count in Counter(words).items()
        if word is not None and count >= least
    }
    # Many tasks may share one target: the new one is shared as well.
    conditions: dict[tuple[int, int], WaitTarget] = {}
    targets = list(ons)
    for row, (on, word) in enumerate(zip(ons, words, strict=True)):
        start = starts.get(word) if word else None
        if on is not None and start is not None:
            key = id(on), start
            if key not in conditions:
                conditions[key] = replace(on, address=Address(start), name=CONDITION)
            targets[row] = conditions[key]
    return targets


def _word_of(mm: int, on: WaitTarget | None) -> tuple[int, int] | None:
    """Return the address space and the aligned address of a private futex."""
    if not mm or on is None or on.kind != "futex":
        return None
    if on.address is None or on.inode is not None:
        return None
    return mm, int(on.address) & ~7


def kernel_lock(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the kernel lock that a task waits for."""
    lock = sleeplocks.find(context, case)
    if lock is None:
        return None
    on = WaitTarget(
        kind="lock",
        type=lock.type,
        address=None if lock.address is None else Address(lock.address),
        mode=lock.mode,
        waiters=lock.waiters,
        owner=context.pid(lock.owner) if lock.owner else None,
    )
    return _with_place(context, on, lock, case)


def _with_place(
    context: LockContext, on: WaitTarget, lock: KernelLock, case: BlockedTask
) -> WaitTarget:
    """Add the name, inode, path and process of a lock."""
    if lock.address is None:
        return on
    place = find_place(context, lock.type, lock.address, [case])
    if place is None:
        return on
    known = describe(context, place)
    on = replace(on, name=place.name, inode=known.inode, path=known.path, pid=known.pid)
    file = case.file
    if place.type_name == "pipe_inode_info":
        on = replace(on, name="pipe")
        return replace(on, fd=file.fd) if file else on
    if place.type_name == "file" and file and file.address == place.address:
        return replace(on, fd=file.fd)
    return on
