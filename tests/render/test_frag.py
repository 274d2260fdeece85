# SPDX-License-Identifier: LGPL-2.1-or-later

"""The text view of a fragmentation report made by hand."""

from msatools.memory.model import Blocker, BlockSize, Frag, FreeList, Needed, PageBlocks
from msatools.render.memstat.breakdowns import frag_blocks
from tests.render.screens import printed
from tests.support.golden import Golden

FRAG = Frag(
    huge_order=9,
    pageblock_order=9,
    free=(
        FreeList(0, "DMA32", 3, (1, 1), (1, 1), 1000, 996),
        FreeList(0, "Normal\x1b[31m", 5, (3, 1), (2, 2), None, None),
        FreeList(1, "Normal", 0, (0, 0), None, None, 0),
    ),
    pageblocks=(PageBlocks(0, "DMA32", "movable", 2, 3, 1000, 21, 1, 1),),
    sizes=(
        BlockSize(
            order=9,
            bytes=1 << 21,
            blocks=2,
            free_blocks=0,
            whole_blocks=0,
            movable_blocks=1,
            movable_pages=500,
            blocked_blocks=1,
            partial_blocks=0,
            blockers=(Blocker("kernel.slab", 1, 1, 21),),
            needed=(Needed(32, 1),),
        ),
    ),
    movable=("user.anon",),
)


def test_golden_text(golden: Golden) -> None:
    golden("frag", printed(frag_blocks(FRAG, 4096)))
