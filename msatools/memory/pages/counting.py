# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts pages of a block by class, for equal parts of the block."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import CLASSES, NCLASSES
from msatools.memory.pages.classify import Codes

Counts = npt.NDArray[np.int64]
"""Pages by class, shape ``(NCLASSES,)`` or ``(parts, NCLASSES)``."""


def class_counts(codes: Codes, part_pages: int, skip: int = 0) -> Counts:
    """
    Count the pages of each class in parts of *part_pages* pages.

    :param skip: Number of pages of the first part that precede the block.
    :return: Shape ``(parts, NCLASSES)``; the first and last part may be short.
    """
    parts = -(-(skip + len(codes)) // part_pages)
    lowest = int(codes.min())
    if lowest == codes.max():
        # Usually free memory; this takes a fortieth of the time.
        counts = np.zeros((parts, NCLASSES), np.int64)
        counts[:, lowest] = part_pages
        counts[0, lowest] -= skip
        counts[-1, lowest] -= parts * part_pages - skip - len(codes)
        return counts
    if parts == 1:
        return np.bincount(codes, minlength=NCLASSES)[np.newaxis]
    keys = _part_keys(len(codes), part_pages, skip) + codes
    return np.bincount(keys, minlength=parts * NCLASSES).reshape(parts, NCLASSES)


@lru_cache(maxsize=8)
def _part_keys(pages: int, part_pages: int, skip: int) -> npt.NDArray[np.intp]:
    """Return NCLASSES times the index of each page's part; cached, as calls repeat."""
    return (np.arange(pages, dtype=np.intp) + skip) // part_pages * NCLASSES


def named(counts: Counts) -> dict[str, int]:
    """Return the counts by class name."""
    return {name: int(counts[code]) for code, name in CLASSES.items()}
