# SPDX-License-Identifier: LGPL-2.1-or-later

"""The published JSON Schemas.

All output that the tests parse is checked against them: see tests/support/calls.py.
"""

import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

import msatools
from msatools.derived.schemas import file_name, schemas, text_of
from msatools.registry import NAMES, load
from msatools.reports.schema import MEANINGS, Schema
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
