# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn programs for memory without a VMCOREINFO note, in which the kernel is found."""

import struct
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import pairwise

from drgn import Architecture, Platform, Program
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, DamagedDataError
from msatools.program.dumpfile import DumpFile, os_error, remember_dump
from msatools.program.model import DamagedDumpError, NotADumpError, TargetError
from msatools.program.raw_layout import (
    LEAST_HOLE,
    KernelFacts,
    place_kernel,
    settle_hole,
)
from msatools.program.raw_memory import (
    FoundKernel,
    Memory,
    PhysicalMemory,
    find_kernels,
    parse_kernel,
    what_it_holds,
)
from msatools.selfdesc.find import ask
from msatools.selfdesc.kallsyms import load_symbols
from msatools.standby import standby_of

# --- Facts from the variables of a kernel that was found in memory.


_ALL_MEMORY = (1 << 64) - 1

_IMAGE_BYTES = 1 << 30
"""Maximum bytes of x86-64's image: KERNEL_IMAGE_SIZE, with KASLR."""

_SECOND_NS = 10**9
_MOST_TIME_S = 1 << 33
"""Maximum plausible time of a boot, in seconds since 1970: the year 2242."""

_PAGE_SHIFT = 12
_POINTER_BYTES = 8
_BANNER_BYTES = 512
_DIRECT_MAP = 0xFFFF888000000000
"""Start of x86-64's direct map without CONFIG_RANDOMIZE_MEMORY, with tables of four
levels."""

_MEMBLOCK = struct.Struct("<16xQ8xQQ")
"""``struct memblock``: number of ranges of memory, their total size, and address of
their array (include/linux/memblock.h)."""

_MEMBLOCK_RANGE = struct.Struct("<QQ8x")
_MOST_MEMBLOCK_RANGES = 1 << 12

_MOST_NODES = 1024


def program_of(kernel: FoundKernel) -> Program:
    """Return a program for a kernel, without memory.

    :raises DamagedDataError: if drgn does not take its VMCOREINFO
    """
    return ask(Program, Platform(kernel.arch), vmcoreinfo=kernel.text)


def _program_on(physical: PhysicalMemory, kernel: FoundKernel) -> Program:
    """Return a program that reads *physical*, whose placing is not yet certain.

    :raises DamagedDataError: if drgn does not take the kernel's VMCOREINFO
    """
    prog = program_of(kernel)
    prog.add_memory_segment(0, _ALL_MEMORY, physical, True)
    ask(prog.set_linux_kernel_custom, kernel.text, False)
    # At drgn's prompt, the plugin would load types from this program and print that.
    standby = standby_of(prog)
    if standby is not None:
        standby.stand_down()
    return prog


def boot_time(physical: PhysicalMemory, kernel: FoundKernel) -> int | None:
    """Return when a kernel booted, in seconds of its wall clock since 1970.

    This is the wall clock minus the time since boot (struct timekeeper). A machine
    without a real-time clock begins in 1970.

    :return: ``None`` if the clocks or the kernel's types cannot be read.
    """
    # Imported here: slow, and few files have several kernels.
    from drgn.helpers.linux.timekeeping import (
        ktime_get_coarse_boottime_ns,
        ktime_get_coarse_real_ns,
    )

    from msatools.selfdesc import BtfError, NotSelfDescribedError, load_btf

    try:
        prog = _program_on(physical, kernel)
        load_btf(prog, modules=False)
        now_ns = ask(ktime_get_coarse_real_ns, prog).value_()
        up_ns = ask(ktime_get_coarse_boottime_ns, prog).value_()
    except (*LOST, BtfError, NotSelfDescribedError):
        return None
    time_s: int = (now_ns - up_ns) // _SECOND_NS
    return time_s if 0 <= time_s < _MOST_TIME_S else None


def kernel_facts(physical: PhysicalMemory, kernel: FoundKernel) -> KernelFacts | None:
    """Read a kernel's variables that describe its memory, from its image alone.

    Page tables, which may lie behind the hole, are not needed.

    :return: ``None`` if the kernel's symbols cannot be read.
    :raises DamagedDataError: if drgn does not take its VMCOREINFO
    """
    prog = _program_on(physical, kernel)
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

    def ranges() -> tuple[tuple[int, int], ...]:
        # x86 without CONFIG_MEMORY_HOTPLUG frees memblock. Other data in its place do
        # not have a total that matches.
        found = symbols(prog, "memblock", None, True)
        try:
            data = prog.read(found[0].address, _MEMBLOCK.size) if found else b""
            count, total, start = _MEMBLOCK.unpack(data)
            data = prog.read(start, min(count, _MOST_MEMBLOCK_RANGES) * 24)
        except (*LOST, struct.error, ValueError):
            return ()
        each = [(base, base + size) for base, size in _MEMBLOCK_RANGE.iter_unpack(data)]
        # The total includes partial pages that were trimmed (memblock_trim_memory()).
        less = total - sum(end - base for base, end in each)
        is_sound = 0 <= less < max(len(each), 1) << _PAGE_SHIFT
        return tuple(each) if is_sound and each == sorted(each) else ()

    pages, pointer = word("max_pfn"), word("vmcoreinfo_data")
    base, offset = _direct_map(kernel, word("page_offset_base"))

    def physical_of(address: int) -> int | None:
        # An address in the direct map, which has at most 2^52 bytes.
        if not base <= address < base + (1 << 52):
            return None
        return (address - base + offset) % (1 << 64)

    return KernelFacts(
        pages_end=pages << _PAGE_SHIFT if pages else None,
        text_at=physical_of(pointer) if pointer else None,
        nodes=tuple(
            (number, found)
            for number, address in _node_addresses(prog, kernel)
            if (found := physical_of(address)) is not None
        ),
        banner=text("linux_banner"),
        ram=ranges(),
    )


