# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the files, block devices and file systems of cached pages' mappings."""

import stat
from functools import cached_property

import drgn
import numpy as np
from drgn.helpers.linux.block import part_name
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.paths import Paths
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string, read_string
from msatools.kernel.structs import Members, Structs, read_structs
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_type,
    find_variable,
    offset_of,
    pointer_to,
)
from msatools.target.addresses import KERNEL_HALF

MAX_PATHS = 10_000
"""Maximum number of files, the largest, to look paths up for: a read a directory."""

_MINOR_BITS = 20
_NAME_MAX = 255

_MAPPING = {"host": ("host",)}
_INODE = {
    "mode": ("i_mode",),
    "super_block": ("i_sb",),
    "number": ("i_ino",),
    "links": ("i_nlink",),
    "size": ("i_size",),
    "alias": ("i_dentry.first",),
}
_SUPER_BLOCK = {
    "device": ("s_dev",),
    "block_device": ("s_bdev",),
    "id": ("s_id",),
    "type": ("s_type",),
}
_TYPE = {"name": ("name",)}

DEVICE = "block device"

_SHARED = {
    "memfd:": "memfd",
    "SYSV": "sysv",
    "dev/zero": "shared anonymous",
    "": "shmem",
}
"""Maps the start of a name to the kind of shared memory without a mount: mm/memfd.c,
ipc/shm.c, shmem_zero_setup() in mm/shmem.c; drivers have names of their own."""

_FILE_SYSTEMS = ("tmpfs", "devtmpfs", "hugetlbfs")
"""File systems that keep files only in memory."""

