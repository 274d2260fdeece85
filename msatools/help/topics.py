# SPDX-License-Identifier: LGPL-2.1-or-later

"""The topics of ``msa help``, and the pages of the documentation for them."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path, PurePosixPath

from msgspec import Struct

from msatools.registry import GROUPS, NAMES, load, load_group
from msatools.render.blocks import Block, Span, line, term

# --- Finds the pages of the documentation: guides, and a page or more a command.


_PLACES = (Path(__file__).parents[1] / "docs", Path(__file__).parents[2] / "docs")
"""Folders of the documentation: in the package, or in the source tree beside it."""

_FOLDERS = ("commands", "guides")

_EXAMPLE = re.compile(r"^```console[^\n]*\n(.*?)^```$", re.M | re.S)


class HelpPage(Struct, frozen=True, dict=True):
    """A page in Markdown."""

    path: Path

    @property
    def name(self) -> str:
        """The topic of the page: ``it-hangs``."""
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
        """The lines of the first console block; ``None`` if there is none."""
        found = _EXAMPLE.search(self.text)
        return None if found is None else found[1].splitlines()


def pages_of(folder: str) -> list[HelpPage]:
    """Return the pages of a folder: ``guides`` or ``commands``.

    The list is empty if only the modules are installed, without the documentation.
    """
    for place in _PLACES:
        if found := sorted((place / folder).glob("*.md")):
            return [HelpPage(path) for path in found]
    return []


def pages_on(topic: str) -> list[HelpPage]:
    """Return the pages named like a topic: of a command, then a guide."""
    pages = (page for folder in _FOLDERS for page in pages_of(folder))
    return [page for page in pages if page.name == topic]


# --- The topics of msa help, and their output.


COLUMNS = "columns"
"""The topic with the legends of all commands."""

_COMMANDS = (*NAMES, *GROUPS)


class UnknownTopicError(Exception):
    """A topic does not exist; the message lists all topics."""

    def __init__(self, topic: str) -> None:
        names = topics()
        near = get_close_matches(topic, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        super().__init__(
            f"unknown topic {topic!r}; choose from {', '.join(names)}{hint}"
        )


def topics() -> dict[str, str]:
    """Map the names of all topics to their titles."""
    return {each: about for part in _parts().values() for each, about in part.items()}


def _parts() -> Mapping[str, Mapping[str, str]]:
    """Map the headings of the list to topics and their titles."""
    others = [page for page in pages_of("commands") if page.name not in _COMMANDS]
    return {
        "GUIDES": {page.name: page.title for page in pages_of("guides")},
        "COMMANDS": {
            **{name: load(name).summary for name in NAMES},
            **{name: load_group(name).summary for name in GROUPS},
        },
        "MORE": {
            COLUMNS: "every column, class, state and mark of all commands",
            **{page.name: page.title for page in others},
        },
    }


def topic_list() -> Iterator[Block]:
    """Yield the list of all topics."""
    yield line("USAGE: msa help TOPIC")
    width = max(map(len, topics()))
    for kind, names in _parts().items():
        if names:
            yield line()
            yield line(Span(kind, "title"))
            for name, about in names.items():
                yield term(name, width, about)


def topic_blocks(topic: str) -> Iterator[Block]:
    """Return the blocks of the pages on a topic.

    :raises UnknownTopicError: if there is no such topic
    """
    if topic == COLUMNS:
        return _all_columns()
    name = topic.removeprefix("msa-").removesuffix(".md")
    if name not in topics():
        raise UnknownTopicError(topic)
    return _pages(name)


def _pages(name: str) -> Iterator[Block]:
    from msatools.render.legend import markdown_blocks

    for page in pages_on(name):
        yield from markdown_blocks(page.text, _topic_of)
        yield line()
    if name in _COMMANDS:
        yield line(f"All options: msa {name} --help")


def _topic_of(link: str) -> str:
    """Return the command that shows the target of a link; empty if not a topic."""
    name = PurePosixPath(link.partition("#")[0]).stem
    return f"msa help {name}" if pages_on(name) else ""


def _all_columns() -> Iterator[Block]:
    from msatools.legends import legend_of
    from msatools.render.legend import legend_blocks

    for number, name in enumerate(_COMMANDS):
        if number:
            yield line()
        yield line(Span(f"msa-{name}", "title"))
        yield line()
        yield from legend_blocks(legend_of(name))
