# SPDX-License-Identifier: LGPL-2.1-or-later

"""Copies members of a compound page's head to its tails."""

from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classify import Block, Indices


def copy_to_tails(block: Block, words: npt.NDArray[Any]) -> Indices:
    """
    Copy each head's word to its tails.

    :param words: One word a page of the block; those of tails are changed.
    :return: The tails whose head is outside the block, which are left unchanged:
        their compound page is larger than a block.
    """
    tails, heads = block.tails, block.tail_heads
    near = (heads >= 0) & (heads < len(block))
    words[tails[near]] = words[heads[near]]
    far: Indices = tails[~near]
    return far


def far_heads(block: Block, tails: Indices) -> npt.NDArray[np.uint64]:
    """Return the addresses of the heads of tails that :func:`copy_to_tails` skipped."""
    indices = block.tail_heads[np.isin(block.tails, tails)]
    # Indices of heads before the block are negative: the sum wraps round.
    offsets = (indices.astype(np.int64) * block.layout.size).view(np.uint64)
    addresses: npt.NDArray[np.uint64] = offsets + np.uint64(block.address)
    return addresses
