# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of memory in bulk, counted, and tolerant of missing parts.

Also the formats of integers and C strings. All collectors read through
:class:`Reader`.
"""

import errno
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, cast

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import totalram_pages
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError
from msatools.program.linear import direct_map
from msatools.selfdesc.find import ask, find_variable

# --- Integers in the kernel's memory: their formats, and the largest plausible ones.


PAGE = 4096
"""Bytes of the smallest page."""

MAX_PLAUSIBLE = 1 << 60
"""Maximum plausible time in nanoseconds (36 years), and maximum plausible count."""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

LIST_HEAD = struct.Struct("<QQ")
"""``struct list_head``: next, prev."""


_WORD_BITS = 64


def bit(number: int) -> int:
    """
    Return a word with one bit set.

    :param number: From the kernel's types, which may be damaged.
    :raises DamagedDataError: if it is not in 0..63
    """
    if not 0 <= number < _WORD_BITS:
        raise DamagedDataError(f"a word has no bit {number}")
    return 1 << number


def unsigned(data: bytes, offset: int, size: int) -> int:
    """Return the unsigned integer of *size* bytes at *offset*."""
    return int.from_bytes(data[offset : offset + size], "little")


Addresses = npt.NDArray[np.uint64]
"""Addresses or other words of 64 bits."""

W = TypeVar("W", bound=np.generic)

Reason = Literal["excluded", "unreadable"]

T = TypeVar("T")

# Records closer to each other than _MAX_GAP are read at once: a read call costs as much
# as copying about ten KiB, and decompressing a page of a kdump as much again.
_MAX_GAP = 4096
_MAX_SPAN = 256 * 1024
_BATCH = 1 << 20

_FEW, _FEW_LIVE = 3, 8
"""Number of records up to which one read each is faster than sorting their addresses:
of a dump, and of a running kernel, where each sample would sort again."""

_SOME = 48
"""Number of records up to which they are sorted faster in Python than with numpy."""

WINDOW = PAGE
"""Bytes that are read at once around the target of a pointer."""

MAX_WINDOWS = 1 << 11
"""Maximum number of windows kept: 8 MiB."""

MAX_ADDRESS = (1 << 64) - 1
MAX_READ = 1 << 28
"""Maximum bytes of one read; no structure or contiguous table of a kernel is larger."""


def column(records: npt.NDArray[np.uint8], offset: int, size: int = 8) -> Addresses:
    """Return the unsigned member of *size* bytes at *offset* of each record."""
    part = np.ascontiguousarray(records[:, offset : offset + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


def distinct(words: npt.NDArray[W]) -> npt.NDArray[W]:
    """
    Return each distinct word once, ascending.

    np.unique() does the same, but imports numpy.ma, and since NumPy 2.3 it hashes the
    words, which takes five times as long.
    """
    ascending = np.sort(words, kind="stable")
    return ascending[first_of_each(ascending)]


def first_of_each(ascending: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each of ascending words whether it differs from the one before."""
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


class Gap(Struct, frozen=True):
    """A part of a range that could not be read: offset in the range, size in bytes."""

    offset: int
    size: int
    reason: Reason


def fault_reason(error: drgn.FaultError | DamagedDataError) -> Reason:
    """
    Return why a page is missing: left out when the dump was made, or unreadable.

    libkdumpfile's error says ``Excluded page``; drgn's says ``could not find memory
    segment`` for an address that no segment of the file covers.
    """
    if is_left_out(error) or "could not find" in str(error):
        return "excluded"
    return "unreadable"


def is_left_out(error: drgn.FaultError | DamagedDataError) -> bool:
    """Return whether a page was left out for its kind or contents (makedumpfile -d)."""
    return "xcluded" in str(error)


def _memory_bytes(prog: drgn.Program) -> int:
    """Return the bytes of allocatable memory; :data:`MAX_ADDRESS` if unknown."""
    try:
        pages = int(ask(totalram_pages, prog))
    except LOST:
        return MAX_ADDRESS
    return pages * int(find_variable(prog, "PAGE_SIZE").value_())


