# SPDX-License-Identifier: LGPL-2.1-or-later

"""Arguments of commands: options, the target, interval and count."""

import argparse
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import msatools
from msatools.cli.command import Command, Excluded, Operands, argument

if TYPE_CHECKING:
    from msatools.target import TargetSpec


class UsageError(Exception):
    """The arguments of a command are invalid or contradict each other."""


class Asked(Exception):
    """The user requested the help or the version, the text of which is the argument."""


class Help(argparse.Action):
    # argparse's own action prints at once, and hides errors of the output.
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(parser.format_help())


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(f"{parser.prog} {msatools.__version__}\n")


def _share(word: str) -> float:
    with contextlib.suppress(ValueError):
        percent = float(word.removesuffix("%"))
        if 0 < percent <= 100:
            return percent / 100
    raise argparse.ArgumentTypeError(f"not a share of one CPU, 0 to 100 %: {word!r}")


_OPTIONS = (
    argument(
        "-v",
        dest="verbose",
        action="store_true",
        help="show more detail, in all columns",
    ),
    argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours and bold text (auto: on a terminal, unless NO_COLOR is set)",
    ),
    argument("--json", action="store_true", help="print JSON, one object a sample"),
    argument(
        "--strict",
        action="store_true",
        help="fail (status 3) if anything was missing, or a check failed",
    ),
    argument(
        "--self-check",
        action="store_true",
        help="compare the numbers with the kernel's own and with those of the other "
        "commands, and print a block for a bug report; it names no hosts, tasks or "
        "files, and no addresses",
    ),
    argument(
        "--budget",
        type=_share,
        metavar="PCT",
        help="with INTERVAL: take at most so much of one CPU, and samples later",
    ),
    argument(
        "--no-redraw",
        action="store_true",
        help="with INTERVAL: put samples under each other, on a terminal too",
    ),
    argument(
        "--record",
        metavar="FILE",
        help="keep all samples in a new file, too: name it as TARGET to see them again",
    ),
    argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="compare two files that --json or --record has written, by the last "
        "report in each (of one recording named twice, the first and the last); - is "
        "standard input",
    ),
    argument("-h", "--help", action=Help, nargs=0, help="print this help"),
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
    argument(
        "--sandbox",
        action="store_true",
        help="read someone else's dump in a process that can do little besides",
    ),
    argument("--debug", action="store_true", help="show tracebacks of errors"),
    argument("--version", action=Version, nargs=0, help="print name and version"),
)

_ABOUT_TARGETS = frozenset(
    option
    for each in _TARGET_OPTIONS
    for option in each.args
    if option not in ("--debug", "--version")
)
"""Options that name a target, or how it is opened."""

_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("5 12", "what changes, each 5 s for a minute"),
    ("--self-check", "whether to trust the numbers of this kernel"),
)

_TARGET_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("vmcore", "a kernel that died"),
    ("-s vmlinux vmcore", "the same, its debug info not being installed"),
    ("", "this machine, now"),
)

_MAX_INTERVAL_S = 1e8
"""Maximum interval, three years: below the limits of the system's clocks."""

_NUMBER = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE
)


@dataclass(frozen=True)
class Words:
    """Values of the positional arguments."""

    target: str | None = None
    interval_s: float | None = None
    count: int | None = None


