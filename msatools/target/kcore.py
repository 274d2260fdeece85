# SPDX-License-Identifier: LGPL-2.1-or-later

"""The running kernel's /proc/kcore, whose table of segments may change while open.

drgn reads the table (ELF program headers) once, when it opens the file. The kernel
rebuilds it at the first open() after memory was added or removed (fs/proc/kcore.c).
drgn then lacks the segments of added memory. And if the headers need more or fewer
pages than before, the file offsets of all segments change, for every open file and
without any error.
"""

import errno
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from drgn import FaultError, Program, ProgramFlags

from msatools.selfdesc.find import ask
from msatools.target.errors import TargetError

KCORE = "/proc/kcore"
_OPEN_FILES = "/proc/self/fd"

_NAME = "msatools.kcore"
"""Key of a program's :class:`Segments` in its cache."""

_IDENT = b"\x7fELF\2"
_HEADER_BYTES = 64
_COUNT_OFFSET = 56
_ENTRY_BYTES = 56
_PT_LOAD = 1
_NOWHERE = (1 << 64) - 1
"""``p_paddr`` of a segment that is not contiguous in physical memory."""

_ATTEMPTS = 8


class MovedError(TargetError):
    """The offsets in /proc/kcore changed during a report, so its data are wrong."""

    def __init__(self) -> None:
        super().__init__(
            KCORE, "memory was added or removed while it was read", "run it again"
        )


class Segment(NamedTuple):
    """A range of memory in /proc/kcore."""

    address: int
    """Virtual address of its first byte."""

    size: int
    physical: int
    """Physical address of its first byte, or ``_NOWHERE``."""

    offset: int
    """Offset of its first byte in the file."""

    def contains(self, address: int, physical: bool) -> bool:
        """Return whether an address lies in it."""
        start = self.physical if physical else self.address
        return start != _NOWHERE and start <= address < start + self.size


Table = tuple[Segment, ...]


