# SPDX-License-Identifier: LGPL-2.1-or-later

"""Encode models as JSON, for recordings and for --json; decode recordings."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol, SupportsIndex, TextIO, TypeVar, cast, get_origin

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple, replace

from msatools.model import keys, marks, names
from msatools.program.model import Address

# --- Encodes reports of any model as JSON that can be decoded again.
#
# This is not the output of --json: it has every field, by its own name. The input of
# the decoder is untrusted; it is checked against the types of the model.


T = TypeVar("T")

_DTYPES = frozenset(
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
) | {"bool", "float64"}
"""Types of arrays; those of bytes (``S48``) and text (``U1``) also have a length."""

_Array = dict[str, Any]


def encode(report: object) -> bytes:
    """Return a report as JSON, in one line."""
    return _encoder().encode(report)


def decode(data: bytes, model: type[T]) -> T:
    """
    Decode a report from JSON.

    :raises msgspec.MsgspecError: if it does not match the model or is damaged
    """
    report: T = _decoder(cast(Any, model)).decode(data)
    return report


def convert(value: object, model: type[T]) -> T:
    """
    Convert a part of a report that was decoded without its model.

    :raises msgspec.MsgspecError: if it does not match the model
    """
    return msgspec.convert(value, model, dec_hook=_decoded)


@cache
def _encoder() -> msgspec.json.Encoder:
    return msgspec.json.Encoder(enc_hook=_encoded)


@cache
def _decoder(model: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(model, dec_hook=_decoded)


def _encoded(value: Any) -> object:
    """Return the JSON form of a value that JSON has no type for."""
    if isinstance(value, Address):
        return int(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__len__"):
        # A lazy sequence.
        return list(value)
    raise NotImplementedError(f"a recording cannot hold a {type(value).__name__}")


def _array(array: "np.ndarray[Any, Any]") -> _Array:
    kind = array.dtype.kind
    if kind == "S":
        # latin-1 maps each byte to a character.
        values = np.char.decode(array, "latin-1").tolist()
        return {"dtype": array.dtype.str[1:], "values": values}
    if kind == "U":
        return {"dtype": array.dtype.str[1:], "values": array.tolist()}
    return {
        "dtype": array.dtype.name,
        "shape": array.shape,
        "values": array.ravel().tolist(),
    }


def _decoded(kind: type[Any], value: Any) -> object:
    if kind is Address:
        if not isinstance(value, int):
            raise ValueError("an address is a number")
        return Address(value)
    if (get_origin(kind) or kind) is np.ndarray:
        return _make_array(convert(value, _Array))
    raise NotImplementedError(f"a recording cannot hold a {kind}")


def _make_array(value: _Array) -> "np.ndarray[Any, Any]":
    dtype, values = value.get("dtype"), value.get("values")
    if not isinstance(dtype, str) or not isinstance(values, list):
        raise ValueError("no array")
    if dtype[:1] in ("S", "U") and dtype[1:].isdecimal() and len(dtype) < 5:
        texts = convert(values, list[str])
        if dtype[0] == "S":
            return np.array([text.encode("latin-1") for text in texts], dtype)
        return np.array(texts, dtype)
    if dtype not in _DTYPES:
        raise ValueError("an array of a type that is not known")
    items: type[Any] = {"b": bool, "f": float}.get(dtype[0], int)
    if items is float:
        # JSON has no NaN: it is encoded as null.
        floats = convert(values, list[float | None])
        values = [np.nan if item is None else item for item in floats]
    else:
        values = convert(values, list[items])  # type: ignore[valid-type]
    shape = convert(value.get("shape"), tuple[int, ...])
    return np.array(values, dtype).reshape(shape)


# --- Serialises any report's model as JSON: one line of ASCII.


class Document(Protocol):
    """A model with a schema: usually a report."""

    @property
    def schema(self) -> str:
        """Name and version of the schema."""


def show(report: Document, out: TextIO) -> None:
    """Print a report as one line of JSON."""
    for piece in _pieces(report):
        out.write(piece)
    out.write("\n")


def dumps(report: Document) -> str:
    """Serialise a report: its schema, then the model's fields in order."""
    return "".join(_pieces(report))


def _pieces(report: Document) -> Iterator[str]:
    """Serialise a report in pieces: it may have a hundred thousand rows."""
    yield f'{{"schema": {_text(report.schema)}'
    model: Any = type(report)
    shape = _shape(model)
    for key, value in shape.items(shape.values(report)).items():
        yield f", {_text(key)}: "
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield "["
            items = iter(value)
            comma = ""
            while some := [_plain(item) for item in islice(items, _AT_ONCE)]:
                yield comma + _text(some)[1:-1]
                comma = ", "
            yield "]"
        else:
            yield _text(_plain(value))
    yield "}"


_AT_ONCE = 64
"""Items of a list to serialise at once: each call has a cost."""


# --- The fields of a model that JSON lists, and the form of each value.


