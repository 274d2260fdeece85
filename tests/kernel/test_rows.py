# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows found by a column of unique values."""

import numpy as np
import pytest

from msatools.kernel.structs import find_rows


@pytest.mark.parametrize(
    ("known", "wanted", "rows"),
    [
        ([30, 10, 20], [10, 20, 30], [1, 2, 0]),
        ([30, 10, 20], [30, 10, 20], [0, 1, 2]),
        ([30, 10, 20], [5, 15, 35, 20, 20], [-1, -1, -1, 2, 2]),
        ([30], [], []),
        ([], [10, 20], [-1, -1]),
    ],
)
def test_find_rows(known: list[int], wanted: list[int], rows: list[int]) -> None:
    found = find_rows(np.array(known, np.uint64), np.array(wanted, np.uint64))
    assert found.tolist() == rows
