# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of a dump file, read before drgn opens it: format, machine, level, losses.

:mod:`msatools.program.foreign` recognizes files without such headers.
"""

import os
import shlex
import stat
from collections.abc import Collection
from typing import Literal

from drgn import Program
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import DamagedDataError
from msatools.program import formats
from msatools.program.formats import ReadAt, find_parts, missing, opened, reader_of
from msatools.program.kdump_pages import DescriptorCheck, check_descriptors
from msatools.program.model import (
    DamagedDumpError,
    NotADumpError,
    NotPermittedError,
    TargetError,
    UnsupportedMachineError,
)

_HYPERVISORS = {b"VBCORE": "VirtualBox", b"Xen": "Xen"}
"""Maps names of ELF notes to the hypervisor that writes them."""


_PROCESSES = b"qemu-", b"cloud-hyperviso", b"firecracker", b"kvm\0"
_NT_PRPSINFO = 3
_PSINFO_NAME, _COMM = 40, 16
"""``pr_fname`` of ``struct elf_prpsinfo`` (include/linux/elfcore.h), of 64 bits."""

_OPENED = "msatools dump file"
"""Key in ``prog.cache`` of the path and :class:`DumpFile` of a program."""

_MIB = 1 << 20


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
    """Whether the dump is a kdump of arm64 by QEMU, which has no name for that machine;
    libkdumpfile does not find its pages."""

    lacks_note: NotADumpError | None = None
    """The error for a dump whose headers do not locate the kernel, which has to be
    found in memory; ``None`` if they do, or do not show whether they do."""

    options: tuple[str, ...] = ()
    """Command-line options that selected or located the kernel in memory."""

    lacks_end: bool = False
    """Whether the dump is a flattened kdump without the mark of its end, which
    libkdumpfile does not open. It may have all pages nevertheless."""

    bad_descriptors: int = 0
    """Pages of a kdump that libkdumpfile must not read: see
    :func:`.kdump_pages.check_descriptors`."""

    parts: tuple[str, ...] = ()
    """Paths of the parts of a split dump that were found, by page frame."""

    missing_pfns: range | None = None
    """The lowest range of page frames that is in none of these parts; ``None`` if none
    is missing, or the dump is not split."""

    @property
    def damage(self) -> str | None:
        """Description of the file's damage for the user; ``None`` if none was found."""
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
        """Advice for the user if too much is missing to open the dump."""
        if self.missing_pfns is not None:
            return "put all parts into one directory"
        return "copy the dump again, or name the kernel's vmlinux with -s"


def remember_dump(prog: Program, path: str, dump: DumpFile) -> None:
    """Store path and headers of a dump in its program, if drgn does not know them."""
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
        if magic.startswith(formats.MAGIC):
            return _parse_elf(path, read, size)
        if magic == formats.FLATTENED_SIGNATURE:
            return _parse_flattened(path, read)
        if magic.startswith(formats.KDUMP_SIGNATURE):
            return _of_kdump(path, formats.parse_kdump(read), read, size)
    except EOFError as error:
        raise DamagedDumpError(
            path, f"cut off within its headers ({size:,} bytes)", "copy the dump again"
        ) from error
    except DamagedDataError as error:
        raise DamagedDumpError(path, str(error), "copy the dump again") from error
    # Imported here, as its tables take 1 ms, and dumps do not need them.
    from msatools.program.foreign import refuse_foreign

    refuse_foreign(path, read, size)
    return DumpFile(
        kind="raw",
        format="raw memory",
        truncated=False,
        dump_level=None,
        machine=None,
        release=None,
    )


def _parse_elf(path: str, read: ReadAt, size: int) -> DumpFile:
    headers = formats.parse_elf(read)
    if not headers.is_core:
        raise NotADumpError(
            path,
            "an ELF program or object, not a core",
            "name the dump, and this file with -s if it is the dump's vmlinux",
        )
    notes = list(formats.notes(read, headers))
    names = {note.name for note in notes}
    lacks_note = None
    if b"VMCOREINFO" not in names:
        lacks_note = _of_hypervisor(path, headers, notes)
        lacks_note = lacks_note or _without_vmcoreinfo(path, names)
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
    """Return the error for a core without a VMCOREINFO note.

    :param names: Names of the notes that the core has.
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


def _of_hypervisor(
    path: str, headers: formats.Elf, notes: Collection[formats.ElfNote]
) -> NotADumpError | None:
    """Return the error for a core of a hypervisor's process; ``None`` for others."""
    names = [
        note.description[_PSINFO_NAME : _PSINFO_NAME + _COMM]
        for note in notes
        if note.name == b"CORE" and note.kind == _NT_PRPSINFO
    ]
    names = [name for name in names if name.startswith(_PROCESSES)]
    if headers.has_physical or not names:
        return None
    # A guest's RAM has whole MiB, unlike QEMU's buffer of translated code (TCG).
    parts = [each for each in headers.loads if not each.size % _MIB]
    ram = max(parts, key=lambda each: each.size, default=None)
    if ram is None:
        return None
    name = names[0].partition(b"\0")[0].decode("ascii", "backslashreplace")
    take = f"tail -c +{ram.offset + 1} {shlex.quote(path)} | head -c {ram.size}"
    return NotADumpError(
        path,
        f"a core of a hypervisor's process ({name}), not of its guest",
        f"take its largest part, which is likely the guest's: `{take} > memory`",
    )


def _parse_flattened(path: str, read: ReadAt) -> DumpFile:
    flat = formats.FlatFile(read)
    header = formats.parse_kdump(flat.read)
    read, size = flat.read, flat.size
    if not flat.is_complete:
        # Only the bitmaps must be whole: the headers have holes between them, and the
        # ranges that they refer to are checked where these are read.
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


def _check_machine(path: str, headers: formats.Elf | formats.Kdump) -> None:
    """
    Check that the dump is of a 64-bit, little-endian machine.

    :raises UnsupportedMachineError: if it is not
    """
    if not headers.is_64:
        raise UnsupportedMachineError(path, "32-bit")
    if headers.byteorder != "<":
        raise UnsupportedMachineError(path, "big-endian")


def _of_kdump(
    path: str, header: formats.Kdump, read: ReadAt, size: int, how: str = ""
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
        is_nameless_arm64=formats.is_nameless_arm64(read, header),
        bad_descriptors=check.bad,
        lacks_note=lacks_note,
    )
    return found if header.part is None else _of_parts(path, header, found)


def _of_parts(path: str, header: formats.Kdump, own: DumpFile) -> DumpFile:
    parts = []
    bad, is_cut = own.bad_descriptors, own.truncated
    for part in find_parts(path, header):
        if part.path != path:
            try:
                with opened(part.path) as read:
                    size = os.stat(part.path).st_size
                    check = _check(part.path, read, formats.parse_kdump(read), size)
            except (DamagedDumpError, DamagedDataError, EOFError, OSError):
                continue  # counted as a missing part
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


def _check(
    path: str, read: ReadAt, header: formats.Kdump, size: int
) -> DescriptorCheck:
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
