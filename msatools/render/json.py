# SPDX-License-Identifier: LGPL-2.1-or-later

"""A report's model as JSON, whatever the model."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
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
    for key, value in _fields(report):
        yield f", {_text(key)}: "
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield "["
            for place, item in enumerate(value):
                yield (", " if place else "") + _text(_value(item))
            yield "]"
        else:
            yield _text(_value(value))
    yield "}"


_ENCODER = json.JSONEncoder(allow_nan=False)
_PLAIN = frozenset((str, int, bool, float, type(None)))


def _text(value: object) -> str:
    return _ENCODER.encode(value)


@dataclass(frozen=True)
class _Field:
    """A field of a model that reports show."""

    name: str
    key: str
    on_request: bool
    form: Callable[[Any], object] | None
    """Converts a value to its form in JSON; ``None`` if they are the same."""


_LISTED: dict[type, tuple[_Field, ...]] = {}
"""By model, as rows of one model are many."""


def _listed(model: type[Any]) -> tuple[_Field, ...]:
    if model not in _LISTED:
        _LISTED[model] = tuple(_list(model))
    return _LISTED[model]


def _list(model: type[Any]) -> Iterator[_Field]:
    return (
        # Some keys are words of Python's own.
        _Field(
            field.name,
            field.metadata.get("key", field.name),
            bool(field.metadata.get("added")),
            field.metadata.get("form"),
        )
        for field in fields(model)
        if not field.metadata.get("unlisted")
    )


def _fields(model: object) -> Iterator[tuple[str, object]]:
    """Yield the fields of a model that JSON shows."""
    for field in _listed(type(model)):
        value = getattr(model, field.name)
        if value is not None or not field.on_request:
            if value is not None and field.form is not None:
                value = field.form(value)
            yield field.key, value


def _object(model: object) -> dict[str, object]:
    return {key: _value(value) for key, value in _fields(model)}


def _value(value: object) -> object:
    if type(value) in _PLAIN:
        # Most are.
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
