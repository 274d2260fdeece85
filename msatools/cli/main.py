# SPDX-License-Identifier: LGPL-2.1-or-later

"""Execution of a command as a console script.

A command is described by a :class:`Command`: its arguments, the function that starts a
run, and the one that renders a report. Here are its exit status, signals and errors,
and what needs no kernel, such as ``--help``; the rest is imported when it is needed.
"""

import signal
import sys
from collections.abc import Sequence

from msatools.cli.arguments import make_parser
from msatools.cli.command import Command, R
from msatools.cli.output import OutputClosed, OutputError, output
from msatools.cli.signals import Stopped, end_by, stop_on_signals
from msatools.cli.usage import Asked, UsageError

EXIT_DONE = 0
EXIT_TARGET = 1
EXIT_USAGE = 2


def run_console(command: Command[R], argv: Sequence[str] | None = None) -> int:
    """Run a command with a shell's arguments, and return its exit status.

    A signal that stops a run without an interval also ends the process.

    :param argv: Arguments after the command's name; by default those of the process.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = f"msa-{command.name}"
    debug = "--debug" in argv
    try:
        with stop_on_signals():
            return _run(command, argv, debug=debug)
    except Stopped as stopped:
        return end_by(stopped.number)
    except OutputClosed:
        return end_by(signal.SIGPIPE)
    except Exception as error:
        return failed(error, name, debug=debug)


def _run(command: Command[R], argv: Sequence[str], *, debug: bool) -> int:
    try:
        parser = make_parser(command, in_drgn=False)
        args = parser.parse_intermixed_args(argv)
    except Asked as asked:
        with output() as out:
            out.write(str(asked))
        return EXIT_DONE
    from msatools.cli.execution import execute

    return execute(command, parser, args)


def failed(error: Exception, name: str, *, debug: bool) -> int:
    """Print why a run failed, and return its exit status."""
    from msatools.render.blocks import escape

    if debug:
        import traceback

        traceback.print_exception(error)
    if sys.stderr is not None:
        # print(file=None) would print to standard output.
        print(f"{name}: {escape(_explain(error, name))}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_TARGET


def _explain(error: Exception, name: str) -> str:
    if isinstance(error, UsageError):
        return f"{error}; see {name} --help"
    from msatools.fleet.errors import FleetError
    from msatools.target import TargetError

    if isinstance(error, (TargetError, OutputError, FleetError)):
        return str(error)
    kind = type(error).__name__
    return f"unexpected {kind}: {error}; run it with --debug and report this"
