# SPDX-License-Identifier: LGPL-2.1-or-later

"""The options of all commands, and their parser."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from msatools.cli.command import Command, Excluded, Operands, argument
from msatools.cli.maybe_file import MaybeFile
from msatools.cli.usage import (
    Formatter,
    Help,
    OptionParser,
    UsageError,
    Version,
    example_lines,
)
from msatools.cli.words import is_number, named_targets


def _share(word: str) -> float:
    with contextlib.suppress(ValueError):
        percent = float(word.removesuffix("%"))
        if 0 < percent <= 100:
            return percent / 100
    raise argparse.ArgumentTypeError(f"not a share of one CPU, 0 to 100 %: {word!r}")


def _counted(word: str) -> int:
    if word.isascii() and word.isdecimal() and 0 < int(word) <= _MOST_KERNELS:
        return int(word)
    raise argparse.ArgumentTypeError(f"not a number of a kernel, from 1: {word!r}")


_MOST_KERNELS = 1000

_DIFF = argument(
    "--diff",
    nargs=2,
    metavar=("A", "B"),
    help="compare two files that --json or --record has written, by the last report in "
    "each (of one recording named twice, the first and the last); - is standard input",
)
"""Commands that name the rows that ``--diff`` compares."""

_OPTIONS: tuple[argument, ...] = (
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
        help="with INTERVAL: use at most PCT %% of one CPU; samples are delayed if "
        "need be",
    ),
    argument(
        "--no-redraw",
        action="store_true",
        help="with INTERVAL: print samples below each other, on a terminal too",
    ),
    argument(
        "--record",
        metavar="FILE",
        help="keep all samples in a new file, too: name it as TARGET to see them again",
    ),
    _DIFF,
    argument("-h", "--help", action=Help, nargs=0, help="print this help"),
)


def _why(command: str) -> argument:
    """Return the option that explains the output of a command."""

    def names(word: str) -> list[str]:
        from msatools.cli.explanation import parse_names

        return parse_names(command, word)

    return argument(
        "--why",
        type=names,
        action="extend",
        default=[],
        metavar="NAME,...",
        help="explain columns, classes, states and marks of the output: what they "
        "mean, where they come from, how exact they are; all: all of them",
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
        "--kernel",
        dest="kernel_number",
        type=_counted,
        metavar="N",
        help="which kernel, from 1, of several in a file with a guest's memory and no "
        "VMCOREINFO note (default: the one with the most memory)",
    ),
    argument(
        "--vmcoreinfo",
        metavar="FILE",
        help="the text of VMCOREINFO, for such a file (default: found in memory)",
    ),
    argument(
        "--debuginfod",
        action="store_true",
        help="let debug info be fetched from DEBUGINFOD_URLS",
    ),
    argument(
        "--sandbox",
        action="store_true",
        help="read the dump in a sandbox, for dumps of others",
    ),
    argument(
        "--no-pager",
        action="store_true",
        help="do not use a pager (MSA_PAGER, PAGER or less)",
    ),
    argument("--debug", action="store_true", help="show tracebacks of errors"),
    argument("--version", action=Version, nargs=0, help="print name and version"),
)

_ABOUT_TARGETS = frozenset(
    option
    for each in _TARGET_OPTIONS
    for option in each.args
    if option not in ("--no-pager", "--debug", "--version")
)
"""Options that name a target, or how it is opened."""

_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("5 12", "what changes, each 5 s for a minute"),
    ("--self-check", "whether to trust the numbers of this kernel"),
)

_TARGET_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("vmcore", "a kernel that died"),
    ("-s vmlinux vmcore", "a dump whose debug info is not installed"),
    ("guest.mem", "a guest, by a hypervisor's file of its memory"),
    ("", "this machine, now"),
)


class _Parser(OptionParser):
    """The parser of a command that has a target."""

    takes_target = True
    operands: Operands | None = None
    not_offered: frozenset[str] = frozenset()
    """Options of other commands that this one does not have."""

    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        left: dict[str, MaybeFile] = {}
        parsed = super().parse_intermixed_args(
            list(self._joined(args, left)), namespace
        )
        if self.operands is not None:
            self._take_operands(parsed, self.operands)
        targets = named_targets(parsed)
        for word in targets:
            if word in left and (len(targets) > 1 or not self.takes_target):
                self.error(left[word].refusal(word))
        return parsed

    def _unknown(self, words: Sequence[str]) -> str:
        option = words[0].partition("=")[0]
        if not self.takes_target and option in _ABOUT_TARGETS:
            return f"{option}: the target is drgn's own; name it where drgn is started"
        if option in self.not_offered:
            return f"{option}: {self.prog} does not offer it"
        return super()._unknown(words)

    def _take_operands(self, args: argparse.Namespace, operands: Operands) -> None:
        """Move the operands from ``args.words`` to ``args.operands``.

        Where an option names the target, and inside drgn, all words but paths are
        operands.
        """
        words, args.words, args.operands = args.words, [], []
        may_be_target = self.takes_target and not named_targets(args)
        for word in words:
            if operands.describes(word):
                args.operands.append(word)
            elif is_number(word):
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
    parser = _Parser(
        prog=name,
        usage=f"%(prog)s [OPTION...] {operands}",
        description=command.summary,
        epilog=example_lines(name, examples),
        formatter_class=Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.takes_target = not in_drgn
    parser.operands = command.operands
    common = _OPTIONS
    if not command.offers_diff:
        common = tuple(option for option in _OPTIONS if option is not _DIFF)
        parser.not_offered = frozenset(_DIFF.args)
        parser.set_defaults(diff=None)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.add_argument_group("OPTIONS")
    for option in (*command.arguments, _why(command.name), *common):
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
    Excluded("--json", ("--no-pager",), "is never paged"),
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
