# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Files for which many tasks wait, each by an epoll, a poll() or a select() of its own.

An event of the file wakes all of them, as no such wait is exclusive: ep_poll_callback()
of each epoll, unless it asks for EPOLLEXCLUSIVE, and pollwake() (fs/eventpoll.c,
fs/select.c). Of tasks that wait for one epoll, one is woken: they are not counted here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.files import DescriptorTables
from msatools.kernel.structs import Members, read_structs
from msatools.locks.base.blocked_tasks import (
    add_sockets,
    open_file,
    read_cases,
)
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import WaitTarget
from msatools.locks.wait_targets.files import of_file
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import Rows
from msatools.tasks.task_state import TaskState

_LOW = 256
"""Descriptors that are looked at in each table: a server opens what it listens to
first."""

_MOST_POLLS = 4096
"""Maximum number of tasks in poll() or select() whose stacks are read for it."""

_MOST_FILES = 4096
_MOST_WATCHERS = 4096
"""Maximum number of files to look at, and of epolls that watch one file."""

_EXCLUSIVE = 1 << 28
"""EPOLLEXCLUSIVE: an event wakes one of the epolls that ask for it."""

_LISTENS = 10
"""TCP_LISTEN, also of sockets of other families (include/net/tcp_states.h)."""

_WATCHERS: Members = {
    # Since Linux kernel commit 319c15174757 ("epoll: take epitem list out of struct
    # file") (in v5.11) a pointer to the head of a list
    "list": ("f_ep", "f_ep_links.next"),
}


class _Watched(Struct, frozen=True):
    """A file, and the tasks that wait for it."""

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
    Replace the epolls and polls of many tasks by the file that they have in common.

    A file that is no listening socket counts only for tasks that wait for nothing else:
    what woke the others is not known.

    :param ons: The wait target of each task of the context.
    :param least: Minimum number of tasks.
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
        """Maps the address of a ``struct file`` to the tasks that wait for it."""

        self._fds: dict[int, int] = {}
        self._alone: set[int] = set()
        """Tasks that wait for one file only."""

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
        """Yield files that several epolls watch, and these epolls."""
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
        """Map the first files of some tables to a descriptor of each."""
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
        """Yield the epolls that watch a file, without those that ask to be exclusive.

        :param watchers: Address of its list, or of the first of the list.
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
        """Return the files that enough tasks wait for, those of most tasks last."""
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
