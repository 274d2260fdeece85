# SPDX-License-Identifier: LGPL-2.1-or-later

"""Readers of files that hold a guest's memory, but do not locate its kernel."""

import os
import shlex
import struct
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from drgn import FaultError

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.program import formats, qemu_state
from msatools.program.dumpfile import DumpFile, os_error
from msatools.program.foreign import VMWARE_MAGICS, VMWARE_REMEDY
from msatools.program.formats import ReadAt, opened, read_exactly, reader_of
from msatools.program.kdump_pages import KdumpPages, LeftToDrgnError
from msatools.program.model import DamagedDumpError, NotADumpError
from msatools.program.raw_memory import FileMemory, Memory, MemoryRange, Ranges

# --- Images of memory by forensic tools: LiME's, and AVML's that are compressed.
#
# Both have a header before each range (LiME's documentation; AVML's image.rs). AVML
# compresses each range by snappy's framing format (framing_format.txt), whose chunks
# hold 64 KiB at most, so that any of them can be read alone. The size of a range in the
# file follows it. AVML writes ranges of 16 MiB, except those that are all zeros: in the
# file these look like addresses without RAM, and are not read.


_HEADER = struct.Struct("<IIQQ8x")
"""Magic, version, the first and the last address."""

LIME, AVML = (0x4C694D45, 1), (0x4C4D5641, 2)
"""Magic and version of the header; AVML writes LiME's if it does not compress."""

_MOST_LIME_RANGES = 1 << 16
_MOST_CHUNKS = 1 << 24
"""Maximum number of chunks: those of 1 TiB of memory."""

_CHUNK_HEADER = 4
_CHECKSUM = 4
_MOST_CHUNK = 1 << 16
"""Uncompressed bytes of a chunk of snappy's framing format."""

_COMPRESSED, _STORED, _FIRST_SKIPPABLE, _STREAM = 0x00, 0x01, 0x80, 0xFF
_STREAM_BODY = b"sNaPpY"
_TRAILER = struct.Struct("<Q")
_KEPT = 64
"""Maximum number of chunks kept decompressed: 4 MiB."""


def open_forensic(path: str) -> Memory:
    """Return the memory in an image by LiME or AVML.

    :raises DamagedDataError: if its headers make no sense
    :raises ImportError: if it is compressed, and cramjam is not installed
    :raises OSError: if it cannot be read
    """
    with open(path, "rb", buffering=0) as file:
        size = os.lseek(file.fileno(), 0, os.SEEK_END)
        read = reader_of(file.fileno())
        magic, *_ = _HEADER.unpack(read_exactly(read, 0, _HEADER.size))
        if magic == LIME[0]:
            return FileMemory("LiME", path, _lime_ranges(read, size))
        return CompressedMemory(path, *_chunks(read, size))


def _lime_ranges(read: ReadAt, size: int) -> list[MemoryRange]:
    ranges = []
    position = 0
    while position < size:
        each = _range(read, position, LIME)
        ranges.append(each)
        position = each.offset + each.size
        _check_count(ranges)
    return in_order(ranges)


def _range(read: ReadAt, position: int, kind: tuple[int, int]) -> MemoryRange:
    """Return the range whose header is at *position* and has the *kind*'s magic.

    The range's memory follows the header.
    """
    header = _HEADER.unpack(read_exactly(read, position, _HEADER.size))
    *found, first, last = header
    if (*found,) != kind or first > last or last >> 52:
        raise DamagedDataError("an image of memory with an impossible header", position)
    return MemoryRange(first, last + 1 - first, position + _HEADER.size)


def _check_count(ranges: Sequence[object]) -> None:
    if len(ranges) > _MOST_LIME_RANGES:
        raise DamagedDataError("an image of memory with too many ranges")


def in_order(ranges: Sequence[MemoryRange]) -> list[MemoryRange]:
    """Return ranges sorted by address.

    :raises DamagedDataError: if two overlap
    """
    ordered = sorted(ranges)
    for before, after in pairwise(ordered):
        if after.start < before.end:
            raise DamagedDataError("ranges of memory overlap", after.start)
    return ordered


class _Chunk(NamedTuple):
    """A chunk of a compressed range."""

    start: int
    """The physical address of the chunk's first byte."""

    size: int
    """Bytes of memory in the chunk."""

    offset: int
    """Offset of the chunk's data in the file."""

    stored: int
    """Bytes of the chunk's data in the file."""

    is_compressed: bool


