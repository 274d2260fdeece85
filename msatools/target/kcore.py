# SPDX-License-Identifier: LGPL-2.1-or-later

"""The running kernel's /proc/kcore, whose table of segments may change under us.

drgn reads the table (ELF program headers) once, when it opens the file. The kernel
makes it anew at the first open() after memory came or went (fs/proc/kcore.c). What came
then has segments that drgn does not know of. And where the segments are more or fewer
by so many that the headers before them take another page, all of them move by a page:
for every open file, and without a word.
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

from msatools.target.errors import TargetError

KCORE = "/proc/kcore"
_OPEN_FILES = "/proc/self/fd"

_NAME = "msatools.kcore"
"""What is known of a program's segments, in its cache."""

_IDENT = b"\x7fELF\2"
_HEADER_BYTES = 64
_COUNT_AT = 56
_ENTRY_BYTES = 56
_PT_LOAD = 1
_NOWHERE = (1 << 64) - 1
"""``p_paddr`` of what is not at one place in physical memory."""

_ATTEMPTS = 8


class MovedError(TargetError):
    """All of /proc/kcore moved while a report was made: what was read is not true."""

    def __init__(self) -> None:
        super().__init__(
            KCORE, "memory was added or removed while it was read", "run it again"
        )


class Segment(NamedTuple):
    """A range of memory that /proc/kcore has."""

    address: int
    """Of its first byte, as the kernel maps it."""

    size: int
    physical: int
    """Physical address of its first byte, or ``_NOWHERE``."""

    offset: int
    """Where it begins in the file."""

    def has(self, address: int, physical: bool) -> bool:
        """Return whether an address lies in it."""
        start = self.physical if physical else self.address
        return start != _NOWHERE and start <= address < start + self.size


Table = tuple[Segment, ...]


