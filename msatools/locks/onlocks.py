# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks of the kernel and of files that tasks wait on."""

import stat
from dataclasses import replace

import drgn

from msatools.locks.kernellocks import KernelLock
from msatools.locks.layout import KERNEL
from msatools.locks.look import MAX_CANDIDATES, Case, Look
from msatools.locks.model import On
from msatools.target.model import Address


def kernel_lock(look: Look, case: Case) -> On | None:
    """Tell a lock of the kernel."""
    lock = look.locks.find(case.names, case.stack, look.limit)
    if lock is None:
        return None
    if look.tasks.has("blocker"):
        lock = look.locks.by_blocker(lock, int(look.tasks["blocker"][case.row]))
    on = On(
        kind="lock",
        type=lock.type,
        address=None if lock.address is None else Address(lock.address),
        mode=lock.mode,
        waiters=lock.waiters,
        owner=look.pid(lock.owner) if lock.owner else None,
    )
    return _place(look, on, lock, case)


def _place(look: Look, on: On, lock: KernelLock, case: Case) -> On:
    """Add what a lock is in."""
    of_file = _lock_of_file(look, on, lock, case)
    if of_file is not None:
        return of_file
    place = look.locks.place(lock, case.mm)
    if place is None:
        return _lock_of_mapping(look, on, lock, case) or on
    on = replace(on, name=place.name)
    if place.inode is not None:
        inode = look.storage.inode(place.inode)
        return replace(on, inode=inode.number, path=look.path_of(inode))
    if place.super_block is not None:
        mount = look.paths.mount_of(place.super_block)
        root = look.layout.member(place.super_block, "super_block", "s_root")
        return replace(on, path=look.path_at((mount, root)))
    if place.mm is not None:
        owner = look.locks.owner_of_mm(place.mm)
        pid = look.pid(owner, leader=True) if owner else None
        return replace(on, pid=pid)
    return on


def _lock_of_mapping(look: Look, on: On, lock: KernelLock, case: Case) -> On | None:
    """Tell the lock of one mapping of the task's own memory, which it has found.

    They are apart from the mappings: "mm: separate vma->lock from vm_area_struct" (in
    v6.4), up to v6.14.
    """
    if lock.type != "rwsem" or not look.layout.has("vma_lock", "lock"):
        return None
    own = (lock.address or 0) - look.layout.offset("vma_lock", "lock")
    for pointer in case.stack.data_pointers()[:MAX_CANDIDATES]:
        try:
            held, mm = look.layout.members(
                pointer, "vm_area_struct", "vm_lock", "vm_mm"
            )
        except drgn.FaultError:
            continue
        if held == own and mm == case.mm:
            pid = int(look.tasks["tgid"][case.row])
            return replace(on, name="vm_lock", pid=pid)
    return None


def _lock_of_file(look: Look, on: On, lock: KernelLock, case: Case) -> On | None:
    """Tell a lock of the file that the call is about."""
    file = case.file
    if file is None or lock.type != "mutex" or lock.address is None:
        return None
    inode = look.storage.inode(file.inode)
    on = replace(on, fd=file.fd, inode=inode.number)
    if stat.S_ISFIFO(inode.mode):
        mutex = look.layout.offset("pipe_inode_info", "mutex")
        if lock.address == file.private + mutex:
            return replace(on, name="pipe")
    if look.layout.has("file", "f_pos_lock"):
        position = look.layout.offset("file", "f_pos_lock")
        if lock.address == file.address + position:
            return replace(on, name="f_pos_lock", path=look.path_at(file.place))
    return None


def file_lock(look: Look, case: Case) -> On | None:
    """A lock that another has on a file: its waiter waits on a queue of its own."""
    new = look.layout.has("file_lock", "c.flc_wait")
    # "filelock: split common fields into struct file_lock_core" (in v6.9)
    part, prefix = ("file_lock_core", "flc") if new else ("file_lock", "fl")
    wait = look.layout.offset(part, f"{prefix}_wait")
    for entry in case.stack.wait_entries():
        queue = look.locks.head_of_queue(entry, case.stack, look.limit)
        if queue is None:
            continue
        lock = queue[0] - wait
        names = (f"{prefix}_file", f"{prefix}_blocker")
        file, blocker = look.layout.members(lock, part, *names)
        if min(file, blocker) < KERNEL:
            continue
        owner = look.layout.member(blocker, part, f"{prefix}_pid", size=4)
        inode = look.layout.member(file, "file", "f_inode")
        return On(
            kind="flock" if case.call == "flock" else "posix_lock",
            inode=look.storage.inode(inode).number,
            path=look.path_of_file(file),
            fd=case.file.fd if case.file else None,
            owner=owner or None,
        )
    return None
