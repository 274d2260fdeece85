# SPDX-License-Identifier: LGPL-2.1-or-later

"""Files that are no dump of ours are named, each with what to do."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from msatools.program import TargetSpec, open_target
from msatools.program.dumpfile import recognize
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
    b"sadump\0\0": "sadump",
    b"DISKDUMP": "diskdump",
    b"\xa8\x19\x01\x73\x61\x8f\x23\xfd": "s390",
    b"\xed\x23\x8f\x61\x73\x01\x19\xa8": "LKCD",
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


def test_core_of_a_guest_by_another_hypervisor(tmp_path: Path) -> None:
    path = tmp_path / "vmcore"
    path.write_bytes(image().replace(b"GNU\0", b"Xen\0"))
    with pytest.raises(NotADumpError, match="Xen did not store"):
        open_target(TargetSpec(path=str(path)))


@pytest.mark.parametrize("head", [b"", b"hello, world", bytes(100), b"\xa5" * 1024])
def test_unknown(head: bytes) -> None:
    assert recognize(head) is None
