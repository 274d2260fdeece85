# SPDX-License-Identifier: LGPL-2.1-or-later

"""Addresses as users write or paste them, and the report of what lies there.

Nothing here needs a kernel.
"""

import re
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
    """Standing with the scheduler, such as ``runs on CPU 1``, ``waits for CPU 2``
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
    """Names of the other caches, as far as they are known."""

    object_bytes: int | None
    """Bytes of an object without padding and debug data; null if unknown. An address
    after these is in no object."""

    points_to: Annotated[tuple[str, ...], ADDED] = ()
    """Functions and variables that an object of a general cache (kmalloc) points to,
    those of modules first: whose it is."""


class PageFile(Struct, frozen=True, kw_only=True):
    """The part of a file that a page caches."""

    name: str
    """Path, or another name if the file has none."""

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
    """Whether the class is only likely: before v6.14, compound pages of a driver look
    like a large kmalloc."""

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
    """Use of the area: ``vmalloc``, ``vmalloc_user``, ``ioremap``, ``vmap``,
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


Space = Literal["kernel", "physical", "pfn", "user", "symbol"]

_HEX = r"(?:0[xX])?[0-9a-fA-F]{1,16}"
_NAME = r"[A-Za-z_][A-Za-z0-9_.$]*"

_PLAIN = re.compile(rf"({_HEX})")
_PHYSICAL = re.compile(rf"phys:({_HEX})")
_PFN = re.compile(r"pfn:(0[xX][0-9a-fA-F]{1,13}|[0-9]{1,16})")
_USER = re.compile(rf"([0-9]{{1,7}}):({_HEX})")
_OFFSET = re.compile(rf"({_NAME})\+({_HEX})(?:/{_HEX})?")
_SYMBOL = re.compile(_NAME)

_AROUND = "[]<>(),;"
"""Characters around an address in an oops, a stack trace, or a list."""


class AskedAddress(Struct, frozen=True):
    """An address that was asked about."""

    word: str
    """As it was written."""

    space: Space
    """What the address is: virtual, physical, a page frame number, of a process, or an
    offset from a symbol."""

    number: int
    """The address, page frame number or offset."""

    pid: int | None = None
    symbol: str | None = None


def looks_like_address(word: str) -> bool:
    """Return whether a word has the form of an address, and so is no path.

    A symbol is one only with an offset: ``jiffies+0``.
    """
    found = parse(word)
    return found is not None and (found.space != "symbol" or "+" in word)


def parse(word: str) -> AskedAddress | None:
    """Parse an address; return ``None`` if the word is not one.

    ================ =================================================================
    Written          Meaning
    ================ =================================================================
    ``ffff88800…``   virtual address, in hex with or without ``0x``; as in an oops,
                     ``[<ffffffff81000000>]``
    ``phys:ADDR``    physical address, in hex
    ``pfn:N``        page frame number, decimal unless it begins with ``0x``
    ``PID:ADDR``     address in the memory of a process
    ``NAME+OFFSET``  symbol and offset in hex, as in an oops: ``schedule+0x4c/0xf0``
    ================ =================================================================
    """
    bare = word.strip(_AROUND)
    # Kernels print addresses in front of colons, too.
    bare = bare.removesuffix(":")
    if found := _PLAIN.fullmatch(bare):
        return AskedAddress(word, "kernel", int(found[1], 16))
    if found := _PHYSICAL.fullmatch(bare):
        return AskedAddress(word, "physical", int(found[1], 16))
    if found := _PFN.fullmatch(bare):
        return AskedAddress(
            word, "pfn", int(found[1], 16 if "x" in bare.lower() else 10)
        )
    if found := _USER.fullmatch(bare):
        return AskedAddress(word, "user", int(found[2], 16), pid=int(found[1]))
    if found := _OFFSET.fullmatch(bare):
        return AskedAddress(word, "symbol", int(found[2], 16), symbol=found[1])
    if _SYMBOL.fullmatch(bare):
        return AskedAddress(word, "symbol", 0, symbol=bare)
    return None


# --- Options of a report of msa-whatis.


class WhatisOptions(Struct, frozen=True, kw_only=True):
    """What a report answers."""

    addresses: tuple[AskedAddress, ...]

    waits: bool = False
    """Whether to look through the waits of all tasks for locks in the objects found."""


# --- Values that the kernel writes to mark memory as invalid (include/linux/poison.h).
#
# They are no addresses. One in a register or an oops shows that the kernel used memory
# that was freed or not yet written, or read beyond an object.


_DELTA = 0xDEAD_0000_0000_0000
"""POISON_POINTER_DELTA: CONFIG_ILLEGAL_POINTER_VALUE of all 64-bit architectures here.
"""

_POINTERS = (
    (0x100, "LIST_POISON1", "next of an entry that was deleted from its list"),
    (0x122, "LIST_POISON2", "prev of an entry that was deleted from its list"),
    (0x200, None, ""),
    (0x300, "TIMER_ENTRY_STATIC", "list entry of a static timer"),
    (0x400, "TAIL_MAPPING", "mapping of a tail page of a compound page"),
    (0x500, "MUTEX_POISON_WW_CTX", "context of a ww_mutex that is gone"),
    (0x600, None, ""),
)
"""Distance from the delta, name and meaning of each pointer, ascending. Each covers the
range up to the next one: an access may be to a member some bytes further."""

_BYTES = {
    0x6B: ("POISON_FREE", "read from a freed slab object"),
    0x5A: ("POISON_INUSE", "read from slab memory that was never written"),
    0xA5: ("POISON_END", "read from the end of a slab object"),
    0xBB: ("SLUB_RED_INACTIVE", "read from the red zone of a free slab object"),
    0xCC: ("SLUB_RED_ACTIVE", "read from the red zone of a slab object, or init code"),
    0xAA: ("PAGE_POISON", "read from a freed page"),
}
"""Maps a byte that fills memory to its name and meaning."""

_FAR = 0x1000
"""Maximum offset of a member from a poisoned pointer."""


def poison_text(address: int) -> str | None:
    """Describe the poison that a value is, or is slightly above; else ``None``."""
    found = None
    for distance, name, meaning in _POINTERS:
        if address - _DELTA >= distance:
            found = None if name is None else (distance, name, meaning)
    if found is not None:
        distance, name, meaning = found
        return _text(name, address - _DELTA - distance, meaning)
    for byte, (name, meaning) in _BYTES.items():
        offset = address - int.from_bytes(bytes([byte]) * 8, "little")
        if 0 <= offset < _FAR:
            return _text(name, offset, meaning)
    return None


def _text(name: str, offset: int, meaning: str) -> str:
    return f"{name}{f'+{offset:#x}' if offset else ''}, a poison: {meaning}"
