# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages of the percpu allocator (mm/percpu.c)."""

from collections.abc import Iterator
from contextlib import suppress

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.cpumask import possible_cpus
from msatools.kernel.pagetables import PageTables
from msatools.kernel.percpu import unit_offsets
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, struct_layout
from msatools.kernel.walks import list_records
from msatools.selfdesc.find import (
    find_constant,
    find_type,
    find_variable,
    member_of,
    offset_of,
)

_MAX_LISTS = 1 << 7
"""Upper bound of the number of lists: one for each power of two, twice."""


_CHUNK_TYPE = "struct pcpu_chunk"
_CHUNK: Members = {
    "base": ("base_addr",),
    "immutable": ("immutable",),
    "pages": ("nr_pages",),
}
_MAPS: Members = {
    **_CHUNK,
    # A bit for each piece of _MIN_BYTES: whether it is allocated, and whether an
    # allocation begins or ends there.
    "allocated": ("alloc_map",),
    "bounds": ("bound_map",),
}
_MIN_BYTES = 4
"""PCPU_MIN_ALLOC_SIZE"""

_MAX_PAGES = 1 << 16
"""Maximum number of pages of a unit: 256 MiB, far above PCPU_MIN_UNIT_SIZE."""


class PercpuPages(Struct, frozen=True):
    """The pages of chunks, and the excess of the kernel's own count."""

    pfns: list[int]
    uncounted: int
    """
    Pages that ``pcpu_nr_populated`` times the number of units counts in excess: the
    first chunks are in reserved boot memory, and the number of units is rounded up, so
    that some units may have no CPU and no pages.
    """

    spare_units: int
    """Number of units without a CPU."""


