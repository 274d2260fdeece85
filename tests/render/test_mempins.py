# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tables of what keeps removed control groups."""

from msatools.memory.by.groups import CgroupGroup, PinningFile
from msatools.render.blocks import Table
from msatools.render.mempins import blocks


def group(name: str, *pins: int, files: int | None = None) -> CgroupGroup:
    return CgroupGroup(
        key=name,
        name=name,
        pages=sum(pins),
        classes={"cache.file": sum(pins)},
        dying=bool(pins),
        pinned_by=tuple(PinningFile(f"{n}", f"/f{n}", n) for n in pins) or None,
        files=len(pins) if files is None else files,
    )


def rows(*groups: CgroupGroup, top: int | None = None) -> list[tuple[object, ...]]:
    (table,) = (block for block in blocks(groups, top) if isinstance(block, Table))
    return [tuple(row) for row in table.rows]


def test_nothing_is_removed() -> None:
    assert list(blocks([group("/a")], 5)) == []


def test_a_row_for_each_file() -> None:
    assert rows(group("/a"), group("/b", 2000, 3), group("/c", 1)) == [
        ("2,000", "/b", "/f2000"),
        ("3", "/b", "/f3"),
        ("1", "/c", "/f1"),
    ]


def test_what_is_left_out_is_said() -> None:
    shown = rows(group("/a", 30, 20, files=7), group("/b", 4), group("/c", 1), top=1)
    assert shown == [
        ("30", "/a", "/f30"),
        ("20", "/a", "/f20"),
        ("", "/a", "5 more"),
        ("5", "2 more"),
    ]
