# SPDX-License-Identifier: LGPL-2.1-or-later

from msatools.render.blocks import Block, Column, Span, Table, Tree, text
from msatools.render.fit import fit


def table(rows: int) -> Table:
    return Table((Column("N"),), [[str(row)] for row in range(rows)])


def fitted(blocks: list[Block], width: int, height: int) -> tuple[list[str], int]:
    lines, left_out = fit(blocks, width, height)
    return ["".join(span.text for span in line).rstrip() for line in lines], left_out


def test_blocks_that_fit_are_whole() -> None:
    assert fitted([text("a"), table(2)], 80, 4) == (["a", "N", "0", "1"], 0)


def test_longest_block_is_cut() -> None:
    blocks = [text("head"), table(2), table(10), text("foot")]
    lines, left_out = fitted(blocks, 80, 9)
    assert lines == ["head", "N", "0", "1", "N", "0", "1", "2", "foot"]
    assert left_out == 7


def test_text_is_folded_between_words() -> None:
    lines, _ = fitted([text("one two, ", "three four")], 9, 9)
    assert lines == ["one two,", "three", "four"]


def test_rows_of_a_long_table_are_counted_as_left_out() -> None:
    lines, left_out = fitted([table(20_000), text("foot")], 80, 5)
    assert lines == ["N", "0", "1", "2", "foot"]
    assert left_out == 19_997


def test_more_blocks_than_lines() -> None:
    lines, left_out = fitted([text(str(n)) for n in range(9)], 80, 3)
    assert (lines, left_out) == (["0", "1", "2"], 6)


def test_text_is_folded_and_keeps_its_styles() -> None:
    lines, left_out = fit([text("abcd", Span("efghij", "bad"))], 5, 9)
    assert [[span.text for span in line] for line in lines] == [
        ["abcd", "e"],
        ["fghij"],
    ]
    assert [line[-1].style for line in lines] == ["bad", "bad"]
    assert left_out == 0


def test_trees_are_cut_and_not_folded() -> None:
    lines, _ = fitted([Tree("root", (Tree("a long label"),))], 9, 9)
    assert lines == ["root", "`- a lon…"]


def test_what_a_narrow_table_lacks_is_said_even_if_rows_are_cut() -> None:
    columns = (Column("A"), Column("B", worth=0))
    wide = Table(columns, [["x" * 30, "y" * 30]] * 9)
    lines, left_out = fitted([text("head"), wide, text("foot")], 50, 6)
    assert lines == [
        *("head", "A", "x" * 30, "x" * 30),
        "… left out: B: -v or a wider terminal shows it",
        "foot",
    ]
    assert left_out == 7
