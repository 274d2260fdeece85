# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn programs of memory without the note that says where the kernel is.

Also which physical address lies where in a file that does not say.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import NamedTuple

from drgn import Architecture, Platform, Program
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, DamagedDataError
from msatools.program.dumpfile import DumpFile, os_error, remember_dump
from msatools.program.model import DamagedDumpError, NotADumpError, TargetError
from msatools.program.raw_memory import (
    FoundKernel,
    Memory,
    MemoryRange,
    PhysicalMemory,
    find_kernels,
    find_names,
    parse_kernel,
    what_it_holds,
)
from msatools.selfdesc.find import ask
from msatools.selfdesc.kallsyms import load_symbols
from msatools.standby import standby_of

# --- Which physical address of a guest lies where in a file that does not say.
#
# Hypervisors leave a hole below 4 GiB for devices, and write memory without it: QEMU's
# memory-backend-file, Firecracker, Cloud Hypervisor and VMware each end the lower part
# elsewhere. The kernel's image is at an address that VMCOREINFO gives. If that is above
# 4 GiB, where it lies shows the hole; else the kernel's own counts of pages do.


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

_SECOND_NS = 10**9
_MOST_TIME_S = 1 << 33
"""The year 2242: later ones are damage."""

_PAGE_SHIFT = 12
_POINTER_BYTES = 8
_BANNER_BYTES = 512
_MOST_NAMES = 16
_LOW_STEP = 1 << 20
_NO_HOLE_BYTES = 2 << 30
"""Memory that fits below the hole, wherever a hypervisor begins that by itself."""

_SAME_BYTES = 1024
"""What a crash adds to VMCOREINFO comes later."""

_NODE = ("node_start_pfn", "node_spanned_pages", "node_id")
_MOST_NODES = 1024


class KernelFacts(NamedTuple):
    """What a kernel's own variables say; ``None`` for what it does not have."""

    pages_end: int | None
    """The physical address behind its last page (``max_pfn``)."""

    text_at: int | None
    """The physical address of VMCOREINFO (``vmcoreinfo_data``)."""

    nodes: tuple[tuple[int, int], ...]
    """The number of each node of memory, and where its ``struct pglist_data`` is."""

    banner: str | None
    """``linux_banner``."""


