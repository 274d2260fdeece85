# SPDX-License-Identifier: LGPL-2.1-or-later

"""External waits: for devices, servers and frozen file systems.

Also the disks that tasks wait for by io_uring or AIO, and servers of network block
devices.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.reader import Addresses, distinct
from msatools.kernel.report import Loss
from msatools.kernel.structs import Booleans
from msatools.locks import file_targets
from msatools.locks.context import BlockedTask, LockContext, per_context
from msatools.locks.disks import Disk, all_disks
from msatools.locks.io import disk_of_lock, disk_of_super_block, disk_of_wait, in_flight
from msatools.locks.places import FREEZE_COMPLETE, lock_places
from msatools.locks.report import (
    ExternalKind,
    Holder,
    InFlight,
    Lock,
    LockTypeName,
    Request,
)
from msatools.locks.servers import FuseMount, asked_protocol, file_server, fuse_mounts
from msatools.locks.storage import Sockets
from msatools.locks.wait_queues import wait_queue_waiters
from msatools.locks.workers import kernel_threads
from msatools.program.linear import KERNEL_HALF
from msatools.tasks.waits import TaskClass

# --- Finds the server of a network block device, if it is a process of this machine.
#
# drivers/block/nbd.c: the device sends its requests through sockets that a program
# passed to it. The process that has the other end open serves the device. A socket of
# AF_UNIX points at its peer. One of TCP has the addresses and ports of both ends, and
# its peer has the same ones, swapped. Of a server on another machine, only the address
# is known.


_AF_UNIX = 1
_MAPPED = "::ffff:"
"""Prefix of an IPv4 address in IPv6 form, as in sockets of servers for both."""
_MAX_CONNECTIONS = 64
_MAX_SERVERS = 16


class NbdServers:
    """The servers of network block devices, each found once per context."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._found: dict[int, tuple[Holder, ...]] = {}

    def of_disk(self, disk: Disk) -> tuple[Holder, ...]:
        """Return the tasks that have the other end of a device's sockets open."""
        if not disk.name.startswith("nbd"):
            return ()
        if disk.address not in self._found:
            try:
                sockets = self._sockets(disk)
                files = [*self._unix_peers(sockets), *self._tcp_peers(sockets)]
                openers = self._openers if files else {}
                tasks = dict.fromkeys(
                    task for file in files for task in openers.get(file, ())
                )
                self._found[disk.address] = tuple(
                    Holder(task, "likely") for task in [*tasks][:_MAX_SERVERS]
                )
            except LOST as error:
                text = f"cannot read the server of {disk.name}: {error}"
                self._context.losses.lose(Loss.SERVERS, text)
                self._found[disk.address] = ()
        return self._found[disk.address]

    def addresses(self, disk: Disk) -> tuple[str, ...]:
        """Return TCP addresses and ports of a device's servers: ``10.0.0.1:10809``."""
        if not disk.name.startswith("nbd"):
            return ()
        try:
            ends = self._ends(self._sockets(disk))
        except LOST as error:
            text = f"cannot read the server of {disk.name}: {error}"
            self._context.losses.lose(Loss.SERVERS, text)
            return ()
        return tuple(dict.fromkeys(peer for _, peer in ends))

    def _sockets(self, disk: Disk) -> list[int]:
        """Return the address of each ``struct socket`` of a device."""
        layout = self._context.layout
        config = layout.member(disk.private, "nbd_device", "config")
        if config < KERNEL_HALF:
            return []
        sockets, count = layout.members(
            config, "nbd_config", "socks", "num_connections"
        )
        connections = (
            layout.word(sockets + 8 * number)
            for number in range(min(count, _MAX_CONNECTIONS))
        )
        return [layout.member(each, "nbd_sock", "sock") for each in connections]

    def _unix_peers(self, sockets: list[int]) -> list[int]:
        """Return the ``struct file`` of the other end of each socket of AF_UNIX."""
        layout, files = self._context.layout, []
        for socket in sockets:
            own = layout.member(socket, "socket", "sk")
            if layout.member(own, "sock", "__sk_common.skc_family") != _AF_UNIX:
                continue
            peer = layout.member(own, "unix_sock", "peer")
            end = layout.member(peer, "sock", "sk_socket") if peer else 0
            file = layout.member(end, "socket", "file") if end else 0
            if file:
                files.append(file)
        return files

    def _tcp_peers(self, sockets: list[int]) -> list[int]:
        """Return the ``struct file`` of the other end of each TCP connection, if any
        process of this kernel has it open."""
        ends = self._ends(sockets)
        by_ends = self._files_by_ends if ends else {}
        return [by_ends[peer, own] for own, peer in ends if (peer, own) in by_ends]

    def _ends(self, sockets: list[int]) -> list[tuple[str, str]]:
        """Return the local address and the peer's of each TCP connection."""
        found = self._read(np.array(sockets, np.uint64))
        return [ends for ends in found if ends is not None]

    def _read(self, sockets: Addresses) -> list[tuple[str, str] | None]:
        """Return the local address and the peer's of each ``struct socket``; ``None``
        for one without a TCP connection."""
        context = self._context
        return [
            (_plain(each.local), _plain(each.peer))
            if each and each.type in ("tcp", "tcp6") and each.local and each.peer
            else None
            for each in Sockets(context.layout, context.losses).read(sockets)
        ]

    @cached_property
    def _files_by_ends(self) -> dict[tuple[str, str], int]:
        """Maps the local address and the peer's of each open TCP socket to its ``struct
        file``."""
        files = np.array([*self._openers], np.uint64)
        private = self._context.descriptors.read_files(files, ("private",))["private"]
        found = self._read(private.astype(np.uint64))
        return {
            ends: file
            for ends, file in zip(found, files.tolist(), strict=True)
            if ends is not None
        }

    @cached_property
    def _openers(self) -> dict[int, list[int]]:
        """Maps the address of each ``struct file`` of a socket to the tasks that have
        it open, one for each descriptor table."""
        context = self._context
        addresses = context.tasks["address"]
        operations = context.layout.symbol("socket_file_ops") or 0
        found: dict[int, list[int]] = {}
        for rows, opened in context.descriptors.by_table(addresses):
            files = distinct(opened[opened != 0])
            structs = context.descriptors.read_files(files, ("operations",))
            sockets = files[structs["operations"] == np.uint64(operations)]
            for file in sockets.tolist():
                found.setdefault(file, []).append(int(addresses[rows[0]]))
        return found


