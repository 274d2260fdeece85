# SPDX-License-Identifier: LGPL-2.1-or-later

"""Data that tasks wait on: of files and devices, by a call or by a fault."""

import stat
from dataclasses import replace

import numpy as np

from msatools.locks.base.blocked_tasks import BlockedTask, OpenFile
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import WaitTarget
from msatools.locks.base.open_files import is_data_of, open_files
from msatools.locks.base.ownstack import Fault
from msatools.locks.base.storage import Inode
from msatools.locks.base.wait_queues import wait_queues
from msatools.locks.events.bitwaits import bit_of, inode_of
from msatools.locks.events.folios import folio_of
from msatools.locks.places.places import lock_places
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address
from msatools.tasks.classes import TaskClass
from msatools.tasks.table import TaskTable
from msatools.tasks.task_cgroups import read_cgroups

_EXECUTABLE = 0x4
"""``VM_EXEC``."""

_REMOTE = ("get_user_pages_remote", "__get_user_pages_remote", "__access_remote_vm")
"""What reaches for the memory of others (mm/gup.c, mm/memory.c)."""


def fault(look: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Tell the page that is waited for in a page fault."""
    # Whose memory it is may be its own, too.
    remote = case.is_in(*_REMOTE) and case.stack.fault(case.mm, remote=True)
    found = remote or case.stack.fault(case.mm, remote=False)
    if found is None:
        return _data(look, case, "page")
    what, mapping = found
    owner = lock_places(look).owner_of_mm(mapping["vm_mm"]) if remote else None
    on = _fault(look, case, what, mapping)
    return replace(on, pid=look.pid(owner, leader=True)) if owner else on


def _fault(
    look: LockContext, case: BlockedTask, what: Fault, mapping: dict[str, int]
) -> WaitTarget:
    address = Address(what.address)
    if case.is_in("handle_userfault"):
        context = look.layout.member(
            what.vma, "vm_area_struct", "vm_userfaultfd_ctx.ctx"
        )
        fd = open_files(look, case).by_private.get(context)
        return WaitTarget(kind="userfaultfd", address=address, fd=fd)
    text = bool(mapping["vm_flags"] & _EXECUTABLE)
    if case.task_class is TaskClass.SWP:
        folio = _folio(look, case)
        device = look.storage.swap_of_folio(folio) if folio else None
        return WaitTarget(kind="page", address=address, text=text, device=device)
    file = mapping["vm_file"]
    if not file:
        return WaitTarget(kind="page", address=address, text=text)
    inode = look.storage.host_of_file(file)
    is_device = look.storage.is_data_of_device(inode)
    return WaitTarget(
        kind="page",
        address=address,
        text=text,
        path=look.path_of_file(file),
        inode=None if is_device else inode.number,
        device=look.storage.device_of(inode),
        fs=look.storage.file_system_of(inode),
    )


def _folio(look: LockContext, case: BlockedTask) -> int | None:
    """Find the page that a task waits for."""
    folios = (folio_of(look, case, entry) for entry in case.stack.wait_entries())
    return next(filter(None, folios), None)


def _data(
    look: LockContext, case: BlockedTask, kind: str = "disk"
) -> WaitTarget | None:
    """Tell what data is waited for, by the page or buffer that a task waits for."""
    folio = _folio(look, case)
    if folio:
        inode = look.storage.host_of_folio(folio)
        if inode is not None:
            return _on_inode(look, kind, inode, case.file)
        device = look.storage.swap_of_folio(folio)
        return WaitTarget(kind=kind, device=device) if device else None
    for entry in case.stack.wait_entries():
        wait = bit_of(look, case, entry)
        if wait is None:
            continue
        inode = inode_of(look, wait)
        if inode is not None:
            return _on_inode(look, kind, inode, None)
        device = None if wait.variable else look.storage.device_of_buffer(wait.word)
        if device is not None:
            return WaitTarget(kind=kind, device=device)
    return None


def _on_inode(
    look: LockContext, kind: str, inode: Inode, file: OpenFile | None
) -> WaitTarget:
    """Tell whose data is waited for; the number of a device's own inode is no use."""
    device = look.storage.device_of(inode)
    is_device = look.storage.is_data_of_device(inode)
    opened = file if is_data_of(look, file, inode) else None
    if opened:
        path = look.path_at(opened.place)
    else:
        path = None if is_device else look.path_of(inode)
    return WaitTarget(
        kind=kind,
        path=path,
        inode=None if is_device else inode.number,
        device=device,
        fs=look.storage.file_system_of(inode),
        fd=opened.fd if opened else None,
    )


def disk(look: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Tell what is waited for of a disk or a file system."""
    if case.is_in("read_events", "do_io_getevents"):
        return WaitTarget(kind="aio", address=Address(case.arguments[0]))
    if case.is_in("jbd2_log_wait_commit"):
        return _journal(look, case)
    on = _data(look, case)
    if on is not None or case.file is None:
        return on
    mapping = case.file.mapping
    host = look.layout.member(mapping, "address_space", "host")
    inode = look.storage.inode(host)
    if not (stat.S_ISBLK(inode.mode) or stat.S_ISREG(inode.mode)):
        return None
    return _on_inode(look, "disk", inode, case.file)


def _journal(look: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Tell a journal whose thread is to commit: on whose queue the task is."""
    done = look.layout.offset("journal_s", "j_wait_done_commit")
    for entry in case.stack.wait_entries():
        queue = wait_queues(look).head_of(entry)
        if queue is None:
            continue
        names = ("j_task", "j_dev")
        thread, device = look.layout.members(queue[0] - done, "journal_s", *names)
        if min(thread, device) < KERNEL_HALF:
            continue
        path = look.path_at(case.file.place) if case.file else None
        return WaitTarget(
            kind="journal",
            pid=look.pid(thread),
            device=look.storage.device(device),
            path=path,
            waiters=queue[1],
        )
    return None


def reclaim(look: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Tell the control group that has more memory than it should; else nothing does.

    It is the task's own; that the limit may be of one above is not told.
    """
    over = ("mem_cgroup_handle_over_high", "__mem_cgroup_handle_over_high")
    if not case.is_in(*over):
        return None
    rows = np.array([case.row], np.intp)
    part = TaskTable(look.tasks.records[rows], look.tasks.columns)
    path = read_cgroups(look.reader, part, look.findings).path(0)
    return WaitTarget(kind="cgroup", path=path) if path else None
