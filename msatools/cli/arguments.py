# SPDX-License-Identifier: LGPL-2.1-or-later

"""The description of a command, shared options, and the parser of both."""

import argparse
import contextlib
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

from msatools.cli.options import (
    Formatter,
    Help,
    MaybeFile,
    OptionParser,
    UsageError,
    Version,
    cgroup_list,
    check_users,
    container_list,
    cpu_list,
    duration_ns,
    example_lines,
    is_number,
    named_targets,
    number_list,
    row_count,
    state_letters,
    user_list,
)

if TYPE_CHECKING:
    from drgn import Program

    from msatools.kernel.report import Report, Session
    from msatools.model import DiffRows
    from msatools.program import Target
    from msatools.render.blocks import Block
    from msatools.reports.forms import Document
    from msatools.selfcheck.selfcheck import Check
    from msatools.tasks.identity import Membership

# --- The description of a command: its arguments, its runs, and its rendering.


R = TypeVar("R", bound="Report")


class argument:  # noqa: N801 -- as in drgn
    """An argument, like drgn's class of that name, which is slow to import."""

    def __init__(self, *args: str, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class mutually_exclusive_group:  # noqa: N801
    """Arguments that exclude each other, like drgn's class of that name."""

    def __init__(self, *arguments: argument, required: bool = False) -> None:
        self.arguments = arguments
        self.required = required


class Answer(Struct, frozen=True, kw_only=True):
    """The result of a command that reads no target."""

    document: "Document"
    blocks: "Iterable[Block]"

    incomplete: bool
    """Whether data are missing; like :attr:`Command.problems` for a report."""


class Operands(Struct, frozen=True):
    """Positional arguments of a command besides the target, instead of an interval.

    They are distinguished from the target by their form alone: a file whose name has
    the form of an operand must be named as a path, ``./NAME``.
    """

    name: str
    """Name in the usage line: ``ADDRESS``."""

    describes: Callable[[str], bool]
    """Returns whether a word has the form of an operand."""


class Excluded(Struct, frozen=True):
    """Options that are refused together with another, because they have no effect.

    Options that add data need no rule for ``--json``: JSON shows these data, too.
    """

    by: str
    """The other option, in its first form in the help."""

    options: tuple[str, ...]
    why: str
    """The reason, as the end of a sentence about the other option: "has all rows"."""

    in_text: bool = False
    """Whether the rule is for text only: JSON has the data of all requested views."""


def _is_incomplete(report: "Report") -> bool:
    from msatools.cli.execution import is_incomplete

    return is_incomplete(report)


def _everything(report: R, args: argparse.Namespace) -> R:
    return report


class Recorded(Struct, Generic[R], frozen=True, kw_only=True):
    """How the reports of a command are recorded and replayed.

    A recording has complete reports; options that select parts are applied on replay.
    """

    model: Callable[[], type[R]]
    """Returns the class of the reports."""

    choosing: tuple[str, ...] = ()
    """Names of the arguments that select from a complete report."""

    choose: Callable[[R, argparse.Namespace], R] = _everything
    """``choose(report, args)``: returns the selected part of a complete report; raises
    UsageError if the recording lacks it."""

    require: Callable[[R, argparse.Namespace], None] = lambda *_: None
    """``require(report, args)``: raises TargetError if a complete report lacks
    something that the arguments name."""

    lacks: Callable[[argparse.Namespace], Mapping[str, object]] = lambda _: {}
    """``lacks(args)``: maps each option for data that recordings lack to its value,
    which is false if the option is not given."""

    def lacking(self, args: argparse.Namespace) -> str | None:
        """Return the first given option for data that recordings lack, if any."""
        given = (option for option, value in self.lacks(args).items() if value)
        return next(given, None)


class Command(Struct, Generic[R], frozen=True, kw_only=True):
    """The description of a command."""

    name: str
    """Name as in ``msa-NAME`` and ``%NAME``."""

    summary: str
    """Summary in less than a line."""

    arguments: tuple[argument | mutually_exclusive_group, ...]
    """Arguments of this command only; :func:`make_parser` adds the common ones."""

    examples: tuple[tuple[str, str], ...]
    """Example arguments after name and target, each with a description."""

    operands: Operands | None = None
    """Words besides the target, parsed to ``args.operands``. A command with operands
    has no intervals, and its examples begin with operands."""

    start: "Callable[[Program, Target, argparse.Namespace], Session[R]]"
    """Starts a run; raises errors of :mod:`msatools.errors`, as its report() does."""

    blocks: "Callable[[R, argparse.Namespace], Iterable[Block]]"
    """Renders a report."""

    recorded: Recorded[R]

    problems: Callable[[R], bool] = _is_incomplete
    """Returns whether something was missing or unreadable, or a check failed."""

    sandboxed: bool = False
    """Whether dumps are read in the sandbox by default, if the list of system calls
    can be enforced."""

    excluded: tuple[Excluded, ...] = ()
    """Options without effect together with another option."""

    complaint: Callable[[argparse.Namespace, bool], str | None] = lambda *_: None
    """``complaint(args, has_interval)``: returns the reason to refuse the arguments, or
    ``None``; for contradictions that :attr:`excluded` cannot express."""

    keep: Callable[[R, argparse.Namespace], None] = lambda *_: None
    """``keep(report, args)``: writes the files requested for each report; raises
    OutputError."""

    writes: Callable[[argparse.Namespace], bool] = lambda _: False
    """Returns whether files are requested, which :attr:`keep` writes."""

    checks: "Callable[[], Sequence[Check]]" = lambda: ()
    """Returns the command's checks for ``--self-check``; reading is checked anyway."""

    reads_logs: bool = False
    """Whether the target may be a kernel log, with ``-`` for standard input."""

    explains_kernel: bool = False
    """Whether ``--why`` reads the target if one is named, because the meanings depend
    on the kernel."""

    compared: "tuple[DiffRows, ...]" = ()
    """Tables that ``--diff`` compares row by row."""

    compare: Callable[[argparse.Namespace], Answer] | None = None
    """``compare(args)``: compares two files, instead of :attr:`compared`."""

    @property
    def offers_diff(self) -> bool:
        """Whether the command has the option ``--diff``."""
        return bool(self.compared) or self.compare is not None


# --- Options that several commands share.


def numbers(flag: str, dest: str, what: str, help: str) -> argument:
    """Return an option that selects by ID.

    :param what: Kind of ID: "PID".
    """
    return _option(flag, dest=dest, type=number_list, metavar=f"{what},...", help=help)


def pids(help: str) -> argument:
    """Return the option that selects tasks by PID."""
    return numbers("-p", "pids", "PID", help)


def users() -> argument:
    """Return the option that selects tasks by user: see :func:`uids`."""
    help = "only tasks of these users, by number, or name on the running kernel"
    return _option("-u", dest="users", type=user_list, metavar="USER,...", help=help)


def uids(args: argparse.Namespace, target: "Target | None") -> tuple[int, ...] | None:
    """Return the UIDs of the option of :func:`users`; ``None`` if it was not given.

    :param target: ``None`` for a recording.
    :raises UsageError: if a user does not exist, or the target is not this machine
    """
    if args.users is None:
        return None
    check_users(args, is_own=target is not None and target.kind == "kcore")
    return tuple(map(_uid, args.users))


def _uid(user: int | str) -> int:
    if isinstance(user, int):
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageError(f"-u {user}: this machine has no user of that name") from None


def memberships() -> tuple[argument, ...]:
    """Return the options that select tasks by cgroup, container and namespace."""
    return (
        _several(
            "--cgroup",
            "cgroups",
            cgroup_list,
            "PATH",
            "only tasks in these control groups or below, as in /proc/PID/cgroup; * "
            "and ? stand for parts of a name",
        ),
        _several(
            "--container",
            "containers",
            container_list,
            "ID",
            "only tasks in these containers, by 12 or more digits of the ID in the "
            "cgroup's path",
        ),
        _several(
            "--ns",
            "namespaces",
            number_list,
            "INODE",
            "only tasks in these namespaces of any kind, by inode number, as in "
            "/proc/PID/ns",
        ),
    )


def membership(args: argparse.Namespace) -> "Membership":
    """Return the values of the options of :func:`memberships`."""
    from msatools.tasks.identity import Membership

    return Membership(
        cgroups=_given(args.cgroups),
        containers=_given(args.containers),
        namespaces=_given(args.namespaces),
    )


def _several(flag: str, dest: str, type: Any, what: str, help: str) -> argument:
    """Return an option with a list, which may be repeated."""
    return _option(
        flag,
        dest=dest,
        type=type,
        action="extend",
        default=[],
        metavar=f"{what},...",
        help=help,
    )


def _given(values: list[Any]) -> tuple[Any, ...] | None:
    return tuple(values) if values else None


def cpus(help: str) -> argument:
    """Return the option that selects CPUs, or tasks by CPU."""
    help = f"{help}, such as 0-3,8"
    return _option("-P", dest="cpus", type=cpu_list, metavar="CPU-LIST", help=help)


def states() -> argument:
    """Return the option that selects tasks by state, as in /proc."""
    return _option(
        "--state",
        dest="states_wanted",
        type=state_letters,
        metavar="LETTERS",
        help="only tasks in these states, such as DZ",
    )


def min_age(help: str) -> argument:
    """Return the option for the minimum time that something has lasted.

    :param help: The beginning of the help text: "only tasks that wait".
    """
    help = f"{help} for at least so long: 30 (seconds), 500ms, 5m, 2h, 1d"
    return _option(
        "--min-age",
        dest="min_age_ns",
        type=duration_ns,
        default=0,
        metavar="TIME",
        help=help,
    )


def columns(type: Callable[[str], Any], help: str = "") -> argument:
    """Return the option for the columns of a table.

    :param type: Parses the value: see :func:`msatools.cli.options.column_list`.
    :param help: Text to insert after "show these columns".
    """
    help = f"show these columns{help}; all: all of them"
    return _option(
        "-o",
        dest="columns",
        type=type,
        action="extend",
        metavar="COL,...",
        help=help,
    )


def rows(help: str = "", default: int | None = None) -> argument:
    """Return the option for the maximum number of rows.

    :param help: Text to insert after "rows": " of each list".
    :param default: Maximum if the option is not given; ``None`` if the view decides.
    """
    usual = "" if default is None else f" ({default})"
    return _option(
        "-n",
        dest="rows",
        type=row_count,
        default=default,
        metavar="COUNT",
        help=f"show at most COUNT rows{help}{usual}; all: no limit",
    )


def textfile() -> argument:
    """Return the option for a file of metrics: see :mod:`msatools.cli.recording`."""
    return _option(
        "--textfile",
        metavar="FILE",
        help="write gauges for node_exporter's textfile collector to FILE.prom, too",
    )


def view(name: str, help: str, flag: str | None = None) -> argument:
    """Return the option for a view, which sets ``args.view`` to its name.

    :param flag: The option, if it is not ``--NAME``.
    """
    flag = flag or f"--{name}"
    return _option(flag, dest="view", action="store_const", const=name, help=help)


def _option(flag: str, **words: Any) -> argument:
    return argument(flag, **words)


# --- The options of all commands, and their parser.


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
"""Only for commands with :attr:`Command.offers_diff`."""

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
    """Return the option ``--why`` for the legend of a command."""

    def names(word: str) -> list[str]:
        from msatools.cli.answers import parse_names

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
"""Options that name a target, or choose how to open it."""

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

_LOG_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("console.log", "a kernel that died, by its log alone"),
    ("-", "a log on standard input"),
)


