# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-whatis: what lies at some addresses."""

from typing import Annotated, ClassVar, Literal

from msgspec import Struct, field

from msatools.kernel.report import ADDED, Report
from msatools.locks.report import LockTypeName, OwnerConfidence
from msatools.program.model import Address

Kind = Literal[
    "task",
    "stack",
    "slab",
    "page",
    "percpu",
    "symbol",
    "vmalloc",
    "memory",
    "user",
    "poison",
    "unmapped",
    "unknown",
]
"""The most specific of what is known: a ``task_struct``, a kernel stack, an object of a
slab cache, a ``struct page``, per-CPU memory, a function or variable, another area of
vmalloc, a page of memory, memory of a process, a value that the kernel writes to mark
memory as invalid, an address that nothing is mapped at, or none of these."""


class Symbol(Struct, frozen=True, kw_only=True):
    """The function or variable that contains an address."""

    name: str
    offset: int
    """Offset of the address in it."""

    module: str | None
    """Name of the module; null for the kernel itself."""

    freed: bool
    """Whether the kernel freed its memory after boot: it is for something else now."""


class Task(Struct, frozen=True, kw_only=True):
    """A task, by its ``struct task_struct``."""

    pid: int
    comm: str
    address: Address
    """Address of its struct task_struct."""

    standing: Annotated[str | None, ADDED] = None
    """How it stands with the scheduler, such as ``runs on CPU 1``, ``waits for CPU 2``
    or ``throttled by …``; null if it sleeps, or for an idle task."""


class StackPlace(Struct, frozen=True, kw_only=True):
    """The place of an address in the kernel stack of a task."""

    pid: int
    comm: str
    start: Address
    """Lowest address of the stack."""

    bytes: int
    offset: int
    """Offset of the address from the start; negative in the guard page."""

    where: Literal["frame", "unused", "registers", "guard", "unknown"]
    """In a frame; below the stack pointer, where only remains of earlier calls are;
    among the registers of user mode, at its end; in the guard page below the stack, at
    which an overflow ends; or unknown, as the task runs."""

    frame: int | None
    """Number of the frame, 0 for the innermost; null unless it is in one."""

    function: str | None
    """Function of the frame; null unless the address is in one."""

    next_function: str | None
    """Function of the next frame, if the address may be in that: without debug info,
    it is not known on arm64 where a frame ends. Else null."""


class SlabPlace(Struct, frozen=True, kw_only=True):
    """An object of a slab cache."""

    cache: str
    """Name of the cache; of merged caches, that of the first."""

    object: Address
    """Address of the object."""

    bytes: int
    """Bytes from one object to the next."""

    offset: int
    """Offset of the address in the object."""

    allocated: bool | None
    """Whether it is allocated; null if the free objects cannot be read."""

    merged: int
    """Number of other caches that share this one."""

    merged_names: tuple[str, ...]
    """Names of these, as far as they are known."""

    object_bytes: int | None
    """Bytes of an object without padding and debug data; null if unknown. An address
    after these is in no object."""

    points_to: Annotated[tuple[str, ...], ADDED] = ()
    """Functions and variables that an object of a general cache (kmalloc) points to,
    those of modules first: whose it is."""


class PageFile(Struct, frozen=True, kw_only=True):
    """The part of a file that a page caches."""

    name: str
    """Path, or another name of what has none."""

    inode: int
    offset: int | None
    """Offset of the page in the file, in bytes; null for a hugetlb page."""

    fstype: str
    device: str | None
    """Name of the block device; null if its file system has none."""


class PageMapper(Struct, frozen=True, kw_only=True):
    """A process that maps a page."""

    pid: int
    comm: str
    address: Address
    """Address of the page in its memory."""


class TableOwner(Struct, frozen=True, kw_only=True):
    """A process that a page table is of."""

    pid: int
    comm: str
    start: Address
    """First address of its memory that the table maps."""

    bytes: int
    """Size of what the table maps."""


class Page(Struct, frozen=True, kw_only=True):
    """A page of physical memory, and what is in it."""

    pfn: int
    page_class: str = field(name="class")
    """Class as in msa-memstat, such as ``cache.file``."""

    owner: str | None
    """What it belongs to, as text; null if unknown, or if it has no owner."""

    flags: tuple[str, ...]
    """Flags of its struct page, and of its compound page if that has one."""

    order: int | None
    """Order of the free block or compound page that it is part of; null if unknown."""

    node: int | None
    references: int | None
    """Reference count of its page or compound page."""

    cgroup: str | None
    """Control group that it is charged to; null if to none."""

    is_guess: Annotated[bool, ADDED] = False
    """Whether its class follows from its looks alone, and it may be another: before
    v6.14 compound pages of a driver look like a large kmalloc."""

    file: Annotated[PageFile | None, ADDED] = None
    """Part of a file that it caches."""

    mappers: Annotated[tuple[PageMapper, ...] | None, ADDED] = None
    """Processes that map it; not all of them if there are many."""

    cache: Annotated[str | None, ADDED] = None
    """Slab cache that it is a slab of."""

    table_owners: Annotated[tuple[TableOwner, ...] | None, ADDED] = None
    """Processes that it is a page table of, if there are any; several share those of
    hugetlb pages."""


