# SPDX-License-Identifier: LGPL-2.1-or-later

"""Paths of directory entries, many at once, as /proc/PID/fd shows them.

fs/d_path.c: from an entry up to the root of its mount, then from its mount point on, up
to the root mount.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, find_offset, read_struct, read_structs
from msatools.selfdesc.find import find_type, find_variable, offset_of

Place = tuple[int, int]
"""A ``struct path``: addresses of its ``struct vfsmount`` and ``struct dentry``."""

MAX_DEPTH = 2048
"""Maximum number of steps to the root: a path has PATH_MAX bytes at most, so that a
longer walk is a loop."""

_MAX_MOUNTS = 64
"""Maximum number of mounts of a file system that are read: the first one visible to
programs comes early."""

_ERR_PTRS = (1 << 64) - 4095
"""The lowest ERR_PTR (MAX_ERRNO)."""

_NAME_MAX = 255
_INLINE = ("d_shortname.string", "d_iname")
"""The buffer for short names within the entry. "dcache: back inline names with a
struct-wrapped array of unsigned long" (in v6.14)"""

_DELETED = " (deleted)"

_DENTRY = {
    "parent": ("d_parent",),
    "name": ("d_name.name",),
    "length": ("d_name.len",),
    "hashed": ("d_hash.pprev",),
    "inline": _INLINE,
}
_OF_SUPER_BLOCK: Members = {
    # Linux kernel commit 09a1b33c080f ("preparations to taking MNT_WRITE_HOLD out of
    # ->mnt_flags") (in v6.18) has a pointer to the first mount, no list head.
    "next": ("mnt_next_for_sb", "mnt_instance.next"),
    "space": ("mnt_ns",),
}
_FIRST_MOUNT: Members = {"first": ("s_mounts",)}
_ROOT: Members = {"root": ("mnt.mnt_root",)}
_MOUNT = {
    "root": ("mnt.mnt_root",),
    "parent": ("mnt_parent",),
    "mountpoint": ("mnt_mountpoint",),
}


class _Entry(NamedTuple):
    """A ``struct dentry``."""

    parent: int
    name: bytes
    unhashed: bool


class _Mount(NamedTuple):
    """Addresses of ``struct dentry`` and of ``struct mount`` in a ``struct mount``."""

    root: int
    parent: int
    mountpoint: int


