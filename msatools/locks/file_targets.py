# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets of tasks that wait on files or for data; files that many tasks watch."""

import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.files import DescriptorTables
from msatools.kernel.structs import Members, read_structs
from msatools.locks.context import (
    MAX_CANDIDATES,
    BlockedTask,
    LockContext,
    OpenFile,
    add_sockets,
    ends_at,
    is_data_of,
    open_file,
    open_files,
    read_cases,
    signals_of,
    timer_ends,
)
from msatools.locks.places import lock_places
from msatools.locks.report import WaitTarget
from msatools.locks.storage import Inode
from msatools.locks.struct_reader import Fault
from msatools.locks.wait_queues import bit_of, folio_of, inode_of, wait_queues
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.tasks.identity import read_cgroups
from msatools.tasks.sampler import TaskState
from msatools.tasks.table import TaskTable
from msatools.tasks.unwind import Rows
from msatools.tasks.waits import TaskClass

# --- Wait targets of tasks that wait on files: pipes, sockets, terminals, polls.


FEW = 16
"""Maximum number of polled files to list."""

_ANONYMOUS = re.compile(r"(?:anon_inode:)?\[?(\w[\w-]*)\]?")


def by_file(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the file of a task's system call as a wait target."""
    file = case.file
    if file is None:
        if case.is_in("wait_for_partner", "fifo_open"):
            return _partner(context, case)
        return None
    return of_file(context, file, case.task_class)


def of_file(context: LockContext, file: OpenFile, task_class: TaskClass) -> WaitTarget:
    """Return an open file as a wait target.

    :param task_class: Class of the tasks that wait for the file.
    :raises drgn.FaultError: if the file cannot be read
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
    """Return an anonymous inode as a wait target.

    :param name: Its name, which identifies its kind: ``anon_inode:[eventfd]``.
    """
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
    """Return the named pipe that a task opens while nobody has its other end open."""
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
    """Return the epoll that a task waits for, or the number of files that it polls."""
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
    """Return descriptors of some files; ``None`` if a file has none, or several."""
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


# --- Wait targets of tasks that wait for data of a file or device, or for memory.


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
    """Return the folio that a task waits for; ``None`` if there is no such folio."""
    folios = (folio_of(context, case, entry) for entry in case.stack.wait_entries())
    return next(filter(None, folios), None)


def _data(
    context: LockContext, case: BlockedTask, kind: str = "disk"
) -> WaitTarget | None:
    """Return the wait target of a task that waits for a page or buffer."""
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
    """Return the journal whose thread has to commit, by the task's wait queue."""
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


# --- Files for which many tasks wait, each by an epoll, a poll() or a select() of its
# own.
#
# An event of the file wakes all of them, as no such wait is exclusive:
# ep_poll_callback() of each epoll, unless it asks for EPOLLEXCLUSIVE, and pollwake()
# (fs/eventpoll.c, fs/select.c). Of several tasks that wait for the same epoll, only one
# is woken, so these are not counted here.


_LOW = 256
"""Number of descriptors to read of each table: a server opens its listening sockets
first."""

_MOST_POLLS = 4096
"""Maximum number of tasks in poll() or select() whose stacks are searched for files."""

_MOST_FILES = 4096
_MOST_WATCHERS = 4096
"""Maximum number of files to read, and of epolls that watch one file."""

_EXCLUSIVE = 1 << 28
"""EPOLLEXCLUSIVE: an event wakes one of the epolls that ask for it."""

_LISTENS = 10
"""TCP_LISTEN, also of sockets of other families (include/net/tcp_states.h)."""

_WATCHERS: Members = {
    # A pointer to the list's head since Linux kernel commit 319c15174757 ("epoll: take
    # epitem list out of struct file") (in v5.11), before to its first node
    "list": ("f_ep", "f_ep_links.next"),
}


class _Watched(Struct, frozen=True):
    """A file (by address), and the tasks that wait for it (by row)."""

    file: int
    rows: frozenset[int]
    listens: bool
    """Whether it is a socket on which connections are accepted."""


def as_watched(
    context: LockContext,
    now: TaskState,
    ons: Sequence[WaitTarget | None],
    least: int,
    stack_size: int,
) -> list[WaitTarget | None]:
    """
    Return the wait targets, with a file in place of the epolls and polls that watch it.

    Only a file that many tasks wait for replaces their targets.

    A file that is no listening socket counts only for tasks that wait for nothing else:
    the others may be woken by other files.

    :param ons: The wait target of each task of the context.
    :param least: Minimum number of tasks that wait for a file.
    :param stack_size: Bytes of a kernel stack.
    """
    targets = list(ons)
    kinds = np.array([on.kind if on else "" for on in ons])
    by_epoll, by_poll = (np.flatnonzero(kinds == kind) for kind in ("epoll", "poll"))
    if len(by_epoll) + len(by_poll) < least:
        return targets
    search = _Search(context, now, ons, stack_size)
    search.add_polls(by_poll[:_MOST_POLLS])
    search.add_epolls(by_epoll)
    for watched in search.found(least):
        target = search.target(watched)
        for row in watched.rows if target else ():
            targets[row] = target
    return targets


class _Search:
    """Finds the files that tasks wait for."""

    def __init__(
        self,
        context: LockContext,
        now: TaskState,
        ons: Sequence[WaitTarget | None],
        stack_size: int,
    ) -> None:
        self._context = context
        self._now = now
        self._ons = ons
        self._stack_size = stack_size
        self._rows: dict[int, set[int]] = defaultdict(set)
        """Maps the address of a ``struct file`` to rows of tasks that wait for it."""

        self._fds: dict[int, int] = {}
        """Maps the address of a ``struct file`` to a descriptor that some task has."""

        self._alone: set[int] = set()
        """Rows of tasks that wait for one file only."""

    def add_polls(self, rows: Rows) -> None:
        """Add tasks that wait in poll() or select()."""
        for case in read_cases(self._context, self._now, rows, self._stack_size):
            on = self._ons[case.row]
            try:
                files = {*(case.stack.polled() or ())} - {0}
            except LOST:
                continue
            for file in files:
                self._rows[file].add(case.row)
            if len(files) == 1:
                self._alone.add(case.row)
                if on and on.fds:
                    self._fds[next(iter(files))] = on.fds[0]

    def add_epolls(self, rows: Rows) -> None:
        """Add tasks that wait for an epoll for which no other task waits."""
        descriptors = self._context.descriptors
        fds = [on.fd if on and on.fd is not None else -1 for on in self._on(rows)]
        tables = descriptors.tables(self._context.tasks["address"][rows])
        files = descriptors.lookup(tables, np.array(fds, np.int64))
        epolls = descriptors.read_files(files, ("private",))
        private = np.where(epolls.readable, epolls["private"], 0).tolist()
        shared = Counter(private)
        single = {
            epoll: row
            for epoll, row in zip(private, rows.tolist(), strict=True)
            if epoll >= KERNEL_HALF and shared[epoll] == 1
        }
        if not single:
            return
        self._alone |= {row for ep, row in single.items() if self._watches_one(ep)}
        for file, watchers in self._watched_files(tables):
            self._rows[file] |= {single[epoll] for epoll in watchers & single.keys()}

    def _on(self, rows: Rows) -> Iterator[WaitTarget | None]:
        return (self._ons[row] for row in rows.tolist())

    def _watches_one(self, epoll: int) -> bool:
        """Return whether an epoll watches one file: its tree has a single node."""
        layout = self._context.layout
        try:
            root = layout.member(epoll, "eventpoll", "rbr.rb_root.rb_node")
            return not any(layout.members(root, "rb_node", "rb_left", "rb_right"))
        except LOST:
            return False

    def _watched_files(
        self, tables: DescriptorTables
    ) -> Iterator[tuple[int, set[int]]]:
        """Yield each file that several epolls watch, and these epolls, by address."""
        files = self._low_files(tables)
        addresses = np.array([*files], np.uint64)
        context = self._context
        found = read_structs(
            context.reader, "struct file", _WATCHERS, addresses, context.losses
        )
        for file, watchers in zip(files, found["list"].tolist(), strict=True):
            if watchers < KERNEL_HALF:
                continue
            epolls: set[int] = set()
            with suppress(*LOST):
                epolls.update(self._epolls(file, watchers))
            if len(epolls) > 1:
                self._fds.setdefault(file, files[file])
                yield file, epolls

    def _low_files(self, tables: DescriptorTables) -> dict[int, int]:
        """Map the address of each file with a low descriptor to that descriptor."""
        numbers: dict[int, int] = {}
        arrays = dict(zip(tables.files.tolist(), tables.size.tolist(), strict=True))
        for array, size in arrays.items():
            if not array or len(numbers) > _MOST_FILES:
                continue
            with suppress(*LOST):
                slots = self._context.reader.words(array, min(size, _LOW))
                for fd in np.flatnonzero(slots).tolist():
                    numbers.setdefault(int(slots[fd]), fd)
        return numbers

    def _epolls(self, file: int, watchers: int) -> Iterator[int]:
        """Yield the epolls that watch a file without EPOLLEXCLUSIVE.

        :param watchers: Value of the member in :data:`_WATCHERS`.
        """
        layout = self._context.layout
        end, link = 0, watchers
        if layout.has("file", "f_ep"):
            link = layout.member(watchers, "hlist_head", "first")
        else:
            end = file + layout.offset("file", "f_ep_links")
        for _ in range(_MOST_WATCHERS):
            if link in (0, end):
                return
            item = link - layout.offset("epitem", "fllink")
            link, epoll, events = layout.members(
                item, "epitem", "fllink.next", "ep", "event.events"
            )
            if not events & _EXCLUSIVE:
                yield epoll

    def found(self, least: int) -> list[_Watched]:
        """Return the files that enough tasks wait for, in rising order of preference:
        listening sockets last, and among equals those that most tasks wait for."""
        found = []
        for file, rows in self._rows.items():
            if len(rows) < least:
                continue
            listens = self._listens(file)
            wanted = frozenset(rows if listens else rows & self._alone)
            if len(wanted) >= least:
                found.append(_Watched(file, wanted, listens))
        return sorted(found, key=lambda each: (each.listens, len(each.rows)))

    def _listens(self, file: int) -> bool:
        """Return whether a file is a socket on which connections are accepted."""
        layout = self._context.layout
        try:
            operations, private = layout.members(file, "file", "f_op", "private_data")
            if operations != layout.symbol("socket_file_ops"):
                return False
            sock = layout.member(private, "socket", "sk")
            state = layout.member(sock, "sock", "__sk_common.skc_state")
        except LOST:
            return False
        return state == _LISTENS

    def target(self, watched: _Watched) -> WaitTarget | None:
        """Return a file as a wait target; ``None`` if it cannot be read."""
        context = self._context
        found = context.descriptors.read_files(np.array([watched.file], np.uint64))
        if not found.readable[0]:
            return None
        file = open_file(found, 0, watched.file, self._fds.get(watched.file))
        try:
            add_sockets(context, [file])
            return of_file(context, file, TaskClass.POL)
        except LOST:
            return None
