# SPDX-License-Identifier: LGPL-2.1-or-later

"""A report's model as JSON, whatever the model."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import SupportsIndex, TextIO

from msatools.kernel.report import Report
from msatools.target.model import Address


def show(report: Report, out: TextIO) -> None:
    """Print a report as one line of JSON."""
    # Not through rich, which would fold it.
    out.write(dumps(report) + "\n")


def dumps(report: Report) -> str:
    """Serialise a report: its schema, then the model's fields in their order."""
    return json.dumps({"schema": report.schema, **_object(report)}, allow_nan=False)


def _object(model: object) -> dict[str, object]:
    return {
        field.name: _value(getattr(model, field.name))
        for field in fields(model)  # type: ignore[arg-type]  # any dataclass
        if not field.metadata.get("unlisted")
        and (getattr(model, field.name) is not None or not field.metadata.get("added"))
    }


def _value(value: object) -> object:
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, Address):
        return hex(value)
    if isinstance(value, SupportsIndex):
        # Integers, numpy's too.
        return value.__index__()
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_value(item) for item in value]
    if isinstance(value, Set):
        return sorted(_value(item) for item in value)  # type: ignore[type-var]
    if is_dataclass(value):
        return _object(value)
    raise TypeError(f"a report cannot hold a {type(value).__name__}")
