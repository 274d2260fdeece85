# SPDX-License-Identifier: LGPL-2.1-or-later

import pytest

from msatools.render.blocks import (
    Block,
    Column,
    Items,
    More,
    Span,
    Table,
    Tree,
    line,
    term,
)
from msatools.render.device import Device
from msatools.render.terminal import STYLES, Drawing, drawn, fit


def table(rows: int) -> Table:
    return Table((Column("N"),), [[str(row)] for row in range(rows)])


def fitted(blocks: list[Block], width: int, height: int) -> tuple[list[str], int]:
    drawing = Drawing(Device(width))
    lines, left_out = fit(blocks, drawing, height)
    return list(map(drawing.styled, lines)), left_out


def test_longest_block_is_cut() -> None:
    blocks = [line("head"), table(2), table(10), line("foot")]
    lines, left_out = fitted(blocks, 80, 9)
    assert lines == ["head", "N", "0", "1", "N", "0", "1", "2", "foot"]
    assert left_out == 7


def test_text_is_folded_and_keeps_its_styles() -> None:
    spans = line("abcd", Span("efghij", "bad"))
    lines, left_out = fit([spans], Drawing(Device(5, colours="256")), 9)
    assert [[piece.text for piece in line] for line in lines] == [
        ["abcd", "e"],
        ["fghij"],
    ]
    assert [line[-1].style for line in lines] == [STYLES["bad"]] * 2
    assert left_out == 0


def test_trees_are_cut_and_not_folded() -> None:
    lines, _ = fitted([Tree("root", (Tree("a long label"),))], 9, 9)
    assert lines == ["root", "`-- a lo…"]


def test_what_a_narrow_table_lacks_is_said_even_if_rows_are_cut() -> None:
    columns = (Column("A"), Column("B", worth=0))
    wide = Table(columns, [["x" * 30, "y" * 30]] * 9)
    lines, left_out = fitted([line("head"), wide, line("foot")], 50, 6)
    assert lines == [
        *("head", "A", "x" * 30, "x" * 30),
        "… left out: B: -v or a wider terminal shows it",
        "foot",
    ]
    assert left_out == 7


@pytest.mark.parametrize("left", [-5, 0, 2])
def test_items_without_room_are_counted(left: int) -> None:
    """Also if there was room for more of them than there are."""
    items = [(line(f"root {n}"), *(line("task") for _ in range(9))) for n in range(5)]
    lines = list(drawn([Items(items, More("root", left))], Device(80, 24)))
    roots = sum(line.startswith("root") for line in lines)
    assert 0 < roots < 5
    more = 5 - roots + max(left, 0)
    assert lines[-1] == f"… {more} more roots: -n COUNT shows them"


def test_lists_hang_below_what_a_name_means() -> None:
    lines = [*drawn([term("name", 6, "what it means, at great length")], Device(34))]
    assert lines == ["  name    what it means, at great", "          length"]


def test_items_without_room_are_named() -> None:
    items = [(line(f"verdict {n}"), *(line("fact") for _ in range(9))) for n in "abcd"]
    block = Items(items, More("verdict"), [["deadlock"], ["io"], ["herd"], ["io"]])
    assert [*drawn([block], Device(80, 20))][-1] == (
        "… 3 more verdicts (2 io, herd): -n COUNT shows them"
    )
    # An item may stand for several things.
    block = Items(items, More("verdict"), [["deadlock"], ["io"], ["herd"], ["io", "a"]])
    assert [*drawn([block], Device(80, 20))][-1] == (
        "… 4 more verdicts (2 io, herd, a): -n COUNT shows them"
    )


@pytest.mark.parametrize(("least", "shown"), [(1, 1), (3, 3)])
def test_some_items_need_no_room(least: int, shown: int) -> None:
    items = [(line(f"verdict {n}"), *(line("fact") for _ in range(9))) for n in "abcd"]
    block = Items(items, More("verdict"), least=least)
    lines = [*drawn([block], Device(80, 20))]
    assert sum(line.startswith("verdict") for line in lines) == shown
    assert lines[-1].startswith(f"… {4 - shown} more verdict")


@pytest.mark.parametrize("left", [-5, 2])
def test_rows_without_room_are_counted(left: int) -> None:
    many = Table((Column("N"),), [[str(n)] for n in range(50)], More("row", left))
    lines = list(drawn([many], Device(80, 24)))
    shown = sum(line.strip().isdigit() for line in lines)
    assert lines[-1].startswith(f"… {50 - shown + max(left, 0)} more rows: ")
