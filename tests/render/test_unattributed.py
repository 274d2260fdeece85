# SPDX-License-Identifier: LGPL-2.1-or-later

from dataclasses import replace

from msatools.memory.unattributed.model import PageWord, UnattributedGroup
from msatools.render.memstat.unattributed import blocks
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
    return printed(blocks(groups, 4096, top))


def test_golden_rows(golden: Golden) -> None:
    """Each class has a table, and stacks are below the rows."""
    owned = replace(GROUP, stack=("__alloc_pages", "leaky_open"))
    guessed = replace(GROUP, class_name="kernel.large_kmalloc")
    some = shown(GROUP, owned, owned, LEFT_OUT, guessed, top=2)
    golden("unattributed", [*shown(GROUP, LEFT_OUT), *some])


def test_text_of_a_dump_is_escaped() -> None:
    evil = replace(GROUP, owner=EVIL, stack=(EVIL,))
    check_escaped(blocks((evil, GROUP), 4096, None), 2)


def test_no_groups_show_nothing() -> None:
    assert shown() == []
