# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names locks by the file, process or disk of the structure that contains them."""

import re
import stat
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import UNREADABLE
from msatools.kernel.reader import read_string
from msatools.locks.context import LockContext
from msatools.locks.places import FREEZE_COMPLETE, FREEZE_LEVELS, LockPlace, lock_places
from msatools.locks.storage import Inode
from msatools.program.linear import KERNEL_HALF

_MAX_NAME = 255
_NO_PATH = re.compile(r"pipe:|socket:|anon_inode:|\[")
"""Names of files that have no path."""


class Name(Struct, frozen=True, kw_only=True):
    """The name and related IDs of a lock, as in ``LockRow``; ``None`` if unknown."""

    name: str | None = None
    path: str | None = None
    inode: int | None = None
    device: str | None = None
    """Name and numbers of the block device, as ``vda 254:0``."""

    pid: int | None = None
    """ID of the process whose memory contains the lock, or whose address space it
    protects; for a lock on a stack, of the thread."""

    cache: str | None = None


def describe(context: LockContext, place: LockPlace) -> Name:
    """
    Return the name of a lock by the structure that contains it.

    :raises drgn.FaultError: if a structure that leads to the name cannot be read
    """
    if place.type_name is None:
        return Name(name=place.name)
    return _DESCRIBE[place.type_name](context, place)


def _inode(context: LockContext, place: LockPlace) -> Name:
    return of_inode(context, place.address, place.name)


def _pipe_inode(context: LockContext, place: LockPlace) -> Name:
    """Return the name of a pipe by its inode, without the name of the member."""
    inode = context.storage.inode(place.address)
    return of_path(context, inode, context.path_of(inode))


def of_inode(
    context: LockContext, address: int, what: str, *, cache: str | None = None
) -> Name:
    """Return the name of a member of an inode.

    :param address: Address of the ``struct inode``.
    :param what: Name of the member.
    :param cache: Slab cache of the inode, if it is to be named.
    """
    inode = context.storage.inode(address)
    name = of_path(context, inode, context.path_of(inode))
    return replace(name, name=f"{what} of {name.name}", cache=cache)


def of_file(context: LockContext, file: int) -> Name:
    """Return the name of an open file: the path by which it was opened.

    :raises drgn.FaultError: if it cannot be read
    """
    inode = context.storage.inode(context.layout.member(file, "file", "f_inode"))
    return of_path(context, inode, context.path_of_file(file))


def of_path(context: LockContext, inode: Inode, path: str | None) -> Name:
    """Return the name of a file: its path if known, otherwise its device or inode.

    :param path: Its path as :class:`.Paths` returns it.
    """
    path = _shown(inode, path)
    is_device = context.storage.is_data_of_device(inode)
    device = context.storage.device_of(inode)
    if path:
        text = path
    elif is_device:
        text = short(device) or "a block device"
    else:
        where = _text_of_file_system(context, inode.super_block)
        text = f"inode {inode.number} on {where}"
    return Name(
        name=text,
        path=path if path and not _NO_PATH.match(path) else None,
        # Inode numbers of the internal bdev file system mean nothing to users.
        inode=None if is_device else inode.number,
        device=device,
    )


def _shown(inode: Inode, path: str | None) -> str | None:
    """Return a path as in /proc, also for pipes, sockets and shared memory."""
    if path and path.startswith("/"):
        return path
    if stat.S_ISFIFO(inode.mode):
        return f"pipe:[{inode.number}]"
    if stat.S_ISSOCK(inode.mode):
        return f"socket:[{inode.number}]"
    # Shared memory, as in simple_dname() (fs/d_path.c).
    if path and stat.S_ISREG(inode.mode) and not _NO_PATH.match(path):
        return f"/{path} (deleted)"
    return path or None


def _text_of_file_system(context: LockContext, super_block: int) -> str:
    """Return the name of a file system's block device, or its type if it has none."""
    device = context.layout.member(super_block, "super_block", "s_bdev")
    name = short(context.storage.device(device)) if device >= KERNEL_HALF else None
    return name or context.storage.file_system_type(super_block)


