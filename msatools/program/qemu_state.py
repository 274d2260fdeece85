# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's RAM in files of QEMU: migrated to a file, saved, snapshots in qcow2."""

import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from drgn import FaultError

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.program.formats import ReadAt, read_exactly, reader_of
from msatools.program.raw_memory import PAGE_BYTES, Memory, MemoryRange

# --- Memory in disk images: what QEMU's savevm writes into a qcow2 file.
#
# Each internal snapshot can have the state of the guest, which is a stream as migrate
# writes it. The state lies behind the end of the disk, in clusters that the snapshot's
# own tables map (QEMU's docs/interop/qcow2.txt, block/qcow2-snapshot.c).


QCOW2_MAGIC = b"QFI\xfb"

_HEADER = struct.Struct(">4sI8x4xIQIIQ8x4xIQ")
"""Magic, version, bits of a cluster, size of the disk, encryption, entries and offset
of the L1 table, number and offset of the snapshots."""

_FEATURES = 72
"""Offset of the incompatible features in version 3, of 64 bits."""

_DATA_FILE, _LONG_ENTRIES = 1 << 2, 1 << 4
_CLUSTER_BITS = range(9, 22)

_SNAPSHOT = struct.Struct(">QIHHIIQII")
"""Offset and entries of its L1 table, bytes of its ID and of its name, seconds and
nanoseconds, clock of the guest, bytes of the state, bytes of further data."""

_MORE = struct.Struct(">QQ")
"""Further data: bytes of the state, and of the disk."""

_MOST_SNAPSHOTS = 1 << 16
_QCOW2_MOST_NAME = 1 << 10
_MOST_STATE = 1 << 42

_ENTRY_BYTES = 8
_PLACE = ((1 << 56) - 1) & ~((1 << 9) - 1)
_COPIED, _COMPRESSED, _ZEROS = 1 << 63, 1 << 62, 1 << 0
"""Flags of an entry; the first marks a cluster that belongs to one snapshot only."""

_TABLES_KEPT = 64
_QCOW2_AT_ONCE = 64
"""Maximum number of clusters to read at once: 4 MiB if they have the usual size."""