def _chunks(read: ReadAt, size: int) -> tuple[list[MemoryRange], list[_Chunk], bool]:
    """Return ranges and chunks of AVML's image, and whether its end is missing."""
    ranges: list[MemoryRange] = []
    chunks: list[_Chunk] = []
    position = 0
    while position < size:
        try:
            each = _range(read, position, AVML)
            ranges.append(each)
            _check_count(ranges)
            position = _index(read, each, chunks)
        except EOFError:
            return _known(ranges, chunks), sorted(chunks), True
    return in_order(ranges), sorted(chunks), False


def _known(ranges: list[MemoryRange], chunks: list[_Chunk]) -> list[MemoryRange]:
    """Return the ranges, the last one cut to the memory that its chunks have."""
    last = ranges.pop() if ranges else None
    if last is not None:
        have = [each.start + each.size for each in chunks if each.start >= last.start]
        end = max((each for each in have if each <= last.end), default=last.start)
        if end > last.start:
            ranges.append(last._replace(size=end - last.start))
    return in_order(ranges)


def _index(read: ReadAt, of: MemoryRange, chunks: list[_Chunk]) -> int:
    """Add the chunks of a range; return the offset of the next range."""
    position, address = of.offset, of.start
    while address < of.end:
        header = int.from_bytes(read_exactly(read, position, _CHUNK_HEADER), "little")
        kind, length = header & 0xFF, header >> 8
        position += _CHUNK_HEADER
        if kind == _STREAM:
            if read_exactly(read, position, length) != _STREAM_BODY:
                raise DamagedDataError("no stream of snappy", position)
        elif kind in (_COMPRESSED, _STORED):
            data, stored = position + _CHECKSUM, length - _CHECKSUM
            is_compressed = kind == _COMPRESSED
            count = _uncompressed(read, data, stored) if is_compressed else stored
            if not 0 < count <= min(_MOST_CHUNK, of.end - address):
                raise DamagedDataError("a chunk of impossible size", position)
            read_exactly(read, data + stored - 1, 1)
            chunks.append(_Chunk(address, count, data, stored, is_compressed))
            if len(chunks) > _MOST_CHUNKS:
                raise DamagedDataError("an image of memory with too many chunks")
            address += count
        elif kind < _FIRST_SKIPPABLE:
            raise DamagedDataError("a chunk of an unknown kind", position)
        position += length
    if _TRAILER.unpack(read_exactly(read, position, _TRAILER.size))[0] != (
        position - of.offset
    ):
        raise DamagedDataError("a range of another size than it says", position)
    return position + _TRAILER.size


def _uncompressed(read: ReadAt, position: int, stored: int) -> int:
    """Return the uncompressed size of a block, with which it begins as a varint."""
    size = 0
    for index, byte in enumerate(read_exactly(read, position, min(max(stored, 0), 5))):
        size |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return size
    raise DamagedDataError("a chunk without its size", position)


class CompressedMemory(Memory):
    """The memory in an image by AVML."""

    name = "AVML, snappy"

    def __init__(
        self,
        path: str,
        ranges: Sequence[MemoryRange],
        chunks: Sequence[_Chunk],
        is_truncated: bool,
    ) -> None:
        """
        :param chunks: By address.
        :raises ImportError: if cramjam is not installed
        """
        import cramjam

        self._decompress = cramjam.snappy.decompress_raw
        self._error = cramjam.DecompressionError
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._ranges = Ranges(ranges)
        self._chunks = chunks
        self._starts = [each.start for each in chunks]
        self._kept: dict[int, bytes] = {}
        self.is_truncated = is_truncated

    @property
    def ranges(self) -> Sequence[MemoryRange]:
        return self._ranges.all

    def read(self, address: int, size: int) -> bytes:
        parts = []
        for start, count, _ in self._ranges.split(address, size):
            end = start + count
            while start < end:
                index = bisect_right(self._starts, start) - 1
                chunk = self._chunks[index]
                data = self._chunk(index)
                within = start - chunk.start
                part = data[within : within + end - start]
                if not part:
                    raise FaultError("not in the file", start)
                parts.append(part)
                start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _chunk(self, index: int) -> bytes:
        """Return the memory of a chunk.

        :raises FaultError: if it is damaged
        """
        data = self._kept.get(index)
        if data is None:
            chunk = self._chunks[index]
            try:
                data = os.pread(self._fd, chunk.stored, chunk.offset)
                if chunk.is_compressed:
                    data = bytes(self._decompress(data))
            except (OSError, self._error):
                data = b""
            if len(data) != chunk.size:
                raise FaultError("damaged in the file", chunk.start)
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[index] = data
        return data