class Reader:
    """A program's memory, with a count of the reads and bytes asked for."""

    def __init__(self, prog: drgn.Program) -> None:
        self.prog = prog
        self.reads = 0
        self.bytes = 0
        self._known: dict[Hashable, object] = {}
        flags = prog.flags
        live, local = drgn.ProgramFlags.IS_LIVE, drgn.ProgramFlags.IS_LOCAL
        self.is_live = bool(flags & live)
        """Whether memory changes while it is read."""

        self._is_remote = self.is_live and not flags & local
        self._windows: dict[int, bytes] = {}
        self._direct = direct_map(prog)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return ``find()``, called once per *key*, as lookups of types are slow."""
        if key not in self._known:
            self._known[key] = find()
        return cast(T, self._known[key])

    def most(self, size: int) -> int:
        """Return the maximum number of objects of *size* bytes that memory can hold."""
        return self.once("memory", lambda: _memory_bytes(self.prog)) // size

    def read(self, address: int, size: int, *, physical: bool = False) -> bytes:
        """
        Read *size* bytes.

        Address and size may come from a damaged dump: an impossible range is a fault.
        An I/O error of the dump's file, or of /proc/kcore, is a fault too.

        :raises drgn.FaultError: if any byte of the range cannot be read
        :raises OSError: if a remote target, such as a guest, is no longer reachable
        """
        if not (0 <= address <= MAX_ADDRESS and 0 <= size <= MAX_READ):
            raise drgn.FaultError("no such range of memory", address & MAX_ADDRESS)
        self.reads += 1
        self.bytes += size
        offset = address - self._direct.start
        direct = not physical and 0 <= offset <= self._direct.size - size
        data: bytes
        try:
            if direct:
                data = self.prog.read(self._direct.physical + offset, size, True)
            elif physical or not self._direct.is_paged(address, size):
                data = self.prog.read(address, size, physical)
            else:
                data = self._read_paged(address, size)
        except UNREADABLE as error:
            if not direct:
                raise
            raise drgn.FaultError(str(error), address) from error
        except OSError as error:
            # EFAULT: QEMU has no memory there, as the guest's was unplugged.
            if self._is_remote and error.errno != errno.EFAULT:
                raise
            why = f"could not be read: {error.strerror}"
            raise drgn.FaultError(why, address) from error
        return data

    def _read_paged(self, address: int, size: int) -> bytes:
        """Read vmalloc() memory of a dump through page tables that are read once."""
        tables = self._direct.tables
        assert tables is not None
        try:
            return tables.read(address, size, 0, physical=False)
        except UNREADABLE:
            # drgn's error says more.
            data: bytes = self.prog.read(address, size)
            return data

    def read_each(
        self, addresses: Addresses, sizes: Addresses
    ) -> Iterator[bytes | drgn.FaultError | DamagedDataError]:
        """
        Read *sizes* bytes at *addresses*, each range as :meth:`read` does.

        For many ranges of vmalloc() memory, such as stacks, this is faster.

        :return: The bytes of each range, or the error that :meth:`read` raises.
        """
        places = self._direct.places(addresses, sizes)
        wanted = zip(addresses.tolist(), sizes.tolist(), places, strict=True)
        read = self.prog.read
        for address, size, place in wanted:
            if place >= 0:
                try:
                    data = read(place, size, True)
                except (*UNREADABLE, OSError):
                    pass  # read() repeats it and raises the right error
                else:
                    self.reads += 1
                    self.bytes += size
                    yield data
                    continue
            try:
                yield self.read(address, size)
            except UNREADABLE as error:
                yield error

    def words(
        self, address: int, count: int, *, physical: bool = False
    ) -> npt.NDArray[np.uint64]:
        """Read *count* 64-bit words."""
        return np.frombuffer(self.read(address, 8 * count, physical=physical), "<u8")

    def read_near(self, address: int, size: int) -> bytes:
        """
        Read *size* bytes as :meth:`read` does, for callers that follow pointers.

        Linked structures often lie side by side: so a whole window of a dump, which
        does not change, is read at once and kept.

        :raises drgn.FaultError: if any byte of the range cannot be read
        """
        start = address & -WINDOW
        offset = address - start
        if self.is_live or offset + size > WINDOW:
            return self.read(address, size)
        window = self._windows.get(start)
        if window is None:
            try:
                window = self.window(start)
            except UNREADABLE:
                return self.read(address, size)
        return window[offset : offset + size]

    def window(self, start: int) -> bytes:
        """
        Read :data:`WINDOW` bytes of a dump, and keep them.

        :param start: A multiple of :data:`WINDOW`.
        :raises drgn.FaultError: if any of these bytes cannot be read
        """
        window = self._windows.get(start)
        if window is None:
            window = self.read(start, WINDOW)
            if len(self._windows) >= MAX_WINDOWS:
                self._windows.clear()
            self._windows[start] = window
        return window

    def words_near(
        self, addresses: Addresses
    ) -> tuple[Addresses, npt.NDArray[np.bool_]]:
        """
        Read the 64-bit word at each of many addresses, as :meth:`read_near` does.

        :return: The words, and whether each could be read; those that could not are
            zero.
        """
        numbers = addresses // np.uint64(WINDOW)
        needed = distinct(numbers)
        aligned = not (addresses % np.uint64(8)).any()
        if aligned and not self.is_live and len(needed) <= MAX_WINDOWS:
            try:
                windows = [self.window(number * WINDOW) for number in needed.tolist()]
            except UNREADABLE:
                pass  # some of them may be readable
            else:
                words = np.frombuffer(b"".join(windows), "<u8")
                firsts = needed.searchsorted(numbers) * (WINDOW // 8)
                within = addresses % np.uint64(WINDOW) // np.uint64(8)
                values = words[firsts + within.astype(np.intp)]
                return values, np.ones(len(addresses), np.bool_)
        records, readable = self.read_records(addresses, 8)
        return column(records, 0), readable

    def read_around_gaps(
        self, address: int, size: int, granule: int
    ) -> tuple[bytes | bytearray, list[Gap]]:
        """
        Read a range parts of which may be missing.

        Gaps are found by halving, down to blocks of *granule* bytes.

        :return: The bytes, zero in the gaps, and the gaps.
        """
        try:
            return self.read(address, size), []
        except UNREADABLE as error:
            if size <= granule:
                return bytes(size), [Gap(0, size, fault_reason(error))]
        data = bytearray(size)
        gaps: list[Gap] = []
        half = -(-size // (2 * granule)) * granule
        todo = [(half, size - half), (0, half)]
        while todo:
            offset, length = todo.pop()
            try:
                data[offset : offset + length] = self.read(address + offset, length)
            except UNREADABLE as error:
                if length <= granule:
                    gaps.append(Gap(offset, length, fault_reason(error)))
                else:
                    half = -(-length // (2 * granule)) * granule
                    todo.append((offset + half, length - half))
                    todo.append((offset, half))
        return data, gaps

    def read_records(
        self, addresses: Addresses, size: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """
        Read *size* bytes at each of many addresses, neighbours with one read.

        :return: The records, shape ``(len(addresses), size)``, and whether each
            could be read; those that could not are zero.
        """
        records = np.zeros((len(addresses), size), np.uint8)
        readable = np.zeros(len(addresses), np.bool_)
        if len(addresses) <= (_FEW_LIVE if self.is_live else _FEW):
            self._read_each(addresses, range(len(addresses)), records, readable)
            return records, readable
        if len(addresses) <= _SOME:
            self._read_some(addresses.tolist(), records, readable)
            return records, readable
        record = np.dtype((np.void, size))
        whole = records.view(record)[:, 0]
        sizes = np.full(len(addresses), size, np.uint64)
        for pieces in self._read_pieces(addresses, sizes):
            # Copying whole records is faster than copying columns.
            whole[pieces.rows] = pieces.at_each_byte(record)[pieces.offsets]
            readable[pieces.rows] = True
        return records, readable

    def read_arrays(
        self, addresses: Addresses, counts: Addresses, most: int | None = None
    ) -> tuple[Addresses, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """
        Read an array of 64-bit words at each address, neighbours with one read.

        With damaged counts many arrays may overlap. Arrays that exceed *most* words in
        total, the shortest first, count as unreadable.

        :param counts: Number of words of each array.
        :param most: By default as many words as memory can hold.
        :return: The words of all arrays, for each word the row of its array, and
            whether each array could be read. The words of an array are consecutive;
            the arrays are in no order.
        """
        most = self.most(8) if most is None else most
        # Shortest first, so that only absurd counts exceed the limit; summed as floats,
        # as a sum of integers could overflow.
        order = np.argsort(counts)
        possible = np.empty(len(counts), np.bool_)
        possible[order] = np.cumsum(counts[order], dtype=np.float64) <= most
        readable = counts == 0
        words, rows = [np.empty(0, np.uint64)], [np.empty(0, np.intp)]
        large = (counts > _MAX_SPAN // 8) & possible
        for row in np.flatnonzero(large).tolist():
            try:
                words.append(self.words(int(addresses[row]), int(counts[row])))
            except UNREADABLE:
                continue
            readable[row] = True
            rows.append(np.full(len(words[-1]), row, np.intp))
        small = np.flatnonzero((counts > 0) & ~large & possible)
        for pieces in self._read_pieces(addresses[small], counts[small] * np.uint64(8)):
            arrays = small[pieces.rows]
            readable[arrays] = True
            lengths = counts[arrays].astype(np.intp)
            before = np.cumsum(lengths) - lengths
            offsets = np.repeat(pieces.offsets - 8 * before, lengths)
            offsets += 8 * np.arange(len(offsets))
            words.append(pieces.at_each_byte(np.dtype("<u8"))[offsets])
            rows.append(np.repeat(arrays, lengths))
        return np.concatenate(words), np.concatenate(rows), readable

    def _read_pieces(
        self, addresses: Addresses, sizes: Addresses
    ) -> Iterator["_Pieces"]:
        """Read *sizes* bytes at *addresses*, neighbours with one read."""
        order = np.argsort(addresses, kind="stable")
        # Leave out ranges that run past the last address.
        order = order[(addresses + (sizes - np.uint64(1)) >= addresses)[order]]
        for spans in _spans(addresses[order], sizes[order]):
            rows = order[spans.firsts[0] : spans.ends[-1]]
            pieces = self._read_spans(spans, rows, addresses[rows], sizes[rows])
            if pieces.data:
                yield pieces

    def _read_spans(
        self,
        spans: "_Spans",
        rows: npt.NDArray[np.intp],
        addresses: Addresses,
        sizes: Addresses,
    ) -> "_Pieces":
        parts = [
            self._read_or_empty(base, size)
            for base, size in zip(
                spans.bases.tolist(), spans.sizes.tolist(), strict=True
            )
        ]
        held = np.fromiter(map(len, parts), np.uint64, len(parts))
        counts = spans.ends - spans.firsts
        moved = spans.bases - (np.cumsum(held) - held)
        offsets = (addresses - np.repeat(moved, counts)).astype(np.intp)
        readable = np.repeat(held != 0, counts)
        # Some pieces of a span that cannot be read as a whole may be readable.
        alone = ~readable & np.repeat(counts > 1, counts)
        end = int(held.sum())
        for index in np.flatnonzero(alone).tolist():
            data = self._read_or_empty(int(addresses[index]), int(sizes[index]))
            readable[index], offsets[index] = bool(data), end
            parts.append(data)
            end += len(data)
        return _Pieces(b"".join(parts), offsets[readable], rows[readable])

    def _read_or_empty(self, address: int, size: int) -> bytes:
        try:
            return self.read(address, size)
        except UNREADABLE:
            return b""

    def _read_each(
        self,
        addresses: Addresses | list[int],
        rows: Iterable[int],
        records: npt.NDArray[np.uint8],
        readable: npt.NDArray[np.bool_],
    ) -> None:
        for row in rows:
            try:
                data = self.read(int(addresses[row]), records.shape[1])
            except UNREADABLE:
                continue
            records[row] = np.frombuffer(data, np.uint8)
            readable[row] = True

    def _read_some(
        self,
        addresses: list[int],
        records: npt.NDArray[np.uint8],
        readable: npt.NDArray[np.bool_],
    ) -> None:
        """Read few records, neighbours with one read, as :meth:`_read_pieces` does."""
        size = records.shape[1]
        order = sorted(range(len(addresses)), key=addresses.__getitem__)
        found: list[int] = []
        parts: list[bytes] = []
        first = 0
        while first < len(order):
            base = last = addresses[order[first]]
            end = first + 1
            while end < len(order):
                address = addresses[order[end]]
                apart = address - last - size >= _MAX_GAP
                if apart or (address ^ last) >= _MAX_SPAN:
                    break
                last, end = address, end + 1
            rows, first = order[first:end], end
            data = self._read_or_empty(base, last - base + size)
            if data:
                found += rows
                starts = (addresses[row] - base for row in rows)
                parts += [data[start : start + size] for start in starts]
            elif len(rows) > 1:
                # Some of them may be readable.
                self._read_each(addresses, rows, records, readable)
        if found:
            joined = np.frombuffer(b"".join(parts), np.uint8)
            records[found] = joined.reshape(len(found), size)
            readable[found] = True


class _Pieces(NamedTuple):
    """Pieces of memory that were read, at any places in one buffer."""

    data: bytes
    offsets: npt.NDArray[np.intp]
    """Offset of each piece in *data*."""

    rows: npt.NDArray[np.intp]
    """Row of each piece among the requested addresses."""

    def at_each_byte(self, type_: np.dtype[Any]) -> npt.NDArray[Any]:
        """View *data* as overlapping values of a type, one from each byte offset on."""
        count = len(self.data) - type_.itemsize + 1
        return np.ndarray(count, type_, self.data, strides=(1,))


class _Spans(NamedTuple):
    """Runs of neighbouring pieces, by ascending address, each covered by one read."""

    firsts: npt.NDArray[np.intp]
    ends: npt.NDArray[np.intp]
    """Index of the first piece of each run, and of the one after its last."""

    bases: Addresses
    """Address of the first piece of each run."""

    sizes: Addresses
    """Bytes of each run, up to its highest end of a piece."""


def _spans(addresses: Addresses, sizes: Addresses) -> Iterator[_Spans]:
    """Yield the runs in batches of about *_BATCH* bytes, to bound the memory used.

    :param addresses: Ascending.
    """
    if not len(addresses):
        return
    lasts = addresses + (sizes - np.uint64(1))
    reach = np.minimum(lasts, np.uint64(MAX_ADDRESS - _MAX_GAP)) + np.uint64(_MAX_GAP)
    apart = addresses[1:] > reach[:-1]
    apart |= (addresses[1:] ^ addresses[:-1]) >= np.uint64(_MAX_SPAN)
    cuts = np.flatnonzero(apart) + 1
    firsts, ends = np.append(0, cuts), np.append(cuts, len(addresses))
    bases = addresses[firsts]
    lengths = np.maximum.reduceat(lasts, firsts) - bases + np.uint64(1)
    batches = np.cumsum(lengths) // np.uint64(_BATCH)
    edges = [0, *(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(batches)]
    for edge, next_ in pairwise(edges):
        batch = slice(edge, next_)
        yield _Spans(firsts[batch], ends[batch], bases[batch], lengths[batch])


# --- C strings, in data or in memory.


def decode_string(data: bytes) -> str:
    """Return the text of *data* up to its first zero byte, if it has one.

    Bytes that are not UTF-8 are escaped.
    """
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def read_string(reader: Reader, address: int, most: int) -> str:
    """Read a string of at most *most* bytes, without its zero byte.

    The page after the string's end is not read, as it may be missing. Bytes that are
    not UTF-8 are escaped.

    :raises UNREADABLE: if it cannot be read, or is longer
    """
    data = b""
    while b"\0" not in data:
        if len(data) > most:
            raise DamagedDataError("a string does not end", address)
        position = address + len(data)
        data += reader.read(position, min(most + 1, PAGE - position % PAGE))
    return decode_string(data)
