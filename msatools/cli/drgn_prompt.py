# SPDX-License-Identifier: LGPL-2.1-or-later

"""Commands at drgn's prompt (``%command``), and ``msa drgn`` and ``msa crash``."""

import argparse
import builtins
import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic

import drgn.cli
from drgn import Program, ProgramFlags
from drgn.commands import CommandArgumentError, CommandError, run_command

import msatools
from msatools.cli.arguments import Answer, Command, R, make_parser, refuse_excluded
from msatools.cli.execution import (
    RunResult,
    check,
    chosen,
    instead,
    print_answer,
    print_report,
    run,
)
from msatools.cli.main import EXIT_DONE, EXIT_TARGET, failed, is_expected
from msatools.cli.options import (
    Asked,
    Formatter,
    Help,
    OptionParser,
    UsageError,
    parse_words,
)
from msatools.cli.output import OutputClosed, OutputError, is_terminal, output
from msatools.errors import fault_of
from msatools.model import Presented
from msatools.program import TargetError, TargetSpec, describe, open_target
from msatools.render.blocks import escape
from msatools.reports.forms import Document
from msatools.selfdesc import create_modules, is_served_by_btf

if TYPE_CHECKING:
    from msatools.program import Opened

# --- Execution of a command as %command at drgn's prompt.


_KEPT = "msatools.reports"
"""Key in ``prog.cache``: maps command names to their last reports."""

_ABOUT_OUTPUT = ("--json", "--strict")
"""Options that change the output, but not the report."""

_WHAT_TO_DO = "send its authors this, and the traceback above"

_SHOWN_AS_TEXT: set[type] = set()


def run_in_drgn(
    command: Command[R], prog: Program, argv: Sequence[str]
) -> R | Document | None:
    """Run a command on drgn's program, and return its last report.

    ``--diff`` and ``--why`` return their document; ``--help`` returns ``None``.

    :param argv: Arguments after the command's name.
    :raises CommandArgumentError: for wrong usage, such as a target
    :raises CommandError: if the report is incomplete with ``--strict``; if a file
        cannot be read or written; for a fault of msatools
    :raises TargetError: if the program is not a kernel, or has no types
    """
    _show_as_text(Presented)
    _fit_to_terminal()
    try:
        return _run(command, prog, argv)
    except Exception as error:
        if isinstance(error, CommandError) or is_expected(error):
            raise
        raise _error_of(command, f"{fault_of(error)}; {_WHAT_TO_DO}") from error


def _run(
    command: Command[R], prog: Program, argv: Sequence[str]
) -> R | Document | None:
    try:
        parser = make_parser(command, in_drgn=True)
        args = parser.parse_intermixed_args(argv)
        command = chosen(command, parser, args)
        words = parse_words(args.words)
        refuse_excluded(command, parser, args)
        if (answer := instead(command, parser, args, words, True)) is not None:
            return _answer_in_drgn(command, answer, args)
        if words.target is not None:
            raise UsageError(f"{words.target}: the target is drgn's own")
        if words.interval_s is not None and not prog.flags & ProgramFlags.IS_LIVE:
            text = f"{words.interval_s:g}: the dump does not change in an interval"
            raise UsageError(text)
        check(command, args, words)
    except Asked as asked:
        sys.stdout.write(str(asked))
        return None
    except UsageError as error:
        raise CommandArgumentError(f"%{command.name}: {escape(str(error))}") from None
    except TargetError as error:
        raise _error_of(command, str(error)) from None

    seen: RunResult[R] = RunResult()
    kept = _KeptReports(prog, command, argv, is_kept=args.record is None)
    try:
        if (report := kept.find()) is not None:
            seen.last, seen.incomplete = report, command.problems(report)
            command.keep(report, args)
            print_report(command, report, args)
        else:
            run(command, prog, describe(prog), args, words, seen)
            kept.keep(seen)
    except OutputClosed:
        # The reader, such as `| head`, has enough; the report is returned all the same.
        pass
    except UsageError as error:
        # Some arguments are wrong for this target only.
        raise CommandArgumentError(f"%{command.name}: {escape(str(error))}") from None
    except OutputError as error:
        raise _error_of(command, str(error)) from None
    except KeyboardInterrupt:
        if words.interval_s is None:
            raise
    for fault in seen.faults.values():
        sys.stderr.write(fault.traceback)
        raise _error_of(command, f"{fault}; {_WHAT_TO_DO}")
    _require_complete(command, args, seen.incomplete)
    return seen.last


