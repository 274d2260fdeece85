# SPDX-License-Identifier: LGPL-2.1-or-later

"""The list of commands, for drgn's prompt, the lab and the tests, and their import.

pyproject.toml lists them, too, to install ``msa-NAME`` (:mod:`msatools.console`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msatools.cli.arguments import Command
    from msatools.cli.subcommands import CommandGroup

NAMES = (
    "cpus",
    "locks",
    "memstat",
    "prstat",
    "report",
    "whatis",
    "zombies",
)
"""Names of modules in :mod:`msatools.commands`."""


def load(name: str) -> "Command[Any]":
    """Import a command, and with it numpy and the other modules that it needs."""
    with one_thread():
        command: Command[Any] = import_module(f"msatools.commands.{name}").COMMAND
    return command


GROUPS = ("fleet",)
"""Names of modules with subcommands, which work on many targets."""


def load_group(name: str) -> "CommandGroup":
    """Import a command with subcommands."""
    group: CommandGroup = import_module(f"msatools.commands.{name}").COMMAND
    return group


# --- Imports numpy without the threads that OpenBLAS starts for matrices.
#
# OpenBLAS starts one thread fewer than there are CPUs when numpy is imported, and they
# spin until they sleep: a tenth of a second of CPU on two cores, more on more. msatools
# multiplies no matrices, and runs on machines that must not be disturbed.
#
# The console scripts set the variable for their process, and all that these start
# inherit it. drgn's prompt is the user's process, whose environment is passed on to
# all programs started there: it is set for the import alone. A program that uses
# msatools as a library decides itself how it imports numpy.


_VARIABLE = "OPENBLAS_NUM_THREADS"


def allow_one_thread() -> None:
    """Limit numpy to one thread here and in children, unless the variable is set."""
    os.environ.setdefault(_VARIABLE, "1")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit numpy to one thread if the block imports it, unless the variable is set."""
    if "numpy" in sys.modules or _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