def _plain(address: str) -> str:
    """Return an address and port; an IPv4 address in IPv6 form is converted to IPv4."""
    inner, bracket, port = address.partition("]")
    if bracket and inner.startswith(f"[{_MAPPED}"):
        return f"{inner.removeprefix(f'[{_MAPPED}')}{port}"
    return address


@per_context
def nbd_servers(context: LockContext) -> NbdServers:
    """Return the reader of the nbd servers of a context."""
    return NbdServers(context)


# --- Finds tasks that wait for I/O of a disk by a ring (io_uring) or an AIO context.
#
# Such a task sleeps like one that has nothing to do, so the search begins at the I/O.
# The bios of a request lead to the struct kiocb of a direct read or write
# (fs/iomap/direct-io.c, block/fops.c). It is at the start of io_uring's request (struct
# io_kiocb) or AIO's (struct aio_kiocb), which points at its ring or context. The tasks
# on the wait queue of that wait for the I/O. I/O of stacked disks, such as those of the
# device mapper, is not followed: the bios below them are clones, without the kiocb.


SLOW_NS = 1_000_000_000
"""Minimum age, in ns, of asynchronous I/O whose waiters count as blocked: many programs
always have some in flight, and a healthy disk completes it sooner."""

AIO = ("read_events", "do_io_getevents")
"""Functions in which a task waits for events of an AIO context."""

