# SPDX-License-Identifier: LGPL-2.1-or-later

"""The list of commands, for drgn's prompt, the lab and the tests.

pyproject.toml lists them, too, to install ``msa-NAME`` (:mod:`msatools.console`).
"""

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
    """Import a command, which imports all that it needs."""
    from msatools.numpy_threads import one_thread

    with one_thread():
        command: Command[Any] = import_module(f"msatools.commands.{name}").COMMAND
    return command


GROUPS = ("fleet",)
"""Names of modules with subcommands, which work on many targets."""


def load_group(name: str) -> "CommandGroup":
    """Import a command with subcommands."""
    group: CommandGroup = import_module(f"msatools.commands.{name}").COMMAND
    return group
