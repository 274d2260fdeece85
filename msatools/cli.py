# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run a command, for its console script and as ``%command`` at drgn's prompt.

A command is a table (:class:`Command`): its arguments, what collects its report, what
renders it. All that commands have in common is here: the words they take, the target,
intervals, exit status and signals.
"""

import argparse
import contextlib
import io
import itertools
import logging
import os
import re
import select
import signal
import sys
import termios
import time
import traceback
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, NoReturn, TextIO, TypeVar

from drgn import FaultError, Program, ProgramFlags
from drgn.commands import CommandArgumentError, CommandError, argument

import msatools
from msatools.kernel.report import Report
from msatools.render import json, show
from msatools.render.blocks import Block, escape, text
from msatools.selfdesc import BtfError
from msatools.target import Target, TargetError, TargetSpec, describe, open_target
from msatools.target.errors import DamagedDumpError, damaged_types

R = TypeVar("R", bound=Report)

EXIT_DONE = 0
EXIT_TARGET = 1
EXIT_USAGE = 2
EXIT_INCOMPLETE = 3

Progress = Callable[[int, int], None]
"""``progress(done, total)``, in a unit of the caller's choice."""


@dataclass(frozen=True, kw_only=True)
class Command(Generic[R]):
    """All that tells one command from another."""

    name: str
    """As in ``msa-NAME`` and ``%NAME``."""

    summary: str
    """What the command answers, in less than a line."""

    arguments: tuple[argument, ...]
    """Its own arguments; those of all commands are added."""

    examples: tuple[tuple[str, str], ...]
    """What to type after the name and target, and what that shows."""

    collect: Callable[[Program, Target, argparse.Namespace, Progress], R]
    blocks: Callable[[R, argparse.Namespace], Iterable[Block]]

    delta: Callable[[R, R], R]
    """``delta(previous, current)``: the current report with what changed since."""

    problems: Callable[[R], bool]
    """Whether something was missing or unreadable, or a check failed."""


class UsageError(Exception):
    """The words of a command line make no sense together."""


class _Asked(Exception):
    """The user asked for the help or the version, which is the argument."""


class _Stopped(BaseException):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _OutputError(Exception):
    """What was to be printed could not be."""


class _OutputClosed(Exception):
    """Nobody reads what is printed any more."""


# The words


class _Help(argparse.Action):
    # argparse's own prints at once, and hides what becomes of it.
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Asked(parser.format_help())


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        raise _Asked(f"{msatools.__version__}\n")


_OPTIONS = (
    argument("-v", dest="verbose", action="store_true", help="show more detail"),
    argument("--json", action="store_true", help="print JSON, one object a sample"),
    argument(
        "--strict",
        action="store_true",
        help="fail (status 3) if anything was missing, or a check failed",
    ),
    argument("-h", "--help", action=_Help, nargs=0, help="print this help"),
)

_TARGET_OPTIONS = (
    argument("-k", dest="kernel", action="store_true", help="the running kernel"),
    argument("-c", dest="core", metavar="PATH", help="a dump, or /proc/kcore"),
    argument("--qemu", metavar="ADDR", help="a QEMU guest, by its QMP socket"),
    argument("-s", dest="vmlinux", metavar="VMLINUX", help="the kernel's debug info"),
    argument(
        "--types",
        choices=("auto", "dwarf", "btf"),
        default="auto",
        help="where types come from (auto: debug info if named or found, else BTF)",
    ),
    argument(
        "--debuginfod",
        action="store_true",
        help="let debug info be fetched from DEBUGINFOD_URLS",
    ),
    argument("--debug", action="store_true", help="show tracebacks of errors"),
    argument("--version", action=_Version, nargs=0, help="print the version"),
)

_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("5 12", "what changes, each 5 s for a minute"),
)

_TARGET_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("vmcore", "a kernel that died"),
    ("-s vmlinux vmcore", "the same, its debug info not being installed"),
    ("", "this machine, now"),
)