class Segments:
    """The current segments of a /proc/kcore that drgn has open.

    drgn itself reads segments that are unchanged since it opened the file. Segments
    that changed are read here, also with one pread() per read.
    """

    def __init__(self, path: str = KCORE) -> None:
        """
        :raises OSError: if it cannot be opened or read
        """
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._known: Table = ()
        """The table that drgn and this object read by."""

        self._headers = b""
        """The headers with that table, if they were read."""

        self._ascending: list[Segment] = []
        self._starts: list[int] = []

    def look(self) -> Table:
        """Read the current table; open() makes the kernel rebuild it if needed."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # The kernel may have been locked down; open files can still be read.
            return _read_table(self._fd, len(self._known))
        try:
            return _read_table(fd, len(self._known))
        finally:
            os.close(fd)

    def know(self, table: Table) -> None:
        """Read by a table from now on."""
        self._known = table
        self._headers = b""
        self._ascending = sorted(table)
        self._starts = [segment.address for segment in self._ascending]

    def refresh(self, prog: Program) -> bool:
        """Let drgn read by the current table; return whether it had changed."""
        known, current = self._known, self.look()
        if current == known:
            return False
        self.know(current)
        for segment in {*known} ^ {*current}:
            prog.add_memory_segment(segment.address, segment.size, self._read)
            if segment.physical != _NOWHERE:
                prog.add_memory_segment(
                    segment.physical, segment.size, self._read, True
                )
        return True

    def is_unchanged(self) -> bool:
        """Return, with one read, whether the table is still the one in use."""
        if self._headers:
            # Usually they are the same to the byte.
            headers = os.pread(self._fd, len(self._headers), 0)
            if headers == self._headers:
                return True
        table = _read_table(self._fd, len(self._known))
        if table != self._known:
            return False
        size = _HEADER_BYTES + (len(table) + 1) * _ENTRY_BYTES
        self._headers = os.pread(self._fd, size, 0)
        return True

    def is_moved(self) -> bool:
        """Return whether the table in use has wrong offsets now."""
        current = _read_table(self._fd, len(self._known))
        offsets = {segment.address: segment.offset for segment in current}
        return any(
            offsets.get(segment.address, segment.offset) != segment.offset
            for segment in self._known
        )

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        parts = []
        while count:
            segment = self._find(address, physical)
            start = segment.physical if physical else segment.address
            size = min(count, start + segment.size - address)
            try:
                data = os.pread(self._fd, size, segment.offset + address - start)
            except OSError as error:
                why = f"could not be read: {error.strerror}"
                raise FaultError(why, address) from error
            if not data:
                raise FaultError("could not be read", address)
            parts.append(data)
            address += len(data)
            count -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find(self, address: int, physical: bool) -> Segment:
        """Find the segment that contains an address; of several, the last in the table.

        Kernel text is contained in two: it is also part of RAM.
        """
        if physical:
            for segment in reversed(self._known):
                if segment.contains(address, physical):
                    return segment
        elif index := bisect_right(self._starts, address):
            segment = self._ascending[index - 1]
            if segment.contains(address, physical):
                return segment
        raise FaultError("could not find memory: it is gone", address)


def open_kcore() -> Program:
    """Open the running kernel with drgn.

    :raises OSError: as drgn does, if it cannot be opened
    """
    segments = Segments()
    before = segments.look()
    prog = Program()
    ask(prog.set_kernel)
    if segments.look() == before:
        segments.know(before)
    # Else drgn may have read either table: then refresh() replaces all segments.
    prog.cache[_NAME] = segments
    return prog


@contextmanager
def steady(prog: Program) -> Iterator[None]:
    """Run a report on the current /proc/kcore, and check afterwards that it is valid.

    Memory added during the report is not in it. Memory removed meanwhile reads as zeros
    (fs/proc/kcore.c). For programs that do not read /proc/kcore this does nothing.

    :raises MovedError: if the data that were read may be wrong, even if the report
        failed otherwise
    """
    segments = _segments_of(prog)
    if segments is None:
        yield
        return
    segments.refresh(prog)
    try:
        yield
    except Exception as error:
        if segments.is_moved():
            raise MovedError from error
        raise
    if segments.is_moved():
        raise MovedError


def is_unchanged(prog: Program) -> bool:
    """
    Return whether all reads from /proc/kcore so far used the right offsets.

    It costs less than :func:`steady`, for callers that read little and often. After
    memory was added or removed it returns False until :func:`steady` is called.
    """
    segments = _segments_of(prog)
    return segments is None or segments.is_unchanged()


def open_again(prog: Program) -> None:
    """
    Reopen /proc/kcore in a forked process, if that is what the program reads.

    It must be called before the process reads. The kernel copies data by way of a page
    of the open file (``private_data`` in fs/proc/kcore.c) without a lock: of two
    processes that read the same open file at the same time, one may get the data for
    the other.

    Like any open(), this may make the kernel rebuild the table of segments:
    :func:`steady` detects that.

    :raises OSError: if it cannot be opened again; then the process must not read
    """
    if not _is_kcore(prog):
        return
    fds = [int(name) for name in os.listdir(_OPEN_FILES)]
    shared = [fd for fd in fds if _is_named_kcore(fd)]
    if not shared:
        raise FileNotFoundError(errno.ENOENT, "no open file is of", KCORE)
    for fd in shared:
        own = os.open(f"{_OPEN_FILES}/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(own, fd, inheritable=False)
        os.close(own)


def _is_named_kcore(fd: int) -> bool:
    try:
        path = os.readlink(f"{_OPEN_FILES}/{fd}")
    except FileNotFoundError:
        # The descriptor that os.listdir() used.
        return False
    # proc may be mounted elsewhere; reopening another file of that name is harmless.
    return os.path.basename(path) == os.path.basename(KCORE)


def _segments_of(prog: Program) -> Segments | None:
    """Return the segments of a program; ``None`` if it does not read /proc/kcore."""
    found: Segments | None = prog.cache.get(_NAME)
    if found is None and _is_kcore(prog):
        try:
            found = Segments()
        except OSError:
            # The program was opened with other privileges.
            return None
        prog.cache[_NAME] = found
    return found


# Computed once, for the sake of queries.
_RUNNING = ProgramFlags.IS_LIVE | ProgramFlags.IS_LOCAL | ProgramFlags.IS_LINUX_KERNEL


def _is_kcore(prog: Program) -> bool:
    return bool(prog.flags & _RUNNING == _RUNNING)


def _read_table(fd: int, count: int) -> Table:
    """Read the table of segments with one read, so that it is consistent.

    :param count: Expected number of segments; if it is wrong, read again.
    """
    entries = count + 1  # PT_NOTE
    for _ in range(_ATTEMPTS):
        data = os.pread(fd, _HEADER_BYTES + entries * _ENTRY_BYTES, 0)
        if not data.startswith(_IDENT) or len(data) < _HEADER_BYTES:
            # A 32-bit kernel: it has no memory hotplug.
            return ()
        order = "<" if data[len(_IDENT)] == 1 else ">"
        (actual,) = struct.unpack_from(f"{order}H", data, _COUNT_OFFSET)
        if actual == entries:
            return tuple(_segments(data, order))
        entries = actual
    raise OSError(errno.EAGAIN, "its table changes again and again")


def _segments(data: bytes, order: str) -> Iterator[Segment]:
    layout = struct.Struct(f"{order}IIQQQQQQ")
    end = len(data) - len(data[_HEADER_BYTES:]) % layout.size
    for fields in layout.iter_unpack(data[_HEADER_BYTES:end]):
        kind, _, offset, address, physical, _, size, _ = fields
        if kind == _PT_LOAD and size:
            yield Segment(address, size, physical, offset)
