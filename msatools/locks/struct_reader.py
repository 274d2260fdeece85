# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads members of structures, rings of waiters, trees of ranges, and stacks."""

import struct
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.code import kernel_symbol
from msatools.kernel.reader import PAGE, U32, U64, Addresses, Reader, decode_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import find_member, integer_format
from msatools.program.arch import MODULES_END, arch_of
from msatools.program.linear import KERNEL_HALF, code_start, kernel_start
from msatools.selfdesc.find import find_constant, find_type, number, vmcoreinfo

# --- Reads members of structures; each member and symbol is looked up once.


_ERRORS = (1 << 64) - 4096
"""The first of the addresses that are error codes (``MAX_ERRNO``)."""

_MODULES = {
    "journal_s": "jbd2",
    "mapped_device": "dm_mod",
    "dm_table": "dm_mod",
    "dm_target": "dm_mod",
    "target_type": "dm_mod",
    "dm_io": "dm_mod",
    "delay_c": "dm_delay",
    "dm_delay_info": "dm_delay",
    "loop_device": "loop",
    "nbd_device": "nbd",
    "nbd_config": "nbd",
    "nbd_sock": "nbd",
    "xfs_buf": "xfs",
    "xlog_in_core": "xfs",
    "xlog": "xfs",
    "xfs_cil": "xfs",
    "xfs_buftarg": "xfs",
    "btrfs_fs_info": "btrfs",
    "btrfs_fs_devices": "btrfs",
    "btrfs_device": "btrfs",
    "extent_buffer": "btrfs",
    "btrfs_transaction": "btrfs",
    "btrfs_root": "btrfs",
    "nfs_server": "nfs",
    "rpc_clnt": "sunrpc",
    "rpc_task": "sunrpc",
    "rpc_xprt": "sunrpc",
}
"""Maps structures of parts of the kernel that may be modules to the module's name."""


class _MemberBlock(NamedTuple):
    """Members of a structure that are read together."""

    start: int
    """Offset of the first member."""

    size: int
    """Bytes from there to the end of the last member."""

    values: tuple[tuple[struct.Struct, int], ...]
    """Format of each member, and its offset from *start*."""


