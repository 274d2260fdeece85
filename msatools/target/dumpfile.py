# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of a dump file, read before drgn opens it."""

import os
import stat
from dataclasses import dataclass
from typing import Literal

from msatools.target import elf, kdump
from msatools.target.errors import (
    DamagedDumpError,
    NotADumpError,
    NotPermittedError,
    TargetError,
    UnsupportedMachineError,
)
from msatools.target.reading import ReadAt, reader_of

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@dataclass(frozen=True)
class DumpFile:
    """Facts from the headers of a dump."""

    kind: Literal["elf", "kdump"]
    format: str
    """Name of the format, such as ``kdump zlib, flattened`` or ``ELF``."""

    truncated: bool
    dump_level: int | None
    machine: str | None
    """``utsname.machine``; ``None`` if the header lacks it."""

    release: str | None
    """``utsname.release``; ``None`` if the header lacks it."""


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
        if magic == kdump.FLATTENED_SIGNATURE:
            return _parse_flattened(path, read, size)
        if magic.startswith(kdump.SIGNATURE):
            return _parse_kdump(path, read, size)
    except EOFError as error:
        raise DamagedDumpError(
            path, f"cut off within its headers ({size:,} bytes)", "copy the dump again"
        ) from error
    except ValueError as error:
        raise DamagedDumpError(path, str(error), "copy the dump again") from error
    for start, name in _COMPRESSED.items():
        if magic.startswith(start):
            raise NotADumpError(path, f"compressed with {name}", "decompress it first")
    raise NotADumpError(
        path, "not a dump: neither an ELF core nor a kdump", "name a vmcore"
    )


def _parse_elf(path: str, read: ReadAt, size: int) -> DumpFile:
    headers = elf.parse(read)
    if not headers.is_core:
        raise NotADumpError(
            path,
            "an ELF program or object, not a core",
            "name the dump, and this file with -s if it is the dump's vmlinux",
        )
    names = {note.name for note in elf.notes(read, headers)}
    if b"VMCOREINFO" not in names:
        if b"QEMU" in names:
            raise _guest_without_vmcoreinfo(path)
        raise NotADumpError(
            path, "a core of a program, not of a kernel", "name a vmcore"
        )
    _check_machine(path, headers)
    return DumpFile(
        kind="elf",
        format="ELF",
        truncated=size < headers.end,
        dump_level=None,
        machine=None,
        release=None,
    )


def _parse_flattened(path: str, read: ReadAt, size: int) -> DumpFile:
    header = kdump.parse(kdump.unflatten(read))
    complete = kdump.is_flat_complete(read(max(0, size - 16), 16))
    return _of_kdump(path, header, ", flattened", truncated=not complete)


def _parse_kdump(path: str, read: ReadAt, size: int) -> DumpFile:
    header = kdump.parse(read)
    try:
        truncated = size < kdump.end(read, header)
    except EOFError as error:
        # libkdumpfile would map beyond the end of the file, and get SIGBUS.
        raise DamagedDumpError(
            path, "cut off before its pages can be found", "copy the dump again"
        ) from error
    return _of_kdump(path, header, "", truncated=truncated)


def _check_machine(path: str, headers: elf.Elf | kdump.Kdump) -> None:
    """
    Check that the dump is of a 64-bit, little-endian machine.

    :raises UnsupportedMachineError: if it is not
    """
    if not headers.is_64:
        raise UnsupportedMachineError(path, "32-bit")
    if headers.byteorder != "<":
        raise UnsupportedMachineError(path, "big-endian")


def _of_kdump(path: str, header: kdump.Kdump, how: str, *, truncated: bool) -> DumpFile:
    _check_machine(path, header)
    if header.has_vmcoreinfo is False:
        raise _guest_without_vmcoreinfo(path)
    split = ", one part of several" if header.split else ""
    return DumpFile(
        kind="kdump",
        format=f"kdump {header.compression}{how}{split}",
        truncated=truncated or header.incomplete,
        dump_level=header.dump_level,
        machine=header.machine or None,
        release=header.release or None,
    )


def _guest_without_vmcoreinfo(path: str) -> NotADumpError:
    return NotADumpError(
        path,
        "QEMU did not know where the guest's kernel is (no VMCOREINFO)",
        "dump a guest that runs with -device vmcoreinfo and has qemu_fw_cfg loaded",
    )
