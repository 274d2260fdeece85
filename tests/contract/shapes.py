# SPDX-License-Identifier: LGPL-2.1-or-later

"""Shapes of JSON values, and a check of values against them.

A shape is a type, a list of one shape, a dict of them (a key that ends in ``?`` may be
absent), a tuple of possible shapes, a set of possible values, or one of those below.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Shape = Any

ANY = object()
NONE = type(None)


@dataclass(frozen=True)
class Matching:
    """Text that matches a pattern in full."""

    pattern: str


@dataclass(frozen=True)
class Map:
    """An object whose keys are data, not names of fields."""

    values: Shape
    keys: Shape = str


ADDRESS = Matching("0x(0|[1-9a-f][0-9a-f]*)")
NUMBER = Matching("[0-9]+")
COUNT = (int, NONE)
WORDS = (str, NONE)


def misfits(value: Any, shape: Shape, path: str = "") -> Iterator[str]:
    """Yield a line for each part of a value that does not have its shape."""
    if shape is ANY:
        return
    if isinstance(shape, tuple):
        by_shape = [list(misfits(value, possible, path)) for possible in shape]
        if all(by_shape):
            # The first shape is the most specific.
            yield from by_shape[0]
        return
    if isinstance(shape, list):
        yield from _misfits_of_list(value, shape[0], path)
    elif isinstance(shape, dict):
        yield from _misfits_of_object(value, shape, path)
    elif isinstance(shape, Map):
        if type(value) is not dict:
            yield f"{path}: {value!r} is no object"
            return
        for key, item in value.items():
            yield from misfits(key, shape.keys, f"{path}/{key} (the key)")
            yield from misfits(item, shape.values, f"{path}/{key}")
    elif not _is_of(value, shape):
        yield f"{path}: {value!r} is not {shape}"


def _is_of(value: Any, shape: Shape) -> bool:
    if isinstance(shape, Matching):
        return type(value) is str and re.fullmatch(shape.pattern, value) is not None
    if isinstance(shape, (set, frozenset)):
        return value in shape
    # A bool does not count as an int.
    return type(value) is shape


def _misfits_of_list(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if type(value) is not list:
        yield f"{path}: {value!r} is not a list"
        return
    for number, item in enumerate(value):
        yield from misfits(item, shape, f"{path}/{number}")


def _misfits_of_object(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if type(value) is not dict:
        yield f"{path}: {value!r} is no object"
        return
    known = {key.removesuffix("?"): key for key in shape}
    for key in value.keys() - known.keys():
        yield f"{path}/{key}: not in the shape"
    for key, written in known.items():
        if key in value:
            yield from misfits(value[key], shape[written], f"{path}/{key}")
        elif key == written:
            yield f"{path}/{key}: missing"


_UNITS = (
    (re.compile(r"(.*_)?(ns|pages|bytes|waiters|count)"), COUNT),
    (re.compile(r"address|memmap(_end)?|root_domain|handler"), (ADDRESS, NONE)),
)


def misfits_of_units(value: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value that does not have the form of its key's unit.

    Objects and lists with such a key contain values of the unit.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from misfits_of_units(item, f"{path}/{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, (dict, list)):
                for pattern, shape in _UNITS:
                    if pattern.fullmatch(key):
                        yield from misfits(item, shape, f"{path}/{key}")
            yield from misfits_of_units(item, f"{path}/{key}")
