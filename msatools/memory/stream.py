# SPDX-License-Identifier: LGPL-2.1-or-later

"""Scans the memmap of an ELF dump straight from its file, many blocks in one call.

The C code (``_classify.c``) reads, classifies and sums up; Python does the blocks that
need more than their struct pages. The scan uses this if it has no observers.

Of large free blocks of the buddy allocator only the first and last struct pages are
read: the kernel does not use the others, and the scan gives them the class of the first
page whatever they contain. Only a page that is marked as poisoned or was zeroed would
have another class; so nothing is skipped if the kernel counts poisoned pages, nor in a
filtered dump.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from typing import Any, NamedTuple, cast

import drgn
import numpy as np
import numpy.typing as npt

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.reader import PAGE, Reader
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.compiled import BLOCKS_HELD, Compiled, Stream
from msatools.memory.memmap import Chunk, MemmapRange, chunk_pages, read_chunks
from msatools.memory.owners import OwnedPages
from msatools.memory.sums import ScanResult, add_sums
from msatools.program.formats import Elf, Extent, parse_elf, reader_of
from msatools.program.linear import VmallocTables, direct_map, page_tables
from msatools.selfdesc.find import find_symbol

_LEAST_ORDER = 8
"""Minimum order of free blocks to skip: the two system calls that skip a block take as
long as reading 64 struct pages."""

_BLOCKS_PER_CALL = 64
"""Blocks between two reports of progress, which are some 5 ms apart."""

_HUGE = 2 << 20
"""Bytes of a huge page, in which the buffer is placed: reading into small pages takes a
tenth longer."""

_MAX_PHYSICAL = 1 << 52


class DumpFile(NamedTuple):
    """An ELF dump, and the file offset of each page frame."""

    file: FileIO
    starts: npt.NDArray[np.int64]
    """First page frame of each segment, ascending."""

    ends: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64]
    """File offset of each segment minus its physical address."""

    tables: VmallocTables
    least_order: int
    """Least order of the free blocks that may be skipped; 0 if none may."""

    def offsets(self, frames: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the file offset of each page frame; -1 if it is not in the file."""
        rows = self.starts.searchsorted(frames, side="right") - 1
        there = (rows >= 0) & (frames < self.ends[rows])
        return np.where(there, frames * PAGE + self.shifts[rows], -1)


def dump_file(reader: Reader) -> DumpFile | None:
    """
    Return the file that the memmap can be read from without drgn, if there is one.

    The file is an ELF dump that is not truncated. There is none if
    :func:`msatools.program.linear.forget_direct_map` was called, as by tests that
    overlay memory.
    """
    if reader.is_live or not direct_map(reader.prog).size:
        return None
    return reader.once("dump file", lambda: _open(reader.prog))


