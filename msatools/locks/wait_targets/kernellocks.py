# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks of the kernel that tasks wait on."""

from dataclasses import replace

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import WaitTarget
from msatools.locks.names.described import describe
from msatools.locks.names.names import find_place
from msatools.locks.sleeping import sleeplocks
from msatools.locks.sleeping.kernellocks import KernelLock
from msatools.target.model import Address


def kernel_lock(look: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Tell a lock of the kernel."""
    lock = sleeplocks.find(look, case)
    if lock is None:
        return None
    on = WaitTarget(
        kind="lock",
        type=lock.type,
        address=None if lock.address is None else Address(lock.address),
        mode=lock.mode,
        waiters=lock.waiters,
        owner=look.pid(lock.owner) if lock.owner else None,
    )
    return _place(look, on, lock, case)


def _place(
    look: LockContext, on: WaitTarget, lock: KernelLock, case: BlockedTask
) -> WaitTarget:
    """Add what a lock is in."""
    if lock.address is None:
        return on
    place = find_place(look, lock.type, lock.address, [case])
    if place is None:
        return on
    told = describe(look, place)
    on = replace(on, name=place.name, inode=told.inode, path=told.path, pid=told.pid)
    file = case.file
    if place.type_name == "pipe_inode_info":
        on = replace(on, name="pipe")
        return replace(on, fd=file.fd) if file else on
    if place.type_name == "file" and file and file.address == place.address:
        return replace(on, fd=file.fd)
    return on
