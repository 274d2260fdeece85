# SPDX-License-Identifier: LGPL-2.1-or-later

"""A command's line as its tests say it: in words, with no target opened."""

import io
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from msatools.arguments import make_parser
from msatools.cli import Command, run_console
from msatools.render.plain import lines
from tests.locks.madelocks import TARGET

WIDTH = 88


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


def refusal(command: Command[Any], *words: str) -> str:
    """Give the one line that says what is wrong, before any target is opened."""
    err = io.StringIO()
    with redirect_stderr(err):
        assert run_console(command, ["-k", *words]) == 2
    (line,) = err.getvalue().splitlines()
    name, _, what = line.partition(": ")
    assert name == f"msa-{command.name}"
    return what


def shown(command: Command[Any], report: Any, *words: str) -> list[str]:
    """Give a report's lines as these words have it shown."""
    blocks = command.blocks(report, parsed(command, *words))
    texts = ("".join(s.text for s in line) for block in blocks for line in lines(block))
    return [text.rstrip() for text in texts]


def check_help(command: Command[Any]) -> None:
    """Look at the help: it fits, and each of its examples is understood."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert run_console(command, ["-h"]) == 0
    text, name = out.getvalue(), f"msa-{command.name}"
    assert text.startswith(f"USAGE: {name} [OPTION...] [TARGET] [INTERVAL [COUNT]]")
    assert command.summary in text
    assert max(map(len, text.splitlines())) <= WIDTH
    examples = text.partition("EXAMPLES:")[2]
    for words, what in command.examples:
        assert f"{name} {words} " in examples
        assert what in examples
        args = parsed(command, *words.partition(" |")[0].split())
        assert command.complaint(args, False) is None
