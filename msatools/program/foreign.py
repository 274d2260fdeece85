# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recognition of files that are often taken for a dump, with advice for each kind.

The signatures are those of the programs that write the files: QEMU's migration code,
libvirt's qemu_saveimage.h, LiME's documentation, AVML's image.rs, vmss2core,
makedumpfile's sadump_mod.h and diskdump_mod.h, LKCD's dump.h, the kernel's
Documentation/arch/x86/boot.rst, and file(1).
"""

import os
import re
import shlex
import zlib
from typing import NamedTuple

from msatools.errors import DamagedDataError, NotSupportedError
from msatools.program.formats import ReadAt, opened
from msatools.program.model import NotADumpError

_HYPER_V = ".vmrs", ".vsv"

_LEAST_MEMORY = 1 << 20
"""Minimum size of a file without a header that is searched for a kernel, in bytes."""

HEAD_BYTES = 0x10080
"""Bytes of a file's start that :func:`recognize` needs."""


VMWARE_MAGICS = tuple(
    magic.to_bytes(4, "little")
    for magic in (0xBED2BED2, 0xBED3BED3, 0xBAD1BAD1, 0xBAD2BAD2)
)
"""First bytes of a VMware guest's state (``.vmss``, ``.vmsn``): whole, partial, and
restored."""

MEMORY_MAGICS = (b"EMiL\1", b"AVML\2", b"QEVM", b"LibvirtQemudSave", *VMWARE_MAGICS)
"""First bytes of files with memory and headers that
:mod:`msatools.program.raw_formats` reads."""


class Foreign(NamedTuple):
    """A kind of file that is no dump: its name, and advice, for the user."""

    what: str
    what_to_do: str
    """``{path}`` in it stands for the file's path."""


_VIRSH = "have it dumped with `virsh dump --memory-only`, or QEMU's dump-guest-memory"
QCOW2 = b"QFI\xfb"
QCOW2_REMEDY = (
    "name one that `savevm` wrote to; or have the guest dumped with `virsh dump "
    "--memory-only`"
)
VMWARE_REMEDY = "name the .vmem beside it; without one, convert it with `vmss2core -N6`"
_DISK = "name a dump, or a file with the guest's memory"

_COMPRESSED = "compressed"
_UNPACK_TAR = "unpack it with `tar xf {path}`, and name the dump in it"
_TAR_NAME = re.compile(r"\.(tar\.\w+|tgz|txz|tbz2?|tzst)$", re.IGNORECASE)
"""Suffixes of compressed tar archives, which are recognized without decompression."""

