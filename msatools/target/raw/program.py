# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn programs of memory without the note that says where the kernel is."""

from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import pairwise

from drgn import Program
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, DamagedDataError
from msatools.selfdesc.find import ask
from msatools.target.dumpfile import DumpFile, os_error, remember_dump
from msatools.target.errors import DamagedDumpError, NotADumpError, TargetError
from msatools.target.raw.candidates import FoundKernel, find_kernels, parse_kernel
from msatools.target.raw.layout import (
    KernelFacts,
    boot_time,
    kernel_facts,
    place_kernel,
    program_of,
    settle_hole,
)
from msatools.target.raw.memory import Memory, PhysicalMemory
from msatools.target.raw.noise import what_it_holds

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
