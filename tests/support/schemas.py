# SPDX-License-Identifier: LGPL-2.1-or-later

"""Holds JSON output against the published schemas."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema

from msatools.derived.schemas import file_name

FOLDER = Path(__file__).parents[2] / "docs/schema"


def check_schema(document: dict[str, Any]) -> None:
    """
    Check a document against the schema that it names.

    :raises fastjsonschema.JsonSchemaException: if it has another form, or a key that is
        not in the schema
    """
    _validator(document["schema"])(document)


@cache
def _validator(schema: str) -> Callable[[Any], Any]:
    published = json.loads((FOLDER / file_name(schema)).read_text())
    validate: Callable[[Any], Any] = fastjsonschema.compile(_closed(published))
    return validate


def _closed(part: Any) -> Any:
    """Return a schema that refuses keys that are not in it.

    The published one accepts them: later versions of msatools may add some.
    """
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    closed = {key: _closed(each) for key, each in part.items()}
    if part.get("type") == "object" and "additionalProperties" not in part:
        closed["additionalProperties"] = False
    return closed
