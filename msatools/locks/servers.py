# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the servers of FUSE and network file systems that tasks wait for."""

from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import cached_property

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.files import Descriptors
from msatools.kernel.reader import Addresses, distinct, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import read_structs
from msatools.locks.context import BlockedTask, LockContext, per_context
from msatools.locks.places import MAX_OBJECT, Slabs
from msatools.locks.report import Holder, Lock
from msatools.locks.storage import file_system_type, super_blocks
from msatools.locks.struct_reader import Layout, OwnStack
from msatools.locks.wait_queues import WaitQueues, wait_queues
from msatools.program.linear import KERNEL_HALF
from msatools.reports.units import duration
from msatools.tasks.states import INTERRUPTIBLE, loads
from msatools.tasks.table import TaskTable

# --- Finds clients that wait for a FUSE server, and the server tasks.
#
# fs/fuse: a client sleeps on a wait queue in its struct fuse_req, a server on one in
# its struct fuse_conn. These types may be defined in a module, and most dumps lack
# them. So a structure is found as a slab object that has a pointer to the s_fs_info of
# a super block.


_TYPES = ("fuse", "fuseblk", "virtiofs")
_FUSE_CLIENTS = ("request_wait_answer", "fuse_", "__fuse_", "virtio_fs_")
_SERVER = "fuse_dev_"
_MAX_LIKELY = 64
"""Maximum number of threads with the device open to report."""

_DEVICE = 10 << 20 | 229
"""``inode.i_rdev`` of /dev/fuse: MISC_MAJOR and FUSE_MINOR."""

_LOW_32 = 0xFFFF_FFFF
_FLAGS = 0b111
"""Low bits of a pointer that may be flags."""


class FuseMount(Struct, frozen=True):
    """A FUSE file system."""

    super_block: int
    info: int
    """``s_fs_info``: address of a ``struct fuse_mount``, or of the connection."""

    connection: int
    """Address of the ``struct fuse_conn``, which submounts share."""

    parts: frozenset[int]
    """Addresses of the structures with the wait queues of the connection: the
    ``struct fuse_conn`` itself, and, in v7.2, its ``struct fuse_chan``."""

    type: str
    """Type of the file system: a virtiofs has no server in this kernel."""


