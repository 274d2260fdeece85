# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes models as JSON Schemas: the form in which ``--json`` prints them.

The keys are described by the docstrings of the fields, which are read from the source:
this is for ``make schema`` and for tests, not for commands.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msatools.model import is_model, keys, marks, names
from msatools.reports.glossary import MEANINGS
from msatools.target.model import Address

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_PLAIN: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    NoneType: "null",
}


def schema_of(model: type[Any], name: str, what: str) -> Schema:
    """Return the schema of a document.

    :param model: Its class.
    :param name: Name and version, such as ``msatools.memstat/1``.
    :param what: The command that prints it, for the title.
    """
    return _Schema().document(model, name, what)


class _Schema:
    """One schema, and the definitions that it refers to."""

    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}

    def document(self, model: type[Any], name: str, what: str) -> Schema:
        body = self._object(model)
        schema = {"const": name, "description": "Name and version of this schema."}
        return {
            "$schema": DIALECT,
            "title": f"{name}: {what}",
            "description": body["description"],
            "type": "object",
            "properties": {"schema": schema, **body["properties"]},
            "required": ["schema", *body["required"]],
            "$defs": dict(sorted(self._definitions.items())),
        }

    def _object(self, model: type[Any]) -> Schema:
        """Return the schema of a model."""
        hints = get_type_hints(model, localns=_typing_names(model))
        docs = field_docs(model)
        properties: Schema = {}
        required = []
        marked = marks(model)
        for name, key in zip(names(model), keys(model), strict=True):
            if marked[name].get("unlisted"):
                continue
            is_added = bool(marked[name].get("added"))
            if not is_added:
                required.append(key)
            described = self._property(marked[name], hints[name], is_added)
            text = docs.get(name) or self._meaning(model, key, described)
            if text and is_added:
                text = text.replace("null", "absent")
            properties[key] = {**described, **({"description": text} if text else {})}
        return {
            "description": plain_text(inspect.getdoc(model) or ""),
            "type": "object",
            "properties": properties,
            "required": required,
        }

    def _meaning(self, model: type[Any], key: str, described: Schema) -> str | None:
        """Return the meaning of a key whose field has no docstring."""
        own = f"{model.__name__}.{key}"
        if own in MEANINGS:
            return MEANINGS[own]
        # Values of a class have its description.
        for name in _references(described):
            return str(self._definitions[name]["description"])
        return MEANINGS.get(key)

    def _property(self, marked: Mapping[str, Any], hint: Any, is_added: bool) -> Schema:
        """Return the schema of a field.

        :param marked: Its marks.
        :param is_added: Whether the key is missing where the value is ``None``.
        """
        if (form := marked.get("form")) is not None:
            hint = get_type_hints(form, localns=_typing_names(form))["return"]
        if (groups := marked.get("groups")) is not None:
            by_key = {
                key: {"type": "array", "items": self._value(row)}
                for key, row in groups().items()
            }
            described: Schema = {"type": "object", "properties": by_key}
            return described if is_added else _any_of([described, {"type": "null"}])
        if is_added:
            hint = _without_none(hint)
        return self._value(hint)

    def _value(self, hint: Any) -> Schema:
        """Return the schema of a type."""
        if hint is Any:
            return {}
        if hint is Address:
            return {"type": "string", "pattern": "^0x(0|[1-9a-f][0-9a-f]*)$"}
        if hint in _PLAIN:
            return {"type": _PLAIN[hint]}
        origin, words = get_origin(hint), get_args(hint)
        if origin is Literal:
            return {"enum": [*words]}
        if origin in (Union, UnionType):
            return _any_of([self._value(word) for word in words])
        if is_model(hint):
            return {"$ref": f"#/$defs/{self._defined(hint)}"}
        kind = origin or hint
        if isinstance(kind, type) and issubclass(kind, Mapping):
            return self._mapping(*words)
        if isinstance(kind, type) and issubclass(kind, (Sequence, Set)):
            return self._list(kind, words)
        if isinstance(kind, type) and issubclass(kind, (str, int)):
            base = str if issubclass(kind, str) else int
            return {"type": _PLAIN[base]}
        raise TypeError(f"no JSON has a {hint}")

    def _mapping(self, key: Any, item: Any) -> Schema:
        described = {"type": "object", "additionalProperties": self._value(item)}
        if key is int:
            described["propertyNames"] = {"pattern": "^-?[0-9]+$"}
        elif get_origin(key) is Literal:
            described["propertyNames"] = {"enum": [*get_args(key)]}
        return described

    def _list(self, kind: type, words: tuple[Any, ...]) -> Schema:
        if issubclass(kind, tuple) and words[1:] != (...,):
            raise TypeError("a list in JSON has items of one kind")
        return {"type": "array", "items": self._value(words[0])}

    def _defined(self, model: Any) -> str:
        """Define a model, and return its name."""
        name: str = model.__name__
        if name not in self._definitions:
            self._definitions[name] = {}  # a model may contain itself
            self._definitions[name] = self._object(model)
        return name


def _references(described: Schema) -> Iterator[str]:
    """Yield the names of the definitions that a schema is, or that it lists."""
    if "$ref" in described:
        yield described["$ref"].rpartition("/")[2]
    if "items" in described:
        yield from _references(described["items"])
    for part in described.get("anyOf", ()):
        yield from _references(part)


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of values that one of some schemas describes."""
    if all([*schema] == ["type"] for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": [*schemas]}


def _without_none(hint: Any) -> Any:
    rest = [word for word in get_args(hint) if word is not NoneType]
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return Union[tuple(rest)]  # noqa: UP007 - their number is not known


# --- docstrings


def field_docs(model: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a model, with those it inherits."""
    docs: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if is_model(each) and names(each):
            docs |= _own_docs(each)
    return docs


@cache
def _own_docs(model: Any) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(node, ast.ClassDef)
    return dict(_docs(node.body))


def _docs(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of fields; one docstring may follow several fields."""
    names: list[str] = []
    for statement in body:
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(statement.target, ast.Name)
            names.append(statement.target.id)
        elif (
            names
            and isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
        ):
            yield names[-1], plain_text(str(statement.value.value))
            names = []


_ROLE = re.compile(r":\w+:`~?\.?([^`]+)`")
_MARKUP: tuple[tuple[re.Pattern[str], str | Callable[["re.Match[str]"], str]], ...] = (
    (_ROLE, lambda found: found[1].rpartition(".")[2]),
    (re.compile(r"``None``"), "null"),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"(?<!\w)\*(\w+)\*(?!\w)"), r"\1"),
    (re.compile(r"\s+"), " "),
)


def plain_text(doc: str) -> str:
    """Return a docstring in one line, without markup; ``None`` is null in JSON."""
    for pattern, by in _MARKUP:
        doc = pattern.sub(by, doc)
    return doc.strip()


# --- names that only type checkers import


def _typing_names(thing: Any) -> dict[str, Any]:
    """Return what the modules of a class or function import ``if TYPE_CHECKING``."""
    modules = {each.__module__ for each in getattr(thing, "__mro__", (thing,))}
    found: dict[str, Any] = {}
    for module in modules:
        if module.startswith("msatools."):
            found |= _names_of_module(module)
    return found


@cache
def _names_of_module(module: str) -> dict[str, Any]:
    source = inspect.getsource(sys.modules[module])
    return {
        alias.asname or alias.name: getattr(import_module(node.module), alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