def percpu_pages(reader: Reader, tables: PageTables, losses: LossLog) -> PercpuPages:
    """Find the pages of all chunks, except the first ones in reserved boot memory."""
    prog = reader.prog
    page_shift = find_variable(prog, "PAGE_SHIFT").value_()
    cpus = list(possible_cpus(prog, losses))
    units = unit_offsets(reader, cpus)
    type_ = find_type(prog, _CHUNK_TYPE)
    layout = struct_layout(reader, _CHUNK_TYPE, _CHUNK)
    if layout is None:
        raise MissingError(f"{_CHUNK_TYPE} has no members")
    populated = offset_of(type_, "populated")
    unit_pages = find_variable(prog, "pcpu_unit_pages").value_()
    size = max(populated + 8 * -(-unit_pages // 64), layout.end)
    pfns: list[int] = []
    for data in _chunks(reader, losses, type_, size):
        chunk = layout.decode(data[layout.start :])
        if chunk["immutable"]:
            continue
        bitmap = np.frombuffer(data, np.uint8, offset=populated)
        bits = np.unpackbits(bitmap, bitorder="little")[: max(chunk["pages"], 0)]
        for page in np.flatnonzero(bits).tolist():
            for unit in units:
                pfn = tables.pfn(chunk["base"] + unit + (page << page_shift))
                if pfn is not None:
                    pfns.append(pfn)
    boot = _boot_pages(prog, page_shift)
    spare = find_variable(prog, "pcpu_nr_units").value_() - len(cpus)
    populated_pages = find_variable(prog, "pcpu_nr_populated").value_()
    if not 0 <= boot <= min(unit_pages, populated_pages):
        raise DamagedDataError(f"the first unit has {boot:,} pages, of {unit_pages:,}")
    uncounted = boot * (len(cpus) + spare) + (populated_pages - boot) * spare
    return PercpuPages(pfns, uncounted, spare)


class PercpuPiece(Struct, frozen=True):
    """An allocation in a chunk, or free memory."""

    start: int
    """Offset of the allocation in the unit; of free memory the offset asked for."""

    bytes: int | None
    """Size of the allocation; ``None`` for free memory."""

    allocated: bool


class PercpuChunk(Struct, frozen=True):
    """A ``struct pcpu_chunk``."""

    reader: Reader
    base: int
    """Address of the first unit, at unit offset 0."""

    bytes: int
    """Bytes of a unit."""

    allocated: int
    bounds: int
    """Addresses of the two bitmaps."""

    def piece(self, offset: int) -> PercpuPiece | None:
        """Return the piece at an offset in a unit; ``None`` if it cannot be read."""
        bits, number = self.bytes // _MIN_BYTES, offset // _MIN_BYTES
        try:
            allocated = _bitmap(self.reader, self.allocated, bits)
            bounds = _bitmap(self.reader, self.bounds, bits + 1)
        except UNREADABLE:
            return None
        if not allocated[number]:
            return PercpuPiece(offset, None, False)
        before = np.flatnonzero(bounds[: number + 1])
        after = np.flatnonzero(bounds[number + 1 :])
        if not len(before) or not len(after):
            return None
        start, end = int(before[-1]), number + 1 + int(after[0])
        return PercpuPiece(start * _MIN_BYTES, (end - start) * _MIN_BYTES, True)


class PercpuOffset(Struct, frozen=True):
    """A place in the units of a chunk."""

    chunk: PercpuChunk
    offset: int
    """Offset in each unit."""


class PercpuUnits(Struct, frozen=True):
    """The units of all chunks, those of the first chunk included."""

    chunks: list[PercpuChunk]
    cpus: list[int]
    offsets: Addresses
    """Offset of each CPU's unit in a chunk."""

    def find(self, address: int) -> tuple[int, PercpuOffset] | None:
        """Return the CPU of an address, and the place in its unit; ``None`` if none."""
        for chunk in self.chunks:
            offsets = np.uint64(address) - (np.uint64(chunk.base) + self.offsets)
            rows = np.flatnonzero(offsets < np.uint64(chunk.bytes))
            if len(rows):
                row = int(rows[0])
                return self.cpus[row], PercpuOffset(chunk, int(offsets[row]))
        return None


def percpu_units(reader: Reader, losses: LossLog) -> PercpuUnits:
    """Read all chunks of the percpu allocator.

    :raises MissingError: if the kernel has none, or its types are unknown
    :raises drgn.FaultError: if the sizes of units cannot be read
    """
    prog = reader.prog
    cpus = list(possible_cpus(prog, losses))
    type_ = find_type(prog, _CHUNK_TYPE)
    layout = struct_layout(reader, _CHUNK_TYPE, _MAPS)
    if layout is None:
        raise MissingError(f"{_CHUNK_TYPE} has no members")
    page_size = find_variable(prog, "PAGE_SIZE").value_()
    records = list(_chunks(reader, losses, type_, layout.end))
    # The static variables of modules have a chunk of their own.
    with suppress(*LOST):
        reserved = find_variable(prog, "pcpu_reserved_chunk").value_()
        if reserved:
            records.append(reader.read(reserved, layout.end))
    chunks = [layout.decode(data[layout.start :]) for data in records]
    return PercpuUnits(
        [
            PercpuChunk(
                reader,
                chunk["base"],
                chunk["pages"] * page_size,
                chunk["allocated"],
                chunk["bounds"],
            )
            for chunk in chunks
            if 0 < chunk["pages"] <= _MAX_PAGES
        ],
        cpus,
        np.array(unit_offsets(reader, cpus), np.uint64),
    )


def _bitmap(reader: Reader, address: int, bits: int) -> npt.NDArray[np.uint8]:
    data = reader.read(address, 8 * -(-bits // 64))
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")


def _boot_pages(prog: drgn.Program, page_shift: int) -> int:
    """
    Return the number of pages of each CPU's first unit.

    It contains the kernel's static variables, the reserved chunk for those of modules,
    and the first chunk for dynamic ones (pcpu_setup_first_chunk()).
    """
    first = find_variable(prog, "pcpu_first_chunk")
    end = first.base_addr.value_() + (first.nr_pages.value_() << page_shift)
    end -= first.end_offset.value_()
    size: int = end - find_variable(prog, "pcpu_base_addr").value_()
    return size >> page_shift


def _chunks(
    reader: Reader, losses: LossLog, type_: drgn.Type, size: int
) -> Iterator[bytes]:
    """Read all chunks; a chunk is on the list of its free size."""
    prog = reader.prog
    try:
        lists = find_variable(prog, "pcpu_chunk_lists")
    except MissingError:
        lists = find_variable(prog, "pcpu_slot")  # up to v5.13
    count = find_variable(prog, "pcpu_nr_slots").value_()
    with suppress(MissingError):
        # Some versions have separate lists of chunks for memory cgroups.
        count *= find_constant(prog, "PCPU_NR_CHUNK_TYPES").value_()
    if not 0 < count <= _MAX_LISTS:
        raise DamagedDataError(f"there cannot be {count:,} lists of chunks")
    for slot in range(count):
        for _, data in list_records(
            reader,
            lists[slot].address_of_().value_(),
            member_of(type_, "list").offset,
            size,
            losses,
            "a list of percpu chunks",
        ):
            yield data
