# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open files and paths: of descriptors, directory entries and control groups."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.reader import Addresses, Reader, distinct, read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    Members,
    Numbers,
    Structs,
    WordArray,
    find_offset,
    read_rows,
    read_struct,
    read_structs,
    struct_layout,
)
from msatools.kernel.walks import changing_list
from msatools.selfdesc.find import (
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

# --- Open files: descriptor tables, and the struct file that they refer to.
#
# fs/file.c: task_struct.files, which threads may share.


MAX_OPEN = 1 << 20
"""Maximum number of descriptors read of one table: the default of ``fs.nr_open``."""


_TASK: Members = {"files": ("files",)}
_HOLDER_TYPE = "struct files_struct"
_HOLDER: Members = {"table": ("fdt",)}
_SMALL: Members = {
    **_HOLDER,
    "size": ("fdtab.max_fds",),
    "files": ("fdtab.fd",),
    "array": WordArray(("fd_array",)),
}
"""Members of a ``struct files_struct`` with its embedded table and array, which it uses
until it has many files open."""

_TABLE_TYPE = "struct fdtable"
_PART = 1 << 21
"""Number of descriptors to read at once; all processes together usually have fewer."""

_TABLE: Members = {"size": ("max_fds",), "files": ("fd",)}

FILE: Mapping[str, tuple[str, ...]] = {
    "inode": ("f_inode",),
    "mapping": ("f_mapping",),
    "operations": ("f_op",),
    "private": ("private_data",),
    "mount": ("f_path.mnt",),
    "dentry": ("f_path.dentry",),
    # A structure of its own since Linux kernel commit 1934b212615d ("file: reclaim 24
    # bytes from f_owner") (in v6.12)
    "owner": ("f_owner.pid",),
    "owned": ("f_owner",),
}
"""Columns of a ``struct file``: ``mapping`` is the address space of its data."""

_FILE_TYPE = "struct file"
_OPEN = ("inode", "mapping", "operations", "private", "mount", "dentry")


def _file_members(columns: Iterable[str]) -> Members:
    return {name: FILE[name] for name in columns}


class DescriptorTables(Struct, frozen=True):
    """The descriptor tables of some tasks, one row per task."""

    files: Addresses
    """Address of each table's array of files; 0 if it has none or cannot be read."""

    size: Numbers
    """Number of slots in each array."""


class Descriptors:
    """Looks up file descriptors."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses

    def tables(self, tasks: Addresses) -> DescriptorTables:
        """Find the tables of the ``struct task_struct`` at some addresses.

        A table that tasks share is read once.
        """
        task = self._structs("struct task_struct", _TASK, tasks)
        holder = self._structs(_HOLDER_TYPE, _HOLDER, task["files"])
        table = self._structs(_TABLE_TYPE, _TABLE, holder["table"])
        size = np.minimum(table["size"].astype(np.int64), MAX_OPEN)
        return DescriptorTables(table["files"], np.where(table.readable, size, 0))

    def lookup(self, tables: DescriptorTables, numbers: Numbers) -> Addresses:
        """Find the ``struct file`` of one descriptor of each table; 0 if not open.

        :param numbers: Descriptors, one per row of *tables*.
        """
        inside = (numbers >= 0) & (numbers < tables.size)
        offsets = np.where(inside, numbers, 0).astype(np.uint64) * np.uint64(8)
        addresses = tables.files + offsets
        files = np.zeros(len(numbers), np.uint64)
        wanted = np.flatnonzero(inside & (tables.files != 0))
        records, _ = self._reader.read_records(addresses[wanted], 8)
        files[wanted] = records.view("<u8")[:, 0]
        return files

    def all_files(
        self, tables: DescriptorTables, row: int, limit: int = MAX_OPEN
    ) -> Addresses:
        """Read a whole table: the ``struct file`` by descriptor, 0 if not open.

        :param row: Row in *tables*.
        :param limit: Maximum number of descriptors to read, from 0 on.
        :return: Empty if the table is empty or unreadable.
        """
        count = min(int(tables.size[row]), limit)
        if not count:
            return np.empty(0, np.uint64)
        try:
            return self._reader.words(int(tables.files[row]), count)
        except UNREADABLE as error:
            self._losses.lose(
                Loss.DESCRIPTORS, f"cannot read a table of open files: {error}"
            )
            return np.empty(0, np.uint64)

    def by_table(self, tasks: Addresses) -> Iterator[tuple[list[int], Addresses]]:
        """Yield the tables of tasks, each once.

        :return: The rows of the tasks that share the table, and the ``struct file`` by
            descriptor, 0 if not open.
        """
        tables = self.tables(tasks)
        sharers: dict[int, list[int]] = {}
        for row, table in enumerate(tables.files.tolist()):
            if table:
                sharers.setdefault(table, []).append(row)
        for rows in sharers.values():
            yield rows, self.all_files(tables, rows[0])

    def read_files(self, files: Addresses, columns: Iterable[str] = _OPEN) -> Structs:
        """Read columns of the ``struct file`` at some addresses.

        :param columns: Keys of :data:`FILE`; by default all but the owner's.
        """
        return self._structs(_FILE_TYPE, _file_members(columns), files)

    def _structs(
        self, type_name: str, members: Members, addresses: Addresses
    ) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)


class OpenFiles:
    """
    Every ``struct file`` in the file table of a process, once.

    Threads with a table of their own, and files in flight through a socket, are not
    included.
    """

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._prog = reader.prog
        addresses = _file_addresses(reader, losses)
        members = _file_members(("operations", "private"))
        files, readable = _rows(reader, _FILE_TYPE, members, addresses)
        losses.lose(Loss.FILES, count=int(np.count_nonzero(~readable)))
        self._operations = files["operations"]
        self._private = files["private"]

    def private_data(self, operations: Iterable[str]) -> Addresses:
        """
        Return ``private_data`` of the files with these ``struct file_operations``.

        :param operations: Names of global variables; those that this kernel lacks are
            skipped.
        :return: Non-NULL addresses, ascending and unique.
        """
        wanted = np.zeros(len(self._operations), np.bool_)
        for name in operations:
            with suppress(MissingError):
                wanted |= self._operations == find_variable(self._prog, name).address_
        chosen = self._private[wanted]
        return distinct(chosen[chosen != 0])


def _file_addresses(reader: Reader, losses: LossLog) -> Addresses:
    holders = distinct(processes(reader, losses).files)
    holders = holders[holders != 0]
    small, has_small = _small_tables(reader, holders)
    large, known = _rows(reader, _HOLDER_TYPE, _HOLDER, holders[~has_small])
    tables, readable = _rows(
        reader, _TABLE_TYPE, _TABLE, distinct(large["table"][known])
    )
    found, lost = [distinct(small)], np.count_nonzero(~known)
    lost += np.count_nonzero(~readable)
    arrays, sizes = tables["files"][readable], tables["size"][readable]
    most = reader.most(8)
    # Damaged sizes may add up to all memory: arrays are read in parts.
    parts = np.cumsum(sizes, dtype=np.float64) // _PART
    starts = np.flatnonzero(np.diff(parts, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(sizes)]):
        addresses, rows, whole = reader.read_arrays(
            arrays[start:end], sizes[start:end].astype(np.uint64), most
        )
        most -= len(addresses)
        # With a damaged size the array runs into other data, which are not pointers.
        whole[rows[addresses % np.uint64(8) != 0]] = False
        found.append(distinct(addresses[whole[rows]]))
        lost += np.count_nonzero(~whole)
    losses.lose(Loss.DESCRIPTORS, count=int(lost))
    pointers = np.concatenate(found)
    return distinct(pointers[pointers != 0])


def _small_tables(
    reader: Reader, holders: Addresses
) -> tuple[Addresses, npt.NDArray[np.bool_]]:
    """
    Read the embedded tables, ``files_struct.fdtab``, of the holders that use them.

    Most do, as they never had many files open. Table and holder are read at once.

    :param holders: Addresses of ``struct files_struct``.
    :return: The pointers in all these tables, and whether each holder uses its own.
    """
    type_ = find_type(reader.prog, _HOLDER_TYPE)
    table, array = (offset_of(type_, name) for name in ("fdtab", "fd_array"))
    rows, known = _rows(reader, _HOLDER_TYPE, _SMALL, holders)
    pointers = rows["array"]
    small = known & (rows["table"] == holders + np.uint64(table))
    small &= rows["files"] == holders + np.uint64(array)
    small &= rows["size"] == pointers.shape[1]
    small &= ~(pointers & np.uint64(7)).any(axis=1)
    return pointers[small].ravel(), small


def _rows(
    reader: Reader, type_name: str, members: Members, addresses: Addresses
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    layout = struct_layout(reader, type_name, members)
    if layout is None:
        raise MissingError(f"{type_name} has none of the members")
    return read_rows(reader, layout, addresses)


_RINGS = ("io_uring", "perf_event_list")


class FileTables(Struct, frozen=True):
    """Pointers in the ``struct task_struct`` of each thread group leader."""

    files: Addresses
    """Address of its ``struct files_struct``; 0 if it has none."""

    frag_pages: Addresses
    """Address of the struct page in its ``task_frag``; 0 if it has none."""

    io_uring: Addresses
    """Address of its ``struct io_uring_task``; 0 if it has used no ring."""

    perf_events: Addresses
    """Address of the list of the perf events that it opened; 0 if it is empty."""


def processes(reader: Reader, losses: LossLog) -> FileTables:
    """Read these pointers of all processes, once per reader."""
    return reader.once(processes, lambda: _processes(reader, losses))


def _processes(reader: Reader, losses: LossLog) -> FileTables:
    prog = reader.prog
    task = find_type(prog, "struct task_struct")
    tasks = member_of(task, "tasks").offset
    offsets = [member_of(task, "files").offset, offset_of(task, "task_frag.page")]
    # Some kernels are configured without io_uring or perf.
    rings = [name for name in _RINGS if task.has_member(name)]
    offsets += [member_of(task, name).offset for name in rings]
    # Read only from the first to the last of these members.
    first, last = min(*offsets, tasks), max(*offsets, tasks + 8)
    init = find_variable(prog, "init_task").address_
    records = changing_list(
        reader,
        init + tasks,
        tasks - first,
        last + 8 - first,
        {init + first},
        "the list of processes",
        losses,
    )
    starts = [offset - first for offset in offsets]
    parts: list[bytes] = []
    addresses: list[int] = []
    for address, data in records:
        addresses.append(address - first)
        parts += [data[start : start + 8] for start in starts]
    words = np.frombuffer(b"".join(parts), np.uint64).reshape(-1, len(offsets))
    none = np.zeros(len(words), np.uint64)
    found = dict(zip(rings, words.T[2:], strict=True))
    events = none
    if "perf_event_list" in found:
        heads = np.array(addresses, np.uint64) + np.uint64(offsets[-1])
        firsts = found["perf_event_list"]
        events = np.where((firsts != heads) & (firsts != 0), heads, none)
    return FileTables(words[:, 0], words[:, 1], found.get("io_uring", none), events)


# --- Paths of directory entries, many at once, as /proc/PID/fd shows them.
#
# fs/d_path.c: from an entry up to the root of its mount, then from its mount point on,
# up to the root mount.


Place = tuple[int, int]
"""A ``struct path``: addresses of its ``struct vfsmount`` and ``struct dentry``."""

MAX_DEPTH = 2048
"""Maximum number of steps to the root: a path has PATH_MAX bytes at most, so that a
longer walk is a loop."""

_MAX_MOUNTS = 64
"""Maximum number of mounts of a file system that are read: the first one visible to
programs comes early."""

_MINOR_BITS = 20
"""MINORBITS (include/linux/kdev_t.h)."""

_ERR_PTRS = (1 << 64) - 4095
"""The lowest ERR_PTR (MAX_ERRNO)."""

NAME_MAX = 255
_INLINE = ("d_shortname.string", "d_iname")
"""The buffer for short names within the entry: the first since "dcache: back inline
names with a struct-wrapped array of unsigned long" (in v6.14)."""

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
    # ->mnt_flags") (in v6.18) replaced the list of mounts by pointers to the next.
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

        This is the oldest in the mount namespace of the init task; else the oldest in
        any namespace; else one internal to the kernel, which may have no path.

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
        """Read the current entries and mounts of all walks, each once."""
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
            length = min(int(found["length"][row]), NAME_MAX)
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


def device_number(device: int) -> str:
    """Return a ``dev_t`` as ``MAJOR:MINOR``."""
    return f"{device >> _MINOR_BITS}:{device & (1 << _MINOR_BITS) - 1}"


# --- Paths of control groups of the default hierarchy, as /proc/PID/cgroup shows them.
#
# kernel/cgroup/cgroup.c and fs/kernfs: a group is a kernfs directory, which stores its
# name and a pointer to its parent.


DELETED = " (deleted)"
"""Suffix of the path of a group that has been removed."""

_CGROUP = {"node": ("kn",), "flags": ("self.flags",)}
_NODE = {
    # Linux kernel commit 633488947ef6 ("kernfs: Use RCU to access
    # kernfs_node::parent.") (in v6.15)
    "parent": ("__parent", "parent"),
    "name": ("name",),
}

Nodes = dict[int, tuple[int, str]]
"""Maps the address of a ``struct kernfs_node`` to its parent's address and its name."""


def cgroup_paths(
    reader: Reader, cgroups: Addresses, losses: LossLog
) -> list[str | None]:
    """Return the path of each ``struct cgroup``; ``None`` if a part cannot be read.

    The path of a removed group ends with :data:`DELETED`, as the kernel writes it.
    Bytes that are not UTF-8 are escaped.
    """
    groups = read_structs(reader, "struct cgroup", _CGROUP, cgroups, losses)
    starts = groups["node"].astype(np.uint64)
    nodes = _read_nodes(reader, starts, losses)
    online = reader.once("CSS_ONLINE", lambda: _online(reader.prog))
    paths: list[str | None] = []
    for readable, start, flags in zip(
        groups.readable.tolist(), starts.tolist(), groups["flags"].tolist(), strict=True
    ):
        path = _path(nodes, start) if readable else None
        if readable and path is None:
            losses.lose(Loss.CGROUP_PATHS, "cannot read the path of a control group")
        if path is not None and not flags & online:
            path += DELETED
        paths.append(path)
    return paths


def _online(prog: drgn.Program) -> int:
    flag: int = find_constant(prog, "CSS_ONLINE").value_()
    return flag


def _read_nodes(reader: Reader, starts: Addresses, losses: LossLog) -> Nodes:
    """Read directories and all their ancestors, a level at a time."""
    nodes: Nodes = {}
    level = distinct(starts[starts != 0])
    for _ in range(MAX_DEPTH):
        if not len(level):
            break
        read = read_structs(reader, "struct kernfs_node", _NODE, level, losses)
        parents = read["parent"].astype(np.uint64)
        for row in np.flatnonzero(read.readable).tolist():
            name = _name(reader, int(read["name"][row]), losses)
            if name is not None:
                nodes[int(level[row])] = int(parents[row]), name
        above = {*parents[read.readable].tolist()} - {0, *nodes}
        level = np.array(sorted(above), np.uint64)
    return nodes


def _path(nodes: Nodes, node: int) -> str | None:
    names: list[str] = []
    while node in nodes and len(names) < MAX_DEPTH:
        node, name = nodes[node]
        if not node:
            return "/" + "/".join(reversed(names))
        names.append(name)
    return None


def _name(reader: Reader, address: int, losses: LossLog) -> str | None:
    try:
        return read_string(reader, address, NAME_MAX)
    except UNREADABLE as error:
        losses.lose(Loss.CGROUP_NAMES, f"cannot read a control group's name: {error}")
        return None