_MAX_INTERVAL_S = 1e8
"""Three years: more than what the system's clocks take."""

_NUMBER = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE
)


@dataclass(frozen=True)
class Words:
    """What the words that belong to no option say."""

    target: str | None = None
    interval_s: float | None = None
    count: int | None = None


def parse_words(words: Iterable[str]) -> Words:
    """Tell target, interval and count apart.

    :raises UsageError: if there are too many of one, or a number makes no sense
    """
    target, numbers = None, []
    for word in words:
        if _NUMBER.fullmatch(word):
            numbers.append(word)
        elif target is None:
            target = word
        else:
            raise UsageError(f"{word}: a second target, after {target}")
    if len(numbers) > 2:
        raise UsageError(f"{numbers[2]}: a number too many")
    interval_s = float(numbers[0]) if numbers else None
    if interval_s is not None and not 0 < interval_s <= _MAX_INTERVAL_S:
        raise UsageError(f"{numbers[0]}: not a positive interval")
    count = None
    if len(numbers) == 2:
        if not re.fullmatch(r"\+?0*[1-9]\d*", numbers[1]):
            raise UsageError(f"{numbers[1]}: not a positive count")
        count = int(numbers[1])
    return Words(target, interval_s, count)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{**kwargs, "max_help_position": 22, "width": 78})

    def add_usage(
        self, usage: Any, actions: Any, groups: Any, prefix: Any = None
    ) -> None:
        super().add_usage(usage, actions, groups, "USAGE: ")


