# SPDX-License-Identifier: LGPL-2.1-or-later

"""The dumps to change: the demo cores in every format, and ELF dumps of the lab."""

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cramjam
import numpy as np
import zstandard
from drgn import Program
from drgn.helpers.linux.mm import follow_phys
from lzallright import LZOCompressor

from fixtures import lab
from fixtures.demo.catalog import DEMOS
from msatools.program import TargetSpec, formats, open_target
from msatools.program.kdump_pages import KdumpPages
from tests.support.kdumpfile import DESCRIPTOR, Layout

PAGE = 4096
STATUS = 424
"""Offset of the flags in a kdump's header."""

LIME_HEADER = struct.Struct("<IIQQQ")
ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF_SEGMENT = struct.Struct("<IIQQQQQQ")
PIECE = struct.Struct(">qq")
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Method:
    """A way to store pages in a kdump."""

    flag: int
    pack: Callable[[bytes], bytes]


METHODS = {
    "zlib": Method(1, lambda page: zlib.compress(page, 1)),
    "lzo": Method(2, LZOCompressor().compress),
    "snappy": Method(4, lambda page: bytes(cramjam.snappy.compress_raw(page))),
    "zstd": Method(0x20, zstandard.ZstdCompressor(1).compress),
    "raw": Method(0, bytes),
}
IMAGES = ("lime",)
"""Formats without a note, which only a layer of its own changes."""

FORMATS = (*METHODS, "flattened", "split", "elf")


@dataclass(frozen=True)
class Dump:
    """One core in one format."""

    core: str
    """The kernel of a demo core, or the name of a dump of the lab."""

    format: str
    data: bytes | mmap.mmap
    """The file; a dump of the lab is too large to be in memory."""

    pages: dict[int, int]
    """Maps a page frame number to the offset of its page, if that is not compressed, or
    of its descriptor."""

    headers: range
    """Where headers, notes and tables are."""

    table: range
    """Where the descriptors of pages are, or the program headers."""

    notes: range
    """Where the notes are."""

    def changed_page(self, pfn: int, page: bytes, end: int) -> dict[int, bytes]:
        """Return the changes that give a page other contents.

        :param end: Where new data can be appended.
        """
        offset = self.pages[pfn]
        if self.format in ("elf", *IMAGES):
            return {offset: page}
        return {offset: DESCRIPTOR.pack(end, PAGE, 0, 0), end: page}


def path_of(core: str) -> Path:
    """Return the undamaged file of a core."""
    return DEMOS[core].core if core in DEMOS else lab.build(core).dump("elf")


def formats_of(core: str) -> tuple[str, ...]:
    """Return the formats that a core can have."""
    return FORMATS if core in DEMOS else ("elf",)


@cache
def program(core: str) -> Program:
    """Open an undamaged core, to find what to change."""
    return open_target(TargetSpec(path=str(path_of(core)), types="btf")).prog


@cache
def contents(core: str) -> Mapping[int, bytes]:
    """Return the pages of a core by page frame number."""
    if core not in DEMOS:
        whole = dump(core, "elf")
        return _Pages(whole.data, whole.pages)
    path = DEMOS[core].core
    kept = Layout(path).kept
    pages = KdumpPages(str(path)).read(kept)
    return {pfn: page for pfn, page in zip(kept.tolist(), pages, strict=True) if page}


def page_of(core: str, address: int) -> tuple[int, int]:
    """Return the page frame number of a kernel address, and the offset in the page.

    :raises LookupError: if the core lacks the page
    """
    prog = program(core)
    physical = follow_phys(prog["init_mm"].address_of_(), address).value_()
    pfn, offset = divmod(physical, PAGE)
    if pfn not in contents(core):
        raise LookupError(hex(address))
    return pfn, offset


class _Pages(Mapping[int, bytes]):
    """Pages of a file by page frame number."""

    def __init__(self, data: bytes | mmap.mmap, places: dict[int, int]) -> None:
        self._data = data
        self._places = places

    def __getitem__(self, pfn: int) -> bytes:
        offset = self._places[pfn]
        return bytes(self._data[offset : offset + PAGE])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@cache
def dump(core: str, format: str) -> Dump:
    """Return a core in a format."""
    if core not in DEMOS:
        return _of_lab(core)
    if format == "elf":
        return _elf(core)
    if format == "lime":
        return _lime(core)
    if format == "flattened":
        return _flattened(_kdump(core, "lzo"))
    if format == "split":
        return _split(_kdump(core, "zlib"))
    return _kdump(core, format)


def _kdump(core: str, format: str) -> Dump:
    method = METHODS[format]
    path = DEMOS[core].core
    data, layout = path.read_bytes(), Layout(path)
    front = bytearray(data[: layout.table_offset])
    struct.pack_into("<I", front, STATUS, method.flag)
    at = layout.table_offset + len(layout.kept) * DESCRIPTOR.size
    stored: dict[bytes, bytes] = {}
    table, blocks = [], []
    for pfn in layout.kept.tolist():
        page = contents(core)[pfn]
        if page not in stored:
            block, flag = method.pack(page), method.flag
            if len(block) >= PAGE:
                block, flag = page, 0
            stored[page] = DESCRIPTOR.pack(at, len(block), flag, 0)
            blocks.append(block)
            at += len(block)
        table.append(stored[page])
    whole = b"".join([front, *table, *blocks])
    starts = range(layout.table_offset, at, DESCRIPTOR.size)
    header = formats.parse_kdump(lambda offset, size: whole[offset : offset + size])
    return Dump(
        core,
        format,
        whole,
        dict(zip(layout.kept.tolist(), starts, strict=False)),
        range(header.bitmap_offset),
        range(layout.table_offset, layout.table_offset + len(table) * DESCRIPTOR.size),
        header.notes[1],
    )


