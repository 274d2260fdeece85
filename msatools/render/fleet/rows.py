# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the answer to a query, as a table or as JSON."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime

from msatools.fleet.errors import FleetError
from msatools.fleet.query import QueryResult
from msatools.render.blocks import Block, Column, Table, free_text


def table(answer: QueryResult) -> Iterator[Block]:
    """Yield the table of an answer."""
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
    """Yield each row as an object in a line of JSON.

    :raises FleetError: if two columns have one name
    """
    twice = [name for name, count in Counter(answer.columns).items() if count > 1]
    if twice:
        raise FleetError(
            f"two columns are named {twice[0]}, which --json cannot tell apart; name "
            "one of them by AS"
        )
    for row in answer.rows:
        values = zip(answer.columns, map(_plain, row), strict=True)
        yield json.dumps(dict(values), allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """Return a value as JSON has it; numbers that are not finite are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return {_text(key): _plain(each) for key, each in value.items()}
    return _text(value)


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
    if isinstance(value, dict):
        return ", ".join(f"{_text(key)}: {_text(each)}" for key, each in value.items())
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
