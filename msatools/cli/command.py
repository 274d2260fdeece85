# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a command is: its words, its runs, what renders its reports."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from drgn import Program
from drgn.commands import argument, mutually_exclusive_group

from msatools.kernel.report import Report
from msatools.kernel.session import Progress
from msatools.render.blocks import Block
from msatools.render.json import Document
from msatools.reports.diff import DiffRows
from msatools.target import Target

R = TypeVar("R", bound=Report)
R_co = TypeVar("R_co", bound=Report, covariant=True)


class Session(Protocol[R_co]):
    """One run of a command on one target, and what it keeps between its reports.

    A run without an interval calls ``report`` once. One with an interval calls
    ``begin`` once and then, after each interval, ``advance``; in between it calls
    ``sample`` as often as ``period_s`` asks for.
    """

    @property
    def period_s(self) -> float | None:
        """How long after one sample it wants the next; None if it wants none."""

    def report(self, progress: Progress) -> R_co:
        """Report the totals until now, and what is now."""

    def begin(self, progress: Progress) -> None:
        """Look at the target: an interval begins."""

    def sample(self) -> None:
        """Look at the target in the midst of an interval."""

    def advance(self, progress: Progress) -> R_co:
        """Report the interval that ends now, at whose end the next begins."""


class Compared(Generic[R]):
    """A session whose intervals are what differs between two reports."""

    period_s = None

    def __init__(self, collect: Callable[[Progress], R], delta: Callable[[R, R], R]):
        """
        :param delta: ``delta(previous, current)``: the current report, with what
            changed since the previous one.
        """
        self._collect = collect
        self._delta = delta
        self._previous: R | None = None

    def report(self, progress: Progress) -> R:
        return self._collect(progress)

    def begin(self, progress: Progress) -> None:
        self._previous = self._collect(progress)

    def sample(self) -> None:
        """There is nothing to look at within an interval."""

    def advance(self, progress: Progress) -> R:
        previous, current = self._previous, self._collect(progress)
        assert previous is not None, "no interval has begun"
        self._previous = current
        return self._delta(previous, current)


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

    problems: Callable[[R], bool]
    """Whether something was missing or unreadable, or a check failed."""

    recorded: Recorded[R]

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