def short(device: str | None) -> str | None:
    """Return the name of a device without its numbers."""
    return device.partition(" ")[0] if device else None


def _super_block(context: LockContext, place: LockPlace) -> Name:
    """Return the name of a member of a super block, with the path of its root."""
    mount = context.paths.mount_of(place.address)
    names = ("s_root", "s_bdev")
    root, device = context.layout.members(place.address, "super_block", *names)
    path = context.path_at((mount, root)) if mount else None
    text = path or _text_of_file_system(context, place.address)
    name = f"{place.name} of {text}"
    if place.level is not None:
        frozen = context.layout.member(place.address, "super_block", "s_writers.frozen")
        if frozen:
            how = "frozen" if frozen == FREEZE_COMPLETE else "freezing"
            name = f"{how} {text}"
        name += f" ({FREEZE_LEVELS[place.level]})"
    return Name(
        name=name,
        path=path,
        device=context.storage.device(device) if device >= KERNEL_HALF else None,
    )


def _mm(context: LockContext, place: LockPlace) -> Name:
    return _of_mm(context, place.address, f"mm_struct({{}}).{place.name}")


def _vma(context: LockContext, place: LockPlace) -> Name:
    mm = context.layout.member(place.address, "vm_area_struct", "vm_mm")
    return _of_mm(context, mm, f"vm_area_struct({{}}).{place.name}")


def _anon_vma(context: LockContext, place: LockPlace) -> Name:
    mm = lock_places(context).mm_of_anon_vma(place.address) or 0
    return _of_mm(context, mm, f"anon_vma({{}}).{place.name}")


def _of_mm(context: LockContext, mm: int, form: str) -> Name:
    """Return the name of a member of an address space.

    :param form: Format of the name, with a field for the process: ``({})``.
    """
    process = process_of(context, mm)
    if process is None:
        return Name(name=form.replace("({})", ""))
    pid, comm = process
    return Name(name=form.format(f"{pid} {comm}"), pid=pid)


def process_of(context: LockContext, mm: int) -> tuple[int, str] | None:
    """
    Return the ID and the command name of the process that has an address space.

    :return: ``None`` if no task is known to have it.
    :raises drgn.FaultError: if the task cannot be read
    """
    owner = lock_places(context).owner_of_mm(mm)
    if owner is not None:
        return _process(context, owner)
    if not mm:
        return None
    # The first task is the oldest; later ones share its address space (CLONE_VM).
    users = context.tasks["address"][context.tasks["mm"] == np.uint64(mm)].tolist()
    return _process(context, users[0]) if users else None


def _process(context: LockContext, task: int) -> tuple[int, str]:
    leader = context.layout.member(task, "task_struct", "group_leader")
    pid = context.layout.member(leader, "task_struct", "pid")
    return pid, context.layout.text(leader, "task_struct", "comm")


def _signal(context: LockContext, place: LockPlace) -> Name:
    task = lock_places(context).task_of_signal(place.address)
    if task is None:
        return Name(name=f"signal_struct.{place.name}")
    pid, comm = _process(context, task)
    return Name(name=f"signal_struct({pid} {comm}).{place.name}", pid=pid)


def _file(context: LockContext, place: LockPlace) -> Name:
    name = of_file(context, place.address)
    return replace(name, name=f"{place.name} of {name.name}")


def _private(context: LockContext, place: LockPlace) -> Name:
    """Return the name of a member of a structure with a pointer to its open file."""
    file = context.layout.member(place.address, str(place.type_name), "file")
    if file < KERNEL_HALF:
        return Name(name=f"{place.type_name}.{place.name}")
    name = of_file(context, file)
    return replace(name, name=f"{place.type_name}.{place.name} of {name.name}")


def _eventpoll(context: LockContext, place: LockPlace) -> Name:
    return Name(name=f"eventpoll.{place.name}")


def _disk(context: LockContext, place: LockPlace) -> Name:
    return _of_disk(context, place.address, place.name)


