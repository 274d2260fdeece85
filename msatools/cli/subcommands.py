# SPDX-License-Identifier: LGPL-2.1-or-later

"""Commands with subcommands: they work on many targets, and open none themselves."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from msgspec import Struct

import msatools
from msatools.cli.arguments import argument
from msatools.cli.main import EXIT_DONE, failed
from msatools.cli.options import (
    Asked,
    Formatter,
    Help,
    OptionParser,
    UsageError,
    Version,
    example_lines,
)
from msatools.cli.output import (
    OutputClosed,
    StatusLine,
    Stopped,
    end_by,
    output,
    stop_on_signals,
)

if TYPE_CHECKING:
    from msatools.fleet.run import Progress

# --- Commands with subcommands: they work on many targets, and open none themselves.
#
# Like commands on one target (msatools.cli.arguments), they print errors in one line,
# handle signals, and have tables of arguments, from which manual pages and completion
# are made.


class Subcommand(Struct, frozen=True, kw_only=True):
    """The description of a subcommand."""

    name: str
    summary: str
    """Summary in less than a line."""

    operands: str
    """Positional arguments, as in a usage line."""

    positional: tuple[argument, ...]
    arguments: tuple[argument, ...]
    """Options of the subcommand; ``-h``, ``--version`` and ``--debug`` are added."""

    examples: tuple[tuple[str, str], ...]
    """Example arguments after the name, each with a description."""

    run: Callable[[argparse.Namespace], int]
    """Runs the subcommand; returns the exit status; raises UsageError."""


class CommandGroup(Struct, frozen=True, kw_only=True):
    """A command whose first argument names a subcommand."""

    name: str
    """Name as in ``msa-NAME``."""

    summary: str
    subcommands: tuple[Subcommand, ...]

    def named(self, name: str) -> Subcommand | None:
        """Return the subcommand named *name*; ``None`` if there is none."""
        return next((each for each in self.subcommands if each.name == name), None)


_OPTIONS = (
    argument("--debug", action="store_true", help="show tracebacks of errors"),
    argument("--version", action=Version, nargs=0, help="print name and version"),
    argument("-h", "--help", action=Help, nargs=0, help="print this help"),
)


def make_group_parser(
    group: CommandGroup, subcommand: Subcommand
) -> argparse.ArgumentParser:
    """Return the parser of the arguments after a subcommand's name."""
    prog = f"msa-{group.name} {subcommand.name}"
    parser = OptionParser(
        prog=prog,
        usage=f"%(prog)s {subcommand.operands} [OPTION...]",
        description=subcommand.summary,
        epilog=example_lines(prog, subcommand.examples),
        formatter_class=Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    for operand in subcommand.positional:
        parser.add_argument(*operand.args, **operand.kwargs, help=argparse.SUPPRESS)
    options = parser.add_argument_group("OPTIONS")
    for option in (*subcommand.arguments, *_OPTIONS):
        options.add_argument(*option.args, **option.kwargs)
    return parser


def run_group(group: CommandGroup, argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with a shell's arguments, and return its exit status.

    :param argv: Arguments after the command's name; by default those of the process.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = f"msa-{group.name}"
    try:
        with stop_on_signals():
            return _run(group, argv)
    except Stopped as stopped:
        return end_by(stopped.number)
    except OutputClosed:
        return end_by(signal.SIGPIPE)
    except Exception as error:
        return failed(error, name, debug="--debug" in argv)


def _run(group: CommandGroup, argv: Sequence[str]) -> int:
    if argv and argv[0] == "--why":
        return _explain(group, argv[1:])
    try:
        subcommand = _chosen(group, argv[0] if argv else "")
        args = make_group_parser(group, subcommand).parse_intermixed_args(argv[1:])
    except Asked as asked:
        with output() as out:
            out.write(str(asked))
        return EXIT_DONE
    return subcommand.run(args)


def _explain(group: CommandGroup, words: Sequence[str]) -> int:
    """Explain names of the output: ``--why``, without a subcommand.

    :param words: One word of comma-separated names.
    :raises UsageError: if there is not exactly one word, or a name is not known
    """
    from msatools.cli.answers import explained, parse_names
    from msatools.render.device import show

    if len(words) != 1:
        raise UsageError("--why: takes NAME,..., or all, and nothing else")
    try:
        names = parse_names(group.name, words[0])
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--why: {error}") from None
    with output() as out:
        show(explained(group.name, names).blocks, out)
    return EXIT_DONE


def _chosen(group: CommandGroup, word: str) -> Subcommand:
    """Return the subcommand that a word names.

    :raises Asked: if the word requests help or version
    :raises UsageError: if there is no such subcommand
    """
    if word in ("-h", "--help"):
        raise Asked(_help(group))
    if word == "--version":
        raise Asked(f"msa-{group.name} {msatools.__version__}\n")
    found = group.named(word)
    if found is None:
        names = ", ".join(each.name for each in group.subcommands)
        what = f"{word}: no such subcommand" if word else "no subcommand is named"
        raise UsageError(f"{what}; name one of {names}")
    return found


def _help(group: CommandGroup) -> str:
    width = max(len(each.name) for each in group.subcommands)
    return "\n".join(
        (
            f"USAGE: msa-{group.name} SUBCOMMAND [ARGUMENT...]",
            "",
            group.summary,
            "",
            f"SUBCOMMANDS (msa-{group.name} SUBCOMMAND --help has their options):",
            *(f"  {each.name:{width}}  {each.summary}" for each in group.subcommands),
            "",
            "OPTIONS:",
            "  --why NAME,...  explain columns of the output; all: all of them",
            "  -h, --help      print this help",
            "  --version       print name and version",
            "",
        )
    )


# --- The progress of msa-fleet on a terminal: done, failed, rate, time left.


_REDRAW_S = 0.5


class FleetProgress:
    """A status line on a terminal for the progress of msa-fleet, erased in the end."""

    def __init__(self, out: TextIO | None) -> None:
        self._line = StatusLine(out)
        self._next_s = 0.0

    def __enter__(self) -> "FleetProgress":
        self._line.write("msa-fleet: starting", 0, 1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._line.erase()

    def dashboard(self, address: str | None) -> None:
        """Print the address of Dask's dashboard, if it runs."""
        if address:
            self._line.add(f"dashboard: {address}")

    def update(self, progress: "Progress") -> None:
        """Show the progress of the run, at most every :data:`_REDRAW_S` seconds."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _REDRAW_S
            done = progress.skipped + progress.finished
            self._line.write(progress_text(progress), done, progress.total)


def progress_text(progress: "Progress") -> str:
    """Return the line: ``msa-fleet: 120 of 300, 3 failed, 1.4/s, 2:09 left``."""
    done = progress.skipped + progress.finished
    words = [f"msa-fleet: {done:,} of {progress.total:,}"]
    if progress.failed:
        words.append(f"{progress.failed:,} failed")
    if progress.workers == 0:
        words.append("waiting for workers")
    elif progress.finished:
        words.append(f"{progress.rate:.1f}/s")
        words.append(f"{_clock(progress.left / progress.rate)} left")
    return ", ".join(words)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
