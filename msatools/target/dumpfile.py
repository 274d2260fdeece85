# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of a dump file, read before drgn opens it."""

import os
import shlex
import stat
from collections.abc import Collection
from typing import Literal

from drgn import Program
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.target import elf, flattened, foreign, kdump
from msatools.target.descriptors import DescriptorCheck, check_descriptors
from msatools.target.errors import (
    DamagedDumpError,
    NotADumpError,
    NotPermittedError,
    TargetError,
    UnsupportedMachineError,
)
from msatools.target.reading import ReadAt, opened, reader_of
from msatools.target.splitparts import find_parts, missing

_HYPERVISORS = {b"VBCORE": "VirtualBox", b"Xen": "Xen"}
"""Maps names of ELF notes to who writes them."""


_OPENED = "msatools dump file"
"""Key of a program's cache."""

_LEAST_MEMORY = 1 << 20
"""Minimum size of a file without a header that is searched for a kernel, in bytes."""


class DumpFile(Struct, frozen=True):
    """Facts from the headers of a dump."""

    kind: Literal["elf", "kdump", "raw"]
    format: str
    """Name of the format, such as ``kdump zlib, flattened`` or ``ELF``."""

    truncated: bool
    dump_level: int | None
    machine: str | None
    """``utsname.machine``; ``None`` if the header lacks it."""

    release: str | None
    """``utsname.release``; ``None`` if the header lacks it."""

    is_nameless_arm64: bool = False
    """Whether it is a kdump of arm64 by QEMU, which has no name for that machine;
    libkdumpfile does not find its pages."""

    lacks_note: NotADumpError | None = None
    """The refusal if its memory has no kernel either; ``None`` if its headers say where
    the kernel is."""

    options: tuple[str, ...] = ()
    """Options by which its kernel was named."""

    lacks_end: bool = False
    """Whether it is a flattened kdump without the mark of its end, which libkdumpfile
    does not open. It can have all pages nevertheless."""

    bad_descriptors: int = 0
    """Pages of a kdump that libkdumpfile must not read: see
    :func:`.descriptors.check_descriptors`."""

    parts: tuple[str, ...] = ()
    """Paths of the parts of a split dump that are there, by page frame."""

    missing_pfns: range | None = None
    """The first page frames that are in none of these parts."""

    @property
    def damage(self) -> str | None:
        """What is wrong with the file; ``None`` if nothing was found."""
        if self.missing_pfns is not None:
            first, last = self.missing_pfns.start, self.missing_pfns.stop
            frames = f"page frames {first:#x} to {last:#x}"
            part = f"the part of the split dump with {frames}"
            return f"{part} is not beside it, or cannot be read"
        if self.truncated:
            return "the file is cut off"
        if self.bad_descriptors:
            return f"{self.bad_descriptors:,} pages of the file are damaged"
        return None

    @property
    def remedy(self) -> str:
        """What to do if so much is missing that it cannot be opened."""
        if self.missing_pfns is not None:
            return "put all parts into one directory"
        return "copy the dump again, or name the kernel's vmlinux with -s"


def remember_dump(prog: Program, path: str, dump: DumpFile) -> None:
    """Keep the dump of a program that drgn does not have a path of."""
    prog.cache[_OPENED] = path, dump


def remembered_dump(prog: Program) -> tuple[str, DumpFile] | None:
    """Return the path and the headers that :func:`remember_dump` has kept."""
    found: tuple[str, DumpFile] | None = prog.cache.get(_OPENED)
    return found


def read_dump_file(path: str) -> DumpFile:
    """Read the headers of the dump at *path*.

    :raises NotADumpError: if it is a file of another kind
    :raises DamagedDumpError: if its headers are cut off or contradict themselves
    :raises NotPermittedError: if this user may not read it
    :raises TargetError: if there is no such file, or it cannot be read
    """
    try:
        # Opening a FIFO without a writer would block.
        check_is_file(path, os.stat(path))
        with open(path, "rb", buffering=0) as file:
            size = os.lseek(file.fileno(), 0, os.SEEK_END)
            return _parse(path, reader_of(file.fileno()), size)
    except OSError as error:
        raise os_error(path, error) from error


