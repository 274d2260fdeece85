# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files that are no dump of ours are named, each with what to do."""

import bz2
import gzip
import io
import lzma
import shutil
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from msatools.program import TargetSpec, open_target
from msatools.program.foreign import recognize
from msatools.program.model import NotADumpError
from tests.support.madeelf import image

DUMP = b"\x7fELF" + bytes(2000)


def tarred() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("vmcore")
        info.size = len(DUMP)
        archive.addfile(info, io.BytesIO(DUMP))
    return out.getvalue()


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("vmcore", DUMP)
    return out.getvalue()


MADE: dict[str, tuple[Callable[[], bytes], str]] = {
    "gzip": (lambda: gzip.compress(DUMP), "compressed with gzip"),
    "bzip2": (lambda: bz2.compress(DUMP), "compressed with bzip2"),
    "xz": (lambda: lzma.compress(DUMP), "compressed with xz"),
    "tar": (tarred, "a tar archive"),
    "zip": (zipped, "a zip archive"),
    "zeros": (lambda: bytes(2 << 20), "zeros where"),
}
"""Files as the programs themselves make them."""

KNOWN = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"LibvirtQemudPart": "virsh save",
    b"\xd0\xbe\xd0\xbe\x08": "VMware",
    b"VMA\0\0\0\0\1": "Proxmox",
    b"sadump\0\0": "sadump",
    b"DISKDUMP": "diskdump",
    b"\xa8\x19\x01\x73\x61\x8f\x23\xfd": "s390",
    b"\xed\x23\x8f\x61\x73\x01\x19\xa8": "LKCD",
    b"\xa8\x19\x01\x73\x61\x8f\x23\xed": "LKCD",
    b"libvirt-xml\n \0 \r": "Xen",
    b"PAGEDU64": "Windows",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a": "Git LFS",
    b"\n <!DOCTYPE HTML PUBLIC": "a web page",
    b"\xef\xbb\xbf<html>": "a web page",
    b'<?xml version="1.0"?><Error><Code>AccessDenied': "XML",
    b'{"message": "Not found"}': "JSON",
    b"[    0.000000] Linux version 6.12": "kernel's log",
    b"QFI\xfb\0\0\0\3": "qcow2",
    bytes(512) + b"EFI PART\0\0\1\0": "a disk image (GPT)",
    bytes(450) + b"\x83" + bytes(59) + b"\x55\xaa": "a disk image (MBR)",
    bytes(0x438) + b"\x53\xef\1\0": "ext2, 3 or 4",
    bytes(4086) + b"SWAPSPACE2": "swap space",
    bytes(4086) + b"S1SUSPEND\0": "hibernated",
    bytes(65526) + b"S1SUSPEND\0": "hibernated",
    b"XFSB\0\0\x10\0": "XFS",
    bytes(0x10040) + b"_BHRfS_M": "Btrfs",
    b"\xeb\x52\x90NTFS    ": "NTFS",
    bytes(0x8001) + b"CD001": "ISO 9660",
    bytes(0x202) + b"HdrS": "boot image",
    b"OSRELEASE=6.12\nPAGESIZE=4096": "VMCOREINFO",
}


@pytest.mark.parametrize("name", MADE)
def test_made(tmp_path: Path, name: str) -> None:
    make, words = MADE[name]
    path = tmp_path / "vmcore"
    path.write_bytes(make())
    with pytest.raises(NotADumpError, match=words) as raised:
        open_target(TargetSpec(path=str(path)))
    assert raised.value.what_to_do


def test_compressed_with_the_command_to_type(tmp_path: Path) -> None:
    path = tmp_path / "a dump"
    path.write_bytes(gzip.compress(DUMP))
    with pytest.raises(NotADumpError) as raised:
        open_target(TargetSpec(path=str(path)))
    assert f"`gzip -dc '{path}' > memory`" in raised.value.what_to_do


@pytest.mark.parametrize("head", KNOWN)
def test_known_by_its_signature(head: bytes) -> None:
    found = recognize(head)
    assert found is not None
    assert KNOWN[head] in found.what
    assert found.what_to_do