CANCEL = "io_uring_cancel_generic"
"""Function in which a task that exits or calls execve() waits for the requests of its
rings."""

_ENDS = (
    ("iomap_dio_bio_end_io", "iomap_dio", ""),
    ("blkdev_bio_end_io", "blkdev_dio", ""),
    # These structures contain their only bio.
    ("blkdev_bio_end_io_async", "blkdev_dio", "bio"),
    ("iomap_dio_simple_end_io", "iomap_dio_simple", "bio"),  # seen in 7.3
    ("dio_bio_end_aio", "dio", ""),
)
"""Function that ends a bio; structure with its kiocb; member of that structure that is
the bio, or empty if ``bi_private`` points at the structure."""

_OF_RING = ("io_complete_rw", "io_complete_rw_iopoll")
_OF_AIO = ("aio_complete_rw",)
_MAX_BIOS = 1 << 8
"""Maximum number of bios of a request to read."""

OF_BIOS = ("deferred", "delayed")
"""Stages of bios that a stacked disk holds back."""

_DEFER_TASKRUN = 1 << 13
"""``IORING_SETUP_DEFER_TASKRUN``: only the submitting task waits, on no wait queue."""


class AsynchronousIo:
    """The disks with slow direct I/O of io_uring and AIO, by the task that waits."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._layout = context.layout
        self._symbols = {
            name: context.layout.symbol(name)
            for name in (*(end for end, _, _ in _ENDS), *_OF_RING, *_OF_AIO)
        }
        self._of_tasks: dict[int, set[Disk]] = {}
        """Maps the address of a task that waits to its disks."""

        self._of_processes: dict[int, set[Disk]] = {}
        """Maps the ``struct signal_struct`` of a process with rings to its disks."""

        for disk in all_disks(context).all:
            for request in in_flight(context).of_disk(disk).requests:
                is_slow = (request.age_ns or 0) >= SLOW_NS
                if is_slow and request.stage not in OF_BIOS:
                    self._follow(request, disk)

    def disk(self, case: BlockedTask) -> Disk | None:
        """Return the disk that a task waits for; ``None`` if unknown, or several."""
        found = self._of_tasks.get(case.address, set())
        if case.is_in(CANCEL):
            signal = int(self._context.tasks["signal"][case.row])
            found = self._of_processes.get(signal, set())
        return next(iter(found)) if len(found) == 1 else None

    def waits(self, in_ring: Booleans, cancels: Booleans) -> Booleans:
        """Return which tasks of the context wait for slow I/O.

        :param in_ring: Which tasks are in a wait for a ring or an AIO context.
        :param cancels: Which tasks are in :data:`CANCEL`.
        """
        tasks = self._context.tasks
        processes = np.array([*self._of_processes], np.uint64)
        waiters = np.array([*self._of_tasks], np.uint64)
        found: Booleans = cancels & np.isin(tasks["signal"], processes)
        found |= in_ring & np.isin(tasks["address"], waiters)
        return found

    def _follow(self, request: InFlight, disk: Disk) -> None:
        """Add a disk to the tasks and processes that wait for one of its requests."""
        try:
            bio = self._first_bio(request)
            blocks = [*self._blocks(bio)]
            if self._first_bio(request) != bio:
                return
        except LOST:
            # The request was completed while it was read, and its memory is reused.
            return
        for block in blocks:
            # The kiocb may be gone by now, or its types may be unknown.
            with suppress(*LOST):
                self._add_block(block, disk)

    def _first_bio(self, request: InFlight) -> int:
        return self._layout.member(request.address, "request", "bio")

    def _blocks(self, bio: int) -> Iterator[int]:
        """Yield each ``struct kiocb`` of a bio and of the bios after it, by address."""
        layout = self._layout
        for _ in range(_MAX_BIOS):
            if bio < KERNEL_HALF:
                return
            following, end, private = layout.members(
                bio, "bio", "bi_next", "bi_end_io", "bi_private"
            )
            for name, kind, place in _ENDS:
                if end and end == self._symbols[name] and layout.has(kind, "iocb"):
                    start = bio - layout.offset(kind, place) if place else private
                    yield layout.member(start, kind, "iocb")
            bio = following

    def _add_block(self, block: int, disk: Disk) -> None:
        layout = self._layout
        if block < KERNEL_HALF:
            return
        complete = layout.member(block, "kiocb", "ki_complete")
        if complete and complete in map(self._symbols.get, _OF_AIO):
            aio = layout.member(block, "aio_kiocb", "ki_ctx")
            self._add_waiters(aio + layout.offset("kioctx", "wait"), disk)
        elif complete and complete in map(self._symbols.get, _OF_RING):
            self._add_ring(block, disk)

    def _add_ring(self, request: int, disk: Disk) -> None:
        layout, name = self._layout, "io_ring_ctx"
        ring = layout.member(request, "io_kiocb", "ctx")
        # Where a ring has both queues (v5.10), tasks in poll() are on the second one.
        queue_of_ring = layout.offset(name, "wait", "cq_wait")
        self._add_waiters(ring + queue_of_ring, disk)
        # Since "io_uring: add IORING_SETUP_DEFER_TASKRUN" (in v6.1)
        if layout.has(name, "submitter_task"):
            flags, task = layout.members(ring, name, "flags", "submitter_task")
            if flags & _DEFER_TASKRUN and task:
                self._add(self._of_tasks, task, disk)
        signal = layout.member(self._task_of(request), "task_struct", "signal")
        self._add(self._of_processes, signal, disk)

    def _task_of(self, request: int) -> int:
        """Return the task that submitted a request to its ring."""
        layout = self._layout
        if not layout.has("io_kiocb", "tctx"):
            return layout.member(request, "io_kiocb", "task")
        # "io_uring: move struct io_kiocb from task_struct to io_uring_task" (in v6.13)
        own = layout.member(request, "io_kiocb", "tctx")
        return layout.member(own, "io_uring_task", "task")

    def _add_waiters(self, head: int, disk: Disk) -> None:
        for each in wait_queue_waiters(self._context, Lock("wait_queue", head)) or ():
            self._add(self._of_tasks, each.task, disk)

    @staticmethod
    def _add(owners: dict[int, set[Disk]], owner: int, disk: Disk) -> None:
        if owner >= KERNEL_HALF:
            owners.setdefault(owner, set()).add(disk)


@per_context
def asynchronous_io(context: LockContext) -> AsynchronousIo:
    """Return the disks with slow asynchronous I/O, by the tasks that wait for it."""
    return AsynchronousIo(context)


# --- Waits for something outside of all tasks: devices, servers, hardware.


_OF_NOBODY: frozenset[LockTypeName] = frozenset(
    {"folio", "bit_wait", "wait_queue", "completion"}
)
"""Lock types whose waits may be ended by something outside of all tasks."""

_DATA = {
    TaskClass.DSK: file_targets.disk,
    TaskClass.FLT: file_targets.fault,
    TaskClass.SWP: file_targets.fault,
}
_NUMBERS = re.compile(r"\d+:\d+")


class External(Struct, frozen=True):
    """Something that a task waits for, outside of all tasks."""

    kind: ExternalKind
    identity: Hashable
    """The numbers of a device, or the address of a connection or super block; equal for
    tasks that wait for the same thing."""

    text: str
    """Description in a few words."""

    pid: int | None = None
    """ID of the server, if it is one thread, or several threads of one process."""

    servers: tuple[Holder, ...] = ()
    """The threads that serve it, or probably serve it."""

    path: str | None = None
    device: str | None = None
    """Name and numbers of the block device, as ``vda 254:0``."""

    way: tuple[str, ...] = ()
    """Names of the disks from the one that the task waits for down to the one that
    holds its I/O."""


def external(
    context: LockContext, case: BlockedTask, requests: Sequence[Request]
) -> External | None:
    """
    Return the external thing that a task waits for; ``None`` if there is no such thing.

    :param requests: The locks that the task waits for. If the first is of a type that
        tasks own, such as a mutex, the task waits for its owner instead.
    :raises drgn.FaultError: if a structure that leads to the thing cannot be read
    :raises MissingError: if the types are unknown
    """
    lock = requests[0].lock if requests else None
    if lock is not None and lock.type == "percpu_rwsem":
        return _frozen(context, lock)
    if lock is not None and lock.type not in _OF_NOBODY:
        return None
    super_block = _super_block(context, lock) if lock is not None else 0
    mount = fuse_mounts(context).client(case.names, case.stack)
    if mount is None and super_block:
        mount = fuse_mounts(context).mounts.get(super_block)
    if mount is not None:
        return _served(context, mount)
    disk = disk_of_wait(context, case, lock)
    if disk is None and (case.task_class is TaskClass.URG or case.is_in(*AIO)):
        disk = asynchronous_io(context).disk(case)
    if disk is None and lock is not None:
        disk = disk_of_lock(context, lock)
    if disk is None and super_block:
        disk = disk_of_super_block(context, super_block)
    if disk is not None:
        return _on_disk(context, f"{disk.name} {disk.numbers}", disk.numbers, "I/O")
    return _network(context, case, lock, super_block) or _device(context, case)


def _super_block(context: LockContext, lock: Lock) -> int:
    """Return the super block of a locked folio's file; 0 if there is no such file."""
    if lock.type != "folio" or not lock.address:
        return 0
    inode = context.storage.host_of_folio(lock.address)
    return inode.super_block if inode else 0


