# SPDX-License-Identifier: LGPL-2.1-or-later

"""Cells of any command in an order."""

import pytest

from msatools.render.plain import number_in, sort_order


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("1,024", 1024), ("-132", -132), ("+5", 5), ("12.5%", 12.5)),
        *(("4.1K", 4100), ("2.0M", 2e6), ("1.2 MiB", 1.2 * (1 << 20))),
        *(("256 KiB", 256 << 10), ("3 GiB", 3 << 30), ("0 KiB", 0)),
        *(("84ms", 0.084), ("16.1s", 16.1), ("2m03s", 123), ("1h02m", 3720)),
        *(("3d04h", 3 * 86400 + 4 * 3600), ("<68.6", 68.6), ("~38.8s", 38.8)),
        *((">711ms", 0.711), ("0:02.85", 2.85), ("1:01:01", 3661)),
        *(("D", None), ("-", None), ("", None), ("cpu1", None), ("10 of 12", None)),
        *(("213/214", None), ("5 apples", None)),
    ],
)
def test_numbers(text: str, number: float | None) -> None:
    assert number_in(text) == (None if number is None else pytest.approx(number))


def ordered(*cells: str, reverse: bool = False) -> list[str]:
    return [cells[index] for index in sort_order(cells, reverse=reverse)]


def test_largest_number_first() -> None:
    cells = ("1.5K", "-", "~200", "1,000", "")
    assert ordered(*cells) == ["1.5K", "1,000", "~200", "-", ""]
    assert ordered(*cells, reverse=True) == ["~200", "1,000", "1.5K", "-", ""]


def test_texts_by_name() -> None:
    assert ordered("sh", "9p", "-", "bash") == ["9p", "bash", "sh", "-"]
    assert ordered("sh", "bash", "-", reverse=True) == ["sh", "bash", "-"]
