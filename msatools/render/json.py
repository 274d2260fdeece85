# SPDX-License-Identifier: LGPL-2.1-or-later

"""A report's model as JSON, whatever the model."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol, SupportsIndex, TextIO

from msatools.target.model import Address


class Document(Protocol):
    """A model that says what it is: a report, for the most part."""

    @property
    def schema(self) -> str:
        """The family of its models, and which of them it is of."""


def show(report: Document, out: TextIO) -> None:
    """Print a report as one line of JSON."""
    # Not through rich, which would fold it.
    for piece in _pieces(report):
        out.write(piece)
    out.write("\n")


def dumps(report: Document) -> str:
    """Serialise a report: its schema, then the model's fields in their order."""
    return "".join(_pieces(report))


def _pieces(report: Document) -> Iterator[str]:
    """Serialise a report bit by bit: it may have a hundred thousand rows."""
    yield f'{{"schema": {_text(report.schema)}'
    for key, value in _fields(report).items():
        yield f", {_text(key)}: "
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield "["
            items = iter(value)
            comma = ""
            while some := [_value(item) for item in islice(items, _AT_ONCE)]:
                yield comma + _text(some)[1:-1]
                comma = ", "
            yield "]"
        else:
            yield _text(_value(value))
    yield "}"


_ENCODER = json.JSONEncoder(allow_nan=False)
_PLAIN = frozenset((str, int, bool, float, type(None)))
_AT_ONCE = 64
"""Items of a list that are made and written at once: each call has its cost."""


def _text(value: object) -> str:
    return _ENCODER.encode(value)


@dataclass(frozen=True)
class _Model:
    """What reports show of the rows of one model, which are many."""

    keys: tuple[str, ...]
    """Some are words of Python's own, which no field can be called."""

    values: Callable[[object], tuple[object, ...]]
    """Takes the fields of a row, in their order."""

    on_request: tuple[str, ...]
    """Keys that are there only if they have a value."""

    forms: tuple[tuple[str, Callable[[Any], object]], ...]
    """By key, what makes of a value what JSON has."""


_MODELS: dict[type, _Model] = {}


def _model(type_: type[Any]) -> _Model:
    if type_ not in _MODELS:
        _MODELS[type_] = _look_at(type_)
    return _MODELS[type_]


def _look_at(type_: type[Any]) -> _Model:
    listed = [each for each in fields(type_) if not each.metadata.get("unlisted")]
    names = [each.name for each in listed]
    keys = [each.metadata.get("key", each.name) for each in listed]
    told = list(zip(keys, (each.metadata for each in listed), strict=True))
    return _Model(
        keys=tuple(keys),
        values=_values(names),
        on_request=tuple(key for key, more in told if more.get("added")),
        forms=tuple((key, more["form"]) for key, more in told if more.get("form")),
    )


def _values(names: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda row: tuple(getattr(row, name) for name in names)


def _fields(row: Any) -> dict[str, object]:
    """Return what a row has, by key."""
    model = _model(type(row))
    found = dict(zip(model.keys, model.values(row), strict=True))
    for key in model.on_request:
        if found[key] is None:
            del found[key]
    for key, form in model.forms:
        if (value := found.get(key)) is not None:
            found[key] = form(value)
    return found


def _object(row: object) -> dict[str, object]:
    found = _fields(row)
    for key, value in found.items():
        # Most are; that of a key may change while all are gone through.
        if type(value) not in _PLAIN:
            found[key] = _value(value)
    return found


def _value(value: object) -> object:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Address):
        return hex(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_value(item) for item in value]
    if isinstance(value, Set):
        return sorted(_value(item) for item in value)  # type: ignore[type-var]
    if is_dataclass(value):
        return _object(value)
    if isinstance(value, SupportsIndex):
        # numpy's integers.
        return value.__index__()
    raise TypeError(f"a report cannot hold a {type(value).__name__}")