_AT_START: tuple[tuple[bytes, Foreign], ...] = (
    *(
        (
            signature,
            Foreign(
                f"{_COMPRESSED} with {name}",
                f"decompress it first: `{name} -dc {{path}} > memory`",
            ),
        )
        for signature, name in (
            (b"\x1f\x8b", "gzip"),
            (b"BZh", "bzip2"),
            (b"\xfd7zXZ\0", "xz"),
            (b"\x28\xb5\x2f\xfd", "zstd"),
            (b"\x04\x22\x4d\x18", "lz4"),
            # The legacy format, which lz4 reads, too.
            (b"\x02\x21\x4c\x18", "lz4"),
            (b"\x89LZO\0", "lzop"),
            (b"LZIP", "lzip"),
        )
    ),
    *(
        (signature, Foreign(f"{name} archive", "unpack it, and name the dump in it"))
        for signature, name in (
            (b"PK\x03\x04", "a zip"),
            (b"7z\xbc\xaf\x27\x1c", "a 7-Zip"),
            (b"070701", "a cpio"),
            (b"!<arch>\n", "an ar or Debian"),
            (b"\xed\xab\xee\xdb", "an rpm"),
        )
    ),
    (
        b"VMA\0",
        Foreign(
            "a backup by Proxmox (vzdump), which has disks, not memory",
            "name the state of a snapshot with memory, or use dump-guest-memory in "
            "`qm monitor`",
        ),
    ),
    (b"LibvirtQemudPart", Foreign("a guest that `virsh save` stored in part", _VIRSH)),
    (QCOW2, Foreign("a qcow2 disk image, not memory", QCOW2_REMEDY)),
    (b"QED\0", Foreign("a QED disk image, not memory", _DISK)),
    (b"KDMV", Foreign("a VMware disk, not memory", _DISK)),
    (b"# Disk DescriptorFile", Foreign("a VMware disk, not memory", _DISK)),
    (b"conectix", Foreign("a Virtual PC disk (VHD), not memory", _DISK)),
    (b"WithoutFreeSpace", Foreign("a Parallels disk, not memory", _DISK)),
    (b"WithouFreSpacExt", Foreign("a Parallels disk, not memory", _DISK)),
    (b"vhdxfile", Foreign("a Hyper-V disk, not memory", _DISK)),
    (b"LUKS\xba\xbe", Foreign("an encrypted disk (LUKS), not memory", _DISK)),
    (b"XFSB", Foreign("a file system (XFS), not memory", _DISK)),
    (b"hsqs", Foreign("a file system (squashfs), not memory", _DISK)),
    *(
        (
            magic.to_bytes(4, "little"),
            Foreign("a state of a VMware guest of an old version", VMWARE_REMEDY),
        )
        for magic in (0xBED0BED0, 0xBED2BED0)
    ),
    (
        b"\x7fVirtualBox SavedState",
        Foreign(
            "a saved state of VirtualBox",
            "dump the guest with `VBoxManage debugvm NAME dumpvmcore`",
        ),
    ),
    *(
        (start, Foreign("a saved Xen domain", "dump it with `xl dump-core`"))
        for start in (b"LinuxGuestRecord", b"Xen saved domain", b"libvirt-xml")
    ),
    (
        b"sadump\0\0",
        Foreign("a dump by sadump", "convert it with `makedumpfile -l -d 31 IN OUT`"),
    ),
    (b"DISKDUMP", Foreign("a dump by diskdump, of Linux 2.4 or 2.6", "use crash")),
    (
        b"\xa8\x19\x01\x73\x61\x8f\x23\xfd",
        Foreign("a stand-alone dump of s390", "only crash reads it, after zgetdump"),
    ),
    # LKCD's magic number, in the byte order of its machine.
    (b"\xed\x23\x8f\x61\x73\x01\x19\xa8", Foreign("a dump by LKCD", "use crash")),
    (b"\xa8\x19\x01\x73\x61\x8f\x23\xed", Foreign("a dump by LKCD", "use crash")),
    (b"PAGEDU64", Foreign("a dump of Windows", "use WinDbg")),
    (b"PAGEDUMP", Foreign("a dump of 32-bit Windows", "use WinDbg")),
    (b"MDMP", Foreign("a minidump of a Windows program", "use WinDbg")),
    (b"minidump FreeBSD", Foreign("a dump of FreeBSD", "use kgdb")),
    (
        b"version https://git-lfs",
        Foreign("a pointer of Git LFS to a file", "get the file with `git lfs pull`"),
    ),
    (
        b"OSRELEASE=",
        Foreign("the text of VMCOREINFO, not a dump", "name the vmcore"),
    ),
)

_TEXTS: tuple[tuple[bytes, Foreign], ...] = (
    *(
        (start, Foreign("a web page", "the download failed: see what the page says"))
        for start in (b"<!doctype html", b"<html")
    ),
    (b"<?xml", Foreign("XML, such as a server's error", "see what it says")),
    (b'{"', Foreign("JSON, such as a server's error", "see what it says")),
    (
        b"[    0.0",
        Foreign(
            "a kernel's log, not a dump",
            "name the vmcore beside it; msa-report reads the log itself",
        ),
    ),
)
"""Starts of texts in lower case, without white space before them."""

