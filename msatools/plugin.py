# SPDX-License-Identifier: LGPL-2.1-or-later

"""Registration of the commands with drgn, which imports this module at every start.

Commands are imported when first used, so that other sessions start fast.
"""

import logging
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
    from msatools.cli.arguments import Command


class LazyCommand:
    """A command of drgn that is imported when first used.

    It has the methods of ``drgn.commands.Command``.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def description(self) -> str:
        """Return the summary of the command."""
        return self._command().summary

    def format_usage(self) -> str:
        """Return the usage line."""
        from msatools.cli.arguments import make_parser

        usage = make_parser(self._command(), in_drgn=True).format_usage()
        return usage.partition(": ")[2].rstrip()

    def format_help(self, *, indent: str = "") -> str:
        """Return the help without its usage line."""
        from msatools.cli.arguments import make_parser

        parser = make_parser(self._command(), in_drgn=True)
        body = parser.format_help().removeprefix(parser.format_usage())
        return textwrap.indent(body.strip("\n"), indent)

    def enabled(self, prog: Program) -> bool:
        """Return whether the command can run on the program."""
        return bool(prog.flags & ProgramFlags.IS_LINUX_KERNEL)

    def parse(self, source: str, /) -> ParsedCommand[Sequence[str]]:
        """Parse the arguments, with pipes and redirections split off."""
        return parse_shell_command(source)

    def run(self, prog: Program, name: str, args: Sequence[str], /, **_: Any) -> Any:
        """Run the command and return its report, which drgn keeps in ``_``."""
        from msatools.registry import one_thread

        with one_thread():
            # Imported here, with one thread, before commands import it.
            import numpy  # noqa: F401

            from msatools.cli.drgn_prompt import run_in_drgn

        return run_in_drgn(self._command(), prog, args)

    def _command(self) -> "Command[Any]":
        return load(self._name)


def drgn_prog_set(prog: Program) -> None:
    """Provide types for a kernel, and commands at its prompt; drgn calls it."""
    if not prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        return
    try:
        from msatools.prompt import (
            add_help,
            complete_commands,
            hint_at_failed_lookups,
        )
        from msatools.standby import stand_by

        stand_by(prog, _load_types)
        add_help(prog)
        complete_commands()
        hint_at_failed_lookups()
    except Exception as error:
        # drgn would print a traceback with each start.
        kind = type(error).__name__
        logging.getLogger("drgn").warning(
            "msatools: not available: %s: %s", kind, error
        )


def _load_types(prog: Program) -> str:
    """Load the kernel's own types, and return the line that reports it to the user."""
    from msatools.registry import one_thread

    with one_thread():
        from msatools.program import description
        from msatools.selfdesc import load_btf

        load_btf(prog)
    return (
        "no debug info is loaded; types and symbols are the kernel's own, which have "
        f"no source lines; to get debug info, {description.how_to_get(prog)}"
    )


for _name in NAMES:
    DEFAULT_COMMAND_NAMESPACE.register(_name, LazyCommand(_name))
