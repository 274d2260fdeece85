# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the answer to a query, as a table or as JSON."""

import json
from collections.abc import Iterator
from datetime import date, datetime

from msatools.fleet.query import QueryResult
from msatools.render.blocks import Block, Column, Table, free_text


def table(answer: QueryResult) -> Iterator[Block]:
    """Yield the table of an answer; a query without one yields nothing."""
    if not answer.columns:
        return
    columns = tuple(
        _column(name, [row[index] for row in answer.rows])
        for index, name in enumerate(answer.columns)
    )
    yield Table(
        columns,
        [[_text(value) for value in row] for row in answer.rows],
        keeps_all=True,
    )


def json_lines(answer: QueryResult) -> Iterator[str]:
    """Yield each row as an object in a line of JSON."""
    for row in answer.rows:
        values = dict(zip(answer.columns, row, strict=True))
        yield json.dumps(values, default=_text, allow_nan=True) + "\n"


def _column(name: str, values: list[object]) -> Column:
    is_numeric = all(isinstance(value, (int, float, type(None))) for value in values)
    return Column(name, "right") if is_numeric and values else free_text(name)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return str(value)
