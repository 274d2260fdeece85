# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parsers of options and of the positional arguments."""

import argparse
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

import msatools

if TYPE_CHECKING:
    from msatools.program import TargetSpec

# --- Parsing of options: errors as exceptions, help and version as text.


_NEAR = 0.75
"""Minimum similarity (difflib's ratio) of an option to suggest: --color for --colour,
none for --foo."""


class UsageError(Exception):
    """The arguments of a command are invalid or contradict each other."""


class Asked(Exception):
    """The user requested help or version; the argument is the text to print."""


class Help(argparse.Action):
    # argparse's own action prints at once, and ignores output errors.
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(parser.format_help())


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(f"{parser.prog} {msatools.__version__}\n")


class Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{**kwargs, "max_help_position": 22, "width": 78})

    def add_usage(
        self, usage: Any, actions: Any, groups: Any, prefix: Any = None
    ) -> None:
        super().add_usage(usage, actions, groups, "USAGE: ")


_WIDTH = 80
"""Maximum width of an example, in columns."""


def example_lines(prog: str, examples: Iterable[tuple[str, str]]) -> str:
    """Return examples and their descriptions, as the end of a help text.

    The description of a long example is on a line of its own.
    """
    shown = [(f"  {prog} {words}".rstrip(), what) for words, what in examples]
    width = max((len(line) for line, what in shown if _fits(line, what)), default=0)
    lines = ["EXAMPLES:"]
    for line, what in shown:
        if _fits(line, what) and width + 2 + len(what) <= _WIDTH:
            lines.append(f"{line:{width}}  {what}")
        else:
            lines += (line, f"      {what}")
    return "\n".join(lines)


def _fits(line: str, what: str) -> bool:
    return len(line) + 2 + len(what) <= _WIDTH


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
        """Return the message about unknown arguments, with a suggestion if possible."""
        from difflib import get_close_matches

        message = f"unrecognized arguments: {' '.join(words)}"
        option, known = words[0].partition("=")[0], self._option_string_actions
        begun = [each for each in known if option[2:] and each.startswith(option)]
        nearest = begun or get_close_matches(option, known, 1, _NEAR)
        return f"{message}; did you mean {nearest[0]}?" if nearest else message

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


# --- Options with an optional file.


HERE = "-"
"""Value of a :class:`MaybeFile` option without a file: standard output."""


_PICTURES = (
    *(".avif", ".bmp", ".dot", ".eps", ".gif", ".htm", ".html", ".jpeg", ".jpg"),
    *(".pdf", ".pgm", ".png", ".ppm", ".ps", ".svg", ".svgz", ".tif", ".tiff", ".webp"),
)
"""Suffixes of files that are not dumps but pictures or pages."""


class MaybeFile(argparse.Action):
    """An option with an optional file, which is recognized by its suffix.

    Any other word after the option is a positional argument. It is refused if it has
    the suffix of another kind of picture, or if there is another target.
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
        """Return whether a word names a file or a picture of a kind not supported."""
        return self.names_file(word) or word.lower().endswith(_PICTURES)

    def refusal(self, word: str) -> str:
        known = " or ".join(self.endings)
        return f"{self.option_strings[0]}: not a file that ends in {known}: {word}"


# --- The positional arguments: target, interval and count.


_MAX_INTERVAL_S = 1e8
"""Maximum interval: three years, below the limits of the system's timers."""

_NUMBER = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE
)


class Words(Struct, frozen=True):
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
        if is_number(word):
            numbers.append(word)
        elif target is None:
            target = word
        else:
            if os.path.exists(word) and not os.path.exists(target):
                raise UsageError(f"{word}: name the dump first, then {target}")
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


def is_number(word: str) -> bool:
    """Return whether a word is a number, even one invalid as interval or count."""
    return _NUMBER.fullmatch(word) is not None


def named_targets(args: argparse.Namespace) -> list[str]:
    """Return the arguments that name a target."""
    targets = [word for word in args.words if not is_number(word)]
    # Inside drgn there are no options for a target.
    targets += (getattr(args, name, None) for name in ("core", "qemu"))
    if getattr(args, "kernel", False):
        targets.append("-k")
    return [target for target in targets if target is not None]


# --- Parsers of option values: numbers, names and lists of them.


_MAX_CPUS = 1 << 16
"""Maximum number of CPUs, more than any NR_CPUS."""

_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_UNITS |= {"h": 3600 * 10**9, "d": 86400 * 10**9}
_FOREVER_NS = 1 << 62
"""Maximum duration: 146 years."""

ALL = "all"
_ALL_ROWS = sys.maxsize

_CONTAINER_ID = re.compile("[0-9a-f]{12,64}")
"""Container engines show 12 of 64 digits."""

