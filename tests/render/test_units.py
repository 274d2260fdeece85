# SPDX-License-Identifier: LGPL-2.1-or-later

"""Quantities as people read them."""

from collections.abc import Iterable

import pytest

from msatools.render.units import clock, count, duration, short_size, size
from msatools.values import ranges


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 KiB"),
        (4096, "4 KiB"),
        ((1 << 20) - 4096, "1020 KiB"),
        (1 << 20, "1.0 MiB"),
        (889_192_448, "848.0 MiB"),
        (1 << 30, "1.00 GiB"),
        (1 << 40, "1.00 TiB"),
        (12 << 40, "12.00 TiB"),
        (-(3 << 20), "-3.0 MiB"),
    ],
)
def test_size(amount: int, text: str) -> None:
    assert size(amount) == text


KIB, MIB, GIB, TIB = (1 << bits for bits in (10, 20, 30, 40))


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0K"),
        (4096, "4K"),
        (MIB - 1, "1023K"),
        (MIB, "1.0M"),
        (99 * MIB, "99.0M"),
        (100 * MIB - 1, "100M"),
        (100 * MIB, "100M"),
        (1023 * MIB, "1023M"),
        (GIB, "1.0G"),
        (TIB, "1.0T"),
        (128 * TIB, "128T"),
    ],
)
def test_short_size(amount: int, text: str) -> None:
    assert short_size(amount) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0K"),
        (1999, "1.9K"),
        (99_999, "99.9K"),
        (100_000, "100K"),
        (999_999, "999K"),
        (10**6, "1.0M"),
        (10**9, "1.0G"),
        ((1 << 64) - 1, "18446744T"),
    ],
)
def test_count(number: int, text: str) -> None:
    """Cut off, never rounded up to what is not there."""
    assert count(number) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0us"),
        (499, "0us"),
        (500, "1us"),
        (999_499, "999us"),
        (999_500, "1ms"),
        (999_499_999, "999ms"),
        (999_500_000, "1.0s"),
        (99_949_999_999, "99.9s"),
        (99_950_000_000, "1m39s"),
        (3_599_999_999_999, "59m59s"),
        (3600 * 10**9, "1h00m"),
        (86_399 * 10**9, "23h59m"),
        (86_400 * 10**9, "1d00h"),
        (1000 * 86_400 * 10**9, "1000d00h"),
        (-17_400_000, "-17ms"),
    ],
)
def test_duration(ns: int, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0:00.00"),
        (9_999_999, "0:00.00"),
        (10**7, "0:00.01"),
        (59_999_999_999, "0:59.99"),
        (60 * 10**9, "1:00.00"),
        (3_599_999_999_999, "59:59.99"),
        (3600 * 10**9, "1:00:00"),
        (100 * 3600 * 10**9 + 61 * 10**9, "100:01:01"),
    ],
)
def test_clock(ns: int, text: str) -> None:
    assert clock(ns) == text


@pytest.mark.parametrize(
    ("numbers", "most", "text"),
    [
        ((), None, ""),
        ((7,), None, "7"),
        ((8, 1, 0, 2, 9), None, "0-2,8-9"),
        ((1, 1, 2), None, "1-2"),
        (range(256), 1, "0-255"),
        (range(0, 10, 2), 5, "0,2,4,6,8"),
        (range(0, 10, 2), 4, "0,2,4,6 +1"),
        ((0, *range(2, 2000)), 1, "0 +1,998"),
    ],
)
def test_ranges(numbers: Iterable[int], most: int | None, text: str) -> None:
    assert ranges(numbers, most) == text
