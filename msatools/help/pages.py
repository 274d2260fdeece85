# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages of the documentation: guides, and a page or more a command."""

import re
from functools import cached_property
from pathlib import Path

from msgspec import Struct

_PLACES = (Path(__file__).parents[1] / "docs", Path(__file__).parents[2] / "docs")
"""Where the documentation is: within the package, or beside it in the source."""

_FOLDERS = ("commands", "guides")

_EXAMPLE = re.compile(r"^```console[^\n]*\n(.*?)^```$", re.M | re.S)


class HelpPage(Struct, frozen=True, dict=True):
    """A page in Markdown."""

    path: Path

    @property
    def name(self) -> str:
        """The topic that it is about: ``it-hangs``."""
        return self.path.stem

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @property
    def title(self) -> str:
        """The first heading."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def first_example(self) -> list[str] | None:
        """The lines of the first output that it shows; ``None`` if there is none."""
        found = _EXAMPLE.search(self.text)
        return None if found is None else found[1].splitlines()


def pages_of(folder: str) -> list[HelpPage]:
    """Return the pages of a folder: ``guides`` or ``commands``.

    It is empty where only the modules are installed, as by a copy of the package.
    """
    for place in _PLACES:
        if found := sorted((place / folder).glob("*.md")):
            return [HelpPage(path) for path in found]
    return []


def pages_on(topic: str) -> list[HelpPage]:
    """Return the pages on a topic: of a command, then a guide of the same name."""
    pages = (page for folder in _FOLDERS for page in pages_of(folder))
    return [page for page in pages if page.name == topic]