_USER_NAME = re.compile(r"[^\s:,\x00-\x1f\x7f]+")
_SIZE = re.compile(r"([0-9]{1,15})\s*([KMGT])(?:i?B)?", re.IGNORECASE)
_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ns|us|ms|s|m|h|d)?")


def number_list(word: str) -> tuple[int, ...]:
    """
    Parse ``1,2,30``.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    numbers = [_number(part) for part in word.split(",")]
    return tuple(dict.fromkeys(numbers))


def name_list(word: str) -> list[str]:
    """Parse ``one,two``."""
    return [name for name in word.split(",") if name]


class UnknownName(argparse.ArgumentTypeError):
    """A name is not one of those that an option accepts."""

    def __init__(self, name: str, known: Iterable[str], kind: str) -> None:
        self.known = tuple(known)
        """All valid names, which completion offers."""

        super().__init__(
            f"unknown {kind} {name!r}; choose from {', '.join(self.known)}"
        )


def known_names(names: Iterable[str], known: Collection[str], kind: str) -> list[str]:
    """
    Return *names* as a list, if all of them are known.

    :param kind: Kind of the names: "column".
    :raises UnknownName: if a name is not known
    """
    given = list(names)
    for name in given:
        if name not in known:
            raise UnknownName(name, known, kind)
    return given


def positive_number(word: str) -> int:
    """
    Parse a number above zero.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    number = _number(word)
    if not number:
        raise argparse.ArgumentTypeError(f"not a positive number: {word!r}")
    return number


def row_count(word: str) -> int:
    """
    Parse a number above zero, or ``all``, which is the maximum.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    return _ALL_ROWS if word.lower() == ALL else positive_number(word)


def column_list(word: str, known: Collection[str]) -> tuple[str, ...]:
    """
    Parse names of columns in any case, or ``all`` for all of them.

    :param known: Names of all columns.
    :raises UnknownName: if one is not known
    """
    if word.lower() == ALL:
        return tuple(known)
    as_known = {name.lower(): name for name in known}
    names = (as_known.get(name.lower(), name) for name in word.split(","))
    return tuple(known_names(dict.fromkeys(names), known, "column"))


def user_list(word: str) -> tuple[int | str, ...]:
    """
    Parse ``0,postgres``: numbers and names of users.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    return tuple(dict.fromkeys(map(_user, word.split(","))))


def _user(word: str) -> int | str:
    if word.isascii() and word.isdigit():
        return int(word)
    # No user's name begins with a dash.
    if word.startswith("-") or not _USER_NAME.fullmatch(word):
        raise argparse.ArgumentTypeError(f"not a user's number or name: {word!r}")
    return word


def cgroup_list(word: str) -> tuple[str, ...]:
    """
    Parse ``/system.slice,/user.slice``: paths of control groups.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    paths = word.split(",")
    for path in paths:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(
                f"not a path such as /system.slice: {path!r}"
            )
    return tuple(paths)


def container_list(word: str) -> tuple[str, ...]:
    """
    Parse ``ID,ID``: IDs of containers, or at least their first 12 digits.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    ids = word.lower().split(",")
    for id_ in ids:
        if not _CONTAINER_ID.fullmatch(id_):
            raise argparse.ArgumentTypeError(
                f"not 12 to 64 hexadecimal digits of a container's ID: {id_!r}"
            )
    return tuple(ids)


def duration_ns(word: str) -> int:
    """
    Parse ``30``, which is seconds, ``1.5h`` or ``500ms``, as nanoseconds.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    matched = _DURATION.fullmatch(word)
    if matched is None:
        raise argparse.ArgumentTypeError(f"not a duration such as 30 or 5m: {word!r}")
    number, unit = matched.groups()
    return round(min(float(number) * _UNITS[unit or "s"], _FOREVER_NS))


def byte_size(word: str) -> int:
    """
    Parse ``512M`` or ``4G``, as bytes.

    :raises argparse.ArgumentTypeError: if it is malformed, or less than 1M
    """
    matched = _SIZE.fullmatch(word)
    size = int(matched[1]) << _SHIFTS[matched[2].upper()] if matched else 0
    if not 1 << 20 <= size < 1 << 60:
        raise argparse.ArgumentTypeError(f"not a size such as 512M or 4G: {word!r}")
    return size


def moment_ns(word: str) -> int:
    """
    Parse ``2026-11-20`` or ``2026-11-20T15:30`` (UTC), or ``7d``, the time 7 days ago.

    :return: ns since 1970.
    :raises argparse.ArgumentTypeError: if it is malformed
    """
    if _DURATION.fullmatch(word):
        return time.time_ns() - duration_ns(word)
    try:
        moment = datetime.fromisoformat(word.removesuffix("Z"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"not a date such as 2026-11-20, or an age such as 7d: {word!r}"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return int(moment.timestamp()) * 10**9


def state_letters(word: str) -> frozenset[str]:
    """
    Parse ``DZ`` or ``D,Z``: states as in /proc.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    from msatools.tasks.states import LETTERS

    letters = frozenset(word.replace(",", ""))
    if not letters or letters - frozenset(LETTERS):
        raise argparse.ArgumentTypeError(
            f"states are some of {', '.join(LETTERS)}: not {word!r}"
        )
    return letters


