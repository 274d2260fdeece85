# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which files hold memory, and how each is read."""

import shlex
from collections.abc import Sequence
from itertools import islice

import numpy as np
from drgn import FaultError

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.target import elf
from msatools.target.dumpfile import DumpFile, os_error
from msatools.target.errors import DamagedDumpError, NotADumpError
from msatools.target.kdumppages import KdumpPages, LeftToDrgnError
from msatools.target.raw import forensic, qcow2, qemustate
from msatools.target.raw.memory import FileMemory, Memory, MemoryRange, Ranges
from msatools.target.reading import ReadAt, opened

_LIME = forensic.MAGIC.to_bytes(4, "little")
_LIBVIRT = b"LibvirtQemudSave"

_MOST_RANGES = 1 << 20
_PAGES_KEPT = 1024


def memory_in(path: str, dump: DumpFile) -> Memory:
    """Return the memory in a file.

    :param dump: What its headers say.
    :raises TargetError: if it cannot be read, or its headers make no sense
    """
    try:
        with opened(path) as read:
            if dump.kind == "kdump":
                return KdumpMemory(path)
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
    except LeftToDrgnError as error:
        raise NotADumpError(
            path,
            f"a kdump that does not say where its kernel is, and {error}",
            "install msatools[fast], or dump the guest as ELF",
        ) from error


class KdumpMemory(Memory):
    """The memory in a kdump whose headers do not say where the kernel is."""

    name = "kdump without a note"

    def __init__(self, path: str) -> None:
        """Open a kdump; raises as :class:`.KdumpPages`."""
        self._pages = KdumpPages(path)
        size = self._pages.page_size
        ranges = [
            MemoryRange(kept.start * size, len(kept) * size, kept.start * size)
            for kept in islice(self._pages.kept_ranges(), _MOST_RANGES)
        ]
        self._ranges = Ranges(ranges)
        self._kept: dict[int, bytes] = {}

    @property
    def ranges(self) -> Sequence[MemoryRange]:
        return self._ranges.all

    def read(self, address: int, size: int) -> bytes:
        page_size = self._pages.page_size
        first, end = address // page_size, -(-(address + size) // page_size)
        wanted = range(first, end)
        if not all(pfn in self._kept for pfn in wanted):
            if len(self._kept) + len(wanted) > _PAGES_KEPT:
                self._kept.clear()
            found = self._pages.read(np.arange(first, end, dtype=np.int64))
            for pfn, page in zip(wanted, found, strict=True):
                if not page:
                    raise FaultError("not in the file", max(address, pfn * page_size))
                self._kept[pfn] = page
        data = b"".join([self._kept[pfn] for pfn in wanted])
        within = address - first * page_size
        return data[within : within + size]


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