def place_kernel(
    physical: PhysicalMemory, kernel: FoundKernel, *, search: bool
) -> bool:
    """Find a placing of memory at which a kernel is where VMCOREINFO says.

    :param search: Whether to search memory for it once more, if it lies at none of the
        usual places.
    :return: Whether there is one; *physical* then has it.
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
    physical: PhysicalMemory, kernel: FoundKernel, facts: KernelFacts | None
) -> bool | None:
    """Place packed memory behind the hole, where the kernel says how much there is.

    :param facts: ``None`` if they are lost.
    :return: Whether the file has all memory of the kernel; ``None`` if it is not known
        what lies behind the hole, so that what is read there would be wrong.
    """
    memory = physical.memory
    if not memory.is_packed:
        return True
    is_settled = len(physical.pieces) > 1 or kernel.arch != Architecture.X86_64
    end = facts.pages_end if facts else None
    if facts is None or end is None:
        return True if is_settled or memory.size <= _NO_HOLE_BYTES else None
    if not is_settled and end > HOLE_END and memory.size < end:
        before = physical.pieces
        for low_end in _low_ends(memory.size, kernel, facts, end):
            physical.place(with_hole(memory.size, low_end))
            if _agrees(physical, kernel, facts):
                break
        else:
            physical.place(before)
            return None
    return max(each.end for each in physical.pieces) >= end


def _low_ends(
    size: int, kernel: FoundKernel, facts: KernelFacts, end: int
) -> Iterator[int]:
    """Yield where the lower part of packed memory may end, the likeliest first."""
    # The upper part ends where the file does, unless it was cut off.
    found = [size - (end - HOLE_END)]
    if facts.text_at is not None:
        found += [HOLE_END - facts.text_at + each for each in kernel.copies]
    for low_end in (*found, *_KNOWN_ENDS):
        if 0 < low_end <= HOLE_END and low_end < size and not low_end % _LOW_STEP:
            yield low_end


def _agrees(physical: PhysicalMemory, kernel: FoundKernel, facts: KernelFacts) -> bool:
    """Return whether what the kernel points to lies where it says."""
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
    places = [kernel.lines.get(f"OFFSET(pglist_data.{name})") for name in _NODE]
    if facts.pages_end is None or None in places:
        return True
    try:
        start, pages, own = (
            int.from_bytes(physical.read(address + int(place or 0), size), "little")
            for place, size in zip(places, (8, 8, 4), strict=True)
        )
    except UNREADABLE:
        # A file that was cut off does not have it.
        return True
    return own == number and start + pages <= facts.pages_end >> _PAGE_SHIFT


def program_of(kernel: FoundKernel) -> Program:
    """Return a program of a kernel, without memory.

    :raises DamagedDataError: if drgn does not take its VMCOREINFO
    """
    return ask(Program, Platform(kernel.arch), vmcoreinfo=kernel.text)


def _set_kernel(prog: Program, kernel: FoundKernel) -> None:
    """Make a program that of a kernel, of which few pages can be read yet.

    A session's plugins are called. Ours must not load types meanwhile: it would warn of
    modules that cannot be read.
    """
    ask(prog.set_linux_kernel_custom, kernel.text, False)
    standby = standby_of(prog)
    if standby is not None:
        standby.stand_down()


def boot_time(physical: PhysicalMemory, kernel: FoundKernel) -> int | None:
    """Return when a kernel booted, in seconds of its wall clock since 1970.

    It is the clock of the day minus the time since boot (struct timekeeper). A machine
    without a clock of its own begins in 1970.

    :return: ``None`` if it or the kernel's types cannot be read.
    """
    # They are slow to import, and few files have several kernels.
    from drgn.helpers.linux.timekeeping import (
        ktime_get_coarse_boottime_ns,
        ktime_get_coarse_real_ns,
    )

    from msatools.selfdesc import BtfError, NotSelfDescribedError, load_btf

    try:
        prog = program_of(kernel)
        prog.add_memory_segment(0, (1 << 64) - 1, physical, True)
        _set_kernel(prog, kernel)
        load_btf(prog, modules=False)
        now_ns = ask(ktime_get_coarse_real_ns, prog).value_()
        up_ns = ask(ktime_get_coarse_boottime_ns, prog).value_()
    except (*LOST, BtfError, NotSelfDescribedError):
        return None
    time_s: int = (now_ns - up_ns) // _SECOND_NS
    return time_s if 0 <= time_s < _MOST_TIME_S else None


def kernel_facts(physical: PhysicalMemory, kernel: FoundKernel) -> KernelFacts | None:
    """Read what a kernel says of its memory, from its image alone.

    Page tables, which may lie behind the hole, are not needed.

    :return: ``None`` if its symbols cannot be read.
    :raises DamagedDataError: if drgn does not take its VMCOREINFO
    """
    prog = program_of(kernel)
    prog.add_memory_segment(0, (1 << 64) - 1, physical, True)
    _set_kernel(prog, kernel)
    start = kernel.symbol("_stext") & -(1 << 21)
    image = start - kernel.image_offset

    def read_image(address: int, count: int, offset: int, _: bool) -> bytes:
        return physical.read(image + offset, count)

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

    pages, pointer = word("max_pfn"), word("vmcoreinfo_data")
    base = word("page_offset_base") or 0

    def physical_of(address: int) -> int | None:
        # The direct map is at the start of the kernel's half.
        return address - base if 0 < base <= address < base + (1 << 52) else None

    return KernelFacts(
        pages_end=pages << _PAGE_SHIFT if pages else None,
        text_at=physical_of(pointer) if pointer else None,
        nodes=tuple(
            (number, found)
            for number, address in _node_addresses(prog, kernel)
            if (found := physical_of(address)) is not None
        ),
        banner=text("linux_banner"),
    )


def _node_addresses(prog: Program, kernel: FoundKernel) -> Iterator[tuple[int, int]]:
    """Yield number and address of each node, of a kernel with CONFIG_NUMA."""
    try:
        count = min(int(kernel.lines["LENGTH(node_data)"]), _MOST_NODES)
        start = kernel.symbol("node_data")
        data = prog.read(start, count * _POINTER_BYTES)
    except (KeyError, ValueError, *UNREADABLE):
        return
    for number in range(count):
        place = number * _POINTER_BYTES
        address = int.from_bytes(data[place : place + _POINTER_BYTES], "little")
        if address:
            yield number, address


# --- drgn programs of memory without the note that says where the kernel is.


_ALL_MEMORY = (1 << 64) - 1

_MOST_SEARCHED = 4
"""Kernels for which all memory is searched once more."""

_MOST_TEXT = 1 << 16
"""Maximum size of VMCOREINFO in a file of its own, in bytes."""


class ProvenKernel(Struct, frozen=True):
    """A kernel that is in memory, and how memory lies for it."""

    kernel: FoundKernel
    physical: PhysicalMemory
    facts: KernelFacts | None
    is_whole: bool | None
    """Whether the file has all memory that the kernel has; ``None`` if it is not known
    where the hole ends."""


def open_memory(
    path: str,
    dump: DumpFile,
    memory: Memory,
    number: int | None = None,
    vmcoreinfo: str | None = None,
) -> tuple[Program, DumpFile]:
    """Find the kernel in a file's memory; return a program, and the dump described.

    :param number: Which of several kernels, from 1.
    :param vmcoreinfo: Path of a file with VMCOREINFO, which is then not looked for.
    :raises TargetError: if there is no kernel, or not that one
    """
    if vmcoreinfo is not None:
        proven = [_named(path, memory, vmcoreinfo)]
    else:
        found = find_kernels(memory)
        proven = _proven(memory, found)
        if not proven:
            raise _no_kernel(path, memory, found)
    chosen = _chosen(path, proven, number)
    kernel = proven[chosen].kernel
    if proven[chosen].is_whole is None:
        raise DamagedDumpError(
            path,
            "its kernel does not say where the hole below 4 GiB begins: the end of the "
            "file, or the kernel's symbols, are lost",
            "copy the file again, or take a dump with headers",
        )
    dump = replace(
        dump,
        # Of a kdump the memory alone is read.
        kind="elf" if dump.kind == "elf" else "raw",
        format=describe_memory(proven, chosen, has_registers=dump.kind == "elf"),
        truncated=memory.is_truncated or not proven[chosen].is_whole,
        release=kernel.release,
        options=(
            *(() if number is None else ("--kernel", str(number))),
            *(() if vmcoreinfo is None else ("--vmcoreinfo", vmcoreinfo)),
        ),
    )
    prog = program_of(kernel)
    try:
        if dump.kind == "elf":
            # drgn reads its memory, and has its registers.
            ask(prog.set_core_dump, path)
        else:
            physical = proven[chosen].physical
            prog.add_memory_segment(0, _ALL_MEMORY, physical, True)
            ask(prog.set_linux_kernel_custom, kernel.text, False)
            remember_dump(prog, path, dump)
    except OSError as error:
        raise os_error(path, error) from error
    except LOST as error:
        raise DamagedDumpError(
            path, f"drgn cannot open it: {error}", "copy or take it again"
        ) from error
    return prog, dump


def describe_memory(
    proven: Sequence[ProvenKernel], chosen: int, *, has_registers: bool
) -> str:
    """Return one line on what was opened."""
    kernel, physical = proven[chosen].kernel, proven[chosen].physical
    memory = physical.memory
    words = [memory.name, f"{memory.size / (1 << 30):.1f} GiB"]
    pieces = physical.pieces
    words += [
        f"hole at {before.end / (1 << 30):g} GiB"
        for before, after in pairwise(pieces)
        if memory.is_packed and before.end < after.start
    ]
    where = kernel.symbol("_stext") - kernel.image_offset
    words.append(f"kernel found at {where:#x}")
    if not has_registers:
        words.append("no registers")
    if len(proven) > 1:
        others = ", ".join(
            f"{index + 1}: {_with_memory(each)}" for index, each in enumerate(proven)
        )
        most = " with the most memory" if chosen == _first(proven) else ""
        words.append(f"number {chosen + 1}{most} of {len(proven)} ({others})")
    return ", ".join(words)


def _with_memory(proven: ProvenKernel) -> str:
    """Return what distinguishes a kernel from others: release, memory, boot time."""
    end = proven.facts.pages_end if proven.facts else None
    most = f" up to {end / (1 << 30):.1f} GiB" if end else ""
    boot_s = boot_time(proven.physical, proven.kernel)
    booted = "" if boot_s is None else f" booted {_utc(boot_s)}"
    return f"{proven.kernel.release}{most}{booted}"


def _utc(time_s: int) -> str:
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _first(proven: Sequence[ProvenKernel]) -> int:
    """Return the index of the kernel with the most memory.

    A crash kernel has a reserved part of another's.
    """
    ends = [each.facts.pages_end or 0 if each.facts else 0 for each in proven]
    return ends.index(max(ends))


def _proven(memory: Memory, found: Sequence[FoundKernel]) -> list[ProvenKernel]:
    """Return those of some kernels that are in memory."""
    for search, kernels in ((False, found), (True, found[:_MOST_SEARCHED])):
        proven = [
            each
            for kernel in kernels
            if (each := _prove(memory, kernel, search=search)) is not None
        ]
        if proven:
            return proven
    return []


def _prove(memory: Memory, kernel: FoundKernel, *, search: bool) -> ProvenKernel | None:
    physical = PhysicalMemory(memory)
    if not place_kernel(physical, kernel, search=search):
        return None
    try:
        facts = kernel_facts(physical, kernel)
    except DamagedDataError:
        return None
    banner = facts.banner if facts else None
    if banner is not None and not banner.startswith(f"Linux version {kernel.release} "):
        return None
    return ProvenKernel(kernel, physical, facts, settle_hole(physical, kernel, facts))


def _named(path: str, memory: Memory, vmcoreinfo: str) -> ProvenKernel:
    """Return the kernel that a file describes."""
    try:
        with open(vmcoreinfo, "rb") as file:
            text = file.read(_MOST_TEXT)
    except OSError as error:
        raise os_error(vmcoreinfo, error) from error
    try:
        kernel = parse_kernel(text)
    except DamagedDataError as error:
        raise TargetError(
            vmcoreinfo, str(error), "name the text that begins with OSRELEASE="
        ) from error
    proven = _proven(memory, [kernel])
    if not proven:
        raise TargetError(
            path,
            f"the kernel that {vmcoreinfo} describes is not in it",
            "leave out --vmcoreinfo, to search for one",
        )
    return proven[0]


def _chosen(path: str, proven: Sequence[ProvenKernel], number: int | None) -> int:
    """Return the index of a kernel: that with the most memory unless one is named."""
    if number is None:
        return _first(proven)
    if not 1 <= number <= len(proven):
        releases = ", ".join(map(_with_memory, proven))
        raise TargetError(
            path,
            f"there is no kernel number {number} in it ({releases})",
            f"name one from 1 to {len(proven)} with --kernel",
        )
    return number - 1


def _no_kernel(path: str, memory: Memory, found: Sequence[FoundKernel]) -> TargetError:
    if found:
        releases = ", ".join(sorted({each.release for each in found}))
        return DamagedDumpError(
            path,
            f"the kernel ({releases}) is not where its VMCOREINFO says",
            "copy the file again; memory may be missing, or the text be a stale copy",
        )
    return NotADumpError(path, *what_it_holds(memory))
