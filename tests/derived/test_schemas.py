# SPDX-License-Identifier: LGPL-2.1-or-later

"""The published JSON Schemas.

All output that the tests parse is checked against them: see tests/support/calls.py.
"""

import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import fastjsonschema
import pytest
from msgspec import Struct, field

import msatools
from msatools.derived.schemas import file_name, schemas, text_of
from msatools.kernel.report import ADDED
from msatools.program.model import UNLISTED, Address
from msatools.registry import NAMES, load
from msatools.reports.schema import MEANINGS, Schema, field_docs, plain_text, schema_of
from tests.support.calls import CORE, call
from tests.support.schemas import FOLDER, check_schema

SCHEMAS = schemas()
PACKAGE = Path(msatools.__file__).parent


def test_published_files_are_what_the_models_say() -> None:
    published = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    made = {file_name(name): text_of(schema) for name, schema in SCHEMAS.items()}
    assert published.keys() == made.keys()
    for name, text in made.items():
        assert published[name] == text, f"docs/schema/{name} is old: make schema"


def test_every_output_has_a_schema() -> None:
    assert SCHEMAS.keys() == {
        *(f"msatools.{name}/1" for name in NAMES),
        *(f"msatools.{name}-diff/1" for name in NAMES if load(name).offers_diff),
        "msatools.fleet/1",
        "msatools.selfcheck/1",
        "msatools.why/1",
    }


def objects(part: Any, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield the schemas of all objects in a schema."""
    if isinstance(part, list):
        for each in part:
            yield from objects(each, path)
    elif isinstance(part, dict):
        if isinstance(part.get("properties"), dict):
            yield path, part["properties"]
        for key, each in part.items():
            yield from objects(each, f"{path}/{key}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_is_described(name: str) -> None:
    found = [*objects(SCHEMAS[name])]
    assert len(found) > 1
    for path, properties in found:
        if path.endswith("/by"):
            continue  # whose keys are those of the option
        for key, described in properties.items():
            text = described.get("description", "")
            assert text.rstrip(")").endswith("."), f"{path}/{key}: {text!r}"
            assert "`" not in text
            assert "None" not in text


def test_every_meaning_is_used() -> None:
    used = {
        described.get("description")
        for schema in SCHEMAS.values()
        for _, properties in objects(schema)
        for described in properties.values()
    }
    unused = [name for name, text in MEANINGS.items() if text not in used]
    assert unused == [], "their fields have docstrings: remove them from the glossary"


def test_keys_are_names_of_fields() -> None:
    """Programs find a value by its JSON key; Python's keywords cannot be names."""
    sources = (path.read_text() for path in PACKAGE.rglob("*.py"))
    given = re.compile(r'field\((?:metadata=\{"key": |name=)"([^"]+)"')
    renamed = [key for text in sources for key in given.findall(text)]
    assert len(renamed) > 5
    assert all(map(keyword.iskeyword, renamed)), renamed


# --- the generator


class _Part(Struct, frozen=True):
    """A part."""

    ns: int


class _Model(Struct, frozen=True, kw_only=True):
    """A model."""

    schema: ClassVar[str] = "x/1"

    count: int | None
    """How many; ``None`` if :class:`.elsewhere.Thing` says *so*."""

    kind: str = field(name="class")
    """Two lines
    of text."""

    where: Address
    """Where."""

    parts: tuple[_Part, ...] | None
    """Its parts."""

    flag: Annotated[bool | None, ADDED] = None
    """A flag; ``None`` if not asked for."""

    by_cpu: Mapping[int, float] = field(default_factory=dict)
    """By CPU."""

    hidden: Annotated[object, UNLISTED] = None


def test_schema_of_a_model() -> None:
    found = schema_of(_Model, "x/1", "a test")
    properties = found.pop("properties")
    assert found == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "x/1: a test",
        "description": "A model.",
        "type": "object",
        "required": ["schema", "count", "class", "where", "parts", "by_cpu"],
        "$defs": {
            "_Part": {
                "description": "A part.",
                "type": "object",
                "properties": {"ns": {"type": "integer"}},
                "required": ["ns"],
            }
        },
    }
    texts = {key: each.pop("description") for key, each in properties.items()}
    assert texts == {
        "schema": "Name and version of this schema.",
        "count": "How many; null if Thing says so.",
        "class": "Two lines of text.",
        "where": "Where.",
        "parts": "Its parts.",
        "flag": "A flag; absent if not asked for.",
        "by_cpu": "By CPU.",
    }
    assert properties == {
        "schema": {"const": "x/1"},
        "count": {"type": ["integer", "null"]},
        "class": {"type": "string"},
        "where": {"type": "string", "pattern": "^0x(0|[1-9a-f][0-9a-f]*)$"},
        "parts": {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#/$defs/_Part"}},
                {"type": "null"},
            ]
        },
        "flag": {"type": "boolean"},
        "by_cpu": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "propertyNames": {"pattern": "^-?[0-9]+$"},
        },
    }


def test_docs_of_fields() -> None:
    assert field_docs(_Part) == {}
    assert field_docs(_Model)["where"] == "Where."
    assert plain_text("a ``b``\n  *c*, :data:`~.d.e` (2 * 3 * 4)") == (
        "a b c, e (2 * 3 * 4)"
    )


# --- the check


def test_what_does_not_match_is_refused() -> None:
    document = call(load("zombies"), "--json", CORE).json
    check_schema(document)
    for damage in (
        {"groups": None},
        {"reads": None},
        {"more": 1},
        {"taken_at_ns": "1"},
        {"notes": [{"code": "x"}]},
        {"target": {**document["target"], "kind": "tape"}},
    ):
        with pytest.raises(fastjsonschema.JsonSchemaException):
            check_schema({**document, **damage})
    del document["groups"]
    with pytest.raises(fastjsonschema.JsonSchemaException):
        check_schema(document)