def _path(context: LockContext, super_block: int) -> str | None:
    """Return the mount point of a file system; ``None`` if it is not mounted."""
    mount = context.paths.mount_of(super_block)
    if not mount:
        return None
    # The root of the super block may differ from the mount's: for NFS it is a dummy.
    root = context.layout.member(mount, "vfsmount", "mnt_root")
    return context.path_at((mount, root))


def _frozen(context: LockContext, lock: Lock) -> External | None:
    """Return the frozen file system whose writers a lock blocks.

    The kernel does not record who froze it: FIFREEZE leaves no trace of its caller.
    """
    place = lock_places(context).find(lock.type, lock.address or 0)
    if place is None or place.type_name != "super_block":
        return None
    super_block = place.address
    frozen = context.layout.member(super_block, "super_block", "s_writers.frozen")
    if frozen != FREEZE_COMPLETE:
        # A task is about to freeze it, or to thaw it.
        return None
    path = _path(context, super_block)
    return External(
        kind="frozen",
        identity=("super_block", super_block),
        text=f"frozen file system {path}" if path else "a frozen file system",
        path=path,
    )


def _served(context: LockContext, mount: FuseMount) -> External:
    """Return the server of a FUSE file system."""
    path = _path(context, mount.super_block)
    servers = tuple(fuse_mounts(context).servers(mount, context.alone))
    task = _one(context, servers)
    return External(
        kind="fuse",
        identity=("fuse", mount.connection),
        text=_server_text(context, mount, servers, task, path or "not mounted"),
        pid=context.pid(task) if task else None,
        servers=servers,
        path=path,
    )