_MODES = {stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
_NAMELESS = frozenset((DEVICE, *_SHARED.values()))


class FileSystem(Struct, frozen=True):
    """One ``struct super_block``."""

    address: int
    number: str
    """Major and minor number, as ``st_dev`` of stat(2): ``259:3``."""

    fstype: str
    id: str
    """``s_id``: its block device, or its type."""

    has_device: bool


class CachedFile(Struct, frozen=True):
    """The file of a mapping; see :class:`msatools.memory.by.groups.FileGroup`."""

    key: str
    name: str
    kind: str
    mount: str | None
    fstype: str
    device: str | None
    path: str | None
    inode: int
    deleted: bool
    size_bytes: int
    mapping: int


class CachedFiles:
    """Finds files by the addresses of their mappings, many at once."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._paths = Paths(reader, losses)
        self._file_systems: dict[int, FileSystem | None] = {}
        self._points: dict[int, str | None] = {}

    def super_blocks(self, mappings: Addresses) -> Addresses:
        """Return the ``struct super_block`` of each mapping; 0 if it is unreadable."""
        _, inodes = self._inodes(mappings)
        super_blocks: Addresses = inodes["super_block"].astype(np.uint64)
        return super_blocks

    def files(self, mappings: Addresses) -> list[CachedFile | None]:
        """
        Return the file of each mapping; ``None`` if it is unreadable.

        :param mappings: The largest first: only :data:`MAX_PATHS` files get a path.
        """
        hosts, inodes = self._inodes(mappings)
        paths = self._paths_of(inodes)
        return [
            self._file(int(mappings[row]), int(hosts[row]), inodes, row, paths[row])
            for row in range(len(mappings))
        ]

    def file_system(self, super_block: int) -> FileSystem | None:
        """Return a file system; ``None`` if it is unreadable."""
        if super_block not in self._file_systems:
            self._read_file_systems(np.array([super_block], np.uint64))
        return self._file_systems[super_block]

    def mount_points(self, super_block: int) -> tuple[str, ...]:
        """Return the mount points of a file system."""
        return tuple(dict.fromkeys(self._paths.mount_points(super_block)))

    def _inodes(self, mappings: Addresses) -> tuple[Addresses, Structs]:
        structs = self._read("struct address_space", _MAPPING, mappings)
        hosts: Addresses = structs["host"].astype(np.uint64)
        return hosts, self._read("struct inode", _INODE, hosts)

    def _read(self, type_name: str, members: Members, addresses: Addresses) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)

    def _read_file_systems(self, addresses: Addresses) -> None:
        structs = self._read("struct super_block", _SUPER_BLOCK, addresses)
        types: Addresses = structs["type"].astype(np.uint64)
        names = self._read("struct file_system_type", _TYPE, types)["name"]
        for row, address in enumerate(addresses.tolist()):
            self._file_systems[address] = None
            if not structs.readable[row]:
                continue
            self._file_systems[address] = FileSystem(
                address=address,
                number=_device_number(int(structs["device"][row])),
                fstype=self._string(int(names[row])) or "?",
                id=decode_string(bytes(structs["id"][row])),
                has_device=int(structs["block_device"][row]) >= KERNEL_HALF,
            )

    def _string(self, address: int) -> str | None:
        try:
            return read_string(self._reader, address, _NAME_MAX)
        except UNREADABLE as error:
            self._losses.lose(
                Loss.FILE_SYSTEMS, f"cannot read a file system's type: {error}"
            )
            return None

    def _paths_of(self, inodes: Structs) -> list[str | None]:
        """Return a path of each inode: its first name, below the first mount."""
        paths: list[str | None] = [None] * len(inodes.readable)
        aliases = inodes["alias"]
        rows = [row for row in range(len(paths)) if int(aliases[row]) >= KERNEL_HALF]
        if len(rows) > MAX_PATHS:
            self._losses.note(
                "paths-not-told",
                f"of {len(rows):,} files the {MAX_PATHS:,} largest are named by path",
            )
        rows = rows[:MAX_PATHS]
        locations = []
        for row in rows:
            mount = self._paths.mount_of(int(inodes["super_block"][row]))
            locations.append((mount, int(aliases[row]) - self._alias_offset))
        for row, path in zip(rows, self._paths.tell(locations), strict=True):
            paths[row] = path
        return paths

    @cached_property
    def _alias_offset(self) -> int:
        dentry = find_type(self._reader.prog, "struct dentry")
        # Linux kernel commit 3b7d764a37d0 ("struct dentry: make ->d_u anonymous")
        # (in v7.1)
        name = "d_alias" if dentry.has_member("d_alias") else "d_u.d_alias"
        offset: int = offset_of(dentry, name)
        return offset

    def _file(
        self, mapping: int, host: int, inodes: Structs, row: int, path: str | None
    ) -> CachedFile | None:
        if not inodes.readable[row]:
            return None
        super_block = int(inodes["super_block"][row])
        system = self.file_system(super_block)
        if system is None:
            return None
        number = int(inodes["number"][row])
        kind = self._kind(int(inodes["mode"][row]), system, path)
        if kind == DEVICE:
            path, device = None, self._device_name(host)
            name = device
        elif super_block == self._shared_memory:
            # As in /proc/PID/maps; its name is not a path.
            name, path = f"/{path or system.fstype} (deleted)", None
            device = None
        else:
            device = system.id if system.has_device else None
            mount = self._mount_point(super_block)
            path = path if path and path.startswith("/") else None
            name = path or f"inode {number} on {mount or device or system.fstype}"
        return CachedFile(
            key=f"{system.number}:{number}",
            name=name,
            kind=kind,
            mount=self._mount_point(super_block),
            fstype=system.fstype,
            device=device,
            path=path,
            inode=number,
            # Shared memory and block devices never have links.
            deleted=kind not in _NAMELESS and not int(inodes["links"][row]),
            size_bytes=int(inodes["size"][row]),
            mapping=mapping,
        )

    def _kind(self, mode: int, system: FileSystem, path: str | None) -> str:
        if stat.S_ISBLK(mode) and system.address == self._block_devices:
            return DEVICE
        if system.address == self._shared_memory:
            starts = (start for start in _SHARED if (path or "").startswith(start))
            return _SHARED[next(starts, "")]
        if system.fstype in _FILE_SYSTEMS:
            return system.fstype
        return _MODES.get(stat.S_IFMT(mode), "file")

    @cached_property
    def _block_devices(self) -> int:
        """Address of the super block of block devices' inodes (block/bdev.c)."""
        try:
            pointer = find_variable(self._reader.prog, "blockdev_superblock")
            super_block: int = pointer.value_()
        except LOST:
            return 0
        return super_block

    @cached_property
    def _shared_memory(self) -> int:
        """Address of the super block of shared memory without a path (mm/shmem.c)."""
        try:
            mount = find_variable(self._reader.prog, "shm_mnt")
            super_block: int = mount.mnt_sb.value_()
        except LOST:
            return 0  # CONFIG_SHMEM=n
        return super_block

    def _device_name(self, inode: int) -> str:
        """Return the name of the block device that an inode is of (block/bdev.c)."""
        prog = self._reader.prog
        try:
            with drgn_lookups:
                pointer = pointer_to(prog, "struct inode", inode)
                device = drgn.container_of(
                    pointer, "struct bdev_inode", "vfs_inode"
                ).bdev
                # Before Linux kernel commit 0d02129e76ed ("block: merge struct
                # block_device and struct hd_struct") (in v5.11) the name is in bd_part.
                named = device.bd_part if hasattr(device, "bd_part") else device
                name = ask(part_name, named)
        except LOST as error:
            self._losses.lose(Loss.DEVICES, f"cannot read a block device: {error}")
            return "block device"
        return decode_string(name)

    def _mount_point(self, super_block: int) -> str | None:
        if super_block not in self._points:
            points = self._paths.mount_points(super_block)
            self._points[super_block] = points[0] if points else None
        return self._points[super_block]


def _device_number(device: int) -> str:
    return f"{device >> _MINOR_BITS}:{device & ((1 << _MINOR_BITS) - 1)}"
