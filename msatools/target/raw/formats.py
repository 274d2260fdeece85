# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which files hold memory, and how each is read."""

import shlex

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.target import elf
from msatools.target.dumpfile import DumpFile, os_error
from msatools.target.errors import DamagedDumpError, NotADumpError
from msatools.target.raw import forensic, qcow2, qemustate
from msatools.target.raw.memory import FileMemory, Memory, MemoryRange
from msatools.target.reading import ReadAt, opened

_LIME = forensic.MAGIC.to_bytes(4, "little")
_LIBVIRT = b"LibvirtQemudSave"


def memory_in(path: str, dump: DumpFile) -> Memory:
    """Return the memory in a file.

    :param dump: What its headers say.
    :raises TargetError: if it cannot be read, or its headers make no sense
    """
    try:
        with opened(path) as read:
            if dump.kind == "elf":
                ranges = elf_ranges(elf.parse(read))
                return FileMemory("ELF without a note", path, ranges)
            return _by_magic(path, read)
    except OSError as error:
        raise os_error(path, error) from error
    except NotSupportedError as error:
        raise NotADumpError(
            path,
            f"a stream of QEMU with {error}, which is not read",
            "have it dumped with `virsh dump --memory-only`, or dump-guest-memory",
        ) from error
    except EOFError as error:
        raise DamagedDumpError(
            path, "cut off within its headers", "copy the file again"
        ) from error
    except DamagedDataError as error:
        raise DamagedDumpError(path, str(error), "copy the file again") from error


def _by_magic(path: str, read: ReadAt) -> Memory:
    magic = read(0, 16)
    if magic.startswith(_LIME):
        try:
            return forensic.open_forensic(path)
        except ImportError as error:
            raise NotADumpError(
                path,
                "compressed with snappy (AVML), and no library for it is installed",
                "install msatools[fast]; or decompress it with `avml-convert`",
            ) from error
    if magic.startswith((qemustate.MAGIC, qcow2.MAGIC)):
        return qemustate.QemuState(path)
    if magic == _LIBVIRT:
        start, compression = qemustate.libvirt_stream(read)
        if compression is not None:
            name, command = compression
            raise NotADumpError(
                path,
                f"a guest that `virsh save` compressed with {name}",
                f"decompress it first: `tail -c +{start + 1} {shlex.quote(path)} | "
                f"{command} > memory`",
            )
        return qemustate.QemuState(path, start, "virsh save")
    return FileMemory("raw memory", path, is_packed=True)


def elf_ranges(headers: elf.Elf) -> list[MemoryRange]:
    """Return what a core has of physical memory.

    :raises DamagedDataError: if two segments overlap
    """
    return forensic.in_order(
        [MemoryRange(each.address, each.size, each.offset) for each in headers.loads]
    )
