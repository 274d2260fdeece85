# SPDX-License-Identifier: LGPL-2.1-or-later

"""Values that mark memory as invalid, as they are found in an oops."""

import pytest

from msatools.whatis.model import poison_text


@pytest.mark.parametrize(
    ("address", "begins"),
    [
        (0xDEAD000000000100, "LIST_POISON1, "),
        (0xDEAD000000000108, "LIST_POISON1+0x8, "),
        (0xDEAD000000000121, "LIST_POISON1+0x21, "),
        (0xDEAD000000000122, "LIST_POISON2, "),
        (0xDEAD000000000408, "TAIL_MAPPING+0x8, "),
        (0x6B6B6B6B6B6B6B6B, "POISON_FREE, "),
        (0x6B6B6B6B6B6B6BA3, "POISON_FREE+0x38, "),
        (0x5A5A5A5A5A5A5A5A, "POISON_INUSE, "),
        (0xCCCCCCCCCCCCCCCC, "SLUB_RED_ACTIVE, "),
    ],
)
def test_poison(address: int, begins: str) -> None:
    text = poison_text(address)
    assert text is not None
    assert text.startswith(begins)


@pytest.mark.parametrize(
    "address",
    [
        *(0, 0x100, 0xDEADBEEF, 0xDEAD0000000000FF, 0xDEAD000000000200),
        *(0xDEAD000000000600, 0x6B6B6B6B6B6B6B6A, 0x6B6B6B6B6B6B7B6B),
        *(0xFFFF888000000000, 0xFFFFFFFF81000000, (1 << 64) - 1),
    ],
)
def test_no_poison(address: int) -> None:
    assert poison_text(address) is None
