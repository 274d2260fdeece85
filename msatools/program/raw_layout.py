# SPDX-License-Identifier: LGPL-2.1-or-later

"""Placing of a guest's memory by physical address, in files that do not record it.

:mod:`msatools.program.raw_program` calls it for each kernel found in such a file.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from drgn import Architecture

from msatools.errors import UNREADABLE
from msatools.program.raw_memory import (
    PAGE_BYTES,
    FoundKernel,
    MemoryRange,
    PhysicalMemory,
    find_names,
)

# Hypervisors leave a hole below 4 GiB for devices, and write memory without it: QEMU's
# memory-backend-file, Firecracker, Cloud Hypervisor and VMware each start the hole
# elsewhere. VMCOREINFO has the physical address of the kernel's image. If that is above
# 4 GiB, the image's offset in the file shows the hole; else the kernel's own counts of
# pages do.


HOLE_END = 4 << 30
"""Physical address where the hole of x86-64 ends."""

_KNOWN_ENDS = tuple(
    quarter << 28 for quarter in (12, 8, 13, 14, 15, 4, 11, 10, 6, 7, 9, 5, 3, 2, 1)
)
"""Physical addresses where the memory below the hole may end, the usual ones first: 3
GiB with QEMU's i440fx, VMware, Cloud Hypervisor and Firecracker since 1.14; 2 GiB with
q35; 3.25 GiB with older Firecrackers; 3.5 GiB with QEMU if all memory fits below;
others by QEMU's option ``max-ram-below-4g``."""

_GIB = 1 << 30
LEAST_HOLE = 16 << 20
"""Minimum bytes of a gap in a kernel's map of memory that can be a hole: Cloud
Hypervisor's on arm64 has 64 MiB."""

_MOST_KEPT = 64 << 20
"""Maximum bytes that firmware keeps for itself below a hole."""

_MOST_HOLES = 6

_PAGE_SHIFT = 12
_MOST_NAMES = 16
_LOW_STEP = 1 << 20
_NO_HOLE_BYTES = 2 << 30
"""Bytes of memory that fit below the hole of any hypervisor's default."""

_SAME_BYTES = 1024
"""Bytes of VMCOREINFO that are compared: a crash adds lines only behind them."""

_NODE = ("node_start_pfn", "node_spanned_pages", "node_id")


class KernelFacts(NamedTuple):
    """Facts from a kernel's own variables; ``None`` for variables that it lacks."""

    pages_end: int | None
    """The physical address behind the kernel's last page (``max_pfn``)."""

    text_at: int | None
    """The physical address of VMCOREINFO (``vmcoreinfo_data``)."""

    nodes: tuple[tuple[int, int], ...]
    """Number and physical address of each node's ``struct pglist_data``."""

    banner: str | None
    """``linux_banner``."""

    ram: tuple[tuple[int, int], ...] = ()
    """Start and end of each range of memory (``memblock``); empty if the kernel does
    not keep them."""


def place_kernel(
    physical: PhysicalMemory, kernel: FoundKernel, *, search: bool
) -> bool:
    """Find the physical addresses of the file's memory.

    They are right if the kernel is where its VMCOREINFO says.

    :param physical: Changed to the addresses that were found, else to the last ones
        that were tried.
    :param search: Whether to look for the kernel in memory and derive the addresses
        from where it is, instead of trying the layouts of known hypervisors.
    :return: Whether the addresses were found.
    """
    for pieces in _searched(physical, kernel) if search else _usual(physical, kernel):
        physical.place(pieces)
        if kernel.is_at(physical.read) and _is_reachable(physical, kernel):
            return True
    return False


def _is_reachable(physical: PhysicalMemory, kernel: FoundKernel) -> bool:
    # The page tables of riscv64 are left to drgn.
    return kernel.arch == Architecture.RISCV64 or kernel.is_mapped(physical.read)


def _usual(
    physical: PhysicalMemory, kernel: FoundKernel
) -> Iterator[Sequence[MemoryRange]]:
    memory = physical.memory
    yield [each._replace(offset=each.start) for each in memory.ranges]
    if not memory.is_packed:
        return
    is_x86 = kernel.arch == Architecture.X86_64
    if is_x86 and kernel.uts_name >= HOLE_END:
        for end in _KNOWN_ENDS:
            yield with_hole(memory.size, end)


