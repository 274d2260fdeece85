# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of a kdump, many at a time: found, decompressed, checked."""

import ctypes
import functools
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import msatools.native as native
from msatools.errors import DamagedDataError
from msatools.program import formats
from msatools.program.formats import Kdump, ReadAt, read_exactly, reader_of, unflattened

# --- Decompression of a kdump's pages, by the fastest library for each format.
#
# It is used if the part in C was not built. The libraries are the optional extra
# msatools[fast]. Without a library, too, a dump is left to libkdumpfile.


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_DESCRIPTOR = b"\x60"
"""Frame header descriptor: a single segment, with its content size in 16 bits."""

_ZSTD_SIZE_BIAS = 256
"""Number that is subtracted from a content size before it is stored in 16 bits."""


_LZO_EXCESS = 64 << 20
"""Maximum bytes, in total, by which blocks of a dump may expand to more than a page;
blocks of a sound dump do not."""


class Codec(NamedTuple):
    """
    Decompression of a page.

    A block of the file may be damaged or malicious. If the format lets a few bytes
    claim any amount of memory, a valid block must begin with :attr:`start`.
    """

    decompress: Callable[[bytes], bytes]
    """Returns the contents of a block; the caller must check that they are a page."""

    errors: tuple[type[Exception], ...]
    """Exceptions of :attr:`decompress` for damaged blocks."""

    start: bytes = b""
    """First bytes of any block that claims to hold one page."""


def find_codec(compression: str, page_size: int) -> Codec | None:
    """
    Find the codec for pages of *page_size* bytes.

    :param compression: Name of the compression, as in :mod:`.formats`.
    :return: ``None`` if the compression is unknown, or its library not installed.
    """
    make = _CODECS.get(compression)
    if make is None:
        return None
    try:
        return make(page_size)
    except ImportError:
        return None


def _zlib(page_size: int) -> Codec:
    # No Codec.start is needed: zlib expands a byte to about a thousand at most.
    try:
        from zlib_ng import zlib_ng as library
    except ImportError:
        library = zlib  # type: ignore[misc]
    begin, error = library.decompressobj, library.error

    def decompress(block: bytes) -> bytes:
        stream = begin()
        # One byte more than a page, so that a sound stream is read to its end.
        page = stream.decompress(block, page_size + 1)
        return page if stream.eof else b""

    # The library's stub file declares the class as an instance.
    return Codec(decompress, (error,))  # type: ignore[arg-type]


def _lzo(page_size: int) -> Codec:
    from lzallright import LZOCompressor, LZOError

    # LZO expands a byte to 255 at most, but the library has no bound for a block.
    room = _LZO_EXCESS

    def decompress(block: bytes) -> bytes:
        nonlocal room
        if room < 0:
            raise LZOError("too many blocks are larger than a page")
        page: bytes = LZOCompressor.decompress(block, output_size_hint=page_size)
        room -= max(len(page) - page_size, 0)
        return page

    return Codec(decompress, (LZOError,))


def _snappy(page_size: int) -> Codec:
    import cramjam

    decompress = cramjam.snappy.decompress_raw
    # A block begins with its uncompressed size (snappy's format_description.txt).
    return Codec(
        lambda block: bytes(decompress(block)),
        (cramjam.DecompressionError,),
        _varint(page_size),
    )


def _zstd(page_size: int) -> Codec:
    import zstandard

    decompress = partial(
        zstandard.ZstdDecompressor().decompress,
        max_output_size=page_size,
        allow_extra_data=False,
    )
    return Codec(decompress, (zstandard.ZstdError,), _zstd_start(page_size))


def _zstd_start(page_size: int) -> bytes:
    # libzstd compresses a page to a single-segment frame without checksum and
    # dictionary, with the content size in 16 bits (RFC 8878, 3.1.1.1).
    size = (page_size - _ZSTD_SIZE_BIAS).to_bytes(2, "little")
    return _ZSTD_MAGIC + _ZSTD_DESCRIPTOR + size


