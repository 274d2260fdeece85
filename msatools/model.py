# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fields of models: their keys in JSON, and their marks.

A model is a :class:`msgspec.Struct`. What JSON has of a field is said by marks beside
its type::

    cost: Annotated[Cost | None, ADDED] = None
"""

from collections.abc import Hashable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict


class Mark(Struct, frozen=True):
    """A mark of a field, within ``Annotated``."""

    name: str
    value: Hashable = True


def names(model: Any) -> tuple[str, ...]:
    """Return the names of the fields of a model or its class, in order."""
    found: tuple[str, ...] = model.__struct_fields__
    return found


def keys(model: Any) -> tuple[str, ...]:
    """Return the keys of the fields in JSON, in order; most are the names."""
    found: tuple[str, ...] = model.__struct_encode_fields__
    return found


def marks(model: type[Any]) -> dict[str, Mapping[str, Any]]:
    """Return the marks of each field by name."""
    return {
        name: {
            mark.name: mark.value
            for mark in getattr(hint, "__metadata__", ())
            if isinstance(mark, Mark)
        }
        for name, hint in hints(model).items()
    }


def hints(model: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field as it is written."""
    found: dict[str, Any] = {}
    for each in reversed(model.__mro__):
        found |= getattr(each, "__annotations__", {})
    return {name: found[name] for name in names(model)}


def values(model: Any) -> dict[str, Any]:
    """Return the values of a model by name; they are not copied."""
    found: dict[str, Any] = asdict(model)
    return found


def is_model(value: object) -> bool:
    """Return whether something is a model, or the class of one."""
    if isinstance(value, Struct):
        return True
    return isinstance(value, type) and value is not Struct and issubclass(value, Struct)


def hash_but(model: Any, name: str) -> int:
    """Return the hash of a model by all fields except one."""
    return hash(tuple({**values(model), name: None}.values()))


def equal_but(one: Any, other: object, name: str) -> Any:
    """Compare models for ``__eq__`` by all fields except one."""
    if type(other) is not type(one):
        return NotImplemented
    return {**values(one), name: None} == {**values(other), name: None}