def check_is_file(path: str, status: os.stat_result) -> None:
    """Check that a file can hold a dump.

    :raises NotADumpError: if it is neither a regular file nor a block device
    """
    mode = status.st_mode
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        return
    if stat.S_ISDIR(mode):
        raise NotADumpError(path, "a directory", "name the dump file in it")
    if stat.S_ISSOCK(mode):
        raise NotADumpError(path, "a socket", "name a guest's QMP socket with --qemu")
    raise NotADumpError(path, "not a regular file", "name a file that holds a dump")


def os_error(path: str, error: OSError) -> TargetError:
    """Return the error for a file at *path* that could not be read."""
    if isinstance(error, FileNotFoundError):
        return TargetError(path, "no such file", "check the path")
    if isinstance(error, PermissionError):
        return NotPermittedError(
            path, "permission denied", "run as a user who may read it, such as root"
        )
    why = error.strerror or str(error)
    return TargetError(path, why, "check the path and the disk")


def _parse(path: str, read: ReadAt, size: int) -> DumpFile:
    magic = read(0, 16)
    if not magic:
        raise NotADumpError(
            path, "the file is empty", "check how the dump was saved, and the disk"
        )
    try:
        if magic.startswith(elf.MAGIC):
            return _parse_elf(path, read, size)
        if magic == flattened.SIGNATURE:
            return _parse_flattened(path, read)
        if magic.startswith(kdump.SIGNATURE):
            return _of_kdump(path, kdump.parse(read), read, size)
    except EOFError as error:
        raise DamagedDumpError(
            path, f"cut off within its headers ({size:,} bytes)", "copy the dump again"
        ) from error
    except DamagedDataError as error:
        raise DamagedDumpError(path, str(error), "copy the dump again") from error
    found = foreign.recognize(read(0, foreign.HEAD_BYTES))
    if found is not None and not _has_snapshot(path, magic, read):
        raise NotADumpError(
            path, found.what, found.what_to_do.replace("{path}", shlex.quote(path))
        )
    if size < _LEAST_MEMORY and not magic.startswith(foreign.MEMORY_MAGICS):
        raise NotADumpError(
            path, "not a dump: neither an ELF core nor a kdump", "name a vmcore"
        )
    return DumpFile(
        kind="raw",
        format="raw memory",
        truncated=False,
        dump_level=None,
        machine=None,
        release=None,
    )


def _has_snapshot(path: str, magic: bytes, read: ReadAt) -> bool:
    """Return whether it is a qcow2 image with a snapshot of a guest's memory.

    :raises NotADumpError: if it may be one, but is of a kind that is not read
    """
    if not magic.startswith(foreign.QCOW2):
        return False
    # Few files are such images.
    from msatools.target.raw.qcow2 import snapshots_with_state

    try:
        return bool(snapshots_with_state(read))
    except (DamagedDataError, EOFError):
        return False
    except NotSupportedError as error:
        raise NotADumpError(path, str(error), foreign.QCOW2_REMEDY) from error


def _parse_elf(path: str, read: ReadAt, size: int) -> DumpFile:
    headers = elf.parse(read)
    if not headers.is_core:
        raise NotADumpError(
            path,
            "an ELF program or object, not a core",
            "name the dump, and this file with -s if it is the dump's vmlinux",
        )
    names = {note.name for note in elf.notes(read, headers)}
    lacks_note = None
    if b"VMCOREINFO" not in names:
        lacks_note = _without_vmcoreinfo(path, names)
        if not headers.has_physical or not headers.is_64:
            raise lacks_note
    _check_machine(path, headers)
    return DumpFile(
        kind="elf",
        format="ELF",
        truncated=size < headers.end,
        dump_level=None,
        machine=None,
        release=None,
        lacks_note=lacks_note,
    )


