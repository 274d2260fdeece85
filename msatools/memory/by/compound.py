# SPDX-License-Identifier: LGPL-2.1-or-later

"""Members of the head of a compound page that hold for all its pages."""

from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classify import Block, Indices


def give_to_tails(block: Block, words: npt.NDArray[Any]) -> Indices:
    """
    Give each tail its head's word.

    :param words: One a page of the block; those of tails are changed.
    :return: The tails whose head is not in the block, which are left as they are:
        those of a page larger than a block.
    """
    tails, heads = block.tails, block.tail_heads
    near = (heads >= 0) & (heads < len(block))
    words[tails[near]] = words[heads[near]]
    far: Indices = tails[~near]
    return far


def far_heads(block: Block, tails: Indices) -> npt.NDArray[np.uint64]:
    """Return the addresses of the heads of tails that :func:`give_to_tails` left."""
    places = block.tail_heads[np.isin(block.tails, tails)]
    # Those before the block are negative: the sum wraps round.
    offsets = (places.astype(np.int64) * block.layout.size).view(np.uint64)
    found: npt.NDArray[np.uint64] = offsets + np.uint64(block.address)
    return found