def _searched(
    physical: PhysicalMemory, kernel: FoundKernel
) -> Iterator[Sequence[MemoryRange]]:
    memory = physical.memory
    if not memory.is_packed:
        return
    is_x86 = kernel.arch == Architecture.X86_64
    for count, position in enumerate(find_names(memory, kernel)):
        shift = kernel.uts_name - position
        if is_x86 and 0 < shift < HOLE_END <= kernel.uts_name:
            yield with_hole(memory.size, HOLE_END - shift)
        elif shift > 0:
            # The file's memory begins at a physical address other than 0.
            yield [MemoryRange(shift, memory.size, 0)]
        if count >= _MOST_NAMES:
            return


def with_hole(size: int, low_end: int) -> list[MemoryRange]:
    """Return the placing of *size* bytes of packed memory with a hole at *low_end*."""
    if size <= low_end:
        return [MemoryRange(0, size, 0)]
    high = MemoryRange(HOLE_END, size - low_end, low_end)
    return [MemoryRange(0, low_end, 0), high]


def settle_hole(
    physical: PhysicalMemory, kernel: FoundKernel, facts: KernelFacts | None
) -> bool | None:
    """Place packed memory behind the hole by the kernel's own count of pages.

    :param facts: ``None`` if the kernel's variables are lost.
    :return: Whether the file has all memory of the kernel; ``None`` if the placing
        behind the hole is unknown, so that reads there would be wrong.
    """
    memory = physical.memory
    if not memory.is_packed:
        return True
    is_x86 = kernel.arch == Architecture.X86_64
    is_settled = len(physical.pieces) > 1
    end = facts.pages_end if facts else None
    if _is_odd(physical.pieces) and (facts is None or not facts.ram):
        return None
    if facts is None or end is None:
        is_small = memory.size <= _NO_HOLE_BYTES
        return True if is_settled or is_small or not is_x86 else None
    before = physical.pieces
    alone = _ranges_alone(physical, kernel, facts.ram)
    if alone is not None:
        physical.place(alone)
        if _agrees(physical, kernel, facts):
            return True
        physical.place(before)
    if _is_odd(before):
        return None
    if before[-1].end >= end:
        return True
    for pieces in _settled(physical, kernel, facts, end):
        physical.place(pieces)
        if _agrees(physical, kernel, facts):
            return physical.pieces[-1].end >= end
    physical.place(before)
    # A file that was cut off may lack all memory behind the hole.
    has_hole = end > HOLE_END if is_x86 else bool(_gaps(facts.ram))
    return None if has_hole and not is_settled else False


def _settled(
    physical: PhysicalMemory, kernel: FoundKernel, facts: KernelFacts, end: int
) -> Iterator[Sequence[MemoryRange]]:
    """Yield the placings that fit the kernel's variables, the likeliest first.

    :param end: The physical address behind the kernel's last page.
    """
    size = physical.memory.size
    is_placed = len(physical.pieces) > 1
    yield from with_holes(size, physical.pieces[0].start, facts.ram, end)
    if kernel.arch == Architecture.X86_64 and not is_placed and end > HOLE_END:
        for low_end in _low_ends(size, kernel, facts, end):
            yield with_hole(size, low_end)


def with_holes(
    size: int, start: int, ram: Sequence[tuple[int, int]], end: int
) -> Iterator[list[MemoryRange]]:
    """Yield the placings of packed memory with holes where the kernel's map has gaps.

    Not every gap is a hole: firmware keeps memory, and options (memmap=) remove it.
    With the right gaps, memory is as large as the file. Firecracker has a second hole
    from 256 to 512 GiB.

    :param size: Bytes of memory in the file.
    :param start: The physical address of its first byte.
    :param ram: Start and end of each range of the kernel's memory, by address.
    :param end: The physical address behind the kernel's last page.
    """
    gaps = sorted(sorted(_gaps(ram), key=lambda gap: gap[0] - gap[1])[:_MOST_HOLES])
    # The gap that ends at 4 GiB first: hypervisors have a hole there.
    gaps.sort(key=lambda gap: gap[1] != HOLE_END)
    for count in range(1, len(gaps) + 1):
        for first, *others in map(sorted, combinations(gaps, count)):
            # Firmware keeps memory below the first hole; further holes begin at a GiB.
            ends = [*(_rounded_up(low) for low, _ in others), end]
            starts = [first[1], *(high for _, high in others)]
            high = sum(ends) - sum(starts)
            low_end = start + size - high
            if not first[0] <= low_end <= min(first[0] + _MOST_KEPT, first[1]):
                continue
            pieces = [MemoryRange(start, low_end - start, 0)]
            for piece_start, piece_end in zip(starts, ends, strict=True):
                offset = pieces[-1].offset + pieces[-1].size
                pieces.append(MemoryRange(piece_start, piece_end - piece_start, offset))
            if all(piece.size > 0 for piece in pieces):
                yield pieces


