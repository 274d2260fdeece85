# SPDX-License-Identifier: LGPL-2.1-or-later

"""Register the commands with drgn, which imports this at every start.

Commands are imported when they are first used, for the sake of all other sessions.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drgn import Program, ProgramFlags
from drgn.commands import (
    DEFAULT_COMMAND_NAMESPACE,
    ParsedCommand,
    parse_shell_command,
)

from msatools.registry import NAMES, load

if TYPE_CHECKING:
    from msatools.cli.main import Command


class LazyCommand:
    """A command of drgn that is imported when it is first used.

    It has the methods that ``drgn.commands.Command`` asks for.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def description(self) -> str:
        """Describe the command in one line."""
        return self._command().summary

    def format_usage(self) -> str:
        """Give the usage line."""
        from msatools.cli.main import make_parser

        usage = make_parser(self._command(), in_drgn=True).format_usage()
        return usage.partition(": ")[2].rstrip()

    def format_help(self, *, indent: str = "") -> str:
        """Give the help without its usage line."""
        from msatools.cli.main import make_parser

        parser = make_parser(self._command(), in_drgn=True)
        body = parser.format_help().removeprefix(parser.format_usage())
        return textwrap.indent(body.strip("\n"), indent)

    def enabled(self, prog: Program) -> bool:
        """Tell whether the program is one to run the command on."""
        return bool(prog.flags & ProgramFlags.IS_LINUX_KERNEL)

    def parse(self, source: str, /) -> ParsedCommand[Sequence[str]]:
        """Split what follows the command's name, pipes and redirections apart."""
        return parse_shell_command(source)

    def run(self, prog: Program, name: str, args: Sequence[str], /, **_: Any) -> Any:
        """Run the command and return its report, which drgn keeps in ``_``."""
        from msatools.cli.main import run_in_drgn

        return run_in_drgn(self._command(), prog, args)

    def _command(self) -> "Command[Any]":
        return load(self._name)


for _name in NAMES:
    DEFAULT_COMMAND_NAMESPACE.register(_name, LazyCommand(_name))
