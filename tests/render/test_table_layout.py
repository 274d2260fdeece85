# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which columns a terminal has room for."""

import pytest
from msgspec.structs import replace

from msatools.render.blocks import Column, Span, Table, free_text, line
from msatools.render.device import Device
from msatools.render.plain import columns_of, lay_out, lines, texts
from msatools.render.terminal import breaks, cut, drawn

COLUMNS = (
    Column("KEY"),
    Column("MID", "right", worth=2),
    Column("LOW", "right", worth=1),
    Column("LAST", "right", worth=1),
    free_text("TEXT", least=8),
)
NATURAL = (5, 5, 5, 5, 20)


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (35, (3,)),
        (29, (3,)),
        (28, (2, 3)),
        (22, (2, 3)),
        (21, (1, 2, 3)),
        (3, (1, 2, 3)),
    ],
)
def test_columns_of_least_worth_are_left_out(
    width: int, left_out: tuple[int, ...]
) -> None:
    layout = lay_out(COLUMNS, NATURAL, width, keeps_all=False)
    assert layout.left_out == left_out
    (part,) = layout.parts
    # All room is used, unless the text has as much as it needs.
    used = sum(part.values()) + 2 * (len(part) - 1)
    assert used == max(width, 15) or part[4] == 20


def printed(table: Table, width: int, full: bool = False) -> list[str]:
    return list(drawn([table], Device(width, full=full)))


ROW = ["key", "1", "22", "333", "some words that are long"]
TABLE = Table(COLUMNS, [ROW, ["x" * 9, Span("1", "bad")]])


def test_texts_are_lines_without_their_styles() -> None:
    """Of short rows, wide characters, notes, and rows that are not laid out at once."""
    rows = [
        ROW,
        ["x" * 9, Span("1", "bad")],
        [],
        ["日本", "\x1b", Span("12", "warn"), "", Span("e\u0301", "dim")],
        *(
            [str(number), Span("1", "bad" if number % 7 else None)]
            for number in range(3000)
        ),
    ]
    notes = {1: [line(Span("below", "dim"))], 2999: [line("last")]}
    table = Table(COLUMNS, rows, notes=notes)
    joined = ["".join(span.text for span in one).rstrip() for one in lines(table)]
    assert [text.rstrip() for text in texts(table)] == joined
    assert len(joined) == 1 + len(rows) + len(notes)
    assert joined[4:6] == [
        "",
        "日本       \\x1b   12        e\u0301",
    ]
    styles = [one for one in lines(table) for one in one if one.style == "bad"]
    assert len(styles) == 1 + sum(bool(number % 7) for number in range(3000))


def test_narrow_table() -> None:
    assert printed(TABLE, 44) == [
        "KEY        MID  LOW  LAST  TEXT",
        "key          1   22   333  some words that…",
        "xxxxxxxxx    1",
    ]
    assert printed(TABLE, 30) == [
        "KEY        MID  LOW  TEXT",
        "key          1   22  some wor…",
        "xxxxxxxxx    1",
        "… left out: LAST: -v or a",
        "  wider terminal shows it",
    ]


def test_chosen_columns_are_all_shown() -> None:
    lines = printed(replace(TABLE, keeps_all=True), 24)
    assert lines[:2] == ["KEY        MID  LOW", "key          1   22"]
    assert lines[4:6] == ["KEY        LAST", "key         333"]
    assert lines[8:10] == ["KEY        TEXT", "key        some words t…"]


def test_narrower_table() -> None:
    """It has the same rows, but is used only if the other does not fit."""
    table = replace(TABLE, narrower=Table((Column("N"),), [["1"]]))
    assert printed(table, 30) == ["N", "1"]
    assert printed(table, 80) == printed(TABLE, 80)
    assert printed(table, 30, full=True) == printed(TABLE, 30, full=True)


def test_notes_are_below_their_rows() -> None:
    table = replace(TABLE, notes={0: (line("  a note of so very many words"),)})
    lines = printed(table, 30)
    assert lines[2:4] == ["  a note of so very many words", "xxxxxxxxx    1"]
    lines = printed(table, 29)
    assert lines[2:5] == ["  a note of so very many", "    words", "xxxxxxxxx    1"]


def test_wide_characters_take_two_columns() -> None:
    table = Table((Column("NAME"), Column("N", "right")), [["日本", "1"], ["ab", "2"]])
    assert printed(table, 80) == ["NAME  N", "日本  1", "ab    2"]
    table = Table((free_text("NAME", least=4), Column("N")), [["日本日本", "1"]])
    assert printed(table, 8) == ["NAME   N", "日本…  1"]


@pytest.mark.parametrize(
    ("long", "width", "start", "end"),
    [
        ("abcdef", 6, "abcdef", "abcdef"),
        ("abcdef", 5, "abcd…", "…cdef"),
        ("日本日", 5, "日本…", "…本日"),
        ("日本日", 4, "日…", "…日"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301…", "…e\u0301"),
        ("abc", 1, "…", "…"),
    ],
)
def test_cut(long: str, width: int, start: str, end: str) -> None:
    assert cut(long, width) == start
    assert cut(long, width, "end") == end
    assert columns_of(start) <= width
    assert columns_of(end) <= width


@pytest.mark.parametrize(
    ("line", "width", "parts"),
    [
        ("", 5, [""]),
        ("abc", 3, ["abc"]),
        ("one two three", 8, ["one two", "three"]),
        # Where two spaces are, unless that wastes half of the line.
        ("6.12  vmcore (kdump)  types", 22, ["6.12  vmcore (kdump)", "types"]),
        ("a  bcd efg hij", 10, ["a  bcd efg", "hij"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("    indented words", 12, ["    indented", "words"]),
        ("    abcdefgh", 6, ["    ab", "cdefgh"]),
        ("日本 日本", 6, ["日本", "日本"]),
        # A number stays with its unit, or with what it numbers.
        ("user, 2 % of it", 7, ["user,", "2 % of", "it"]),
        ("slab is 32.9 MiB", 14, ["slab is", "32.9 MiB"]),
        ("waits for pid 49 sh", 14, ["waits for", "pid 49 sh"]),
        ("verdicts: -n COUNT shows", 13, ["verdicts:", "-n COUNT", "shows"]),
        # Words between numbers are no units.
        ("of 12 MiBs", 6, ["of 12", "MiBs"]),
        # A name out of a dump can end with a space, where the line ends.
        ("waits for pid ", 13, ["waits for pid"]),
        ("pid 7 sh ", 8, ["pid 7 sh"]),
    ],
)  # fmt: skip
def test_breaks(line: str, width: int, parts: list[str]) -> None:
    assert [line[start:end] for start, end in breaks(line, width, width)] == parts