class _KeptReports(Generic[R]):
    """The last report of each command on a dump, to print if it is run again.

    Reports of a running kernel, which changes, are not kept. A report is only used with
    the same arguments and the same source of types.
    """

    def __init__(
        self, prog: Program, command: Command[R], argv: Sequence[str], *, is_kept: bool
    ) -> None:
        self._name = command.name
        self._argv = tuple(word for word in argv if word not in _ABOUT_OUTPUT)
        self._is_kept = is_kept and not prog.flags & ProgramFlags.IS_LIVE
        self._prog = prog
        self._all: dict[str, tuple[Any, R]] = prog.cache.setdefault(_KEPT, {})

    def find(self) -> R | None:
        """Return the kept report of the same arguments; ``None`` if there is none."""
        if not self._is_kept or self._name not in self._all:
            return None
        key, report = self._all[self._name]
        return report if key == self._key() else None

    def keep(self, seen: RunResult[R]) -> None:
        """Keep the last report, unless a fault of msatools cost a part of it."""
        if self._is_kept and seen.last is not None and not seen.faults:
            self._all[self._name] = self._key(), seen.last

    def _key(self) -> tuple[object, ...]:
        return self._argv, is_served_by_btf(self._prog)


def _error_of(command: Command[R], why: str) -> CommandError:
    return CommandError(f"%{command.name}: {escape(why)}")


def _answer_in_drgn(
    command: Command[R], answer: Answer, args: argparse.Namespace
) -> Document:
    with contextlib.suppress(OutputClosed):
        print_answer(answer, args)
    _require_complete(command, args, answer.incomplete)
    return answer.document


def _require_complete(
    command: Command[R], args: argparse.Namespace, incomplete: bool
) -> None:
    if args.strict and incomplete:
        raise CommandError(f"%{command.name}: the report is not complete")


def _show_as_text(kind: type) -> None:
    """Make drgn's prompt, if there is one, show values of a class by ``str()``."""
    display_str = getattr(sys.modules.get("drgn.cli"), "display_str", None)
    if display_str is not None and kind not in _SHOWN_AS_TEXT:
        _SHOWN_AS_TEXT.add(display_str(kind))


def _fit_to_terminal() -> None:
    """Make drgn's prompt draw reports as their commands do, fitted to the terminal."""
    original = sys.displayhook
    if original is not getattr(sys.modules.get("drgn.cli"), "_displayhook", None):
        return

    def display(value: object) -> None:
        if not (isinstance(value, Presented) and is_terminal(sys.stdout)):
            original(value)
            return
        from msatools.render.device import show

        # Imported by name: it is a higher layer, because it knows all commands.
        presentation: Any = import_module("msatools.presentation")
        with contextlib.suppress(OutputClosed), output() as out:
            show(presentation.blocks(value), out)
        vars(builtins)["_"] = value

    sys.displayhook = display


# --- msa drgn and msa crash: drgn's prompt on any target that msatools opens.
#
# drgn loads its plugins, msatools among them, when the target is opened; so the prompt
# has the commands of both. Types are loaded as for all commands.


SUMMARIES = {
    "crash": "crash commands of drgn: msa crash [TARGET [COMMAND]]",
    "drgn": "drgn's prompt or a script: msa drgn [TARGET [-e CODE | SCRIPT]]",
}


def run_session(name: str, argv: Sequence[str]) -> int:
    """Run ``msa drgn`` or ``msa crash``, and return the exit status.

    :param name: A key of :data:`SUMMARIES`.
    :param argv: Arguments after the name.
    """
    command = f"msa {name}"
    try:
        args = _parse(name, argv)
        opened = _open(args)
    except Asked as asked:
        return _print(str(asked))
    except Exception as error:
        return failed(error, command, debug="--debug" in argv)
    if name == "crash":
        return _crash(opened, args.rest)
    return _drgn(opened, args.code, args.rest)


