# SPDX-License-Identifier: LGPL-2.1-or-later

"""Prints legends and the documentation: ``--why``, -v, and ``msa help``."""

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

from msatools.legends import Entry, Group, Legend
from msatools.render.blocks import (
    Block,
    Cell,
    Items,
    Span,
    Table,
    Text,
    Tree,
    free_text,
    line,
    term,
    verbatim,
)
from msatools.render.plain import cell_text

# --- Prints legends: entries named by --why, or for all names in a report (-v).


_BOUNDS = {
    "exact": "",
    "estimate": "~ estimate",
    "upper": "< upper bound",
    "lower": "> lower bound",
    "not kept": "- not kept",
}

_MOST_ROWS = 2000
"""Maximum rows of a table to search for names: there may be very many."""

_VALUE = re.compile(r"([~<>=?])[\d.]|(-)$")
"""A number with a mark of accuracy before it, or ``-`` for no value."""


def why_lines(name: str, kind: str, words: str, bound: str = "exact") -> Iterator[Text]:
    """Yield the explanation of one name.

    :param kind: Kind of the name: ``state of a task``; empty to leave it out.
    """
    about = "".join(f"  {each}" for each in (kind, _BOUNDS[bound]) if each)
    yield line(Span(name, "title"), Span(about, "dim"))
    yield line(f"  {words}")


def legend_blocks(legend: Legend) -> Iterator[Block]:
    """Yield a whole legend, a line for each name."""
    for number, group in enumerate(legend):
        if number:
            yield line()
        yield line(Span(group.title, "title"))
        width = max(len(entry.name) for entry in group.entries)
        for entry in group.entries:
            yield term(entry.name, width, entry.meaning)


def with_key(blocks: Iterable[Block], legend: Legend) -> Iterator[Block]:
    """Yield a report, and below it the meanings of its names: a line for each group.

    Nothing is added to output for another program, such as a graph.
    """
    shown = list(blocks)
    yield from shown
    if any(isinstance(block, Text) and block.narrow == "keep" for block in shown):
        return
    found = _Found(shown)
    lines = [_key_line(group, found.entries(group)) for group in legend]
    if any(lines):
        yield line()
    yield from filter(None, lines)


def _key_line(group: Group, entries: Sequence[Entry]) -> Text | None:
    if not entries:
        return None
    spans: list[Cell] = [Span(group.title, "title")]
    for entry in entries:
        end = "" if entry is entries[-1] else ";"
        spans += [f"  {entry.name}: ", Span(f"{entry.meaning}{end}", "dim")]
    return line(*spans)


class _Found:
    """The names in a report: its headers, cells, words and lines."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._cells: dict[str, set[str]] = {}
        self._words: set[str] = set()
        self._lines: list[str] = []
        for block in blocks:
            self._add(block)

    def entries(self, group: Group) -> list[Entry]:
        """Return the entries of a group whose names the report shows."""
        names = self._names(group)
        return [entry for entry in group.entries if entry.name in names]

    def _names(self, group: Group) -> Collection[str]:
        if group.where == "header":
            return self._cells.keys()
        within = [self._cells.get(column, set()) for column in group.columns]
        cells = set().union(*within)
        if group.where == "cell":
            return cells
        if group.where == "prefix":
            everything = self._words.union(*self._cells.values())
            return {
                mark
                for found in map(_VALUE.match, everything)
                if found is not None
                for mark in found.groups()
            }
        phrases = (entry.name for entry in group.entries if " " in entry.name)
        found = {each for each in phrases if any(each in line for line in self._lines)}
        return {word for cell in cells for word in cell.split()} | self._words | found

    def _add(self, block: Block) -> None:
        if isinstance(block, Table):
            headers = [column.header for column in block.columns]
            for header in headers:
                self._cells.setdefault(header, set())
            for row in islice(block.rows, _MOST_ROWS):
                for header, cell in zip(headers, row, strict=False):
                    self._cells[header].add(cell_text(cell).strip())
        elif isinstance(block, Items):
            for item in block.items:
                for line in item:
                    self._add(line)
        elif isinstance(block, Tree):
            self._words.update(cell_text(block.label).split())
            for child in block.children:
                self._add(child)
        elif isinstance(block, Text):
            words = "".join(map(cell_text, block.spans))
            self._lines.append(words)
            self._words.update(words.split())


# --- Converts the documentation's Markdown to blocks, for msa help.
#
# It supports only the Markdown of docs/: headings, paragraphs, lists, tables, fenced
# blocks, and links, code and bold text within a line.


_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_CELL = re.compile(r"(?<!\\)\|")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_RULE = re.compile(r"\|[-:| ]+\|?")

_LEAST_WIDTH = 8
"""Minimum width of a table's column; longer cells are wrapped or cut."""


PAGE_WIDTH = 80
"""Maximum width of a paragraph in columns: longer lines are hard to read."""


def markdown_blocks(page: str, topic_of: Callable[[str], str]) -> Iterator[Block]:
    """Yield the blocks of a page.

    :param topic_of: Maps the target of a link to text to show after it, or "".
    """
    lines = iter(page.splitlines())
    paragraph: list[str] = []

    def flush() -> Iterator[Block]:
        if paragraph:
            words = _inline(" ".join(paragraph), topic_of)
            further = "  " if _ITEM.match(words) else ""
            yield from map(
                line, textwrap.wrap(words, PAGE_WIDTH, subsequent_indent=further)
            )
            paragraph.clear()

    for source in lines:
        if source.startswith("```"):
            yield from flush()
            for code in lines:
                if code.startswith("```"):
                    break
                yield verbatim(f"    {code}".rstrip())
        elif source.startswith("|"):
            yield from flush()
            rows = [source]
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(row)
            yield _table(rows, topic_of)
            yield line()
        elif source.startswith("#"):
            yield from flush()
            yield line(Span(source.lstrip("# "), "title"))
        elif source.startswith("<!--") or not source.strip():
            yield from flush()
            if not source.strip():
                yield line()
        elif _ITEM.match(source):
            yield from flush()
            paragraph.append(source)
        else:
            paragraph.append(source.strip())
    yield from flush()


def _table(lines: list[str], topic_of: Callable[[str], str]) -> Table:
    head, *rows = (
        [
            _inline(cell.strip().replace("\\|", "|"), topic_of)
            for cell in _CELL.split(line.strip().strip("|"))
        ]
        for line in lines
        if not _RULE.fullmatch(line.strip())
    )
    columns = tuple(free_text(name, least=_LEAST_WIDTH) for name in head)
    return Table(columns, rows, keeps_all=True)


def _inline(words: str, topic_of: Callable[[str], str]) -> str:
    """Return a line of Markdown without its markup."""

    def link(found: re.Match[str]) -> str:
        topic = topic_of(found[2])
        return f"{found[1]} ({topic})" if topic else found[1]

    for pattern, by in ((_LINK, link), (_CODE, r"\1"), (_BOLD, r"\1")):
        words = pattern.sub(by, words)
    return words
