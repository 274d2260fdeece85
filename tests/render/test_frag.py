# SPDX-License-Identifier: LGPL-2.1-or-later

"""How memory is cut up, made by hand and as text."""

import io

from msatools.memory.frag.model import (
    Blocker,
    BlockSize,
    Frag,
    FreeList,
    Needed,
    PageBlocks,
)
from msatools.render import plain
from msatools.render.frag import blocks

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

SHOWN = r"""
Free blocks by order
NODE  ZONE            0  1  PAGES  NO 2.0 MiB  FRAGMENTATION  KERNEL SAYS
   0  DMA32           1  1      3     100.0 %          0.996  ok
   0  Normal\x1b[31m  3  1      5           -              -  0: +1, 1: -1
   1  Normal          0  0      0           -          0.000  - (lost)

Page blocks of 2.0 MiB by migrate type
NODE  ZONE   TYPE     BLOCKS  FREE PAGES  MOVABLE  UNMOVABLE  BLOCKS WITH UNMOVABLE  WITH BOTH
   0  DMA32  movable       2           3    1,000         21                      1          1

What keeps blocks from being free
BLOCKS OF                      2.0 MiB
free                                 0
one huge page                        0
movable pages only                   1
blocked by others                    1
all                                  2
pages to move in movable ones      500

What is in the 1 blocked ones of 2.0 MiB
CLASS        BLOCKS  ALONE  PAGES
kernel.slab       1      1     21

Blocks that would be free but for so many pages
PAGES  2.0 MiB
17-32        1
"""  # noqa: E501


def test_text() -> None:
    out = io.StringIO()
    plain.show(blocks(FRAG, 4096), out)
    assert out.getvalue() == SHOWN
