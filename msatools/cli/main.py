# SPDX-License-Identifier: LGPL-2.1-or-later

"""Execution of a command as a console script.

A :class:`Command` describes a command: its arguments, the function that starts a run,
and the one that renders a report. This module handles exit status, signals, errors and
options that need no kernel, such as ``--help``; it imports the rest when needed.
"""

import signal
import sys
from _thread import RLock
from collections.abc import Iterable, Sequence
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

from msatools.cli.arguments import Command, R, make_parser
from msatools.cli.options import Asked, UsageError
from msatools.cli.output import (
    OutputClosed,
    OutputError,
    Stopped,
    end_by,
    is_terminal,
    output,
    stop_on_signals,
)

if TYPE_CHECKING:
    from msatools.errors import OwnFault

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
            if is_terminal(out) and "--no-pager" not in argv:
                from msatools.cli.screen import is_usable, page

                if is_usable(out):
                    page(str(asked), out)
                    return EXIT_DONE
            out.write(str(asked))
        return EXIT_DONE
    _import_helpers_singly()
    from msatools.cli.execution import execute

    return execute(command, parser, args)


def _import_helpers_singly() -> None:
    """Let submodules of drgn.helpers.linux be imported without executing the package.

    The package imports all 39 submodules and drgn's command line, which takes 25 to
    33 ms. It is executed when one of its attributes is first accessed.
    """
    name = "drgn.helpers.linux"
    if name in sys.modules:
        return
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        return
    package, loader = module_from_spec(spec), spec.loader
    # RLock: other threads wait until the package is complete, but its own code, while
    # it is executed, may access attributes.
    lock, is_begun = RLock(), False

    def execute(attribute: str) -> object:
        nonlocal is_begun
        with lock:
            if not is_begun:
                is_begun = True
                loader.exec_module(package)
                package.__dict__.pop("__getattr__", None)
        try:
            found: object = package.__dict__[attribute]
        except KeyError:
            text = f"module {name!r} has no attribute {attribute!r}"
            raise AttributeError(text) from None
        return found

    package.__dict__["__getattr__"] = execute
    sys.modules[name] = package
    # As an import does: a plugin or script may use the full name.
    parent, _, short = name.rpartition(".")
    setattr(sys.modules[parent], short, package)


def failed(error: Exception, name: str, *, debug: bool) -> int:
    """Print the reason why a run failed, and return its exit status."""
    if isinstance(error, UsageError):
        status, why = EXIT_USAGE, f"{error}; see {name} --help"
    elif is_expected(error):
        status, why = EXIT_TARGET, str(error)
    else:
        from msatools.errors import fault_of

        return say_faults([fault_of(error)], name, debug=debug)
    if debug:
        import traceback

        traceback.print_exception(error)
    _say(f"{name}: {why}")
    return status


def is_expected(error: Exception) -> bool:
    """Return whether an error has a message for the user, not a fault of msatools."""
    from msatools.fleet.single import FleetError
    from msatools.program import TargetError

    return isinstance(error, (UsageError, TargetError, OutputError, FleetError))


def say_faults(faults: Iterable["OwnFault"], name: str, *, debug: bool) -> int:
    """Print a line for each fault of msatools, and return the exit status."""
    from msatools.errors import EXIT_FAULT, fault_line

    for fault in faults:
        if debug and sys.stderr is not None:
            sys.stderr.write(fault.traceback)
        _say(f"{name}: {fault_line(fault)}")
    return EXIT_FAULT


def _say(line: str) -> None:
    from msatools.render.blocks import escape

    if sys.stderr is not None:
        # print(file=None) would print to standard output.
        print(escape(line), file=sys.stderr)
