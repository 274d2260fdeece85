# SPDX-License-Identifier: LGPL-2.1-or-later

"""Console scripts: ``msatools.console:NAME`` runs the command of that name."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

_OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Threshold of new objects: some 10 MB of small ones. With Python's default of 700,
collections take 16 to 54 ms of a first answer (demo core) and free hardly anything."""


def __getattr__(name: str) -> Callable[[], int]:
    """Return the console script of a command."""
    _end_by_ctrl_c()
    from msatools.registry import GROUPS, NAMES

    if name not in (*NAMES, *GROUPS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A group starts programs and threads, which need Python's usual exit.
    return partial(run if name in GROUPS else _run_and_leave, name)


def _run_and_leave(name: str) -> int:
    return leave(run(name))


def leave(status: int) -> int:
    """End the process with an exit status, at once.

    Freeing all types, modules and arrays piece by piece would take 40 to 140 ms.

    :return: The status, if the output cannot be flushed: Python then ends as usual.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return status
    atexit._run_exitfuncs()
    os._exit(status)


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status.

    :param argv: Arguments after the command's name; by default those of the process.
    """
    _end_by_ctrl_c()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    # drgn loads the plugins of all installed packages, which takes a tenth of a second,
    # and may fetch debug info. DRGN_PLUGINS=NAME still loads one.
    os.environ.setdefault("DRGN_DISABLE_PLUGINS", "*")
    from msatools.registry import GROUPS, allow_one_thread, load, load_group

    allow_one_thread()

    if name in GROUPS:
        from msatools.cli.subcommands import run_group

        return run_group(load_group(name), argv)
    from msatools.cli.main import run_console

    return run_console(load(name), argv)


def _end_by_ctrl_c() -> None:
    """Let Ctrl-C end the process until the command installs handlers of its own.

    Else Ctrl-C during the imports, a tenth of a second, would print a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


# --- One command in this process, in the sandbox and with its own bounds.
#
# The arguments are PARENT MEMORY SECONDS COMMAND [ARGUMENT...]. msa-fleet runs it to
# read each dump: PARENT is the PID of the process that waits for it.


EXIT_NO_SANDBOX = 71
"""Exit status if the sandbox cannot be set up; <sysexits.h> EX_OSERR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Enter the sandbox, run a command with limits, and return its exit status."""
    from msatools.cli.sandbox import binding, lock_down
    from msatools.program import formats

    argv = sys.argv[1:] if argv is None else argv
    parent, memory_bytes, seconds = map(int, argv[:3])
    name, *arguments = argv[3:]
    for argument in arguments:
        formats.copy(argument)
    try:
        lock_down(binding(), memory_bytes, seconds)
    except (OSError, ValueError) as error:
        print(f"the sandbox cannot be set up: {error}", file=sys.stderr)
        return EXIT_NO_SANDBOX
    if os.getppid() != parent:
        # The parent ended before lock_down() tied this process to it.
        return EXIT_NO_SANDBOX
    return run(name, arguments)
