# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reading memory in bulk, counting what it costs and surviving what is missing."""

import errno
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import drgn
import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
"""Addresses or other words of 64 bits."""

Reason = Literal["excluded", "unreadable"]

T = TypeVar("T")

# Records nearer to each other than this come with one read: a read call costs
# as much as copying some ten KiB, decompressing a page of a kdump as much again.
_MAX_GAP = 4096
_MAX_SPAN = 256 * 1024

_FEW = 3
"""To sort so many takes longer than a read each."""

_WINDOW = 4096
_MAX_WINDOWS = 1 << 11

_SMALL_ARRAY = 64
"""Words of an array that is read as one of many records of one size."""

_MAX_ADDRESS = (1 << 64) - 1
MAX_READ = 1 << 28
"""Larger than any structure or table that a kernel keeps in one piece."""


def column(records: npt.NDArray[np.uint8], offset: int, size: int = 8) -> Addresses:
    """Take the unsigned member of *size* bytes at *offset* of each record."""
    part = np.ascontiguousarray(records[:, offset : offset + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


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
        self._is_live = bool(flags & live)
        self._is_remote = self._is_live and not flags & local
        self._windows: dict[int, bytes] = {}

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
        try:
            data: bytes = self.prog.read(address, size, physical)
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
        start = address & -_WINDOW
        at = address - start
        if self._is_live or at + size > _WINDOW:
            return self.read(address, size)
        window = self._windows.get(start)
        if window is None:
            try:
                window = self.read(start, _WINDOW)
            except drgn.FaultError:
                return self.read(address, size)
            if len(self._windows) >= _MAX_WINDOWS:
                self._windows.clear()
            self._windows[start] = window
        return window[at : at + size]

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
        if len(addresses) <= _FEW:
            self._read_each(addresses, range(len(addresses)), records, readable)
            return records, readable
        record = np.dtype((np.void, size))
        whole = records.view(record)[:, 0]
        order = np.argsort(addresses, kind="stable")
        ascending = addresses[order]
        start = 0
        for end in _span_ends(ascending, size):
            base = int(ascending[start])
            rows = order[start:end]
            if end - start == 1:
                self._read_each(addresses, rows.tolist(), records, readable)
                start = end
                continue
            try:
                data = self.read(base, int(ascending[end - 1]) - base + size)
            except drgn.FaultError:
                self._read_each(addresses, rows.tolist(), records, readable)
            else:
                offsets = (ascending[start:end] - ascending[start]).astype(np.int64)
                # One that begins at each byte: whole records are copied fastest.
                every = np.ndarray(len(data) - size + 1, record, data, strides=(1,))
                whole[rows] = every[offsets]
                readable[rows] = True
            start = end
        return records, readable

    def read_arrays(
        self, addresses: Addresses, counts: Addresses
    ) -> tuple[Addresses, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """
        Read an array of so many 64-bit words at each address.

        :return: The words of all arrays, the row of each word's array, ascending
            within each array only, and whether each array could be read.
        """
        readable = counts == 0
        words, rows = [np.empty(0, np.uint64)], [np.empty(0, np.intp)]
        small = (counts > 0) & (counts <= _SMALL_ARRAY)
        for count in np.unique(counts[small]).tolist():
            alike = np.flatnonzero(counts == count)
            records, whole = self.read_records(addresses[alike], 8 * count)
            readable[alike] = whole
            words.append(records[whole].view(np.uint64).ravel())
            rows.append(np.repeat(alike[whole], count))
        for row in np.flatnonzero(counts > _SMALL_ARRAY).tolist():
            try:
                words.append(self.words(int(addresses[row]), int(counts[row])))
            except drgn.FaultError:
                continue
            readable[row] = True
            rows.append(np.full(len(words[-1]), row, np.intp))
        return np.concatenate(words), np.concatenate(rows), readable

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


def _span_ends(addresses: npt.NDArray[np.uint64], size: int) -> Iterator[int]:
    """Find the ends of the runs of ascending addresses that one read each covers."""
    far = np.diff(addresses) > np.uint64(size + _MAX_GAP)
    start = 0
    for run in [*(np.flatnonzero(far) + 1).tolist(), len(addresses)]:
        if run - start == 1:
            # Most are, such as what each CPU has one of.
            start = run
            yield start
        while start < run:
            last = min(int(addresses[start]) + max(_MAX_SPAN - size, 0), _MAX_ADDRESS)
            part = addresses[start:run]
            start += int(np.searchsorted(part, np.uint64(last), side="right"))
            yield start