def _direct_map(kernel: FoundKernel, base: int | None) -> tuple[int, int]:
    """Return the first virtual address of the direct map, and its physical address.

    :param base: x86-64's ``page_offset_base``, if the kernel has it.
    """
    lines = kernel.lines
    if kernel.arch == Architecture.AARCH64:
        # PAGE_OFFSET follows from VA_BITS as built, even if fewer bits are in use, and
        # memstart_addr is relative to it (arch/arm64/include/asm/memory.h).
        try:
            bits = int(lines["NUMBER(VA_BITS)"])
            return (1 << 64) - (1 << bits), int(lines["NUMBER(PHYS_OFFSET)"], 16)
        except (KeyError, ValueError):
            return 1 << 64, 0
    return base or _DIRECT_MAP, 0


def _node_addresses(prog: Program, kernel: FoundKernel) -> Iterator[tuple[int, int]]:
    """Yield number and address of each ``struct pglist_data`` (with CONFIG_NUMA)."""
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


# --- drgn programs for memory without a VMCOREINFO note.


_MOST_SEARCHED = 4
"""Maximum number of kernels for which all memory is searched once more."""

_MOST_TEXT = 1 << 16
"""Maximum size of VMCOREINFO in a file of its own, in bytes."""


class ProvenKernel(Struct, frozen=True):
    """A kernel that was proven to be in memory, with the placing of its memory."""

    kernel: FoundKernel
    physical: PhysicalMemory
    facts: KernelFacts | None
    is_whole: bool | None
    """Whether the file has all memory of the kernel; ``None`` if the placing behind the
    hole is unknown."""


def open_memory(
    path: str,
    dump: DumpFile,
    memory: Memory,
    number: int | None = None,
    vmcoreinfo: str | None = None,
) -> tuple[Program, DumpFile]:
    """Find the kernel in a file's memory; return a program, and *dump* completed.

    :param number: Number of the requested kernel, from 1; ``None`` for the one with the
        most memory.
    :param vmcoreinfo: Path of a file with VMCOREINFO; ``None`` to search memory for it.
    :raises TargetError: if no kernel is found, or not the requested one
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
            "its kernel does not say which memory lies where: the end of the file, or "
            "the kernel's symbols, are lost",
            "copy the file again, or take a dump with headers (LiME: format=lime)",
        )
    dump = replace(
        dump,
        # A kdump is read as raw memory.
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
            # drgn itself reads the core's memory and registers.
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
    """Return one line for the user on the memory and the kernel that were opened."""
    kernel, physical = proven[chosen].kernel, proven[chosen].physical
    memory = physical.memory
    words = [memory.name, f"{memory.size / (1 << 30):.1f} GiB"]
    pieces = physical.pieces
    words += [
        f"hole at {before.end / (1 << 30):g} GiB"
        for before, after in pairwise(pieces)
        if memory.is_packed and after.start - before.end >= LEAST_HOLE
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
    """Return a kernel's release, memory and boot time, which distinguish it."""
    end = proven.facts.pages_end if proven.facts else None
    most = f" up to {end / (1 << 30):.1f} GiB" if end else ""
    boot_s = boot_time(proven.physical, proven.kernel)
    booted = "" if boot_s is None else f" booted {_utc(boot_s)}"
    return f"{proven.kernel.release}{most}{booted}"


def _utc(time_s: int) -> str:
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _first(proven: Sequence[ProvenKernel]) -> int:
    """Return the index of the kernel with the most memory.

    A crash kernel has less: a part that another kernel reserved.
    """
    ends = [each.facts.pages_end or 0 if each.facts else 0 for each in proven]
    return ends.index(max(ends))


def _proven(memory: Memory, found: Sequence[FoundKernel]) -> list[ProvenKernel]:
    """Return the kernels of *found* that are proven to be in memory."""
    for search, kernels in ((False, found), (True, found[:_MOST_SEARCHED])):
        proven = [
            each
            for kernel in kernels
            if (each := _prove(memory, kernel, search=search)) is not None
        ]
        if proven:
            return _without_damaged(proven)
    return []


def _without_damaged(proven: Sequence[ProvenKernel]) -> list[ProvenKernel]:
    """Return each kernel once, with the copy of VMCOREINFO that has the most facts.

    A page with a copy may have been freed, and partly overwritten.
    """
    best: dict[int, ProvenKernel] = {}
    for each in proven:
        known = best.setdefault(each.kernel.uts_name, each)
        if _knowledge(each) > _knowledge(known):
            best[each.kernel.uts_name] = each
    return list(best.values())


def _knowledge(proven: ProvenKernel) -> tuple[bool, int]:
    return proven.facts is not None, len(proven.kernel.copies)


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
    """Return the kernel that a file with VMCOREINFO describes."""
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
    """Return the index of kernel *number*; of the one with most memory if ``None``."""
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
