# SPDX-License-Identifier: LGPL-2.1-or-later

"""A command's line as its tests say it: in words, with no target opened."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from msatools.cli.arguments import make_parser
from msatools.cli.main import Command
from msatools.render.plain import lines
from tests.locks.madelocks import TARGET


def parsed(command: Command[Any], *words: str) -> Namespace:
    return make_parser(command, in_drgn=True).parse_intermixed_args(words)


def given_options(
    command: Command[Any], run: str, monkeypatch: pytest.MonkeyPatch, *words: str
) -> object:
    """Give the options that a run is started with.

    :param run: The class of runs, by its full name.
    """
    started: list[Any] = []
    monkeypatch.setattr(run, lambda *given: started.append(given))
    start: Callable[..., object] = command.start
    start(None, TARGET, parsed(command, *words))
    ((prog, target, found),) = started
    assert (prog, target) == (None, TARGET)
    return found


def shown(command: Command[Any], report: Any, *words: str) -> list[str]:
    """Give a report's lines as these words have it shown."""
    blocks = command.blocks(report, parsed(command, *words))
    texts = ("".join(s.text for s in line) for block in blocks for line in lines(block))
    return [text.rstrip() for text in texts]