def _open(prog: drgn.Program) -> DumpFile | None:
    path, tables = prog.core_dump_path, page_tables(prog)
    if path is None or tables is None or tables.form.table_bytes != PAGE:
        return None
    try:
        file = FileIO(path)
        elf = parse_elf(reader_of(file.fileno()))
    except (OSError, EOFError, DamagedDataError):
        return None
    loads = _apart(elf)
    if not loads or os.fstat(file.fileno()).st_size < elf.end:
        return None
    starts, sizes, offsets = (
        np.array([getattr(load, name) for load in loads], np.int64)
        for name in ("address", "size", "offset")
    )
    return DumpFile(
        file=file,
        # Pages that are only partly in a segment are left to drgn.
        starts=-(-starts // PAGE),
        ends=(starts + sizes) // PAGE,
        shifts=offsets - starts,
        tables=tables,
        least_order=0 if elf.is_filtered else _least_order(prog),
    )


def _apart(elf: Elf) -> list[Extent]:
    """
    Return the segments without those that are inside another, ascending.

    /proc/vmcore has the kernel's image a second time, as a segment of its own.

    :return: Empty if segments overlap partly, or have no usable physical addresses.
    """
    apart: list[Extent] = []
    end = 0
    for load in sorted(elf.loads, key=lambda load: (load.address, -load.size)):
        if load.address >= end:
            apart.append(load)
        elif load.address + load.size > end:
            return []
        end = max(end, load.address + load.size)
    return apart if elf.has_physical and end < _MAX_PHYSICAL else []


def _least_order(prog: drgn.Program) -> int:
    """Return the least order of free blocks whose inner struct pages need not be read;
    0 if all are read."""
    try:
        # An atomic_long_t in every kernel.
        poisoned = prog.read_u64(find_symbol(prog, "num_poisoned_pages").address)
    except (MissingError, *UNREADABLE):
        # A kernel without CONFIG_MEMORY_FAILURE looks the same as a lost symbol.
        return 0
    return 0 if poisoned else _LEAST_ORDER


class FileScan:
    """The blocks of ranges of the memmap, and their offsets in the file."""

    def __init__(
        self,
        reader: Reader,
        layout: PageLayout,
        ranges: Sequence[MemmapRange],
        compiled: Compiled,
        dump: DumpFile,
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._compiled = compiled
        self._step = step = chunk_pages(layout)
        self._blocks = [
            part._replace(
                pfn=part.pfn + first,
                pages=min(step, part.pages - first),
                address=part.address + first * layout.size,
            )
            for part in ranges
            for first in range(0, part.pages, step)
        ]
        self._dump = dump
        self._runs = _runs(self._blocks, ranges, layout.size, dump)

    @classmethod
    def of(
        cls,
        reader: Reader,
        layout: PageLayout,
        ranges: Sequence[MemmapRange],
        compiled: Compiled,
    ) -> "FileScan | None":
        """Return the scan of ranges; ``None`` if they cannot be read from the file."""
        dump = dump_file(reader)
        if dump is None or not ranges:
            return None
        found = cls(reader, layout, ranges, compiled, dump)
        return found if found._is_right() else None

    def _is_right(self) -> bool:
        """Check that the first page from the file is the same as drgn's."""
        in_file = np.diff(self._runs.firsts).nonzero()[0]
        if not len(in_file):
            return False  # all blocks are left to drgn
        try:
            address = self._blocks[in_file[0]].address
            expected: bytes = self._reader.prog.read(address, PAGE)
        except UNREADABLE:
            return False
        offset = int(self._runs.offsets[0])
        return os.pread(self._dump.file.fileno(), PAGE, offset) == expected

    def rest(
        self,
        owned: OwnedPages,
        result: ScanResult,
        advance: Callable[[int], None],
        read_all: bool,
    ) -> Iterator[Chunk]:
        """
        Add blocks to the result; yield the blocks that the caller has to add.

        :param advance: Called with the number of pages that were added.
        :param read_all: Whether to read the inside of free blocks, too.
        """
        layout, blocks = self._layout, self._blocks
        columns: dict[str, npt.NDArray[Any]] = {
            "pfns": np.array([block.pfn for block in blocks], np.uint64),
            "addresses": np.array([block.address for block in blocks], np.uint64),
            "pages": np.array([block.pages for block in blocks], np.int64),
            "first_run": self._runs.firsts,
            "run_offset": self._runs.offsets,
            "run_bytes": self._runs.bytes,
            "owned": np.ascontiguousarray(owned.pfns),
            "owned_codes": np.ascontiguousarray(owned.codes),
        }
        step, device = self._step, layout.device_zone
        space = self._reader.once("space for blocks", lambda: _space(step, layout.size))
        stream = Stream(
            fd=self._dump.file.fileno(),
            nowned=len(owned.pfns),
            rings=PageClass.RINGS,
            zone_shift=layout.zone_shift,
            zone_mask=(1 << layout.zone_bits) - 1,
            device_zone=_NO_ZONE if device is None else device,
            kernel_start=layout.kernel_start,
            least_order=0 if read_all else self._dump.least_order,
            lru=layout.lru,
            room=len(space["nexts"]),
            **{n: array.ctypes.data for n, array in (columns | space).items()},
        )
        while stream.next < len(blocks):
            first, end = stream.next, min(stream.next + _BLOCKS_PER_CALL, len(blocks))
            sums = self._compiled.stream(stream, end, step)
            # Each block counts as one read, as it does in other formats of dumps.
            self._reader.reads += stream.done
            self._reader.bytes += stream.bytes
            if stream.done:
                add_sums(result, sums, stream.key, cached=True)
                _add_lists(result, stream, space)
                advance(int(columns["pages"][first : stream.next].sum()))
            if stream.left:
                yield from read_chunks(self._reader, layout, [blocks[stream.next]])
                stream.next += 1


def _add_lists(
    result: ScanResult, stream: Stream, space: dict[str, npt.NDArray[Any]]
) -> None:
    """Add the candidates and swap entries that were found."""
    if count := stream.candidates:
        found = result.candidates
        lists = found.nexts, found.prevs, found.nodes, found.rooms, found.codes
        for name, parts in zip(_CANDIDATES, lists, strict=True):
            cast(list[npt.NDArray[Any]], parts).append(space[name][:count].copy())
        found.keys.append(np.full(count, stream.key, np.int64))
    if count := stream.nentries:
        result.swap_entries.append(space["entries"][:count].copy())
        result.swap_keys.append(np.full(count, stream.key, np.int64))


_NO_ZONE = (1 << 64) - 1

_CANDIDATES: dict[str, type[np.generic]] = {
    "nexts": np.uint64,
    "prevs": np.uint64,
    "nodes": np.uint64,
    "rooms": np.int64,
    "candidate_codes": np.uint8,
}
"""Columns of FreeCandidates that the C code fills, and the types of their elements."""


def _space(step: int, size: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that the C code fills, which are used again for each scan."""
    room = BLOCKS_HELD * step
    return {
        **{name: np.empty(room, dtype) for name, dtype in _CANDIDATES.items()},
        "entries": np.empty(room, np.uint64),
        "orphans": np.empty(step, np.int64),
        "buffer": _buffer(step * size),
    }


class _Runs(NamedTuple):
    """The parts of blocks that are contiguous in the file."""

    firsts: npt.NDArray[np.int64]
    """Index of each block's first run, then the number of all runs. A block that is not
    wholly in the file has no run."""

    offsets: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]


def _runs(
    blocks: Sequence[MemmapRange],
    ranges: Sequence[MemmapRange],
    size: int,
    dump: DumpFile,
) -> _Runs:
    """Find the runs of all blocks.

    :param size: Bytes of a struct page.
    """
    frames = np.concatenate([_frames(part, size, dump.tables) for part in ranges])
    offsets = dump.offsets(frames)
    lengths = np.array([-(-block.pages * size // PAGE) for block in blocks])
    ends = lengths.cumsum()
    starts = ends - lengths
    whole = np.minimum.reduceat(offsets, starts) >= 0
    begins = np.diff(offsets, prepend=-1) != PAGE
    begins[starts] = True
    begins &= whole.repeat(lengths)
    found = begins.nonzero()[0]
    their_blocks = starts.searchsorted(found, side="right") - 1
    run_ends = np.minimum(np.append(found[1:], len(frames)), ends[their_blocks])
    return _Runs(
        firsts=their_blocks.searchsorted(np.arange(len(blocks) + 1)),
        offsets=offsets[found],
        bytes=(run_ends - found) * PAGE,
    )


def _frames(
    part: MemmapRange, size: int, tables: VmallocTables
) -> npt.NDArray[np.int64]:
    """Return the page frames of a range's struct pages; -1 if they are left to drgn."""
    length = part.pages * size
    if part.instead or (part.address | length) % PAGE:
        return np.full(-(-length // PAGE), -1, np.int64)
    return tables.frames(part.address, length // PAGE)


def _buffer(size: int) -> npt.NDArray[np.uint8]:
    """Return a buffer of *size* bytes, within a huge page if it fits."""
    if size > _HUGE:
        return np.empty(size, np.uint8)
    memory = np.empty(2 * _HUGE, np.uint8)  # from 4 MiB on, numpy asks for huge pages
    start = -memory.ctypes.data % _HUGE
    return memory[start : start + size]