class Snapshot(NamedTuple):
    """An internal snapshot with the state of the guest."""

    name: str
    table: int
    """Offset of the snapshot's L1 table in the file."""

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
    :raises EOFError: if it ends within its headers
    :raises NotSupportedError: if it is encrypted, or of another kind that is not read
    """
    return list(_snapshots(read, _header(read)))


def _header(read: ReadAt) -> _Header:
    fields = _HEADER.unpack(read_exactly(read, 0, _HEADER.size))
    magic, version, bits, size, encryption, _, _, count, offset = fields
    if magic != QCOW2_MAGIC or version not in (2, 3) or bits not in _CLUSTER_BITS:
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
        name = read_exactly(read, position, min(name_bytes, _QCOW2_MOST_NAME))
        # Each snapshot's header begins at a multiple of 8.
        position += name_bytes + -(position + name_bytes) % 8
        if state > _MOST_STATE:
            raise DamagedDataError("a snapshot with a state of an impossible size")
        if state:
            text = name.decode("utf-8", "backslashreplace")
            yield Snapshot(text, table, entries, state, disk)


class StateReader:
    """Reads the state of a guest in a snapshot, by offset in the state."""

    def __init__(self, read: ReadAt, snapshot: Snapshot) -> None:
        header = _header(read)
        self._read = read
        self._snapshot = snapshot
        self._bits = header.cluster_bits
        self._cluster = 1 << self._bits
        self._span_bits = self._bits + (self._cluster // _ENTRY_BYTES).bit_length() - 1
        # The state begins with a new L2 table, the first behind those of the disk.
        tables = -(-snapshot.disk_bytes >> self._span_bits)
        self._start = tables << self._span_bits
        self._tables: dict[int, npt.NDArray[np.uint64]] = {}

    def __call__(self, position: int, size: int) -> bytes:
        """Read bytes of the state; fewer at its end.

        :raises DamagedDataError: if the snapshot's tables make no sense
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
        """Return the offset in the file of a byte of the disk; ``None`` for zeros.

        Also return the number of bytes from there without a gap.
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
        # Clusters that follow each other in the file are read at once.
        count = 1
        while (
            first + count < len(table)
            and count < _QCOW2_AT_ONCE
            and int(table[first + count]) & ~_COPIED
            == (word & ~_COPIED) + (count << self._bits)
        ):
            count += 1
        return (word & _PLACE) + within, room + (count - 1 << self._bits)

    def _table(self, index: int) -> npt.NDArray[np.uint64]:
        """Return the entries of an L2 table; empty if the table is not allocated."""
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


# --- Streams that QEMU writes of a guest: migrate, savevm and virsh save.
#
# The guest's memory is in the section named ram (QEMU's migration/ram.c; the framing in
# migration/savevm.c): blocks by name and size, and then pages, each by its offset in a
# block. Of a page with one byte repeated, nearly always 0, only that byte is stored. A
# page that comes again replaces the former one. Pages are read where the stream has
# them, without a copy of the stream.


QEVM_MAGIC = b"QEVM"
_VERSION = 3

_EOF, _START, _PART, _END, _FULL = range(5)
_SUBSECTION, _CONFIGURATION, _FOOTER = 0x05, 0x07, 0x7E
"""Kinds of sections."""

_PAGE_BITS, _UUID, _CAPABILITIES = (
    b"configuration/target-page-bits",
    b"configuration/uuid",
    b"configuration/capabilities",
)
_FORMS = (b"mapped-ram", b"multifd", b"compress", b"xbzrle", b"x-ignore-shared")
"""Capabilities of a migration with which pages have another form, or are missing."""

_ZERO, _MEM_SIZE, _PAGE, _EOS, _CONTINUE = 0x02, 0x04, 0x08, 0x10, 0x20
_MULTIFD_FLUSH = 0x200
_FLAGS = PAGE_BYTES - 1
"""Flags are in the bits of an address below a page."""

_NOT_READ = {0x40: "XBZRLE", 0x80: "RDMA", 0x100: "compression"}

_MOST_BYTES = 1 << 40
"""Maximum bytes of a guest's RAM: the index here takes 9 bytes per page."""

_QEMUSTATE_MOST_NAME = 255
_RAM = b"ram"
_MAIN = (b"pc.ram", b"mach-virt.ram", b"ram-node", b"/objects/", b"ppc_spapr.ram")
"""Starts of names of blocks that are a guest's RAM, not a device's."""

_LEAST_RAM = 64 << 20
"""Minimum bytes of a block with another name that can be a guest's RAM."""

_ABSENT, _FILLED = -1, -2
"""In place of the offset of a page that is not in the stream, and of one whose bytes
are all the same."""

_HEADER_BYTES = 8
_STRIDE = _HEADER_BYTES + PAGE_BYTES
_FIRST_RUN, _QEMUSTATE_AT_ONCE = 4, 256
"""Number of pages whose headers are compared together, at first and at most."""

_WINDOW_BYTES = 1 << 14
"""Bytes to read at once for small fields."""


