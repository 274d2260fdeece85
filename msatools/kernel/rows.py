# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds rows of a table by a column of unique values."""

from typing import Any

import numpy as np
import numpy.typing as npt

NOT_FOUND = -1


def find_rows(
    known: npt.NDArray[Any], wanted: npt.NDArray[Any]
) -> npt.NDArray[np.intp]:
    """
    Find the row of each wanted value; :data:`NOT_FOUND` if there is none.

    :param known: Unique values by row, in any order.
    """
    if not len(known):
        return np.full(len(wanted), NOT_FOUND, np.intp)
    if np.array_equal(known, wanted):
        return np.arange(len(known))
    order = np.argsort(known, kind="stable")
    index = np.searchsorted(known, wanted, sorter=order)
    row = order[np.minimum(index, len(known) - 1)]
    return np.where(known[row] == wanted, row, NOT_FOUND)