def cpu_list(word: str) -> frozenset[int]:
    """
    Parse ``0-3,8``, as the kernel writes lists of CPUs.

    :raises argparse.ArgumentTypeError: if it is malformed
    """
    cpus: set[int] = set()
    for part in word.split(","):
        first, dash, last = part.partition("-")
        start, end = _number(first), _number(last if dash else first)
        if not start <= end < _MAX_CPUS:
            raise argparse.ArgumentTypeError(f"not a list of CPUs: {word!r}")
        cpus.update(range(start, end + 1))
    return frozenset(cpus)


def _number(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise argparse.ArgumentTypeError(f"not a number: {word!r}")
    return int(word)


# --- Arguments about the target: the target they name, and options to refuse.


_OF_MEMORY = (("kernel_number", "--kernel"), ("vmcoreinfo", "--vmcoreinfo"))
"""Arguments for memory files without VMCOREINFO, and the options that set them."""


def target_path(args: argparse.Namespace, words: Words) -> str | None:
    """Return the path that is the only target; ``None`` if there is another or none."""
    path = words.target if words.target is not None else args.core
    return path if named_targets(args) == [path] else None


RECORDING = "msatools.recording"
"""Format of the files of ``--record``, without its version."""

GZIP_BITS = 31
"""zlib's value for gzip members."""

MAX_HEADER = 1 << 16
"""Maximum bytes of the first line of a recording."""

_GZIP = b"\x1f\x8b"
_START = f'{{"format":"{RECORDING}/'.encode()


def is_recording(path: str) -> bool:
    """Return whether a file begins like a recording; false if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            # Opening a FIFO would wait for a writer.
            return False
        with open(path, "rb") as file:
            data = file.read(MAX_HEADER)
    except (OSError, ValueError):
        # Opening the file as a dump will report the error.
        return False
    if not data.startswith(_GZIP):
        return False
    with suppress(zlib.error):
        packed = zlib.decompressobj(GZIP_BITS)
        return packed.decompress(data, len(_START)) == _START
    return False


def textfile_complaint(args: argparse.Namespace) -> str | None:
    """Return the reason to refuse ``--textfile`` with the other arguments, if any."""
    # Inside drgn there is no sandbox.
    if args.textfile is not None and getattr(args, "sandbox", False):
        return "--textfile: no file is written with --sandbox"
    return None


def target_spec(args: argparse.Namespace, words: Words) -> "TargetSpec":
    """Return the target that a shell's arguments name.

    :raises UsageError: if two targets are named, or options contradict the target
    """
    from msatools.program import TargetSpec

    named = named_targets(args)
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
        kernel=args.kernel_number,
        vmcoreinfo=args.vmcoreinfo,
    )
    for name, option in _OF_MEMORY:
        if getattr(args, name) is not None and (spec.is_live or spec.qemu is not None):
            raise UsageError(f"{option}: it is for dumps, and no dump is named")
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
                f"-u {user}: a dump has no user names; use the number (such as -u 0)"
            )


def refuse_in_sandbox(
    args: argparse.Namespace, parser: argparse.ArgumentParser, *, is_live: bool
) -> None:
    """Refuse options that ``--sandbox`` makes impossible, and live targets.

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


def refuse_target(args: argparse.Namespace, words: Words) -> None:
    """Refuse arguments that name a target when none is read.

    :raises UsageError: if there are any
    """
    named = named_targets(args) + getattr(args, "operands", [])
    if words.interval_s is not None:
        named.append(f"{words.interval_s:g}")
    if getattr(args, "vmlinux", None) is not None:
        named.append(args.vmlinux)
    if getattr(args, "types", "auto") != "auto":
        named.append("--types")
    named += [option for name, option in _OF_MEMORY if getattr(args, name, None)]
    for name in ("debuginfod", "sandbox"):
        if getattr(args, name, False):
            named.append(f"--{name}")
    if args.record is not None:
        named.append("--record")
    if named:
        raise UsageError(f"{named[0]}: --diff reads no target")


def refuse_kernel(args: argparse.Namespace, words: Words, path: str) -> None:
    """Refuse options that do not apply to a recording.

    :raises UsageError: if there are any
    """
    if words.interval_s is not None:
        raise UsageError(f"{path}: a recording has intervals of its own")
    for name, option in (
        ("vmlinux", "-s"),
        *_OF_MEMORY,
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