class Paths(Struct, dict=True):
    """The paths of one kernel; entries and mounts are read once."""

    reader: Reader
    losses: LossLog
    _entries: dict[int, _Entry | None] = field(default_factory=dict)
    _mounts: dict[int, _Mount | None] = field(default_factory=dict)
    _paths: dict[Place, str | None] = field(default_factory=dict)
    _of_super_block: dict[int, int] = field(default_factory=dict)

    def tell(self, places: Sequence[Place]) -> list[str | None]:
        """Return the path of each place; ``None`` if a part cannot be read.

        The path of a deleted file ends as the kernel writes it, `` (deleted)``. The
        path of an entry outside any tree, such as that of a socket, is its name.
        """
        new = [place for place in dict.fromkeys(places) if place not in self._paths]
        if new:
            self._paths.update(zip(new, self._walk(new), strict=True))
        return [self._paths[place] for place in places]

    def _walk(self, places: list[Place]) -> list[str | None]:
        vfs = self._vfsmount_offset
        walks = [
            _PathWalk(max(vfsmount - vfs, 0), dentry) for vfsmount, dentry in places
        ]
        for _ in range(MAX_DEPTH):
            unfinished = [walk for walk in walks if not walk.ended]
            if not unfinished:
                break
            self._read(unfinished)
            for walk in unfinished:
                walk.step(self._entries.get(walk.entry), self._mounts.get(walk.mount))
        return [walk.path() for walk in walks]

    def mount_of(self, super_block: int) -> int:
        """Find a mount of a file system; 0 if it has none.

        It is the oldest in the mount namespace of the init task; else the oldest in any
        namespace; else one internal to the kernel, which may have another path or none.

        :return: Address of the ``struct vfsmount``.
        """
        if super_block not in self._of_super_block:
            self._of_super_block[super_block] = self._find_mount(super_block)
        return self._of_super_block[super_block]

    def mount_points(self, super_block: int) -> list[str]:
        """Return the paths where a file system is mounted, the oldest mount first.

        Only mounts in the mount namespace of the init task are included, unless there
        are none.
        """
        mounts = list(self._mounts_of(super_block))
        if any(space == self._first_space for _, space in mounts):
            mounts = [
                (mount, space) for mount, space in mounts if space == self._first_space
            ]
        places = []
        for mount, space in mounts:
            if not 0 < space < _ERR_PTRS:
                continue  # internal to the kernel
            try:
                found = read_struct(self.reader, "struct mount", _ROOT, mount)
                places.append((mount + self._vfsmount_offset, found["root"]))
            except UNREADABLE as error:
                self.losses.lose(Loss.PATHS, f"cannot read a mount: {error}")
        return [path for path in self.tell(places) if path is not None]

    def _find_mount(self, super_block: int) -> int:
        best = internal = 0
        for mount, space in self._mounts_of(super_block):
            if space == self._first_space:
                best = mount
                break
            # An internal mount has NULL, or MNT_NS_INTERNAL, an ERR_PTR.
            if 0 < space < _ERR_PTRS:
                best = best or mount
            else:
                internal = internal or mount
        found = best or internal
        return found + self._vfsmount_offset if found else 0

    @cached_property
    def _vfsmount_offset(self) -> int:
        """Offset of the ``struct vfsmount`` in a ``struct mount``."""
        return int(offset_of(find_type(self.reader.prog, "struct mount"), "mnt"))

    @cached_property
    def _first_space(self) -> int:
        """Address of the init task's ``struct mnt_namespace``; 0 if lost."""
        try:
            space: int = find_variable(
                self.reader.prog, "init_task"
            ).nsproxy.mnt_ns.value_()
        except LOST:
            return 0
        return space

    def _mounts_of(self, super_block: int) -> Iterator[tuple[int, int]]:
        """Yield the mounts of a file system, the oldest first.

        :return: Addresses of each ``struct mount`` and of its ``struct mnt_namespace``.
        """
        prog = self.reader.prog
        block = "struct super_block"
        head = super_block + offset_of(find_type(prog, block), "s_mounts")
        offset = find_offset(find_type(prog, "struct mount"), ("mnt_instance",)) or 0
        try:
            first = read_struct(self.reader, block, _FIRST_MOUNT, super_block)
            following = first["first"]
            for _ in range(_MAX_MOUNTS):
                if following == head or following <= offset:
                    return
                mount = following - offset
                found = read_struct(self.reader, "struct mount", _OF_SUPER_BLOCK, mount)
                following = found["next"]
                yield mount, found["space"]
        except UNREADABLE:
            return

    def _read(self, walks: list["_PathWalk"]) -> None:
        """Read the current entry and mount of each walk, each once."""
        mounts = {walk.mount for walk in walks} - self._mounts.keys() - {0}
        if mounts:
            self._read_mounts(_addresses(mounts))
        entries = {walk.entry for walk in walks} - self._entries.keys() - {0}
        if entries:
            self._read_entries(_addresses(entries))

    def _read_mounts(self, addresses: Addresses) -> None:
        found = read_structs(
            self.reader, "struct mount", _MOUNT, addresses, self.losses
        )
        for row, address in enumerate(addresses.tolist()):
            self._mounts[address] = (
                _Mount(*(int(found[member][row]) for member in _Mount._fields))
                if found.readable[row]
                else None
            )

    def _read_entries(self, addresses: Addresses) -> None:
        found = read_structs(
            self.reader, "struct dentry", _DENTRY, addresses, self.losses
        )
        inline = find_offset(find_type(self.reader.prog, "struct dentry"), _INLINE) or 0
        for row, address in enumerate(addresses.tolist()):
            if not found.readable[row]:
                self._entries[address] = None
                continue
            length = min(int(found["length"][row]), _NAME_MAX)
            start = int(found["name"][row])
            if start == address + inline and length < found["inline"].itemsize:
                name = bytes(found["inline"][row])[:length]
            else:
                try:
                    name = self.reader.read(start, length)
                except UNREADABLE as error:
                    self.losses.lose(Loss.PATHS, f"cannot read a file's name: {error}")
                    self._entries[address] = None
                    continue
            self._entries[address] = _Entry(
                int(found["parent"][row]), name, not found["hashed"][row]
            )


class _PathWalk:
    """A walk from one place up to the root."""

    def __init__(self, mount: int, entry: int) -> None:
        self.mount = mount
        self.entry = entry
        self.ended = self._lost = not (mount and entry)
        self._names: list[bytes] = []
        self._rooted = False
        self._deleted: bool | None = None

    def step(self, entry: _Entry | None, mount: _Mount | None) -> None:
        """Go on to the parent of the current entry, or to the mount point."""
        if entry is None or mount is None:
            self.ended = self._lost = True
            return
        is_root = entry.parent == self.entry
        if self._deleted is None:
            # The root of a file system is unhashed, but not deleted.
            self._deleted = entry.unhashed and not is_root
        if mount.root == self.entry:
            if mount.parent == self.mount:
                self.ended = self._rooted = True
            else:
                self.mount, self.entry = mount.parent, mount.mountpoint
            return
        if is_root:
            if not self._names and entry.name != b"/":
                self._names.append(entry.name)
            else:
                self._rooted = True
            self.ended = True
            return
        self._names.append(entry.name)
        self.entry = entry.parent

    def path(self) -> str | None:
        """Return the path; ``None`` if a part could not be read."""
        if self._lost or not self.ended:
            return None
        path = b"/".join(reversed(self._names))
        text = ("/" if self._rooted else "") + path.decode("utf-8", "backslashreplace")
        return text + _DELETED if self._deleted and self._rooted else text


def _addresses(values: set[int]) -> Addresses:
    return np.array(sorted(values), np.uint64)