def _flattened(plain: Dump) -> Dump:
    """Flatten a kdump; its pages cannot be replaced."""
    head = (b"makedumpfile\0\0\0\0" + PIECE.pack(1, 1)).ljust(PAGE, b"\0")
    pieces = [head]
    for offset in range(0, len(plain.data), PIECE_BYTES):
        piece = plain.data[offset : offset + PIECE_BYTES]
        pieces += [PIECE.pack(offset, len(piece)), piece]
    data = b"".join([*pieces, b"\xff" * PIECE.size])
    # The headers are in the first piece, which is not moved by more than its own.
    shift = PAGE + PIECE.size
    headers = range(plain.headers.stop + shift)
    notes = range(plain.notes.start + shift, plain.notes.stop + shift)
    table = range(plain.table.start + shift, plain.table.stop + shift)
    return Dump(plain.core, "flattened", data, {}, headers, table, notes)


def _split(plain: Dump) -> Dump:
    """Make a dump the only part of one that was split into parts."""
    data = bytearray(plain.data)
    last = max(contents(plain.core)) + 1
    struct.pack_into("<i", data, PAGE + 12, 1)
    struct.pack_into("<QQ", data, PAGE + 80, 0, last)
    return Dump(
        plain.core,
        "split",
        bytes(data),
        plain.pages,
        plain.headers,
        plain.table,
        plain.notes,
    )


def _elf(core: str) -> Dump:
    """Write a core as QEMU does: segments by physical address, and none by virtual."""
    plain = _kdump(core, "raw")
    notes = plain.data[plain.notes.start : plain.notes.stop]
    pages = contents(core)
    pfns = np.array(sorted(pages))
    runs = np.split(pfns, np.flatnonzero(np.diff(pfns) != 1) + 1)
    count = len(runs) + 1
    notes_at = ELF_HEADER.size + count * ELF_SEGMENT.size
    at = -(-(notes_at + len(notes)) // PAGE) * PAGE
    segments = [ELF_SEGMENT.pack(4, 0, notes_at, 0, 0, len(notes), len(notes), 0)]
    places: dict[int, int] = {}
    for run in runs:
        size = len(run) * PAGE
        start = int(run[0]) * PAGE
        segments.append(ELF_SEGMENT.pack(1, 7, at, 0, start, size, size, 0))
        places.update(zip(run.tolist(), range(at, at + size, PAGE), strict=True))
        at += size
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = ELF_HEADER.pack(
        *(ident, 4, 62, 1, 0, ELF_HEADER.size, 0, 0),
        *(ELF_HEADER.size, ELF_SEGMENT.size, count, 0, 0, 0),
    )
    front = b"".join([header, *segments, notes])
    front = front.ljust(-(-len(front) // PAGE) * PAGE, b"\0")
    data = front + b"".join(pages[pfn] for pfn in pfns.tolist())
    return Dump(
        core,
        "elf",
        data,
        places,
        range(notes_at),
        range(ELF_HEADER.size, notes_at),
        range(notes_at, notes_at + len(notes)),
    )


def _lime(core: str) -> Dump:
    """Write a core as LiME does, and VMCOREINFO to a page that it does not have."""
    prog = program(core)
    note: bytes = prog["VMCOREINFO"].string_()
    pages = dict(contents(core))
    own = next(pfn for pfn in range(1, len(pages) + 2) if pfn not in pages)
    pages[own] = note.ljust(PAGE, b"\0")
    pfns = np.array(sorted(pages))
    runs = np.split(pfns, np.flatnonzero(np.diff(pfns) != 1) + 1)
    parts: list[bytes] = []
    places: dict[int, int] = {}
    at = 0
    for run in runs:
        first, size = int(run[0]) * PAGE, len(run) * PAGE
        parts.append(LIME_HEADER.pack(0x4C694D45, 1, first, first + size - 1, 0))
        parts += [pages[pfn] for pfn in run.tolist()]
        at += LIME_HEADER.size
        places.update(zip(run.tolist(), range(at, at + size, PAGE), strict=True))
        at += size
    text = range(places[own], places[own] + len(note))
    return Dump(core, "lime", b"".join(parts), places, range(0), range(0), text)


def _of_lab(core: str) -> Dump:
    """Map an ELF dump of the lab."""
    with path_of(core).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start, count = ELF_HEADER.unpack_from(data)[5], ELF_HEADER.unpack_from(data)[10]
    end = start + count * ELF_SEGMENT.size
    notes = range(0)
    places: dict[int, int] = {}
    for at in range(start, end, ELF_SEGMENT.size):
        kind, _, offset, _, address, size, _, _ = ELF_SEGMENT.unpack_from(data, at)
        if kind == 4:
            notes = range(offset, offset + size)
        else:
            first, pages = address // PAGE, size // PAGE
            pfns = range(first, first + pages)
            places.update(zip(pfns, range(offset, offset + size, PAGE), strict=False))
    headers, table = range(max(end, notes.stop)), range(start, end)
    return Dump(core, "elf", data, places, headers, table, notes)
