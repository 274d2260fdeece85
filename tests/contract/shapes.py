# SPDX-License-Identifier: LGPL-2.1-or-later

"""Shapes of JSON values, and what of a value is not of its shape.

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
    """Text of one form."""

    pattern: str


@dataclass(frozen=True)
class Map:
    """An object whose keys are data."""

    values: Shape
    keys: Shape = str


ADDRESS = Matching("0x(0|[1-9a-f][0-9a-f]*)")
NUMBER = Matching("[0-9]+")
COUNT = (int, NONE)
WORDS = (str, NONE)


def misfits(value: Any, shape: Shape, place: str = "") -> Iterator[str]:
    """Name what is not as the shape says."""
    if shape is ANY:
        return
    if isinstance(shape, tuple):
        found = [list(misfits(value, each, place)) for each in shape]
        if all(found):
            # The first is the one that says most.
            yield from found[0]
        return
    if isinstance(shape, list):
        yield from _misfits_of_list(value, shape[0], place)
    elif isinstance(shape, dict):
        yield from _misfits_of_object(value, shape, place)
    elif isinstance(shape, Map):
        if type(value) is not dict:
            yield f"{place}: {value!r} is no object"
            return
        for key, item in value.items():
            yield from misfits(key, shape.keys, f"{place}/{key} (the key)")
            yield from misfits(item, shape.values, f"{place}/{key}")
    elif not _is_of(value, shape):
        yield f"{place}: {value!r} is not {shape}"


def _is_of(value: Any, shape: Shape) -> bool:
    if isinstance(shape, Matching):
        return type(value) is str and re.fullmatch(shape.pattern, value) is not None
    if isinstance(shape, (set, frozenset)):
        return value in shape
    # A bool is no int here.
    return type(value) is shape


def _misfits_of_list(value: Any, shape: Shape, place: str) -> Iterator[str]:
    if type(value) is not list:
        yield f"{place}: {value!r} is no list"
        return
    for number, item in enumerate(value):
        yield from misfits(item, shape, f"{place}/{number}")


def _misfits_of_object(value: Any, shape: Shape, place: str) -> Iterator[str]:
    if type(value) is not dict:
        yield f"{place}: {value!r} is no object"
        return
    known = {key.removesuffix("?"): key for key in shape}
    for key in value.keys() - known.keys():
        yield f"{place}/{key}: nobody promises it"
    for key, written in known.items():
        if key in value:
            yield from misfits(value[key], shape[written], f"{place}/{key}")
        elif key == written:
            yield f"{place}/{key}: is not there"


_UNITS = (
    (re.compile(r"(.*_)?(ns|pages|bytes|waiters|count)"), COUNT),
    (re.compile(r"address|memmap(_end)?|root_domain|handler"), (ADDRESS, NONE)),
)


def misfits_of_units(value: Any, place: str = "") -> Iterator[str]:
    """Name what has not the form that its key's unit says, wherever it is.

    An object or a list of that name has many of the unit.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from misfits_of_units(item, f"{place}/{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, (dict, list)):
                for pattern, shape in _UNITS:
                    if pattern.fullmatch(key):
                        yield from misfits(item, shape, f"{place}/{key}")
            yield from misfits_of_units(item, f"{place}/{key}")
