# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parse and render a command's options without opening a target."""

from argparse import Namespace
from typing import Any

from msatools.cli.arguments import Command, make_parser
from msatools.render.plain import lines


def parsed(command: Command[Any], *words: str) -> Namespace:
    return make_parser(command, in_drgn=True).parse_intermixed_args(words)


def shown(command: Command[Any], report: Any, *words: str) -> list[str]:
    """Return the lines of a report, rendered with these options."""
    blocks = command.blocks(report, parsed(command, *words))
    texts = ("".join(s.text for s in line) for block in blocks for line in lines(block))
    return [text.rstrip() for text in texts]
