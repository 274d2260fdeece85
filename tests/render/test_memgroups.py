# SPDX-License-Identifier: LGPL-2.1-or-later

"""Break-downs of the classes as tables, with made-up groups."""

from dataclasses import dataclass, field

import pytest

from msatools.memory.model import DETAIL, Group
from msatools.render.blocks import Span
from msatools.render.memgroups import groups_table


@dataclass(frozen=True)
class Odd(Group):
    """A group of which more is known."""

    pid: int | None = None
    held_pages: int | None = None
    most_bytes: int | None = None
    dying: bool | None = None
    names: tuple[str, ...] | None = None
    never: int | None = None
    hidden: int | None = field(default=None, metadata=DETAIL)


CLASSES = {"user.anon": 10, "cache.file": 2000, "kernel.slab": 0}


def lines(by: str, groups: list[Group], top: int | None = None) -> list[list[str]]:
    """The headers, then the cells of each row."""
    table = groups_table(by, groups, 4096, top)
    rows = [
        [cell.text if isinstance(cell, Span) else cell for cell in row]
        for row in table.rows
    ]
    return [[column.header for column in table.columns], *rows]


def test_group_is_a_row() -> None:
    assert lines("file", [Group("1", "/a b", 2010, CLASSES)]) == [
        ["PAGES", "SIZE", "CLASSES", "FILE"],
        ["2,010", "7.9 MiB", "cache.file 2,000, user.anon 10", "/a b"],
    ]


def test_nodes_and_zones_are_columns() -> None:
    groups = [Group(str(n), f"Node {n}", 2010, CLASSES) for n in (0, 1)]
    assert lines("node", groups, top=1) == [
        ["CLASS", "Node 0", "Node 1"],
        ["user.anon", "10", "10"],
        ["cache.file", "2,000", "2,000"],
        ["total", "2,010", "2,010"],
    ]


def test_what_more_is_known_has_columns() -> None:
    known = Odd("1", "one", 1, {}, 12345, 12345, 8192, True, ("a", "b"), None, 7)
    assert lines("odd", [known, Odd("2", "two", 1, {})]) == [
        ["PAGES", "SIZE", "PID", "HELD", "MOST", "DYING", "NAMES", "CLASSES", "ODD"],
        ["1", "4 KiB", "12345", "12,345", "8 KiB", "yes", "a, b", "", "one"],
        ["1", "4 KiB", "-", "-", "-", "-", "-", "", "two"],
    ]


def test_groups_of_several_kinds_share_the_columns() -> None:
    groups = [Group("1", "one", 2, {}), Odd("2", "two", 1, {}, dying=False)]
    assert [row[2] for row in lines("odd", groups)] == ["DYING", "-", "no"]


@pytest.mark.parametrize("top", [1, 2])
def test_rest_is_summed_up(top: int) -> None:
    groups = [Odd(str(n), str(n), 1000, {}, pid=n) for n in range(4)]
    rows = lines("process", list(groups), top)
    assert len(rows) == 1 + top + 1
    pages = f"{1000 * (4 - top):,}"
    assert rows[-1] == [pages, rows[-1][1], "", "", f"{4 - top} more"]


def test_all_rows_if_they_are_not_more() -> None:
    groups: list[Group] = [Group(str(n), str(n), 1, {}) for n in range(3)]
    assert len(lines("file", groups, top=3)) == len(lines("file", groups)) == 4
    assert lines("file", []) == [["PAGES", "SIZE", "CLASSES", "FILE"]]


def test_only_the_largest_classes_are_named() -> None:
    classes = {f"class.{n}": n for n in range(6)}
    (_, row) = lines("file", [Group("1", "one", 15, classes)])
    assert row[2] == "class.5 5, class.4 4, class.3 3, ..."
