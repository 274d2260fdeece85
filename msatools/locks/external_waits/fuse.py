# SPDX-License-Identifier: LGPL-2.1-or-later

"""Clients that wait for a FUSE server, and the tasks that serve.

fs/fuse: a client sleeps on a queue within its ``struct fuse_req``, a server on one
within its ``struct fuse_conn``. The types may be a module's, and most dumps lack them.
So a structure is found by the slab object that it is in, and by a pointer in it to
``s_fs_info`` of a file system, which the super block names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import drgn
import numpy as np

from msatools.kernel.files import Descriptors
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.locks.base.lock import Holder
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.ownstack import OwnStack
from msatools.locks.base.storage import file_system_type
from msatools.locks.base.struct_reader import Layout
from msatools.locks.base.wait_queues import WaitQueues, wait_queues
from msatools.locks.places.slabs import Slabs
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.states import INTERRUPTIBLE
from msatools.tasks.table import TaskTable

_TYPES = ("fuse", "fuseblk", "virtiofs")
_CLIENTS = ("request_wait_answer", "fuse_", "__fuse_", "virtio_fs_")
_SERVER = "fuse_dev_"
_MAX_SUPER_BLOCKS = 1 << 16
_MAX_OBJECT = 8192
"""The largest object of a slab, KMALLOC_MAX_CACHE_SIZE."""

_MAX_LIKELY = 64
"""Threads with the device open that are reported."""

_DEVICE = 10 << 20 | 229
"""What ``inode.i_rdev`` has for /dev/fuse: MISC_MAJOR and FUSE_MINOR."""

_HALF = 0xFFFF_FFFF
_FLAGS = 0b111
"""A pointer that is kept with flags has them there."""


@dataclass(frozen=True)
class FuseMount:
    """A FUSE file system."""

    super_block: int
    info: int
    """``s_fs_info``: its ``struct fuse_mount``, or the connection."""

    connection: int
    """Its ``struct fuse_conn``, which it may share with submounts."""

    parts: frozenset[int]
    """The structures that have the connection's queues, and that what is of it points
    at: itself, and by v7.2 its ``struct fuse_chan``."""

    type: str
    """Of its file system: a virtiofs has no server in this kernel."""


class Fuse:
    """The FUSE file systems, each read once for each context."""

    def __init__(
        self,
        layout: Layout,
        losses: LossLog,
        tasks: TaskTable,
        descriptors: Descriptors,
        queues: WaitQueues,
    ) -> None:
        """
        Set up.

        :param tasks: All of which the open files may be looked at.
        """
        self._layout = layout
        self._losses = losses
        self._tasks = tasks
        self._descriptors = descriptors
        self._queues = queues
        self._slabs = Slabs(layout)
        self._servers: dict[int, list[Holder]] = {}
        self._connected: dict[int, frozenset[int]] = {}

    @cached_property
    def mounts(self) -> dict[int, FuseMount]:
        """All FUSE file systems, by super block."""
        found: dict[int, FuseMount] = {}
        try:
            for super_block in self._super_blocks():
                mount = self._mount(super_block)
                if mount is not None:
                    found[super_block] = mount
        except (drgn.FaultError, LookupError) as error:
            self._losses.lose(
                Loss.FILE_SYSTEMS, f"file systems are lost in part: {error}"
            )
        return found

    def client(self, names: tuple[str, ...], stack: OwnStack) -> FuseMount | None:
        """
        Return the file system whose server a task waits for; ``None`` if for none.

        :param names: The functions on its stack.
        :raises drgn.FaultError: if it cannot be read
        """
        asks = any(name.startswith(_CLIENTS) for name in names)
        if not asks or any(name.startswith(_SERVER) for name in names):
            return None
        for entry in stack.wait_entries():
            found = self._queues.head_of(entry)
            mount = self._mount_of_queue(found[0]) if found is not None else None
            if mount is not None:
                return mount
        return None

    def servers(self, mount: FuseMount, alone: bool) -> list[Holder]:
        """
        Find the tasks that serve a file system.

        Those that read its requests now are exact, those that poll for requests, or
        if there are none have its device open, are likely.

        :param alone: Whether open files are not read.
        """
        connection = mount.connection
        if connection not in self._servers:
            found = self._readers(mount.parts)
            if not found and not alone:
                tasks = self._openers.get(connection, [])
                found = [Holder(task, "likely") for task in tasks]
            self._servers[connection] = found
        return self._servers[connection]

    def _super_blocks(self) -> Iterator[int]:
        head = self._layout.symbol("super_blocks")
        if head is None:
            raise LookupError("there is no super_blocks")
        within = self._layout.offset("super_block", "s_list")
        node = self._layout.word(head)
        for _ in range(_MAX_SUPER_BLOCKS):
            if node == head:
                return
            if node < KERNEL_HALF:
                break
            yield node - within
            node = self._layout.word(node)
        raise drgn.FaultError("their list leads nowhere", node)

    def _mount(self, super_block: int) -> FuseMount | None:
        kind = file_system_type(self._layout, super_block)
        info = self._layout.member(super_block, "super_block", "s_fs_info")
        if kind not in _TYPES or info < KERNEL_HALF:
            return None
        # "fuse: split fuse_mount off of fuse_conn" (in v5.10): its first members are
        # the connection and the super block (v5.10 has a count in between). Before,
        # this is the connection itself.
        connection, *more = self._layout.reader.words(info, 3).tolist()
        split = super_block in more and connection >= KERNEL_HALF
        connection = connection if split else info
        return FuseMount(super_block, info, connection, self._parts(connection), kind)

    def _parts(self, connection: int) -> frozenset[int]:
        """Find the structures that make up a connection.

        What it points at is a part of it if that points back with its second word.
        """
        if connection not in self._connected:
            parts = {connection}
            found = self._object(connection)
            words = found[1].tolist() if found is not None else []
            for word in set(words) - {0, connection}:
                try:
                    part = (
                        self._object(word)
                        if word >= self._layout.kernel_start
                        else None
                    )
                except drgn.FaultError:
                    continue
                if part is not None and part[0] == word and part[1][1] == connection:
                    parts.add(word)
            self._connected[connection] = frozenset(parts)
        return self._connected[connection]

    def _object(self, address: int) -> tuple[int, Addresses] | None:
        """Read the slab object that an address is in: its start, and its words."""
        found = self._slabs.find(address)
        if found is None or found.size > _MAX_OBJECT:
            return None
        return found.start, self._layout.reader.words(found.start, found.size // 8)

    def _mount_of_queue(self, queue: int) -> FuseMount | None:
        """Return the file system that a wait queue belongs to."""
        found = self._object(queue)
        if found is None:
            return None
        start, words = found
        pointers = set(words.tolist())
        of = [
            mount
            for mount in self.mounts.values()
            if ({mount.info, mount.super_block} | mount.parts - {mount.connection})
            & pointers
            or start in mount.parts
        ]
        # Submounts share a connection.
        return of[0] if len({mount.connection for mount in of}) == 1 else None

    def _readers(self, parts: frozenset[int]) -> list[Holder]:
        """Find who waits for requests: on a queue that lies in a connection."""
        readers: dict[int, Holder] = {}
        for part in sorted(parts):
            try:
                found = self._object(part)
            except drgn.FaultError as error:
                self._lose(error)
                continue
            if found is None or found[0] != part:
                continue
            for head in _lists(*found, self._layout.kernel_start):
                try:
                    sleepers = self._woken(head)
                except drgn.FaultError as error:
                    self._lose(error)
                    continue
                for holder in sleepers:
                    readers.setdefault(holder.task, holder)
        return list(readers.values())

    def _lose(self, error: drgn.FaultError) -> None:
        self._losses.lose(
            Loss.SERVERS, f"who serves a FUSE file system is lost in part: {error}"
        )

    def _woken(self, head: int) -> list[Holder]:
        """
        Return who sleeps on a list, if it is that of a queue of servers.

        Clients may wait on a queue of the connection as well (fuse_get_req()), but
        uninterruptibly.
        """
        node = self._layout.word(head)
        start = node - self._layout.offset("wait_queue_entry", "entry")
        names = ("func", "entry.prev")
        wakes, before = self._layout.members(start, "wait_queue_entry", *names)
        if before != head or wakes not in self._wakers:
            return []
        pollwake = (self._layout.symbol("pollwake") or 0) & _HALF
        queue = self._queues.of_head(head)
        waiters = queue.waiters if queue is not None and queue.head == head else None
        found = []
        for waiter in waiters or ():
            task = waiter.task or 0
            polls = waiter.kind == pollwake
            if polls:
                task = self._layout.member(task, "poll_wqueues", "polling_task")
            elif not self._queues.is_on_stack(waiter.node, task):
                continue
            if self._is_interruptible(task):
                found.append(Holder(task, "likely" if polls else "exact"))
        return found

    @cached_property
    def _wakers(self) -> frozenset[int | None]:
        """What wakes a task that reads, or one that polls."""
        names = ("autoremove_wake_function", "default_wake_function", "pollwake")
        return frozenset(self._layout.symbol(name) for name in names)

    def _is_interruptible(self, task: int) -> bool:
        # "sched: Change task_struct::state" (in v5.14)
        names = ("__state", "state")
        state = self._layout.member(task, "task_struct", *names)
        pid = self._layout.member(task, "task_struct", "pid")
        return bool(state & INTERRUPTIBLE) and pid > 0

    @cached_property
    def _openers(self) -> dict[int, list[int]]:
        """The tasks that have the device of a connection open, by connection."""
        addresses = self._tasks["address"]
        tables = self._descriptors.tables(addresses)
        sharers: dict[int, list[int]] = {}
        for row, table in enumerate(tables.files.tolist()):
            if table:
                sharers.setdefault(table, []).append(row)
        found: dict[int, list[int]] = {}
        for rows in sharers.values():
            files = self._descriptors.all_files(tables, rows[0])
            for connection in self._connections(np.unique(files[files != 0])):
                tasks = found.setdefault(connection, [])
                tasks += addresses[rows[: _MAX_LIKELY - len(tasks)]].tolist()
        return found

    def _connections(self, files: Addresses) -> set[int]:
        """Return the connections that some files of /dev/fuse belong to."""
        read = self._descriptors.read_files(files)
        if not len(files) or not read.readable.any():
            return set()
        inodes = read_structs(
            self._layout.reader,
            "struct inode",
            {"device": ("i_rdev",)},
            read["inode"].astype(np.uint64),
            self._losses,
        )
        known = {
            part: mount.connection
            for mount in self.mounts.values()
            for part in mount.parts
        }
        found: set[int] = set()
        # What stands for the file is its struct fuse_dev; nothing before it is mounted.
        for private in read["private"][inodes["device"] == _DEVICE].tolist():
            try:
                device = self._object(private & ~_FLAGS)
            except drgn.FaultError as error:
                self._lose(error)
                continue
            if device is not None:
                words = {word & ~_FLAGS for word in device[1].tolist()}
                found |= {known[part] for part in known.keys() & words}
        return found


def _lists(start: int, words: Addresses, kernel_start: int) -> list[int]:
    """Find what may be the heads of lists that are not empty."""
    places = start + 8 * np.arange(len(words) - 1, dtype=np.uint64)
    following, before = words[:-1], words[1:]
    lists = following != places
    for pointers in (following, before):
        lists &= (pointers >= np.uint64(kernel_start)) & (pointers % np.uint64(8) == 0)
    found: list[int] = places[lists].tolist()
    return found


@per_context
def fuse_mounts(context: LockContext) -> Fuse:
    """Return the reader of the FUSE file systems of a context, and who serves them."""
    queues = wait_queues(context)
    return Fuse(
        context.layout, context.losses, context.tasks, context.descriptors, queues
    )
