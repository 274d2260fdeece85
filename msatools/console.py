# SPDX-License-Identifier: LGPL-2.1-or-later

"""Console scripts: ``msatools.console:NAME`` runs the command of that name."""

import signal
from collections.abc import Callable
from functools import partial


def __getattr__(name: str) -> Callable[[], int]:
    """Return the console script of a command."""
    from msatools.registry import NAMES

    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_run, name)


def _run(name: str) -> int:
    """Run a command, and return its exit status."""
    # Until the command has handlers of its own, Ctrl-C would be a traceback of imports,
    # which take half a second.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from msatools.cli.main import run_console
    from msatools.registry import load

    return run_console(load(name))
