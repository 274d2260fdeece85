# SPDX-License-Identifier: LGPL-2.1-or-later

"""The first kernel address, by architecture and page table levels."""

import pytest
from drgn import Architecture

from msatools.program.arch import architecture
from msatools.program.linear import KERNEL_HALF

ARM64_52 = {"NUMBER(VA_BITS)": "52"}


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