class Layout:
    """Offsets and values of members of structures, and addresses of symbols."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._prog = reader.prog
        self.kernel_start = kernel_start(reader.prog)
        self.code_start = code_start(reader.prog)
        self._image = arch_of(reader.prog).image_range(reader.prog)
        self._member = lru_cache(maxsize=None)(self._find_member)
        self._offset = lru_cache(maxsize=None)(self._find_offset)
        self._block = lru_cache(maxsize=None)(self._find_block)
        self._size = lru_cache(maxsize=None)(self._find_size)
        self._symbol = lru_cache(maxsize=None)(self._find_symbol)
        self._flag = lru_cache(maxsize=None)(self._find_flag)

    @cached_property
    def page_size(self) -> int:
        """Size of a page."""
        return number(vmcoreinfo(self._prog).get("PAGESIZE", str(PAGE)))

    def data_pointers(self, words: npt.NDArray[np.uint64]) -> list[int]:
        """Return the words that may be addresses of data, in order, no duplicates."""
        start, end = (np.uint64(min(each, _ERRORS)) for each in self._image)
        chosen = (words >= np.uint64(self.kernel_start)) & (words < np.uint64(_ERRORS))
        data = words[chosen & ((words < start) | (words >= end))]
        return list(dict.fromkeys(data.tolist()))

    def is_data(self, address: int) -> bool:
        """Return whether an address may be of data outside of the kernel's image."""
        start, end = self._image
        return self.kernel_start <= address < _ERRORS and not start <= address < end

    def is_low_code(self, low: int) -> bool:
        """Return whether a number may be the low 32 bits of an address of code.

        On arm64 addresses of modules' code are not recognized.
        """
        start, end = self._image
        return (low - start) % (1 << 32) < min(end, MODULES_END) - start

    def offset(self, type_name: str, *members: str) -> int:
        """Return the offset of a member.

        :param members: Names that it may have, the newest first.
        :raises MissingError: if the structure has none of them, or its type is unknown
        """
        return self._offset(type_name, members)

    def has(self, type_name: str, *members: str) -> bool:
        """Return whether a structure has any of some members."""
        return self._member(type_name, members) is not None

    def size(self, type_name: str) -> int:
        """Return the size of a structure.

        :raises MissingError: if the type is unknown
        """
        return self._size(type_name)

    def symbol(self, name: str) -> int | None:
        """Return the address of a function or variable; ``None`` if unknown."""
        return self._symbol(name)

    def flag(self, name: str) -> int:
        """Return the value of an enumerator; 0 if this kernel has none of that name."""
        return self._flag(name)

    def word(self, address: int) -> int:
        """Read a pointer or other u64.

        :raises drgn.FaultError: if it cannot be read
        """
        value: int = U64.unpack(self.reader.read(address, 8))[0]
        return value

    def member(self, address: int, type_name: str, *members: str) -> int:
        """Read a member of a structure, with the size and sign of its type.

        If the member is a structure or an array, its first integer or pointer is read.
        An ``atomic_long_t`` is signed, even if the kernel keeps flags or a pointer in
        it.

        :param members: Names that it may have, the newest first.
        :raises drgn.FaultError: if it cannot be read
        :raises MissingError: if the structure has none of the members
        """
        return self._read(address, self._block(type_name, (members,)))[0]

    def members(
        self, address: int, type_name: str, *wanted: tuple[str, ...] | str
    ) -> tuple[int, ...]:
        """Read several members of a structure with one read: see :meth:`member`.

        :param wanted: Each member's name, or the names that it may have.
        :raises drgn.FaultError: if they cannot be read
        :raises MissingError: if the structure lacks one
        """
        return self._read(address, self._block(type_name, wanted))

    def _read(self, address: int, block: _MemberBlock) -> tuple[int, ...]:
        data = self.reader.read(address + block.start, block.size)
        return tuple(
            format_.unpack_from(data, offset)[0] for format_, offset in block.values
        )

    def nodes(self, head: int, most: int, *, back: bool = False) -> Iterator[int]:
        """Yield up to *most* nodes of a list, in order or from its end.

        Damage of the list is not detected, as callers look for one node and check each.
        To read whole lists, use :func:`msatools.kernel.walks.list_records`.

        :raises drgn.FaultError: if a node cannot be read
        """
        link = 8 * back
        node = self.word(head + link)
        for _ in range(most):
            if node in (0, head):
                return
            yield node
            node = self.word(node + link)

    def text(self, address: int, type_name: str, *members: str) -> str:
        """Read an array of characters in a structure.

        :raises drgn.FaultError: if it cannot be read
        :raises MissingError: if the structure has none of the members
        """
        member = self._require(type_name, members)
        start = address + member.address_
        return decode_string(self.reader.read(start, drgn.sizeof(member)))

    def _find_member(
        self, type_name: str, members: tuple[str, ...]
    ) -> drgn.Object | None:
        try:
            return find_member(self._type(type_name), members)
        except MissingError:
            return None

    def _find_offset(self, type_name: str, members: tuple[str, ...]) -> int:
        return int(self._require(type_name, members).address_)

    def _require(self, type_name: str, members: tuple[str, ...]) -> drgn.Object:
        """Return a member of a structure at address 0.

        :raises MissingError: if the structure has none of the members
        """
        member = self._member(type_name, members)
        if member is None:
            raise MissingError(f"struct {type_name} has no {' or '.join(members)}")
        return member

    def _find_block(
        self, type_name: str, wanted: tuple[tuple[str, ...] | str, ...]
    ) -> _MemberBlock:
        members = []
        for names in wanted:
            candidates = (names,) if isinstance(names, str) else names
            member = self._require(type_name, candidates)
            members.append((integer_format(member), int(member.address_)))
        start = min(offset for _, offset in members)
        end = max(offset + format_.size for format_, offset in members)
        values = tuple((format_, offset - start) for format_, offset in members)
        return _MemberBlock(start, end - start, values)

    def _find_size(self, type_name: str) -> int:
        size: int = drgn.sizeof(self._type(type_name))
        return size

    def _type(self, type_name: str) -> drgn.Type:
        name = f"struct {type_name}"
        try:
            return find_type(self._prog, name)
        except MissingError:
            if type_name not in _MODULES:
                raise
            return find_type(self._prog, name, _MODULES[type_name])

    def _find_flag(self, name: str) -> int:
        try:
            return int(find_constant(self._prog, name).value_())
        except MissingError:
            return 0

    def _find_symbol(self, name: str) -> int | None:
        try:
            return kernel_symbol(self._prog, name)
        except MissingError:
            return None


