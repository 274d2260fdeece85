# SPDX-License-Identifier: LGPL-2.1-or-later

"""Quantities as people read them."""

import pytest

from msatools.render.units import size


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 KiB"),
        (4096, "4 KiB"),
        ((1 << 20) - 4096, "1020 KiB"),
        (1 << 20, "1.0 MiB"),
        (889_192_448, "848.0 MiB"),
        (1 << 30, "1.00 GiB"),
        (12 << 40, "12.00 TiB"),
        (-(3 << 20), "-3.0 MiB"),
    ],
)
def test_size(amount: int, text: str) -> None:
    assert size(amount) == text