def _parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse options, then the target unless an option names it, then the rest.

    :raises UsageError: for wrong usage
    """
    parser = OptionParser(
        prog=f"msa {name}",
        description=SUMMARIES[name],
        formatter_class=Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-k", dest="kernel", action="store_true", help="the running kernel")
    add("-c", dest="core", metavar="PATH", help="a dump, or /proc/kcore")
    add("--qemu", metavar="ADDR", help="a QEMU guest, by its QMP socket")
    add("-s", dest="vmlinux", metavar="VMLINUX", help="the kernel's debug info")
    add(
        "--types",
        choices=("auto", "dwarf", "btf"),
        default="auto",
        help="where types come from (auto: debug info if named or found, else BTF)",
    )
    add("--debuginfod", action="store_true", help="let debug info be fetched")
    if name == "drgn":
        add("-e", dest="code", metavar="CODE", help="run code, or a %%command")
    add("--debug", action="store_true", help="show tracebacks of errors")
    add("-h", "--help", action=Help, nargs=0, help="print this help")
    rest = "COMMAND" if name == "crash" else "SCRIPT [ARG...]"
    add("rest", nargs=argparse.REMAINDER, metavar=f"[TARGET] [{rest}]")
    args = parser.parse_args(argv)
    named = _named(args)
    if not named and args.rest:
        target, *args.rest = args.rest
        # Only for drgn: the options after a crash command belong to that command.
        if name == "drgn" and args.rest[:1] and args.rest[0].startswith("-"):
            args = parser.parse_args(args.rest, args)
        named = [target, *_named(args)]
        args.core = target
    if len(named) > 1:
        raise UsageError("two targets are named; name one")
    if name == "drgn" and args.code is None and args.rest:
        script = args.rest[0]
        if not os.path.exists(script):
            raise UsageError(f"{escape(script)}: no such script")
    if args.types == "btf" and (args.vmlinux is not None or args.debuginfod):
        raise UsageError("--types btf: asks for no debug info")
    return args


def _named(args: argparse.Namespace) -> list[str]:
    """Return the targets that options name."""
    named = [each for each in (args.core, args.qemu) if each is not None]
    return [*named, "/proc/kcore"] if args.kernel else named


def _open(args: argparse.Namespace) -> "Opened":
    opened = open_target(
        TargetSpec(
            path=args.core,
            qemu=args.qemu,
            vmlinux=args.vmlinux,
            types=args.types,
            debuginfod=args.debuginfod,
        )
    )
    create_modules(opened.prog)
    return opened


def _drgn(opened: "Opened", code: str | None, words: list[str]) -> int:
    prog = opened.prog
    drgn.set_default_prog(prog)
    if code is not None:
        sys.argv = ["-e", *words]
        names = _globals(drgn.cli.default_globals(prog))
        if code.startswith("%"):
            return _run_command(opened, code[1:], names)
        exec(code, names)
    elif words:
        sys.argv = words
        runpy.run_path(words[0], init_globals={"prog": prog}, run_name="__main__")
    elif not sys.stdin.isatty():
        exec(
            compile(sys.stdin.read(), "<stdin>", "exec"),
            _globals(drgn.cli.default_globals(prog)),
        )
    else:
        target = opened.target
        line = escape(f"{target.release}  {target.path}  types: {target.types}")
        drgn.cli.run_interactive(
            prog,
            banner_func=lambda banner: f"{line}\n{banner}\n%help lists commands.",
            globals_func=_globals,
        )
    return EXIT_DONE


def _globals(names: dict[str, Any]) -> dict[str, Any]:
    return {**names, "msatools": msatools}


def _crash(opened: "Opened", words: list[str]) -> int:
    drgn.set_default_prog(opened.prog)
    # drgn-crash uses this hook, too.
    sys.displayhook = getattr(drgn.cli, "_displayhook", sys.displayhook)
    names = _globals(drgn.cli.default_globals(opened.prog))
    return _run_command(opened, " ".join(["crash", *words]), names)


def _run_command(opened: "Opened", line: str, names: dict[str, Any]) -> int:
    try:
        run_command(opened.prog, line, globals=names)
    except Exception as error:
        # The message of a usage error or of a failure is for the user.
        sys.stdout.flush()
        print(escape(str(error)), file=sys.stderr)
        return EXIT_TARGET
    return EXIT_DONE


def _print(text: str) -> int:
    try:
        with output() as out:
            out.write(text)
    except (OutputClosed, OutputError):
        return EXIT_TARGET
    return EXIT_DONE
