# SPDX-License-Identifier: LGPL-2.1-or-later

"""Quantities as people read them."""


def size(amount: int) -> str:
    """
    Write a number of bytes in the largest unit that leaves a whole part.

    >>> size(889_192_448)
    '848.0 MiB'
    """
    value, unit = float(amount), "KiB"
    value /= 1024
    for larger in ("MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
