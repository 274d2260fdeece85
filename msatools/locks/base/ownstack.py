# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds structures on the stack of a sleeping task: waiters, timers, polls, faults.

The offset of such a structure on the stack is unknown, so the whole stack, some hundred
words, is searched. A structure is recognized by its pointer to the task, or to a
function that identifies its type. Its other members have to be consistent with that.
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.reader import Addresses
from msatools.kernel.words import U32, U64
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

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
    """Whether the task has the lock of the mapping instead of ``mmap_lock``: "mm:
    handle page faults under VMA lock" and others (in v6.4)."""


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
        rows = np.flatnonzero(self.words == np.uint64(word)).tolist()
        return [self.base + 8 * row for row in rows]

    def own(self, type_name: str, member: str) -> Iterator[int]:
        """Yield the addresses of structures whose *member* may point at this task."""
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
        function = self._layout.offset("hrtimer_sleeper", "timer.function")
        task = self._layout.offset("hrtimer_sleeper", "task")
        # The time that was asked for. The timer may fire later, up to its slack.
        expires = self._layout.offset("hrtimer_sleeper", "timer._softexpires")
        base = self._layout.offset("hrtimer_sleeper", "timer.base")
        # A bool in v7; true has the value of HRTIMER_STATE_ENQUEUED.
        state = self._layout.offset("hrtimer_sleeper", "timer.state", "timer.is_queued")
        for address in self.places(wakeup):
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

        They are in a list of pages, of which the newest comes first.
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
