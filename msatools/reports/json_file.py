# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports that ``--json`` has printed, read again.

What a file holds is data from who knows where: nothing of it is trusted but what has
been looked at.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, get_args

from msatools.kernel.ranges import ranges
from msatools.kernel.report import Note, Report
from msatools.target.errors import TargetError
from msatools.target.model import Crash, Kind, Target, Types

T = TypeVar("T")

STDIN = "-"
"""Stands for standard input."""

_MAX_BYTES = 1 << 30
"""Above what a report of a million groups takes."""

_MAX_NUMBER = 1 << 63


class SnapshotError(TargetError):
    """A file holds no report of a command that can be read."""


def file_name(path: str) -> str:
    """Return what messages call a file."""
    return "standard input" if path == STDIN else path


@dataclass(frozen=True)
class Reports:
    """Reads the reports of one command."""

    command: str
    """As in ``msa-NAME``."""

    schema: str

    def load(self, path: str) -> "Object":
        """
        Read the last report in a file of one, or of one a line (JSON Lines).

        :param path: A file, or ``-`` for standard input.
        :raises SnapshotError: if it cannot be read, or is no such report
        """
        name = file_name(path)
        found = self._last_object(self._text(path, name), name)
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema != self.schema:
            self._refuse_schema(name, schema)
        return Object(found, name)

    @property
    def _make(self) -> str:
        return f"msa-{self.command} --json"

    @property
    def _family(self) -> str:
        return self.schema.rpartition("/")[0]

    def _text(self, path: str, name: str) -> str:
        if path == STDIN and sys.stdin is None:
            raise SnapshotError(name, "closed", f"name a file of {self._make}")
        try:
            if path == STDIN:
                data = sys.stdin.buffer.read(_MAX_BYTES + 1)
            else:
                with Path(path).open("rb") as file:
                    data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise SnapshotError(name, why, f"name a file of {self._make}") from error
        if len(data) > _MAX_BYTES:
            raise SnapshotError(
                name, "larger than 1 GiB", "keep its last line: tail -n 1"
            )
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._not_json(name) from error

    def _last_object(self, text: str, name: str) -> object:
        """Parse the last line, or all of it where people have had it laid out."""
        text = text.strip()
        if not text:
            raise SnapshotError(name, "empty", f"make it with {self._make}")
        last = text[text.rfind("\n") + 1 :]
        for part in dict.fromkeys((last, text)):
            try:
                return json.loads(part, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                failed = error
        if f'"{self._family}/' in last[:64]:
            raise SnapshotError(
                name, "cut off, or damaged: its last report has no end", "take it again"
            ) from failed
        raise self._not_json(name) from failed

    def _not_json(self, name: str) -> SnapshotError:
        return SnapshotError(name, "not JSON", f"make it with {self._make}")

    def _refuse_schema(self, name: str, schema: object) -> NoReturn:
        if isinstance(schema, str) and schema.startswith(f"{self._family}/"):
            raise SnapshotError(
                name,
                f"{schema}, where {self.schema} is known",
                "compare it with the msatools that made it, or a newer one",
            )
        what = schema if isinstance(schema, str) else "without a schema"
        raise SnapshotError(
            name,
            f"no report of msa-{self.command} ({what})",
            f"make it with {self._make}",
        )


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


class Object:
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

    def object(self, key: str) -> "Object":
        return Object(self._items.get(key), self._file, self._place(key))

    def object_or_none(self, key: str) -> "Object | None":
        return None if self._items.get(key) is None else self.object(key)

    def objects(self, key: str) -> "Iterator[Object]":
        value = self._items.get(key)
        if not isinstance(value, list):
            self._fail(key, "no list")
        place = self._place(key)
        for number, item in enumerate(value):
            yield Object(item, self._file, f"{place}[{number}]")

    def has(self, key: str) -> bool:
        return self._items.get(key) is not None

    def amount(self, key: str) -> int | None:
        """Take a number, or how many there are in a list."""
        value = self._items.get(key)
        return len(value) if isinstance(value, list) else self.number_or_none(key)

    def word(self, key: str) -> int | str | None:
        """Take what names or describes something; a list is one word."""
        value = self._items.get(key)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            if all(type(item) is int and 0 <= item < _MAX_NUMBER for item in value):
                return ranges(value)
            return ",".join(map(str, value))
        return value if isinstance(value, str) else self.number_or_none(key)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._items)

    def counts(self) -> dict[str, int]:
        return {key: self.count(key) for key in self._items}

    def refuse(self, key: str, what: str) -> NoReturn:
        """Refuse an item of no known kind."""
        self._fail(key, what)

    def _place(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where and key else self._where or key

    def _fail(self, key: str, what: str) -> NoReturn:
        place = self._place(key) or "the report"
        raise SnapshotError(self._file, f"damaged: {place} is {what}", "take it again")


def target_of(found: Object) -> Target:
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


def head_of(found: Object) -> Report:
    """
    Return what a report has in common with those of all commands.

    :raises SnapshotError: if it is damaged
    """
    return Report(
        target=target_of(found.object("target")),
        taken_at_ns=found.number_or_none("taken_at_ns"),
        interval_ns=found.number_or_none("interval_ns"),
        coverage=found.object("coverage").counts(),
        notes=notes_of(found),
    )


def notes_of(found: Object) -> tuple[Note, ...]:
    """
    Return the notes of a report.

    :raises SnapshotError: if they are none
    """
    notes = found.objects("notes")
    return tuple(Note(each.text("code"), each.text("text")) for each in notes)
