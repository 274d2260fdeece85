# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts any report's model to the plain values that JSON has."""

from collections.abc import Callable, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any, SupportsIndex

from msatools.model import is_model, keys, marks, names
from msatools.records import dataclass
from msatools.target.model import Address

_PLAIN = frozenset((str, int, bool, float, type(None)))


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
    marked = marks(type_)
    listed = {
        name: key
        for name, key in zip(names(type_), keys(type_), strict=True)
        if not marked[name].get("unlisted")
    }
    by_key = {key: marked[name] for name, key in listed.items()}
    return _Model(
        keys=tuple(by_key),
        values=_values([*listed]),
        on_request=tuple(key for key, data in by_key.items() if data.get("added")),
        forms=tuple(
            (key, data["form"]) for key, data in by_key.items() if data.get("form")
        ),
    )


def _values(names: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda row: tuple(getattr(row, name) for name in names)


def field_values(row: Any) -> dict[str, object]:
    """Return the values of a model by the keys of JSON; they are not converted.

    Keys of what was not asked for are missing.
    """
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
    values = field_values(row)
    for key, value in values.items():
        # Most values are plain. Replacing a value while iterating is allowed.
        if type(value) not in _PLAIN:
            values[key] = plain_value(value)
    return values


def plain_value(value: object) -> object:
    """Return a value of a model as JSON has it.

    :raises TypeError: if it is of a type that no report has
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Address):
        return hex(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_value(item) for item in value]
    if isinstance(value, Set):
        return sorted(plain_value(item) for item in value)  # type: ignore[type-var]
    if is_model(value):
        return _object(value)
    if isinstance(value, SupportsIndex):
        # numpy's integers.
        return value.__index__()
    raise TypeError(f"a report cannot hold a {type(value).__name__}")
