# SPDX-License-Identifier: LGPL-2.1-or-later

"""Node and zone of a page as one key: the bits of its flags."""

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block
from msatools.memory.pages.layout import PageLayout

NOWHERE = -1
"""Node-and-zone key of pages whose struct page is missing."""


def node_zone_keys(block: Block) -> int | npt.NDArray[np.int64]:
    """Return the key of each page; a single key if all are the same."""
    shift = np.uint64(block.layout.zone_shift)
    highest = np.bitwise_or.reduce(block.flags) >> shift
    lowest = np.bitwise_and.reduce(block.flags) >> shift
    missing = block.codes >= PageClass.EXCLUDED
    if highest == lowest and not missing.any():
        return int(highest)
    keys = (block.flags >> shift).view(np.int64)
    keys[missing] = NOWHERE
    return keys


def node_and_zone(key: int, layout: PageLayout) -> tuple[int, int] | None:
    """Split a key into node and zone number; ``None`` for missing pages."""
    if key == NOWHERE:
        return None
    return key >> layout.zone_bits, key & ((1 << layout.zone_bits) - 1)
