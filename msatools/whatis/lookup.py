# SPDX-License-Identifier: LGPL-2.1-or-later

"""Readers that all answers share; members and purposes of structures; kernel maps."""

from collections.abc import Callable, Iterator
from functools import cached_property

import drgn
import numpy as np
from drgn.helpers.common.type import member_at_offset
from msgspec import Struct

from msatools.errors import LOST, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.code import kernel_symbol
from msatools.kernel.files import Paths
from msatools.kernel.mm import PageTables
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import MAX_ADDRESS, Addresses, Reader, read_string
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.locks.context import LockContext
from msatools.locks.described import of_file, of_path, process_of
from msatools.locks.places import SlabObject, Variables, lock_places
from msatools.locks.report import LockTypeName
from msatools.locks.struct_reader import Layout
from msatools.locks.wait_snapshot import standing
from msatools.memory.classes import CLASSES, PageClass, PageLayout, page_layout
from msatools.memory.content_hints import SymbolNames
from msatools.memory.memmap import MemmapRange, memmap_ranges
from msatools.program.arch import Piece, arch_of
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.selfdesc.find import ask, find_variable
from msatools.tasks.identity import comm_text
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import stack_bytes
from msatools.whatis.model import Page, Task

# --- The readers that all answers share; each is made when it is first needed.


_TASK = "struct task_struct"


class Lookup:
    """Readers and tables for all addresses of a report, each made on first use."""

    def __init__(self, reader: Reader, clocks: Clocks, losses: LossLog) -> None:
        self.reader = reader
        self.prog = reader.prog
        self.losses = losses
        self._clocks = clocks

    @cached_property
    def structs(self) -> Layout:
        """Reads members of single structures."""
        return Layout(self.reader)

    @cached_property
    def page_size(self) -> int:
        """Bytes of a page."""
        return int(find_variable(self.prog, "PAGE_SIZE").value_())

    @cached_property
    def page(self) -> PageLayout:
        """Layout of ``struct page``."""
        return page_layout(self.prog)

    @cached_property
    def memmap(self) -> list[MemmapRange]:
        """Ranges of the memmap; none if it is lost."""
        try:
            return memmap_ranges(self.reader, self.page, self.losses)
        except LOST:
            return []

    @cached_property
    def tables(self) -> PageTables | None:
        """The kernel's page tables; ``None`` if their format is unknown."""
        try:
            return PageTables(self.reader, self.losses)
        except MissingError:
            return None

    @cached_property
    def symbols(self) -> SymbolNames:
        """Functions and variables of the kernel and of modules."""
        return SymbolNames(self.reader, self.losses)

    @cached_property
    def variables(self) -> Variables:
        """Per-CPU variables."""
        return Variables(self.structs, self.losses)

    @cached_property
    def tasks(self) -> TaskTable:
        """All threads but the idle tasks."""
        return TaskReader(self.reader).read_all(self.losses)

    @cached_property
    def stacks(self) -> dict[int, int]:
        """Maps the lowest address of each kernel stack to its ``task_struct``."""
        stacks = self.tasks["stack"].tolist(), self.tasks["address"].tolist()
        idle = read_structs(
            self.reader, _TASK, {"stack": ("stack",)}, self._idle, self.losses
        )
        own = idle["stack"].tolist(), self._idle.tolist()
        found = dict(zip(*own, strict=True)) | dict(zip(*stacks, strict=True))
        found.pop(0, None)
        return found

    @cached_property
    def paths(self) -> Paths:
        """Paths of files."""
        return Paths(self.reader, self.losses)

    @cached_property
    def stack_bytes(self) -> int:
        """Size of a kernel stack."""
        return stack_bytes(self.prog)

    @cached_property
    def _idle(self) -> Addresses:
        """Addresses of the idle tasks."""
        queues = read_percpu(self.reader, self.losses).addresses("runqueues")
        members = {"idle": ("idle",)}
        read = read_structs(self.reader, "struct rq", members, queues, self.losses)
        idle: Addresses = read["idle"].astype(np.uint64)
        found: Addresses = idle[idle != 0]
        return found

    @cached_property
    def locks(self) -> LockContext:
        """Context for reading locks and naming structures, without waits of tasks."""
        return LockContext(
            self.structs, self.tasks, self.losses, self._clocks, alone=True
        )

    def task(self, address: int) -> Task:
        """Return the task of a ``struct task_struct``.

        :raises drgn.FaultError: if it cannot be read
        """
        pid = self.structs.member(address, "task_struct", "pid")
        comm = self.structs.text(address, "task_struct", "comm")
        rows = np.flatnonzero(self.tasks["address"] == np.uint64(address))
        return Task(
            pid=pid,
            comm=comm,
            address=Address(address),
            standing=standing(self.locks, int(rows[0])) if len(rows) else None,
        )

    def process_of(self, mm: int) -> Task | None:
        """Return a process with an address space, its leader if there is one.

        :param mm: Address of its ``struct mm_struct``.
        """
        tasks = self.tasks
        users = np.flatnonzero(tasks["mm"] == np.uint64(mm))
        if not mm or not len(users):
            return None
        leaders = users[tasks.leaders[users]]
        record = tasks.records[(leaders if len(leaders) else users)[0]]
        return Task(
            pid=int(record["pid"]),
            comm=comm_text(record["comm"]),
            address=Address(int(record["address"])),
        )


# --- Members of types at an offset, and the locks among them.


