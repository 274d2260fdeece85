# SPDX-License-Identifier: LGPL-2.1-or-later

"""The first kernel address, by architecture and page table levels."""

import pytest
from drgn import Architecture

from fixtures import lab
from msatools.program import TargetSpec, open_target
from msatools.program.arch import architecture
from msatools.program.linear import KERNEL_HALF, kernel_start

ARM64_52 = {"NUMBER(VA_BITS)": "52"}


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("memory-6.12", 0xFF00_0000_0000_0000),
        ("barepages-6.12", 0xFFFF_8000_0000_0000),
    ],
)
def test_kernels_with_five_and_four_levels(name: str, start: int) -> None:
    dump = lab.build(name).elf
    prog = open_target(TargetSpec(path=str(dump), types="btf")).prog
    assert kernel_start(prog) == start
    assert start <= prog["page_offset_base"].value_()
    assert start <= prog["vmemmap_base"].value_()


@pytest.mark.parametrize(
    ("arch", "lines", "bits"),
    [
        (Architecture.X86_64, {}, 47),
        (Architecture.X86_64, {"NUMBER(pgtable_l5_enabled)": "0"}, 47),
        (Architecture.X86_64, {"NUMBER(pgtable_l5_enabled)": "1"}, 56),
        (Architecture.AARCH64, {"NUMBER(VA_BITS)": "48"}, 48),
        (Architecture.AARCH64, ARM64_52 | {"NUMBER(TCR_EL1_T1SZ)": "0x10"}, 48),
        (Architecture.AARCH64, ARM64_52 | {"NUMBER(TCR_EL1_T1SZ)": "0xc"}, 52),
        (Architecture.S390X, {}, 63),
    ],
)
def test_bits_by_architecture(
    arch: Architecture, lines: dict[str, str], bits: int
) -> None:
    assert architecture(arch).address_bits(lines) == bits
    assert (1 << 64) - (1 << bits) >= KERNEL_HALF
