# SPDX-License-Identifier: LGPL-2.1-or-later

"""``msa drgn`` and ``msa crash``: sessions of drgn on any target that msatools opens.

drgn loads its plugins when the target is opened, msatools among them; so the session
has the commands of both. Types are loaded as by all commands.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msatools.cli.main import EXIT_DONE, EXIT_TARGET, failed
from msatools.cli.output import OutputClosed, OutputError, output
from msatools.cli.usage import Asked, Formatter, Help, OptionParser, UsageError

if TYPE_CHECKING:
    from msatools.target import Opened

SUMMARIES = {
    "crash": "crash commands of drgn: msa crash [TARGET [COMMAND]]",
    "drgn": "drgn's prompt or a script: msa drgn [TARGET [-e CODE | SCRIPT]]",
}


def run_session(name: str, argv: Sequence[str]) -> int:
    """Run a session, and return its exit status.

    :param name: A key of :data:`SUMMARIES`.
    :param argv: Arguments after it.
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
    named = [each for each in (args.core, args.qemu) if each is not None]
    if len(named) + args.kernel > 1:
        raise UsageError("two targets are named; name one")
    if args.types == "btf" and (args.vmlinux is not None or args.debuginfod):
        raise UsageError("--types btf: asks for no debug info")
    if not named and not args.kernel and args.rest:
        args.core, *args.rest = args.rest
    if name == "drgn" and args.rest[:1] == ["-e"]:
        if len(args.rest) < 2 or args.code is not None:
            raise UsageError("-e: expected one argument, the code")
        _, args.code, *args.rest = args.rest
    return args


def _open(args: argparse.Namespace) -> "Opened":
    # Completion of commands is added to drgn's prompt if that is imported already.
    import drgn.cli  # noqa: F401

    from msatools.numpy_threads import one_thread

    with one_thread():
        from msatools.selfdesc import create_modules
        from msatools.target import TargetSpec, open_target

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
    import drgn.cli

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
        from msatools.render.blocks import escape

        target = opened.target
        line = escape(f"{target.release}  {target.path}  types: {target.types}")
        drgn.cli.run_interactive(
            prog,
            banner_func=lambda banner: f"{line}\n{banner}\n%help lists commands.",
            globals_func=_globals,
        )
    return EXIT_DONE


def _globals(names: dict[str, Any]) -> dict[str, Any]:
    import msatools

    return {**names, "msatools": msatools}


def _crash(opened: "Opened", words: list[str]) -> int:
    import drgn.cli

    drgn.set_default_prog(opened.prog)
    # As in drgn-crash.
    sys.displayhook = getattr(drgn.cli, "_displayhook", sys.displayhook)
    names = _globals(drgn.cli.default_globals(opened.prog))
    return _run_command(opened, " ".join(["crash", *words]), names)


def _run_command(opened: "Opened", line: str, names: dict[str, Any]) -> int:
    from drgn.commands import run_command

    from msatools.render.blocks import escape

    try:
        run_command(opened.prog, line, globals=names)
    except Exception as error:
        # A command that is wrong says how, and one that fails why.
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
