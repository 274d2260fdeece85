# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps of machines that are not supported: one line says so."""

import struct
from pathlib import Path

import pytest

from msatools.program import TargetError, TargetSpec, open_target
from msatools.program.dumpfile import read_dump_file
from msatools.program.model import UnsupportedMachineError

EM_386, EM_PPC64, EM_S390, EM_ARM, EM_RISCV = 3, 21, 22, 40, 243


def core(order: str, bits: int, machine: int) -> bytes:
    """An ELF core that has just a VMCOREINFO note."""
    text = b"OSRELEASE=6.12.0\n\0\0\0"
    note = struct.pack(order + "III", 11, len(text), 0) + b"VMCOREINFO\0\0" + text
    ident = b"\x7fELF" + bytes([bits // 32, 1 if order == "<" else 2, 1]) + bytes(9)
    if bits == 64:
        layout, size, program = "HHIQQQIHHHHHH", 64, 56
        segment = struct.pack(
            order + "IIQQQQQQ", 4, 0, size + program, 0, 0, len(note), len(note), 4
        )
    else:
        layout, size, program = "HHIIIIIHHHHHH", 52, 32
        segment = struct.pack(
            order + "IIIIIIII", 4, size + program, 0, 0, len(note), len(note), 0, 4
        )
    fields = (4, machine, 1, 0, size, 0, 0, size, program, 1, 0, 0, 0)
    return ident + struct.pack(order + layout, *fields) + segment + note


@pytest.mark.parametrize(
    ("order", "bits", "machine", "kind"),
    [
        ("<", 32, EM_386, "32-bit"),
        ("<", 32, EM_ARM, "32-bit"),
        (">", 64, EM_S390, "big-endian"),
        (">", 64, EM_PPC64, "big-endian"),
    ],
)
def test_elf(tmp_path: Path, order: str, bits: int, machine: int, kind: str) -> None:
    path = tmp_path / "vmcore"
    path.write_bytes(core(order, bits, machine))
    with pytest.raises(UnsupportedMachineError) as caught:
        open_target(TargetSpec(path=str(path)))
    assert str(caught.value) == (
        f"{path}: a dump of a {kind} kernel, and only 64-bit little-endian ones are "
        "read; use crash, or drgn by itself"
    )


def test_elf_of_another_64_bit_machine(tmp_path: Path) -> None:
    path = tmp_path / "vmcore"
    path.write_bytes(core("<", 64, EM_RISCV))
    assert read_dump_file(str(path)).kind == "elf"


def kdump(order: str, word: int, machine: bytes = b"") -> bytes:
    """The headers of a kdump, without pages."""
    fields = (b"Linux", b"", b"", b"", machine, b"")
    header = b"KDUMP   " + struct.pack(order + "i", 6)
    header += b"".join(field.ljust(65, b"\0") for field in fields)
    header = header.ljust(424 if word == 8 else 412, b"\0")
    header += struct.pack(order + "Iiii20xi", 1, 4096, 1, 0, 1)
    sub = struct.pack(order + "QiiQQQQ", 0, 1, 0, 0, 0, 5000, 1000)
    return header.ljust(4096, b"\0") + sub.ljust(4096, b"\0")


@pytest.mark.parametrize(("order", "word"), [("<", 4), (">", 8), (">", 4)])
def test_kdump(tmp_path: Path, order: str, word: int) -> None:
    path = tmp_path / "vmcore"
    path.write_bytes(kdump(order, word))
    kind = "32-bit" if word == 4 else "big-endian"
    with pytest.raises(UnsupportedMachineError, match=f"a {kind} kernel"):
        read_dump_file(str(path))


def test_kdump_by_qemu_of_a_machine_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "vmcore"
    path.write_bytes(kdump("<", 8, b"Unknown"))
    with pytest.raises(TargetError, match="dump the guest as ELF"):
        open_target(TargetSpec(path=str(path)))