def _varint(number: int) -> bytes:
    """Encode a number as snappy does: seven bits per byte, the lowest first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_CODECS: dict[str, Callable[[int], Codec]] = {
    "zlib": _zlib,
    "lzo": _lzo,
    "snappy": _snappy,
    "zstd": _zstd,
}


# --- Decompression of many pages at once, by the part in C (_kdump.c) if it was built.


_VERSION = 1

_ZSTD = "libzstd.so.1"
"""The system's library, which is installed anyway: package managers need it, too."""


class Form(NamedTuple):
    """How the pages of a dump are stored."""

    compression: str
    """Name of the compression, as in :mod:`msatools.program.formats`."""

    flag: int
    """Flag of the compression in descriptors of pages."""

    page_size: int
    file_size: int


LEFT, HERE, CUT = range(3)
"""States of a page. ``LEFT``: left to libkdumpfile, as the page is not in the dump,
damaged, or compressed in an unknown way. ``HERE``: read. ``CUT``: the page lies beyond
the end of the file."""


class Room(NamedTuple):
    """Arrays into which pages are read."""

    data: npt.NDArray[np.uint8]
    """A row of bytes for each page: zeros unless the page is :data:`HERE`."""

    states: npt.NDArray[np.uint8]


Descriptors = npt.NDArray[np.int64]
"""Three words of each ``struct page_desc``: offset; size and flags, of 32 bits each;
flags of the page. The file has unsigned numbers; those that are negative here are
impossible."""

Unpack = Callable[[Descriptors, Callable[[int, int], bytes], Room], None]
"""``unpack(descriptors, read, room)`` reads and decompresses the pages of at most
:data:`_BATCH` descriptors. ``read(offset, size)`` returns fewer bytes if the disk
fails."""


def find_unpack(form: Form) -> Unpack | None:
    """
    Return the function that reads and decompresses pages.

    It must not be used by two threads at once.

    :return: ``None`` if no library for the compression is installed.
    """
    is_stored = form.compression == formats.UNCOMPRESSED
    if not is_stored and form.compression not in _CODECS:
        return None
    loaded = library()
    if loaded is not None:
        method = _Method(form.flag, form.page_size, form.file_size, _MAX_GAP)
        if form.compression != "zstd" or _set_zstd(method):
            return _InC(loaded, method)
    codec = find_codec(form.compression, form.page_size)
    if codec is None and not is_stored:
        return None
    return functools.partial(_unpack_in_python, form, codec)


