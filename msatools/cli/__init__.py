# SPDX-License-Identifier: LGPL-2.1-or-later

"""The command line: arguments, runs, screens and files, common to all commands.

``main`` runs a command as a console script, ``execution`` executes its arguments,
``arguments`` has its description and its parser. A command itself is a module of
:mod:`msatools.commands`; it uses ``arguments``, ``options`` and ``subcommands``.
"""

__all__ = (
    "arguments",
    "options",
    "subcommands",
)
