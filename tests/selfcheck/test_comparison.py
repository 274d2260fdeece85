# SPDX-License-Identifier: LGPL-2.1-or-later

"""Verdicts on two numbers, read once or several times."""

import pytest
from msgspec.structs import replace

from msatools.selfcheck.model import Comparison, judge

MADE = Comparison(name="a.b", left="some", right="others", reason="as some are new")
Pair = tuple[int, int]


def read(*pairs: Pair, least: int = 0, most: int | None = 0) -> str:
    """Return the verdict on readings of two numbers."""
    readings = [
        replace(MADE, left_value=left, right_value=right, least=least, most=most)
        for left, right in pairs
    ]
    return judge(readings).verdict


@pytest.mark.parametrize(
    ("pair", "least", "most", "verdict"),
    [
        ((5, 5), 0, 0, "ok"),
        ((5, 4), 0, 0, "differs"),
        ((4, 5), 0, 0, "differs"),
        ((6, 5), 0, 1, "ok"),
        ((7, 5), 0, 1, "differs"),
        ((4, 5), 0, 1, "differs"),
        ((4, 5), -1, 0, "ok"),
        ((3, 5), -1, 0, "differs"),
        ((900, 5), 0, None, "ok"),
        ((4, 5), 0, None, "differs"),
    ],
)
def test_one_reading(pair: Pair, least: int, most: int | None, verdict: str) -> None:
    assert read(pair, least=least, most=most) == verdict


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        # One reading that holds is enough.
        (((5, 4), (5, 5), (7, 4)), "ok"),
        # Both stand still.
        (((5, 4), (5, 4), (5, 4)), "differs"),
        # The ranges 5..8 and 7..9 overlap.
        (((5, 7), (8, 9)), "moved"),
        # The ranges 5..6 and 7..9 do not, though both moved.
        (((5, 7), (6, 9)), "differs"),
        (((7, 5), (9, 6)), "differs"),
    ],
)
def test_several_readings(pairs: tuple[Pair, ...], verdict: str) -> None:
    assert read(*pairs) == verdict


def test_ranges_count_with_what_is_allowed() -> None:
    assert read((5, 7), (6, 9), least=-1) == "moved"
    assert read((5, 8), (6, 9), least=-1) == "differs"
    assert read((9, 5), (8, 5), most=3) == "ok"
    assert read((9, 5), (9, 4), most=3) == "differs"
    assert read((5, 7), (6, 9), most=None) == "differs"
    assert read((5, 7), (7, 9), most=None) == "moved"


def test_reasons() -> None:
    differs = replace(MADE, left_value=6, right_value=5)
    assert judge([differs]).reason == MADE.reason
    allowed = replace(differs, most=1)
    assert judge([allowed]).reason == MADE.reason
    # Nothing has to be explained.
    assert judge([replace(allowed, left_value=5)]).reason is None
    moved = judge([differs, replace(differs, right_value=7)])
    assert moved.reason == "changed between 2 readings of a running kernel"


def test_without_a_number() -> None:
    lost = judge([replace(MADE, left_value=5, lost="cut off")])
    assert (lost.verdict, lost.difference, lost.reason) == ("unknown", None, "cut off")
    assert judge([MADE]).reason == "a number could not be read"
    absent = judge([replace(MADE, absent="no such thing", lost="cut off")])
    assert (absent.verdict, absent.reason) == ("not-applicable", "no such thing")
    assert lost.has_failed
    assert not absent.has_failed