def _is_odd(pieces: Sequence[MemoryRange]) -> bool:
    """Return whether a piece is not at a MiB, as every hypervisor places it.

    Then the file lacks other ranges as well, and only the piece with the kernel is
    placed right.
    """
    return any(each.start % _LOW_STEP or each.offset % _LOW_STEP for each in pieces)


def _ranges_alone(
    physical: PhysicalMemory, kernel: FoundKernel, ram: Sequence[tuple[int, int]]
) -> list[MemoryRange] | None:
    """Return the placing of a file that has the kernel's ranges one after the other.

    LiME's format=raw writes such a file. It also has the RAM in a partial page at the
    end of a range: in practice of the first range, below the BIOS.

    :return: ``None`` if the file is not of that size.
    """
    address = kernel.uts_name
    found = [
        each.offset + address - each.start
        for each in physical.pieces
        if each.start <= address < each.end
    ]
    before = [(start, end) for start, end in ram if end <= address]
    behind = [(start, end) for start, end in ram if end > address]
    if not found or not behind or behind[0][0] > address:
        return None
    own = found[0] - (address - behind[0][0])
    part = own - sum(end - start for start, end in before)
    rest = physical.memory.size - own - sum(end - start for start, end in behind)
    if not (0 <= part < PAGE_BYTES if before else part == 0):
        return None
    if not 0 <= rest < PAGE_BYTES:
        return None
    pieces = []
    offset = 0
    for start, end in (*before, *behind):
        pieces.append(MemoryRange(start, end - start, offset))
        offset += end - start + (part if len(pieces) == 1 and before else 0)
    return pieces


def _gaps(ram: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return start and end of the gaps between ranges that are as large as a hole."""
    return [
        (before, after)
        for (_, before), (after, _) in pairwise(ram)
        if after - before >= LEAST_HOLE
    ]


def _rounded_up(address: int) -> int:
    """Return the end of RAM at or after *address*: firmware may keep the last bytes.

    This is the next GiB, or *address* if the next GiB is too far away.
    """
    rounded = -(-address // _GIB) * _GIB
    return rounded if rounded - address <= _MOST_KEPT else address


def _low_ends(
    size: int, kernel: FoundKernel, facts: KernelFacts, end: int
) -> Iterator[int]:
    """Yield addresses where the hole may begin, the likeliest first."""
    # First, the kernel's last page is at the end of the file, if that is not cut off.
    found = [size - (end - HOLE_END)]
    if facts.text_at is not None:
        found += [HOLE_END - facts.text_at + each for each in kernel.copies]
    for low_end in (*found, *_KNOWN_ENDS):
        if 0 < low_end <= HOLE_END and low_end < size and not low_end % _LOW_STEP:
            yield low_end


def _agrees(physical: PhysicalMemory, kernel: FoundKernel, facts: KernelFacts) -> bool:
    """Return whether kernel, VMCOREINFO and nodes are at their physical addresses."""
    if not kernel.is_at(physical.read):
        return False
    try:
        if facts.text_at is not None:
            text = physical.read(facts.text_at, len(kernel.text))
            if not text.startswith(kernel.text[:_SAME_BYTES]):
                return False
        return all(
            _is_node(physical, kernel, facts, number, address)
            for number, address in facts.nodes
        )
    except UNREADABLE:
        return False


def _is_node(
    physical: PhysicalMemory,
    kernel: FoundKernel,
    facts: KernelFacts,
    number: int,
    address: int,
) -> bool:
    """Return whether a ``struct pglist_data`` can be at an address."""
    try:
        places = [kernel.offset(f"pglist_data.{name}") for name in _NODE]
        if facts.pages_end is None or None in places:
            return True
        start, pages, own = (
            int.from_bytes(physical.read(address + (place or 0), size), "little")
            for place, size in zip(places, (8, 8, 4), strict=True)
        )
    except UNREADABLE:
        # A file that was cut off may lack the node.
        return True
    return own == number and start + pages <= facts.pages_end >> _PAGE_SHIFT
