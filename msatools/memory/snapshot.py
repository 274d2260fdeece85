# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports that ``msa-memstat --json`` has printed, read again.

What a file holds is data from who knows where: nothing of it is trusted but what has
been looked at.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeVar, get_args

from msatools.kernel.report import Note
from msatools.memory.model import Check, ClassCount, Group, MemstatReport
from msatools.target.errors import TargetError
from msatools.target.model import Crash, Kind, Target, Types

T = TypeVar("T")

STDIN = "-"
"""Stands for standard input."""

_MAX_BYTES = 1 << 30
"""Above what a report of a million groups takes."""

_MAX_NUMBER = 1 << 63
_SCHEMA = MemstatReport.schema
_FAMILY, _, _ = _SCHEMA.rpartition("/")


class SnapshotError(TargetError):
    """A file holds no report of msa-memstat that can be read."""


def load_snapshot(path: str) -> MemstatReport:
    """
    Read the last report in a file of one, or of one a line (JSON Lines).

    Of its payload it has the pages, classes, checks, and what ``--by`` added.

    :param path: A file, or ``-`` for standard input.
    :raises SnapshotError: if it cannot be read, or is no such report
    """
    name = "standard input" if path == STDIN else path
    found = _last_object(_text(path, name), name)
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != _SCHEMA:
        _refuse_schema(name, schema)
    return _report(_Object(found, name))


def _text(path: str, name: str) -> str:
    if path == STDIN and sys.stdin is None:
        raise SnapshotError(name, "closed", "name a file of msa-memstat --json")
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SnapshotError(name, why, "name a file of msa-memstat --json") from error
    if len(data) > _MAX_BYTES:
        raise SnapshotError(name, "larger than 1 GiB", "keep its last line: tail -n 1")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_json(name) from error


