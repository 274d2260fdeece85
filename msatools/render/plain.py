# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lays out blocks as lines, in columns of fixed width."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat, zip_longest
from typing import cast

from msgspec import Struct

from msatools.render.blocks import (
    Advice,
    Block,
    Cell,
    CellColumns,
    Chart,
    Column,
    Items,
    Mark,
    Span,
    Style,
    Table,
    Text,
    Tree,
    escape,
)

# --- Decides which columns of a table a terminal has room for, and how wide they are.


GAP = "  "

Part = Mapping[int, int]
"""Columns printed side by side: maps the index of each to its width."""


class TableLayout(Struct, frozen=True):
    """The columns of a table to show, and their widths."""

    parts: tuple[Part, ...]
    """Parts of the table, below each other; one unless all columns must be shown."""

    left_out: tuple[int, ...] = ()
    """Columns that are not shown."""


def lay_out(
    columns: Sequence[Column],
    natural: Sequence[int],
    width: int | None,
    *,
    keeps_all: bool,
) -> TableLayout:
    """
    Choose columns, and the width of each, so that a table is at most *width* wide.

    Long cells become shorter first, then the columns of least worth are left out. If
    only columns that are always shown are left, the table may be wider all the same.

    :param natural: Widths of the columns if nothing is cut.
    :param width: Columns of the terminal; ``None`` for no limit.
    :param keeps_all: Whether to divide the table rather than to leave columns out.
    """
    if width is None or _total(natural) <= width:
        return TableLayout((dict(enumerate(natural)),))
    least = [
        wide if column.least is None else min(wide, column.least)
        for column, wide in zip(columns, natural, strict=True)
    ]
    if keeps_all:
        divided = _divided(columns, least, width)
        return TableLayout(
            tuple(_widened(part, natural, least, width) for part in divided)
        )
    kept = list(range(len(columns)))
    for index in _by_worth(columns):
        if _total(least[i] for i in kept) <= width:
            break
        kept.remove(index)
    left_out = tuple(i for i in range(len(columns)) if i not in kept)
    return TableLayout((_widened(kept, natural, least, width),), left_out)


def _total(widths: Iterable[int]) -> int:
    all_widths = list(widths)
    return sum(all_widths) + len(GAP) * (len(all_widths) - 1)


def _by_worth(columns: Sequence[Column]) -> list[int]:
    """Return the indexes of columns that may be left out, the first to go first."""
    ranked = [
        (column.worth, -index)
        for index, column in enumerate(columns)
        if column.worth is not None
    ]
    return [-index for _, index in sorted(ranked)]


def _widened(
    part: Sequence[int], natural: Sequence[int], least: Sequence[int], width: int
) -> Part:
    """Return the widths of a part's columns; cut columns share the spare width."""
    room = max(width - _total(least[i] for i in part), 0)
    wanting = sorted((natural[i] - least[i], i) for i in part if natural[i] > least[i])
    widths = {i: least[i] for i in part}
    for number, (more, index) in enumerate(wanting):
        extra = min(more, room // (len(wanting) - number))
        widths[index] += extra
        room -= extra
    return widths


def _divided(
    columns: Sequence[Column], least: Sequence[int], width: int
) -> list[Sequence[int]]:
    """Divide the columns into parts, each of which has the keys."""
    keys = [i for i, column in enumerate(columns) if column.is_key] or [0]
    parts: list[list[int]] = [[]]
    for index in range(len(columns)):
        if index in keys:
            continue
        with_it = [*keys, *parts[-1], index]
        if parts[-1] and _total(least[i] for i in with_it) > width:
            parts.append([])
        parts[-1].append(index)
    return [sorted((*keys, *part)) for part in parts]


# --- Lays out blocks as lines in plain columns, of any width: for pipes and files.
#
# msatools.render.terminal fits them to a terminal.


Line = tuple[Span, ...]
"""The pieces of one line, escaped and padded, from left to right."""


def lines(block: Block) -> Iterator[Line]:
    """Lay out a block; nothing of it is left out or cut."""
    if isinstance(block, Text):
        yield spans(block)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Items):
        yield from map(spans, chain(*block.items, block.more.lines))
    elif isinstance(block, Chart):
        for row in block.rows:
            yield tuple(map(span, row))
    else:
        yield from _tree(block, first="", rest="")


def texts(block: Block) -> Iterator[str]:
    """Lay out a block as :func:`lines` does, as text without styles."""
    if isinstance(block, Table):
        yield from _table_texts(block)
    else:
        yield from map(_joined, lines(block))


def _joined(line: Line) -> str:
    return "".join([span.text for span in line])


def spans(text: Text) -> Line:
    """Return the pieces of a text, escaped."""
    return tuple(map(span, text.spans))


def span(cell: Cell) -> Span:
    """Return a cell as an escaped span."""
    if isinstance(cell, str):
        return Span(escape(cell))
    if isinstance(cell, Mark):
        # The text of a mark does not come from a dump.
        return cell
    if isinstance(cell, Advice):
        return cell
    return Span(escape(cell.text), cell.style)


