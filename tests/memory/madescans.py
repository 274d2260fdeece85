# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make scan results with pages that can be on free lists."""

import numpy as np

from msatools.memory.classes import NCLASSES, PageClass
from msatools.memory.sums import CachePages, FreeCandidates, ScanResult

PAGES = 1000
"""Number of pages, all of one class."""

KEY = 0


def scanned(
    links: dict[int, tuple[int, int]],
    rooms: int,
    code: int = PageClass.UNATTRIBUTED,
) -> ScanResult:
    """
    Make a scan result.

    :param links: list node -> next and previous node
    :param rooms: Pages of the largest block that can begin at each page.
    """
    counts = np.zeros(NCLASSES, np.int64)
    counts[code] = PAGES
    nodes = np.array([*links], np.uint64)
    nexts, prevs = np.array([*links.values()], np.uint64).T
    candidates = FreeCandidates(
        *([column] for column in (nodes, nexts, prevs)),
        [np.full(len(links), code, np.uint8)],
        [np.full(len(links), KEY, np.int64)],
        [np.full(len(links), rooms, np.intp)],
    )
    return ScanResult({KEY: counts}, CachePages(), candidates)