def _one(context: LockContext, servers: tuple[Holder, ...]) -> int | None:
    """Return the only server, or the group leader if all servers are of one process;
    otherwise ``None``."""
    if len(servers) == 1:
        return servers[0].task
    name = "group_leader"
    leaders = {
        context.layout.member(each.task, "task_struct", name) for each in servers
    }
    return leaders.pop() if len(leaders) == 1 else None


def _server_text(
    context: LockContext,
    mount: FuseMount,
    servers: tuple[Holder, ...],
    task: int | None,
    where: str,
) -> str:
    if mount.type == "virtiofs":
        return f"virtiofs ({where}): the host serves it"
    if not servers:
        # For a single task, the tasks that have the device open are not read.
        asleep = "" if context.alone else ": nobody reads its requests"
        return f"FUSE {where}{asleep}"
    exact = all(server.confidence == "exact" for server in servers)
    if task is None:
        text = f"FUSE servers ({where})"
    else:
        pid = f"{'' if exact else '~'}{context.pid(task)}"
        comm = context.layout.text(task, "task_struct", "comm")
        text = f"FUSE server {pid} {comm} ({where})"
    return f"{text}, asleep in read of /dev/fuse" if exact else text


def _network(
    context: LockContext, case: BlockedTask, lock: Lock | None, super_block: int
) -> External | None:
    """Return the server of the network file system that a task waits for."""
    if not super_block and case.file is not None and asked_protocol(case):
        super_block = context.storage.inode(case.file.inode).super_block
    path = _path(context, super_block) if super_block else None
    server = file_server(context, case, lock, super_block, path)
    if server is None:
        return None
    return External("network", server.identity, server.text, path=server.path)


