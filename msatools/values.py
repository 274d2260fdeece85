# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the options of several commands take: numbers, and lists of them."""

import argparse

_MAX_CPUS = 1 << 16
"""More than any kernel can have (NR_CPUS)."""


def number_list(word: str) -> tuple[int, ...]:
    """
    Understand ``1,2,30``.

    :raises argparse.ArgumentTypeError: if it is nothing of the kind
    """
    numbers = [_number(part) for part in word.split(",")]
    return tuple(dict.fromkeys(numbers))


def name_list(word: str) -> list[str]:
    """Understand ``one,two``."""
    return [name for name in word.split(",") if name]


def positive_number(word: str) -> int:
    """
    Understand a number above zero.

    :raises argparse.ArgumentTypeError: if it is nothing of the kind
    """
    number = _number(word)
    if not number:
        raise argparse.ArgumentTypeError(f"not a positive number: {word!r}")
    return number


def cpu_list(word: str) -> frozenset[int]:
    """
    Understand ``0-3,8``, as the kernel writes lists of CPUs.

    :raises argparse.ArgumentTypeError: if it is nothing of the kind
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