class QemuState(Memory):
    """The RAM of a guest in a stream."""

    is_packed = True

    def __init__(
        self, path: str, offset: int = 0, name: str = "QEMU migration"
    ) -> None:
        """Read the headers of all pages.

        :param offset: Where the stream begins in the file.
        :raises DamagedDataError: if it is no such stream
        :raises NotSupportedError: if it has pages in a form that is not read
        :raises OSError: if it cannot be read
        """
        self.name = name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        size = os.lseek(fd, 0, os.SEEK_END)
        self._read = reader_of(fd)
        if self._read(0, len(QCOW2_MAGIC)) == QCOW2_MAGIC:
            snapshot, self.name = _newest(self._read)
            self._read = StateReader(self._read, snapshot)
            size = snapshot.state_bytes
        index = _Index(self._read, offset, size)
        self.is_truncated = not index.read_all()
        self._pages, self._fills = index.ram()
        if not len(self._pages):
            raise DamagedDataError("a stream of QEMU without RAM")
        self._range = MemoryRange(0, len(self._pages) * PAGE_BYTES, 0)

    @property
    def ranges(self) -> Sequence[MemoryRange]:
        return (self._range,)

    def filled(self) -> Iterator[tuple[int, int]]:
        stored = np.flatnonzero(self._pages >= 0)
        if not len(stored):
            return
        # Runs of stored pages: pages that are absent or filled end a run.
        edges = np.flatnonzero(np.diff(stored) > 1) + 1
        for first, last in zip(
            (0, *edges.tolist()), (*edges.tolist(), len(stored)), strict=True
        ):
            start, end = int(stored[first]), int(stored[last - 1]) + 1
            yield start * PAGE_BYTES, end * PAGE_BYTES

    def read(self, address: int, size: int) -> bytes:
        first, end = address // PAGE_BYTES, -(-(address + size) // PAGE_BYTES)
        if address < 0 or end > len(self._pages):
            raise FaultError("not in the file", address)
        parts: list[bytes] = []
        offsets = self._pages[first:end].tolist()
        index = 0
        while index < len(offsets):
            offset = offsets[index]
            if offset == _ABSENT:
                raise FaultError("not in the file", (first + index) * PAGE_BYTES)
            if offset == _FILLED:
                parts.append(bytes([int(self._fills[first + index])]) * PAGE_BYTES)
                index += 1
                continue
            # Pages that follow each other in the file are read at once.
            count = 1
            while (
                index + count < len(offsets)
                and count < _QEMUSTATE_AT_ONCE
                and offsets[index + count] == offset + count * _STRIDE
            ):
                count += 1
            parts += self._run(offset, count, (first + index) * PAGE_BYTES)
            index += count
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        within = address - first * PAGE_BYTES
        return data[within : within + size]

    def _run(self, offset: int, count: int, address: int) -> list[bytes]:
        size = count * _STRIDE - 8
        try:
            data = self._read(offset, size)
        except OSError as error:
            raise FaultError(error.strerror or "not in the file", address) from error
        except DamagedDataError as error:
            raise FaultError("damaged in the file", address) from error
        if len(data) < size:
            raise FaultError("not in the file", address)
        return [data[start : start + PAGE_BYTES] for start in range(0, size, _STRIDE)]


def _newest(read: ReadAt) -> tuple[Snapshot, str]:
    """Return the newest snapshot with a guest's state, and its name for the user."""
    found = snapshots_with_state(read)
    if not found:
        raise DamagedDataError("a qcow2 image without the memory of a guest")
    newest = found[-1]
    which = f", the newest of {len(found)}" if len(found) > 1 else ""
    return newest, f"savevm {newest.name!r}{which}"


class _Block:
    """Offset in the stream, and fill byte, of each page of a block of RAM."""

    def __init__(self, size: int) -> None:
        pages = size // PAGE_BYTES
        self.offsets = np.full(pages, _ABSENT, np.int64)
        self.fills = np.zeros(pages, np.uint8)


