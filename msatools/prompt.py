# SPDX-License-Identifier: LGPL-2.1-or-later

"""Add to drgn's prompt ``%help``, completion with Tab, and hints at failed lookups.

The plugin calls it for each kernel that drgn opens.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drgn import NoDefaultProgramError, Program, TypeKind, get_default_prog
from drgn.commands import (
    DEFAULT_COMMAND_NAMESPACE,
    CommandArgumentError,
    CommandNotFoundError,
    argument,
    command,
)

from msatools.registry import NAMES, load
from msatools.standby import NAME

if TYPE_CHECKING:
    from msatools.derived.options import Option

_MARK = "_msatools_has_commands"
"""Attribute of drgn's completer once it completes commands, and of the hook for errors
once it gives hints."""

_NOT_FOUND = r"could not find (?:\w+ )?'(?:(\w+) )?([^']+)'(?s:.*)"
"""Pattern of drgn's errors of failed lookups; compiled only when one occurs."""

_KINDS = {
    "struct": (TypeKind.STRUCT,),
    "union": (TypeKind.UNION,),
    "enum": (TypeKind.ENUM,),
    "typedef": (TypeKind.TYPEDEF,),
    None: (TypeKind.TYPEDEF,),
}


def add_help(prog: Program) -> None:
    """Register ``%help``, unless drgn has one."""
    try:
        DEFAULT_COMMAND_NAMESPACE.lookup(prog, "help")
    except CommandNotFoundError:
        name = argument(
            "command", nargs="?", metavar="COMMAND", help="show all of this one"
        )
        command(name="help", description="list all commands", arguments=(name,))(_help)


def _help(prog: Program, name: str, args: Namespace, **_: Any) -> None:
    if args.command is not None:
        wanted = args.command.removeprefix("%")
        try:
            found = DEFAULT_COMMAND_NAMESPACE.lookup(prog, wanted)
        except CommandNotFoundError:
            raise CommandArgumentError(f"%help: {wanted}: no such command") from None
        print(f"usage: {found.format_usage()}\n\n{found.format_help()}")
        return
    known = dict(DEFAULT_COMMAND_NAMESPACE.enabled(prog))
    width = max(map(len, known)) + 1
    ours = sorted({*known} & {*NAMES})
    for owner, names in (("msatools", ours), ("drgn", sorted({*known} - {*ours}))):
        print(f"Commands of {owner}:")
        for each in names:
            print(f"  {'%' + each:{width}}  {known[each].description()}")
    print("%help COMMAND shows all of one.")


def complete_commands() -> None:
    """Have drgn's completer complete lines that begin with ``%``.

    drgn has no interface for it. Without its completer, as in scripts, nothing is done.
    The change is permanent, so it keeps no program but asks for the default one.
    """
    completer: Any = _of_drgn("rlcompleter", "Completer")
    readline: Any = _of_drgn("repl", "readline")
    if completer is None or readline is None or hasattr(completer, _MARK):
        return
    original = completer.complete

    def complete(self: object, text: str, state: int) -> str | None:
        line = readline.get_line_buffer()[: readline.get_endidx()]
        if not line.startswith("%"):
            completed: str | None = original(self, text, state)
            return completed
        try:
            found = matches(get_default_prog(), line, text)
        except NoDefaultProgramError:
            return None
        return found[state] if state < len(found) else None

    completer.complete = complete
    setattr(completer, _MARK, True)


def _of_drgn(module: str, name: str) -> object | None:
    """Return an attribute of a module in ``drgn.internal``, if it was imported."""
    return getattr(sys.modules.get(f"drgn.internal.{module}"), name, None)


def matches(prog: Program, line: str, text: str) -> list[str]:
    """Return the completions of the end of a line.

    :param line: The line up to the cursor, from ``%`` on.
    :param text: The end of the line that is replaced, after the last separator.
    """
    typed = line[1:].split(" ")
    name, word = typed[0], typed[-1]
    if len(typed) == 1:
        choices = [*_names(prog)] if word else []
    elif not (choices := _values(name, typed[-2], word)) and word:
        choices = _options(name)
    # readline takes a dash, a comma and an equals sign for the end of a word.
    kept = len(word) - len(text)
    return sorted(f"{each[kept:]} " for each in choices if each.startswith(word))


