# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page cache by file (``--by file``) and by file system (``--by fs``)."""

import stat
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import drgn
import numpy as np
from drgn.helpers.linux.block import part_name
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.files import NAME_MAX, Paths, device_number
from msatools.kernel.mm import read_swap
from msatools.kernel.reader import Addresses, Reader, decode_string, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import MAPPING_FLAGS, Members, Structs, read_structs
from msatools.kernel.walks import list_nodes
from msatools.memory.breakdowns import (
    OTHERS,
    Ranking,
    Tally,
    TallyOwner,
    copy_to_tails,
    rank,
    regroup,
)
from msatools.memory.classes import NCLASSES, PageClass
from msatools.memory.classify import Block, Indices, Words, where
from msatools.memory.model import (
    NO_OWNER,
    REST,
    FileGroup,
    FileSystemGroup,
    PageGroup,
    largest_first,
    unique_keys,
)
from msatools.memory.owners import ScanContext
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.selfdesc.find import (
    ask,
    drgn_lookups,
    find_type,
    find_variable,
    offset_of,
    pointer_to,
)

# --- Finds the files, block devices and file systems of cached pages' mappings.


MAX_PATHS = 10_000
"""Maximum number of files (the largest) to look up paths of: one read a directory."""


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
    """``s_id``: name of its block device, or its type if it has none."""

    has_device: bool


class CachedFile(Struct, frozen=True):
    """The file of a mapping; see :class:`msatools.memory.model.FileGroup`."""

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
                number=device_number(int(structs["device"][row])),
                fstype=self._string(int(names[row])) or "?",
                id=decode_string(bytes(structs["id"][row])),
                has_device=int(structs["block_device"][row]) >= KERNEL_HALF,
            )

    def _string(self, address: int) -> str | None:
        try:
            return read_string(self._reader, address, NAME_MAX)
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
        """Return the name of a block device by its inode (block/bdev.c)."""
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


# --- Counts the pages of tmpfs on swap (mm/shmem.c).
#
# Each inode counts its own pages on swap; the kernel has no sum for a file system.


MAX_INODES = 1 << 22
"""Number of inodes after which no further file system is read."""

_INFO = {"swapped": ("swapped",)}


def swapped_by_super_block(reader: Reader, losses: LossLog) -> dict[int, int | None]:
    """Return the number of pages on swap of each tmpfs.

    The kernel's internal tmpfs, which has memfds, System V segments and shared
    anonymous memory, is included.

    :return: Maps the address of a super block to its pages; to ``None`` if not all of
        its inodes could be read.
    :raises MissingError: if the kernel has no tmpfs (CONFIG_SHMEM=n)
    """
    prog = reader.prog
    operations = np.uint64(find_variable(prog, "shmem_ops").address_)
    type_ = find_type(prog, "struct super_block")
    head = find_variable(prog, "super_blocks").address_
    systems = list_nodes(reader, head, losses, "the list of file systems")
    systems -= np.uint64(offset_of(type_, "s_list"))
    found = read_structs(
        reader, "struct super_block", {"operations": ("s_op",)}, systems, losses
    )
    in_memory = found.readable & (found["operations"] == operations)
    inodes = offset_of(type_, "s_inodes")
    swapped: dict[int, int | None] = {}
    left = MAX_INODES
    for system in systems[in_memory].tolist():
        nodes = _list(reader, system + inodes, losses) if left > 0 else None
        swapped[system] = None if nodes is None else _swapped(reader, nodes, losses)
        left -= 0 if nodes is None else len(nodes)
    return swapped


def _list(reader: Reader, head: int, losses: LossLog) -> Addresses | None:
    """Return the inodes of a file system; ``None`` if their list breaks off."""
    aside = LossLog()
    nodes = list_nodes(reader, head, aside, "a list of inodes")
    losses.add(aside)
    return None if aside.lost else nodes


def _swapped(reader: Reader, nodes: Addresses, losses: LossLog) -> int | None:
    inode = find_type(reader.prog, "struct inode")
    info = find_type(reader.prog, "struct shmem_inode_info")
    node = offset_of(info, "vfs_inode") + offset_of(inode, "i_sb_list")
    infos = nodes - np.uint64(node)
    found = read_structs(reader, "struct shmem_inode_info", _INFO, infos, losses)
    return (
        int(found["swapped"].astype(np.int64).sum()) if found.readable.all() else None
    )


# --- Counts page cache by file (--by file) and by file system (--by fs).


MAX_FILES = 100_000
"""Maximum number of files to list, the largest."""

SWAP_CACHE, _UNREADABLE = 1, 2
"""Placeholders for an owner: pages in the swap cache; unreadable file systems."""

_UNMOUNTED = {"bdev": "block devices", "tmpfs": "shared memory without a path"}
"""Maps the type of an internal file system of the kernel to its name."""

_CACHED = np.zeros(NCLASSES, np.bool_)
_CACHED[
    [
        PageClass.FILE,
        PageClass.EXEC,
        PageClass.SHMEM,
        PageClass.BLOCKDEV,
        PageClass.USER_HUGETLB,
    ]
] = True


class MappingTally(Struct):
    """Counts pages by their ``struct address_space`` and class."""

    tally: Tally = field(default_factory=Tally)

    def observe(self, block: Block) -> None:
        self.tally.add(mapping_words(block), block.codes)

    def merge(self, later: "MappingTally") -> None:
        self.tally.merge(later.tally)


