# SPDX-License-Identifier: LGPL-2.1-or-later

from dataclasses import replace
from io import StringIO

from msatools.memory.unattributed.model import UnattributedGroup, Word
from msatools.render import plain
from msatools.render.unattributed import blocks

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
        Word("module", "leaky_ops [leaky\x1b]", "leaky\x1b", 1234),
        Word("slab", "kmalloc-64", "kmalloc-64", 3),
    ),
    stack=None,
)
LEFT_OUT = UnattributedGroup(
    class_name="kernel.unattributed",
    order=None,
    pages=9,
    blocks=None,
    runs=None,
    node=None,
    refcount=None,
    content="not looked into",
    owner=None,
    examples=(),
    words=(),
    stack=None,
)


def shown(*groups: UnattributedGroup, top: int | None = None) -> list[str]:
    out = StringIO()
    plain.show(blocks(groups, 4096, top), out)
    return out.getvalue().splitlines()


def test_a_row_a_group() -> None:
    _, title, head, first, second = shown(GROUP, LEFT_OUT)
    assert title == "Pages that no owner explains"
    assert head.split()[:8] == [
        *("PAGES", "SIZE", "ORDER", "BLOCKS", "RUNS", "NODE", "REFS", "PFN"),
    ]
    assert first.split()[:9] == [
        "1,600",
        "6.2",
        "MiB",
        "3",
        "200",
        "7",
        "1",
        "1",
        "0x1238",
    ]
    assert "leaky_ops [leaky\\x1b] (1,234), kmalloc-64 (3)" in first
    assert second.split() == ["9", "36", "KiB", *"-----", "-", "not", "looked", "into"]


def test_nothing_from_a_dump_reaches_the_terminal_as_it_is() -> None:
    assert "\x1b" not in "".join(shown(GROUP, replace(GROUP, stack=("f\x1b",))))


def test_some_rows() -> None:
    lines = shown(GROUP, GROUP, LEFT_OUT, top=1)
    assert lines[-1].split() == ["1,609", "6.3", "MiB", "2", "more"]


def test_stacks_come_below_the_rows() -> None:
    owned = replace(GROUP, stack=("__alloc_pages", "leaky_open"))
    lines = shown(GROUP, owned, owned, top=2)
    assert lines[-2:] == ["Row 2 was allocated by", "  __alloc_pages < leaky_open"]


def test_classes_have_tables_of_their_own() -> None:
    guessed = replace(GROUP, class_name="kernel.large_kmalloc")
    titles = [line for line in shown(GROUP, guessed) if "ages " in line]
    assert len(titles) == 2
    assert "large kmalloc" in titles[1]


def test_nothing() -> None:
    assert shown() == []