def columns_of(text: str) -> int:
    """Return the number of terminal columns that a text takes.

    >>> columns_of("abc"), columns_of("日本"), columns_of("e\\u0301")
    (3, 4, 1)
    """
    # Almost all text is ASCII but for the … of cut text; this saves importing rich.
    if text.isascii() or text.replace("…", "").isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


# --- tables


def _table_texts(table: Table) -> Iterator[str]:
    """Yield the lines of :func:`_table` without their styles, which take time."""
    measured = MeasuredTable(table)
    layout = RowLayout(table.columns, measured.widths)
    yield layout.text(measured.headers)
    rows = chain.from_iterable(map(layout.texts, measured.batches()))
    if not table.notes:
        yield from rows
    for index, row in enumerate(rows):
        yield row
        yield from map(_joined, map(spans, table.notes.get(index, ())))
    if table.more is not None:
        yield from map(_joined, map(spans, table.more.lines))


def _table(table: Table) -> Iterator[Line]:
    measured = MeasuredTable(table)
    row_line = RowLayout(table.columns, measured.widths)
    yield row_line(measured.headers, ["title"] * len(table.columns))
    for index, (texts, styles) in enumerate(measured.rows()):
        yield row_line(texts, styles)
        yield from map(spans, table.notes.get(index, ()))
    if table.more is not None:
        yield from map(spans, table.more.lines)


Styles = Sequence[Style | None]
"""The style of each cell of a row; empty if none has one."""

_SEPARATOR = "\x1f"
_AT_ONCE = 1024
"""Rows that are measured at once."""


class MeasuredTable:
    """The texts of a table, and the widths of its columns if nothing is cut."""

    def __init__(self, table: Table) -> None:
        self.headers = [column.header for column in table.columns]
        self.widths = list(map(columns_of, self.headers))
        # The cells of a table with 40,000 rows take 100 MB, their texts a tenth.
        # Escaped texts do not contain the separator.
        self._batches: list[list[str]] = []
        """Batches of rows; of each batch, the joined texts of every column."""

        self._count = 0
        self._styles: dict[int, list[Style | None]] = {}
        """Maps the index of each row with styles to the styles of its cells."""

        for columns in _batches(table.rows):
            self._add(columns)

    def _add(self, columns: Sequence[Sequence[Cell]]) -> None:
        """Add rows, column by column: there may be very many."""
        count = len(columns[0])
        joined: list[str] = []
        for index, header_width in enumerate(self.widths):
            # A row may have fewer cells.
            cells = columns[index] if index < len(columns) else [""] * count
            texts = self._texts(cells, index)
            column = _SEPARATOR.join(texts)
            # Most columns are ASCII, for which len() is right and fast.
            measure = len if column.isascii() else columns_of
            self.widths[index] = max(header_width, *map(measure, texts))
            joined.append(column)
        self._batches.append(joined)
        self._count += count

    def _texts(self, cells: Sequence[Cell], index: int) -> Sequence[str]:
        """Return the escaped texts of a column's cells, and note their styles."""
        texts = cast(Sequence[str], cells)
        if not {*map(type, cells)} <= {str}:
            self._note_styles(cells, index)
            texts = list(map(cell_text, cells))
        return texts if "".join(texts).isprintable() else list(map(escape, texts))

    def _note_styles(self, cells: Iterable[Cell], index: int) -> None:
        """Note the styles of a column's cells, in the rows being added."""
        for row, cell in enumerate(cells, self._count):
            if not isinstance(cell, str) and cell.style:
                styles = self._styles.setdefault(row, [None] * len(self.widths))
                styles[index] = cell.style

    def __len__(self) -> int:
        return self._count

    def rows(self) -> Iterator[tuple[list[str], Styles]]:
        """Yield the cells of each row, one for each column."""
        for row, texts in enumerate(self.texts()):
            yield texts, self._styles.get(row, ())

    def texts(self) -> Iterator[list[str]]:
        """Yield the texts of the cells of each row, one for each column."""
        for columns in self.batches():
            yield from map(list, zip(*columns, strict=True))

    def batches(self) -> Iterator[list[list[str]]]:
        """Yield batches of rows, each as a list of texts for every column."""
        for columns in self._batches:
            yield [column.split(_SEPARATOR) for column in columns]


def _batches(rows: Sequence[Sequence[Cell]]) -> Iterator[Sequence[Sequence[Cell]]]:
    """Yield batches of rows, each as a sequence of cells for every column."""
    if isinstance(rows, CellColumns):
        yield from rows.batches()
        return
    left = iter(rows)
    while batch := list(islice(left, _AT_ONCE)):
        yield list(zip_longest(*batch, fillvalue="")) or [[""] * len(batch)]