def mapping_words(block: Block) -> Words:
    """Return the address_space of each page: :data:`SWAP_CACHE` if it is in the swap
    cache, 0 if it is not in the page cache either."""
    mappings = block.mapping.copy()
    copy_to_tails(block, mappings)
    mappings[~_CACHED.take(block.codes)] = 0
    # Private pages of hugetlb are anonymous.
    mappings[mappings & np.uint64(MAPPING_FLAGS) != 0] = 0
    mappings[_in_swap_cache(block)] = SWAP_CACHE
    return mappings


def _in_swap_cache(block: Block) -> Indices:
    """Return the anonymous and shmem pages that are in the swap cache."""
    pages = where((block.codes == PageClass.ANON) | (block.codes == PageClass.SHMEM))
    heads = block.heads_of(pages)
    bits = np.uint64(block.layout.swapcache_bits)
    in_swap_cache: Indices = pages[block.flags[heads] & bits == bits]
    return in_swap_cache


class FileView:
    """Files by the pages of their page cache."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = MappingTally()
        self._files = CachedFiles(context.reader, context.losses)
        self._losses = context.losses

    def groups(self) -> tuple[PageGroup, ...]:
        ranking = rank(self.observer.tally.sums(), MAX_FILES, (0, SWAP_CACHE))
        owners = [owner for owner in ranking.owners if owner.word > SWAP_CACHE]
        mappings = np.array([owner.word for owner in owners], np.uint64)
        files = self._files.files(mappings)
        unreadable = sum(file is None for file in files)
        self._losses.lose(Loss.NAMES, count=unreadable)
        groups = [
            _file_group(owner, file) for owner, file in zip(owners, files, strict=True)
        ]
        groups += _other_groups(ranking, FileGroup)
        return largest_first(unique_keys(groups))


class FileSystemView:
    """File systems by the pages of their files' page cache."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = MappingTally()
        self._files = CachedFiles(context.reader, context.losses)
        self._losses = context.losses
        self._reader = context.reader

    def groups(self) -> tuple[PageGroup, ...]:
        sums = self.observer.tally.sums()
        mappings, index = np.unique(sums.owners, return_inverse=True)
        # Placeholders are not mappings: they are kept.
        are_files = (mappings > SWAP_CACHE) & (mappings != OTHERS)
        systems = mappings.copy()
        systems[are_files] = self._files.super_blocks(mappings[are_files])
        systems[are_files & (systems == 0)] = _UNREADABLE
        counts = Counter(systems[are_files].tolist())
        ranking = rank(regroup(sums, systems[index]), len(systems), (0, SWAP_CACHE))
        swapped = self._swapped()
        owners = [owner for owner in ranking.owners if owner.word > SWAP_CACHE]
        known = {owner.word for owner in owners}
        # File systems that have no page in memory, but some on swap.
        owners += (
            TallyOwner(system, 0, {})
            for system, pages in swapped.items()
            if pages and system not in known
        )
        groups = [
            self._group(owner, counts[owner.word], swapped.get(owner.word))
            for owner in owners
        ]
        return largest_first(
            unique_keys([*groups, *_other_groups(ranking, FileSystemGroup)])
        )

    def _swapped(self) -> dict[int, int | None]:
        swap = read_swap(self._reader.prog)
        if swap.pages == swap.free_pages:
            return {}  # nothing is on swap
        try:
            return swapped_by_super_block(self._reader, self._losses)
        except MissingError:
            return {}
        except UNREADABLE as error:
            self._losses.lose(
                Loss.LISTS, f"cannot read file systems in memory: {error}"
            )
            return {}

    def _group(self, owner: TallyOwner, files: int, swapped: int | None) -> PageGroup:
        system = None
        if owner.word != _UNREADABLE:
            system = self._files.file_system(owner.word)
        if system is None:
            self._losses.lose(Loss.NAMES)
            name = "unreadable file systems"
            return _group(FileSystemGroup, f"{owner.word:#x}", name, owner)
        mounts = self._files.mount_points(system.address)
        return FileSystemGroup(
            key=system.number,
            name=mounts[0] if mounts else _UNMOUNTED.get(system.fstype, system.fstype),
            pages=owner.pages,
            classes=owner.classes,
            fstype=system.fstype,
            device=system.id,
            files=files,
            swap_pages=swapped,
            mounts=mounts,
            super_block=Address(system.address),
        )


def _file_group(owner: TallyOwner, file: CachedFile | None) -> PageGroup:
    if file is None:
        address = f"{owner.word:#x}"
        name = f"mapping {address}, whose inode is unreadable"
        return _group(FileGroup, address, name, owner)
    return FileGroup(
        key=file.key,
        name=file.name,
        pages=owner.pages,
        classes=owner.classes,
        kind=file.kind,
        mount=file.mount,
        fstype=file.fstype,
        device=file.device,
        path=file.path,
        inode=file.inode,
        deleted=file.deleted,
        size_bytes=file.size_bytes,
        mapping=Address(file.mapping),
    )


def _other_groups(ranking: Ranking, model: type[PageGroup]) -> Iterator[PageGroup]:
    names = {0: (NO_OWNER, "not of a file"), SWAP_CACHE: ("-swap", "swap cache")}
    for owner in ranking.owners:
        if owner.word in names:
            yield _group(model, *names[owner.word], owner)
    if ranking.rest is not None:
        count = "" if ranking.left_out is None else f"{ranking.left_out:,} "
        yield _group(model, REST, f"{count}smaller files", ranking.rest)


def _group(model: type[PageGroup], key: str, name: str, owner: TallyOwner) -> PageGroup:
    """Return a group that has only the fields of :class:`PageGroup`."""
    return model(key, name, owner.pages, owner.classes)
