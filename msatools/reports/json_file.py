# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads reports that ``--json`` has printed.

The contents of a file are untrusted: only checked data is used.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
from msgspec import Struct

from msatools.kernel.report import Report
from msatools.target.errors import TargetError

T = TypeVar("T")

STDIN = "-"
"""Path that stands for standard input."""

_MAX_BYTES = 1 << 30
"""Maximum size of a file, above that of a report of a million groups."""


class SnapshotError(TargetError):
    """A file has no readable report of a command."""


def file_name(path: str) -> str:
    """Return the name of a file for messages."""
    return "standard input" if path == STDIN else path


class Reports(Struct, frozen=True):
    """Reads the reports of one command."""

    command: str
    """NAME of ``msa-NAME``."""

    schema: str

    def load(self, path: str) -> "ReportFile":
        """
        Read the last report of a file: one report, or one a line (JSON Lines).

        :param path: A file, or ``-`` for standard input.
        :raises SnapshotError: if it cannot be read, or is not such a report
        """
        name = file_name(path)
        value = self._last_value(self._data(path, name), name)
        values = value if isinstance(value, dict) else {}
        schema = values.get("schema")
        if schema != self.schema:
            self._refuse_schema(name, schema)
        return ReportFile(values, name)

    @property
    def _make(self) -> str:
        return f"msa-{self.command} --json"

    @property
    def _family(self) -> str:
        return self.schema.rpartition("/")[0]

    def _data(self, path: str, name: str) -> bytes:
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
        return data

    def _last_value(self, data: bytes, name: str) -> object:
        """Decode the last line, or the whole file if it was reformatted."""
        data = data.strip()
        if not data:
            raise SnapshotError(name, "empty", f"make it with {self._make}")
        last = data[data.rfind(b"\n") + 1 :]
        for part in dict.fromkeys((last, data)):
            try:
                return msgspec.json.decode(part)
            except (msgspec.DecodeError, RecursionError) as error:
                failed = error
        if f'"{self._family}/'.encode() in last[:64]:
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


class ReportFile(Struct, frozen=True):
    """One report as decoded from a file."""

    values: Mapping[str, object]
    file: str

    def read(self, model: type[T]) -> T:
        """
        Return the fields of the report that a model has.

        :param model: A :class:`msgspec.Struct`.
        :raises SnapshotError: if the report lacks one of them, or one is damaged
        """
        try:
            return msgspec.convert(self.values, model)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$")
            where = f"{place.strip('.`')}: " if place else ""
            raise self.damaged(f"{where}{what[:1].lower()}{what[1:]}") from error

    def damaged(self, what: str) -> SnapshotError:
        """Return the error for a damaged report."""
        return SnapshotError(self.file, f"damaged: {what}", "take it again")


def head_of(file: ReportFile) -> Report:
    """
    Return the fields that the reports of all commands share.

    :raises SnapshotError: if it is damaged
    """
    head = file.read(Report)
    size = head.target.page_size
    if size < 1 or size & (size - 1):
        raise file.damaged(f"target.page_size: {size} is no power of two")
    if any(count < 0 for count in head.coverage.values()):
        raise file.damaged("coverage: a count is negative")
    return head
