# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of a block by class, for each of the equal parts that it is cut into."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import CLASSES, NCLASSES
from msatools.memory.pages.classify import Codes

Counts = npt.NDArray[np.int64]
"""Pages by class, shape ``(NCLASSES,)`` or ``(parts, NCLASSES)``."""


def class_counts(codes: Codes, each: int, skip: int = 0) -> Counts:
    """
    Count the pages of each class in parts of *each* pages.

    :param skip: By how many pages the first page is behind the start of its part.
    :return: Shape ``(parts, NCLASSES)``; the first and last part may be short.
    """
    parts = -(-(skip + len(codes)) // each)
    lowest = int(codes.min())
    if lowest == codes.max():
        # Free memory, for the most part; found in a fortieth of the time.
        counts = np.zeros((parts, NCLASSES), np.int64)
        counts[:, lowest] = each
        counts[0, lowest] -= skip
        counts[-1, lowest] -= parts * each - skip - len(codes)
        return counts
    if parts == 1:
        return np.bincount(codes, minlength=NCLASSES)[np.newaxis]
    keys = _part_keys(len(codes), each, skip) + codes
    return np.bincount(keys, minlength=parts * NCLASSES).reshape(parts, NCLASSES)


@lru_cache(maxsize=8)
def _part_keys(pages: int, each: int, skip: int) -> npt.NDArray[np.intp]:
    """Return NCLASSES times the number of each page's part; most blocks are alike."""
    return (np.arange(pages, dtype=np.intp) + skip) // each * NCLASSES


def named(counts: Counts) -> dict[str, int]:
    """Return the counts of all classes by their names."""
    return {name: int(counts[code]) for code, name in CLASSES.items()}