def _names(prog: Program) -> Iterator[str]:
    for name, _ in DEFAULT_COMMAND_NAMESPACE.enabled(prog):
        yield name


def _options(name: str) -> list[str]:
    """Return the options of one of our commands."""
    return [flag for option in _options_of(name) for flag in option.flags]


def _values(name: str, before: str, word: str) -> list[str]:
    """Return the completions of a value: a name, or the last in a list with commas.

    :param before: The word before, which may be the value's option; else the option is
        in *word*, before an equals sign.
    """
    start = ""
    if word.startswith("--") and "=" in word:
        before, _, word = word.partition("=")
        start = f"{before}="
    found = (option for option in _options_of(name) if before in option.flags)
    option = next(found, None)
    if option is None or option.value not in ("choice", "names"):
        return []
    first, comma, _ = word.rpartition(",")
    if option.value == "names" and comma:
        start += first + comma
    return [start + value for value in option.names]


def _options_of(name: str) -> "tuple[Option, ...]":
    """Return the options of one of our commands; none of another."""
    from msatools.derived.options import options_of

    return options_of(load(name)) if name in NAMES else ()


def hint_at_failed_lookups() -> None:
    """Add advice to errors of lookups that end a line or a script of drgn.

    Only processes of drgn's own command are changed; see :func:`hint` for the advice.
    """
    original = sys.excepthook
    if "drgn.cli" not in sys.modules or hasattr(original, _MARK):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        line = None
        with suppress(Exception):
            traceback = _without_own_frames(error, traceback)
            line = hint(get_default_prog(), error)
        original(kind, error.with_traceback(traceback), traceback)
        if line is not None:
            from msatools.render.blocks import escape

            print(f"msatools: {escape(line)}", file=sys.stderr)

    setattr(hook, _MARK, True)
    sys.excepthook = hook


def _without_own_frames(
    error: BaseException, traceback: TracebackType | None
) -> TracebackType | None:
    """Return a traceback from the user's code to where drgn refused a name."""
    from msatools.errors import UncertainNameError

    frames = [*_frames(traceback)]
    own = [
        number
        for number, each in enumerate(frames)
        if _is_in(each, "msatools.cli.drgn_prompt") or _is_in(each, "code")
    ]
    frames = frames[own[-1] + 1 :] if own else frames
    if isinstance(error, UncertainNameError):
        error.__suppress_context__, error.__cause__ = True, None
        for above, each in pairwise(frames):
            if _is_in(each, "msatools.standby"):
                above.tb_next = None
    return frames[0] if frames else traceback


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_in(traceback: TracebackType, module: str) -> bool:
    return traceback.tb_frame.f_globals.get("__name__") == module


def hint(prog: Program, error: BaseException) -> str | None:
    """Return advice for a lookup that failed without debug info.

    ``None`` for other errors, with debug info, and if the error says it already.
    """
    finders = prog.cache.get(NAME)
    if finders is None or not finders.is_serving or not isinstance(error, LookupError):
        return None
    said = re.fullmatch(_NOT_FOUND, str(error))
    if said is None:
        return None
    keyword, name = said.groups()
    for module in finders.modules.with_type(_KINDS.get(keyword, ()), name):
        full = f"{keyword} {name}" if keyword else name
        return (
            f"{full} is a type of the module {module}: prog.type({full!r}, {module!r})"
        )
    if not keyword and (symbols := prog.symbols(name)):
        return (
            f"{name} is a symbol of a module, and nothing says its type: "
            f"Object(prog, TYPE, address={symbols[0].address:#x})"
        )
    from msatools.program import description

    return (
        "the kernel's own types and symbols do not have it; debug info has more, but "
        f"seldom macros; to get it, {description.how_to_get(prog)}"
    )
