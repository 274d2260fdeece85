# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables that break the classes down, of groups made by hand."""

from typing import Annotated

from msatools.memory.model import DETAIL, PageGroup
from msatools.render import plain
from msatools.render.memstat.breakdowns import groups_table
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
