# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parsing of options: errors as exceptions, help and version as text."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import msatools

_NEAR = 0.75
"""How alike an option must be to be suggested: of --colour it is --color, of --foo
none."""


class UsageError(Exception):
    """The arguments of a command are invalid or contradict each other."""


class Asked(Exception):
    """The user requested the help or the version, the text of which is the argument."""


class Help(argparse.Action):
    # argparse's own action prints at once, and hides errors of the output.
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(parser.format_help())


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(f"{parser.prog} {msatools.__version__}\n")


class Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{**kwargs, "max_help_position": 22, "width": 78})

    def add_usage(
        self, usage: Any, actions: Any, groups: Any, prefix: Any = None
    ) -> None:
        super().add_usage(usage, actions, groups, "USAGE: ")


_WIDTH = 80
"""Columns of an example, at most."""


def example_lines(prog: str, examples: Iterable[tuple[str, str]]) -> str:
    """Return examples of arguments and what they do, as the end of a help text.

    What a long one does is in a line of its own.
    """
    shown = [(f"  {prog} {words}".rstrip(), what) for words, what in examples]
    width = max((len(line) for line, what in shown if _fits(line, what)), default=0)
    lines = ["EXAMPLES:"]
    for line, what in shown:
        if _fits(line, what) and width + 2 + len(what) <= _WIDTH:
            lines.append(f"{line:{width}}  {what}")
        else:
            lines += (line, f"      {what}")
    return "\n".join(lines)


def _fits(line: str, what: str) -> bool:
    return len(line) + 2 + len(what) <= _WIDTH


class OptionParser(argparse.ArgumentParser):
    """A parser that raises exceptions instead of exiting."""

    # The types of the stubs are too narrow.
    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return parsed

    def _unknown(self, words: Sequence[str]) -> str:
        """Return the message about arguments that are not known."""
        from difflib import get_close_matches

        message = f"unrecognized arguments: {' '.join(words)}"
        option, known = words[0].partition("=")[0], self._option_string_actions
        begun = [each for each in known if option[2:] and each.startswith(option)]
        nearest = begun or get_close_matches(option, known, 1, _NEAR)
        return f"{message}; did you mean {nearest[0]}?" if nearest else message

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