class VmallocArea(Struct, frozen=True, kw_only=True):
    """An area of the kernel's vmalloc range."""

    start: Address
    """Lowest address of the area."""

    bytes: int
    use: str
    """What it is for: ``vmalloc``, ``vmalloc_user``, ``ioremap``, ``vmap``,
    ``vm_map_ram``, ``reserved``."""

    caller: str | None
    """Function that allocated it; null if the kernel does not record it."""

    offset: int
    """Offset of the address in it."""

    guard: bool
    """Whether the address is in the page at its end at which nothing is mapped."""

    physical: Address | None
    """Physical address of the device memory that is mapped there; null for RAM."""


class PerCpuPlace(Struct, frozen=True, kw_only=True):
    """The place of an address in per-CPU memory."""

    cpu: int | None
    """The CPU whose copy it is; null for an address of no CPU, as in a pointer."""

    variable: str | None
    """Name of the variable; null for memory that was allocated later."""

    offset: int
    """Offset of the address in the variable or the allocation."""

    pointer: Address
    """The per-CPU pointer: the same for all CPUs."""

    bytes: int | None
    """Bytes of the allocation; null for a variable, or if not known."""

    allocated: bool | None
    """Whether it is allocated; null if not known."""


class PageStruct(Struct, frozen=True, kw_only=True):
    """A ``struct page`` in the memmap."""

    pfn: int
    """The page frame that it describes."""

    offset: int
    """Offset of the address in it."""


class UserPlace(Struct, frozen=True, kw_only=True):
    """The place of an address in the memory of a process."""

    pid: int
    comm: str
    mapping: str | None
    """What is mapped there: the path of a file, ``[heap]``, ``[stack]``, ``[anon]``;
    null if nothing is."""

    offset: int | None
    """Offset of the address in the file, or in the mapping if that is of no file; null
    if nothing is mapped."""

    start: Address | None
    """Start of the mapping."""

    end: Address | None
    """End of the mapping."""

    protection: str | None
    """As in /proc/PID/maps: ``r-xp``."""

    state: Literal["mapped", "swapped", "absent", "none", "unknown"]
    """Whether the process has a page there, in memory or in swap, or not (yet);
    ``none`` if it has no memory, as a kernel thread, or one that has exited."""


class AddressAnswer(Struct, frozen=True, kw_only=True):
    """What is known of one address."""

    asked: str
    """The address as it was written."""

    address: Address | None
    """Virtual address; null for memory that has none, and for an unknown symbol."""

    kind: Kind
    """The most specific of what is known: one of the parts below, or ``memory`` for a
    page, ``unmapped``, or ``unknown``."""

    text: str
    """What lies there, in one line."""

    readable: bool | None
    """Whether the byte at the address is in the dump; null if it was not tried."""

    symbol: Annotated[Symbol | None, ADDED] = None
    task: Annotated[Task | None, ADDED] = None
    stack: Annotated[StackPlace | None, ADDED] = None
    slab: Annotated[SlabPlace | None, ADDED] = None
    page_struct: Annotated[PageStruct | None, ADDED] = None
    percpu: Annotated[PerCpuPlace | None, ADDED] = None
    vmalloc: Annotated[VmallocArea | None, ADDED] = None
    user: Annotated[UserPlace | None, ADDED] = None
    page: Annotated[Page | None, ADDED] = None
    """The page of memory at the address; of a struct page, the page it describes."""

    type: Annotated[str | None, ADDED] = None
    """Type of the object or variable, if it is certain."""

    member: Annotated[str | None, ADDED] = None
    """Member of that type at the address."""

    object: Annotated[str | None, ADDED] = None
    """What the object is for: a path, a process, a device."""

    lock: Annotated[str | None, ADDED] = None
    """ID of the lock at the address, as in ``locks``."""


class LockOwner(Struct, frozen=True, kw_only=True):
    """An owner of a lock."""

    pid: int
    comm: str
    confidence: OwnerConfidence


class LockThere(Struct, frozen=True, kw_only=True):
    """A lock that lies at an address that was asked about."""

    id: str
    """Type and address, as in msa-locks."""

    type: LockTypeName
    address: Address
    """Address of the lock; of a futex, in the memory of the process asked about."""

    owners: tuple[LockOwner, ...]
    """Tasks that hold it, certainly or probably."""

    waiters: tuple[int, ...] | None
    """IDs of the waiters, in the order of the queue; null if it has no list of them."""

    readers: int | None
    """Number of readers; null if it does not count them."""


class WhatisReport(Report, frozen=True, kw_only=True):
    """What lies at some addresses."""

    schema: ClassVar[str] = "msatools.whatis/1"

    answers: tuple[AddressAnswer, ...]
    """One answer for each address, in the order of the arguments."""

    locks: tuple[LockThere, ...]
    """The locks at these addresses."""