class RowLayout:
    """Puts the cells of a row beside each other; none is wider than its column."""

    def __init__(self, columns: Sequence[Column], widths: Sequence[int]) -> None:
        self._widths = widths
        self._are_right = [column.align == "right" for column in columns]
        fields = zip(self._are_right, widths, strict=True)
        self._format = GAP.join(
            f"{{:{'>' if is_right else '<'}{width}}}" for is_right, width in fields
        ).format

    def texts(self, columns: Sequence[Sequence[str]]) -> Iterator[str]:
        """Return rows as lines without styles, from the texts of each column."""
        if not all(map(str.isascii, map("".join, columns))):
            return map(self.text, zip(*columns, strict=True))
        # The usual case; there may be very many rows.
        padded = [
            map(str.rjust if is_right else str.ljust, texts, repeat(width))
            for texts, is_right, width in zip(
                columns, self._are_right, self._widths, strict=True
            )
        ]
        return map(GAP.join, zip(*padded, strict=True))

    def text(self, texts: Sequence[str]) -> str:
        """Return a row as a line without styles."""
        line = self._format(*texts)
        return line if line.isascii() else _joined(self(texts))

    def __call__(self, texts: Sequence[str], styles: Styles = ()) -> Line:
        """Return a row as a line."""
        if not styles:
            line = self._format(*texts)
            if line.isascii():
                # The usual case; there may be very many rows.
                return (Span(line),)
        gaps = [
            " " * (width - columns_of(text))
            for text, width in zip(texts, self._widths, strict=True)
        ]
        all_styles = styles or [None] * len(texts)
        pieces: list[Span] = []
        before = ""
        for text, style, gap, is_right in zip(
            texts, all_styles, gaps, self._are_right, strict=True
        ):
            if is_right:
                before += gap
            if style is None:
                before += text
            else:
                pieces += (Span(before), Span(text, style))
                before = ""
            before += GAP if is_right else gap + GAP
        return (*pieces, Span(before.rstrip(" ")))


# --- trees


def _tree(tree: Tree, first: str, rest: str) -> Iterator[Line]:
    """Yield each line of a tree."""
    yield Span(first, "dim"), span(tree.label)
    for i, child in enumerate(tree.children, 1):
        is_last = i == len(tree.children)
        yield from _tree(
            child,
            first=rest + ("`- " if is_last else "|- "),
            rest=rest + ("   " if is_last else "|  "),
        )


# --- Sorts the rows of a table by a column as it is shown, whatever the command.


_MARKED = re.compile(r"[~<>=?+]?(-?[\d,]+(?:\.\d+)?)\s*([A-Za-z%]*)(.*)")
_SCALES = {
    "": 1.0,
    "%": 1.0,
    **{unit: float(1 << 10 * n) for n, unit in enumerate(("KiB", "MiB", "GiB"), 1)},
    **{unit: float(1000**n) for n, unit in enumerate("KMGT", 1)},
    "TiB": float(1 << 40),
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_CLOCK = re.compile(r"\d+(?::\d\d)+(?:\.\d+)?")
_MISSING = float("-inf")


def cell_text(cell: Cell) -> str:
    """Return the text of a cell."""
    return cell if isinstance(cell, str) else cell.text


def sort_order(cells: Sequence[Cell], *, reverse: bool) -> list[int]:
    """Return the indexes of cells in order: numbers descending, other text ascending.

    Cells without a value come last in either order.

    :param reverse: Whether the order is the other way round.
    """
    texts = [cell_text(cell).strip() for cell in cells]
    numbers = [number_in(text) for text in texts]
    shown = [text for text in texts if text not in ("", "-")]
    if shown and all(number_in(text) is not None for text in shown):
        known = [_MISSING if number is None else number for number in numbers]
        order = sorted(range(len(texts)), key=lambda n: known[n], reverse=not reverse)
    else:
        order = sorted(range(len(texts)), key=lambda n: texts[n], reverse=reverse)
    # Cells without a value come last either way; the sort is stable.
    return sorted(order, key=lambda n: texts[n] in ("", "-"))


def number_in(text: str) -> float | None:
    """
    Return the number in a cell, in bytes, seconds or units; ``None`` if there is none.

    >>> number_in("1.5 MiB"), number_in("~2m03s"), number_in("0:01.50")
    (1572864.0, 123.0, 1.5)
    >>> number_in("4.1K"), number_in("<89.5"), number_in("1,024"), number_in("D")
    (4100.0, 89.5, 1024.0, None)
    """
    if _CLOCK.fullmatch(text):
        seconds = 0.0
        for part in text.split(":"):
            seconds = 60 * seconds + float(part)
        return seconds
    total, found = 0.0, False
    # A duration has several parts: 2m03s.
    while text and (matched := _MARKED.fullmatch(text)) is not None:
        number, unit, rest = matched.groups()
        if unit not in _SCALES:
            return None
        total += float(number.replace(",", "")) * _SCALES[unit]
        text, found = rest.strip(), True
        if not text[:1].isdigit():
            break
    return total if found and not text else None
