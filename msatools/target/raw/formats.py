# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which files hold memory, and how each is read."""

from msatools.errors import DamagedDataError
from msatools.target import elf
from msatools.target.dumpfile import DumpFile, os_error
from msatools.target.errors import DamagedDumpError
from msatools.target.raw.memory import FileMemory, Memory, MemoryRange
from msatools.target.reading import opened


def memory_in(path: str, dump: DumpFile) -> Memory:
    """Return the memory in a file.

    :param dump: What its headers say.
    :raises TargetError: if it cannot be read, or its headers make no sense
    """
    try:
        if dump.kind == "elf":
            with opened(path) as read:
                return FileMemory(
                    "ELF without a note", path, elf_ranges(elf.parse(read))
                )
        return FileMemory("raw memory", path, is_packed=True)
    except OSError as error:
        raise os_error(path, error) from error
    except (DamagedDataError, EOFError) as error:
        raise DamagedDumpError(path, str(error), "copy the file again") from error


def elf_ranges(headers: elf.Elf) -> list[MemoryRange]:
    """Return what a core has of physical memory; later segments go before earlier."""
    ranges: list[MemoryRange] = []
    loads = sorted(headers.loads, key=lambda each: each.address)
    for each in loads:
        if ranges and each.address < ranges[-1].end:
            raise DamagedDataError("an ELF file whose segments overlap")
        ranges.append(MemoryRange(each.address, each.size, each.offset))
    return ranges