# --- Red-black trees of ranges of addresses, searched for the one with an address.
#
# drgn's rb_find() does not end in a damaged tree that leads back to itself.


_MAX_DEPTH = 128
"""More than the depth of any red-black tree that fits into memory."""


def find_range(
    layout: Layout, node: int, type_name: str, link: str, ends: tuple[str, str], at: int
) -> int:
    """Find the structure whose range contains an address.

    :param node: Address of the ``struct rb_node`` at the root; 0 for an empty tree.
    :param type_name: Tag of the structures.
    :param link: Their member of type ``struct rb_node``.
    :param ends: Their members with the first address, and with the one after the last.
    :param at: The address to find.
    :return: Address of the structure; 0 if there is none.
    :raises UNREADABLE: if a part cannot be read, or the tree has a loop
    """
    links = f"{link}.rb_left", f"{link}.rb_right"
    for _ in range(_MAX_DEPTH):
        if not node:
            return 0
        found = node - layout.offset(type_name, link)
        start, end, left, right = layout.members(found, type_name, *ends, *links)
        if start <= at < end:
            return found
        node = left if at < start else right
    raise DamagedDataError(f"a loop of {type_name}", node)


# --- Follows rings of waiters (include/linux/list.h).
#
# On a running kernel a ring may change while it is read. So next and prev of two
# neighbours have to point at each other.


_TASK_ALIGNED = 64
"""Alignment of tasks in memory (``L1_CACHE_BYTES``, ``ARCH_MIN_TASKALIGN``)."""


def may_be_task(address: int | None) -> bool:
    """Return whether an address may be that of a ``struct task_struct``."""
    return (
        address is not None and address >= KERNEL_HALF and not address % _TASK_ALIGNED
    )


class Entry(Struct, frozen=True):
    """A node of a ring, read as if it were a waiter."""

    node: int
    next: int
    previous: int

    task: int | None
    """Address of the task; ``None`` if only the node itself could be read."""

    kind: int
    """The low 32 bits of the member that identifies the kind of waiter; 0 if the type
    has no such member."""


class Shape(Struct, frozen=True):
    """The layout of a kind of waiter; offsets are from its list node."""

    node: int
    """Offset of the list node in the structure."""

    start: int
    """Offset of the part that is read."""

    size: int
    """Bytes of the part that is read."""

    task: int
    kind: int | None

    @classmethod
    def of(
        cls, layout: Layout, type_name: str, node: str, task: str, kind: str = ""
    ) -> "Shape":
        """Return the layout of a type.

        :raises MissingError: if the type or a member is unknown
        """
        node_offset = layout.offset(type_name, node)
        task_offset = layout.offset(type_name, task) - node_offset
        kind_offset = layout.offset(type_name, kind) - node_offset if kind else None
        start = min(0, task_offset, kind_offset or 0)
        end = max(16, task_offset + 8, 0 if kind_offset is None else kind_offset + 4)
        return cls(node_offset, start, end - start, task_offset, kind_offset)


class Ring(Struct, frozen=True):
    """A ring that was followed from one of its nodes."""

    entries: list[Entry]
    """The nodes, the start node first: all of a whole ring in order, otherwise those
    that were read."""

    whole: bool = False
    """Whether all nodes were read."""

    cut: bool = False
    """Whether there were too many nodes to read them all."""

    @property
    def nodes(self) -> set[int]:
        """The addresses of the nodes."""
        return {entry.node for entry in self.entries}

    def begin(self, node: int) -> list[Entry]:
        """Return the entries of a whole ring in order, starting with a node."""
        index = [entry.node for entry in self.entries].index(node)
        return self.entries[index:] + self.entries[:index]

    def after(self, node: int) -> list[Entry]:
        """Return the other entries of a whole ring in order, starting after a node."""
        return self.begin(node)[1:]


