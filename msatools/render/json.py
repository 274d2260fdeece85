# SPDX-License-Identifier: LGPL-2.1-or-later

"""Serialises any report's model as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol, SupportsIndex, TextIO

from msatools.target.model import Address


class Document(Protocol):
    """A model with a schema: usually a report."""

    @property
    def schema(self) -> str:
        """Name and version of the schema."""


def show(report: Document, out: TextIO) -> None:
    """Print a report as one line of JSON."""
    # Not through rich, which would wrap it.
    for piece in _pieces(report):
        out.write(piece)
    out.write("\n")


def dumps(report: Document) -> str:
    """Serialise a report: its schema, then the model's fields in order."""
    return "".join(_pieces(report))


def _pieces(report: Document) -> Iterator[str]:
    """Serialise a report in pieces: it may have a hundred thousand rows."""
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
"""Items of a list to serialise at once: each call has a cost."""


def _text(value: object) -> str:
    return _ENCODER.encode(value)


@dataclass(frozen=True)
class _Model:
    """Keys and conversions for the rows of one model, cached for many rows."""

    keys: tuple[str, ...]
    """Keys in order; some are Python keywords, which cannot be names of fields."""

    values: Callable[[object], tuple[object, ...]]
    """Function that returns the fields of a row, in order."""

    on_request: tuple[str, ...]
    """Keys that are omitted if null."""

    forms: tuple[tuple[str, Callable[[Any], object]], ...]
    """Functions that convert the value of a key to its form in JSON."""


_MODELS: dict[type, _Model] = {}


def _model(type_: type[Any]) -> _Model:
    if type_ not in _MODELS:
        _MODELS[type_] = _make_model(type_)
    return _MODELS[type_]


def _make_model(type_: type[Any]) -> _Model:
    listed = [item for item in fields(type_) if not item.metadata.get("unlisted")]
    by_key = {item.metadata.get("key", item.name): item.metadata for item in listed}
    return _Model(
        keys=tuple(by_key),
        values=_values([item.name for item in listed]),
        on_request=tuple(key for key, data in by_key.items() if data.get("added")),
        forms=tuple(
            (key, data["form"]) for key, data in by_key.items() if data.get("form")
        ),
    )


def _values(names: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda row: tuple(getattr(row, name) for name in names)


def _fields(row: Any) -> dict[str, object]:
    """Return the values of a row by key."""
    model = _model(type(row))
    values = dict(zip(model.keys, model.values(row), strict=True))
    for key in model.on_request:
        if values[key] is None:
            del values[key]
    for key, form in model.forms:
        if (value := values.get(key)) is not None:
            values[key] = form(value)
    return values


def _object(row: object) -> dict[str, object]:
    values = _fields(row)
    for key, value in values.items():
        # Most values are plain. Replacing a value while iterating is allowed.
        if type(value) not in _PLAIN:
            values[key] = _value(value)
    return values


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