def _device(context: LockContext, case: BlockedTask) -> External | None:
    """Return the block device whose I/O a task waits for."""
    find = _DATA.get(case.task_class)
    on = find(context, case) if find else None
    if on is not None and on.kind in ("disk", "page"):
        device = on.device
    else:
        device = _device_of_journal(context, case)
    numbers = _NUMBERS.search(device) if device else None
    if numbers is None:
        return None
    what = "swap" if case.task_class is TaskClass.SWP else "I/O"
    return _on_disk(context, device or "", numbers[0], what)


def _on_disk(context: LockContext, device: str, numbers: str, what: str) -> External:
    """Return the disk that holds the I/O of a device, which may be stacked on it."""
    disk = all_disks(context).by_numbers.get(numbers)
    way: tuple[str, ...] = ()
    servers: tuple[Holder, ...] = ()
    addresses: tuple[str, ...] = ()
    suspended = ""
    if disk is not None:
        disks = in_flight(context).way(disk).disks
        way = tuple(each.name for each in disks)
        if len(disks) > 1:
            numbers = disks[-1].numbers
            device = f"{disks[-1].name} {numbers}"
        suspended = " (suspended)" if all_disks(context).is_suspended(disks[-1]) else ""
        # For a single task, the open files of others are not read.
        nbd = nbd_servers(context)
        servers = () if context.alone else nbd.of_disk(disks[-1])
        # If no process of this kernel is the server, its TCP addresses are shown.
        addresses = () if servers else nbd.addresses(disks[-1])
    task = _one(context, servers)
    text = f"{what} on {device}{suspended}"
    if task is not None:
        comm = context.layout.text(task, "task_struct", "comm")
        text += f", served by ~{context.pid(task)} {comm}"
    elif addresses:
        more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
        text += f", served by {addresses[0]}{more}"
    return External(
        kind="swap" if what == "swap" else "device",
        identity=("device", numbers),
        text=text,
        pid=context.pid(task) if task else None,
        servers=servers,
        device=device,
        way=way,
    )


def _device_of_journal(context: LockContext, case: BlockedTask) -> str | None:
    """Return the device of a journal; only for its thread, in the I/O of a commit."""
    if not (
        case.is_in("jbd2_journal_commit_transaction") and case.is_in("io_schedule")
    ):
        return None
    # The buffers that it waits for are copies, not in the list of any page, so they do
    # not lead to the device.
    journal = kernel_threads(context).data_of(case.address)
    if journal is None:
        return None
    device = context.layout.member(journal, "journal_s", "j_dev")
    return context.storage.device(device) if device >= KERNEL_HALF else None