class _Method(ctypes.Structure):
    """``struct method`` of _kdump.c."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("file_size", ctypes.c_int64),
        ("gap", ctypes.c_int64),
        ("zstd", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("start", ctypes.c_char_p),
        ("start_size", ctypes.c_int64),
    )


def library() -> ctypes.CDLL | None:
    """Return the part in C; ``None`` if it was not built, or is turned off."""
    return _loaded() if native.is_wanted() else None


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    loaded = native.load("msatools.program._kdump", "msa_kdump_version", _VERSION)
    if loaded is None:
        return None
    method, here = ctypes.POINTER(_Method), ctypes.c_void_p
    number = ctypes.c_int64
    loaded.msa_kdump_plan.argtypes = method, here, number, here, here, here
    loaded.msa_kdump_plan.restype = number
    loaded.msa_kdump_unpack.argtypes = (
        *(method, here, number, number),
        *(here, number, here, here),
    )
    loaded.msa_kdump_unpack.restype = None
    return loaded


def _set_zstd(method: _Method) -> bool:
    """Set the members for libzstd; return whether libzstd is installed."""
    try:
        library = ctypes.CDLL(_ZSTD)
        create, free = library.ZSTD_createDCtx, library.ZSTD_freeDCtx
        method.zstd = ctypes.cast(library.ZSTD_decompressDCtx, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return False
    create.restype, free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    method.context = create()
    if not method.context:
        return False
    weakref.finalize(method, free, method.context)
    method.start = _zstd_start(method.page_size)
    method.start_size = len(method.start)
    return True


class _InC:
    """Reads and decompresses pages by the part in C."""

    def __init__(self, loaded: ctypes.CDLL, method: _Method) -> None:
        self._plan, self._unpack = loaded.msa_kdump_plan, loaded.msa_kdump_unpack
        self._method = method
        # Arrays of struct block and of struct run (_kdump.c).
        self._blocks = np.empty((2 * _BATCH, 4), np.int64)
        self._runs = np.empty((_BATCH, 4), np.int64)
        self._at = self._blocks.ctypes.data, self._runs.ctypes.data

    def __call__(
        self, words: Descriptors, read: Callable[[int, int], bytes], room: Room
    ) -> None:
        method, (blocks, runs) = self._method, self._at
        data, states = room.data.ctypes.data, room.states.ctypes.data
        words = np.ascontiguousarray(words)
        found = self._plan(method, words.ctypes.data, len(words), blocks, runs, states)
        known = 0
        for first, last, start, end in self._runs[:found].tolist():
            part = read(start, end - start)
            here = blocks + first * self._blocks.strides[0]
            self._unpack(
                *(method, part, start, len(part)), *(here, last - first, data, states)
            )
            known += last - first
        if known < len(words):
            room.data[room.states != HERE] = 0


def _unpack_in_python(
    form: Form,
    codec: Codec | None,
    words: Descriptors,
    read: Callable[[int, int], bytes],
    room: Room,
) -> None:
    offsets, sizes, flags = words[:, 0], words[:, 1] & 0xFFFFFFFF, words[:, 1] >> 32
    cut_off = (offsets < 0) | (sizes > 0) & (offsets > form.file_size - sizes)
    is_plain = (flags == 0) & (sizes == form.page_size)
    # A compressed page is never longer than the page.
    is_compressed = (sizes > 0) & (sizes <= form.page_size) & (flags != 0)
    known = (is_plain | is_compressed & (flags == form.flag)) & ~cut_off
    room.data[:] = 0
    room.states[:] = np.where(cut_off, CUT, LEFT)
    rows = np.flatnonzero(known)
    rows = rows[np.argsort(offsets[rows], kind="stable")]
    starts, ends = offsets[rows], offsets[rows] + sizes[rows]
    for run, start, end in _runs(starts, ends):
        data = read(start, end - start)
        columns = rows[run], starts[run] - start, ends[run] - start, flags[rows[run]]
        for row, first, last, flag in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            page = data[first:last]
            if flag:
                page = _decompressed(codec, page)
            # A stored page is short if the disk failed.
            if len(page) == form.page_size:
                room.data[row] = np.frombuffer(page, np.uint8)
                room.states[row] = HERE


def _decompressed(codec: Codec | None, block: bytes) -> bytes:
    """Return the contents of a block; empty if it is damaged."""
    if codec is None or not block.startswith(codec.start):
        return b""
    try:
        return codec.decompress(block)
    except codec.errors:
        return b""


# --- The table of page descriptors of a kdump, and a check of all of it.
#
# The second of a kdump's bitmaps has a bit for each page that was kept. The table has a
# struct page_desc (makedumpfile's diskdump_mod.h) for each such bit, in order.


DESCRIPTOR_BYTES = 24

_AT_ONCE = 1 << 14
"""Number of descriptors to check at a time: as many as fit into a CPU's cache."""

_MAP_BITMAP_READ = 1 << 20

_FLAGS = 0x1 | 0x2 | 0x4 | 0x20
"""DUMP_DH_COMPRESSED_*: the method by which a page is compressed; none for stored."""


class DescriptorCheck(NamedTuple):
    """Result of :func:`check_descriptors`."""

    bad: int
    """Number of pages that are not in the file, or of an impossible size or flag."""

    is_cut: bool
    """Whether the file ends within a page, or where one should begin."""


def check_descriptors(read: ReadAt, header: Kdump, size: int) -> DescriptorCheck:
    """Check all page descriptors against the size of the file.

    libkdumpfile trusts them. It maps the file: a page that is not in the file ends the
    process by SIGBUS, or reads as zeros.

    :param size: Size of the kdump in bytes.
    :raises EOFError: if the file ends within its bitmaps or descriptors
    """
    count = kept_pages(read, header)
    data = header.table_offset + count * DESCRIPTOR_BYTES
    if data > size:
        raise EOFError(f"the file ends before byte {data}")
    bad, is_cut = 0, False
    for start in range(header.table_offset, data, _AT_ONCE * DESCRIPTOR_BYTES):
        table = read(start, min(_AT_ONCE * DESCRIPTOR_BYTES, data - start))
        rows = _Rows(table, header.byteorder)
        if not rows.are_good(data, size, header.block_size):
            bad += int(np.count_nonzero(~rows.good(data, size, header.block_size)))
            is_cut = is_cut or rows.is_cut(size, header.block_size)
    return DescriptorCheck(bad, is_cut)


