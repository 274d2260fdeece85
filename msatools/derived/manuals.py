# SPDX-License-Identifier: LGPL-2.1-or-later

"""Manual pages of ``msa`` and of each command, in roff (man(7)).

``python -m msatools.derived.manuals FOLDER`` writes them, and completion scripts, below
a folder such as /usr/share; setup.py calls it when it builds a package.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msatools
from msatools.cli.arguments import Command, examples_of
from msatools.cli.subcommands import CommandGroup
from msatools.derived.completions import completions
from msatools.derived.options import Option, options_of, options_of_subcommand
from msatools.help.topics import pages_on
from msatools.legends import legend_of
from msatools.registry import GROUPS, NAMES, load, load_group

_TARGET = (
    "TARGET is a crash dump (a vmcore in ELF format, or as makedumpfile and QEMU write "
    "them), any other file with the memory of a Linux guest, /proc/kcore, or a "
    "recording made with --record. Without a TARGET, the "
    "running kernel is read, for which you need to be root. Dumps need no debug info: "
    "the kernel's own BTF is used if none is found."
)
_INTERVAL = (
    "With an INTERVAL in seconds, on a running kernel, each report is of what changed "
    "in it; with a COUNT, there are that many."
)
_STATUS = (
    ("0", "done, also if an interval run was stopped"),
    (
        "1",
        "the target, its types, or a PID or CPU that was named could not be found or "
        "read",
    ),
    ("2", "wrong usage"),
    (
        "3",
        "with --strict: something was missing or unreadable, or a check failed",
    ),
    ("70", "a fault of msatools itself: the line says where, and what to send"),
)
_GROUP_STATUS = (
    ("0", "done; a dump that cannot be read is a row of the results"),
    ("1", "the dumps, the results or the cluster could not be used"),
    ("2", "wrong usage"),
    ("3", "with --strict: a dump has no report"),
    ("70", "a fault of msatools itself: the line says where, and what to send"),
)
_ENVIRONMENT = (
    ("NO_COLOR", "if it is set, nothing is coloured"),
    (
        "MSA_PAGER, PAGER",
        "the pager for what is longer than the screen, without an INTERVAL; by default "
        "less, with FRX unless LESS is set; empty or cat: none",
    ),
    ("DEBUGINFOD_URLS", "where --debuginfod fetches debug info"),
)


def manuals() -> dict[str, str]:
    """Return all manual pages by file name, such as ``msa-memstat.1``."""
    commands = [load(name) for name in NAMES]
    pages = {f"msa-{command.name}.1": _command_page(command) for command in commands}
    groups = [load_group(name) for name in GROUPS]
    pages |= {f"msa-{group.name}.1": _group_page(group) for group in groups}
    return {"msa.1": _front_page(commands, groups), **pages}


def _command_page(command: Command[Any]) -> str:
    name = f"msa-{command.name}"
    return _page(
        *_head(name, command.summary),
        *_section("SYNOPSIS"),
        f".B {_escape(name)}",
        _escape("[OPTION...] [TARGET] [INTERVAL [COUNT]]"),
        *_section("DESCRIPTION"),
        _escape(f"{command.summary[0].upper()}{command.summary[1:]}."),
        *_paragraph(_TARGET),
        *_paragraph(_INTERVAL),
        *_paragraph(
            f"Inside drgn, %{command.name} is this command on drgn's program; it takes "
            "no TARGET."
        ),
        *_options(options_of(command)),
        *_section("EXAMPLES"),
        *_list(
            (f"{name} {words}".rstrip(), what)
            for words, what in examples_of(command, in_drgn=False)
        ),
        *_output(command.name),
        *_tail(("msa", *(f"msa-{other}" for other in NAMES if other != command.name))),
    )


def _group_page(group: CommandGroup) -> str:
    name = f"msa-{group.name}"
    synopsis: list[str] = []
    for each in group.subcommands:
        synopsis += [
            *([".br"] if synopsis else []),
            f".B {_escape(f'{name} {each.name}')}",
            _escape(f"{each.operands} [OPTION...]"),
        ]
    options = []
    for each in group.subcommands:
        options += [
            *_section(_escape(f"{name} {each.name}")),
            _escape(f"{each.summary[0].upper()}{each.summary[1:]}."),
        ]
        for option in options_of_subcommand(group, each):
            options += [".TP", _flags(option), _text(option.help)]
    return _page(
        *_head(name, group.summary),
        *_section("SYNOPSIS"),
        *synopsis,
        *_section("DESCRIPTION"),
        _escape(f"{group.summary[0].upper()}{group.summary[1:]}."),
        *options,
        *_section("EXAMPLES"),
        *_list(
            (f"{name} {each.name} {words}", what)
            for each in group.subcommands
            for words, what in each.examples
        ),
        *_output(group.name),
        *_section("EXIT STATUS"),
        *_list(_GROUP_STATUS),
        *_section("SEE ALSO"),
        *_see_also(("msa", *(f"msa-{other}" for other in NAMES))),
    )


def _front_page(commands: list[Command[Any]], groups: list[CommandGroup]) -> str:
    listed = [(each.name, each.summary) for each in commands]
    listed += ((each.name, each.summary) for each in groups)
    return _page(
        *_head("msa", "look into a Linux kernel: a crash dump, or the running one"),
        *_section("SYNOPSIS"),
        ".B msa",
        _escape("[OPTION...] [TARGET]"),
        ".br",
        ".B msa",
        _escape("COMMAND [OPTION...] [TARGET] [INTERVAL [COUNT]]"),
        ".br",
        ".B msa help",
        _escape("[TOPIC]"),
        ".br",
        ".B msa drgn",
        _escape("TARGET [SCRIPT]"),
        ".br",
        ".B msa crash",
        _escape("TARGET [COMMAND]"),
        ".br",
        ".B msa",
        _escape("--help | --version"),
        *_section("DESCRIPTION"),
        _escape("msa vmcore is msa-report vmcore: what happened, and what is wrong."),
        *_paragraph("msa COMMAND is msa-COMMAND, which has a manual page of its own."),
        *_paragraph(
            "msa help lists guides, such as it-hangs, and other pages; msa help TOPIC "
            "shows one."
        ),
        *_paragraph(
            "msa drgn opens drgn's prompt on TARGET, or runs a script there; msa crash "
            "opens the prompt of drgn's crash commands, or runs one of them."
        ),
        *_paragraph(_TARGET),
        *_section("COMMANDS"),
        *_list(listed),
        *_section("EXAMPLES"),
        *_list(
            [
                ("msa vmcore", "what happened to a kernel that died"),
                *(
                    (f"msa {command.name} {words}".rstrip(), what)
                    for command in commands
                    for words, what in command.examples[:1]
                ),
            ]
        ),
        *_tail(f"msa-{name}" for name in (*NAMES, *GROUPS)),
    )


def _page(*lines: str) -> str:
    return "\n".join((*lines, ""))


def _head(name: str, summary: str) -> Iterator[str]:
    # No date, so that a page depends only on the commands.
    version = _escape(f"msatools {msatools.__version__}")
    yield f'.TH {name.upper()} 1 "" "{version}" "User Commands"'
    # No hyphenation, and no spaces to align the right edge.
    yield ".nh"
    yield ".ad l"
    yield from _section("NAME")
    yield f"{_escape(name)} \\- {_escape(summary)}"


def _tail(others: Iterable[str]) -> Iterator[str]:
    """Yield the last sections.

    :param others: Names of the other pages.
    """
    yield from _section("EXIT STATUS")
    yield from _list(_STATUS)
    yield from _section("ENVIRONMENT")
    yield from _list(_ENVIRONMENT)
    yield from _section("SEE ALSO")
    yield from _see_also(others)


def _see_also(others: Iterable[str]) -> Iterator[str]:
    """Yield references to other pages."""
    *first, last = (f".BR {_escape(name)} (1)" for name in others)
    yield from (f"{name}," for name in first)
    yield last


def _options(options: tuple[Option, ...]) -> Iterator[str]:
    for group in dict.fromkeys(option.group for option in options):
        if group == "OPTIONS":
            yield from _section("OPTIONS")
        else:
            yield f'.SS "{_escape(f"Options for the {group}".title())}"'
        for option in options:
            if option.group == group:
                yield ".TP"
                yield _flags(option)
                yield _text(option.help)


def _flags(option: Option) -> str:
    """Return the forms of an option: flags in bold, values in italics."""
    flags = ", ".join(f"\\fB{_escape(flag)}\\fR" for flag in option.flags)
    values = " ".join(f"\\fI{_escape(name)}\\fR" for name in option.metavars)
    return f"{flags} {values}".rstrip()


def _output(command: str) -> Iterator[str]:
    """Yield an example of real output, and the legend of a command."""
    yield from _section("OUTPUT")
    page = next(iter(pages_on(command)), None)
    if page is not None and (shown := page.first_example) is not None:
        yield "Of a dump:"
        yield ".PP"
        yield ".nf"
        yield from (_text(line) for line in shown)
        yield ".fi"
    for group in legend_of(command):
        yield f'.SS "{_escape(group.title)}"'
        yield from _list((entry.name, entry.text) for entry in group.entries)


def _section(title: str) -> Iterator[str]:
    yield f".SH {title}"


def _paragraph(text: str) -> Iterator[str]:
    yield ".PP"
    yield _text(text)


def _list(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in items:
        yield ".TP"
        yield f".B {_escape(term)}"
        yield _text(text)


def _text(text: str) -> str:
    """Return a text whose first character is no control character of roff."""
    escaped = _escape(text)
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _escape(text: str) -> str:
    for character, by in (
        ("\\", "\\e"),
        ("-", "\\-"),
        ("'", "\\(aq"),
        ("`", "\\(ga"),
        ("^", "\\(ha"),
        ("~", "\\(ti"),
        ('"', "\\(dq"),
        # The ellipsis is in outputs, but not in ASCII.
        ("…", "..."),
    ):
        text = text.replace(character, by)
    return text


def main(folder: str) -> None:
    """Write all manual pages and completion scripts below a folder."""
    pages = {f"man/man1/{name}": text for name, text in manuals().items()}
    for name, text in {**pages, **completions()}.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