LOCKS: dict[str, LockTypeName] = {
    "mutex": "mutex",
    "ww_mutex": "ww_mutex",
    "rw_semaphore": "rwsem",
    "semaphore": "semaphore",
    "rt_mutex": "rt_mutex",
    "rt_mutex_base": "rt_mutex",
    "percpu_rw_semaphore": "percpu_rwsem",
    "spinlock": "spinlock",
    "raw_spinlock": "spinlock",
    "qspinlock": "spinlock",
    "completion": "completion",
    "wait_queue_head": "wait_queue",
}
"""Maps the tag of a lock's structure to its type."""

_STRUCTURES = (drgn.TypeKind.STRUCT, drgn.TypeKind.UNION)


class LockMember(Struct, frozen=True):
    """A lock that is a member of a structure, or a variable."""

    type: LockTypeName
    offset: int
    """Offset of the lock in the structure."""


def lock_at(type_: drgn.Type, offset: int) -> LockMember | None:
    """Return the outermost lock that contains the byte at an offset, if there is one.

    A mutex contains a spinlock and a queue, which are not of interest by themselves.
    """
    for start, inner in _around(type_, offset):
        if inner.kind == drgn.TypeKind.STRUCT and inner.tag in LOCKS:
            return LockMember(LOCKS[inner.tag], start)
    return None


def member_at(type_: drgn.Type, offset: int) -> str | None:
    """Return the name of the member at an offset, with the offset in the member.

    Several members of a union are all named: ``a or b``.

    :return: ``None`` if there is no member, or the type has none.
    """
    if type_.kind not in (*_STRUCTURES, drgn.TypeKind.ARRAY):
        return None
    name = ask(member_at_offset, type_, offset)
    return None if not name or name.startswith("<") else name


def _around(type_: drgn.Type, offset: int) -> Iterator[tuple[int, drgn.Type]]:
    """Yield the types that contain the byte at an offset, the outermost first.

    :return: Offset of each from the start of *type_*, and the inner type.
    """
    base, inner = 0, _bare(type_)
    while True:
        yield base, inner
        if inner.kind in _STRUCTURES and inner.is_complete():
            member = _member(inner, offset - base)
            if member is None:
                return
            base += member.bit_offset // 8
            inner = _bare(member.type)
        elif inner.kind == drgn.TypeKind.ARRAY and inner.length and _has_size(inner):
            size = drgn.sizeof(inner.type)
            base += min((offset - base) // size, inner.length - 1) * size
            inner = _bare(inner.type)
        else:
            return


def _member(type_: drgn.Type, offset: int) -> "drgn.TypeMember | None":
    """Return the member that contains an offset; in a union, the first."""
    for member in type_.members or ():
        start = member.bit_offset // 8
        try:
            size = drgn.sizeof(member.type)
        except TypeError:
            continue
        if start <= offset < start + max(size, 1) and size:
            return member
    return None


def _has_size(array: drgn.Type) -> bool:
    return bool(array.type.is_complete() and drgn.sizeof(array.type))


def _bare(type_: drgn.Type) -> drgn.Type:
    while type_.kind == drgn.TypeKind.TYPEDEF:
        type_ = type_.type
    return type_


# --- What structures are for: the file, process or device that they belong to.


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
"""Maps the tag of a structure to a function that describes one by its address. Each
raises FaultError if data that it needs cannot be read."""


# --- Where the kernel maps memory: the direct map, and its own image.


_NOT_FREED = tuple(
    CLASSES[code]
    for code in (
        PageClass.RESERVED,
        PageClass.EXCLUDED,
        PageClass.UNREADABLE,
        PageClass.HWPOISON,
    )
)


class KernelMap:
    """Converts between addresses and physical memory."""

    def __init__(self, prog: drgn.Program) -> None:
        self._prog = prog

    def direct(self, physical: int) -> int | None:
        """Return the direct map's address of physical memory; ``None``: it has none."""
        piece = self._direct_map
        if piece is None or not 0 <= physical - piece.physical < piece.size:
            return None
        return piece.start + physical - piece.physical

    def is_direct(self, address: int) -> bool:
        """Return whether an address is in the direct map: slabs are only there."""
        piece = self._direct_map
        return piece is not None and 0 <= address - piece.start < piece.size

    @cached_property
    def _direct_map(self) -> Piece | None:
        try:
            return arch_of(self._prog).direct_map(self._prog)
        except LOST:
            return None

    def in_image(self, physical: int) -> int | None:
        """Return the image's address of physical memory; ``None`` if it has none."""
        moved = arch_of(self._prog).image_offset(self._prog)
        if moved is None:
            return None
        address = (physical + moved) & MAX_ADDRESS
        start, end = self.image
        return address if start <= address < end else None

    @cached_property
    def image(self) -> tuple[int, int]:
        """Start and end of the kernel's image; 0 if unknown."""
        return self._between("_text", "_end")

    def _between(self, *labels: str) -> tuple[int, int]:
        """Return the addresses of two of the linker's labels; 0 if unknown."""
        try:
            start, end = (kernel_symbol(self._prog, name) for name in labels)
        except MissingError:
            return 0, 0
        return start, end

    def in_init(self, address: int) -> bool:
        """Return whether an address is in the image's part for boot, freed after it."""
        start, end = self._between("__init_begin", "__init_end")
        return start <= address < end


def is_freed(page: Page | None) -> bool:
    """Return whether a page of the kernel's image was freed after boot.

    What stays of the image is reserved: free_kernel_image_pages(), free_initmem().
    """
    return page is not None and page.page_class not in _NOT_FREED
