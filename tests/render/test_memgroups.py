# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables that break the classes down, of groups made by hand."""

from typing import Annotated

import pytest

from msatools.memory.model import DETAIL, PageGroup, ProcessGroup
from msatools.render import plain
from msatools.render.device import Device
from msatools.render.memstat.breakdowns import groups_table
from msatools.render.terminal import drawn
from tests.support.golden import Golden


class Odd(PageGroup, frozen=True):
    """A group with more columns."""

    pid: int | None = None
    held_pages: int | None = None
    most_bytes: int | None = None
    dying: bool | None = None
    names: tuple[str, ...] | None = None
    never: int | None = None
    hidden: Annotated[int | None, DETAIL] = None


CLASSES = {"user.anon": 10, "cache.file": 2000, "kernel.slab": 0}


def shown(by: str, groups: list[PageGroup], top: int | None = None) -> list[str]:
    lines = plain.lines(groups_table(by, groups, 4096, top))
    return ["".join(span.text for span in line).rstrip() for line in lines]


def test_golden_tables(golden: Golden) -> None:
    """Nodes and zones are columns; so are the other members of groups."""
    known = Odd("1", "one", 1, {}, 12345, 12345, 8192, True, ("a", "b"), None, 7)
    classes = {f"class.{n}": n for n in range(6)}
    golden(
        "memgroups",
        [
            *shown("file", [PageGroup("1", "/a b", 2010, CLASSES)]),
            *shown("file", [PageGroup("1", "many classes", 15, classes)]),
            *shown("file", []),
            *shown("node", [PageGroup(n, f"Node {n}", 2010, CLASSES) for n in "01"], 1),
            *shown("odd", [known, Odd("2", "two", 1, {})]),
            *shown(
                "odd",
                [PageGroup("1", "one", 2, {}), Odd("2", "two", 1, {}, dying=False)],
            ),
        ],
    )


@pytest.mark.parametrize(("pages", "is_kept"), [(255, False), (256, True)])
def test_much_swap_is_worth_more_than_shares_of_memory(
    pages: int, is_kept: bool
) -> None:
    """A report that says who is on swap must not lack the column on 80 columns."""
    group = ProcessGroup(
        key="1",
        name="a program with a name",
        pages=2010,
        classes=CLASSES,
        pid=1,
        rss_pages=1024,
        pss_bytes=8 << 20,
        anon_pages=1000,
        private_pages=1000,
        hugetlb_pages=0,
        swap_pages=pages,
        page_table_bytes=1 << 16,
    )
    header = next(drawn([groups_table("process", [group], 4096, None)], Device(70)))
    assert (" SWAP " in header) == is_kept
    assert (" ANON " in header) != is_kept


@pytest.mark.parametrize("top", [1, 2, 3, 4, None])
def test_rest_is_summed_up(top: int | None) -> None:
    groups: list[PageGroup] = [Odd(str(n), str(n), 1000, {}, pid=n) for n in range(4)]
    lines = shown("process", groups, top)
    rows = 4 if top is None else top
    assert len(lines) == 1 + rows + (rows < 4)
    if rows < 4:
        rest = lines[-1].split()
        assert (rest[0], rest[-2:]) == (
            f"{1000 * (4 - rows):,}",
            [str(4 - rows), "more"],
        )
