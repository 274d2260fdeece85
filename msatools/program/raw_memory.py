# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory of a file, a search for kernels in it, and a check of each.

If no kernel is found, the memory is described instead.
"""

import errno
import os
import struct
import sys
import time
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from drgn import Architecture, FaultError

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.program.arch import (
    START_KERNEL_MAP,
    TableFormat,
    TableWalk,
    arm64_format,
    x86_format,
)

# --- The memory that a file holds, and reads of it by physical address.


PAGE_BYTES = 4096
"""Unit in which memory is searched: the smallest page of any machine."""

_NOT_THERE = "not in the file"


class MemoryRange(NamedTuple):
    """A contiguous range of memory addresses, mapped to a file or other memory."""

    start: int
    """The first address."""

    size: int
    """Size in bytes."""

    offset: int
    """Offset of the range in the file, or its start address in other memory."""

    @property
    def end(self) -> int:
        """The first address behind the range."""
        return self.start + self.size


class Ranges:
    """Ranges without overlaps, sorted by address."""

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self.all = tuple(ranges)
        self._starts = [each.start for each in ranges]

    def split(self, address: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield address, size and :attr:`MemoryRange.offset` of the parts of a read.

        :raises FaultError: if a part of the read lies in no range
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
    """The memory in a file, by the guest's physical address.

    If :attr:`is_packed`, addresses are offsets in the memory that the file has.
    """

    name: str
    """Name of the format, for the user."""

    is_packed = False
    """Whether the file does not record the guest's addresses: memory behind the guest's
    hole below 4 GiB may directly follow the memory before it."""

    is_truncated = False
    """Whether the file is shorter than its headers require."""

    @property
    @abstractmethod
    def ranges(self) -> Sequence[MemoryRange]:
        """All ranges that the file has, sorted by address."""

    @abstractmethod
    def read(self, address: int, size: int) -> bytes:
        """Read memory.

        :raises FaultError: if the file does not have all of it
        """

    def fill(self, address: int, buffer: memoryview) -> int:
        """Read into a buffer with one read, which may not fill it; return the count.

        :raises FaultError: if the file does not have the first byte
        """
        data = self.read(address, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def filled(self) -> Iterator[tuple[int, int]]:
        """Yield start and end address of the ranges that may have other than zeros."""
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

        :param ranges: Sorted by address, without overlaps, with offsets in the file; by
            default one range of the whole file.
        :raises OSError: if it cannot be opened
        """
        self.name = name
        self.is_packed = is_packed
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if ranges is None:
            ranges = [MemoryRange(0, size, 0)]
        # A file that was cut off has less than the ranges.
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
                # A fault, as for missing memory: a bad sector must not end the report.
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
        """Yield start and end offset of the parts of a file that are no holes."""
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
        """Set which physical address lies at which address of :attr:`memory`.

        :param pieces: Sorted by physical address; offsets are addresses of *memory*.
        """
        self._pieces = Ranges(pieces)
        # The usual case, without a search.
        self._is_plain = all(each.start == each.offset for each in pieces)

    @property
    def pieces(self) -> Sequence[MemoryRange]:
        """The ranges that :meth:`place` has set."""
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
                # That error has an address of *memory*, not the physical address.
                raise FaultError(_NOT_THERE, start) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __call__(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read as :meth:`drgn.Program.add_memory_segment` describes it."""
        return self.read(address, count)


# --- A search of all memory for words at a fixed place in a page.
#
# VMCOREINFO begins a page of its own, so that one word of each page is enough to find
# candidates. Memory is read in bulk; only that word is compared.


_CHUNK_BYTES = 1 << 20
"""Bytes to read at once: fastest if they fit into a CPU's cache."""

_TELL_AFTER_S = 1.0
_TELL_EVERY_S = 0.5

_GIB = 1 << 30

_MOST_HITS = 1 << 16
"""Maximum number of pages to find: a hostile file may consist of such pages only."""


class Words(NamedTuple):
    """Bytes to look for in each page."""

    offset: int
    """Offset of the bytes in a page; a multiple of 4."""

    text: bytes
    """The bytes, at least 4."""


def find_words(memory: Memory, wanted: Sequence[Words]) -> Iterator[tuple[int, int]]:
    """Yield the address of each page with wanted bytes, and their index in *wanted*.

    Memory that cannot be read is left out.
    """
    buffer = np.empty(_CHUNK_BYTES // 4, "<u4")
    pages = buffer.reshape(-1, PAGE_BYTES // 4)
    view = buffer.data.cast("B")
    first = [int.from_bytes(each.text[:4], "little") for each in wanted]
    columns = [pages[:, each.offset // 4] for each in wanted]
    hits = 0
    with _Progress(memory) as progress:
        for start, end in memory.filled():
            # Pages begin at multiples of their size.
            for address in range(
                -(-start // PAGE_BYTES) * PAGE_BYTES, end, _CHUNK_BYTES
            ):
                size = min(_CHUNK_BYTES, end - address)
                count = _filled(memory, address, view[:size]) // PAGE_BYTES
                for number, column in enumerate(columns):
                    found = np.flatnonzero(column[:count] == first[number])
                    for row in found.tolist():
                        each = wanted[number]
                        here = row * PAGE_BYTES + each.offset
                        if view[here : here + len(each.text)] == each.text:
                            yield address + row * PAGE_BYTES, number
                            hits += 1
                    if hits > _MOST_HITS:
                        return
                progress.add(size)


def _filled(memory: Memory, address: int, buffer: memoryview) -> int:
    """Fill a buffer from memory, unreadable pages with zeros; return its size."""
    done = 0
    while done < len(buffer):
        try:
            count = memory.fill(address + done, buffer[done:])
        except (FaultError, OSError):
            count = 0
        if not count:
            # Zeros match no words. The pages behind this one may be readable.
            skipped = PAGE_BYTES - done % PAGE_BYTES
            buffer[done : done + skipped] = bytes(len(buffer[done : done + skipped]))
            count = min(skipped, len(buffer) - done)
        done += count
    return done


class _Progress:
    """Shows the progress of a search on a terminal, if it takes over a second."""

    def __init__(self, memory: Memory) -> None:
        self._size = max(memory.size, 1)
        self._out = sys.stderr if sys.stderr and sys.stderr.isatty() else None
        self._done = 0
        self._next_s = time.monotonic() + _TELL_AFTER_S
        self._has_told = False

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._has_told and self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def add(self, count: int) -> None:
        """Count bytes as searched, and update the terminal if it is time."""
        self._done += count
        if self._out is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _TELL_EVERY_S
        self._has_told = True
        done, size = self._done / _GIB, self._size / _GIB
        self._out.write(
            f"\rsearching memory for a kernel: {done:.1f} of {size:.1f} GiB\x1b[K"
        )
        self._out.flush()


# --- Kernels that were found in memory, and a check that each is one.
#
# A copy of VMCOREINFO alone proves nothing: a former kernel's page outlives kexec, a
# nested guest's lies in its host, and any program can hold the text. So init_uts_ns has
# to be at the address in VMCOREINFO, with the same release, and the page tables have to
# map the kernel's text to the physical address that follows from VMCOREINFO.


Read = Callable[[int, int], bytes]
"""``read(address, size)`` of physical memory; raises FaultError."""

_TEXT = b"OSRELEASE="
_NOTE = b"VMCOREINFO\0\0" + _TEXT
_NOTE_BYTES = 24
"""Bytes of header and name of the ELF note, which the kernel keeps in own pages."""

_MOST_BYTES = PAGE_BYTES
"""VMCOREINFO_BYTES (include/linux/crash_core.h, linux/vmcore_info.h) is a page."""

_MOST_KERNELS = 64
_MOST_COPIES = 1024

_SYSNAME = b"Linux".ljust(65, b"\0")
_UTS_FIELD = 65
_RELEASE = 2 * _UTS_FIELD
_NAMES_BYTES = _RELEASE + _UTS_FIELD
"""``struct new_utsname``: sysname, nodename, release, each of 65 bytes."""

_NAMES = ((0, _TEXT), (12, _NOTE))

_SHIFTS = (0, 1024, 2048, 3072)
"""Offsets at which a guest's pages can begin in pages of packed memory: LiME's
format=raw leaves out whole KiB that firmware keeps below 640 KiB."""


class FoundKernel(NamedTuple):
    """A kernel as a copy of VMCOREINFO describes it."""

    copies: tuple[int, ...]
    """Addresses, in the memory that was searched, of pages that begin with VMCOREINFO:
    the kernel's own, and its copy for a crash. Empty if only the ELF note was found."""

    text: bytes
    """VMCOREINFO as it is in memory."""

    lines: Mapping[str, str]
    arch: Architecture
    image_offset: int
    """Virtual minus physical address of the kernel's image."""

    @property
    def release(self) -> str:
        """``utsname.release``."""
        return self.lines["OSRELEASE"]

    @property
    def uts_name(self) -> int:
        """Physical address of ``init_uts_ns.name``."""
        # Added by Linux kernel commit ca4a9241cc5e ("kdump: append uts_namespace.name
        # offset to VMCOREINFO") (in v5.11); before, a struct kref came first.
        inner = self.offset("uts_namespace.name")
        start = self.symbol("init_uts_ns") - self.image_offset
        return start + (4 if inner is None else inner)

    def offset(self, name: str) -> int | None:
        """Return the offset of a member, such as ``pglist_data.node_id``.

        :return: ``None`` if VMCOREINFO does not have it
        :raises DamagedDataError: if it is no number
        """
        text = self.lines.get(f"OFFSET({name})")
        if text is not None and not (text.isascii() and text.isdecimal()):
            raise DamagedDataError(f"VMCOREINFO: {name}={text}")
        return None if text is None else int(text)

    def symbol(self, name: str) -> int:
        """Return the virtual address of a symbol.

        :raises DamagedDataError: if VMCOREINFO does not have it
        """
        try:
            address = int(self.lines[f"SYMBOL({name})"], 16)
        except (KeyError, ValueError):
            raise DamagedDataError(f"VMCOREINFO without {name}") from None
        if not 0 <= address < 1 << 64:
            raise DamagedDataError(f"VMCOREINFO with an impossible {name}")
        return address

    def is_at(self, read: Read) -> bool:
        """Return whether ``init_uts_ns`` of this release is at its physical address.

        :param read: Reads physical memory.
        """
        try:
            return self.is_named(read(self.uts_name, _NAMES_BYTES))
        except (*UNREADABLE, OverflowError):
            return False

    def is_named(self, name: bytes) -> bool:
        """Return whether a ``struct new_utsname`` is of this release.

        :param name: Its first :data:`_NAMES_BYTES`.
        """
        release = name[_RELEASE:].partition(b"\0")[0]
        return name.startswith(_SYSNAME) and release == self.release.encode()

    def is_mapped(self, read: Read) -> bool:
        """Return whether the page tables map the kernel's text by its image offset.

        :param read: Reads physical memory.
        """
        try:
            form = _table_format(self)
            root = self.symbol("swapper_pg_dir") - self.image_offset
            walk = TableWalk(form, root, lambda table: read(table, form.table_bytes))
            text = self.symbol("_stext")
            found = walk.find(text)
        except (*UNREADABLE, ValueError, OverflowError, struct.error):
            return False
        return found is not None and found[0] == text - self.image_offset


def find_kernels(memory: Memory) -> list[FoundKernel]:
    """Search memory for VMCOREINFO; return distinct kernels in the order found."""
    places = [(shift, *name) for shift in _shifts(memory) for name in _NAMES]
    wanted = [Words(shift + offset, text) for shift, offset, text in places]
    found: dict[bytes, FoundKernel] = {}
    copies = 0
    for address, index in find_words(memory, wanted):
        shift, number, _ = places[index]
        page = address + shift
        start = page + (_NOTE_BYTES if number else 0)
        try:
            # Not beyond this page: the rest of a note may lie elsewhere in memory.
            text = _text(memory.read(start, page + _MOST_BYTES - start))
            kernel = parse_kernel(text)
        except UNREADABLE:
            continue
        known = found.setdefault(_identity(kernel), kernel)
        if number == 0:
            pages = (*known.copies, page)
            found[_identity(kernel)] = known._replace(copies=pages)
        copies += 1
        if len(found) >= _MOST_KERNELS or copies >= _MOST_COPIES:
            break
    return list(found.values())


def _shifts(memory: Memory) -> Sequence[int]:
    return _SHIFTS if memory.is_packed else _SHIFTS[:1]


def parse_kernel(text: bytes) -> FoundKernel:
    """Parse VMCOREINFO.

    :raises DamagedDataError: if a line that is needed is missing or malformed
    """
    rows = text.decode("ascii", "replace").splitlines()
    lines = dict(row.split("=", 1) for row in rows if "=" in row)
    if not lines.get("OSRELEASE"):
        raise DamagedDataError("VMCOREINFO without a release")
    arch, offset = _placed(lines)
    kernel = FoundKernel((), text, lines, arch, offset)
    for name in ("init_uts_ns", "swapper_pg_dir", "_stext"):
        kernel.symbol(name)
    kernel.offset("uts_namespace.name")
    return kernel


def _text(data: bytes) -> bytes:
    """Return the lines at the start of a page."""
    return data.partition(b"\0")[0]


def _identity(kernel: FoundKernel) -> bytes:
    """Return the lines that all copies of one boot share: all but a crash's time."""
    return b"\n".join(
        row for row in kernel.text.splitlines() if not row.startswith(b"CRASHTIME=")
    )


def _placed(lines: Mapping[str, str]) -> tuple[Architecture, int]:
    """Return the architecture, and virtual minus physical address of the image.

    Each architecture has a line of its own: arch/x86/kernel/vmcore_info_64.c,
    arch/arm64/kernel/vmcore_info.c, arch/riscv/kernel/vmcore_info.c.
    """
    for name, arch in (
        ("phys_base", Architecture.X86_64),
        ("kimage_voffset", Architecture.AARCH64),
        ("va_kernel_pa_offset", Architecture.RISCV64),
    ):
        value = lines.get(f"NUMBER({name})")
        if value is not None:
            try:
                number = int(value, 0)
            except ValueError:
                raise DamagedDataError(f"VMCOREINFO: {name}={value}") from None
            return arch, START_KERNEL_MAP - number if name == "phys_base" else number
    raise DamagedDataError("VMCOREINFO of an unknown machine")


def _table_format(kernel: FoundKernel) -> TableFormat:
    """Return the format of a kernel's page tables, by VMCOREINFO alone.

    :raises DamagedDataError: if the machine's page tables are not supported
    :raises ValueError: if a number in VMCOREINFO is malformed
    """
    lines = kernel.lines
    if kernel.arch == Architecture.X86_64:
        top = (48,) if int(lines.get("NUMBER(pgtable_l5_enabled)", "0")) else ()
        return x86_format(
            (*top, 39, 30, 21, 12), int(lines.get("NUMBER(sme_mask)", "0"), 0)
        )
    if kernel.arch == Architecture.AARCH64:
        built = int(lines.get("NUMBER(VA_BITS)", "48"))
        shift = int(lines.get("PAGESIZE", "4096")).bit_length() - 1
        size = int(lines.get("NUMBER(TCR_EL1_T1SZ)", "0"), 0)
        bits = 64 - size if size else built
        if not (12 <= shift <= 16 and shift < bits <= 52 and built <= 52):
            raise DamagedDataError(f"addresses of {bits} bits")
        return arm64_format(shift, bits, built)
    raise DamagedDataError("page tables that are not read")


def find_names(memory: Memory, kernel: FoundKernel) -> Iterator[int]:
    """Yield the addresses in *memory* where a kernel's ``init_uts_ns.name`` may be.

    Its offset in a page is known, wherever that page lies.
    """
    if kernel.uts_name % 4:
        return
    places = [(kernel.uts_name + shift) % PAGE_BYTES for shift in _shifts(memory)]
    wanted = [Words(place, _SYSNAME[:8]) for place in places]
    for page, number in find_words(memory, wanted):
        place = page + places[number]
        try:
            name = memory.read(place, _NAMES_BYTES)
        except FaultError:
            continue
        if kernel.is_named(name):
            yield place


# --- Description of memory without a kernel: noise, zeros, or something else.


_SAMPLES = 1024
_RANDOM_SHARE = 0.98
_RANDOM_VALUES = 400.0
"""Maximum chi-squared statistic of the byte values in a random page: it is 255 on
average, with a standard deviation of 23."""

_WHAT = "no header of a dump, and no Linux kernel in what would be its memory"


def is_noise(memory: Memory) -> bool:
    """Return whether almost all pages of a sample, spread over memory, are random."""
    pages = list(_pages(memory))
    if not pages:
        return False
    noisy = sum(_is_random(page) for page in pages)
    return noisy >= _RANDOM_SHARE * len(pages)


def what_it_holds(memory: Memory) -> tuple[str, str]:
    """Return a description of memory without a kernel, and advice, for the user."""
    pages = list(_pages(memory))
    if not pages:
        return (
            "zeros where a header should be, and nothing else",
            "it was never written to its end: take it anew",
        )
    if is_noise(memory):
        return (
            "encrypted or compressed: every page of it is random",
            "an encrypted guest (SEV, TDX) is read from inside alone: have its kernel "
            "dump itself by kdump",
        )
    return f"not a dump: {_WHAT} (no VMCOREINFO)", "name a vmcore"


def _pages(memory: Memory) -> Iterator[bytes]:
    """Yield a sample of pages, spread over memory, without pages of zeros."""
    extents = [
        (start, end) for start, end in islice(memory.filled(), 1 << 16) if end > start
    ]
    total = sum(end - start for start, end in extents)
    step = max(total // _SAMPLES // PAGE_BYTES, 1) * PAGE_BYTES
    for start, end in extents:
        for address in range(start, end, step):
            try:
                page = memory.read(address, min(PAGE_BYTES, end - address))
            except (FaultError, OSError):
                continue
            if any(page):
                yield page


def _is_random(page: bytes) -> bool:
    counts = np.bincount(np.frombuffer(page, np.uint8), minlength=256)
    expected = len(page) / 256
    return bool(((counts - expected) ** 2).sum() / expected < _RANDOM_VALUES)
