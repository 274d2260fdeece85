# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lists of CPU and node IDs, formatted as the kernel does."""

from collections.abc import Iterable


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """
    Format numbers as the kernel formats lists of CPUs.

    >>> ranges([3, 0, 1, 2, 8]), ranges([0, 2, 4, 5, 7, 9], most=3)
    ('0-3,8', '0,2,4-5 +2')

    :param most: Maximum number of ranges to write; the others are written as the count
        of their numbers.
    """
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    shown = found[:most]
    left = sum(last - first + 1 for first, last in found[len(shown) :])
    text = ",".join(f"{a}-{b}" if a != b else str(a) for a, b in shown)
    return text + (f" +{left:,}" if left else "")
