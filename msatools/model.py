# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is known of a model's class: its fields, their keys in JSON, and their marks."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def names(model: Any) -> tuple[str, ...]:
    """Return the names of the fields of a model or its class, in order."""
    return tuple(each.name for each in fields(model))


def keys(model: Any) -> tuple[str, ...]:
    """Return the keys of the fields in JSON, in order; most are the names."""
    return tuple(each.metadata.get("key", each.name) for each in fields(model))


def marks(model: Any) -> dict[str, Mapping[str, Any]]:
    """Return the marks of each field by name."""
    return {each.name: each.metadata for each in fields(model)}


def hints(model: Any) -> dict[str, Any]:
    """Return the annotation of each field as it is written."""
    return {each.name: each.type for each in fields(model)}


def values(model: Any) -> dict[str, Any]:
    """Return the values of a model by name; they are not copied."""
    return {each.name: getattr(model, each.name) for each in fields(model)}


def is_model(value: object) -> bool:
    """Return whether something is a model, or the class of one."""
    return hasattr(value, "__dataclass_fields__")


def hash_but(model: Any, name: str) -> int:
    """Return the hash of a model by all fields except one."""
    return hash(tuple({**values(model), name: None}.values()))


def equal_but(one: Any, other: object, name: str) -> Any:
    """Compare models for ``__eq__`` by all fields except one."""
    if type(other) is not type(one):
        return NotImplemented
    return {**values(one), name: None} == {**values(other), name: None}
