# SPDX-License-Identifier: LGPL-2.1-or-later

"""drgn programs of memory without the note that says where the kernel is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from drgn import Platform, Program

from msatools.errors import DamagedDataError
from msatools.records import dataclass
from msatools.selfdesc.find import ask
from msatools.target.dumpfile import DumpFile, os_error, remember_dump
from msatools.target.errors import DamagedDumpError, NotADumpError, TargetError
from msatools.target.raw.candidates import FoundKernel, find_kernels, parse_kernel
from msatools.target.raw.layout import (
    KernelFacts,
    kernel_facts,
    place_kernel,
    settle_hole,
)
from msatools.target.raw.memory import Memory, PhysicalMemory
from msatools.target.raw.noise import what_it_holds

_ALL_MEMORY = (1 << 64) - 1

_MOST_TEXT = 1 << 16
"""Maximum size of VMCOREINFO in a file of its own, in bytes."""


@dataclass(frozen=True)
class ProvenKernel:
    """A kernel that is in memory, and how memory lies for it."""

    kernel: FoundKernel
    physical: PhysicalMemory
    facts: KernelFacts | None
    is_whole: bool
    """Whether the file has all memory that the kernel has."""


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
        proven = [each for each in map(_prove(memory), found) if each is not None]
        if not proven:
            raise _no_kernel(path, memory, found)
    chosen = _chosen(path, proven, number)
    kernel = proven[chosen].kernel
    dump = replace(
        dump,
        format=describe_memory(proven, chosen),
        truncated=memory.is_truncated or not proven[chosen].is_whole,
        release=kernel.release,
    )
    prog = Program(Platform(kernel.arch), vmcoreinfo=kernel.text)
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
    return prog, dump


def describe_memory(proven: Sequence[ProvenKernel], chosen: int) -> str:
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
    if len(proven) > 1:
        others = ", ".join(
            f"{index + 1}: {each.kernel.release}" for index, each in enumerate(proven)
        )
        words.append(f"kernel {chosen + 1} of {len(proven)} ({others}; see --kernel)")
    return ", ".join(words)


def _prove(memory: Memory) -> Callable[[FoundKernel], ProvenKernel | None]:
    def prove(kernel: FoundKernel) -> ProvenKernel | None:
        physical = PhysicalMemory(memory)
        if not place_kernel(physical, kernel):
            return None
        facts = kernel_facts(physical, kernel)
        if facts is None:
            return ProvenKernel(kernel, physical, None, True)
        if facts.banner is not None and not facts.banner.startswith(
            f"Linux version {kernel.release} "
        ):
            return None
        return ProvenKernel(
            kernel, physical, facts, settle_hole(physical, kernel, facts)
        )

    return prove


def _named(path: str, memory: Memory, vmcoreinfo: str) -> ProvenKernel:
    """Return the kernel that a file describes."""
    try:
        with open(vmcoreinfo, "rb") as file:
            text = file.read(_MOST_TEXT)
    except OSError as error:
        raise os_error(vmcoreinfo, error) from error
    try:
        kernel = parse_kernel(text, 0)
    except DamagedDataError as error:
        raise TargetError(
            vmcoreinfo, str(error), "name the text that begins with OSRELEASE="
        ) from error
    proven = _prove(memory)(kernel)
    if proven is None:
        raise TargetError(
            path,
            f"the kernel that {vmcoreinfo} describes is not in it",
            "leave out --vmcoreinfo, to search for one",
        )
    return proven


def _chosen(path: str, proven: Sequence[ProvenKernel], number: int | None) -> int:
    """Return the index of a kernel: that with the most memory unless one is named."""
    if number is None:
        # A crash kernel has a reserved part of another's memory.
        ends = [each.facts.pages_end or 0 if each.facts else 0 for each in proven]
        return ends.index(max(ends))
    if not 1 <= number <= len(proven):
        releases = ", ".join(each.kernel.release for each in proven)
        raise TargetError(
            path,
            f"it has {len(proven)} kernels ({releases}), and no number {number}",
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
