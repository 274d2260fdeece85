# SPDX-License-Identifier: LGPL-2.1-or-later

"""The description of a command: its arguments, its runs, and its rendering."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    # They take most of the time of --help to import.
    from drgn import Program

    from msatools.kernel.report import Report
    from msatools.kernel.session import Session
    from msatools.render.blocks import Block
    from msatools.render.json import Document
    from msatools.reports.diff_rows import DiffRows
    from msatools.selfcheck.selfcheck import Check
    from msatools.target import Target

R = TypeVar("R", bound="Report")


class argument:  # noqa: N801 -- as in drgn
    """An argument; it is drgn's class of the same name, which is slow to import."""

    def __init__(self, *args: str, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class mutually_exclusive_group:  # noqa: N801
    """Arguments that exclude each other; also drgn's."""

    def __init__(self, *arguments: argument, required: bool = False) -> None:
        self.arguments = arguments
        self.required = required


class Answer(Struct, frozen=True, kw_only=True):
    """The result of a command that reads no target."""

    document: "Document"
    blocks: "Iterable[Block]"

    incomplete: bool
    """Whether something is missing, as :attr:`Command.problems` of a report."""


class Operands(Struct, frozen=True):
    """The words that a command takes besides the target, in place of an interval.

    They are told from the target by their form alone: a file whose name looks like one
    is named as a path, ``./NAME``.
    """

    name: str
    """Name in the usage line: ``ADDRESS``."""

    describes: Callable[[str], bool]
    """Returns whether a word has the form of one."""


class Excluded(Struct, frozen=True):
    """Options that have no effect together with another: they are refused.

    Options that ask for more have their effect with ``--json`` as it is: it has that.
    """

    by: str
    """The other option, as it is written first in the help."""

    options: tuple[str, ...]
    why: str
    """The reason, as the end of a sentence about the other option: "has all rows"."""

    in_text: bool = False
    """Whether they have an effect in JSON, where views are added to each other."""


def _is_incomplete(report: "Report") -> bool:
    from msatools.cli.completeness import is_incomplete

    return is_incomplete(report)


def _everything(report: R, args: argparse.Namespace) -> R:
    return report


class Recorded(Struct, Generic[R], frozen=True, kw_only=True):
    """How the reports of a command are recorded and replayed.

    A recording has complete reports, independent of the options that select parts:
    these are applied when it is replayed.
    """

    model: Callable[[], type[R]]
    """Returns the class of the reports."""

    choosing: tuple[str, ...] = ()
    """Names of the arguments that select from a complete report."""

    choose: Callable[[R, argparse.Namespace], R] = _everything
    """``choose(report, args)``: returns the selected part of a complete report; raises
    UsageError if the recording lacks it."""

    require: Callable[[R, argparse.Namespace], None] = lambda *_: None
    """``require(report, args)``: raises TargetError if a complete report lacks
    something that the arguments name."""

    lacks: Callable[[argparse.Namespace], Mapping[str, object]] = lambda _: {}
    """``lacks(args)``: returns the options for data that recordings lack, each with its
    value: false if it is not given."""

    def lacking(self, args: argparse.Namespace) -> str | None:
        """Return the first given option for data that recordings lack."""
        given = (option for option, value in self.lacks(args).items() if value)
        return next(given, None)


class Command(Struct, Generic[R], frozen=True, kw_only=True):
    """The description of a command."""

    name: str
    """Name as in ``msa-NAME`` and ``%NAME``."""

    summary: str
    """Summary in less than a line."""

    arguments: tuple[argument | mutually_exclusive_group, ...]
    """Its own arguments; the common ones are added."""

    examples: tuple[tuple[str, str], ...]
    """Arguments after name and target, and what they show."""

    operands: Operands | None = None
    """Words besides the target: ``args.operands``. A command with some has no
    intervals, and its examples begin with them."""

    start: "Callable[[Program, Target, argparse.Namespace], Session[R]]"
    """Starts a run; raises the errors of :mod:`msatools.errors` as a report does."""

    blocks: "Callable[[R, argparse.Namespace], Iterable[Block]]"
    """Renders a report."""

    recorded: Recorded[R]

    problems: Callable[[R], bool] = _is_incomplete
    """Returns whether something was missing or unreadable, or a check failed."""

    sandboxed: bool = False
    """Whether dumps are read in the sandbox without being asked for it, if the list of
    system calls can be enforced."""

    excluded: tuple[Excluded, ...] = ()
    """Options without effect, by the option that makes them so."""

    complaint: Callable[[argparse.Namespace, bool], str | None] = lambda *_: None
    """``complaint(args, has_interval)``: returns why arguments contradict each other,
    if they do; for what depends on more than which options are given."""

    keep: Callable[[R, argparse.Namespace], None] = lambda *_: None
    """``keep(report, args)``: writes the files requested for each report; raises
    OutputError."""

    writes: Callable[[argparse.Namespace], bool] = lambda _: False
    """Returns whether files are requested, which :attr:`keep` writes."""

    checks: "Callable[[], Sequence[Check]]" = lambda: ()
    """Returns what ``--self-check`` compares, besides how memory is read."""

    explains_kernel: bool = False
    """Whether ``--why`` looks at the target, where one is named: what the names mean
    depends on it."""

    compared: "tuple[DiffRows, ...]" = ()
    """Tables that ``--diff`` compares row by row."""

    compare: Callable[[argparse.Namespace], Answer] | None = None
    """``compare(args)``: compares two files in a way of the command's own."""

    @property
    def offers_diff(self) -> bool:
        """Whether the command has ``--diff``: it says what is to be compared."""
        return bool(self.compared) or self.compare is not None
