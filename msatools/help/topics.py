# SPDX-License-Identifier: LGPL-2.1-or-later

"""The topics of ``msa help``, and what is shown of each."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import PurePosixPath

from msatools.help.pages import pages_of, pages_on
from msatools.registry import GROUPS, NAMES, load, load_group
from msatools.render.blocks import Block, Span, text

COLUMNS = "columns"
"""The topic of all legends."""

_COMMANDS = (*NAMES, *GROUPS)


class UnknownTopicError(Exception):
    """There is no such topic: the message lists those that there are."""

    def __init__(self, topic: str) -> None:
        names = topics()
        near = get_close_matches(topic, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        super().__init__(
            f"unknown topic {topic!r}; choose from {', '.join(names)}{hint}"
        )


def topics() -> dict[str, str]:
    """Return all topics, each with what it is about."""
    return {each: about for part in _parts().values() for each, about in part.items()}


def _parts() -> Mapping[str, Mapping[str, str]]:
    """Return the topics by kind."""
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
    yield text("USAGE: msa help TOPIC")
    width = max(map(len, topics()))
    for kind, names in _parts().items():
        if names:
            yield text()
            yield text(Span(kind, "title"))
            for name, about in names.items():
                yield text(f"  {name:{width}}  {about}")


def topic_blocks(topic: str) -> Iterator[Block]:
    """Return the page on a topic.

    :raises UnknownTopicError: if there is none
    """
    if topic == COLUMNS:
        return _all_columns()
    name = topic.removeprefix("msa-").removesuffix(".md")
    if name not in topics():
        raise UnknownTopicError(topic)
    return _pages(name)


def _pages(name: str) -> Iterator[Block]:
    from msatools.render.markdown import markdown_blocks

    for page in pages_on(name):
        yield from markdown_blocks(page.text, _topic_of)
        yield text()
    if name in _COMMANDS:
        yield text(f"All options: msa {name} --help")


def _topic_of(link: str) -> str:
    """Return how to show the page that a link leads to; empty if it is another."""
    name = PurePosixPath(link.partition("#")[0]).stem
    return f"msa help {name}" if pages_on(name) else ""


def _all_columns() -> Iterator[Block]:
    from msatools.legends import legend_of
    from msatools.render.legend import legend_blocks

    for number, name in enumerate(_COMMANDS):
        if number:
            yield text()
        yield text(Span(f"msa-{name}", "title"))
        yield text()
        yield from legend_blocks(legend_of(name))
