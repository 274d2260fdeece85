# SPDX-License-Identifier: LGPL-2.1-or-later

"""The commands that there are: drgn's prompt, the lab and the tests go by this list.

Besides here a command is named in pyproject.toml, which installs ``msa-NAME``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msatools.cli.command import Command

NAMES = (
    "cpus",
    "locks",
    "memstat",
    "prstat",
    "zombies",
)
"""Each is a module of :mod:`msatools.commands`."""


def load(name: str) -> "Command[Any]":
    """Import a command, which takes as long as all that it is made of."""
    command: Command[Any] = import_module(f"msatools.commands.{name}").COMMAND
    return command
