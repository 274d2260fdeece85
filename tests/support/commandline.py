# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parse and render a command's options without opening a target."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from msatools.cli.arguments import Command, make_parser
from msatools.render.plain import lines
from tests.locks.madelocks import TARGET


def parsed(command: Command[Any], *words: str) -> Namespace:
    return make_parser(command, in_drgn=True).parse_intermixed_args(words)


def given_options(
    command: Command[Any], run: str, monkeypatch: pytest.MonkeyPatch, *words: str
) -> object:
    """Return the options object that a command starts its session with.

    :param run: Full name of the session's class.
    """
    started: list[Any] = []
    monkeypatch.setattr(run, lambda *given: started.append(given))
    start: Callable[..., object] = command.start
    start(None, TARGET, parsed(command, *words))
    ((prog, target, found),) = started
    assert (prog, target) == (None, TARGET)
    return found


def shown(command: Command[Any], report: Any, *words: str) -> list[str]:
    """Return the lines of a report, rendered with these options."""
    blocks = command.blocks(report, parsed(command, *words))
    texts = ("".join(s.text for s in line) for block in blocks for line in lines(block))
    return [text.rstrip() for text in texts]
