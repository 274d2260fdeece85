# SPDX-License-Identifier: LGPL-2.1-or-later

"""Quantities as people read them."""


def size(amount: int) -> str:
    """
    Write a number of bytes in the largest unit that leaves a whole part.

    >>> size(889_192_448), size(12_345_678_848)
    ('848.0 MiB', '11.50 GiB')
    """
    kib, mib = amount / 1024, amount / 1024**2
    if abs(mib) < 1:
        return f"{kib:.0f} KiB"
    if abs(mib) < 1024:
        return f"{mib:.1f} MiB"
    if abs(mib) < 1024**2:
        return f"{mib / 1024:.2f} GiB"
    return f"{mib / 1024**2:.2f} TiB"
