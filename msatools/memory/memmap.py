# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the struct pages of RAM and device memory, and reads them in bulk."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Literal, NamedTuple

import drgn
import numpy as np
from drgn import Program, ProgramFlags
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.reader import Gap, Reader, bit, fault_reason
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import constant
from msatools.kernel.walks import xarray_entries
from msatools.memory.classes import PageLayout
from msatools.program.kdump_pages import (
    CUT,
    HERE,
    LEFT,
    AnyPages,
    KdumpPages,
    LeftToDrgnError,
    PageData,
)
from msatools.program.linear import VmallocTables, page_tables, vmemmap_base
from msatools.program.open import pages_read_here
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    find_variable,
    member_of,
)

# --- Reads the memmap of a kdump many pages at a time.
#
# drgn reads a kdump through libkdumpfile, page by page. This module translates a range
# by the page tables, and reads all its pages from the file at once. It leaves the pages
# that cannot be read this way to drgn, so that the result is always the same as drgn's.


class _Source(NamedTuple):
    pages: AnyPages
    tables: VmallocTables

    @property
    def page(self) -> int:
        """Size of a page, in bytes."""
        return self.pages.page_size


class BulkReader:
    """Reads ranges of kernel addresses as :class:`Reader` does, in bulk if possible."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._source = _find_source(reader.prog)
        self._is_checked = False

    @classmethod
    def of(cls, reader: Reader) -> "BulkReader":
        """Return a reader's bulk reader, made on first use."""
        return reader.once("bulk reader", lambda: cls(reader))

    @property
    def in_bulk(self) -> bool:
        """Whether pages are read in bulk rather than by drgn."""
        return self._source is not None

    def read_around_gaps(
        self, address: int, size: int, granule: int
    ) -> tuple[bytes | bytearray, list[Gap]]:
        """Read a range that may have gaps, as the reader does."""
        read_by_drgn = self._reader.read_around_gaps
        source = self._source
        if source is None or source.page % granule:
            return read_by_drgn(address, size, granule)
        page_size = source.page
        if size <= 0 or (address | size) % page_size:
            return read_by_drgn(address, size, granule)
        frames = source.tables.frames(address, size // page_size)
        found = source.pages.read_together(frames)
        if not self._is_right(address, found):
            self._source = None
            return read_by_drgn(address, size, granule)
        present = int(np.count_nonzero(found.states == HERE))
        # All pages count as one read, as they do in an uncompressed dump.
        self._reader.reads += bool(present)
        self._reader.bytes += present * page_size
        if present == len(frames):
            return found.data, []
        return found.data, self._fill(address, found)

    def _fill(self, address: int, found: PageData) -> list[Gap]:
        """Read the pages that are left to drgn; return the remaining gaps."""
        page_size = found.page_size
        gaps = [
            Gap(index * page_size, page_size, "unreadable")
            for index in np.flatnonzero(found.states == CUT).tolist()
        ]
        left = np.diff(found.states == LEFT, prepend=False, append=False)
        edges = (np.flatnonzero(left) * page_size).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            data, more = self._reader.read_around_gaps(
                address + start, end - start, page_size
            )
            found.data[start:end] = data
            gaps += (Gap(start + gap.offset, gap.size, gap.reason) for gap in more)
        return sorted(gaps, key=lambda gap: gap.offset)

    def _is_right(self, address: int, found: PageData) -> bool:
        """Check once that the first page read in bulk is the same as drgn's."""
        here = np.flatnonzero(found.states == HERE)
        if self._is_checked or not len(here):
            return True
        self._is_checked = True
        start = int(here[0]) * found.page_size
        try:
            expected: bytes = self._reader.prog.read(address + start, found.page_size)
        except UNREADABLE:
            return False
        return found.data[start : start + found.page_size] == expected


def _find_source(prog: Program) -> _Source | None:
    path = prog.core_dump_path
    pages = pages_read_here(prog)
    if pages is None:
        if path is None or prog.flags & ProgramFlags.IS_LIVE:
            return None
        try:
            pages = KdumpPages(path)
        except (OSError, EOFError, DamagedDataError, LeftToDrgnError):
            return None
    tables = page_tables(prog)
    if tables is None or pages.page_size != tables.form.table_bytes:
        return None
    return _Source(pages, tables)


# --- Memory of devices that has struct pages (mm/memremap.c, struct dev_pagemap).
#
# A device's range of the memmap is recognized by the pagemap, not by its struct pages:
# the first ones of a namespace may never have been initialised.


_ALTMAP_VALID = 1
"""PGMAP_ALTMAP_VALID (include/linux/memremap.h)."""

_MOST = 1 << 12
"""Upper bound of the number of pagemaps, and of the ranges of a pagemap."""


class DeviceRange(NamedTuple):
    """Consecutive pages of a device."""

    pfn: int
    end: int
    first_set: int
    """First page whose struct page is initialised. A device may hold its own struct
    pages; the pages that hold them have no initialised struct pages
    (memmap_init_zone_device())."""


def device_ranges(reader: Reader, losses: LossLog) -> list[DeviceRange] | None:
    """Return the ranges of all devices, ascending; ``None`` if they are unknown."""
    prog = reader.prog
    try:
        with drgn_lookups:
            root = find_variable(prog, "pgmap_array").address_
            type_ = find_type(prog, "struct dev_pagemap")
    except MissingError:
        return None  # CONFIG_ZONE_DEVICE=n
    aside = LossLog()
    entries = xarray_entries(reader, root, aside, "the memory of devices")
    losses.add(aside)
    shift = int(find_variable(prog, "PAGE_SHIFT").value_())
    found: set[DeviceRange] = set()
    for address in list({entry for _, _, entry in entries})[:_MOST]:
        try:
            with drgn_lookups:
                pagemap = drgn.Object(prog, type_, address=address)
                found.update(_ranges(pagemap, shift))
        except MissingError:
            return None
        except UNREADABLE as error:
            losses.lose(Loss.SECTION_TABLE, f"cannot read memory of a device: {error}")
    if aside.lost:
        return None
    return sorted(found)


def _ranges(pagemap: drgn.Object, shift: int) -> list[DeviceRange]:
    """Return the ranges of one pagemap; only the first can hold its struct pages."""
    altmap = pagemap.altmap
    has_altmap = int(pagemap.flags) & _ALTMAP_VALID
    found = []
    for number in range(min(int(pagemap.nr_range), _MOST)):
        area = pagemap.ranges[number] if number else pagemap.range
        first, end = int(area.start) >> shift, (int(area.end) + 1) >> shift
        if not first < end:
            continue
        first_set = first
        if has_altmap and not number:
            # vmem_altmap_offset()
            offset = int(altmap.reserve) + int(altmap.free)
            first_set = min(max(int(altmap.base_pfn) + offset, first), end)
        found.append(DeviceRange(first, end, first_set))
    return found


def pieces(
    first: int, count: int, devices: list[DeviceRange]
) -> list[tuple[int, int, DeviceRange | None]]:
    """Split a run of pages before the first and the first initialised page of devices,
    and after their last page.

    :return: First page and number of pages of each piece, and its device; ``None`` if
        it is not a device's.
    """
    end = first + count
    cuts = {first, end}
    for device in devices:
        if device.pfn < end and device.end > first:
            cuts.update(pfn for pfn in device if first < pfn < end)
    ordered = sorted(cuts)
    return [
        (at, after - at, next((d for d in devices if d.pfn <= at < d.end), None))
        for at, after in pairwise(ordered)
    ]


# --- Finds the struct pages of the memmap and reads them in bulk.
#
# With SPARSEMEM, which every 64-bit distribution kernel has, physical memory is divided
# into sections (128 MiB on x86-64), each with its own array of struct pages
# (mm/sparse.c, include/linux/mmzone.h).


State = Literal["online", "offline", "device"]

CHUNK_BYTES = 1 << 20
"""Bytes of struct pages per read: the columns fit a core's cache."""

_PROBES = 8
"""Struct pages of a section to try if the table of sections is unreadable."""

_MAX_PROBED_SECTIONS = 1 << 17
_SUBSECTION_BYTES = 1 << 21  # SUBSECTION_SHIFT
_MAX_PHYSICAL_BITS = 56

_GAP_BYTES = 4096
"""Granule of gaps: whole pages are excluded from a dump or missing live."""


class MemmapRange(NamedTuple):
    """Consecutive struct pages of one section."""

    section: int
    state: State
    early: bool
    """Whether the section was present at boot rather than hot-plugged."""

    pfn: int
    pages: int
    address: int
    """Address of the first struct page."""

    instead: int = 0
    """Address of the struct page that is read in place of each of these, which were
    never initialised; 0 if they were."""

    def address_end(self, size: int) -> int:
        """Return the address after the last struct page of *size* bytes."""
        return self.address + self.pages * size


class Chunk(NamedTuple):
    """The result of one read of the memmap."""

    pfn: int
    address: int
    data: bytes | bytearray
    gaps: list[Gap]


def memmap_ranges(
    reader: Reader, layout: PageLayout, losses: LossLog
) -> list[MemmapRange]:
    """
    Return the ranges of all struct pages, in pfn order.

    The table of sections is at the end of memory, which a truncated dump lacks. Then
    the sections with a readable struct page are returned, which may be none.

    :raises MissingError: if the kernel has no memory sections (no SPARSEMEM)
    """
    try:
        ranges = _listed_ranges(reader, layout, losses)
    except UNREADABLE as error:
        ranges = []
        _lose_sections(losses, f"the table of memory sections cannot be read ({error})")
    if losses.coverage[Loss.SECTION_TABLE.value]:
        listed = {part.section for part in ranges}
        ranges += (
            part
            for part in _readable_ranges(reader, layout)
            if part.section not in listed
        )
        ranges.sort(key=lambda part: part.pfn)
    return ranges


def _lose_sections(losses: LossLog, what: str) -> None:
    text = f"{what}; sections without any readable struct page are not counted"
    losses.lose(Loss.SECTION_TABLE, text)


def _listed_ranges(
    reader: Reader, layout: PageLayout, losses: LossLog
) -> list[MemmapRange]:
    pages = pages_per_section(reader.prog)
    flags = _SectionFlags.of(reader.prog)
    usage_size, subsection_map = _subsection_map(reader.prog)
    subsection = _SUBSECTION_BYTES // find_variable(reader.prog, "PAGE_SIZE").value_()
    devices = device_ranges(reader, losses)
    ranges: list[MemmapRange] = []
    for nr, memmap, usage in _sections(reader, losses):
        if not memmap & flags.has_memmap:
            continue
        early = bool(memmap & flags.early)
        runs = [(0, pages)]
        if usage_size and not early:
            # A section may be present in part since Linux kernel commit f46edbd1b151
            # ("mm/sparsemem: add helpers track active portions of a section at boot")
            # (in v5.3).
            with suppress(*UNREADABLE):
                bitmap = reader.read(usage + subsection_map, usage_size)
                runs = _runs(bitmap, pages, subsection)
        # Without its flags, section_mem_map is the address of the struct page of pfn 0.
        base = memmap & flags.memmap_mask
        for first, count in runs:
            for pfn, length, device in pieces(nr * pages + first, count, devices or []):
                address, instead = base + pfn * layout.size, 0
                state: State = "online"
                if not memmap & flags.online:
                    state = "offline" if device is None else "device"
                    if devices is None:
                        state = _state_of_offline(reader, layout, address)
                if device is not None and pfn < device.first_set < device.end:
                    # The memmap is virtually contiguous.
                    instead = base + device.first_set * layout.size
                ranges.append(
                    MemmapRange(nr, state, early, pfn, length, address, instead)
                )
    return ranges


def _readable_ranges(reader: Reader, layout: PageLayout) -> list[MemmapRange]:
    """Find sections by probing struct pages of every possible section."""
    pages = pages_per_section(reader.prog)
    memmap = vmemmap_base(reader.prog)
    last = find_variable(reader.prog, "__highest_present_section_nr").value_()
    last = min(last, _MAX_PROBED_SECTIONS)
    size = pages * layout.size
    step = size // _PROBES
    return [
        MemmapRange(nr, "online", True, nr * pages, pages, address)
        for nr, address in enumerate(range(memmap, memmap + (last + 1) * size, size))
        if any(_readable(reader, address + offset) for offset in range(0, size, step))
    ]


def _readable(reader: Reader, address: int) -> bool:
    try:
        reader.read(address, 8)
    except UNREADABLE:
        return False
    return True


def pages_per_section(prog: drgn.Program) -> int:
    section: int = find_variable(prog, "SECTION_SIZE_BITS").value_()
    page: int = find_variable(prog, "PAGE_SHIFT").value_()
    return bit(section - page)


class _SectionFlags(Struct, frozen=True):
    """Bits in the low end of ``mem_section.section_mem_map``."""

    has_memmap: int
    online: int
    early: int
    memmap_mask: int

    @classmethod
    def of(cls, prog: drgn.Program) -> "_SectionFlags":
        # An enum since Linux kernel commit ed7802dd48f7 ("mm: memory_hotplug:
        # enumerate all supported section flags") (in v6.0). The macros before it had
        # these values; 0x10 was added in v5.12 and was unused before.
        try:
            last = constant(prog, "SECTION_MAP_LAST_BIT")
        except MissingError:
            return cls(0x2, 0x4, 0x8, ~0x1F)

        def flag(name: str) -> int:
            return bit(constant(prog, f"SECTION_{name}_BIT"))

        flags = flag("HAS_MEM_MAP"), flag("IS_ONLINE"), flag("IS_EARLY")
        return cls(*flags, -bit(last))


def _sections(reader: Reader, losses: LossLog) -> Iterator[tuple[int, int, int]]:
    """Yield the number, section_mem_map and usage pointer of each present section."""
    prog = reader.prog
    per_root = find_variable(prog, "SECTIONS_PER_ROOT").value_()
    last = find_variable(prog, "__highest_present_section_nr").value_()
    bits = _MAX_PHYSICAL_BITS - find_variable(prog, "SECTION_SIZE_BITS").value_()
    if last >> max(bits, 0):
        raise DamagedDataError("an impossible number of sections", last)
    type_ = find_type(prog, "struct mem_section")
    size = drgn.sizeof(type_)
    memmap: int = member_of(type_, "section_mem_map").offset // 8
    usage: int | None = None
    if type_.has_member("usage"):
        usage = member_of(type_, "usage").offset // 8
    for root, address in enumerate(_section_roots(reader, last // per_root + 1)):
        if not address:
            continue
        try:
            data = reader.read(address, size * per_root)
        except UNREADABLE as error:
            _lose_sections(
                losses, f"part of the table of sections cannot be read ({error})"
            )
            continue
        words = np.frombuffer(data, np.uint64).reshape(per_root, size // 8)
        here = np.flatnonzero(words[:, memmap])
        here = here[here <= last - root * per_root]
        yield from zip(
            (here + root * per_root).tolist(),
            words[here, memmap].tolist(),
            [0] * len(here) if usage is None else words[here, usage].tolist(),
            strict=True,
        )


def section_usages(reader: Reader, losses: LossLog) -> dict[int, int]:
    """
    Return the address of each section's ``struct mem_section_usage``, by number.

    Empty before Linux kernel commit f1eca35a0dc7 ("mm/sparsemem: introduce struct
    mem_section_usage") (in v5.3).

    :raises drgn.FaultError: if the table of sections cannot be read
    """
    return {nr: usage for nr, _, usage in _sections(reader, losses) if usage}


def _section_roots(reader: Reader, count: int) -> list[int]:
    """Return the address of each root array of sections; 0 if not allocated."""
    roots = find_variable(reader.prog, "mem_section")
    kind = roots.type_.unaliased_kind()
    if kind == drgn.TypeKind.POINTER:  # SPARSEMEM_EXTREME
        if not roots:
            return []
        return [int(root) for root in reader.words(roots.value_(), count)]
    if roots.type_.unaliased().type.unaliased_kind() == drgn.TypeKind.POINTER:
        return [int(root) for root in reader.words(roots.address_, count)]
    size = drgn.sizeof(roots.type_.unaliased().type)
    return [roots.address_ + i * size for i in range(count)]


def _subsection_map(prog: drgn.Program) -> tuple[int, int]:
    """Return the size and offset of the subsection bitmap, in bytes; 0 if missing."""
    try:
        member = member_of(
            find_type(prog, "struct mem_section_usage"), "subsection_map"
        )
    except MissingError:
        return 0, 0
    return drgn.sizeof(member.type), member.offset


def _runs(bitmap: bytes, pages: int, subsection: int) -> list[tuple[int, int]]:
    """
    Convert a section's subsection bitmap to runs of (first page, count).

    :param subsection: Pages of a subsection; bits beyond the section are ignored.
    """
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    bits = bits[: pages // subsection]
    edges = np.flatnonzero(np.diff(bits, prepend=0, append=0))
    return [
        (int(start) * subsection, int(end - start) * subsection)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _state_of_offline(reader: Reader, layout: PageLayout, address: int) -> State:
    """Return whether a section that is not online is offline or device memory."""
    try:
        flags = int(reader.words(address + layout.flags, 1)[0])
        device = find_constant(reader.prog, "ZONE_DEVICE").value_()
    except LOST:
        return "offline"
    zone = flags >> layout.zone_shift & ((1 << layout.zone_bits) - 1)
    return "device" if zone == device else "offline"


def chunk_pages(layout: PageLayout) -> int:
    """Return the pages of a chunk: a power of two, to which chunks are aligned."""
    return 1 << (CHUNK_BYTES // layout.size).bit_length() - 1


def read_chunks(
    reader: Reader, layout: PageLayout, ranges: Sequence[MemmapRange]
) -> Iterator[Chunk]:
    """Read the struct pages of the ranges, :data:`CHUNK_BYTES` at a time."""
    step = chunk_pages(layout)
    bulk = BulkReader.of(reader)
    for part in ranges:
        for first in range(0, part.pages, step):
            count = min(step, part.pages - first)
            address = part.address + first * layout.size
            data: bytes | bytearray
            if part.instead:
                data, gaps = repeated(reader, part.instead, layout.size, count)
            else:
                data, gaps = bulk.read_around_gaps(
                    address, count * layout.size, _GAP_BYTES
                )
            yield Chunk(part.pfn + first, address, data, gaps)


def repeated(
    reader: Reader, address: int, size: int, count: int
) -> tuple[bytes, list[Gap]]:
    """Return *count* copies of a struct page of *size* bytes; a gap if unreadable."""
    try:
        return reader.read(address, size) * count, []
    except UNREADABLE as error:
        length = count * size
        return bytes(length), [Gap(0, length, fault_reason(error))]
