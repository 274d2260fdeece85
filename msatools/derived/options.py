# SPDX-License-Identifier: LGPL-2.1-or-later

"""The options of a command, as manual pages and shell completion describe them."""

import argparse
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from msatools.cli.arguments import Command, make_parser
from msatools.cli.options import MaybeFile, UnknownName
from msatools.cli.subcommands import CommandGroup, Subcommand, make_group_parser

Value = Literal["none", "file", "maybe file", "choice", "names", "other"]
"""Kinds of values: none, a file, an optional file, one of the names, a comma-separated
list of names, or anything else, which cannot be completed."""

_FILES = frozenset(("FILE", "PATH", "VMLINUX", "ADDR", "A", "B"))
"""Metavars of files; the ADDR of a guest is the path of a socket."""


class Option(Struct, frozen=True, kw_only=True):
    """One option of a command."""

    flags: tuple[str, ...]
    """All forms of the option, such as ``-h`` and ``--help``."""

    metavars: tuple[str, ...]
    """Names of its values; empty if it has none."""

    value: Value
    names: tuple[str, ...]
    """The valid names; empty if the value is not a name."""

    help: str
    group: str
    """The heading in ``--help``: ``OPTIONS`` or ``TARGET``."""

    is_repeatable: bool


def options_of(command: Command[Any]) -> tuple[Option, ...]:
    """Return the options of a command's console script, in the order of ``--help``."""
    return tuple(_options(make_parser(command, in_drgn=False)))


def options_of_subcommand(
    group: CommandGroup, subcommand: Subcommand
) -> tuple[Option, ...]:
    """Return the options of a subcommand, in the order of ``--help``."""
    return tuple(_options(make_group_parser(group, subcommand)))


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        for action in group._group_actions:
            if not action.option_strings:
                continue
            names = _names(action)
            yield Option(
                flags=tuple(action.option_strings),
                metavars=_metavars(action),
                value=_value(action, names),
                names=names,
                help=formatter._expand_help(action),
                group=group.title or "",
                is_repeatable=isinstance(
                    action, (argparse._ExtendAction, argparse._AppendAction)
                ),
            )


def _metavars(action: argparse.Action) -> tuple[str, ...]:
    if action.nargs == 0:
        return ()
    if isinstance(action.metavar, tuple):
        return action.metavar
    if action.choices is not None:
        return ("|".join(map(str, action.choices)),)
    return (action.metavar or action.dest.upper(),)


def _value(action: argparse.Action, names: tuple[str, ...]) -> Value:
    if isinstance(action, MaybeFile):
        return "maybe file"
    if action.nargs == 0:
        return "none"
    if names:
        return "names" if action.choices is None else "choice"
    return "file" if _FILES.issuperset(_metavars(action)) else "other"


def _names(action: argparse.Action) -> tuple[str, ...]:
    """Return the names that an option accepts; empty if it accepts other values."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.nargs == 0 or not callable(action.type):
        return ()
    try:
        # "\0" is never valid: the error lists the names that the option accepts.
        action.type("\0")
    except UnknownName as error:
        return error.known
    except (argparse.ArgumentTypeError, ValueError):
        pass
    return ()