class _Shape(Struct, frozen=True):
    """The fields of a model that JSON lists, computed once for many rows."""

    keys: tuple[str, ...]
    values: Callable[[object], tuple[object, ...]]
    """Function that returns the listed fields of a row, in the order of the keys."""

    added: Mapping[str, str]
    """Keys that are omitted if their value is ``None``, by the name of the field."""

    forms: tuple[tuple[str, Callable[[Any], object]], ...]
    """Functions that convert the value of a key to its form in JSON."""

    hidden: Mapping[str, UnsetType]
    """Values for msgspec of the fields that are not listed."""

    def without_hidden(self, row: Any) -> object:
        """Return a copy of a row of which msgspec writes only the listed fields."""
        hidden = self.hidden
        if absent := [name for name in self.added if getattr(row, name) is None]:
            hidden = {**hidden, **dict.fromkeys(absent, UNSET)}
        return replace(row, **hidden) if hidden else row

    def items(self, row: tuple[object, ...]) -> dict[str, object]:
        """Return the values of a row by key, converted by :attr:`forms`.

        :param row: What :attr:`values` returns.
        """
        found = dict(zip(self.keys, row, strict=True))
        for key in self.added.values():
            if found[key] is None:
                del found[key]
        for key, form in self.forms:
            if (value := found.get(key)) is not None:
                found[key] = form(value)
        return found


@cache
def _shape(model: Any) -> _Shape:
    marked = marks(model)
    listed = {
        name: key
        for name, key in zip(names(model), keys(model), strict=True)
        if "unlisted" not in marked[name]
    }
    return _Shape(
        keys=tuple(listed.values()),
        values=_getter([*listed]),
        added={name: key for name, key in listed.items() if "added" in marked[name]},
        forms=tuple(
            (key, marked[name]["form"])
            for name, key in listed.items()
            if "form" in marked[name]
        ),
        hidden={name: UNSET for name in names(model) if name not in listed},
    )


def _getter(listed: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    if len(listed) > 1:
        return attrgetter(*listed)
    return lambda row: tuple(getattr(row, name) for name in listed)


# --- Converts values to what JSON can hold.


_PLAIN = frozenset((str, int, bool, type(None)))


def _plain(value: object) -> object:
    """Return a value of a model in types that msgspec and JSON have.

    :raises TypeError: if it is of a type that no report has
    """
    kind: Any = type(value)
    return value if kind in _PLAIN else _converter(kind)(value)


@cache
def _converter(kind: type[Any]) -> Callable[[Any], object]:
    """Return the function that converts values of a type; cached: finding it is slow.

    :raises TypeError: if no report has such values
    """
    if issubclass(kind, Struct):
        return partial(_plain_model, _shape(kind))
    if issubclass(kind, Address):
        return hex
    if issubclass(kind, float):
        return _number
    if issubclass(kind, str):
        return str.__str__
    if issubclass(kind, Mapping):
        return lambda value: {str(key): _plain(item) for key, item in value.items()}
    if issubclass(kind, Sequence):
        return lambda value: [_plain(item) for item in value]
    if issubclass(kind, Set):
        return lambda value: sorted(map(_plain, value))  # type: ignore[type-var]
    if issubclass(kind, SupportsIndex):
        # numpy's integers, too.
        return lambda value: value.__index__()
    raise TypeError(f"a report cannot hold a {kind.__name__}")


def _plain_model(shape: _Shape, value: object) -> object:
    row = shape.values(value)
    if not shape.forms and _PLAIN.issuperset(map(type, row)):
        return shape.without_hidden(value)
    found = shape.items(row)
    for key, item in found.items():
        # Most are plain. Replacing a value while iterating is allowed.
        if type(item) not in _PLAIN:
            found[key] = _plain(item)
    return found


def _number(value: float) -> object:
    if not math.isfinite(value):
        raise ValueError(f"JSON has no {value}")
    if 1e-4 <= abs(value) < 1e16:
        return float(value)
    # msgspec writes other digits where Python has an exponent.
    return msgspec.Raw(repr(float(value)).encode())


# --- Writes plain values as JSON text.

_ESCAPED = re.compile("[^\\x00-\\x7e]")


def _text(value: object) -> str:
    """Return plain values as JSON: a space after commas and colons, and ASCII only."""
    try:
        data = msgspec.json.format(msgspec.json.encode(value), indent=0)
    except UnicodeEncodeError:
        # A path of the command line whose bytes are not UTF-8.
        return json.dumps(value, default=_builtin)
    text = data.decode()
    if text.isascii() and "\x7f" not in text:
        return text
    return _ESCAPED.sub(_escape, text)


def _escape(found: "re.Match[str]") -> str:
    return json.dumps(found[0])[1:-1]


def _builtin(value: Any) -> object:
    """Convert a value of a type of msgspec to types of the standard library."""
    if isinstance(value, msgspec.Raw):
        return float(bytes(value))
    items = zip(keys(value), astuple(value), strict=True)
    return {key: item for key, item in items if item is not UNSET}