def _queue(context: LockContext, place: LockPlace) -> Name:
    disk = context.layout.member(place.address, "request_queue", "disk")
    return _of_disk(context, disk, place.name)


def _of_disk(context: LockContext, disk: int, what: str) -> Name:
    part = context.layout.member(disk, "gendisk", "part0")
    name = context.layout.text(disk, "gendisk", "disk_name")
    return Name(name=f"{what} of {name}", device=context.storage.device(part))


def _block_device(context: LockContext, place: LockPlace) -> Name:
    device = context.storage.device(place.address)
    return Name(name=f"{place.name} of {short(device)}", device=device)


def _journal(context: LockContext, place: LockPlace) -> Name:
    device = context.layout.member(place.address, "journal_s", "j_dev")
    text = context.storage.device(device)
    return Name(name=f"{place.name} of {short(text)}", device=text)


def _device(context: LockContext, place: LockPlace) -> Name:
    pointer = context.layout.member(place.address, "device", "kobj.name")
    name = ""
    if pointer >= KERNEL_HALF:
        name = read_string(context.reader, pointer, _MAX_NAME)
    return Name(name=f"device({name}).{place.name}" if name else place.name)


def _terminal(context: LockContext, place: LockPlace) -> Name:
    name = context.layout.text(place.address, "tty_struct", "name")
    return Name(name=f"{place.name} of {name}")


def _backing_device(context: LockContext, place: LockPlace) -> Name:
    name = context.layout.text(place.address, "backing_dev_info", "dev_name")
    return Name(name=f"{place.name} of {name}")


def _sock(context: LockContext, place: LockPlace) -> Name:
    socket = context.layout.member(place.address, "sock", "sk_socket")
    what = "lock" if place.name.startswith("sk_lock") else place.name
    return _of_socket(context, socket, f"{what} of ")


def _socket(context: LockContext, place: LockPlace) -> Name:
    return _of_socket(context, place.address, "")


def _of_socket(context: LockContext, socket: int, what: str) -> Name:
    address = socket - context.layout.offset("socket_alloc", "socket")
    address += context.layout.offset("socket_alloc", "vfs_inode")
    if not context.storage.is_inode(address):
        # A socket within another structure, such as that of a tun device, has no inode.
        return Name(name=f"{what}socket")
    inode = context.storage.inode(address)
    return Name(name=f"{what}socket:[{inode.number}]", inode=inode.number)


def _kernfs_root(context: LockContext, place: LockPlace) -> Name:
    """Return the name of a member of a kernfs tree, by its first mount."""
    node = context.layout.member(place.address, "kernfs_root", "supers")
    info = node - context.layout.offset("kernfs_super_info", "node")
    try:
        root, super_block = context.layout.members(
            info, "kernfs_super_info", "root", "sb"
        )
    except UNREADABLE:
        root = super_block = 0
    if root != place.address or not context.storage.is_super_block(super_block):
        return Name(name=place.name)
    return _super_block(context, replace(place, address=super_block))


def _node(context: LockContext, place: LockPlace) -> Name:
    number = context.layout.member(place.address, "pglist_data", "node_id")
    return Name(name=f"{place.name} of node {number}")


_DESCRIBE: dict[str, Callable[[LockContext, LockPlace], Name]] = {
    "inode": _inode,
    "pipe_inode_info": _pipe_inode,
    "super_block": _super_block,
    "mm_struct": _mm,
    "vm_area_struct": _vma,
    "anon_vma": _anon_vma,
    "signal_struct": _signal,
    "file": _file,
    "seq_file": _private,
    "kernfs_open_file": _private,
    "eventpoll": _eventpoll,
    "gendisk": _disk,
    "request_queue": _queue,
    "block_device": _block_device,
    "journal_s": _journal,
    "device": _device,
    "tty_struct": _terminal,
    "backing_dev_info": _backing_device,
    "sock": _sock,
    "unix_sock": _sock,
    "socket": _socket,
    "kernfs_root": _kernfs_root,
    "pglist_data": _node,
}