class _Parser(OptionParser):
    """The parser of a command on one target."""

    takes_target = True
    operands: Operands | None = None
    not_offered: frozenset[str] = frozenset()
    """Options that other commands have, but not this one."""

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

        If an option names the target, and inside drgn, all words without a ``/`` are
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

        :param left: Receives each word after such an option that is not its file.
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
    """Return example arguments of a command, each with a description."""
    if command.operands is not None:
        target = "" if in_drgn else f"{_TARGET_EXAMPLES[0][0]} "
        return tuple((f"{target}{words}", what) for words, what in command.examples)
    targets = () if in_drgn else _TARGET_EXAMPLES
    if command.reads_logs and not in_drgn:
        targets += _LOG_EXAMPLES
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
        what = "a dump"
        if command.reads_logs:
            what += ", a kernel's log (-: standard input; --kernel: which boot of it)"
        target = parser.add_argument_group(
            "TARGET",
            f"{what},\nor one of these (with none: the running kernel)"
            if command.reads_logs
            else f"{what}, or one of these (with none: the running kernel)",
        )
        for option in _TARGET_OPTIONS:
            target.add_argument(*option.args, **option.kwargs)
    return parser


def given_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Yield each option with a value other than its default.

    :return: The name in *args*, and the first form of the option.
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
"""Rules for all commands."""


def refuse_excluded(
    command: Command[Any], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> None:
    """Refuse options that have no effect together with others.

    :raises UsageError: if there are such options
    """
    given = {option for _, option in given_options(parser, args)}
    for rule in (*command.excluded, *_EXCLUDED):
        if rule.by in given and not (rule.in_text and args.json):
            for option in rule.options:
                if option in given:
                    raise UsageError(
                        f"{option}: no effect with {rule.by}, which {rule.why}"
                    )