def parse_words(words: Iterable[str]) -> Words:
    """Parse the positional arguments: target, interval and count.

    :raises UsageError: if there are too many, or a number is out of range
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
        raise UsageError(f"{numbers[2]}: a third number, after INTERVAL and COUNT")
    interval_s = float(numbers[0]) if numbers else None
    if interval_s is not None and not 0 < interval_s <= _MAX_INTERVAL_S:
        raise UsageError(f"{numbers[0]}: not a positive interval")
    count = None
    if len(numbers) == 2:
        if not re.fullmatch(r"\+?0{0,9}[1-9]\d{0,17}", numbers[1]):
            raise UsageError(f"{numbers[1]}: not a positive count")
        count = int(numbers[1])
    return Words(target, interval_s, count)


class Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{**kwargs, "max_help_position": 22, "width": 78})

    def add_usage(
        self, usage: Any, actions: Any, groups: Any, prefix: Any = None
    ) -> None:
        super().add_usage(usage, actions, groups, "USAGE: ")


HERE = "-"
"""Value of a :class:`MaybeFile` option without a file: standard output."""


_PICTURES = (
    *(".avif", ".bmp", ".dot", ".eps", ".gif", ".htm", ".html", ".jpeg", ".jpg"),
    *(".pdf", ".pgm", ".png", ".ppm", ".ps", ".svg", ".svgz", ".tif", ".tiff", ".webp"),
)
"""Suffixes of files that are not dumps."""


class MaybeFile(argparse.Action):
    """An option with an optional file, which is recognized by its suffix.

    Another word after the option is a positional argument. It is refused if it has the
    suffix of another kind of picture, or if there is another target.
    """

    def __init__(self, endings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.endings = tuple(endings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values and not self.names_file(values):
            parser.error(self.refusal(values))
        setattr(namespace, self.dest, values or HERE)

    def names_file(self, word: str) -> bool:
        return word.lower().endswith(self.endings)

    def may_name_file(self, word: str) -> bool:
        """Return whether a word is meant as a file, perhaps of the wrong kind."""
        return self.names_file(word) or word.lower().endswith(_PICTURES)

    def refusal(self, word: str) -> str:
        known = " or ".join(self.endings)
        return f"{self.option_strings[0]}: not a file that ends in {known}: {word}"


class OptionParser(argparse.ArgumentParser):
    """A parser that raises exceptions instead of exiting."""

    # The types of the stubs are too narrow.
    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return parsed

    def _unknown(self, words: Sequence[str]) -> str:
        """Return the message about arguments that are not known."""
        from difflib import get_close_matches

        message = f"unrecognized arguments: {' '.join(words)}"
        option, known = words[0].partition("=")[0], self._option_string_actions
        begun = [each for each in known if option[2:] and each.startswith(option)]
        nearest = begun or get_close_matches(option, known, 1)
        return f"{message}; did you mean {nearest[0]}?" if nearest else message

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Parser(OptionParser):
    """The parser of a command that has a target."""

    takes_target = True
    operands: Operands | None = None

    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        left: dict[str, MaybeFile] = {}
        parsed = super().parse_intermixed_args(
            list(self._joined(args, left)), namespace
        )
        if self.operands is not None:
            self._take_operands(parsed, self.operands)
        targets = _named(parsed)
        for word in targets:
            if word in left and (len(targets) > 1 or not self.takes_target):
                self.error(left[word].refusal(word))
        return parsed

    def _unknown(self, words: Sequence[str]) -> str:
        option = words[0].partition("=")[0]
        if not self.takes_target and option in _ABOUT_TARGETS:
            return f"{option}: the target is drgn's own; name it where drgn is started"
        return super()._unknown(words)

    def _take_operands(self, args: argparse.Namespace, operands: Operands) -> None:
        """Move the operands from ``args.words`` to ``args.operands``.

        Where an option names the target, and inside drgn, all words but paths are
        operands.
        """
        words, args.words, args.operands = args.words, [], []
        may_be_target = self.takes_target and not _named(args)
        for word in words:
            if operands.describes(word):
                args.operands.append(word)
            elif _NUMBER.fullmatch(word):
                self.error(f"{word}: not {operands.name}, and there are no samples")
            elif may_be_target or "/" in word:
                args.words.append(word)
                may_be_target = False
            else:
                args.operands.append(word)

    def _joined(
        self, words: Sequence[str], left: dict[str, MaybeFile]
    ) -> Iterator[str]:
        """Join each :class:`MaybeFile` option and its file to one word.

        :param left: Receives the words after such options that are not files.
        """
        options = {
            option: action
            for action in self._actions
            if isinstance(action, MaybeFile)
            for option in action.option_strings
        }
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                yield from (word, *rest)
                return
            if word in options:
                action = options[word]
                named = bool(rest) and action.may_name_file(rest[0])
                if rest and not named:
                    left[rest[0]] = action
                word = f"{word}={rest.pop(0) if named else ''}"
            yield word


def examples_of(command: Command[Any], *, in_drgn: bool) -> tuple[tuple[str, str], ...]:
    """Return arguments of a command as examples, each with what it shows."""
    if command.operands is not None:
        target = "" if in_drgn else f"{_TARGET_EXAMPLES[0][0]} "
        return tuple((f"{target}{words}", what) for words, what in command.examples)
    targets = () if in_drgn else _TARGET_EXAMPLES
    return targets + command.examples + _EXAMPLES


def operands_of(command: Command[Any], *, in_drgn: bool) -> str:
    """Return the words after the options, as in a usage line."""
    target = "" if in_drgn else "[TARGET] "
    if command.operands is not None:
        return f"{target}{command.operands.name}..."
    return f"{target}[INTERVAL [COUNT]]"


def make_parser(command: Command[Any], *, in_drgn: bool) -> argparse.ArgumentParser:
    """Return the parser of a command; inside drgn it takes no target."""
    name = f"%{command.name}" if in_drgn else f"msa-{command.name}"
    operands = operands_of(command, in_drgn=in_drgn)
    examples = examples_of(command, in_drgn=in_drgn)
    width = max(len(words) for words, _ in examples)
    parser = _Parser(
        prog=name,
        usage=f"%(prog)s [OPTION...] {operands}",
        description=command.summary,
        epilog="EXAMPLES:\n"
        + "\n".join(f"  %(prog)s {words:{width}}  {what}" for words, what in examples),
        formatter_class=Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.takes_target = not in_drgn
    parser.operands = command.operands
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.add_argument_group("OPTIONS")
    for option in (*command.arguments, *_OPTIONS):
        if isinstance(option, argument):
            options.add_argument(*option.args, **option.kwargs)
            continue
        exclusive = options.add_mutually_exclusive_group(required=option.required)
        for choice in option.arguments:
            exclusive.add_argument(*choice.args, **choice.kwargs)
    if not in_drgn:
        target = parser.add_argument_group(
            "TARGET", "a dump, or one of these (with none: the running kernel)"
        )
        for option in _TARGET_OPTIONS:
            target.add_argument(*option.args, **option.kwargs)
    return parser


def refuse_in_sandbox(
    args: argparse.Namespace, parser: argparse.ArgumentParser, *, is_live: bool
) -> None:
    """Refuse what a sandbox takes away, with ``--sandbox``.

    :raises UsageError: if there is any
    """
    if not args.sandbox:
        return
    if is_live:
        raise UsageError("--sandbox: it is for dumps, and no dump is named")
    if args.debuginfod:
        raise UsageError("--debuginfod: there is no network with --sandbox")
    for action in parser._actions:
        if isinstance(action, MaybeFile) and getattr(args, action.dest) not in (
            None,
            HERE,
        ):
            raise UsageError(
                f"{action.option_strings[0]} FILE: no file is written with --sandbox; "
                "leave FILE out, and redirect the output"
            )


def given_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Yield the name of each option with a value other than its default.

    :return: The name in *args*, and the first way to write it.
    """
    for action in parser._actions:
        given = getattr(args, action.dest, action.default)
        # Several options may set one value, each to its own constant.
        is_other = action.nargs == 0 and given != action.const
        if action.option_strings and given != action.default and not is_other:
            yield action.dest, action.option_strings[0]