class Segments:
    """The segments of a /proc/kcore that drgn has open, and what became of them.

    drgn goes on to read what is as it was when it opened the file. What changed since
    is read here, with one pread a read as well.
    """

    def __init__(self, path: str = KCORE) -> None:
        """
        :raises OSError: if it cannot be opened or read
        """
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._known: Table = ()
        """By which drgn reads, and we."""

        self._headers = b""
        """Which say the same."""

        self._ascending: list[Segment] = []
        self._starts: list[int] = []

    def look(self) -> Table:
        """Read the table as it is now; where memory came or went, it is made anew."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # Locked down since; what is open may still be read.
            return _read_table(self._fd, len(self._known))
        try:
            return _read_table(fd, len(self._known))
        finally:
            os.close(fd)

    def know(self, table: Table) -> None:
        """Take it that all reads of now go by a table."""
        self._known = table
        self._headers = b""
        self._ascending = sorted(table)
        self._starts = [segment.address for segment in self._ascending]

    def refresh(self, prog: Program) -> bool:
        """Let drgn read by the current table; return whether it had changed."""
        known, now = self._known, self.look()
        if now == known:
            return False
        self.know(now)
        for segment in {*known} ^ {*now}:
            prog.add_memory_segment(segment.address, segment.size, self._read)
            if segment.physical != _NOWHERE:
                prog.add_memory_segment(
                    segment.physical, segment.size, self._read, True
                )
        return True

    def is_unchanged(self) -> bool:
        """Tell, with one read, whether the table is still the one that is known."""
        if self._headers:
            # Most often they are the same to the byte.
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
        """Return whether reads by the known table now go to the wrong place."""
        now = _read_table(self._fd, len(self._known))
        offsets = {segment.address: segment.offset for segment in now}
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
        """Find the segment that has an address, and of several the last in the table.

        The kernel's own text lies in the RAM, too, where it has another address.
        """
        if physical:
            for segment in reversed(self._known):
                if segment.has(address, physical):
                    return segment
        elif at := bisect_right(self._starts, address):
            segment = self._ascending[at - 1]
            if segment.has(address, physical):
                return segment
        raise FaultError("could not find memory: it is gone", address)


def open_kcore() -> Program:
    """Open the running kernel with drgn.

    :raises OSError: as drgn does, if it cannot be opened
    """
    segments = Segments()
    before = segments.look()
    prog = Program()
    prog.set_kernel()
    if segments.look() == before:
        segments.know(before)
    # Else drgn may have seen either, and nothing of it is taken as known.
    prog.cache[_NAME] = segments
    return prog


@contextmanager
def steady(prog: Program) -> Iterator[None]:
    """Make a report from /proc/kcore as it is now, and see that it stayed so.

    Memory that comes while the report is made is not in it. Memory that goes meanwhile
    is zeros (fs/proc/kcore.c). Other programs change nothing at all.

    :raises MovedError: if all that was read may be wrong, whatever came of it
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
    Tell whether reads from /proc/kcore up to now went where they should.

    For who asks for little, and often: :func:`steady` costs more. After memory came or
    went the answer is no until that has been called.
    """
    segments = _segments_of(prog)
    return segments is None or segments.is_unchanged()


def open_again(prog: Program) -> None:
    """
    Give a forked process a /proc/kcore of its own, if that is what a program reads.

    To be called before the process reads. What is read goes by way of a page that
    belongs to the open file (``private_data`` in fs/proc/kcore.c), and is copied to it
    and from it without a lock: of two processes that read by the same open file at the
    same time, one may get what the other has asked for.

    As any open() of it, this may have the table of segments made anew: then
    :func:`steady` tells.

    :raises OSError: if it cannot be opened again; then the process must not read
    """
    if not _is_kcore(prog):
        return
    numbers = [int(name) for name in os.listdir(_OPEN_FILES)]
    shared = [number for number in numbers if _leads_to_kcore(number)]
    if not shared:
        raise FileNotFoundError(errno.ENOENT, "no open file is of", KCORE)
    for number in shared:
        own = os.open(f"{_OPEN_FILES}/{number}", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(own, number, inheritable=False)
        os.close(own)


def _leads_to_kcore(number: int) -> bool:
    try:
        path = os.readlink(f"{_OPEN_FILES}/{number}")
    except FileNotFoundError:
        # By which the numbers were listed.
        return False
    # Of any mount of proc; and to open another file of that name again does no harm.
    return os.path.basename(path) == os.path.basename(KCORE)


def _segments_of(prog: Program) -> Segments | None:
    """Find what is known of a program's segments; ``None`` if it is no /proc/kcore."""
    found: Segments | None = prog.cache.get(_NAME)
    if found is None and _is_kcore(prog):
        try:
            found = Segments()
        except OSError:
            # Opened by somebody else, for us.
            return None
        prog.cache[_NAME] = found
    return found


# Made once: a query has no time for it.
_RUNNING = ProgramFlags.IS_LIVE | ProgramFlags.IS_LOCAL | ProgramFlags.IS_LINUX_KERNEL


def _is_kcore(prog: Program) -> bool:
    return bool(prog.flags & _RUNNING == _RUNNING)


def _read_table(fd: int, count: int) -> Table:
    """Read the table of segments with one read, so that it is of one moment.

    :param count: How many segments it may have; if others, it is read again.
    """
    entries = count + 1  # PT_NOTE
    for _ in range(_ATTEMPTS):
        data = os.pread(fd, _HEADER_BYTES + entries * _ENTRY_BYTES, 0)
        if not data.startswith(_IDENT) or len(data) < _HEADER_BYTES:
            # Of 32 bits, which come without memory that comes and goes.
            return ()
        order = "<" if data[len(_IDENT)] == 1 else ">"
        (found,) = struct.unpack_from(f"{order}H", data, _COUNT_AT)
        if found == entries:
            return tuple(_segments(data, order))
        entries = found
    raise OSError(errno.EAGAIN, "its table changes again and again")


def _segments(data: bytes, order: str) -> Iterator[Segment]:
    layout = struct.Struct(f"{order}IIQQQQQQ")
    end = len(data) - len(data[_HEADER_BYTES:]) % layout.size
    for fields in layout.iter_unpack(data[_HEADER_BYTES:end]):
        kind, _, offset, address, physical, _, size, _ = fields
        if kind == _PT_LOAD and size:
            yield Segment(address, size, physical, offset)