def _without_vmcoreinfo(path: str, names: Collection[bytes]) -> NotADumpError:
    """Return the refusal of a core without the note.

    :param names: Names of the notes that it has.
    """
    if b"QEMU" in names:
        return _guest_without_vmcoreinfo(path)
    for note, hypervisor in _HYPERVISORS.items():
        if note in names:
            return NotADumpError(
                path,
                f"{hypervisor} did not store where the guest's kernel is (no "
                "VMCOREINFO)",
                "only crash reads it, with the guest's vmlinux",
            )
    return NotADumpError(path, "a core of a program, not of a kernel", "name a vmcore")


def _parse_flattened(path: str, read: ReadAt) -> DumpFile:
    flat = flattened.FlatFile(read)
    header = kdump.parse(flat.read)
    read, size = flat.read, flat.size
    if not flat.is_complete:
        # Between the headers are holes: what they need is checked where it is read.
        if not flat.is_whole(header.bitmap_offset, header.table_offset):
            raise _cut_off(path)
        read = flat.read_filled
    elif not flat.is_whole(header.table_offset, size):
        raise DamagedDataError("a flattened kdump with a piece missing")
    found = _of_kdump(path, header, read, size, ", flattened")
    if flat.is_complete:
        return found
    is_less = flat.is_cut or found.truncated or found.bad_descriptors > 0
    return replace(found, truncated=is_less, lacks_end=True)


def _check_machine(path: str, headers: elf.Elf | kdump.Kdump) -> None:
    """
    Check that the dump is of a 64-bit, little-endian machine.

    :raises UnsupportedMachineError: if it is not
    """
    if not headers.is_64:
        raise UnsupportedMachineError(path, "32-bit")
    if headers.byteorder != "<":
        raise UnsupportedMachineError(path, "big-endian")


def _of_kdump(
    path: str, header: kdump.Kdump, read: ReadAt, size: int, how: str = ""
) -> DumpFile:
    _check_machine(path, header)
    lacks_note = None
    if header.has_vmcoreinfo is False:
        lacks_note = _guest_without_vmcoreinfo(path)
        if header.part is not None:
            raise lacks_note
    if any(notes.stop > size for notes in header.notes):
        raise DamagedDataError("its notes lie beyond the end of the file")
    check = _check(path, read, header, size)
    found = DumpFile(
        kind="kdump",
        format=f"kdump {header.compression}{how}",
        truncated=check.is_cut or header.incomplete,
        dump_level=header.dump_level,
        machine=header.machine or None,
        release=header.release or None,
        is_nameless_arm64=kdump.is_nameless_arm64(read, header),
        bad_descriptors=check.bad,
        lacks_note=lacks_note,
    )
    return found if header.part is None else _of_parts(path, header, found)


def _of_parts(path: str, header: kdump.Kdump, own: DumpFile) -> DumpFile:
    parts = []
    bad, is_cut = own.bad_descriptors, own.truncated
    for part in find_parts(path, header):
        if part.path != path:
            try:
                with opened(part.path) as read:
                    size = os.stat(part.path).st_size
                    check = _check(part.path, read, kdump.parse(read), size)
            except (DamagedDumpError, DamagedDataError, EOFError, OSError):
                continue  # it is one of those that are missing
            bad, is_cut = bad + check.bad, is_cut or check.is_cut
        parts.append(part)
    lacking = missing(parts, header)
    how = "split" if lacking is None else f"{len(parts)} of several parts"
    return replace(
        own,
        format=f"{own.format}, {how}",
        truncated=is_cut,
        bad_descriptors=bad,
        parts=tuple(part.path for part in parts),
        missing_pfns=lacking,
    )


def _check(path: str, read: ReadAt, header: kdump.Kdump, size: int) -> DescriptorCheck:
    try:
        return check_descriptors(read, header, size)
    except EOFError as error:
        # libkdumpfile would map beyond the end of the file, and get SIGBUS.
        raise _cut_off(path) from error


def _cut_off(path: str) -> DamagedDumpError:
    return DamagedDumpError(
        path, "cut off before its pages can be found", "copy the dump again"
    )


def _guest_without_vmcoreinfo(path: str) -> NotADumpError:
    return NotADumpError(
        path,
        "QEMU did not know where the guest's kernel is (no VMCOREINFO)",
        "dump a guest that runs with -device vmcoreinfo and has qemu_fw_cfg loaded",
    )
