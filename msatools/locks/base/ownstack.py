# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a sleeping task has left on its own stack: waiters, timers, polls, faults.

Each is told by its shape: it names the task, or a function that stands for it, and what
it points at has to fit. Types tell where its members are; nothing tells where on the
stack it is, but a stack has some hundred words.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.kernel.reader import Addresses
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF, START_KERNEL_MAP

_WORD = struct.Struct("<Q")
_MAX_ENTRIES = 64
"""More than a poll keeps on the stack."""

_MAX_USER = 1 << 56
_ENQUEUED = 1


@dataclass(frozen=True)
class WaitEntry:
    """A ``struct wait_queue_entry``: it is on a queue of waiters."""

    address: int
    function: int
    """What is called to wake it up; it tells kinds of entries apart."""

    next: int
    """The list node that follows it: another's, or the queue's head."""

    previous: int


@dataclass(frozen=True)
class Timer:
    """A ``struct hrtimer`` that will end the wait."""

    expires_ns: int
    base: int
    """Its ``struct hrtimer_clock_base``: the clock that it goes by."""


@dataclass(frozen=True)
class Fault:
    """A ``struct vm_fault``: what a page fault is about."""

    vma: int
    address: int
    """Its page's."""

    page: int
    """The page's number in the file that is mapped."""


class OwnStack:
    """The words that a sleeping task has on its stack, from its stack pointer on."""

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
        """All words that may be addresses of the kernel's data."""
        if self._pointers is None:
            self._pointers = frozenset(self.data_pointers())
        return self._pointers

    def data_pointers(self) -> list[int]:
        """Return those words, innermost first, each once; none that is on the stack."""
        chosen = self._layout.data_pointers(self.words)
        return [word for word in chosen if word not in self]

    def word(self, address: int) -> int | None:
        """Return a word; ``None`` if it is not on the stack."""
        place = address - self.base
        if not 0 <= place <= len(self._data) - 8:
            return None
        value: int = _WORD.unpack_from(self._data, place)[0]
        return value

    def half(self, address: int) -> int | None:
        """Return 32 bits; ``None`` if they are not on the stack."""
        place = address - self.base
        if not 0 <= place <= len(self._data) - 4:
            return None
        value: int = struct.unpack_from("<I", self._data, place)[0]
        return value

    def places(self, word: int) -> list[int]:
        """Find where a word is on the stack, innermost first."""
        places = np.flatnonzero(self.words == np.uint64(word)).tolist()
        return [self.base + 8 * place for place in places]

    def own(self, type_name: str, member: str) -> Iterator[int]:
        """Find structures of which a member names this task: where they would be."""
        offset = self._layout.offset(type_name, member)
        for place in self.places(self.task):
            if place - offset >= self.base:
                yield place - offset

    def wait_entries(self) -> Iterator[WaitEntry]:
        """Find entries of wait queues, innermost first."""
        function = self._layout.offset("wait_queue_entry", "func")
        node = self._layout.offset("wait_queue_entry", "entry")
        for address in self.own("wait_queue_entry", "private"):
            called = self.word(address + function)
            following = self.word(address + node)
            before = self.word(address + node + 8)
            if called is None or following is None or before is None:
                continue
            # One that is on no queue points at itself.
            linked = following >= KERNEL_HALF <= before and following != address + node
            if called >= START_KERNEL_MAP and linked:
                yield WaitEntry(address, called, following, before)

    def timer(self) -> Timer | None:
        """Find the timer that ends the wait, if it has one."""
        wakes = self._layout.symbol("hrtimer_wakeup")
        if wakes is None:
            return None
        function = self._layout.offset("hrtimer_sleeper", "timer.function")
        task = self._layout.offset("hrtimer_sleeper", "task")
        # As it was asked for; the timer may end later, to end with others.
        expires = self._layout.offset("hrtimer_sleeper", "timer._softexpires")
        base = self._layout.offset("hrtimer_sleeper", "timer.base")
        # By v7 a bool, true as well.
        state = self._layout.offset("hrtimer_sleeper", "timer.state", "timer.is_queued")
        for place in self.places(wakes):
            start = place - function
            armed = self.half(start + state)
            when, clock = self.word(start + expires), self.word(start + base)
            if self.word(start + task) != self.task or not when or not clock:
                continue
            if armed is not None and armed & _ENQUEUED and clock >= KERNEL_HALF:
                return Timer(when, clock)
        return None

    def polled(self) -> list[int] | None:
        """
        Find the ``struct file`` of all that a poll or select waits for.

        :return: By the order they were asked for; ``None`` if it is not found.
        :raises drgn.FaultError: if a part of a long list cannot be read
        """
        at = self._layout.offset
        index = at("poll_wqueues", "inline_index")
        inline = at("poll_wqueues", "inline_entries")
        size = self._layout.size("poll_table_entry")
        file = at("poll_table_entry", "filp")
        private = at("poll_table_entry", "wait.private")
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
        """Read the pages that hold what did not fit the stack, the newest first."""
        at = self._layout.offset
        table = self.word(start + at("poll_wqueues", "table")) or 0
        files: list[int] = []
        first = at("poll_table_page", "entries")
        size = self._layout.size("poll_table_entry")
        member = at("poll_table_entry", "filp")
        for _ in range(_MAX_ENTRIES):
            if table < KERNEL_HALF:
                break
            following, end = self._layout.members(
                table, "poll_table_page", "next", "entry"
            )
            count = (end - table - first) // size
            if not 0 < count <= 4096 // size:
                break
            data = self._layout.reader.read(table + first, count * size)
            page = [
                _WORD.unpack_from(data, place * size + member)[0]
                for place in range(count)
            ]
            files = page + files
            table = following
        return files

    def fault(self, mm: int, remote: bool) -> tuple[Fault, dict[str, int]] | None:
        """
        Find what page fault a task is in, and the mapping that it is in.

        :param mm: Its ``struct mm_struct``.
        :param remote: Whether the fault is in the memory of another.
        :return: The fault, and members of its ``struct vm_area_struct``.
        """
        at = self._layout.offset
        vma_at, address_at = at("vm_fault", "vma"), at("vm_fault", "address")
        page_at = at("vm_fault", "pgoff")
        words = self.words
        pages = (words > 0) & (words < np.uint64(_MAX_USER)) & (words % 4096 == 0)
        for number in np.flatnonzero(pages).tolist():
            place = self.base + 8 * number
            start = place - address_at
            vma, page = self.word(start + vma_at), self.word(start + page_at)
            if vma is None or page is None or not KERNEL_HALF <= vma < START_KERNEL_MAP:
                continue
            address = self.word(place) or 0
            try:
                members = self._mapping(vma)
            except drgn.FaultError:
                continue
            first = members["vm_pgoff"]
            inside = members["vm_start"] <= address < members["vm_end"]
            if (
                (members["vm_mm"] == mm) is not remote
                and inside
                and page == first + (address - members["vm_start"]) // 4096
            ):
                return Fault(vma, address, page), members
        return None

    def _mapping(self, vma: int) -> dict[str, int]:
        names = ("vm_start", "vm_end", "vm_mm", "vm_pgoff", "vm_file", "vm_flags")
        values = self._layout.members(vma, "vm_area_struct", *names)
        return dict(zip(names, values, strict=True))
