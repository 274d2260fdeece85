# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts the documentation's Markdown to blocks, for ``msa help``.

It knows what our pages use: headings, paragraphs, lists, tables, fenced blocks, and
links, code and bold text within a line.
"""

import re
import textwrap
from collections.abc import Callable, Iterator

from msatools.render.blocks import Block, Span, Table, free_text, text, verbatim

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_CELL = re.compile(r"(?<!\\)\|")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_RULE = re.compile(r"\|[-:| ]+\|?")

_LEAST_WIDTH = 8
"""Columns of a table's cell, at least: it goes on below."""


PAGE_WIDTH = 80
"""Columns of a paragraph: longer lines are hard to read."""


def markdown_blocks(page: str, topic_of: Callable[[str], str]) -> Iterator[Block]:
    """Yield the blocks of a page.

    :param topic_of: Returns words on where a link leads; empty if there are none.
    """
    lines = iter(page.splitlines())
    paragraph: list[str] = []

    def flush() -> Iterator[Block]:
        if paragraph:
            words = _inline(" ".join(paragraph), topic_of)
            further = "  " if _ITEM.match(words) else ""
            yield from map(
                text, textwrap.wrap(words, PAGE_WIDTH, subsequent_indent=further)
            )
            paragraph.clear()

    for line in lines:
        if line.startswith("```"):
            yield from flush()
            for code in lines:
                if code.startswith("```"):
                    break
                yield verbatim(f"    {code}".rstrip())
        elif line.startswith("|"):
            yield from flush()
            rows = [line]
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(row)
            yield _table(rows, topic_of)
            yield text()
        elif line.startswith("#"):
            yield from flush()
            yield text(Span(line.lstrip("# "), "title"))
        elif line.startswith("<!--") or not line.strip():
            yield from flush()
            if not line.strip():
                yield text()
        elif _ITEM.match(line):
            yield from flush()
            paragraph.append(line)
        else:
            paragraph.append(line.strip())
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
    """Return the text of a line without its marks."""

    def link(found: re.Match[str]) -> str:
        topic = topic_of(found[2])
        return f"{found[1]} ({topic})" if topic else found[1]

    for pattern, by in ((_LINK, link), (_CODE, r"\1"), (_BOLD, r"\1")):
        words = pattern.sub(by, words)
    return words