class _Parser(argparse.ArgumentParser):
    """A parser that leaves it to the caller how to end."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser(command: Command[Any], *, in_drgn: bool) -> argparse.ArgumentParser:
    """Make the parser of a command; inside drgn it takes no target."""
    name = f"%{command.name}" if in_drgn else f"msa-{command.name}"
    operands = "[INTERVAL [COUNT]]" if in_drgn else "[TARGET] [INTERVAL [COUNT]]"
    examples = () if in_drgn else _TARGET_EXAMPLES
    examples += command.examples + _EXAMPLES
    width = max(len(words) for words, _ in examples)
    parser = _Parser(
        prog=name,
        usage=f"%(prog)s [OPTION...] {operands}",
        description=command.summary,
        epilog="EXAMPLES:\n"
        + "\n".join(f"  %(prog)s {words:{width}}  {what}" for words, what in examples),
        formatter_class=_Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.add_argument_group("OPTIONS")
    for option in (*command.arguments, *_OPTIONS):
        options.add_argument(*option.args, **option.kwargs)
    if not in_drgn:
        target = parser.add_argument_group(
            "TARGET", "a dump, or one of these (with none: the running kernel)"
        )
        for option in _TARGET_OPTIONS:
            target.add_argument(*option.args, **option.kwargs)
    return parser


def _target_spec(args: argparse.Namespace, words: Words) -> TargetSpec:
    named = [words.target, args.core, args.qemu, "-k" if args.kernel else None]
    named = [name for name in named if name is not None]
    if len(named) > 1:
        raise UsageError(f"{named[1]}: a second target, after {named[0]}")
    if args.types == "btf" and (args.vmlinux is not None or args.debuginfod):
        other = "--debuginfod" if args.vmlinux is None else "-s"
        raise UsageError(f"{other}: asks for debug info, and --types btf for none")
    spec = TargetSpec(
        path=words.target if words.target is not None else args.core,
        qemu=args.qemu,
        vmlinux=args.vmlinux,
        types=args.types,
        debuginfod=args.debuginfod,
    )
    if words.interval_s is not None and not spec.is_live:
        raise UsageError(f"{spec.path}: a dump does not change in an interval")
    return spec


# Running


def run_console(command: Command[R], argv: Sequence[str] | None = None) -> int:
    """Run a command with a shell's words, and give its exit status.

    A signal that stops a run without an interval ends the process, as it would have.

    :param argv: the words after the command's name, those of the process by default
    """
    argv = sys.argv[1:] if argv is None else argv
    name = f"msa-{command.name}"
    debug = "--debug" in argv
    # drgn's own warnings are for its prompt; what matters of them is in our errors.
    logging.getLogger("drgn").setLevel(
        logging.WARNING if debug else logging.CRITICAL + 1
    )
    try:
        with _stop_on_signals() as came:
            return _run(command, argv, came)
    except _Stopped as stopped:
        return _end_by(stopped.number)
    except _OutputClosed:
        return _end_by(signal.SIGPIPE)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"{name}: {escape(_explain(error, name))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_TARGET


def _explain(error: Exception, name: str) -> str:
    if isinstance(error, UsageError):
        return f"{error}; see {name} --help"
    if isinstance(error, (TargetError, _OutputError)):
        return str(error)
    kind = type(error).__name__
    return f"unexpected {kind}: {error}; run it with --debug and report this"


def _run(command: Command[R], argv: Sequence[str], came: list[int]) -> int:
    try:
        args = make_parser(command, in_drgn=False).parse_intermixed_args(argv)
    except _Asked as asked:
        with _output() as out:
            out.write(str(asked))
        return EXIT_DONE
    words = parse_words(args.words)
    spec = _target_spec(args, words)
    seen: _Seen[R] = _Seen()
    try:
        opened = open_target(spec)
        if came:
            raise _Stopped(came[0])
        _report(command, opened.prog, opened.target, args, words, seen)
    except _Stopped:
        if words.interval_s is None:
            raise
    return EXIT_INCOMPLETE if args.strict and seen.incomplete else EXIT_DONE


def run_in_drgn(command: Command[R], prog: Program, argv: Sequence[str]) -> R | None:
    """Run a command on drgn's program, and give its (last) report.

    :param argv: the words after the command's name
    :raises CommandArgumentError: for wrong usage, a target included
    :raises CommandError: with ``--strict``, if the report is not complete
    :raises TargetError: if the program is no kernel, or has no types
    """
    try:
        args = make_parser(command, in_drgn=True).parse_intermixed_args(argv)
        words = parse_words(args.words)
        if words.target is not None:
            raise UsageError(f"{words.target}: the target is drgn's own")
        if words.interval_s is not None and not prog.flags & ProgramFlags.IS_LIVE:
            raise UsageError("prog: a dump does not change in an interval")
    except _Asked as asked:
        sys.stdout.write(str(asked))
        return None
    except UsageError as error:
        raise CommandArgumentError(f"%{command.name}: {escape(str(error))}") from None

    seen: _Seen[R] = _Seen()
    try:
        _report(command, prog, describe(prog), args, words, seen)
    except _OutputClosed:
        # As with `| head`, which is no reason to lose the report.
        pass
    except KeyboardInterrupt:
        if words.interval_s is None:
            raise
    if args.strict and seen.incomplete:
        raise CommandError(f"%{command.name}: the report is not complete")
    return seen.last


@dataclass
class _Seen(Generic[R]):
    """What is known of the reports so far, however the run ends."""

    last: R | None = None
    incomplete: bool = False


def _report(
    command: Command[R],
    prog: Program,
    target: Target,
    args: argparse.Namespace,
    words: Words,
    seen: _Seen[R],
) -> None:
    """Collect and print one report, or one after each interval until the end."""

    def collect() -> R:
        try:
            with ProgressLine(command.name, sys.stderr) as progress:
                return command.collect(prog, target, args, progress)
        except FaultError as error:
            raise _unreadable(target, error) from error
        except LookupError as error:
            raise TargetError(
                target.path,
                f"its kernel or its types lack something ({error})",
                "name the full vmlinux with -s, if you did not",
            ) from error
        except BtfError as error:
            raise damaged_types(target.path, error) from error
        except OSError as error:
            if not target.live:
                raise
            raise TargetError(
                target.path, f"the kernel is gone: {error.strerror}", "start it again"
            ) from error

    def deliver(report: R) -> None:
        seen.last = report
        seen.incomplete |= command.problems(report)
        with _output() as out:
            if args.json:
                json.show(report, out)
            else:
                if words.interval_s is not None:
                    show([text(time.strftime("%H:%M:%S"))], out)
                show(command.blocks(report, args), out)

    if words.interval_s is None:
        deliver(collect())
        return
    with _Keys() as keys:
        due = time.monotonic()
        previous = collect()
        for _ in range(words.count) if words.count else itertools.count():
            # A report that takes longer than the interval delays those after it.
            due = max(due + words.interval_s, time.monotonic())
            if keys.quit_before(due):
                break
            current = collect()
            deliver(command.delta(previous, current))
            previous = current


def _unreadable(target: Target, error: FaultError) -> TargetError:
    """Put into words that what no report can do without is not there."""
    if target.truncated:
        return DamagedDumpError(
            target.path, "cut off, and too little is left", "copy the dump again"
        )
    return TargetError(
        target.path,
        f"it lacks memory that the report needs ({error})",
        "take a dump that leaves less out" if not target.live else "try again",
    )


class _Keys:
    """The keys pressed on the terminal, if there is one and it is ours."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> "_Keys":
        # A pipe's reader, such as less, may want the keys for itself.
        if _is_terminal(sys.stdin) and _is_terminal(sys.stdout):
            self._fd = sys.stdin.fileno()
            # It may be the terminal of another session, or we in its background.
            with contextlib.suppress(OSError, termios.error):
                if os.tcgetpgrp(self._fd) == os.getpgrp():
                    saved = termios.tcgetattr(self._fd)
                    tty.setcbreak(self._fd, termios.TCSADRAIN)
                    self._saved = saved
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._saved is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)

    def quit_before(self, due: float) -> bool:
        """Wait until ``due``, of the monotonic clock; tell whether ``q`` came first."""
        while (left := due - time.monotonic()) > 0:
            if self._saved is None:
                time.sleep(left)
            elif select.select([self._fd], [], [], left)[0]:
                key = os.read(self._fd, 1)
                if key in (b"q", b"Q", b""):
                    return True
        return False