class _Index:
    """Index of the pages in a stream, up to the end of RAM."""

    def __init__(self, read: ReadAt, position: int, size: int) -> None:
        self._read = read
        self._at = position
        self._size = size
        self._window, self._window_at = b"", 0
        self._blocks: dict[bytes, _Block] = {}
        self._last: _Block | None = None
        """The block of the last page. A page of the same block does not repeat its
        name, even in another section."""

        self._ram: int | None = None
        """Number of the section ``ram``; ``None`` before that section."""

    def read_all(self) -> bool:
        """Read up to the end of RAM; return False if the stream ends before."""
        magic, version = self._take(4), self._number(4)
        if magic != QEVM_MAGIC or version != _VERSION:
            raise DamagedDataError("a stream of QEMU of an unknown version")
        try:
            return self._sections()
        except EOFError:
            if not self._blocks:
                raise
            return False

    def ram(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the offset and the fill byte of each page of all RAM, in order."""
        found = [
            block
            for name, block in self._blocks.items()
            if name.startswith(_MAIN) or len(block.offsets) * PAGE_BYTES >= _LEAST_RAM
        ]
        # By size only if no name is known: video memory can be as large as RAM.
        named = [
            block for name, block in self._blocks.items() if name.startswith(_MAIN)
        ]
        chosen = named or found
        if not chosen:
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        return (
            np.concatenate([block.offsets for block in chosen]),
            np.concatenate([block.fills for block in chosen]),
        )

    def _sections(self) -> bool:
        while True:
            kind = self._number(1)
            if kind == _CONFIGURATION:
                self._take(self._number(4, most=_QEMUSTATE_MOST_NAME * 16))
            elif kind == _SUBSECTION:
                self._subsection(self._take(self._number(1)))
            elif kind in (_START, _FULL):
                number = self._number(4)
                name = self._take(self._number(1))
                self._take(8)  # instance and version
                if name != _RAM:
                    if self._ram is not None and kind == _FULL:
                        # A device's section: these follow all RAM.
                        return True
                    raise NotSupportedError(
                        f"a section {name.decode('ascii', 'backslashreplace')!r} "
                        "before the end of RAM"
                    )
                self._ram = number
                self._records()
            elif kind in (_PART, _END):
                if self._number(4) != self._ram:
                    raise NotSupportedError("sections of other devices within RAM")
                self._records()
                if kind == _END:
                    return True
            elif kind == _FOOTER:
                self._take(4)
            elif kind == _EOF and self._ram is not None:
                return True
            else:
                raise DamagedDataError(
                    "a stream of QEMU with an unknown section", self._at
                )

    def _subsection(self, name: bytes) -> None:
        """Read a subsection of the configuration."""
        self._take(4)  # version
        if name == _PAGE_BITS:
            self._take(4)
        elif name == _UUID:
            self._take(16)
        elif name == _CAPABILITIES:
            names = [
                self._take(self._number(1))
                for _ in range(self._number(4, most=_QEMUSTATE_MOST_NAME))
            ]
            for each in names:
                if each in _FORMS:
                    raise NotSupportedError(f"pages by {each.decode('ascii')}")
        else:
            raise NotSupportedError(
                f"a configuration {name.decode('ascii', 'backslashreplace')!r}"
            )

    def _records(self) -> None:
        """Read records of a section up to its end."""
        while True:
            word = self._number(8)
            flags, address = word & _FLAGS, word & ~_FLAGS
            for flag, what in _NOT_READ.items():
                if flags & flag:
                    raise NotSupportedError(f"pages by {what}")
            if flags & _EOS:
                return
            if flags & _MEM_SIZE:
                self._list_blocks(address)
                continue
            if flags & _MULTIFD_FLUSH:
                raise NotSupportedError("pages by multifd")
            if not flags & _CONTINUE:
                name = self._take(self._number(1))
                self._last = self._blocks.get(name)
            block = self._last
            if block is None or not flags & (_ZERO | _PAGE):
                raise DamagedDataError("a page of no block", self._at)
            page = address // PAGE_BYTES
            if page >= len(block.offsets):
                raise DamagedDataError("a page beyond its block", self._at)
            if flags & _ZERO:
                block.offsets[page] = _FILLED
                block.fills[page] = self._number(1)
                self._run(block, page + 1, _ZERO, 1)
                continue
            if self._at + PAGE_BYTES > self._size:
                raise EOFError
            block.offsets[page] = self._at
            self._at += PAGE_BYTES
            self._run(block, page + 1, _PAGE, PAGE_BYTES)

    def _run(self, block: _Block, page: int, flag: int, room: int) -> None:
        """Index consecutive pages of one kind at once, as most pages are.

        :param page: Index of the first page.
        :param room: Bytes of each page in the stream, without its header.
        """
        stride = _HEADER_BYTES + room
        at_once = _FIRST_RUN
        while True:
            data = self._read(self._at, at_once * stride)
            count = min(len(data) // stride, len(block.offsets) - page)
            if not count:
                return
            rows = np.frombuffer(data, np.uint8, count * stride).reshape(count, stride)
            words = rows[:, :_HEADER_BYTES].copy().view(">u8")[:, 0]
            expected = np.arange(page, page + count, dtype=np.uint64) * np.uint64(
                PAGE_BYTES
            ) | np.uint64(flag | _CONTINUE)
            differ = np.flatnonzero(words != expected)
            same = int(differ[0]) if len(differ) else count
            if flag == _ZERO:
                block.offsets[page : page + same] = _FILLED
                block.fills[page : page + same] = rows[:same, _HEADER_BYTES]
            else:
                starts = self._at + _HEADER_BYTES + np.arange(same) * stride
                block.offsets[page : page + same] = starts
            self._at += same * stride
            page += same
            if same < count or count < at_once:
                return
            at_once = min(2 * at_once, _QEMUSTATE_AT_ONCE)

    def _list_blocks(self, total: int) -> None:
        if total > _MOST_BYTES:
            raise DamagedDataError("a guest of an impossible size", self._at)
        pages = sum(len(block.offsets) for block in self._blocks.values())
        while total > 0:
            name = self._take(self._number(1))
            size = self._number(8)
            pages += size // PAGE_BYTES
            if not 0 < size <= total or size % PAGE_BYTES or name in self._blocks:
                raise DamagedDataError("a block of an impossible size", self._at)
            if pages * PAGE_BYTES > _MOST_PAGES_OF * max(self._size, 1):
                raise DamagedDataError("more memory than the file can have", self._at)
            self._blocks[name] = _Block(size)
            total -= size

    def _number(self, size: int, most: int | None = None) -> int:
        number = int.from_bytes(self._take(size), "big")
        if most is not None and number > most:
            raise DamagedDataError("an impossible size", self._at)
        return number

    def _take(self, size: int) -> bytes:
        start = self._at - self._window_at
        data = self._window[start : start + size] if start >= 0 else b""
        if len(data) < size:
            data = read_exactly(self._read, self._at, size)
            self._window = self._read(self._at, _WINDOW_BYTES)
            self._window_at = self._at
        self._at += size
        return data


_MOST_PAGES_OF = PAGE_BYTES // 9
"""Maximum bytes of memory per byte of the file: a page of zeros takes 9 bytes."""

_LIBVIRT = struct.Struct("<16sIIIII")
"""``struct _virQEMUSaveHeader`` (libvirt's qemu_saveimage.h): magic, version, size of
the XML, whether the guest ran, compression, offset of the cookie; 14 words follow."""

_LIBVIRT_BYTES = 92
_FORMATS = {
    1: ("gzip", "gzip -d"),
    2: ("bzip2", "bzip2 -d"),
    3: ("xz", "xz -d"),
    4: ("lzop", "lzop -d"),
    5: ("zstd", "zstd -d"),
}


def libvirt_stream(read: ReadAt) -> tuple[int, tuple[str, str] | None]:
    """Return the offset of the stream in a file by ``virsh save``, and its compression.

    :return: The compression as its name and the command that decompresses it; ``None``
        for none.
    :raises DamagedDataError: if the version or the compression is unknown
    """
    header = read_exactly(read, 0, _LIBVIRT_BYTES)
    _, version, size, _, compression, _ = _LIBVIRT.unpack_from(header)
    if version not in (1, 2):
        raise DamagedDataError(f"virsh save of an unknown version ({version})")
    start = _LIBVIRT_BYTES + size
    if not compression:
        return start, None
    if compression not in _FORMATS:
        raise DamagedDataError(f"virsh save of an unknown compression ({compression})")
    return start, _FORMATS[compression]
