# SPDX-License-Identifier: LGPL-2.1-or-later

"""The state of the live screen that keys set: order, filter, columns, scrolling.

Nothing here reads a kernel or writes to the terminal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec.structs import replace

from msatools.legends import Legend
from msatools.render.blocks import Block, Cell, Span, Table, line
from msatools.render.plain import cell_text, sort_order

KEYS = (
    ("left, right", "sort by the next column to that side"),
    ("r", "reverse the order"),
    ("f or /", "show only rows with a text (Enter; empty: all)"),
    ("c", "choose columns: NAME,... (Enter; empty: the usual ones)"),
    ("up, down", "scroll by a row; also k, j"),
    ("PgUp, PgDn", "scroll by a screen; Home, End: to the ends"),
    ("p or space", "pause, and go on"),
    ("Esc", "undo all of that"),
    ("?", "this help, and what the names mean; again: back"),
    ("q", "quit"),
)

_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "pgup",
    "\x1b[6~": "pgdn",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "k": "up",
    "j": "down",
    ">": "right",
    "<": "left",
    " ": "p",
    "/": "f",
    "\x1b": "esc",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "back",
    "\x08": "back",
}
"""Maps what terminals send (xterm's ctlseqs) to names of keys."""

_LONGEST = max(map(len, _SEQUENCES))
_FAR = 1 << 30


def split_keys(data: str) -> Iterator[str]:
    """Yield the characters or escape sequence of each key in terminal input."""
    while data:
        # The longest sequence first: Esc alone is also the start of sequences.
        for length in range(min(_LONGEST, len(data)), 0, -1):
            if data[:length] in _SEQUENCES or length == 1:
                yield data[:length]
                data = data[length:]
                break


class LiveView:
    """The state of a live screen; selects and sorts the rows of a report.

    :param choose_columns: Sets the columns of the command; returns an error message, or
        ``None``. If not given, keys choose among the columns of the table.
    """

    def __init__(
        self,
        legend: Legend = (),
        choose_columns: Callable[[str], str | None] | None = None,
    ) -> None:
        self._legend = legend
        self._choose = choose_columns
        self._rows: dict[int, Sequence[Sequence[Cell]]] = {}
        self._headers: tuple[str, ...] = ()
        self.is_paused = False
        self.most = _FAR
        """Maximum of :attr:`offset`, once a report was shown."""

        self.page = 10
        """Lines that PgUp and PgDn scroll by."""
        self._reset()

    def _reset(self) -> None:
        self._sort: str | None = None
        self._is_reversed = False
        self._filter = ""
        self._columns: tuple[str, ...] = ()
        self._asks: Literal["filter", "columns", None] = None
        self._typed = ""
        self._complaint = ""
        self.offset = 0
        self.shows_help = False

    def sampled(self) -> None:
        """Drop the cached rows of the previous sample."""
        self._rows.clear()

    def leave(self) -> None:
        """Show the report from its start, for the last print when the screen ends."""
        self.offset, self.shows_help, self._asks = 0, False, None

    # --- keys

    def press(self, key: str) -> bool:
        """Handle a key; return whether it requests to quit."""
        name = _SEQUENCES.get(key, key)
        self._complaint = ""
        if self._asks is not None:
            self._type(key, name)
        elif name in ("q", "Q", ""):
            return True
        else:
            self._do(name)
        return False

    def _do(self, name: str) -> None:
        steps = {"up": -1, "down": 1, "pgup": -self.page, "pgdn": self.page}
        steps |= {"home": -_FAR, "end": _FAR}
        if name in steps:
            self.offset = min(max(self.offset + steps[name], 0), self.most)
        elif name in ("left", "right"):
            self._sort_beside(1 if name == "right" else -1)
        elif name == "r":
            self._is_reversed = not self._is_reversed
        elif name == "p":
            self.is_paused = not self.is_paused
        elif name == "?":
            self.shows_help, self.offset = not self.shows_help, 0
        elif name == "f":
            self._asks, self._typed = "filter", self._filter
        elif name == "c":
            self._asks, self._typed = "columns", ""
        elif name == "esc":
            if self._columns and self._choose is not None:
                self._choose("")
            self._reset()

    def _sort_beside(self, step: int) -> None:
        if not self._headers:
            return
        if self._sort in self._headers:
            at = self._headers.index(self._sort) + step
        else:
            at = 0 if step > 0 else -1
        self._sort = self._headers[at % len(self._headers)]

    def _type(self, key: str, name: str) -> None:
        if name == "enter":
            asked, self._asks = self._asks, None
            if asked == "filter":
                self._filter, self.offset = self._typed, 0
            else:
                self._show_columns(self._typed)
        elif name == "esc":
            self._asks = None
        elif name == "back":
            self._typed = self._typed[:-1]
        elif key.isprintable():
            self._typed += key

    def _show_columns(self, words: str) -> None:
        names = tuple(name.strip() for name in words.split(",") if name.strip())
        if self._choose is not None:
            self._complaint = self._choose(",".join(names)) or ""
            if not self._complaint:
                self._columns = names
            return
        by_name = {header.lower(): header for header in self._headers}
        unknown = [name for name in names if name.lower() not in by_name]
        if unknown:
            shown = ", ".join(self._headers)
            self._complaint = f"unknown column {unknown[0]!r}; choose from {shown}"
        else:
            self._columns = tuple(by_name[name.lower()] for name in names)

    # --- what is shown

    @property
    def status(self) -> str:
        """The state of the view, for the last line; empty if nothing was changed."""
        if self._asks == "filter":
            return f"rows with: {self._typed}_"
        if self._asks == "columns":
            return f"columns: {self._typed}_"
        order = f"by {self._sort}" if self._sort else ""
        if self._is_reversed:
            order = f"{order or 'order'} reversed"
        words = (
            self._complaint,
            "paused" if self.is_paused else "",
            order,
            f"rows with {self._filter!r}" if self._filter else "",
            f"from row {self.offset + 1}" if self.offset else "",
        )
        return ", ".join(filter(None, words))

    def help_blocks(self) -> Iterator[Block]:
        """Yield the help on keys, and the legend of the command's output."""
        yield line(Span("Keys", "title"))
        for key, what in KEYS:
            yield line(f"  {key:12}  {what}")
        if self._legend:
            from msatools.render.legend import legend_blocks

            yield line()
            yield from legend_blocks(self._legend)

    def shown(self, blocks: Sequence[Block]) -> tuple[list[Block], bool]:
        """Return the blocks to show, and whether there is a table to scroll.

        Sorting, filtering and scrolling apply to the longest table.
        """
        tables = [block for block in blocks if isinstance(block, Table)]
        main = max(tables, key=lambda table: len(table.rows), default=None)
        if main is None:
            self._headers = ()
            return [*blocks], False
        self._headers = tuple(column.header for column in main.columns)
        order = self._order(main)
        self.most = max(len(order) - 1, 0)
        self.offset = min(self.offset, self.most)
        made = self._with_columns(_rearranged(main, order[self.offset :]))
        return [made if block is main else block for block in blocks], True

    def _order(self, table: Table) -> Sequence[int]:
        """Return the indexes of the rows to show, in order."""
        if not (self._sort or self._filter or self._is_reversed):
            return range(len(table.rows))
        rows = self._rows.setdefault(id(table), [*table.rows])
        order: Sequence[int] = range(len(rows))
        if self._sort in self._headers:
            at = self._headers.index(self._sort)
            cells = [row[at] if at < len(row) else "" for row in rows]
            order = sort_order(cells, reverse=self._is_reversed)
        elif self._is_reversed:
            order = order[::-1]
        if not self._filter:
            return order
        wanted = self._filter.casefold()
        return [
            index
            for index in order
            if wanted in "  ".join(map(cell_text, rows[index])).casefold()
        ]

    def _with_columns(self, table: Table) -> Table:
        if not self._columns or self._choose is not None:
            return table
        indices = [
            self._headers.index(name) for name in self._columns if name in self._headers
        ]
        return replace(
            table,
            columns=tuple(table.columns[index] for index in indices),
            rows=[
                [row[index] if index < len(row) else "" for index in indices]
                for row in table.rows
            ],
            narrower=None,
            keeps_all=True,
        )


def _rearranged(table: Table, order: Sequence[int]) -> Table:
    if order == range(len(table.rows)):
        return table
    return replace(
        table,
        rows=_Rows(table.rows, order),
        notes={
            new: table.notes[old] for new, old in enumerate(order) if old in table.notes
        },
        narrower=table.narrower and _rearranged(table.narrower, order),
    )


class _Rows(Sequence[Sequence[Cell]]):
    """Rows selected and ordered by index; each is looked up on access."""

    def __init__(self, rows: Sequence[Sequence[Cell]], order: Sequence[int]) -> None:
        self._rows = rows
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return _Rows(self._rows, self._order[index])
        return self._rows[self._order[index]]
