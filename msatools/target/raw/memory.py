# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory that a file holds, and reads of it by physical address."""

import errno
import os
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drgn import FaultError

PAGE_BYTES = 4096
"""Unit in which memory is searched: the smallest page of any machine."""

_NOT_THERE = "not in the file"


class MemoryRange(NamedTuple):
    """A contiguous part of memory, and where it lies."""

    start: int
    """Its first address."""

    size: int
    """In bytes."""

    offset: int
    """Where it lies: an offset in the file, or an address of other memory."""

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.start + self.size


class Ranges:
    """Ranges without overlaps, by address."""

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self.all = tuple(ranges)
        self._starts = [each.start for each in ranges]

    def split(self, address: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield address, size and position of the parts of a read.

        :raises FaultError: if a part of it lies in no range
        """
        end = address + size
        while address < end:
            index = bisect_right(self._starts, address) - 1
            if index < 0 or address >= self.all[index].end:
                raise FaultError(_NOT_THERE, address)
            found = self.all[index]
            count = min(end, found.end) - address
            yield address, count, found.offset + address - found.start
            address += count


class Memory(ABC):
    """The memory in a file, by address: the guest's or, if packed, the file's own."""

    name: str
    """Name of the format, for the user."""

    is_packed = False
    """Whether the file does not say which address of the guest lies where: what lies
    behind the guest's hole below 4 GiB can follow what lies before it."""

    is_truncated = False
    """Whether the file ends before its headers say."""

    @property
    @abstractmethod
    def ranges(self) -> Sequence[MemoryRange]:
        """All ranges that the file has, by address."""

    @abstractmethod
    def read(self, address: int, size: int) -> bytes:
        """Read memory.

        :raises FaultError: if the file does not have all of it
        """

    def fill(self, address: int, buffer: memoryview) -> int:
        """Read into a buffer, as much as is read at once; return the bytes read.

        :raises FaultError: if the file does not have it
        """
        data = self.read(address, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def filled(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of all that may be other than zeros, by address."""
        for each in self.ranges:
            yield each.start, each.end

    @property
    def size(self) -> int:
        """Bytes of memory in the file."""
        return sum(each.size for each in self.ranges)


class FileMemory(Memory):
    """Memory that lies in a file as it is, in one range or several.

    Reads do not move the file's position, so that processes can share it after a fork.
    """

    def __init__(
        self,
        name: str,
        path: str,
        ranges: Sequence[MemoryRange] | None = None,
        *,
        is_packed: bool = False,
    ) -> None:
        """Open a file.

        :param ranges: By address and without overlaps, with offsets in the file; the
            whole file if not given.
        :raises OSError: if it cannot be opened
        """
        self.name = name
        self.is_packed = is_packed
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if ranges is None:
            ranges = [MemoryRange(0, size, 0)]
        # A file that was cut off has less.
        parts = [
            each._replace(size=max(min(each.size, size - each.offset), 0))
            for each in ranges
        ]
        self.is_truncated = parts != list(ranges)
        self._ranges = Ranges([each for each in parts if each.size])

    @property
    def ranges(self) -> Sequence[MemoryRange]:
        return self._ranges.all

    def read(self, address: int, size: int) -> bytes:
        parts = []
        for start, count, offset in self._ranges.split(address, size):
            try:
                part = os.pread(self._fd, count, offset)
            except OSError as error:
                # One bad sector is no reason to lose all else.
                raise FaultError(error.strerror or _NOT_THERE, start) from error
            if len(part) < count:
                raise FaultError(_NOT_THERE, start + len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fill(self, address: int, buffer: memoryview) -> int:
        _, count, offset = next(self._ranges.split(address, len(buffer)))
        return os.preadv(self._fd, [buffer[:count]], offset)

    def filled(self) -> Iterator[tuple[int, int]]:
        for each in self._ranges.all:
            shift = each.start - each.offset
            for start, end in self._data(each.offset, each.offset + each.size):
                yield start + shift, end + shift

    def _data(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of what is no hole of a sparse file."""
        while start < end:
            try:
                start = os.lseek(self._fd, start, os.SEEK_DATA)
                stop = os.lseek(self._fd, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return  # only a hole follows
                # Block devices have no holes.
                stop = end
            if start < end:
                yield start, min(stop, end)
            start = stop


class PhysicalMemory:
    """A guest's memory by physical address, as drgn reads it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.place([each._replace(offset=each.start) for each in memory.ranges])

    def place(self, pieces: Sequence[MemoryRange]) -> None:
        """Set which physical address lies at which address of the memory.

        :param pieces: By physical address.
        """
        self._pieces = Ranges(pieces)
        # The usual case, without a search.
        self._is_plain = all(each.start == each.offset for each in pieces)

    @property
    def pieces(self) -> Sequence[MemoryRange]:
        """Which physical address lies at which address of the memory."""
        return self._pieces.all

    def read(self, address: int, size: int) -> bytes:
        """Read memory.

        :raises FaultError: if the file does not have all of it
        """
        if self._is_plain:
            return self.memory.read(address, size)
        parts = []
        for start, count, position in self._pieces.split(address, size):
            try:
                parts.append(self.memory.read(position, count))
            except FaultError as error:
                # The address in it is of the file.
                raise FaultError(_NOT_THERE, start) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __call__(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read as :meth:`drgn.Program.add_memory_segment` describes it."""
        return self.read(address, count)
