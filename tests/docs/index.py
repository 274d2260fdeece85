# SPDX-License-Identifier: LGPL-2.1-or-later

"""The list of all pages in the documentation's index, made from their titles."""

import os
from collections.abc import Iterable
from pathlib import Path

from tests.docs.pages import DOCS, Page

INDEX = DOCS / "README.md"
STARTS = "<!-- The list is written by `make docs`. -->\n"
ENDS = "<!-- The list ends. -->\n"

_PARTS = {
    "Something is wrong": DOCS / "guides",
    "The commands": DOCS / "commands",
    "Behind them": DOCS,
    "JSON": DOCS / "schema",
}
"""Heading -> the folder whose pages are below it."""


def index() -> str:
    """Return the list of all pages, in Markdown."""
    parts = (
        f"\n## {heading}\n\n{_list(sorted(folder.glob('*.md')))}"
        for heading, folder in _PARTS.items()
    )
    return "".join((*parts, "\n"))


def with_index(text: str) -> str:
    """Return the index page with its list replaced.

    :raises ValueError: if it lacks the marks around the list
    """
    before, starts, rest = text.partition(STARTS)
    _, ends, after = rest.partition(ENDS)
    if not starts or not ends:
        raise ValueError(f"{INDEX} has lost the marks around its list")
    return before + starts + index() + ends + after


def _list(paths: Iterable[Path]) -> str:
    return "".join(
        f"- [{Page(path).title}]({os.path.relpath(path, DOCS)})\n"
        for path in paths
        if path != INDEX
    )