_SUSPENDED = (b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND")
"""Signatures that replace a swap space's in hibernation (kernel/power/swap.c;
uswsusp)."""

_HIBERNATED = Foreign(
    "a machine that hibernated into its swap space, whose pages are out of order",
    "resume the machine, and run the command there with -k",
)

_FURTHER: tuple[tuple[int, bytes, Foreign], ...] = (
    (257, b"ustar", Foreign("a tar archive", _UNPACK_TAR)),
    (
        0x202,
        b"HdrS",
        Foreign("a kernel's boot image, not a dump", "name a vmcore"),
    ),
    (0x40, b"\x7f\x10\xda\xbe", Foreign("a VirtualBox disk, not memory", _DISK)),
    (0x200, b"EFI PART", Foreign("a disk image (GPT), not memory", _DISK)),
    (0x1000, b"EFI PART", Foreign("a disk image (GPT), not memory", _DISK)),
    (0x218, b"LVM2 001", Foreign("a disk of LVM, not memory", _DISK)),
    (3, b"NTFS    ", Foreign("a file system (NTFS), not memory", _DISK)),
    *(
        (page - len(signature), signature, found)
        for page in (0x1000, 0x4000, 0x10000)
        for signature, found in (
            (b"SWAPSPACE2", Foreign("swap space, not memory", _DISK)),
            *((name.ljust(10, b"\0"), _HIBERNATED) for name in _SUSPENDED),
        )
    ),
    (0x8001, b"CD001", Foreign("a file system (ISO 9660), not memory", _DISK)),
    (0x10040, b"_BHRfS_M", Foreign("a file system (Btrfs), not memory", _DISK)),
)

_EXT4_MAGIC = 0x438, b"\x53\xef"
_EXT4_STATES, _EXT4_STATE = (1, 2, 3, 4, 5), 0x43A
"""Values and offset of ``s_state`` (fs/ext4/ext4.h), which is checked as well because
the magic number has only two bytes."""

_MBR_MAGIC = 0x1FE, b"\x55\xaa"
_MBR_ENTRIES = range(0x1BE, 0x1FE, 16)


_ZLIB = b"\x38\x8d"
"""First bytes of the zlib streams of LiME: a window of 2 KiB, the default level."""


def refuse_foreign(path: str, read: ReadAt, size: int) -> None:
    """Refuse a file that is neither a dump nor can be memory without a header.

    :raises NotADumpError: if the file is of another known kind, or too small
    """
    magic = read(0, 16)
    found = recognize(read(0, HEAD_BYTES)) or _by_name(path)
    if found is not None and not _has_snapshot(path, magic, read):
        if found.what.startswith(_COMPRESSED) and _TAR_NAME.search(path):
            found = Foreign("a tar archive", _UNPACK_TAR)
        raise NotADumpError(
            path, found.what, found.what_to_do.replace("{path}", shlex.quote(path))
        )
    if size < _LEAST_MEMORY and not magic.startswith(MEMORY_MAGICS):
        raise NotADumpError(
            path, "not a dump: neither an ELF core nor a kdump", "name a vmcore"
        )


def recognize(head: bytes) -> Foreign | None:
    """Return a file's kind by its first :data:`HEAD_BYTES`; ``None`` if unknown."""
    for signature, found in _AT_START:
        if head.startswith(signature):
            return found
    for offset, signature, found in _FURTHER:
        if head.startswith(signature, offset):
            return found
    if head.startswith(_ZLIB) and _starts_with(head, MEMORY_MAGICS[0][:4]):
        return Foreign(
            "an image by LiME that is compressed with zlib",
            "decompress it first: `pigz -dc < {path} > memory`",
        )
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, found in _TEXTS:
        if text.startswith(start):
            return found
    return _disk(head)


def _starts_with(head: bytes, magic: bytes) -> bool:
    """Return whether the contents of a zlib stream begin with *magic*."""
    try:
        return zlib.decompressobj().decompress(head, len(magic)) == magic
    except zlib.error:
        return False


def _disk(head: bytes) -> Foreign | None:
    """Return the kind of a disk image with a two-byte signature, and sound fields."""
    offset, magic = _EXT4_MAGIC
    state = int.from_bytes(head[_EXT4_STATE : _EXT4_STATE + 2], "little")
    if head.startswith(magic, offset) and state in _EXT4_STATES:
        return Foreign("a file system (ext2, 3 or 4), not memory", _DISK)
    offset, magic = _MBR_MAGIC
    # Each entry begins with its boot flag, 0 or 0x80; at least one has a type.
    flags = {head[at] for at in _MBR_ENTRIES if at < len(head)}
    if not head.startswith(magic, offset) or not flags <= {0, 0x80}:
        return None
    if not any(head[at + 4] for at in _MBR_ENTRIES):
        return None
    return Foreign("a disk image (MBR), not memory", _DISK)


_CONTROL = [bytes([byte]) for byte in (*range(9), *range(14, 27))]
_MOST_CONTROL = 0.3
"""Maximum share of these control bytes in a text."""

WIDE = b"\xff\xfe", b"\xfe\xff"
"""First bytes of a text in UTF-16: its byte order mark."""

_LOGS = ("a kernel's log", "JSON")
"""Starts of :attr:`Foreign.what` for texts that may be a kernel's log."""


def may_be_log(path: str) -> bool:
    """Return whether a file that is no dump may be a kernel's log.

    A log is a text, of which the start or the end may be noise of a serial line.

    :raises OSError: if the file cannot be read
    """
    if not os.path.isfile(path):
        return False
    with opened(path) as read:
        head = read(0, HEAD_BYTES)
        found = recognize(head)
        if found is not None and not found.what.startswith(_LOGS):
            return False
        tail = read(max(os.path.getsize(path) - HEAD_BYTES, 0), HEAD_BYTES)
    return any(_is_readable(part) for part in (head, tail))


def _is_readable(part: bytes) -> bool:
    # After a crash, a file may end with blocks of zeros.
    part = part.strip(b"\0")
    control = sum(map(part.count, _CONTROL))
    is_wide = part.startswith(WIDE)
    return bool(part) and (is_wide or control <= _MOST_CONTROL * len(part))


_NOISE = b"".join(_CONTROL[1:])
_MOST_NOISE = 0.05
"""Maximum share of control bytes in a text with noise, zeros not counted; compressed
data have 0.08, memory more."""


def is_text(data: bytes) -> bool:
    """Return whether data are a text, and not memory that contains texts.

    A text may have holes of zeros where the machine went down.
    """
    noise = len(data) - len(data.translate(None, _NOISE))
    return data.startswith(WIDE) or noise <= _MOST_NOISE * (len(data) - data.count(0))


def _by_name(path: str) -> Foreign | None:
    """Return the kind of a file without a known signature, by its name's suffix."""
    if os.path.splitext(path)[1].lower() not in _HYPER_V:
        return None
    return Foreign(
        "a saved state of Hyper-V",
        "have the guest dump itself by kdump, or take its memory from inside (avml)",
    )


def _has_snapshot(path: str, magic: bytes, read: ReadAt) -> bool:
    """Return whether a file is a qcow2 image with a snapshot of a guest's memory.

    :raises NotADumpError: if it may have one, but is of a kind that is not read
    """
    if not magic.startswith(QCOW2):
        return False
    # Imported here, as few files are such images.
    from msatools.program.qemu_state import snapshots_with_state

    try:
        return bool(snapshots_with_state(read))
    except (DamagedDataError, EOFError):
        return False
    except NotSupportedError as error:
        raise NotADumpError(path, str(error), QCOW2_REMEDY) from error