_EXCLUDED = (
    Excluded("--json", ("--color",), "has no colours"),
    Excluded("--json", ("--no-redraw",), "prints a line a sample"),
    Excluded("--diff", ("--no-redraw",), "has no samples"),
)
"""Those of all commands."""


def refuse_excluded(
    command: Command[Any], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> None:
    """Refuse options that have no effect together with others.

    :raises UsageError: if there are any
    """
    given = {option for _, option in given_options(parser, args)}
    for rule in (*command.excluded, *_EXCLUDED):
        if rule.by in given and not (rule.in_text and args.json):
            for option in rule.options:
                if option in given:
                    raise UsageError(
                        f"{option}: no effect with {rule.by}, which {rule.why}"
                    )


def refuse_target(args: argparse.Namespace, words: Words) -> None:
    """Refuse arguments that name a target when none is read.

    :raises UsageError: if there are any
    """
    named = _named(args) + getattr(args, "operands", [])
    if words.interval_s is not None:
        named.append(f"{words.interval_s:g}")
    if getattr(args, "vmlinux", None) is not None:
        named.append(args.vmlinux)
    if getattr(args, "types", "auto") != "auto":
        named.append("--types")
    for name in ("debuginfod", "sandbox"):
        if getattr(args, name, False):
            named.append(f"--{name}")
    if args.record is not None:
        named.append("--record")
    if named:
        raise UsageError(f"{named[0]}: --diff reads no target")


def _named(args: argparse.Namespace) -> list[str]:
    """Return the arguments that name a target."""
    targets = [word for word in args.words if not _NUMBER.fullmatch(word)]
    # Inside drgn there are no options for a target.
    targets += (getattr(args, name, None) for name in ("core", "qemu"))
    if getattr(args, "kernel", False):
        targets.append("-k")
    return [target for target in targets if target is not None]


def refuse_kernel(args: argparse.Namespace, words: Words, path: str) -> None:
    """Refuse options that do not apply to a recording.

    :raises UsageError: if there are any
    """
    if words.interval_s is not None:
        raise UsageError(f"{path}: a recording has intervals of its own")
    for name, option in (
        ("vmlinux", "-s"),
        ("debuginfod", "--debuginfod"),
        ("sandbox", "--sandbox"),
        ("record", "--record"),
        ("workers", "-j"),
        ("self_check", "--self-check"),
    ):
        if getattr(args, name, None):
            raise UsageError(f"{option}: {path} is a recording, not a kernel")
    if args.types != "auto":
        raise UsageError(f"--types: {path} is a recording, not a kernel")


def target_path(args: argparse.Namespace, words: Words) -> str | None:
    """Return the file that is the only target; ``None`` if there is no such file."""
    path = words.target if words.target is not None else args.core
    return path if _named(args) == [path] else None


def target_spec(args: argparse.Namespace, words: Words) -> "TargetSpec":
    """Return the target that a shell's arguments name.

    :raises UsageError: if they name two, or one that contradicts other arguments
    """
    from msatools.target import TargetSpec

    named = _named(args)
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
    check_users(args, is_own=spec.is_live and spec.qemu is None)
    return spec


def check_users(args: argparse.Namespace, *, is_own: bool) -> None:
    """Refuse names of users unless the target is the running kernel.

    :param is_own: Whether the target is the running kernel.
    :raises UsageError: if there are any
    """
    for user in getattr(args, "users", None) or ():
        if isinstance(user, str) and not is_own:
            raise UsageError(
                f"-u {user}: only of the running kernel are the names of users known; "
                "name the user by number"
            )
