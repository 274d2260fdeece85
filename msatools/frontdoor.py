# SPDX-License-Identifier: LGPL-2.1-or-later

"""The command ``msa``: runs the other commands by name.

Commands are imported when they run, so that ``msa NAME`` starts as fast as
``msa-NAME``.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, TextIO

from msatools.registry import GROUPS, NAMES

if TYPE_CHECKING:
    from msatools.render.blocks import Block

HELP = "help"

SESSIONS = ("crash", "drgn")
"""Sessions of drgn, which only ``msa`` runs."""

ASSISTANTS = "mcp"
"""The server for assistants, which only ``msa`` runs."""

ALL = (*NAMES, *GROUPS, *SESSIONS, ASSISTANTS)
"""All that can be run by name."""

DEFAULT = "report"
"""The command that ``msa TARGET`` runs."""

TARGET = 1
"""Exit status if the target cannot be opened."""

USAGE = 2
"""Exit status for wrong usage."""

_NUMBER = re.compile(r"[+-]?\.?\d.*")


def script() -> int:
    """Run :func:`main` as a console script."""
    from msatools.console import leave

    return leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status.

    :param argv: Arguments after ``msa``; by default those of the process.
    """
    words = sys.argv[1:] if argv is None else argv
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        return _print(_help())
    if first == "--version":
        from msatools import __version__

        return _print(f"{__version__}\n")
    if first in SESSIONS:
        from msatools.cli.drgn_prompt import run_session

        return run_session(first, words[1:])
    if first == ASSISTANTS:
        from msatools.mcp_server import serve

        return serve(words[1:])
    if first == HELP and not os.path.exists(HELP):
        return _help_on(words[1:])
    from msatools.console import run

    if first in ALL:
        return run(first, words[1:])
    if not words and os.geteuid() and _is_terminal():
        return _introduce()
    if _is_argument(first) or os.path.exists(first):
        return run(DEFAULT, words)
    return _refuse(first)


def _is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def _introduce() -> int:
    """Print advice for a user who may not read the running kernel."""
    for line in (
        "this machine, what is wrong with it: sudo msa",
        "a crash dump, what happened: msa VMCORE; a QEMU guest: msa --qemu SOCKET",
        f"one thing at a time: msa {'|'.join(NAMES)}; all: msa --help",
    ):
        _fail(line, TARGET)
    return TARGET


def _is_argument(word: str) -> bool:
    """Return whether a word is no command's name: empty, option, number or path."""
    return not word or word[0] == "-" or "/" in word or bool(_NUMBER.fullmatch(word))


def _help_on(words: Sequence[str]) -> int:
    """Show the page on a topic, or the list of topics."""
    if len(words) > 1 and words[0][:1] != "-":
        return _fail(f"{words[1]}: a second topic, after {words[0]}", USAGE)
    from msatools.help.topics import UnknownTopicError, topic_blocks, topic_list

    try:
        if not words or words[0] in ("-h", "--help"):
            return _print(topic_list())
        return _print(topic_blocks(words[0]))
    except UnknownTopicError as error:
        return _fail(f"help: {error}", USAGE)


def _print(text: "str | Iterable[Block]") -> int:
    from msatools.cli.output import OutputClosed, OutputError, end_by, output

    try:
        with output() as out:
            if not isinstance(text, str):
                _show_page(text, out)
            elif not out.isatty():
                out.write(text)
            else:
                from msatools.cli.screen import is_usable, page

                (page if is_usable(out) else _write)(text, out)
    except OutputClosed:
        import signal

        return end_by(signal.SIGPIPE)
    except OutputError as error:
        return _fail(str(error), 1)
    return 0


def _write(text: str, out: TextIO) -> None:
    out.write(text)


def _show_page(blocks: "Iterable[Block]", out: TextIO) -> None:
    from msgspec.structs import replace

    from msatools.cli.screen import is_usable, page
    from msatools.render.device import device_of, show
    from msatools.render.legend import PAGE_WIDTH

    device = device_of(out, full=True)
    width = min(device.width or PAGE_WIDTH, PAGE_WIDTH)
    text = StringIO()
    show(blocks, text, replace(device, width=width, height=None))
    (page if is_usable(out) else _write)(text.getvalue(), out)


def _help() -> str:
    from msatools.registry import load, load_group

    lines = [
        f"USAGE: msa [OPTION...] [TARGET]   as msa {DEFAULT}",
        "USAGE: msa COMMAND [OPTION...] [TARGET] [INTERVAL [COUNT]]",
    ]
    width = max(map(len, ALL))
    lines += (
        "look into a Linux kernel: a crash dump, or the one that is running",
        "",
        "COMMANDS (msa COMMAND is msa-COMMAND, and %COMMAND at drgn's prompt):",
        *(f"  {name:{width}}  {load(name).summary}" for name in NAMES),
        "",
        "OF MANY DUMPS (msa COMMAND is msa-COMMAND):",
        *(f"  {name:{width}}  {load_group(name).summary}" for name in GROUPS),
        "",
        "SESSIONS OF DRGN (msa drgn --help, msa crash --help):",
        f"  {'crash':{width}}  its crash commands: msa crash TARGET [COMMAND]",
        f"  {'drgn':{width}}  its prompt or a script: msa drgn TARGET [SCRIPT]",
        "",
        "FOR ASSISTANTS (msa mcp --help):",
        f"  {ASSISTANTS:{width}}  all commands as tools, by the Model Context Protocol",
        "",
        "HELP:",
        "  msa help          the topics: guides, commands, columns",
        "  msa help TOPIC    one of them, such as it-hangs",
        "",
        "OPTIONS:",
        "  -h, --help  print this help; of one command: msa COMMAND --help",
        "  --version   print the version",
        "",
        "Without a TARGET, the running kernel is read. A dump with the name of a",
        "command is named as a path: ./NAME",
        "",
    )
    return "\n".join(lines)


def _refuse(word: str) -> int:
    """Print why a word is refused, with the nearest or all names; return the status."""
    from difflib import get_close_matches

    nearest = get_close_matches(word, (*ALL, HELP), 1)
    names = ", ".join(ALL)
    advice = f"did you mean {nearest[0]}?" if nearest else f"name one of {names}"
    return _fail(f"{word}: no such command or file; {advice}; see msa --help", USAGE)


def _fail(message: str, status: int) -> int:
    if sys.stderr is not None:
        from msatools.render.blocks import escape

        # print(file=None) would print to standard output.
        print(f"msa: {escape(message)}", file=sys.stderr)
    return status
