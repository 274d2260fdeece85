# SPDX-License-Identifier: LGPL-2.1-or-later

"""The paths of directory entries, many at once, as /proc/PID/fd has them.

fs/d_path.c: from an entry up to the root of its mount, then on from where that is
mounted, up to the root that all is mounted on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, find_offset, read_struct, read_structs
from msatools.selfdesc.variables import find_variable

Place = tuple[int, int]
"""The addresses of a ``struct vfsmount`` and a ``struct dentry``, a ``struct path``."""

MAX_DEPTH = 2048
"""A path has PATH_MAX bytes at most: more directories than that are a loop."""

_MAX_MOUNTS = 64
"""Of a file system that are looked at: the first that programs see comes early."""

_ERRORS = (1 << 64) - 4095
"""Pointers from here on are the numbers of errors (MAX_ERRNO)."""

_PAGE = 4096
_NAME_MAX = 255
_INLINE = ("d_shortname.string", "d_iname")
"""Short names lie in the entry. "dcache: back inline names with a struct-wrapped array
of unsigned long" (in v6.14)"""

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


@dataclass(frozen=True)
class _Entry:
    parent: int
    name: bytes
    unhashed: bool


@dataclass
class Paths:
    """Tells paths of one kernel; what it has read it keeps."""

    reader: Reader
    losses: LossLog
    _entries: dict[int, _Entry | None] = field(default_factory=dict)
    _mounts: dict[int, tuple[int, int, int] | None] = field(default_factory=dict)
    _told: dict[Place, str | None] = field(default_factory=dict)
    _of_super_block: dict[int, int] = field(default_factory=dict)

    def tell(self, places: Sequence[Place]) -> list[str | None]:
        """Tell the path of each place; ``None`` if a part cannot be read.

        What has been deleted is marked as the kernel does. An entry that is in no
        tree, such as a socket's, has just a name.
        """
        new = [place for place in dict.fromkeys(places) if place not in self._told]
        if new:
            self._told.update(zip(new, self._walk(new), strict=True))
        return [self._told[place] for place in places]

    def _walk(self, places: list[Place]) -> list[str | None]:
        mount = self.reader.prog.type("struct mount")
        within = drgn.offsetof(mount, "mnt")
        walks = [
            _PathWalk(max(vfsmount - within, 0), dentry) for vfsmount, dentry in places
        ]
        for _ in range(MAX_DEPTH):
            going = [walk for walk in walks if not walk.ended]
            if not going:
                break
            self._read(going)
            for walk in going:
                walk.step(self._entries.get(walk.entry), self._mounts.get(walk.mount))
        return [walk.path() for walk in walks]

    def mount_of(self, super_block: int) -> int:
        """Find a mount of a file system; 0 if it has none.

        It is the first made that the first process sees, or else that any does: of
        some file systems the kernel has one for itself, at another path or none.
        """
        if super_block not in self._of_super_block:
            self._of_super_block[super_block] = self._find_mount(super_block)
        return self._of_super_block[super_block]

    def mount_points(self, super_block: int) -> list[str]:
        """Tell where the first process sees a file system, the first mount first.

        Of one that it does not see at all: where others do.
        """
        mounts = list(self._mounts_of(super_block))
        if any(space == self._first_space for _, space in mounts):
            mounts = [place for place in mounts if place[1] == self._first_space]
        mount_type = self.reader.prog.type("struct mount")
        within = drgn.offsetof(mount_type, "mnt")
        places = []
        for mount, space in mounts:
            if not 0 < space < _ERRORS:
                continue  # one that the kernel has for itself
            try:
                found = read_struct(self.reader, "struct mount", _ROOT, mount)
                places.append((mount + within, found["root"]))
            except drgn.FaultError as error:
                self.losses.lose(Loss.PATHS, f"a mount is lost: {error}")
        return [path for path in self.tell(places) if path is not None]

    def _find_mount(self, super_block: int) -> int:
        within = drgn.offsetof(self.reader.prog.type("struct mount"), "mnt")
        best = hidden = 0
        for mount, space in self._mounts_of(super_block):
            if space == self._first_space:
                best = mount
                break
            # None, or MNT_NS_INTERNAL, an error's number.
            if 0 < space < _ERRORS:
                best = best or mount
            else:
                hidden = hidden or mount
        found = best or hidden
        vfsmount: int = found + within if found else 0
        return vfsmount

    @cached_property
    def _first_space(self) -> int:
        """The first process's ``struct mnt_namespace``."""
        try:
            space: int = find_variable(
                self.reader.prog, "init_task"
            ).nsproxy.mnt_ns.value_()
        except (drgn.FaultError, LookupError):
            return 0
        return space

    def _mounts_of(self, super_block: int) -> Iterator[tuple[int, int]]:
        """Give the ``struct mount`` of a file system, the first made first.

        :return: Of each its address, and the ``struct mnt_namespace`` that it is in.
        """
        prog = self.reader.prog
        block = "struct super_block"
        head = super_block + drgn.offsetof(prog.type(block), "s_mounts")
        node = find_offset(prog.type("struct mount"), ("mnt_instance",)) or 0
        try:
            first = read_struct(self.reader, block, _FIRST_MOUNT, super_block)
            following = first["first"]
            for _ in range(_MAX_MOUNTS):
                if following == head or following <= node:
                    return
                mount = following - node
                found = read_struct(self.reader, "struct mount", _OF_SUPER_BLOCK, mount)
                following = found["next"]
                yield mount, found["space"]
        except drgn.FaultError:
            return

    def _read(self, walks: list["_PathWalk"]) -> None:
        """Read the next entry and mount of each walk, each once."""
        mounts = {walk.mount for walk in walks} - self._mounts.keys() - {0}
        if mounts:
            addresses = _addresses(mounts)
            found = read_structs(
                self.reader, "struct mount", _MOUNT, addresses, self.losses
            )
            for row, address in enumerate(addresses.tolist()):
                self._mounts[address] = (
                    (
                        int(found["root"][row]),
                        int(found["parent"][row]),
                        int(found["mountpoint"][row]),
                    )
                    if found.readable[row]
                    else None
                )
        entries = {walk.entry for walk in walks} - self._entries.keys() - {0}
        if entries:
            self._read_entries(_addresses(entries))

    def _read_entries(self, addresses: Addresses) -> None:
        found = read_structs(
            self.reader, "struct dentry", _DENTRY, addresses, self.losses
        )
        inline = find_offset(self.reader.prog.type("struct dentry"), _INLINE) or 0
        for row, address in enumerate(addresses.tolist()):
            if not found.readable[row]:
                self._entries[address] = None
                continue
            length = min(int(found["length"][row]), _NAME_MAX)
            at = int(found["name"][row])
            short = at == address + inline and length < found["inline"].itemsize
            name = bytes(found["inline"][row])[:length] if short else b""
            if not short:
                try:
                    name = self.reader.read(at, length)
                except drgn.FaultError as error:
                    self.losses.lose(Loss.PATHS, f"a file's name is lost: {error}")
                    self._entries[address] = None
                    continue
            self._entries[address] = _Entry(
                int(found["parent"][row]), name, not found["hashed"][row]
            )


class _PathWalk:
    """On the way up from one place."""

    def __init__(self, mount: int, entry: int) -> None:
        self.mount = mount
        self.entry = entry
        self.ended = self._lost = not (mount and entry)
        self._names: list[bytes] = []
        self._rooted = False
        self._deleted: bool | None = None

    def step(self, entry: _Entry | None, mount: tuple[int, int, int] | None) -> None:
        if entry is None or mount is None:
            self.ended = self._lost = True
            return
        is_root = entry.parent == self.entry
        if self._deleted is None:
            # The root of a file system is in no hash table, and not deleted.
            self._deleted = entry.unhashed and not is_root
        if mount[0] == self.entry:
            _, parent, mountpoint = mount
            if parent == self.mount:
                self.ended = self._rooted = True
            else:
                self.mount, self.entry = parent, mountpoint
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
        if self._lost or not self.ended:
            return None
        path = b"/".join(reversed(self._names))
        text = ("/" if self._rooted else "") + path.decode("utf-8", "backslashreplace")
        return text + _DELETED if self._deleted and self._rooted else text


def _addresses(values: set[int]) -> Addresses:
    return np.array(sorted(values), np.uint64)
