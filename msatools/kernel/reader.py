# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reading memory in bulk, counting what it costs and surviving what is missing."""

import errno
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, cast

import drgn
import numpy as np
import numpy.typing as npt

from msatools.target.linear import direct_map

Addresses = npt.NDArray[np.uint64]
"""Addresses or other words of 64 bits."""

Reason = Literal["excluded", "unreadable"]

T = TypeVar("T")

# Records nearer to each other than this come with one read: a read call costs
# as much as copying some ten KiB, decompressing a page of a kdump as much again.
_MAX_GAP = 4096
_MAX_SPAN = 256 * 1024
_BATCH = 1 << 20

_FEW, _FEW_LIVE = 3, 8
"""To sort so many takes longer than a read each: of a dump, and of /proc/kcore, where
all is done again with each sample."""

WINDOW = 4096
"""Bytes that are read at once around what pointers lead to."""

MAX_WINDOWS = 1 << 11
"""That are kept: 8 MiB."""

_MAX_ADDRESS = (1 << 64) - 1
MAX_READ = 1 << 28
"""Larger than any structure or table that a kernel keeps in one piece."""


def column(records: npt.NDArray[np.uint8], offset: int, size: int = 8) -> Addresses:
    """Take the unsigned member of *size* bytes at *offset* of each record."""
    part = np.ascontiguousarray(records[:, offset : offset + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


def distinct(words: Addresses) -> Addresses:
    """
    Give each of the words once, ascending.

    As np.unique() does, which since NumPy 2.3 takes five times as long: it hashes them.
    """
    ascending = np.sort(words, kind="stable")
    return ascending[first_of_each(ascending)]


def first_of_each(ascending: Addresses) -> npt.NDArray[np.bool_]:
    """Tell which of ascending words differ from those before them."""
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


@dataclass(frozen=True)
class Gap:
    """A part of a read that could not be had."""

    offset: int
    size: int
    reason: Reason


def fault_reason(error: drgn.FaultError) -> Reason:
    """
    Tell a page that whoever made the dump left out from one that is damaged.

    libkdumpfile says ``Excluded page``; drgn says ``could not find memory
    segment`` for an address that no segment of the file covers.
    """
    text = str(error)
    if "xcluded" in text or "could not find" in text:
        return "excluded"
    return "unreadable"


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
        """Find something that the kernel's types tell, which takes long, once."""
        if key not in self._known:
            self._known[key] = find()
        return cast(T, self._known[key])

    def read(self, address: int, size: int, *, physical: bool = False) -> bytes:
        """
        Read *size* bytes.

        Address and size may come from a damaged dump: what cannot be is a fault
        like any other. So is what the kernel or the disk that holds a dump refuses.

        :raises drgn.FaultError: if any byte of the range cannot be read
        :raises OSError: if what is looked at from outside cannot be reached any more
        """
        if not (0 <= address <= _MAX_ADDRESS and 0 <= size <= MAX_READ):
            raise drgn.FaultError("no such range of memory", address & _MAX_ADDRESS)
        self.reads += 1
        self.bytes += size
        at = address - self._direct.start
        direct = not physical and 0 <= at <= self._direct.size - size
        data: bytes
        try:
            if direct:
                data = self.prog.read(at, size, True)
            else:
                data = self.prog.read(address, size, physical)
        except drgn.FaultError as error:
            if not direct:
                raise
            raise drgn.FaultError(str(error), address) from error
        except OSError as error:
            # What QEMU had for memory that the guest has no more is not there.
            if self._is_remote and error.errno != errno.EFAULT:
                raise
            why = f"could not be read: {error.strerror}"
            raise drgn.FaultError(why, address) from error
        return data

    def words(
        self, address: int, count: int, *, physical: bool = False
    ) -> npt.NDArray[np.uint64]:
        """Read *count* 64-bit words."""
        return np.frombuffer(self.read(address, 8 * count, physical=physical), "<u8")

    def read_near(self, address: int, size: int) -> bytes:
        """
        Read *size* bytes as :meth:`read` does, for those who follow pointers.

        What those lead to often lies side by side: of a dump, which does not change,
        all around is read at once and kept.

        :raises drgn.FaultError: if any byte of the range cannot be read
        """
        start = address & -WINDOW
        at = address - start
        if self.is_live or at + size > WINDOW:
            return self.read(address, size)
        window = self._windows.get(start)
        if window is None:
            try:
                window = self.window(start)
            except drgn.FaultError:
                return self.read(address, size)
        return window[at : at + size]

    def window(self, start: int) -> bytes:
        """
        Read :data:`WINDOW` bytes of a dump, which are kept.

        :param start: A multiple of that.
        :raises drgn.FaultError: if any byte of them cannot be read
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
        of_each = addresses // np.uint64(WINDOW)
        numbers = distinct(of_each)
        aligned = not (addresses % np.uint64(8)).any()
        if aligned and not self.is_live and len(numbers) <= MAX_WINDOWS:
            try:
                windows = [self.window(number * WINDOW) for number in numbers.tolist()]
            except drgn.FaultError:
                pass  # some of them may be there
            else:
                words = np.frombuffer(b"".join(windows), "<u8")
                places = addresses % np.uint64(WINDOW) // np.uint64(8)
                firsts = numbers.searchsorted(of_each) * (WINDOW // 8)
                found = words[firsts + places.astype(np.intp)]
                return found, np.ones(len(addresses), np.bool_)
        records, readable = self.read_records(addresses, 8)
        return column(records, 0), readable

    def read_around_gaps(
        self, address: int, size: int, granule: int
    ) -> tuple[bytes | bytearray, list[Gap]]:
        """
        Read a range of which parts may be missing.

        What cannot be read is zero in the result and named by a gap; gaps are
        found by halving, down to blocks of *granule* bytes.
        """
        try:
            return self.read(address, size), []
        except drgn.FaultError as error:
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
            except drgn.FaultError as error:
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
        record = np.dtype((np.void, size))
        whole = records.view(record)[:, 0]
        sizes = np.full(len(addresses), size, np.uint64)
        for pieces in self._read_pieces(addresses, sizes):
            # Whole records are copied fastest.
            whole[pieces.rows] = pieces.at_each_byte(record)[pieces.offsets]
            readable[pieces.rows] = True
        return records, readable

    def read_arrays(
        self, addresses: Addresses, counts: Addresses
    ) -> tuple[Addresses, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """
        Read an array of so many 64-bit words at each address, neighbours with one read.

        :return: The words of all arrays, the row of each word's array, ascending
            within each array only, and whether each array could be read.
        """
        readable = counts == 0
        words, rows = [np.empty(0, np.uint64)], [np.empty(0, np.intp)]
        large = counts > _MAX_SPAN // 8
        for row in np.flatnonzero(large).tolist():
            try:
                words.append(self.words(int(addresses[row]), int(counts[row])))
            except drgn.FaultError:
                continue
            readable[row] = True
            rows.append(np.full(len(words[-1]), row, np.intp))
        some = np.flatnonzero((counts > 0) & ~large)
        for pieces in self._read_pieces(addresses[some], counts[some] * np.uint64(8)):
            arrays = some[pieces.rows]
            readable[arrays] = True
            lengths = counts[arrays].astype(np.intp)
            before = np.cumsum(lengths) - lengths
            places = np.repeat(pieces.offsets - 8 * before, lengths)
            places += 8 * np.arange(len(places))
            words.append(pieces.at_each_byte(np.dtype("<u8"))[places])
            rows.append(np.repeat(arrays, lengths))
        return np.concatenate(words), np.concatenate(rows), readable

    def _read_pieces(
        self, addresses: Addresses, sizes: Addresses
    ) -> Iterator["_Pieces"]:
        """Read so many bytes at each address, neighbours with one read."""
        order = np.argsort(addresses, kind="stable")
        # What goes on beyond the last address there is nowhere.
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
            self._read_if_there(base, size)
            for base, size in zip(
                spans.bases.tolist(), spans.sizes.tolist(), strict=True
            )
        ]
        held = np.fromiter(map(len, parts), np.uint64, len(parts))
        counts = spans.ends - spans.firsts
        moved = spans.bases - (np.cumsum(held) - held)
        offsets = (addresses - np.repeat(moved, counts)).astype(np.intp)
        there = np.repeat(held != 0, counts)
        # Beside what cannot be read is what can.
        apart = ~there & np.repeat(counts > 1, counts)
        end = int(held.sum())
        for index in np.flatnonzero(apart).tolist():
            data = self._read_if_there(int(addresses[index]), int(sizes[index]))
            there[index], offsets[index] = bool(data), end
            parts.append(data)
            end += len(data)
        return _Pieces(b"".join(parts), offsets[there], rows[there])

    def _read_if_there(self, address: int, size: int) -> bytes:
        try:
            return self.read(address, size)
        except drgn.FaultError:
            return b""

    def _read_each(
        self,
        addresses: Addresses,
        rows: Iterable[int],
        records: npt.NDArray[np.uint8],
        readable: npt.NDArray[np.bool_],
    ) -> None:
        for row in rows:
            try:
                data = self.read(int(addresses[row]), records.shape[1])
            except drgn.FaultError:
                continue
            records[row] = np.frombuffer(data, np.uint8)
            readable[row] = True


class _Pieces(NamedTuple):
    """What was read of many places."""

    data: bytes
    offsets: npt.NDArray[np.intp]
    """Where in it that of each place begins."""

    rows: npt.NDArray[np.intp]
    """Of each place among those that were asked for."""

    def at_each_byte(self, type_: np.dtype[Any]) -> npt.NDArray[Any]:
        """Give what lies at each byte, as that type."""
        count = len(self.data) - type_.itemsize + 1
        return np.ndarray(count, type_, self.data, strides=(1,))


class _Spans(NamedTuple):
    """Runs of pieces of memory, by ascending address, that one read each covers."""

    firsts: npt.NDArray[np.intp]
    ends: npt.NDArray[np.intp]
    bases: Addresses
    """The address of the first piece of each."""

    sizes: Addresses
    """Bytes of each, to the end of its last piece."""


def _spans(addresses: Addresses, sizes: Addresses) -> Iterator[_Spans]:
    """Find what to read at once, by so many that to copy them takes little memory."""
    if not len(addresses):
        return
    lasts = addresses + (sizes - np.uint64(1))
    reach = np.minimum(lasts, np.uint64(_MAX_ADDRESS - _MAX_GAP)) + np.uint64(_MAX_GAP)
    apart = addresses[1:] > reach[:-1]
    apart |= (addresses[1:] ^ addresses[:-1]) >= np.uint64(_MAX_SPAN)
    cuts = np.flatnonzero(apart) + 1
    firsts, ends = np.append(0, cuts), np.append(cuts, len(addresses))
    bases = addresses[firsts]
    lengths = np.maximum.reduceat(lasts, firsts) - bases + np.uint64(1)
    batches = np.cumsum(lengths) // np.uint64(_BATCH)
    edges = [0, *(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(batches)]
    for edge, next_ in pairwise(edges):
        some = slice(edge, next_)
        yield _Spans(firsts[some], ends[some], bases[some], lengths[some])