class Rings:
    """Follows rings of one kernel."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    def is_linked(self, node: int, following: int, previous: int) -> bool:
        """Return whether the neighbours of a node point back at it."""
        if min(following, previous) < KERNEL_HALF or (following | previous) % 8:
            return False
        try:
            return (
                self._layout.word(following + 8) == node
                and self._layout.word(previous) == node
            )
        except UNREADABLE:
            return False

    def walk(self, head: int, shape: Shape, limit: int) -> list[Entry] | None:
        """
        Return the waiters on a list, in its order.

        :param head: Address of the list head.
        :param limit: Maximum number of waiters; a note is made if there are more.
        :return: ``None`` if there are more, or if the list cannot be read.
        """
        entries: list[Entry] = []
        try:
            first, last = self._layout.reader.words(head, 2).tolist()
            entry = Entry(head, first, last, None, 0)
            while entry.next != head:
                if len(entries) == limit:
                    self.note_cut(limit)
                    return None
                found = self._neighbour(entry, entry.next, shape, forwards=True)
                if found is None:
                    self._lose("a list of waiters changed, or is damaged")
                    return None
                entry = found
                entries.append(entry)
        except UNREADABLE as error:
            self._lose(f"cannot read a list of waiters: {error}")
            return None
        if last != entry.node:
            self._lose("a list of waiters changed, or is damaged")
            return None
        return entries

    def follow(
        self, node: int, shape: Shape, limit: int, first: Entry | None = None
    ) -> Ring:
        """
        Follow a ring forwards from a node, and, if it is too long, backwards as well.

        The ring is neither whole nor cut if the pointers of its nodes are inconsistent,
        or a node could not be read.

        :param limit: Maximum number of other nodes to read.
        :param first: The entry of *node*, if *node* may not be on a ring at all.
        """
        ahead: list[Entry] = []
        behind: list[Entry] = []
        back = limit // 3
        try:
            ahead.append(first or self._entry(node, shape))
            for _ in range(limit - back):
                if ahead[-1].next == node:
                    return Ring(ahead, whole=ahead[0].previous == ahead[-1].node)
                found = self._neighbour(ahead[-1], ahead[-1].next, shape, True)
                if found is None:
                    return Ring(ahead)
                ahead.append(found)
            before = ahead[0]
            for _ in range(back):
                if before.previous == ahead[-1].node:
                    return Ring(ahead + behind[::-1], whole=True)
                found = self._neighbour(before, before.previous, shape, False)
                if found is None:
                    return Ring(ahead + behind)
                behind.append(found)
                before = found
        except UNREADABLE as error:
            # A node without readable neighbours may never have been on a ring.
            if first is None or len(ahead) > 1:
                self._lose(f"cannot read a ring of waiters: {error}")
            return Ring(ahead + behind)
        return Ring(ahead + behind, cut=True)

    def note_cut(self, limit: int) -> None:
        """Make a note that not all waiters were read."""
        self._losses.note(
            "waiters-not-counted",
            f"more than {limit} wait for one lock; they were not counted",
        )

    def _neighbour(
        self, entry: Entry, node: int, shape: Shape, forwards: bool
    ) -> Entry | None:
        """Read the next or the previous entry.

        :return: ``None`` if it does not point back at *entry*.
        :raises drgn.FaultError: if it cannot be read
        """
        found = self._entry(node, shape) if node >= KERNEL_HALF else None
        if found is None or entry.node != (found.previous if forwards else found.next):
            return None
        return found

    def _entry(self, node: int, shape: Shape) -> Entry:
        """Read an entry.

        :raises drgn.FaultError: if the node itself cannot be read
        """
        try:
            data = self._layout.reader.read(node + shape.start, shape.size)
        except UNREADABLE:
            # The node may be a list head at the end of its page.
            following, previous = self._layout.reader.words(node, 2).tolist()
            return Entry(node, following, previous, None, 0)
        following, previous, task = (
            U64.unpack_from(data, offset - shape.start)[0]
            for offset in (0, 8, shape.task)
        )
        kind = 0
        if shape.kind is not None:
            (kind,) = U32.unpack_from(data, shape.kind - shape.start)
        return Entry(node, following, previous, task, kind)

    def _lose(self, text: str) -> None:
        self._losses.lose(Loss.WAITERS, text)


# --- Finds structures on the stack of a sleeping task: waiters, timers, polls, faults.
#
# The offset of such a structure on the stack is unknown, so the whole stack, some
# hundred words, is searched. A structure is recognized by its pointer to the task, or
# to a function that identifies its type. Its other members have to be consistent with
# that.


_MAX_ENTRIES = 64
"""More entries than ``struct poll_wqueues`` has inline."""

_MAX_USER = 1 << 56
_ENQUEUED = 1


class WaitEntry(Struct, frozen=True):
    """A ``struct wait_queue_entry`` that is on a wait queue."""

    address: int
    function: int
    """The wake function, which identifies the kind of entry."""

    next: int
    """Address of the next list node: of another entry, or of the list head."""

    previous: int


class Timer(Struct, frozen=True):
    """A ``struct hrtimer`` that will end the wait."""

    expires_ns: int
    base: int
    """Address of its ``struct hrtimer_clock_base``, which identifies the clock."""


class Fault(Struct, frozen=True):
    """A page fault, from its ``struct vm_fault``."""

    vma: int
    address: int
    """Address of the page."""

    page: int
    """Index of the page in the mapped file."""

    by_vma: bool
    """Whether the task has the lock of the mapping instead of ``mmap_lock``: "mm: add
    FAULT_FLAG_VMA_LOCK flag" (in v6.4)."""


