# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets of tasks that wait for data of a file or device, or for memory."""

import stat

import numpy as np
from msgspec.structs import replace

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
"""Functions that access the memory of other processes (mm/gup.c, mm/memory.c)."""


def fault(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the page that a task waits for in a page fault."""
    # These functions may also access the task's own memory.
    remote = case.is_in(*_REMOTE) and case.stack.fault(case.mm, remote=True)
    found = remote or case.stack.fault(case.mm, remote=False)
    if found is None:
        return _data(context, case, "page")
    what, mapping = found
    owner = lock_places(context).owner_of_mm(mapping["vm_mm"]) if remote else None
    on = _fault(context, case, what, mapping)
    return replace(on, pid=context.pid(owner, leader=True)) if owner else on


def _fault(
    context: LockContext, case: BlockedTask, what: Fault, mapping: dict[str, int]
) -> WaitTarget:
    address = Address(what.address)
    if case.is_in("handle_userfault"):
        userfault = context.layout.member(
            what.vma, "vm_area_struct", "vm_userfaultfd_ctx.ctx"
        )
        fd = open_files(context, case).by_private.get(userfault)
        return WaitTarget(kind="userfaultfd", address=address, fd=fd)
    text = bool(mapping["vm_flags"] & _EXECUTABLE)
    if case.task_class is TaskClass.SWP:
        folio = _folio(context, case)
        device = context.storage.swap_of_folio(folio) if folio else None
        return WaitTarget(kind="page", address=address, text=text, device=device)
    file = mapping["vm_file"]
    if not file:
        return WaitTarget(kind="page", address=address, text=text)
    inode = context.storage.host_of_file(file)
    is_device = context.storage.is_data_of_device(inode)
    return WaitTarget(
        kind="page",
        address=address,
        text=text,
        path=context.path_of_file(file),
        inode=None if is_device else inode.number,
        device=context.storage.device_of(inode),
        fs=context.storage.file_system_of(inode),
    )


def _folio(context: LockContext, case: BlockedTask) -> int | None:
    """Return the page that a task waits for; ``None`` if there is no such page."""
    folios = (folio_of(context, case, entry) for entry in case.stack.wait_entries())
    return next(filter(None, folios), None)


def _data(
    context: LockContext, case: BlockedTask, kind: str = "disk"
) -> WaitTarget | None:
    """Return the data that a task waits for, by the page or buffer."""
    folio = _folio(context, case)
    if folio:
        inode = context.storage.host_of_folio(folio)
        if inode is not None:
            return _on_inode(context, kind, inode, case.file)
        device = context.storage.swap_of_folio(folio)
        return WaitTarget(kind=kind, device=device) if device else None
    for entry in case.stack.wait_entries():
        wait = bit_of(context, case, entry)
        if wait is None:
            continue
        inode = inode_of(context, wait)
        if inode is not None:
            return _on_inode(context, kind, inode, None)
        device = None if wait.variable else context.storage.device_of_buffer(wait.word)
        if device is not None:
            return WaitTarget(kind=kind, device=device)
    return None


def _on_inode(
    context: LockContext, kind: str, inode: Inode, file: OpenFile | None
) -> WaitTarget:
    """Return the file or device whose data a task waits for.

    The inode number of a block device is left out.
    """
    device = context.storage.device_of(inode)
    is_device = context.storage.is_data_of_device(inode)
    opened = file if is_data_of(context, file, inode) else None
    if opened:
        path = context.path_at(opened.place)
    else:
        path = None if is_device else context.path_of(inode)
    return WaitTarget(
        kind=kind,
        path=path,
        inode=None if is_device else inode.number,
        device=device,
        fs=context.storage.file_system_of(inode),
        fd=opened.fd if opened else None,
    )


def disk(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the data, journal or AIO context that a task waits for."""
    if case.is_in("read_events", "do_io_getevents"):
        return WaitTarget(kind="aio", address=Address(case.arguments[0]))
    if case.is_in("jbd2_log_wait_commit"):
        return _journal(context, case)
    on = _data(context, case)
    if on is not None or case.file is None:
        return on
    mapping = case.file.mapping
    host = context.layout.member(mapping, "address_space", "host")
    inode = context.storage.inode(host)
    if not (stat.S_ISBLK(inode.mode) or stat.S_ISREG(inode.mode)):
        return None
    return _on_inode(context, "disk", inode, case.file)


def _journal(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the journal whose thread has to commit, by the queue of the task."""
    done = context.layout.offset("journal_s", "j_wait_done_commit")
    for entry in case.stack.wait_entries():
        queue = wait_queues(context).head_of(entry)
        if queue is None:
            continue
        names = ("j_task", "j_dev")
        thread, device = context.layout.members(queue[0] - done, "journal_s", *names)
        if min(thread, device) < KERNEL_HALF:
            continue
        path = context.path_at(case.file.place) if case.file else None
        return WaitTarget(
            kind="journal",
            pid=context.pid(thread),
            device=context.storage.device(device),
            path=path,
            waiters=queue[1],
        )
    return None


def reclaim(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the control group of a task that is throttled by ``memory.high``.

    The limit that was exceeded may also be that of a parent group.

    :return: ``None`` for other kinds of reclaim.
    """
    over = ("mem_cgroup_handle_over_high", "__mem_cgroup_handle_over_high")
    if not case.is_in(*over):
        return None
    rows = np.array([case.row], np.intp)
    part = TaskTable(context.tasks.records[rows], context.tasks.columns)
    path = read_cgroups(context.reader, part, context.losses).path(0)
    return WaitTarget(kind="cgroup", path=path) if path else None
