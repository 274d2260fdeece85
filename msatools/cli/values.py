# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parsers of option values: numbers, names and lists of them."""

import argparse
import re
import sys
import time
from collections.abc import Collection, Iterable

_MAX_CPUS = 1 << 16
"""Maximum number of CPUs, more than any NR_CPUS."""

_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_UNITS |= {"h": 3600 * 10**9, "d": 86400 * 10**9}
_FOREVER_NS = 1 << 62
"""Maximum duration: 146 years."""

ALL = "all"
_ALL_ROWS = sys.maxsize

_CONTAINER_ID = re.compile("[0-9a-f]{12,64}")
"""Engines show 12 digits of 64."""

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
    """A name is none of those that an option takes."""

    def __init__(self, name: str, known: Iterable[str], kind: str) -> None:
        self.known = tuple(known)
        """All names, which completion offers."""

        super().__init__(
            f"unknown {kind} {name!r}; choose from {', '.join(self.known)}"
        )


def known_names(names: Iterable[str], known: Collection[str], kind: str) -> list[str]:
    """
    Return *names* as a list, if all of them are known.

    :param kind: Kind of the names: "column".
    :raises UnknownName: if one is not known
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

    :param known: All columns, as they are called.
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
    Parse IDs of containers, or their first 12 digits or more.

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
    from datetime import datetime, timezone

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
