# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which physical address of a guest lies where in a file that does not say.

Hypervisors leave a hole below 4 GiB for devices, and write memory without it: QEMU's
memory-backend-file, Firecracker, Cloud Hypervisor and VMware each end the lower part
elsewhere. The kernel's image is at an address that VMCOREINFO gives. If that is above
4 GiB, where it lies shows the hole; else the kernel's own counts of pages do.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drgn import Architecture, Platform, Program

from msatools.errors import LOST
from msatools.selfdesc.kallsyms import load_symbols
from msatools.target.raw.candidates import FoundKernel, find_names
from msatools.target.raw.memory import MemoryRange, PhysicalMemory

HOLE_END = 4 << 30
"""Where the hole of x86-64 ends."""

_KNOWN_ENDS = tuple(
    quarter << 28 for quarter in (12, 8, 13, 14, 15, 4, 11, 10, 6, 7, 9, 5, 3, 2, 1)
)
"""Where the memory below the hole ends, the usual first: QEMU's i440fx and VMware 3
GiB, q35 2 GiB, Firecracker and Cloud Hypervisor 3.25 GiB, QEMU's if all of it fits
there 3.5 GiB; others by ``max-ram-below-4g``."""

_IMAGE_BYTES = 1 << 30
"""KERNEL_IMAGE_SIZE, with KASLR."""

_PAGE_SHIFT = 12
_POINTER_BYTES = 8
_BANNER_BYTES = 512
_MOST_NAMES = 16
_MOST_FIRMWARE_BYTES = 256 << 20
"""Memory at the end of the lower part that the kernel does not have: ACPI's tables,
and what firmware keeps."""


class KernelFacts(NamedTuple):
    """What a kernel's own variables say; ``None`` for what it does not have."""

    pages_end: int | None
    """The physical address behind its last page (``max_pfn``)."""

    low_end: int | None
    """The physical address behind its last page below 4 GiB (``max_low_pfn``)."""

    text_at: int | None
    """The physical address of VMCOREINFO (``vmcoreinfo_data``)."""

    banner: str | None
    """``linux_banner``."""


def place_kernel(physical: PhysicalMemory, kernel: FoundKernel) -> bool:
    """Find a placing of memory at which a kernel is where VMCOREINFO says.

    :return: Whether there is one; *physical* then has it.
    """
    for pieces in _placings(physical, kernel):
        physical.place(pieces)
        if kernel.is_at(physical.read) and _is_reachable(physical, kernel):
            return True
    return False


def _is_reachable(physical: PhysicalMemory, kernel: FoundKernel) -> bool:
    # The page tables of riscv64 are left to drgn.
    return kernel.arch == Architecture.RISCV64 or kernel.is_mapped(physical.read)


def _placings(
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
    for count, position in enumerate(find_names(memory, kernel)):
        shift = kernel.uts_name - position
        if is_x86 and 0 < shift < HOLE_END <= kernel.uts_name:
            yield with_hole(memory.size, HOLE_END - shift)
        elif shift > 0:
            # Memory that begins elsewhere than at 0.
            yield [MemoryRange(shift, memory.size, 0)]
        if count >= _MOST_NAMES:
            return


def with_hole(size: int, low_end: int) -> list[MemoryRange]:
    """Return the placing of packed memory whose lower part ends at an address."""
    if size <= low_end:
        return [MemoryRange(0, size, 0)]
    high = MemoryRange(HOLE_END, size - low_end, low_end)
    return [MemoryRange(0, low_end, 0), high]


def settle_hole(
    physical: PhysicalMemory, kernel: FoundKernel, facts: KernelFacts
) -> bool:
    """Place packed memory behind the hole, where the kernel says how much there is.

    :return: Whether the file has all memory of the kernel.
    """
    memory = physical.memory
    end = facts.pages_end
    if not memory.is_packed or end is None:
        return True
    last = max(each.end for each in physical.pieces)
    if kernel.arch != Architecture.X86_64 or len(physical.pieces) > 1:
        return last >= end
    if end <= HOLE_END or memory.size >= end:
        # Nothing lies above the hole, or it is in the file.
        return last >= end
    low_end = _low_end(memory.size, kernel, facts)
    if low_end is not None:
        physical.place(with_hole(memory.size, low_end))
    return low_end is not None and HOLE_END + memory.size - low_end >= end


def _low_end(size: int, kernel: FoundKernel, facts: KernelFacts) -> int | None:
    """Return where the lower part of packed memory ends; ``None`` if unknown."""
    assert facts.pages_end is not None
    least = facts.low_end or 0
    if facts.text_at is not None and facts.text_at >= HOLE_END:
        # The page was found where it lies in the file.
        low_end = HOLE_END - (facts.text_at - kernel.position)
        return low_end if least <= low_end <= HOLE_END else None
    # The upper part ends where the file does, unless it was cut off.
    low_end = size - (facts.pages_end - HOLE_END)
    if least <= low_end <= min(HOLE_END, least + _MOST_FIRMWARE_BYTES):
        return low_end
    known = sorted(each for each in _KNOWN_ENDS if each >= least)
    return known[0] if known else None


def kernel_facts(physical: PhysicalMemory, kernel: FoundKernel) -> KernelFacts | None:
    """Read what a kernel says of its memory, from its image alone.

    Page tables, which may lie behind the hole, are not needed.

    :return: ``None`` if its symbols cannot be read.
    """
    prog = Program(Platform(kernel.arch), vmcoreinfo=kernel.text)
    prog.add_memory_segment(0, (1 << 64) - 1, physical, True)
    prog.set_linux_kernel_custom(kernel.text, False)
    start = kernel.symbol("_stext") & -(1 << 21)
    base = start - kernel.image_offset

    def read_image(address: int, count: int, offset: int, _: bool) -> bytes:
        return physical.read(base + offset, count)

    prog.add_memory_segment(start, min(_IMAGE_BYTES, (1 << 64) - 1 - start), read_image)
    try:
        symbols = load_symbols(prog)
    except LOST:
        return None

    def word(name: str) -> int | None:
        found = symbols(prog, name, None, True)
        if not found:
            return None
        try:
            return int.from_bytes(prog.read(found[0].address, _POINTER_BYTES), "little")
        except LOST:
            return None

    def text(name: str) -> str | None:
        found = symbols(prog, name, None, True)
        try:
            data = prog.read(found[0].address, _BANNER_BYTES) if found else b""
        except LOST:
            return None
        return data.partition(b"\0")[0].decode("ascii", "backslashreplace") or None

    pages, low = word("max_pfn"), word("max_low_pfn")
    pointer, offset = word("vmcoreinfo_data"), word("page_offset_base")
    return KernelFacts(
        pages_end=pages << _PAGE_SHIFT if pages else None,
        low_end=low << _PAGE_SHIFT if low else None,
        text_at=pointer - offset if pointer and offset and pointer > offset else None,
        banner=text("linux_banner"),
    )
