# SPDX-License-Identifier: LGPL-2.1-or-later

"""External waits: for devices, servers and frozen file systems."""

import re
from collections.abc import Hashable, Sequence

from msgspec import Struct

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, LockTypeName, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import ExternalKind
from msatools.locks.events.kthreads import kernel_threads
from msatools.locks.external_waits.fuse import FuseMount, fuse_mounts
from msatools.locks.external_waits.network import asked_protocol, file_server
from msatools.locks.io.asynchronous import AIO, asynchronous_io
from msatools.locks.io.disks import all_disks
from msatools.locks.io.filesystems import (
    disk_of_lock,
    disk_of_super_block,
)
from msatools.locks.io.inflight import in_flight
from msatools.locks.io.nbd import nbd_servers
from msatools.locks.io.waits import disk_of_wait
from msatools.locks.places.places import FREEZE_COMPLETE, lock_places
from msatools.locks.wait_targets import data
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass

_OF_NOBODY: frozenset[LockTypeName] = frozenset(
    {"folio", "bit_wait", "wait_queue", "completion"}
)
"""Lock types whose waits may be ended by something outside of all tasks."""

_DATA = {
    TaskClass.DSK: data.disk,
    TaskClass.FLT: data.fault,
    TaskClass.SWP: data.fault,
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

    :param requests: The locks that the task waits for. If tasks own locks of that type,
        it waits for these tasks.
    :raises drgn.FaultError: if a structure that leads to it cannot be read
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
    """Return the super block of a page's file; 0 if there is no such file."""
    if lock.type != "folio" or not lock.address:
        return 0
    inode = context.storage.host_of_folio(lock.address)
    return inode.super_block if inode else 0


def _path(context: LockContext, super_block: int) -> str | None:
    """Return the mount point of a file system; ``None`` if it is not mounted."""
    mount = context.paths.mount_of(super_block)
    if not mount:
        return None
    # The root of the super block may be another: of NFS it is a dummy.
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
    """Return the only server, or the group leader if all servers are of one process."""
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
    """Return the server of a network file system."""
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
        # A server by TCP that no process here is has an address.
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
    """Return the device of a journal whose thread waits for I/O of a commit."""
    if not (
        case.is_in("jbd2_journal_commit_transaction") and case.is_in("io_schedule")
    ):
        return None
    # Its buffers are copies made for the journal, and are not in the list of a page.
    journal = kernel_threads(context).data_of(case.address)
    if journal is None:
        return None
    device = context.layout.member(journal, "journal_s", "j_dev")
    return context.storage.device(device) if device >= KERNEL_HALF else None
