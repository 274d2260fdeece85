# SPDX-License-Identifier: LGPL-2.1-or-later

"""Encodes reports of any model as JSON that can be decoded again.

This is not the output of ``--json``: it has every field, by its own name. The input of
the decoder is untrusted; it is checked against the types of the model.
"""

from functools import cache
from typing import Any, TypeVar, cast, get_origin

import msgspec
import numpy as np

from msatools.target.model import Address

T = TypeVar("T")

_DTYPES = frozenset(
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
) | {"bool", "float64"}
"""Types of arrays; those of bytes (``S48``) and text (``U1``) also have a length."""

_MAX_TEXT = 1 << 12

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

    :raises msgspec.MsgspecError: if it is none of that model
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
