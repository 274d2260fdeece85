# SPDX-License-Identifier: LGPL-2.1-or-later

"""What structures are for: the file, process or device that they belong to."""

from collections.abc import Callable

import drgn

from msatools.errors import LOST
from msatools.kernel.strings import read_string
from msatools.locks.base.lock_context import LockContext
from msatools.locks.names.described import of_file, of_path, process_of
from msatools.locks.places.places import lock_places
from msatools.locks.places.slabs import SlabObject
from msatools.target.addresses import KERNEL_HALF
from msatools.whatis.lookup import Lookup

_MAX_NAME = 511


def describe_object(
    lookup: Lookup, type_: drgn.Type | None, piece: SlabObject
) -> str | None:
    """Return what a slab object is for; ``None`` if that is not known.

    :param type_: Type of the object; ``None`` if it is not certain.
    """
    context = lookup.locks
    try:
        tag = None if type_ is None else type_.tag
        describe = _DESCRIBE.get(tag or "")
        if describe is not None:
            return describe(context, piece.start)
        if (type_ is not None and "inode" in piece.cache) or _has_inode(type_):
            return _of_inode_in(context, piece)
    except LOST:
        pass
    return None


def _has_inode(type_: drgn.Type | None) -> bool:
    if type_ is None:
        return False
    return any(
        member.type.kind == drgn.TypeKind.STRUCT and member.type.tag == "inode"
        for member in type_.members or ()
    )


def _of_inode_in(context: LockContext, piece: SlabObject) -> str | None:
    inode = lock_places(context).inode_within(piece)
    return None if inode is None else _inode(context, inode)


def _inode(context: LockContext, address: int) -> str | None:
    if not context.storage.is_inode(address):
        return None
    inode = context.storage.inode(address)
    name = of_path(context, inode, context.path_of(inode)).name or ""
    number = f"inode {inode.number}"
    return name if number in name else f"{number}, {name}"


def _file(context: LockContext, address: int) -> str | None:
    return of_file(context, address).name


def _dentry(context: LockContext, address: int) -> str | None:
    super_block = context.layout.member(address, "dentry", "d_sb")
    mount = context.paths.mount_of(super_block)
    return context.path_at((mount, address)) if mount else None


def _mm(context: LockContext, address: int) -> str | None:
    process = process_of(context, address)
    return None if process is None else f"memory of pid {process[0]} ({process[1]})"


def _vma(context: LockContext, address: int) -> str | None:
    start, end, mm, file = context.layout.members(
        address, "vm_area_struct", "vm_start", "vm_end", "vm_mm", "vm_file"
    )
    words = [f"{start:#x}-{end:#x}"]
    process = process_of(context, mm)
    if process is not None:
        words.append(f"of pid {process[0]} ({process[1]})")
    if file >= KERNEL_HALF:
        words.append(of_file(context, file).name or "")
    return " ".join(words).rstrip()


def _signal(context: LockContext, address: int) -> str | None:
    task = lock_places(context).task_of_signal(address)
    if task is None:
        return None
    pid = context.layout.member(task, "task_struct", "tgid")
    comm = context.layout.text(task, "task_struct", "comm")
    return f"process {pid} ({comm})"


def _anon_vma(context: LockContext, address: int) -> str | None:
    mm = lock_places(context).mm_of_anon_vma(address)
    return None if mm is None else _mm(context, mm)


def _pid(context: LockContext, address: int) -> str | None:
    number = context.layout.member(address, "pid", "numbers[0].nr")
    return f"pid {number}"


def _cache(context: LockContext, address: int) -> str | None:
    name = context.layout.member(address, "kmem_cache", "name")
    return f"cache {read_string(context.reader, name, _MAX_NAME)}"


def _kernfs_node(context: LockContext, address: int) -> str | None:
    name = context.layout.member(address, "kernfs_node", "name")
    return read_string(context.reader, name, _MAX_NAME) or None


_DESCRIBE: dict[str, Callable[[LockContext, int], str | None]] = {
    "anon_vma": _anon_vma,
    "dentry": _dentry,
    "file": _file,
    "inode": _inode,
    "kernfs_node": _kernfs_node,
    "kmem_cache": _cache,
    "mm_struct": _mm,
    "pid": _pid,
    "signal_struct": _signal,
    "vm_area_struct": _vma,
}
"""By the tag of a structure, a function that takes its address. Each raises FaultError
if something that leads to the answer cannot be read."""