def kept_pages(read: ReadAt, header: Kdump) -> int:
    """Count the pages of a dump, which is the number of its descriptors.

    :raises EOFError: if the file ends within its bitmaps
    """
    half = header.bitmap_size // 2
    first, last = 0, half * 8
    if header.part is not None:
        first, last = min(header.part.start, last), min(header.part.stop, last)
    return sum(
        _bits(read, header.bitmap_offset + half, pfn, min(pfn + _MAP_BITMAP_READ, last))
        for pfn in range(first, last, _MAP_BITMAP_READ)
    )


def _bits(read: ReadAt, offset: int, first: int, last: int) -> int:
    """Count the bits that are set in a bitmap from *first* up to *last*.

    :param offset: Offset of the bitmap in the file; *last* is not included.
    """
    start = first // 8
    data = read_exactly(read, offset + start, (last + 7) // 8 - start)
    bits = int.from_bytes(data, "little") >> first % 8
    return (bits & ((1 << (last - first)) - 1)).bit_count()


class _Rows:
    """Columns of some page descriptors."""

    def __init__(self, table: bytes, byteorder: str) -> None:
        fields = np.frombuffer(
            table,
            [
                ("offset", byteorder + "u8"),
                ("size", byteorder + "u4"),
                ("flags", byteorder + "u4"),
                ("page_flags", byteorder + "u8"),
            ],
        )
        self._offsets: npt.NDArray[np.uint64] = fields["offset"]
        self._sizes: npt.NDArray[np.uint32] = fields["size"]
        self._flags: npt.NDArray[np.uint32] = fields["flags"]

    def are_good(self, data: int, size: int, page_size: int) -> bool:
        """Return whether all descriptors pass a quick check; see :meth:`good`."""
        sizes = self._sizes
        return bool(
            int(self._offsets.min()) >= data
            and int(self._offsets.max()) <= size - page_size
            and int(sizes.min()) > 0
            and int(sizes.max()) <= page_size
            and not int(np.bitwise_or.reduce(self._flags)) & ~_FLAGS
        )

    def good(self, data: int, size: int, page_size: int) -> npt.NDArray[np.bool_]:
        """Return whether each page can be read.

        :param data: Offset of the first byte that can belong to a page.
        :param size: Size of the file.
        """
        offsets, sizes = self._offsets, self._sizes
        # A compressed page is never longer than the page.
        has_size = (sizes > 0) & (sizes <= page_size)
        is_inside = (offsets >= data) & (offsets <= size) & (sizes <= size - offsets)
        is_known: npt.NDArray[np.bool_] = (self._flags & ~np.uint32(_FLAGS)) == 0
        good: npt.NDArray[np.bool_] = has_size & is_inside & is_known
        return good

    def is_cut(self, size: int, page_size: int) -> bool:
        """Return whether the file ends within or directly before one of these pages."""
        sizes = self._sizes
        at_end = (self._offsets <= size) & (self._offsets + sizes > size)
        return bool((at_end & (sizes > 0) & (sizes <= page_size)).any())


# --- Pages of a kdump, many at a time.
#
# libkdumpfile reads pages one by one: it looks up the descriptor, reads it, then the
# data. Here the descriptors of many pages are read at once, and so are the data.
# Anything unusual is left to libkdumpfile.
#
# msatools.program.formats has the layout of a kdump's headers.


Pfns = npt.NDArray[np.int64]

NO_PFN = -1

CUT_OFF = b""
"""A page that lies beyond the end of a truncated file."""

_VERSIONS = range(1, 7)
"""Versions of the header that makedumpfile has written so far."""

_WORDS = DESCRIPTOR_BYTES // 8

# A piece of the bitmap covers 128 MiB with pages of 4 KiB.
_PIECE_SHIFT = 15
_PIECE_BYTES = (1 << _PIECE_SHIFT) // 8
_PIECES_KEPT = 8
_PAGE_BITMAP_READ = 256 * _PIECE_BYTES

_BATCH = 1024
"""Maximum number of pages to read at a time, to bound the memory used."""

_MAX_GAP = 16384
"""Maximum bytes between two pages that are read at once: reading and dropping them is
faster than another system call."""


# Not bytearray(size): filling it with zeros takes as long as decompressing some pages.
_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes = ctypes.c_char_p, ctypes.c_ssize_t
_new_bytearray.restype = ctypes.py_object


class PageData(NamedTuple):
    """Pages in one piece of memory."""

    data: bytearray
    """The pages one after the other; zeros for a page that is not :data:`HERE`."""

    states: npt.NDArray[np.uint8]
    """:data:`LEFT`, :data:`HERE` or :data:`CUT`, for each page."""

    page_size: int

    @classmethod
    def empty(cls, count: int, page_size: int) -> "PageData":
        """Return room for pages, all :data:`LEFT`; the caller must set all bytes."""
        data: bytearray = _new_bytearray(None, count * page_size)
        return cls(data, np.zeros(count, np.uint8), page_size)

    def room(self) -> Room:
        """Return the pages and states as arrays that the caller can set."""
        rows = np.frombuffer(self.data, np.uint8).reshape(-1, self.page_size)
        return Room(rows, self.states)

    def listed(self) -> list[bytes | None]:
        """Return each page as :meth:`KdumpPages.read` does."""
        data, size = memoryview(self.data), self.page_size
        instead = {LEFT: None, CUT: CUT_OFF}
        return [
            bytes(data[row * size : (row + 1) * size])
            if state == HERE
            else instead[state]
            for row, state in enumerate(self.states.tolist())
        ]


class LeftToDrgnError(Exception):
    """A kdump that only libkdumpfile reads."""


class KdumpPages:
    """
    The pages of a kdump.

    Reads do not move the file's position, so that processes can share it after a fork.
    """

    def __init__(self, path: str) -> None:
        """
        Open a kdump.

        :raises DamagedDataError: if this is not a kdump, or a damaged one
        :raises LeftToDrgnError: if it is left to libkdumpfile: big-endian, of 32 bits,
            of an unknown version, or with a compression whose library is not installed
        :raises EOFError: if the file ends within its bitmaps
        :raises OSError: if it cannot be read
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        size = os.lseek(self._fd, 0, os.SEEK_END)
        opened = unflattened(reader_of(self._fd), size)
        self._read_file, self._file_size = opened.tables, opened.size
        self._read_pages = opened.pages
        header = formats.parse_kdump(self._read_file)
        if (
            header.version not in _VERSIONS
            or header.byteorder != "<"
            or header.max_pfn is None
        ):
            raise LeftToDrgnError("a kdump of a kind that is not read in bulk")
        self.page_size = header.block_size
        # A page is compressed with the dump's method, or stored if that saves nothing.
        flag = header.compression_flag
        unpack = find_unpack(
            Form(header.compression, flag, self.page_size, self._file_size)
        )
        if unpack is None:
            raise LeftToDrgnError(f"no library for {header.compression} is installed")
        self._unpack = unpack
        half = header.bitmap_size // 2
        if not 0 < header.max_pfn <= half * 8:
            raise DamagedDataError(
                "a kdump whose bitmaps do not say which pages it has"
            )
        self.pfns = range(header.max_pfn) if header.part is None else header.part
        if not 0 <= self.pfns.start < self.pfns.stop <= half * 8:
            raise DamagedDataError("a kdump that is a part of none")
        self._bitmap_offset = header.bitmap_offset + half
        self._bitmap_size = half
        self._table_offset = header.table_offset
        self._kept_before = _count(self._read_file, self._bitmap_offset, half)
        self._pieces: dict[int, Pfns] = {}
        # A part of a split dump has all parts' bitmaps, but only its own descriptors.
        self._before_part = self._kept_below(self.pfns.start)

    def read(self, pfns: Pfns) -> list[bytes | None]:
        """
        Read pages.

        :param pfns: In any order, with repetitions and :data:`NO_PFN`.
        :return: A page for each, in the same order. :data:`CUT_OFF` if the page lies
            beyond the end of the file: libkdumpfile returns zeros for such a page or,
            as it maps the file, gets SIGBUS (seen with drgn 0.3's wheel). ``None`` if
            the page is left to libkdumpfile (:data:`LEFT`).
        """
        return self.read_together(pfns).listed()

    def read_together(self, pfns: Pfns) -> "PageData":
        """Read pages as :meth:`read` does, into one piece of memory."""
        found = PageData.empty(len(pfns), self.page_size)
        room = found.room()
        for first in range(0, len(pfns), _BATCH):
            here = slice(first, first + _BATCH)
            part = Room(room.data[here], room.states[here])
            indices = self._indices(pfns[here])
            if indices[0] >= 0 and (indices[1:] > indices[:-1]).all():
                # The usual case: contiguous memory.
                self._read_at(indices, part)
                continue
            needed, rows = np.unique(indices, return_inverse=True)
            once = PageData.empty(len(needed), self.page_size).room()
            missing = int(np.count_nonzero(needed < 0))
            once.data[:missing] = 0
            kept = slice(missing, None)
            self._read_at(needed[kept], Room(once.data[kept], once.states[kept]))
            part.data[:], part.states[:] = once.data[rows], once.states[rows]
        return found

    def is_kept(self, pfn: int) -> bool:
        """Return whether the dump has a page, sound or not."""
        return bool(self._indices(np.array([pfn], np.int64))[0] >= 0)

    def kept_ranges(self) -> Iterator[range]:
        """Yield the ranges of page frames that the dump has, each as long as possible.

        The bitmap is read a piece at a time.
        """
        start = end = self.pfns.start
        for piece in range(start >> _PIECE_SHIFT, -(-self.pfns.stop >> _PIECE_SHIFT)):
            first = piece << _PIECE_SHIFT
            kept = np.flatnonzero(self._piece(piece) >= 0) + first
            kept = kept[(kept >= self.pfns.start) & (kept < self.pfns.stop)]
            breaks = np.flatnonzero(np.diff(kept) > 1) + 1
            for run in np.split(kept, breaks):
                if not len(run):
                    continue
                if int(run[0]) != end:
                    if start < end:
                        yield range(start, end)
                    start = int(run[0])
                end = int(run[-1]) + 1
        if start < end:
            yield range(start, end)

    def _indices(self, pfns: Pfns) -> npt.NDArray[np.int64]:
        """Find the index of each page's descriptor in the table; < 0 if not kept."""
        lowest, highest = int(pfns.min()), int(pfns.max())
        piece = lowest >> _PIECE_SHIFT
        is_inside = self.pfns.start <= lowest and highest < self.pfns.stop
        if is_inside and piece == highest >> _PIECE_SHIFT:
            found: npt.NDArray[np.int64] = self._piece(piece)[
                pfns & ((1 << _PIECE_SHIFT) - 1)
            ]
            return found - self._before_part
        indices = np.full(len(pfns), -1, np.int64)
        known = (pfns >= self.pfns.start) & (pfns < self.pfns.stop)
        pieces = pfns >> _PIECE_SHIFT
        for piece in sorted({*pieces[known].tolist()}):
            here = known & (pieces == piece)
            there = self._piece(piece)[pfns[here] & ((1 << _PIECE_SHIFT) - 1)]
            indices[here] = there - self._before_part
        return indices

    def _kept_below(self, pfn: int) -> int:
        """Count the pages kept below a page frame, in all parts of the dump."""
        piece, rest = divmod(pfn, 1 << _PIECE_SHIFT)
        below = self._piece(piece)[:rest]
        return int(self._kept_before[piece]) + int(np.count_nonzero(below >= 0))

    def _piece(self, piece: int) -> npt.NDArray[np.int64]:
        """Find the indices of all pages in a piece of the bitmap; -1 if not kept."""
        indices = self._pieces.get(piece)
        if indices is None:
            start = piece * _PIECE_BYTES
            size = min(_PIECE_BYTES, self._bitmap_size - start)
            data = self._read(self._bitmap_offset + start, size).ljust(size, b"\0")
            kept = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            indices = np.cumsum(kept, dtype=np.int64) + (self._kept_before[piece] - 1)
            indices[kept == 0] = -1
            if len(self._pieces) >= _PIECES_KEPT:
                del self._pieces[next(iter(self._pieces))]
            self._pieces[piece] = indices
        return indices

    def _read_at(self, indices: npt.NDArray[np.int64], room: Room) -> None:
        """Read the pages whose descriptors have these ascending indices."""
        if len(indices):
            self._unpack(self._descriptors(indices), self._read_data, room)

    def _descriptors(self, indices: npt.NDArray[np.int64]) -> Descriptors:
        """Read descriptors by ascending index; zero beyond the end of the file."""
        count, first = len(indices), int(indices[0])
        if int(indices[-1]) - first == count - 1:
            return self._table(first * DESCRIPTOR_BYTES, count * DESCRIPTOR_BYTES)
        words = np.empty((count, _WORDS), np.int64)
        starts = indices * DESCRIPTOR_BYTES
        for run, start, end in _runs(starts, starts + DESCRIPTOR_BYTES):
            rows = (starts[run] - start) // DESCRIPTOR_BYTES
            words[run] = self._table(start, end - start).take(rows, 0)
        return words

    def _table(self, start: int, size: int) -> Descriptors:
        data = self._read(self._table_offset + start, size).ljust(size, b"\0")
        return np.frombuffer(data, "<i8").reshape(-1, _WORDS)

    def _read_data(self, start: int, size: int) -> bytes:
        return self._read(start, size, self._read_pages)

    def _read(self, start: int, size: int, read: ReadAt | None = None) -> bytes:
        """Read from the file; less or nothing if the disk fails."""
        try:
            return (read or self._read_file)(start, size)
        except OSError:
            return b""


class SplitPages:
    """The pages of a kdump that was split into several files."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Open the parts; raise as :class:`KdumpPages` does for each.

        :param paths: Parts that have pages, by page frame.
        """
        self._parts = [KdumpPages(path) for path in paths]
        self._starts = np.array([part.pfns.start for part in self._parts], np.int64)
        self.page_size = self._parts[0].page_size

    def read(self, pfns: Pfns) -> list[bytes | None]:
        """Read pages, as :meth:`KdumpPages.read` does."""
        return self.read_together(pfns).listed()

    def read_together(self, pfns: Pfns) -> PageData:
        """Read pages, as :meth:`KdumpPages.read_together` does."""
        found = PageData.empty(len(pfns), self.page_size)
        all_data, all_states = found.room()
        numbers = self._numbers(pfns)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            room = self._parts[number].read_together(pfns[rows]).room()
            all_data[rows], all_states[rows] = room
        return found

    def is_kept(self, pfn: int) -> bool:
        """Return whether the dump has a page, sound or not."""
        number = int(self._numbers(np.array([pfn], np.int64))[0])
        return self._parts[number].is_kept(pfn)

    def _numbers(self, pfns: Pfns) -> npt.NDArray[np.int64]:
        """Return the index of the only part that may have each page."""
        numbers = np.searchsorted(self._starts, pfns, side="right") - 1
        return np.maximum(numbers, 0).astype(np.int64)


AnyPages = KdumpPages | SplitPages


def _runs(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[tuple[slice, int, int]]:
    """
    Yield the runs of neighbours to read at once.

    :param starts: Ascending offsets in the file, at most :data:`_BATCH` of them.
    :param ends: End of each, at most a page after its start.
    :return: Rows of each run, and the start and end of its read.
    """
    far = np.flatnonzero(starts[1:] - ends[:-1] > _MAX_GAP) + 1
    edges = [0, *far.tolist(), len(starts)]
    for first, last in pairwise(edges):
        if first < last:
            run = slice(first, last)
            yield run, int(starts[first]), int(ends[run].max())


def _count(read: ReadAt, start: int, size: int) -> npt.NDArray[np.int64]:
    """Count the pages kept before each piece of the bitmap, and in all (the last)."""
    counts = [0]
    for offset in range(start, start + size, _PAGE_BITMAP_READ):
        data = read_exactly(read, offset, min(_PAGE_BITMAP_READ, start + size - offset))
        counts += (
            int.from_bytes(data[i : i + _PIECE_BYTES], "little").bit_count()
            for i in range(0, len(data), _PIECE_BYTES)
        )
    return np.cumsum(counts, dtype=np.int64)
