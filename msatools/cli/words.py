# SPDX-License-Identifier: LGPL-2.1-or-later

"""The positional arguments: target, interval and count."""

import argparse
import os
import re
from collections.abc import Iterable

from msgspec import Struct

from msatools.cli.usage import UsageError

_MAX_INTERVAL_S = 1e8
"""Maximum interval, three years: below the limits of the system's clocks."""

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
    """Return whether a word is an interval or a count, or is meant as one."""
    return _NUMBER.fullmatch(word) is not None


def named_targets(args: argparse.Namespace) -> list[str]:
    """Return the arguments that name a target."""
    targets = [word for word in args.words if not is_number(word)]
    # Inside drgn there are no options for a target.
    targets += (getattr(args, name, None) for name in ("core", "qemu"))
    if getattr(args, "kernel", False):
        targets.append("-k")
    return [target for target in targets if target is not None]