class ProgressLine:
    """How far a long collection is, on a terminal, erased in the end."""

    _PATIENCE_S = 1.0
    _REDRAW_S = 0.1

    def __init__(self, name: str, out: TextIO) -> None:
        self._name = name
        self._out = out
        self._next = time.monotonic() + self._PATIENCE_S
        self._is_shown = False
        self._is_wanted = _is_terminal(out)

    def __enter__(self) -> Progress:
        return self._update

    def __exit__(self, *exc_info: object) -> None:
        if self._is_shown:
            self._write("\r\x1b[K")

    def _update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_wanted or now < self._next:
            return
        self._next = now + self._REDRAW_S
        self._is_shown = True
        self._write(f"\r{self._name}: {100 * done // max(total, 1)} %\x1b[K")

    def _write(self, line: str) -> None:
        self._out.write(line)
        self._out.flush()


# Output and signals


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        # It was closed.
        return False


@contextlib.contextmanager
def _output() -> Iterator[TextIO]:
    """Give standard output, whatever it is now, and tell its errors from others."""
    if sys.stdout is None:
        raise _OutputError("standard output: closed; give the command one")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name in a dump can have letters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError as error:
        _abandon_output()
        raise _OutputClosed from error
    except OSError as error:
        _abandon_output()
        why = error.strerror or str(error)
        raise _OutputError(f"standard output: {why}; print it elsewhere") from error


def _abandon_output() -> None:
    """Let Python's last flush at exit, of what could not be written, succeed."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Raise :class:`_Stopped` at a signal, and give the list of those that came.

    drgn swallows what is raised while it imports its plugins; the list keeps it.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        came.append(number)
        raise _Stopped(number)

    # What the parent ignores, as nohup does, stays ignored.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_by(number: int) -> int:
    """End the process by a signal, so that its parent sees which."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Not reached, unless the signal is blocked: then as a shell would count it.
    return 128 + number
