# SPDX-License-Identifier: LGPL-2.1-or-later

"""Human-readable quantities: see ``tests/golden/units.txt``."""

from msatools.reports.units import clock, count, duration, ranges, short_size, size
from tests.support.golden import Golden

KIB, MIB, GIB, TIB = (1 << bits for bits in (10, 20, 30, 40))
MINUTE, HOUR, DAY = (seconds * 10**9 for seconds in (60, 3600, 86_400))

SIZES = (0, 4096, MIB - 4096, MIB, 889_192_448, GIB, TIB, 12 * TIB, -3 * MIB)
SHORT = (0, 4 * KIB, MIB - 1, MIB, 99 * MIB, 100 * MIB - 1, 100 * MIB, 1023 * MIB)
LARGE = (GIB, TIB, 128 * TIB)
COUNTS = (0, 999, 1000, 1999, 99_999, 100_000, 999_999, 10**6, 10**9, (1 << 64) - 1)
SHORT_TIMES = (0, 499, 500, 999_499, 999_500, 999_499_999, 999_500_000, -17_400_000)
TIMES = (99_949_999_999, 99_950_000_000, HOUR - 1, HOUR, DAY - 10**9, DAY, 1000 * DAY)
CLOCKS = (0, 10**7 - 1, 10**7, MINUTE - 1, MINUTE, HOUR, 100 * HOUR + 61 * 10**9)


def test_golden(golden: Golden) -> None:
    """Counts are truncated, never rounded up."""
    tables = (
        (size, SIZES),
        (short_size, (*SHORT, *LARGE)),
        (count, COUNTS),
        (duration, (*SHORT_TIMES, *TIMES)),
        (clock, CLOCKS),
    )
    lines = []
    for write, values in tables:
        lines += [f"{write.__name__} of", *(f"    {v}: {write(v)}" for v in values)]
    golden("units", lines)


def test_ranges() -> None:
    for numbers, most, text in (
        ((), None, ""),
        ((7,), None, "7"),
        ((8, 1, 0, 2, 9), None, "0-2,8-9"),
        ((1, 1, 2), None, "1-2"),
        (range(256), 1, "0-255"),
        (range(0, 10, 2), 5, "0,2,4,6,8"),
        (range(0, 10, 2), 4, "0,2,4,6 +1"),
        ((0, *range(2, 2000)), 1, "0 +1,998"),
    ):
        assert ranges(numbers, most) == text
