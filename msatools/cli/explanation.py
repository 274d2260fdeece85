# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--why``: the names in a command's output, explained without a target."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator

from msatools.cli.command import Answer
from msatools.cli.usage import UsageError
from msatools.cli.values import ALL, UnknownName
from msatools.cli.words import Words
from msatools.legends import Entry, Group, completable, find, legend_of
from msatools.reports.explained import Explained, Explanations

_WITH = frozenset(
    (
        *("--why", "--json", "--color", "--debug", "--no-pager"),
        # What names the target: it is given before the names are asked about.
        *("-k", "-c", "--qemu", "-s", "--types", "--debuginfod", "--sandbox"),
    )
)
"""Options that have an effect with ``--why``."""


def parse_names(command: str, word: str) -> list[str]:
    """
    Parse names of a command's legend, or ``all``.

    :raises UnknownName: if one is not known
    :raises argparse.ArgumentTypeError: if the command has no legend
    """
    legend = legend_of(command)
    if not legend:
        raise ArgumentTypeError("this command has no legend")
    if word.lower() == ALL:
        return [each.name for group in legend for each in group.entries]
    # Some names have a comma of their own.
    given = [word] if find(legend, word) else word.split(",")
    for name in given:
        if not find(legend, name):
            raise UnknownName(name, completable(legend), "name")
    return given


def refuse_others(parser: ArgumentParser, args: Namespace, words: Words) -> None:
    """Refuse what has no effect with ``--why``.

    :raises UsageError: if there is something
    """
    from msatools.cli.arguments import given_options

    for _, option in given_options(parser, args):
        if option not in _WITH:
            raise UsageError(f"{option}: no effect with --why, which explains names")
    if words.interval_s is not None:
        raise UsageError("--why: names are explained once, and an interval is named")


def explained(command: str, names: list[str]) -> Answer:
    """Return what the names mean that were asked for."""
    from msatools.render.legend import why_lines

    entries = dict.fromkeys(_entries(command, names))
    document = Explanations(
        command,
        tuple(
            Explained(entry.name, group.kind, entry.meaning, entry.source, entry.bound)
            for group, entry in entries
        ),
    )
    blocks = (
        line
        for group, entry in entries
        for line in why_lines(entry.name, group.kind, entry.text, entry.bound)
    )
    return Answer(document=document, blocks=blocks, incomplete=False)


def _entries(command: str, names: list[str]) -> Iterator[tuple[Group, Entry]]:
    legend = legend_of(command)
    for name in names:
        yield from find(legend, name)
