# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files that people take for a dump that is read here: what they are, and what to do.

The signatures are those of the programs that write the files: QEMU's migration code,
libvirt's qemu_saveimage.h, LiME's documentation, AVML's image.rs, vmss2core,
makedumpfile's sadump_mod.h and diskdump_mod.h, LKCD's dump.h, the kernel's
Documentation/arch/x86/boot.rst, and file(1).
"""

from typing import NamedTuple

HEAD_BYTES = 0x10080
"""How much of a file :func:`recognize` needs."""


MEMORY_MAGICS = (b"EMiL\1", b"EMiL\2", b"QEVM", b"LibvirtQemudSave")
"""How files with memory begin that have headers: see :mod:`msatools.target.raw`."""


class Foreign(NamedTuple):
    """A kind of file."""

    what: str
    what_to_do: str
    """``{path}`` in it is the file's."""


_VIRSH = "have it dumped with `virsh dump --memory-only`, or QEMU's dump-guest-memory"
QCOW2 = b"QFI\xfb"
QCOW2_REMEDY = (
    "name one that `savevm` wrote to; or have the guest dumped with `virsh dump "
    "--memory-only`"
)
_VMWARE = "name the .vmem beside it; without one, convert it with `vmss2core -N6`"
_DISK = "name a dump, or a file with the guest's memory"

_AT_START: tuple[tuple[bytes, Foreign], ...] = (
    *(
        (
            signature,
            Foreign(
                f"compressed with {name}",
                f"decompress it first: `{name} -dc {{path}} > memory`",
            ),
        )
        for signature, name in (
            (b"\x1f\x8b", "gzip"),
            (b"BZh", "bzip2"),
            (b"\xfd7zXZ\0", "xz"),
            (b"\x28\xb5\x2f\xfd", "zstd"),
            (b"\x04\x22\x4d\x18", "lz4"),
            # Of its old format, which its program reads, too.
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
    (b"LibvirtQemudPart", Foreign("a guest that `virsh save` stored in part", _VIRSH)),
    (QCOW2, Foreign("a qcow2 disk image, not memory", QCOW2_REMEDY)),
    (b"KDMV", Foreign("a VMware disk, not memory", _DISK)),
    (b"vhdxfile", Foreign("a Hyper-V disk, not memory", _DISK)),
    (b"LUKS\xba\xbe", Foreign("an encrypted disk (LUKS), not memory", _DISK)),
    (b"XFSB", Foreign("a file system (XFS), not memory", _DISK)),
    (b"hsqs", Foreign("a file system (squashfs), not memory", _DISK)),
    *(
        (
            magic.to_bytes(4, "little"),
            Foreign("a state of a VMware guest (vmss or vmsn)", _VMWARE),
        )
        for magic in (0xBED2BED0, 0xBAD1BAD1, 0xBED2BED2, 0xBED3BED3)
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
        for start in (b"LinuxGuestRecord", b"Xen saved domain")
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
    (b"\xed\x23\x8f\x61\x73\x01\x19\xa8", Foreign("a dump by LKCD", "use crash")),
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
    (b"[    0.0", Foreign("a kernel's log, not a dump", "name the vmcore beside it")),
)
"""Starts of texts in small letters, after white space."""

_FURTHER: tuple[tuple[int, bytes, Foreign], ...] = (
    (257, b"ustar", Foreign("a tar archive", "unpack it, and name the dump in it")),
    (
        0x202,
        b"HdrS",
        Foreign("a kernel's boot image, not a dump", "name a vmcore"),
    ),
    (0x200, b"EFI PART", Foreign("a disk image (GPT), not memory", _DISK)),
    (0x1000, b"EFI PART", Foreign("a disk image (GPT), not memory", _DISK)),
    (0x218, b"LVM2 001", Foreign("a disk of LVM, not memory", _DISK)),
    (3, b"NTFS    ", Foreign("a file system (NTFS), not memory", _DISK)),
    (0x8001, b"CD001", Foreign("a file system (ISO 9660), not memory", _DISK)),
    (0x10040, b"_BHRfS_M", Foreign("a file system (Btrfs), not memory", _DISK)),
)

_EXT4_MAGIC = 0x438, b"\x53\xef"
_EXT4_STATES, _EXT4_STATE = (1, 2, 3, 4, 5), 0x43A
"""``s_state`` (fs/ext4/ext4.h): the magic number alone has two bytes."""

_MBR_MAGIC = 0x1FE, b"\x55\xaa"
_MBR_ENTRIES = range(0x1BE, 0x1FE, 16)


def recognize(head: bytes) -> Foreign | None:
    """Return what a file is by its first :data:`HEAD_BYTES`; ``None`` if unknown."""
    for signature, found in _AT_START:
        if head.startswith(signature):
            return found
    for offset, signature, found in _FURTHER:
        if head.startswith(signature, offset):
            return found
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, found in _TEXTS:
        if text.startswith(start):
            return found
    return _disk(head)


def _disk(head: bytes) -> Foreign | None:
    """Return what disk a file is whose signature is too short to be one."""
    offset, magic = _EXT4_MAGIC
    state = int.from_bytes(head[_EXT4_STATE : _EXT4_STATE + 2], "little")
    if head.startswith(magic, offset) and state in _EXT4_STATES:
        return Foreign("a file system (ext2, 3 or 4), not memory", _DISK)
    offset, magic = _MBR_MAGIC
    # Each entry begins with whether its partition is booted from; one has a type.
    flags = {head[at] for at in _MBR_ENTRIES if at < len(head)}
    if not head.startswith(magic, offset) or not flags <= {0, 0x80}:
        return None
    if not any(head[at + 4] for at in _MBR_ENTRIES):
        return None
    return Foreign("a disk image (MBR), not memory", _DISK)