class OwnStack:
    """The words on the stack of a sleeping task, from its stack pointer on."""

    def __init__(self, layout: Layout, task: int, base: int, words: Addresses) -> None:
        self.task = task
        self.base = base
        self.words = words
        self._layout = layout
        self._data = words.tobytes()
        self._pointers: frozenset[int] | None = None

    def __contains__(self, address: int) -> bool:
        """Return whether an address is on the stack."""
        return self.base <= address < self.base + len(self._data)

    @property
    def pointers(self) -> frozenset[int]:
        """The words that may be addresses of kernel data."""
        if self._pointers is None:
            self._pointers = frozenset(self.data_pointers())
        return self._pointers

    def data_pointers(self) -> list[int]:
        """Return the words that may be addresses of kernel data, innermost first.

        There are no duplicates, and no addresses on the stack itself.
        """
        pointers = self._layout.data_pointers(self.words)
        return [pointer for pointer in pointers if pointer not in self]

    def word(self, address: int) -> int | None:
        """Return the word at an address; ``None`` if that is not on the stack."""
        offset = address - self.base
        if not 0 <= offset <= len(self._data) - 8:
            return None
        value: int = U64.unpack_from(self._data, offset)[0]
        return value

    def half(self, address: int) -> int | None:
        """Return the u32 at an address; ``None`` if that is not on the stack."""
        offset = address - self.base
        if not 0 <= offset <= len(self._data) - 4:
            return None
        value: int = U32.unpack_from(self._data, offset)[0]
        return value

    def places(self, word: int) -> list[int]:
        """Return the addresses on the stack that hold a word, innermost first."""
        # Few places or none match, so this is faster than a comparison by numpy.
        data, found = U64.pack(word), []
        start = self._data.find(data)
        while start >= 0:
            if start % 8 == 0:
                found.append(self.base + start)
            start = self._data.find(data, start + 1)
        return found

    def own(self, type_name: str, member: str) -> Iterator[int]:
        """Yield addresses on the stack of what may be structures of a type.

        :param member: Their member that points at this task.
        """
        offset = self._layout.offset(type_name, member)
        for address in self.places(self.task):
            if address - offset >= self.base:
                yield address - offset

    def wait_entries(self) -> Iterator[WaitEntry]:
        """Find entries of wait queues, innermost first."""
        function = self._layout.offset("wait_queue_entry", "func")
        node = self._layout.offset("wait_queue_entry", "entry")
        for address in self.own("wait_queue_entry", "private"):
            wake = self.word(address + function)
            following = self.word(address + node)
            previous = self.word(address + node + 8)
            if wake is None or following is None or previous is None:
                continue
            # A node that is on no list points at itself.
            linked = (
                min(following, previous) >= KERNEL_HALF and following != address + node
            )
            if wake >= self._layout.code_start and linked:
                yield WaitEntry(address, wake, following, previous)

    def timer(self) -> Timer | None:
        """Find the timer that ends the wait; ``None`` if there is no such timer."""
        wakeup = self._layout.symbol("hrtimer_wakeup")
        if wakeup is None:
            return None
        places = self.places(wakeup)
        if not places:
            # Most waits have no end.
            return None
        function = self._layout.offset("hrtimer_sleeper", "timer.function")
        task = self._layout.offset("hrtimer_sleeper", "task")
        # The time that was asked for. The timer may fire later, up to its slack.
        expires = self._layout.offset("hrtimer_sleeper", "timer._softexpires")
        base = self._layout.offset("hrtimer_sleeper", "timer.base")
        # A bool in v7; true has the value of HRTIMER_STATE_ENQUEUED.
        state = self._layout.offset("hrtimer_sleeper", "timer.state", "timer.is_queued")
        for address in places:
            start = address - function
            armed = self.half(start + state)
            when, clock = self.word(start + expires), self.word(start + base)
            if self.word(start + task) != self.task or not when or not clock:
                continue
            if armed is not None and armed & _ENQUEUED and clock >= KERNEL_HALF:
                return Timer(when, clock)
        return None

    def polled(self) -> list[int] | None:
        """
        Find the ``struct file`` of each file that a poll or select waits for.

        :return: Addresses in the order of the call; ``None`` if not found.
        :raises drgn.FaultError: if a part of a long list cannot be read
        """
        offset = self._layout.offset
        index = offset("poll_wqueues", "inline_index")
        inline = offset("poll_wqueues", "inline_entries")
        size = self._layout.size("poll_table_entry")
        file = offset("poll_table_entry", "filp")
        private = offset("poll_table_entry", "wait.private")
        for start in self.own("poll_wqueues", "polling_task"):
            count = self.half(start + index)
            if count is None or not 0 < count <= _MAX_ENTRIES:
                continue
            entries = range(start + inline, start + inline + count * size, size)
            if any(self.word(entry + private) != start for entry in entries):
                continue
            files = [self.word(entry + file) or 0 for entry in entries]
            return files + self._more_polled(start)
        return None

    def _more_polled(self, start: int) -> list[int]:
        """Read the files of entries that are not inline.

        These entries are in a list of pages, the newest page first.
        """
        offset = self._layout.offset
        table = self.word(start + offset("poll_wqueues", "table")) or 0
        files: list[int] = []
        first = offset("poll_table_page", "entries")
        size = self._layout.size("poll_table_entry")
        member = offset("poll_table_entry", "filp")
        for _ in range(_MAX_ENTRIES):
            if table < KERNEL_HALF:
                break
            following, end = self._layout.members(
                table, "poll_table_page", "next", "entry"
            )
            count = (end - table - first) // size
            if not 0 < count <= self._layout.page_size // size:
                break
            data = self._layout.reader.read(table + first, count * size)
            page = [
                U64.unpack_from(data, index * size + member)[0]
                for index in range(count)
            ]
            files = page + files
            table = following
        return files

    def fault(self, mm: int, remote: bool) -> tuple[Fault, dict[str, int]] | None:
        """
        Find the page fault that a task handles.

        :param mm: Address of the ``struct mm_struct`` of the task.
        :param remote: Whether the fault is in the memory of another process.
        :return: The fault, and members of its ``struct vm_area_struct``; ``None`` if
            not found.
        """
        offset = self._layout.offset
        vma_offset = offset("vm_fault", "vma")
        address_offset = offset("vm_fault", "address")
        page_offset = offset("vm_fault", "pgoff")
        words, page_size = self.words, self._layout.page_size
        pages = (words > 0) & (words < np.uint64(_MAX_USER))
        pages &= words % page_size == 0
        for row in np.flatnonzero(pages).tolist():
            address = int(words[row])
            start = self.base + 8 * row - address_offset
            vma, page = self.word(start + vma_offset), self.word(start + page_offset)
            if vma is None or page is None or not self._layout.is_data(vma):
                continue
            try:
                members = self._mapping(vma)
            except UNREADABLE:
                continue
            first = members["vm_pgoff"]
            inside = members["vm_start"] <= address < members["vm_end"]
            if (
                (members["vm_mm"] == mm) is not remote
                and inside
                and page == first + (address - members["vm_start"]) // page_size
            ):
                flags = self.half(start + offset("vm_fault", "flags")) or 0
                by_vma = bool(flags & self._layout.flag("FAULT_FLAG_VMA_LOCK"))
                return Fault(vma, address, page, by_vma), members
        return None

    def _mapping(self, vma: int) -> dict[str, int]:
        names = ("vm_start", "vm_end", "vm_mm", "vm_pgoff", "vm_file", "vm_flags")
        values = self._layout.members(vma, "vm_area_struct", *names)
        return dict(zip(names, values, strict=True))