def _last_object(text: str, name: str) -> object:
    """Parse the last line, or all of it where people have had it laid out."""
    text = text.strip()
    if not text:
        raise SnapshotError(name, "empty", "make it with msa-memstat --json")
    last = text[text.rfind("\n") + 1 :]
    for part in dict.fromkeys((last, text)):
        try:
            return json.loads(part, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            failed = error
    if f'"{_FAMILY}/' in last[:64]:
        raise SnapshotError(
            name, "cut off, or damaged: its last report has no end", "take it again"
        ) from failed
    raise _not_json(name) from failed


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _not_json(name: str) -> SnapshotError:
    return SnapshotError(name, "not JSON", "make it with msa-memstat --json")


def _refuse_schema(name: str, schema: object) -> NoReturn:
    if isinstance(schema, str) and schema.startswith(f"{_FAMILY}/"):
        raise SnapshotError(
            name,
            f"{schema}, where {_SCHEMA} is known",
            "compare it with the msatools that made it, or a newer one",
        )
    what = schema if isinstance(schema, str) else "without a schema"
    raise SnapshotError(
        name, f"no report of msa-memstat ({what})", "make it with msa-memstat --json"
    )


class _Object:
    """One object of a report, and where it stands there."""

    def __init__(self, value: object, file: str, where: str = "") -> None:
        self._file = file
        self._where = where
        if not isinstance(value, dict):
            self._fail("", "no object")
        self._items: dict[str, object] = value

    def number(self, key: str) -> int:
        """Take a count, or a difference."""
        value = self.number_or_none(key)
        return self._fail(key, "no number") if value is None else value

    def number_or_none(self, key: str) -> int | None:
        value = self._items.get(key)
        if value is None:
            return None
        # In Python a truth value is a number as well.
        if type(value) is not int or abs(value) >= _MAX_NUMBER:
            self._fail(key, "no number")
        return value

    def count(self, key: str) -> int:
        """Take a number that is not below zero."""
        value = self.number(key)
        return self._fail(key, "below zero") if value < 0 else value

    def text(self, key: str) -> str:
        value = self.text_or_none(key)
        return self._fail(key, "no text") if value is None else value

    def text_or_none(self, key: str) -> str | None:
        value = self._items.get(key)
        if value is not None and not isinstance(value, str):
            self._fail(key, "no text")
        return value

    def one_of(self, key: str, known: tuple[T, ...]) -> T:
        """Take one of some known values."""
        for value in known:
            if self._items.get(key) == value:
                return value
        return self._fail(key, "none that is known")

    def flag(self, key: str) -> bool:
        value = self._items.get(key)
        if not isinstance(value, bool):
            self._fail(key, "neither true nor false")
        return value

    def object(self, key: str) -> "_Object":
        return _Object(self._items.get(key), self._file, self._place(key))

    def object_or_none(self, key: str) -> "_Object | None":
        return None if self._items.get(key) is None else self.object(key)

    def objects(self, key: str) -> "Iterator[_Object]":
        value = self._items.get(key)
        if not isinstance(value, list):
            self._fail(key, "no list")
        place = self._place(key)
        for number, item in enumerate(value):
            yield _Object(item, self._file, f"{place}[{number}]")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._items)

    def counts(self) -> dict[str, int]:
        return {key: self.count(key) for key in self._items}

    def refuse(self, key: str, what: str) -> NoReturn:
        """Say of an item that it is none of those that there are."""
        self._fail(key, what)

    def _place(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where and key else self._where or key

    def _fail(self, key: str, what: str) -> NoReturn:
        place = self._place(key) or "the report"
        raise SnapshotError(self._file, f"damaged: {place} is {what}", "take it again")


def _report(found: _Object) -> MemstatReport:
    by = found.object_or_none("by")
    return MemstatReport(
        target=_target(found.object("target")),
        taken_at_ns=found.number_or_none("taken_at_ns"),
        interval_ns=found.number_or_none("interval_ns"),
        coverage=found.object("coverage").counts(),
        notes=tuple(
            Note(each.text("code"), each.text("text"))
            for each in found.objects("notes")
        ),
        pages=found.count("pages"),
        classes=tuple(
            ClassCount(each.text("name"), each.count("pages"), each.count("bytes"))
            for each in found.objects("classes")
        ),
        checks=tuple(_check(each) for each in found.objects("checks")),
        managed_pages=found.number_or_none("managed_pages"),
        physical_pages=found.number_or_none("physical_pages"),
        by=None
        if by is None
        else {
            name: tuple(_group(each) for each in by.objects(name)) for name in by.keys
        },
    )


def _target(found: _Object) -> Target:
    crash = found.object_or_none("crash")
    page_size = found.number("page_size")
    if page_size < 1 or page_size & (page_size - 1):
        found.refuse("page_size", "no power of two")
    return Target(
        path=found.text("path"),
        kind=found.one_of("kind", get_args(Kind)),
        live=found.flag("live"),
        release=found.text("release"),
        arch=found.text("arch"),
        page_size=page_size,
        types=found.one_of("types", get_args(Types)),
        dump_level=found.number_or_none("dump_level"),
        truncated=found.flag("truncated"),
        crash=None
        if crash is None
        else Crash(
            message=crash.text_or_none("message"),
            cpu=crash.number_or_none("cpu"),
            pid=crash.number_or_none("pid"),
            comm=crash.text_or_none("comm"),
        ),
        format=found.text("format"),
    )


def _check(found: _Object) -> Check:
    return Check(
        name=found.text("name"),
        walk_pages=found.number("walk_pages"),
        counter=found.text("counter"),
        kernel_pages=found.number_or_none("kernel_pages"),
        difference=found.number_or_none("difference"),
        explained_by=found.text_or_none("explained_by"),
    )


def _group(found: _Object) -> Group:
    return Group(
        key=found.text("key"),
        name=found.text("name"),
        pages=found.count("pages"),
        classes=found.object("classes").counts(),
    )
