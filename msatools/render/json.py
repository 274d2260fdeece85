# SPDX-License-Identifier: LGPL-2.1-or-later

"""Serialises any report's model as JSON."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol, TextIO

from msatools.reports.values import field_values, plain_value


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
    for key, value in field_values(report).items():
        yield f", {_text(key)}: "
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield "["
            items = iter(value)
            comma = ""
            while some := [plain_value(item) for item in islice(items, _AT_ONCE)]:
                yield comma + _text(some)[1:-1]
                comma = ", "
            yield "]"
        else:
            yield _text(plain_value(value))
    yield "}"


_ENCODER = json.JSONEncoder(allow_nan=False)
_AT_ONCE = 64
"""Items of a list to serialise at once: each call has a cost."""


def _text(value: object) -> str:
    return _ENCODER.encode(value)
