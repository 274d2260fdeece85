# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory in disk images: what QEMU's ``savevm`` writes into a qcow2 file.

Each internal snapshot can have the state of the guest, which is the same stream as that
of ``migrate``. It lies behind the end of the disk, in clusters that the snapshot's own
tables map (QEMU's docs/interop/qcow2.txt, block/qcow2-snapshot.c).
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.target.reading import ReadAt, read_exactly

MAGIC = b"QFI\xfb"

_HEADER = struct.Struct(">4sI8x4xIQIIQ8x4xIQ")
"""Magic, version, bits of a cluster, size of the disk, encryption, entries and offset
of the L1 table, number and offset of the snapshots."""

_FEATURES = 72
"""Where version 3 has its incompatible features, of 64 bits."""

_DATA_FILE, _LONG_ENTRIES = 1 << 2, 1 << 4
_CLUSTER_BITS = range(9, 22)

_SNAPSHOT = struct.Struct(">QIHHIIQII")
"""Offset and entries of its L1 table, bytes of its ID and of its name, seconds and
nanoseconds, clock of the guest, bytes of the state, bytes of further data."""

_MORE = struct.Struct(">QQ")
"""Further data: bytes of the state, and of the disk."""

_MOST_SNAPSHOTS = 1 << 16
_MOST_NAME = 1 << 10
_MOST_STATE = 1 << 42

_ENTRY_BYTES = 8
_PLACE = ((1 << 56) - 1) & ~((1 << 9) - 1)
_COPIED, _COMPRESSED, _ZEROS = 1 << 63, 1 << 62, 1 << 0
"""Flags of an entry; the first says that a cluster is that of one snapshot alone."""

_TABLES_KEPT = 64
_AT_ONCE = 64
"""Clusters: 4 MiB, if they have the usual size."""


class Snapshot(NamedTuple):
    """An internal snapshot with the state of the guest."""

    name: str
    table: int
    """Where its L1 table lies."""

    entries: int
    state_bytes: int
    disk_bytes: int


class _Header(NamedTuple):
    cluster_bits: int
    disk_bytes: int
    snapshots: int
    snapshots_at: int


def snapshots_with_state(read: ReadAt) -> list[Snapshot]:
    """Return the snapshots of a qcow2 image that have the state of a guest.

    :raises DamagedDataError: if its headers make no sense
    :raises EOFError: if it ends within them
    :raises NotSupportedError: if it is of a kind whose clusters are not found here
    """
    return list(_snapshots(read, _header(read)))


def _header(read: ReadAt) -> _Header:
    fields = _HEADER.unpack(read_exactly(read, 0, _HEADER.size))
    magic, version, bits, size, encryption, _, _, count, offset = fields
    if magic != MAGIC or version not in (2, 3) or bits not in _CLUSTER_BITS:
        raise DamagedDataError("a qcow2 image of an unknown version")
    features = 0
    if version == 3:
        features = int.from_bytes(read_exactly(read, _FEATURES, 8), "big")
    for is_there, what in (
        (encryption, "that is encrypted"),
        (features & _DATA_FILE, "with a data file of its own"),
        (features & _LONG_ENTRIES, "with subclusters"),
    ):
        if count and is_there:
            raise NotSupportedError(f"a qcow2 image {what}")
    if count > _MOST_SNAPSHOTS:
        raise DamagedDataError("a qcow2 image with too many snapshots")
    return _Header(bits, size, count, offset)


def _snapshots(read: ReadAt, header: _Header) -> Iterator[Snapshot]:
    position = header.snapshots_at
    for _ in range(header.snapshots):
        fields = _SNAPSHOT.unpack(read_exactly(read, position, _SNAPSHOT.size))
        table, entries, id_bytes, name_bytes, _, _, _, state, more = fields
        position += _SNAPSHOT.size
        disk = header.disk_bytes
        if more >= _MORE.size:
            large, disk = _MORE.unpack(read_exactly(read, position, _MORE.size))
            state = large or state
        position += more + id_bytes
        name = read_exactly(read, position, min(name_bytes, _MOST_NAME))
        # Each begins at a multiple of 8.
        position += name_bytes + -(position + name_bytes) % 8
        if state > _MOST_STATE:
            raise DamagedDataError("a snapshot with a state of an impossible size")
        if state:
            text = name.decode("utf-8", "backslashreplace")
            yield Snapshot(text, table, entries, state, disk)


class StateReader:
    """Reads the state of a guest in a snapshot, by its own offsets."""

    def __init__(self, read: ReadAt, snapshot: Snapshot) -> None:
        header = _header(read)
        self._read = read
        self._snapshot = snapshot
        self._bits = header.cluster_bits
        self._cluster = 1 << self._bits
        self._span_bits = self._bits + (self._cluster // _ENTRY_BYTES).bit_length() - 1
        # It begins with an L2 table of its own.
        tables = -(-snapshot.disk_bytes >> self._span_bits)
        self._start = tables << self._span_bits
        self._tables: dict[int, npt.NDArray[np.uint64]] = {}

    def __call__(self, position: int, size: int) -> bytes:
        """Read bytes of the state; fewer at its end.

        :raises DamagedDataError: if its tables make no sense
        :raises OSError: if the disk fails
        """
        end = min(position + size, self._snapshot.state_bytes)
        parts = []
        while position < end:
            offset, room = self._place(self._start + position)
            count = min(end - position, room)
            data = bytes(count) if offset is None else self._read(offset, count)
            parts.append(data)
            if len(data) < count:
                break
            position += count
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _place(self, address: int) -> tuple[int | None, int]:
        """Return where bytes of the disk lie, and how many of them follow there.

        ``None`` stands for zeros.
        """
        within = address & (self._cluster - 1)
        table = self._table(address >> self._span_bits)
        first = (address & ((1 << self._span_bits) - 1)) >> self._bits
        word = int(table[first]) if len(table) else 0
        if word & _COMPRESSED:
            raise DamagedDataError("a state of a guest in compressed clusters", address)
        room = self._cluster - within
        if not word & _PLACE or word & _ZEROS:
            return None, room
        # Clusters that follow each other are read at once.
        count = 1
        while (
            first + count < len(table)
            and count < _AT_ONCE
            and int(table[first + count]) & ~_COPIED
            == (word & ~_COPIED) + (count << self._bits)
        ):
            count += 1
        return (word & _PLACE) + within, room + (count - 1 << self._bits)

    def _table(self, index: int) -> npt.NDArray[np.uint64]:
        """Return the entries of an L2 table; none if there is no such table."""
        found = self._tables.get(index)
        if found is None:
            if index >= self._snapshot.entries:
                raise DamagedDataError("a state of a guest beyond its tables")
            place = self._snapshot.table + index * _ENTRY_BYTES
            entry = int.from_bytes(read_exactly(self._read, place, 8), "big")
            data = b""
            if entry & _PLACE:
                data = read_exactly(self._read, entry & _PLACE, self._cluster)
            found = np.frombuffer(data, ">u8").astype(np.uint64)
            if len(self._tables) >= _TABLES_KEPT:
                del self._tables[next(iter(self._tables))]
            self._tables[index] = found
        return found
