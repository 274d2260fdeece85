# SPDX-License-Identifier: LGPL-2.1-or-later

"""What structures that have locks belong to, in words: to files, processes, disks."""

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace

import drgn
import numpy as np

from msatools.kernel.strings import read_string
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.storage import Inode
from msatools.locks.places.places import (
    FREEZE_COMPLETE,
    FREEZE_LEVELS,
    LockPlace,
    lock_places,
)
from msatools.target.addresses import KERNEL_HALF

_MAX_NAME = 255
_NO_PATH = re.compile(r"pipe:|socket:|anon_inode:|\[")
"""How what has a name but no path is shown."""


@dataclass(frozen=True, kw_only=True)
class Name:
    """What is known of a lock, as ``LockRow`` has it; ``None``: none, or unknown."""

    name: str | None = None
    path: str | None = None
    inode: int | None = None
    device: str | None = None
    """Name and numbers of the block device, as ``vda 254:0``."""

    pid: int | None = None
    """The process whose memory it is in, or whose address space it guards; of a lock on
    a stack, the thread."""

    cache: str | None = None


def describe(look: LockContext, place: LockPlace) -> Name:
    """
    Tell the structure that a lock is in: what it belongs to.

    :raises drgn.FaultError: if what tells cannot be read
    """
    if place.type_name is None:
        return Name(name=place.name)
    return _DESCRIBE[place.type_name](look, place)


def _inode(look: LockContext, place: LockPlace) -> Name:
    return of_inode(look, place.address, place.name)


def _pipe_inode(look: LockContext, place: LockPlace) -> Name:
    """A pipe's: its name tells that it is one."""
    inode = look.storage.inode(place.address)
    return of_path(look, inode, look.path_of(inode))


def of_inode(
    look: LockContext, address: int, what: str, *, cache: str | None = None
) -> Name:
    """Name something of an inode."""
    inode = look.storage.inode(address)
    name = of_path(look, inode, look.path_of(inode))
    return replace(name, name=f"{what} of {name.name}", cache=cache)


def of_file(look: LockContext, file: int) -> Name:
    """Name an open file, by the path it was opened by.

    :raises drgn.FaultError: if it cannot be read
    """
    inode = look.storage.inode(look.layout.member(file, "file", "f_inode"))
    return of_path(look, inode, look.path_of_file(file))


def of_path(look: LockContext, inode: Inode, path: str | None) -> Name:
    """Name a file.

    :param path: If it is known.
    """
    path = _shown(inode, path)
    is_device = look.storage.is_data_of_device(inode)
    device = look.storage.device_of(inode)
    if path:
        text = path
    elif is_device:
        text = short(device) or "a block device"
    else:
        where = _text_of_file_system(look, inode.super_block)
        text = f"inode {inode.number} on {where}"
    return Name(
        name=text,
        path=path if path and not _NO_PATH.match(path) else None,
        # That of a device's own data tells nobody anything.
        inode=None if is_device else inode.number,
        device=device,
    )


def _shown(inode: Inode, path: str | None) -> str | None:
    """Show a path as /proc does, also of what is in no directory."""
    if path and path.startswith("/"):
        return path
    if stat.S_ISFIFO(inode.mode):
        return f"pipe:[{inode.number}]"
    if stat.S_ISSOCK(inode.mode):
        return f"socket:[{inode.number}]"
    # Memory that is shared, as simple_dname() has it (fs/d_path.c).
    if path and stat.S_ISREG(inode.mode) and not _NO_PATH.match(path):
        return f"/{path} (deleted)"
    return path or None


def _text_of_file_system(look: LockContext, super_block: int) -> str:
    """Say which file system: its device, or its type."""
    device = look.layout.member(super_block, "super_block", "s_bdev")
    name = short(look.storage.device(device)) if device >= KERNEL_HALF else None
    return name or look.storage.file_system_type(super_block)


def short(device: str | None) -> str | None:
    """Take the name of a device without its numbers."""
    return device.partition(" ")[0] if device else None


def _super_block(look: LockContext, place: LockPlace) -> Name:
    """A file system's: it is called by where its root is."""
    mount = look.paths.mount_of(place.address)
    names = ("s_root", "s_bdev")
    root, device = look.layout.members(place.address, "super_block", *names)
    path = look.path_at((mount, root)) if mount else None
    text = path or _text_of_file_system(look, place.address)
    name = f"{place.name} of {text}"
    if place.level is not None:
        frozen = look.layout.member(place.address, "super_block", "s_writers.frozen")
        if frozen:
            how = "frozen" if frozen == FREEZE_COMPLETE else "freezing"
            name = f"{how} {text}"
        name += f" ({FREEZE_LEVELS[place.level]})"
    return Name(
        name=name,
        path=path,
        device=look.storage.device(device) if device >= KERNEL_HALF else None,
    )


def _mm(look: LockContext, place: LockPlace) -> Name:
    return _of_mm(look, place.address, f"mm_struct({{}}).{place.name}")


def _vma(look: LockContext, place: LockPlace) -> Name:
    mm = look.layout.member(place.address, "vm_area_struct", "vm_mm")
    return _of_mm(look, mm, f"vm_area_struct({{}}).{place.name}")


def _anon_vma(look: LockContext, place: LockPlace) -> Name:
    mm = lock_places(look).mm_of_anon_vma(place.address) or 0
    return _of_mm(look, mm, f"anon_vma({{}}).{place.name}")