@pytest.mark.parametrize("name", ["vmcore.tar.gz", "vmcore.tgz", "vmcore.TBZ2"])
def test_compressed_archive(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pack = gzip.compress if "gz" in name else bz2.compress
    path.write_bytes(pack(tarred()))
    with pytest.raises(NotADumpError, match="a tar archive") as raised:
        open_target(TargetSpec(path=str(path)))
    assert f"`tar xf {path}`" in raised.value.what_to_do


DISKS = {
    "qcow2": "a qcow2 disk image",
    "qed": "a QED disk image",
    "vmdk": "a VMware disk",
    "vdi": "a VirtualBox disk",
    "vhdx": "a Hyper-V disk",
    "vpc": "a Virtual PC disk",
    "parallels": "a Parallels disk",
}
"""Formats of qemu-img."""


@pytest.mark.parametrize("form", DISKS)
def test_disk_by_qemu_img(tmp_path: Path, form: str) -> None:
    if shutil.which("qemu-img") is None:
        pytest.skip("there is no qemu-img here")
    path = tmp_path / "disk"
    command = ["qemu-img", "create", "-q", "-f", form, str(path), "64M"]
    subprocess.run(command, check=True)
    with pytest.raises(NotADumpError, match=DISKS[form]) as raised:
        open_target(TargetSpec(path=str(path)))
    assert "not memory" in raised.value.why
    assert raised.value.what_to_do


COMPRESSORS = {
    "gzip": ("-c",),
    "bzip2": ("-c",),
    "xz": ("-0", "-c"),
    "zstd": ("-q", "-c"),
    "lz4": ("-c",),
    "lzop": ("-c",),
}


@pytest.mark.parametrize("program", COMPRESSORS)
def test_what_is_to_be_typed_gives_the_dump(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    plain, path = tmp_path / "plain", tmp_path / "a dump"
    plain.write_bytes(DUMP)
    path.write_bytes(
        subprocess.run(
            [program, *COMPRESSORS[program], str(plain)],
            capture_output=True,
            check=True,
        ).stdout
    )
    with pytest.raises(NotADumpError, match=f"compressed with {program}") as raised:
        open_target(TargetSpec(path=str(path)))
    words = raised.value.what_to_do
    subprocess.run(words.split("`")[1], shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "memory").read_bytes() == DUMP


def test_core_of_a_guest_by_another_hypervisor(tmp_path: Path) -> None:
    path = tmp_path / "vmcore"
    path.write_bytes(image().replace(b"GNU\0", b"Xen\0"))
    with pytest.raises(NotADumpError, match="Xen did not store"):
        open_target(TargetSpec(path=str(path)))


def test_image_by_lime_that_is_compressed() -> None:
    """LiME compresses with the kernel's zlib, and a window of 2 KiB."""
    packer = zlib.compressobj(-1, zlib.DEFLATED, 11, 5)
    head = packer.compress(b"EMiL\1\0\0\0" + bytes(1 << 20)) + packer.flush()
    found = recognize(head)
    assert found is not None
    assert "LiME that is compressed with zlib" in found.what
    packer = zlib.compressobj(-1, zlib.DEFLATED, 11, 5)
    assert recognize(packer.compress(bytes(1 << 20)) + packer.flush()) is None
    assert recognize(b"\x38\x8d" + b"\xff" * 64) is None


def test_core_of_a_hypervisor(tmp_path: Path) -> None:
    """The command takes the guest's memory out of it."""
    part, ram = b"code" * 1024, b"ram!" * (1 << 19)
    info = bytes(40) + b"qemu-system-x86_".ljust(96, b"\0")
    note = struct.pack("<III8s", 5, len(info), 3, b"CORE") + info
    offset = 64 + 3 * 56
    header = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 4, 62, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    for kind, data in ((4, note), (1, part), (1, ram)):
        header += struct.pack("<IIQQQQQQ", kind, 6, offset, 1, 0, len(data), 0, 1)
        offset += len(data)
    path = tmp_path / "a core"
    path.write_bytes(header + note + part + ram)
    with pytest.raises(NotADumpError, match="hypervisor's process") as raised:
        open_target(TargetSpec(path=str(path)))
    command = raised.value.what_to_do.split("`")[1].replace("memory", "-")
    command = command.removesuffix(" > -")
    assert subprocess.check_output(command, shell=True) == ram
    path.write_bytes(
        path.read_bytes().replace(b"qemu-system-x86_", b"python3".ljust(16))
    )
    with pytest.raises(NotADumpError, match="a core of a program"):
        open_target(TargetSpec(path=str(path)))


def test_saved_state_of_hyper_v(tmp_path: Path) -> None:
    """It is known by its name alone."""
    path = tmp_path / "guest.VMRS"
    path.write_bytes(b"\1" * (2 << 20))
    with pytest.raises(NotADumpError, match="saved state of Hyper-V"):
        open_target(TargetSpec(path=str(path)))


@pytest.mark.parametrize("head", [b"", b"hello, world", bytes(100), b"\xa5" * 1024])
def test_unknown(head: bytes) -> None:
    assert recognize(head) is None
