# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets of tasks that wait on files: pipes, sockets, terminals, polls."""

import re
import stat

from msgspec.structs import replace

from msatools.errors import UNREADABLE
from msatools.locks.base.blocked_tasks import BlockedTask, OpenFile
from msatools.locks.base.lock_context import MAX_CANDIDATES, LockContext, signals_of
from msatools.locks.base.model import WaitTarget
from msatools.locks.base.open_files import open_files
from msatools.locks.base.storage import Inode
from msatools.locks.base.timers import ends_at, timer_ends
from msatools.locks.base.wait_queues import wait_queues
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass

FEW = 16
"""Maximum number of polled files to list."""

_ANONYMOUS = re.compile(r"(?:anon_inode:)?\[?(\w[\w-]*)\]?")


def by_file(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the file of a system call, by its kind."""
    file = case.file
    if file is None:
        if case.is_in("wait_for_partner", "fifo_open"):
            return _partner(context, case)
        return None
    return of_file(context, file, case.task_class)


def of_file(context: LockContext, file: OpenFile, task_class: TaskClass) -> WaitTarget:
    """Return an open file, by its kind.

    :param task_class: Class of the tasks that wait for it.
    :raises drgn.FaultError: if it cannot be read
    """
    inode = context.storage.inode(file.inode)
    if stat.S_ISFIFO(inode.mode):
        named = context.path_at(file.place)
        path = named if named and named.startswith("/") else None
        return WaitTarget(kind="pipe", inode=inode.number, fd=file.fd, path=path)
    if stat.S_ISSOCK(inode.mode):
        return _socket(context, file, inode)
    path = context.path_at(file.place)
    if path is not None and not path.startswith("/"):
        return _anonymous(context, file, path)
    if task_class is TaskClass.TTY:
        return WaitTarget(kind="tty", path=path, fd=file.fd)
    if stat.S_ISCHR(inode.mode):
        return WaitTarget(kind="device", path=path, fd=file.fd)
    if stat.S_ISBLK(inode.mode):
        host = context.layout.member(file.mapping, "address_space", "host")
        device = context.storage.device_of(context.storage.inode(host))
        return WaitTarget(kind="disk", path=path, fd=file.fd, device=device)
    return WaitTarget(kind="file", path=path, inode=inode.number, fd=file.fd)


def _socket(context: LockContext, file: OpenFile, inode: Inode) -> WaitTarget:
    ends = context.endpoints.get(file.private)
    on = WaitTarget(kind="socket", inode=inode.number, fd=file.fd)
    if ends is None:
        return on
    return replace(on, type=ends.type, local=ends.local, peer=ends.peer)


def _anonymous(context: LockContext, file: OpenFile, name: str) -> WaitTarget:
    """Return an anonymous inode, whose name identifies its kind."""
    matched = _ANONYMOUS.fullmatch(name)
    on = WaitTarget(kind=matched[1] if matched else name, fd=file.fd)
    if on.kind == "signalfd":
        # The mask has the signals that are not accepted.
        blocked = context.layout.member(file.private, "signalfd_ctx", "sigmask")
        return replace(on, kind="signals", signals=signals_of(~blocked))
    if on.kind == "timerfd":
        names = ("t.tmr._softexpires", "t.tmr.base")
        expires, base = context.layout.members(file.private, "timerfd_ctx", *names)
        if expires and base >= KERNEL_HALF:
            return replace(on, **ends_at(context, expires, base))
    return on


def _partner(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """A pipe with a name, on the way to be opened: nobody has the other end."""
    for entry in case.stack.wait_entries():
        queue = wait_queues(context).head_of(entry)
        if queue is None:
            continue
        pipes = [
            queue[0] - context.layout.offset("pipe_inode_info", member)
            for member in ("rd_wait", "wr_wait")
            if context.layout.has("pipe_inode_info", member)
        ]
        for pointer in case.stack.data_pointers()[:MAX_CANDIDATES]:
            try:
                if context.layout.member(pointer, "inode", "i_pipe") not in pipes:
                    continue
                if not context.storage.is_inode(pointer):
                    continue
            except UNREADABLE:
                continue
            inode = context.storage.inode(pointer)
            return WaitTarget(
                kind="pipe", inode=inode.number, path=context.path_of(inode)
            )
    return None


def poll(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the number of files that are polled, and their descriptors if few."""
    ends = timer_ends(context, case)
    if case.is_in("ep_poll", "do_epoll_wait"):
        return WaitTarget(kind="epoll", fd=case.fd, **ends)
    if not case.is_in("do_poll", "do_sys_poll", "do_select", "core_sys_select"):
        return None
    polls = case.call in ("poll", "ppoll")
    files = case.stack.polled()
    if files is None:
        asked = case.arguments[1] & 0xFFFF_FFFF if polls else None
        no_fds = () if asked == 0 else None
        return WaitTarget(kind="poll", count=asked, fds=no_fds, **ends)
    unique = list(dict.fromkeys(files))
    count = case.arguments[1] & 0xFFFF_FFFF if polls else len(unique)
    fds = _fds_of(context, case, unique) if count == len(unique) <= FEW else None
    return WaitTarget(kind="poll", count=count, fds=fds, **ends)


def _fds_of(
    context: LockContext, case: BlockedTask, files: list[int]
) -> tuple[int, ...] | None:
    """Return the descriptors of some files; ``None`` if one has none or several."""
    by_file = open_files(context, case).numbers
    candidates = [by_file.get(file, []) for file in files]
    if any(len(fds) != 1 for fds in candidates):
        return None
    return tuple(fds[0] for fds in candidates)


def io_uring(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the ring whose completions or submissions a task waits for."""
    if case.call == "io_uring_enter":
        return WaitTarget(kind="io_uring", fd=case.fd, **timer_ends(context, case))
    if case.is_in("io_sq_thread"):
        return _polling_thread(context, case)
    return None


def _polling_thread(context: LockContext, case: BlockedTask) -> WaitTarget:
    """Return the ring whose submission queue is polled by a kernel thread."""
    rings = context.layout.symbol("io_uring_fops")
    for fd, ring in open_files(context, case).with_operations(rings):
        try:
            queue = context.layout.member(ring, "io_ring_ctx", "sq_data")
            thread = context.layout.member(queue, "io_sq_data", "thread")
        except UNREADABLE:
            continue
        if thread == case.address:
            return WaitTarget(kind="io_uring", fd=fd)
    return WaitTarget(kind="io_uring")
