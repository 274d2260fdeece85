# SPDX-License-Identifier: LGPL-2.1-or-later

"""The contract's promise on JSON keys: a key's name tells the form of its value."""

import re
from collections.abc import Callable, Iterator
from typing import Any

_ADDRESS = re.compile("0x(0|[1-9a-f][0-9a-f]*)")


def _is_number(value: Any) -> bool:
    # A bool does not count as an int.
    return value is None or type(value) is int


def _is_address(value: Any) -> bool:
    return value is None or (type(value) is str and bool(_ADDRESS.fullmatch(value)))


_UNITS: tuple[tuple[re.Pattern[str], Callable[[Any], bool]], ...] = (
    (re.compile(r"(.*_)?(ns|pages|bytes|waiters|count)"), _is_number),
    (re.compile(r"address|memmap(_end)?|root_domain|handler"), _is_address),
)


def misfits_of_units(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value that does not have the form of its key's unit.

    Objects and lists with such a key contain values of the unit.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from misfits_of_units(item, f"{path}/{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, (dict, list)):
                for pattern, fits in _UNITS:
                    if pattern.fullmatch(key) and not fits(item):
                        yield f"{path}/{key}: {item!r}"
            yield from misfits_of_units(item, f"{path}/{key}")