# --- States of a VMware guest (.vmss, .vmsn), which can have its memory.
#
# A state has groups of values by name and index; a value can be a block of any size. If
# memory has holes, the group "memory" lists its regions (crash's vmware_vmss.c). Most
# states leave the memory to a flat file beside them, the .vmem.


_STATE = struct.Struct("<III")
"""Magic, version, number of groups."""

_GROUP = struct.Struct("<64sQQ")
"""Name, offset and size of a group."""

_TAG_BYTES = 2
"""Size of a value's tag: 8 bits for the bytes of its name, 2 for the number of its
indices, and 6 for the bytes of the value."""

_BLOCK = struct.Struct("<QQH")
"""Bytes of a block in the file and in memory, and bytes of padding before its data."""

_PACKED_BLOCK, _PLAIN_BLOCK = 0x3E, 0x3F
"""Sizes of values that stand for blocks, compressed and not."""

_MOST_GROUPS, _MOST_VALUES, _MOST_REGIONS = 1 << 10, 1 << 16, 64
_VMWARE_PAGE = 4096


def vmware_ranges(read: ReadAt) -> list[MemoryRange]:
    """Return the ranges of memory in a VMware guest's state; empty if it has none.

    :raises DamagedDataError: if the state contradicts itself
    :raises EOFError: if the file ends within its headers
    :raises NotSupportedError: if its memory is compressed
    """
    _, _, count = _STATE.unpack(read_exactly(read, 0, _STATE.size))
    if count > _MOST_GROUPS:
        raise DamagedDataError("a state of a VMware guest with too many groups")
    for number in range(count):
        place = _STATE.size + number * _GROUP.size
        name, start, _ = _GROUP.unpack(read_exactly(read, place, _GROUP.size))
        if name.rstrip(b"\0") == b"memory":
            values, block = _vmware_values(read, start)
            return [] if block is None else _vmware_regions(values, block)
    return []


def _vmware_values(
    read: ReadAt, position: int
) -> tuple[dict[tuple[bytes, int], int], MemoryRange | None]:
    """Return a group's values by name and first index, and its block of memory."""
    values: dict[tuple[bytes, int], int] = {}
    block = None
    for _ in range(_MOST_VALUES):
        data = read(position, _TAG_BYTES)
        if len(data) < _TAG_BYTES and block is None:
            raise EOFError("the file ends before its memory")
        tag = int.from_bytes(data, "little")
        if not tag:
            return values, block
        length, indices, size = tag >> 8, tag >> 6 & 3, tag & 0x3F
        position += _TAG_BYTES
        data = read_exactly(read, position, length + 4 * indices)
        position += len(data)
        name, index = data[:length], int.from_bytes(data[length:][:4], "little")
        if size < _PACKED_BLOCK:
            values[name, index] = int.from_bytes(
                read_exactly(read, position, size), "little"
            )
        else:
            size, _, padding = _BLOCK.unpack(read_exactly(read, position, _BLOCK.size))
            position += _BLOCK.size + padding
            if name == b"Memory" and tag & 0x3F == _PACKED_BLOCK:
                raise NotSupportedError("compressed memory")
            if name == b"Memory":
                block = MemoryRange(0, size, position)
        position += size
    raise DamagedDataError("a state of a VMware guest with too many values", position)


def _vmware_regions(
    values: Mapping[tuple[bytes, int], int], block: MemoryRange
) -> list[MemoryRange]:
    count = values.get((b"regionsCount", 0), 0)
    if not count:
        return [block]
    if count > _MOST_REGIONS:
        raise DamagedDataError("a state of a VMware guest with too many regions")
    ranges = []
    for number in range(count):
        start, size, place = (
            values.get((name, number), 0) * _VMWARE_PAGE
            for name in (b"regionPPN", b"regionSize", b"regionPageNum")
        )
        if not 0 < size <= block.size - place or (start + size) >> 52:
            raise DamagedDataError("an impossible region", block.offset)
        ranges.append(MemoryRange(start, size, block.offset + place))
    return in_order(ranges)


# --- The reader for each format of files with memory.


_FORENSIC = tuple(magic.to_bytes(4, "little") for magic, _ in (LIME, AVML))
_LIBVIRT = b"LibvirtQemudSave"

_MOST_KDUMP_RANGES = 1 << 20
_PAGES_KEPT = 1024


