# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes, condition variables and locks of the kernel that tasks wait on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock_context import FEW_READS, LockContext
from msatools.locks.base.model import CONDITION, WaitTarget
from msatools.locks.base.timers import timer_ends
from msatools.locks.names.described import describe
from msatools.locks.names.names import find_place
from msatools.locks.sleeping import sleeplocks
from msatools.locks.sleeping.kernellocks import KernelLock
from msatools.locks.user.futexes import Waiter
from msatools.locks.user.futexwaits import waiters_of
from msatools.locks.user.userlocks import condition_at
from msatools.locks.user.usermemory import mapping_at
from msatools.target.model import Address

_COMMAND = 0x7F
_WAITS = (0, 6, 9, 11, 13)
"""Operations of futex(): FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET,
FUTEX_WAIT_REQUEUE_PI, FUTEX_LOCK_PI2."""


def futex(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return one or more futexes."""
    waiters, counts = waiters_of(context, case)
    if not waiters:
        return asked_for(case)
    ends = timer_ends(context, case)
    if len(waiters) > 1:
        places = [waiter.key.address for waiter in waiters]
        known = tuple(Address(place) for place in places if place is not None)
        return WaitTarget(
            kind="futex",
            addresses=known if len(known) == len(places) else None,
            count=len(places),
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
    """Return the futex that a task's call is about, if it is one that waits.

    A task that is not in its queue has been woken, or is about to sleep there.
    """
    if case.call not in ("futex", "futex_time32") or not case.plain:
        return None
    if case.arguments[1] & _COMMAND not in _WAITS:
        return None
    return WaitTarget(kind="futex", address=Address(case.arguments[0]))


def is_off_queue(on: WaitTarget) -> bool:
    """Return whether a task is in a futex's call, and not in its queue."""
    return on.kind == "futex" and on.address is not None and on.shared is None


def _pi_owner(context: LockContext, waiter: Waiter) -> int | None:
    if not waiter.pi_state:
        return None
    owner = context.layout.member(waiter.pi_state, "futex_pi_state", "owner")
    return context.pid(owner) if owner else None


def _in_file(
    context: LockContext, case: BlockedTask, key: FutexKey
) -> tuple[int | None, int | None]:
    """Find where a futex of a file is mapped, and the inode, by the call.

    The mapping at the call's address may have changed since: the key has to fit.
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
    number = context.layout.member(inode, "inode", "i_sequence")
    if number != key.object:
        return None, None
    return address, context.storage.inode(inode).number


Ons = Sequence[WaitTarget | None]


def as_conditions(
    context: LockContext, ons: Ons, least: int
) -> list[WaitTarget | None]:
    """
    Put condition variables in place of the futexes that tasks wait on.

    :param ons: What each task of the context waits on, or has waited on.
    :param least: The least number of waiters for which memory is read.
    """
    mms: list[int] = context.tasks["mm"].tolist()
    places = [_word_of(mm, on) for mm, on in zip(mms, ons, strict=True)]
    starts = {
        place: condition_at(context, *place)
        for place, count in Counter(places).items()
        if place is not None and count >= least
    }
    # Tasks that wait on one thing share its description, as they may be many.
    wholes: dict[tuple[int, int], WaitTarget] = {}
    found = list(ons)
    for row, (on, place) in enumerate(zip(ons, places, strict=True)):
        start = starts.get(place) if place else None
        if on is not None and start is not None:
            key = id(on), start
            if key not in wholes:
                wholes[key] = replace(on, address=Address(start), name=CONDITION)
            found[row] = wholes[key]
    return found


def _word_of(mm: int, on: WaitTarget | None) -> tuple[int, int] | None:
    """Return the address space and the aligned 8 bytes that a private futex is in."""
    if not mm or on is None or on.kind != "futex":
        return None
    if on.address is None or on.inode is not None:
        return None
    return mm, int(on.address) & ~7


def kernel_lock(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return a lock of the kernel."""
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
    """Add what a lock is in."""
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
