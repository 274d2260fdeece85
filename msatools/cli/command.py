# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a command is: its words, its runs, what renders its reports."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from drgn import Program
from drgn.commands import argument, mutually_exclusive_group

from msatools.cli.completeness import is_incomplete
from msatools.kernel.session import R, Session
from msatools.render.blocks import Block
from msatools.render.json import Document
from msatools.reports.diff import DiffRows
from msatools.target import Target


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command says that looks at no target."""

    document: Document
    blocks: Iterable[Block]

    incomplete: bool
    """As the problems of a report."""


def _everything(report: R, args: argparse.Namespace) -> R:
    return report


@dataclass(frozen=True, kw_only=True)
class Recorded(Generic[R]):
    """How the reports of a command are recorded, and asked again.

    A recording has all that a run collects, whatever it shows: what is chosen of it is
    chosen anew each time that it is shown.
    """

    model: Callable[[], type[R]]

    choosing: tuple[str, ...] = ()
    """Names of those arguments that choose from what is collected."""

    choose: Callable[[R, argparse.Namespace], R] = _everything
    """``choose(report, args)``: what the words ask for of a whole report; raises
    UsageError if the recording does not have it."""

    require: Callable[[R, argparse.Namespace], None] = lambda *_: None
    """``require(report, args)``: raises TargetError if what the words name is not in a
    whole report."""

    lacks: Callable[[argparse.Namespace], str | None] = lambda _: None
    """The option that asks for what recordings do not have, if one does."""


@dataclass(frozen=True, kw_only=True)
class Command(Generic[R]):
    """All that tells one command from another."""

    name: str
    """As in ``msa-NAME`` and ``%NAME``."""

    summary: str
    """What the command answers, in less than a line."""

    arguments: tuple[argument | mutually_exclusive_group, ...]
    """Its own arguments; those of all commands are added."""

    examples: tuple[tuple[str, str], ...]
    """What to type after the name and target, and what that shows."""

    start: Callable[[Program, Target, argparse.Namespace], Session[R]]
    """Start a run; what that reads may be missing, as when collecting."""

    blocks: Callable[[R, argparse.Namespace], Iterable[Block]]

    recorded: Recorded[R]

    problems: Callable[[R], bool] = is_incomplete
    """Whether something was missing or unreadable, or a check failed."""

    complaint: Callable[[argparse.Namespace, bool], str | None] = lambda *_: None
    """``complaint(args, has_interval)``: what makes no sense together, if something."""

    keep: Callable[[R, argparse.Namespace], None] = lambda *_: None
    """``keep(report, args)``: write the files that the words ask for, of each report;
    raises OutputError."""

    compared: tuple[DiffRows, ...] = ()
    """What ``--diff`` compares, if it does so row by row."""

    instead: Callable[[argparse.Namespace], Callable[[], Answer] | None] = lambda _: (
        None
    )
    """What gives the answer where the words ask for one without a target."""
