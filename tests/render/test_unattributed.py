# SPDX-License-Identifier: LGPL-2.1-or-later


from msgspec.structs import replace

from msatools.memory.model import Allocator, PageWord, UnattributedGroup
from msatools.render.memstat.breakdowns import unattributed_blocks
from tests.render.screens import EVIL, check_escaped, printed
from tests.support.golden import Golden

GROUP = UnattributedGroup(
    class_name="kernel.unattributed",
    order=3,
    pages=1600,
    blocks=200,
    runs=7,
    node=1,
    refcount=1,
    content="module",
    owner="leaky\x1b",
    examples=(0x1238, 0x1240),
    words=(
        PageWord("module", "leaky_ops [leaky\x1b]", "leaky\x1b", 1234),
        PageWord("slab", "kmalloc-64", "kmalloc-64", 3),
    ),
    stack=None,
)
ALLOCATORS = (
    Allocator(pid=812, comm="insmod\x1b", blocks=199, pages=1592),
    Allocator(pid=7, comm=None, blocks=1, pages=8),
)
OWNED = replace(
    GROUP,
    stack=("__alloc_pages", "leaky_open"),
    gfp_mask=0xCC0,
    gfp_names=("GFP_KERNEL",),
    allocators=ALLOCATORS,
)
UNKNOWN = dict.fromkeys(("order", "blocks", "runs", "node", "refcount", "owner"))
LEFT_OUT = UnattributedGroup(
    class_name="kernel.unattributed",
    pages=9,
    content="not looked into",
    examples=(),
    words=(),
    stack=None,
    **UNKNOWN,
)


def shown(*groups: UnattributedGroup, top: int | None = None) -> list[str]:
    return printed(unattributed_blocks(groups, 4096, top))


def test_golden_rows(golden: Golden) -> None:
    """Each class has a table, and stacks are below the rows."""
    guessed = replace(GROUP, class_name="kernel.large_kmalloc")
    some = shown(GROUP, OWNED, OWNED, LEFT_OUT, guessed, top=2)
    golden("unattributed", [*shown(GROUP, LEFT_OUT), *some])


def test_text_of_a_dump_is_escaped() -> None:
    allocator = replace(ALLOCATORS[0], comm=EVIL)
    evil = replace(OWNED, owner=EVIL, stack=(EVIL,), allocators=(allocator,))
    check_escaped(unattributed_blocks((evil, GROUP), 4096, None), 3)


def test_a_lost_stack_is_said_to_be_lost() -> None:
    lost = replace(OWNED, stack=None, gfp_names=None)
    assert shown(lost)[-2:] == ["  gfp 0xcc0", "  its stack is lost"]


def test_no_groups_show_nothing() -> None:
    assert shown() == []