def _of_mm(look: LockContext, mm: int, form: str) -> Name:
    """Name something of an address space; *form* has room for the process."""
    process = process_of(look, mm)
    if process is None:
        return Name(name=form.replace("({})", ""))
    pid, comm = process
    return Name(name=form.format(f"{pid} {comm}"), pid=pid)


def process_of(look: LockContext, mm: int) -> tuple[int, str] | None:
    """
    Tell the process that has an address space, and its command.

    :raises drgn.FaultError: if it cannot be read
    """
    owner = lock_places(look).owner_of_mm(mm)
    if owner is not None:
        return _process(look, owner)
    if not mm:
        return None
    # Of several it is the one that came first: the others have been lent it.
    users = look.tasks["address"][look.tasks["mm"] == np.uint64(mm)].tolist()
    return _process(look, users[0]) if users else None


def _process(look: LockContext, task: int) -> tuple[int, str]:
    leader = look.layout.member(task, "task_struct", "group_leader")
    pid = look.layout.member(leader, "task_struct", "pid")
    return pid, look.layout.text(leader, "task_struct", "comm")


def _signal(look: LockContext, place: LockPlace) -> Name:
    task = lock_places(look).task_of_signal(place.address)
    if task is None:
        return Name(name=f"signal_struct.{place.name}")
    pid, comm = _process(look, task)
    return Name(name=f"signal_struct({pid} {comm}).{place.name}", pid=pid)


def _file(look: LockContext, place: LockPlace) -> Name:
    name = of_file(look, place.address)
    return replace(name, name=f"{place.name} of {name.name}")


def _private(look: LockContext, place: LockPlace) -> Name:
    """Of what an open file stands for, which knows the file."""
    file = look.layout.member(place.address, str(place.type_name), "file")
    if file < KERNEL_HALF:
        return Name(name=f"{place.type_name}.{place.name}")
    name = of_file(look, file)
    return replace(name, name=f"{place.type_name}.{place.name} of {name.name}")


def _eventpoll(look: LockContext, place: LockPlace) -> Name:
    return Name(name=f"eventpoll.{place.name}")


def _disk(look: LockContext, place: LockPlace) -> Name:
    return _of_disk(look, place.address, place.name)


def _queue(look: LockContext, place: LockPlace) -> Name:
    disk = look.layout.member(place.address, "request_queue", "disk")
    return _of_disk(look, disk, place.name)


def _of_disk(look: LockContext, disk: int, what: str) -> Name:
    part = look.layout.member(disk, "gendisk", "part0")
    name = look.layout.text(disk, "gendisk", "disk_name")
    return Name(name=f"{what} of {name}", device=look.storage.device(part))


def _block_device(look: LockContext, place: LockPlace) -> Name:
    device = look.storage.device(place.address)
    return Name(name=f"{place.name} of {short(device)}", device=device)


def _journal(look: LockContext, place: LockPlace) -> Name:
    device = look.layout.member(place.address, "journal_s", "j_dev")
    text = look.storage.device(device)
    return Name(name=f"{place.name} of {short(text)}", device=text)


def _device(look: LockContext, place: LockPlace) -> Name:
    at = look.layout.member(place.address, "device", "kobj.name")
    data = read_string(look.reader, at, _MAX_NAME) if at >= KERNEL_HALF else None
    return Name(name=f"device({data}).{place.name}" if data else place.name)


def _terminal(look: LockContext, place: LockPlace) -> Name:
    name = look.layout.text(place.address, "tty_struct", "name")
    return Name(name=f"{place.name} of {name}")


def _backing_device(look: LockContext, place: LockPlace) -> Name:
    name = look.layout.text(place.address, "backing_dev_info", "dev_name")
    return Name(name=f"{place.name} of {name}")


def _sock(look: LockContext, place: LockPlace) -> Name:
    socket = look.layout.member(place.address, "sock", "sk_socket")
    what = "lock" if place.name.startswith("sk_lock") else place.name
    return _of_socket(look, socket, f"{what} of ")


def _socket(look: LockContext, place: LockPlace) -> Name:
    return _of_socket(look, place.address, "")


def _of_socket(look: LockContext, socket: int, what: str) -> Name:
    address = socket - look.layout.offset("socket_alloc", "socket")
    address += look.layout.offset("socket_alloc", "vfs_inode")
    if not look.storage.is_inode(address):
        # One that a driver of the kernel's own has made.
        return Name(name=f"{what}socket")
    inode = look.storage.inode(address)
    return Name(name=f"{what}socket:[{inode.number}]", inode=inode.number)


def _kernfs_root(look: LockContext, place: LockPlace) -> Name:
    """A tree of which there may be several mounts: it is called by the first."""
    node = look.layout.member(place.address, "kernfs_root", "supers")
    info = node - look.layout.offset("kernfs_super_info", "node")
    try:
        root, super_block = look.layout.members(info, "kernfs_super_info", "root", "sb")
    except drgn.FaultError:
        root = super_block = 0
    if root != place.address or not look.storage.is_super_block(super_block):
        return Name(name=place.name)
    return _super_block(look, replace(place, address=super_block))


def _node(look: LockContext, place: LockPlace) -> Name:
    number = look.layout.member(place.address, "pglist_data", "node_id")
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