def memory_in(path: str, dump: DumpFile) -> Memory:
    """Return the memory in a file.

    :param dump: The file's headers.
    :raises TargetError: if it cannot be read, or its headers make no sense
    """
    try:
        with opened(path) as read:
            if dump.kind == "kdump":
                return KdumpMemory(path)
            if dump.kind == "elf":
                loads = formats.parse_elf(read).loads
                ranges = in_order(
                    [
                        MemoryRange(each.address, each.size, each.offset)
                        for each in loads
                    ]
                )
                return FileMemory("ELF without a note", path, ranges)
            return _by_magic(path, read)
    except OSError as error:
        raise os_error(path, error) from error
    except NotSupportedError as error:
        raise NotADumpError(
            path,
            f"a stream of QEMU with {error}, which is not read",
            "have it dumped with `virsh dump --memory-only`, or dump-guest-memory",
        ) from error
    except EOFError as error:
        raise DamagedDumpError(
            path, "cut off within its headers", "copy the file again"
        ) from error
    except DamagedDataError as error:
        raise DamagedDumpError(path, str(error), "copy the file again") from error
    except LeftToDrgnError as error:
        raise NotADumpError(
            path,
            f"a kdump that does not say where its kernel is, and {error}",
            "install msatools[fast], or dump the guest as ELF",
        ) from error


class KdumpMemory(Memory):
    """The memory in a kdump whose headers do not say where the kernel is."""

    name = "kdump without a note"

    def __init__(self, path: str) -> None:
        """Open a kdump; raises as :class:`.KdumpPages`."""
        self._pages = KdumpPages(path)
        size = self._pages.page_size
        ranges = [
            MemoryRange(kept.start * size, len(kept) * size, kept.start * size)
            for kept in islice(self._pages.kept_ranges(), _MOST_KDUMP_RANGES)
        ]
        self._ranges = Ranges(ranges)
        self._kept: dict[int, bytes] = {}

    @property
    def ranges(self) -> Sequence[MemoryRange]:
        return self._ranges.all

    def read(self, address: int, size: int) -> bytes:
        page_size = self._pages.page_size
        first, end = address // page_size, -(-(address + size) // page_size)
        wanted = range(first, end)
        if not all(pfn in self._kept for pfn in wanted):
            if len(self._kept) + len(wanted) > _PAGES_KEPT:
                self._kept.clear()
            found = self._pages.read(np.arange(first, end, dtype=np.int64))
            for pfn, page in zip(wanted, found, strict=True):
                if not page:
                    raise FaultError("not in the file", max(address, pfn * page_size))
                self._kept[pfn] = page
        data = b"".join([self._kept[pfn] for pfn in wanted])
        within = address - first * page_size
        return data[within : within + size]


def _by_magic(path: str, read: ReadAt) -> Memory:
    magic = read(0, 16)
    if magic.startswith(_FORENSIC):
        try:
            return open_forensic(path)
        except ImportError as error:
            raise NotADumpError(
                path,
                "compressed with snappy (AVML), and no library for it is installed",
                "install msatools[fast]; or decompress it with `avml-convert`",
            ) from error
    if magic.startswith((qemu_state.QEVM_MAGIC, qemu_state.QCOW2_MAGIC)):
        return qemu_state.QemuState(path)
    if magic == _LIBVIRT:
        start, compression = qemu_state.libvirt_stream(read)
        if compression is not None:
            name, command = compression
            raise NotADumpError(
                path,
                f"a guest that `virsh save` compressed with {name}",
                f"decompress it first: `tail -c +{start + 1} {shlex.quote(path)} | "
                f"{command} > memory`",
            )
        return qemu_state.QemuState(path, start, "virsh save")
    if magic.startswith(VMWARE_MAGICS):
        return _vmware_memory(path, read)
    return FileMemory("raw memory", path, is_packed=True)


def _vmware_memory(path: str, read: ReadAt) -> Memory:
    try:
        ranges = vmware_ranges(read)
        why = "without its memory"
    except NotSupportedError as error:
        ranges, why = [], f"with {error}"
    if not ranges:
        raise NotADumpError(
            path, f"a state of a VMware guest (vmss or vmsn) {why}", VMWARE_REMEDY
        )
    # Packed: a state without regions has no hole, or is cut off before its regions.
    is_packed = [each.start for each in ranges] == [0]
    return FileMemory("VMware state", path, ranges, is_packed=is_packed)