class Fuse:
    """The FUSE file systems, each read once per context."""

    def __init__(
        self,
        layout: Layout,
        losses: LossLog,
        tasks: TaskTable,
        descriptors: Descriptors,
        queues: WaitQueues,
    ) -> None:
        """
        :param tasks: All tasks whose open files may be read.
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
        """Maps the address of a super block to its FUSE file system."""
        mounts: dict[int, FuseMount] = {}
        try:
            for super_block in super_blocks(self._layout):
                mount = self._mount(super_block)
                if mount is not None:
                    mounts[super_block] = mount
        except LOST as error:
            self._losses.lose(
                Loss.FILE_SYSTEMS, f"cannot read all file systems: {error}"
            )
        return mounts

    def client(self, names: tuple[str, ...], stack: OwnStack) -> FuseMount | None:
        """
        Return the file system whose server a task waits for.

        :param names: Functions on the stack.
        :return: ``None`` if the task does not wait for a server.
        :raises drgn.FaultError: if a structure that leads to it cannot be read
        """
        asks = any(name.startswith(_FUSE_CLIENTS) for name in names)
        if not asks or any(name.startswith(_SERVER) for name in names):
            return None
        for entry in stack.wait_entries():
            queue = self._queues.head_of(entry)
            mount = self._mount_of_queue(queue[0]) if queue is not None else None
            if mount is not None:
                return mount
        return None

    def servers(self, mount: FuseMount, alone: bool) -> list[Holder]:
        """
        Find the server tasks of a file system.

        Tasks that sleep in a read of requests are ``exact``, those that poll for them
        ``likely``. All of these are idle: if their processes have other threads, in
        uninterruptible sleep, only those are returned, as ``likely``. If no task reads
        or polls, the tasks that have the device open are ``likely``.

        :param alone: Whether few tasks are examined, so that open files are not read.
        """
        connection = mount.connection
        if connection not in self._servers:
            found = self._readers(mount.parts)
            found = self._stuck_beside(found) or found
            if not found and not alone:
                tasks = self._openers.get(connection, [])
                found = [Holder(task, "likely") for task in tasks]
            self._servers[connection] = found
        return self._servers[connection]

    def _mount(self, super_block: int) -> FuseMount | None:
        kind = file_system_type(self._layout, super_block)
        info = self._layout.member(super_block, "super_block", "s_fs_info")
        if kind not in _TYPES or info < KERNEL_HALF:
            return None
        # "fuse: split fuse_mount off of fuse_conn" (in v5.10): its first members are
        # the connection and the super block (v5.10 has a count in between). Before,
        # s_fs_info is the connection itself.
        connection, *more = self._layout.reader.words(info, 3).tolist()
        split = super_block in more and connection >= KERNEL_HALF
        connection = connection if split else info
        return FuseMount(super_block, info, connection, self._parts(connection), kind)

    def _parts(self, connection: int) -> frozenset[int]:
        """Find the structures of a connection.

        A slab object is a part if the connection points at it, and its second word
        points back.
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
                except UNREADABLE:
                    continue
                if part is not None and part[0] == word and part[1][1] == connection:
                    parts.add(word)
            self._connected[connection] = frozenset(parts)
        return self._connected[connection]

    def _object(self, address: int) -> tuple[int, Addresses] | None:
        """Read the slab object that contains an address: its start and its words."""
        found = self._slabs.find(address)
        if found is None or found.size > MAX_OBJECT:
            return None
        return found.start, self._layout.reader.words(found.start, found.size // 8)

    def _mount_of_queue(self, queue: int) -> FuseMount | None:
        """Return the file system of the request that contains a wait queue."""
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
        """Find the tasks that wait for requests, on wait queues of a connection."""
        readers: dict[int, Holder] = {}
        for part in sorted(parts):
            try:
                found = self._object(part)
            except UNREADABLE as error:
                self._lose(error)
                continue
            if found is None or found[0] != part:
                continue
            for head in _lists(*found, self._layout.kernel_start):
                try:
                    sleepers = self._woken(head)
                except UNREADABLE as error:
                    self._lose(error)
                    continue
                for holder in sleepers:
                    readers.setdefault(holder.task, holder)
        return list(readers.values())

    def _stuck_beside(self, readers: list[Holder]) -> list[Holder]:
        """Find the threads of the readers' processes in uninterruptible sleep."""
        tasks = self._tasks
        readers_rows = np.isin(tasks["address"], [each.task for each in readers])
        beside = np.isin(tasks["tgid"], tasks["tgid"][readers_rows]) & loads(tasks)
        stuck: list[int] = tasks["address"][beside].tolist()
        return [Holder(task, "likely") for task in stuck[:_MAX_LIKELY]]

    def _lose(self, error: drgn.FaultError) -> None:
        self._losses.lose(
            Loss.SERVERS, f"cannot read all servers of a FUSE file system: {error}"
        )

    def _woken(self, head: int) -> list[Holder]:
        """
        Return the tasks on a list, if it is a wait queue of servers.

        Clients may also wait on a queue of the connection (fuse_get_req()), but their
        sleep is uninterruptible.
        """
        node = self._layout.word(head)
        start = node - self._layout.offset("wait_queue_entry", "entry")
        names = ("func", "entry.prev")
        function, previous = self._layout.members(start, "wait_queue_entry", *names)
        if previous != head or function not in self._wake_functions:
            return []
        pollwake = (self._layout.symbol("pollwake") or 0) & _LOW_32
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
    def _wake_functions(self) -> frozenset[int | None]:
        """Wake functions of tasks that read or poll."""
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
        """Maps a connection to the tasks that have its device open."""
        addresses = self._tasks["address"]
        found: dict[int, list[int]] = {}
        for rows, files in self._descriptors.by_table(addresses):
            for connection in self._connections(distinct(files[files != 0])):
                tasks = found.setdefault(connection, [])
                tasks += addresses[rows[: _MAX_LIKELY - len(tasks)]].tolist()
        return found

    def _connections(self, files: Addresses) -> set[int]:
        """Return the connections of those files that are /dev/fuse."""
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
        # private_data is a struct fuse_dev; 0 before the file system is mounted.
        for private in read["private"][inodes["device"] == _DEVICE].tolist():
            try:
                device = self._object(private & ~_FLAGS)
            except UNREADABLE as error:
                self._lose(error)
                continue
            if device is not None:
                words = {word & ~_FLAGS for word in device[1].tolist()}
                found |= {known[part] for part in known.keys() & words}
        return found


def _lists(start: int, words: Addresses, kernel_start: int) -> list[int]:
    """Return the addresses of words that may be heads of lists that are not empty."""
    addresses = start + 8 * np.arange(len(words) - 1, dtype=np.uint64)
    following, previous = words[:-1], words[1:]
    is_head = following != addresses
    for pointers in (following, previous):
        is_head &= pointers >= np.uint64(kernel_start)
        is_head &= pointers % np.uint64(8) == 0
    heads: list[int] = addresses[is_head].tolist()
    return heads


@per_context
def fuse_mounts(context: LockContext) -> Fuse:
    """Return the reader of the FUSE file systems of a context."""
    queues = wait_queues(context)
    return Fuse(
        context.layout, context.losses, context.tasks, context.descriptors, queues
    )


# --- Servers of network file systems, for which tasks wait.
#
# With NFS (net/sunrpc), all file systems of one server share a transport, which has the
# address of the server. With other protocols only the file system is known.


_PROTOCOLS = {
    "nfs": "NFS",
    "nfs4": "NFS",
    "cifs": "SMB",
    "smb3": "SMB",
    "ceph": "Ceph",
    "9p": "9P",
    "afs": "AFS",
}
"""Maps types of file systems to protocols."""

_NETWORK_CLIENTS = {
    "NFS": ("rpc_", "__rpc_", "nfs_", "nfs3_", "nfs4_"),
    "SMB": ("cifs_", "smb2_", "smb3_", "wait_for_response"),
    "Ceph": ("ceph_",),
    "9P": ("p9_", "v9fs_"),
    "AFS": ("afs_",),
}
"""Maps protocols to prefixes of the functions that wait for a server."""

_CONNECTED = 1 << 1
"""``XPRT_CONNECTED`` of ``rpc_xprt.state`` (include/linux/sunrpc/xprt.h)."""

_FEW = 3
_MAX_NAME = 255
_MAX_TASKS = 1 << 12
"""Maximum number of requests of one client to read."""

_MAX_PARENTS = 8
"""Maximum number of clients in a chain, each cloned from the next."""


class FileServer(Struct, frozen=True):
    """A server of a network file system."""

    identity: Hashable
    """Equal for tasks that wait for the same server."""

    text: str
    path: str | None = None
    """Mount point of its file system, if only one is known."""


class _Client(Struct, frozen=True):
    """A client of RPC (``struct rpc_clnt``), and its transport."""

    client: int
    transport: int


def file_server(
    context: LockContext,
    case: BlockedTask,
    lock: Lock | None,
    super_block: int,
    path: str | None,
) -> FileServer | None:
    """
    Return the server of a network file system that a task waits for.

    :param lock: The lock or bit that it waits for, if known.
    :param super_block: Super block of the data that it waits for; 0 if unknown.
    :param path: Mount point of that file system, if known.
    :return: ``None`` if the task waits for no such server.
    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    kind = context.storage.file_system_type(super_block) if super_block else None
    if kind not in _PROTOCOLS:
        super_block, path = 0, None
    protocol = _PROTOCOLS.get(kind or "") or asked_protocol(case)
    if protocol is None:
        return None
    if protocol == "NFS":
        client = _of_mount(context, super_block) or _of_request(context, lock)
        if client is not None:
            known = _servers(context)
            if client.transport not in known:
                known[client.transport] = _nfs(context, client)
            return known[client.transport]
    text = f"{protocol} server ({path})" if path else f"{protocol} server"
    if super_block:
        return FileServer(("super_block", super_block), text, path)
    # Only types that modules define identify the server: assume one for each task.
    return FileServer(("task", case.address), text)


def asked_protocol(case: BlockedTask) -> str | None:
    """Return the protocol whose client's functions are on a task's stack."""
    for protocol, prefixes in _NETWORK_CLIENTS.items():
        if any(function.startswith(prefixes) for function in case.names):
            return protocol
    return None


def _of_mount(context: LockContext, super_block: int) -> _Client | None:
    """Return the client of an NFS file system."""
    if not super_block:
        return None
    layout = context.layout
    try:
        server = layout.member(super_block, "super_block", "s_fs_info")
        return _client(context, layout.member(server, "nfs_server", "client"))
    except LOST:
        return None


def _of_request(context: LockContext, lock: Lock | None) -> _Client | None:
    """Return the client of a request: a task waits for a bit of its ``tk_runstate``."""
    layout = context.layout
    if lock is None or lock.type != "bit_wait" or not lock.address:
        return None
    try:
        request = lock.address - layout.offset("rpc_task", "tk_runstate")
        return _client(context, layout.member(request, "rpc_task", "tk_client"))
    except LOST:
        return None


def _client(context: LockContext, client: int) -> _Client | None:
    """Return a client of RPC; ``None`` if there is none at an address."""
    layout = context.layout
    if client < KERNEL_HALF:
        return None
    transport, head = layout.members(client, "rpc_clnt", "cl_xprt", "cl_tasks.next")
    if min(transport, head) < KERNEL_HALF:
        return None
    # The list of tasks leads back to the client.
    place = client + layout.offset("rpc_clnt", "cl_tasks")
    if layout.word(head + 8) != place:
        return None
    return _Client(client, transport)


@per_context
def _servers(context: LockContext) -> dict[int, FileServer]:
    """Map each transport of NFS to its server, as many tasks may wait for one."""
    return {}


@per_context
def _mounts(context: LockContext) -> dict[int, list[str]]:
    """Map each transport of NFS to the mount points of its server's file systems."""
    found: dict[int, list[str]] = {}
    try:
        for super_block in super_blocks(context.layout):
            kind = context.storage.file_system_type(super_block)
            if _PROTOCOLS.get(kind) != "NFS":
                continue
            if client := _of_mount(context, super_block):
                points = context.paths.mount_points(super_block)
                found.setdefault(client.transport, []).extend(points)
    except LOST as error:
        context.losses.lose(Loss.FILE_SYSTEMS, f"cannot read all file systems: {error}")
    return found


def _nfs(context: LockContext, client: _Client) -> FileServer:
    layout = context.layout
    words = ["NFS server"]
    paths = sorted(_mounts(context).get(client.transport, []))
    with suppress(*LOST):
        words.append(_address(context, client.transport))
    if paths:
        more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
        words.append(f"({', '.join(paths[:_FEW])}{more})")
    text = " ".join(filter(None, words))
    with suppress(*LOST):
        state = layout.member(client.transport, "rpc_xprt", "state")
        text += ", connected" if state & _CONNECTED else ", not connected"
    if age := _oldest_ns(context, client):
        text += f", oldest request {duration(age)}"
    path = paths[0] if len(paths) == 1 else None
    return FileServer(("rpc_xprt", client.transport), text, path)


def _address(context: LockContext, transport: int) -> str:
    """Return the address of a server as text, or else its name; empty if unknown."""
    layout = context.layout
    # RPC_DISPLAY_ADDR is the first of enum rpc_display_format_t.
    names = ("address_strings[0]", "servername")
    for pointer in layout.members(transport, "rpc_xprt", *names):
        if pointer >= KERNEL_HALF:
            return read_string(context.reader, pointer, _MAX_NAME)
    return ""


def _oldest_ns(context: LockContext, client: _Client) -> int | None:
    """Return the age of a server's oldest request; ``None`` if unknown."""
    if context.monotonic_ns is None:
        return None
    try:
        started = min(_started(context, client), default=None)
    except LOST:
        return None
    return None if started is None else max(0, context.monotonic_ns - started)


def _started(context: LockContext, client: _Client) -> Iterator[int]:
    """Yield the start times of RPC tasks of a client and of those it is cloned from."""
    layout = context.layout
    if not layout.has("rpc_task", "tk_start"):
        return
    link = layout.offset("rpc_task", "tk_task")
    address = client.client
    for _ in range(_MAX_PARENTS):
        head = address + layout.offset("rpc_clnt", "cl_tasks")
        node = layout.word(head)
        for _ in range(_MAX_TASKS):
            if node in (0, head):
                break
            node, start = layout.members(
                node - link, "rpc_task", "tk_task.next", "tk_start"
            )
            if start > 0:
                yield start
        parent = layout.member(address, "rpc_clnt", "cl_parent")
        if parent in (0, address) or parent < KERNEL_HALF:
            return
        address = parent
