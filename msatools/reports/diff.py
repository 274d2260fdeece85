# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read reports that ``--json`` has printed, and compare two row by row."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from msatools.kernel.report import Note, Report
from msatools.model import DiffRows, Presented
from msatools.program.model import UNLISTED, Target, TargetError
from msatools.reports.units import duration, ranges

# --- Reads reports that --json has printed.
#
# The contents of a file are untrusted: only checked data is used.


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
        Convert the report to a model; other fields of the report are ignored.

        :param model: A :class:`msgspec.Struct`.
        :raises SnapshotError: if the report lacks a required field, or one is damaged
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


# --- Compares two reports of a command row by row.
#
# Each command defines the rows and columns in a table. Reports are JSON from files,
# which are untrusted.


SAME_START_NS = 1_000_000_000
"""Maximum difference of two start times of the same thing: the reports' clocks may be
read at different times, and no PID is reused so soon."""


Value = int | str | None

_Pair = tuple[ReportFile, ReportFile]

_MAX_NUMBER = 1 << 63
"""End of the numbers that a list shown as ranges may have, such as those of CPUs."""


class Moment(Protocol):
    """Target and time of a report."""

    @property
    def target(self) -> Target: ...
    @property
    def taken_at_ns(self) -> int | None: ...


class AnySide(Moment, Protocol):
    """A report in a comparison, with the file that it was read from and its notes."""

    @property
    def file(self) -> str: ...
    @property
    def notes(self) -> Sequence[Note]: ...


class Side(Struct, frozen=True):
    """One of the two reports."""

    file: str
    """Path of the file that the report was read from."""

    target: Target
    taken_at_ns: int | None
    """CLOCK_MONOTONIC of the kernel."""

    interval_ns: int | None
    notes: tuple[Note, ...]
    """Notes of the report itself."""


class Fact(Struct, frozen=True):
    """A field that is not a number, in both reports."""

    before: Value
    after: Value


class RowChange(Struct, frozen=True):
    """A row that differs, or that only one report has."""

    change: Literal["came", "gone", "changed"]
    key: Mapping[str, Value]
    deltas: Mapping[str, int | None]
    """Change of each count; the whole count if the row came or is gone; ``None`` if a
    report does not have the count."""

    facts: Mapping[str, Fact]
    """Facts that differ; all facts if the row came or is gone."""


class ReportDiff(Presented, Struct, frozen=True, kw_only=True):
    """The differences between two reports of one command."""

    command: Annotated[str, UNLISTED]
    before: Side
    after: Side

    elapsed_ns: int | None
    """Kernel time from one to the other; ``None`` if unknown, for example between
    different kernels."""

    notes: tuple[Note, ...]
    """Reasons why the two may not be the same machine at two times."""

    changes: Mapping[str, tuple[RowChange, ...]]
    """Changed rows by key of the report, the largest change first."""

    @property
    def schema(self) -> str:
        return diff_schema(self.command)


def diff_schema(command: str) -> str:
    """Return the name of the schema of a command's differences."""
    return f"msatools.{command}-diff/1"


def compare(
    command: str,
    tables: Iterable[DiffRows],
    reports: _Pair,
    files: tuple[str, str],
) -> ReportDiff:
    """
    Compare two reports, of the same machine or of two machines.

    :param command: Command of the reports.
    :param files: Paths of the reports.
    :raises SnapshotError: if one is damaged
    """
    heads = head_of(reports[0]), head_of(reports[1])
    before, after = (_side(head, file) for head, file in zip(heads, files, strict=True))
    return ReportDiff(
        command=command,
        before=before,
        after=after,
        elapsed_ns=elapsed(before, after),
        notes=(
            *other_kernel(before, after),
            *earlier(before, after),
            *_other_times(before, after),
        ),
        changes={
            table.name: tuple(sorted(_changes(table, reports, heads), key=_rank))
            for table in tables
            # Some keys are present only on request.
            if all(table.name in report.values for report in reports)
        },
    )


def elapsed(before: Moment, after: Moment) -> int | None:
    """Return the kernel time between two reports in nanoseconds, if comparable."""
    if before.taken_at_ns is None or after.taken_at_ns is None:
        return None
    if before.target.release != after.target.release:
        return None
    passed = after.taken_at_ns - before.taken_at_ns
    return passed if passed >= 0 else None


def other_kernel(before: Moment, after: Moment) -> Iterator[Note]:
    """Yield notes on differences that show different machines or kernels."""
    one, other = before.target, after.target
    for code, what, first, second in (
        ("other-release", "kernels", one.release, other.release),
        ("other-architecture", "architectures", one.arch, other.arch),
    ):
        if first != second:
            yield Note(code, f"different {what}: {first}, then {second}")
    if one.kind == other.kind == "qmp" and one.path != other.path:
        text = f"different guests, or sockets of them: {one.path}, then {other.path}"
        yield Note("other-guest", text)


def earlier(before: Moment, after: Moment) -> Iterator[Note]:
    """Yield a note if the second report was taken before the first."""
    then, now = before.taken_at_ns, after.taken_at_ns
    if then is not None and now is not None and now < then:
        text = "the second was taken at an earlier time of its kernel than the first"
        yield Note("earlier", f"{text}: another boot, or they are the wrong way round")


def _other_times(before: Side, after: Side) -> Iterator[Note]:
    if before.interval_ns is None and after.interval_ns is None:
        return
    first, second = (
        "since boot" if side.interval_ns is None else f"of {duration(side.interval_ns)}"
        for side in (before, after)
    )
    text = f"counts are {first} in the first, {second} in the second"
    yield Note("counts-of-intervals", text)


def _side(report: Report, file: str) -> Side:
    return Side(
        file=file,
        target=report.target,
        taken_at_ns=report.taken_at_ns,
        interval_ns=report.interval_ns,
        notes=report.notes,
    )


class _DiffRow(Struct, frozen=True):
    key: Mapping[str, Value]
    counts: Mapping[str, int | None]
    facts: Mapping[str, Value]
    began_ns: int | None


def _changes(
    table: DiffRows, reports: _Pair, heads: tuple[Report, Report]
) -> Iterator[RowChange]:
    before, after = (
        dict(_rows(table, *each)) for each in zip(reports, heads, strict=True)
    )
    for key in dict.fromkeys((*after, *before)):
        had, has = before.get(key), after.get(key)
        if had is not None and has is not None and _is_same(had, has):
            if (changed := _changed(had, has)) is not None:
                yield changed
            continue
        if had is not None:
            yield _only("gone", had)
        if has is not None:
            yield _only("came", has)


def _rows(
    table: DiffRows, report: ReportFile, head: Report
) -> Iterator[tuple[tuple[Value, ...], _DiffRow]]:
    """Yield the rows of a table in a report, each after the values that identify it."""
    for row in _read_rows(table, report):
        key = {name: _value(row[name]) for name in table.by}
        lived_ns = row[table.lived] if table.lived else None
        taken_ns = head.taken_at_ns if head.interval_ns is None else None
        yield (
            tuple(key.values()),
            _DiffRow(
                key=key,
                counts={name: _amount(row[name]) for name in table.counts},
                facts={name: _value(row[name]) for name in table.facts},
                began_ns=None
                if taken_ns is None or lived_ns is None
                else taken_ns - lived_ns,
            ),
        )


def _read_rows(table: DiffRows, report: ReportFile) -> Iterator[dict[str, Any]]:
    """Return the compared fields of the rows.

    :raises SnapshotError: if a field has a type that it cannot have
    """
    types: dict[str, Any] = {
        **dict.fromkeys((*table.by, *table.facts), _JsonValue),
        **dict.fromkeys(table.counts, int | list[Any] | None),
        **({table.lived: int | None} if table.lived else {}),
    }
    row = msgspec.defstruct("Row", [(name, kind, None) for name, kind in types.items()])
    rows = msgspec.defstruct("Rows", [(table.name, list[row] | None, None)])  # type: ignore[valid-type]
    read = getattr(report.read(rows), table.name)
    return map(msgspec.structs.asdict, read or ())


_JsonValue = bool | int | str | list[Any] | None
"""Types of keys and facts in JSON."""


def _value(value: Any) -> Value:
    """Return a key or fact as a number or text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        is_of_cpus = all(
            type(item) is int and 0 <= item < _MAX_NUMBER for item in value
        )
        return ranges(value) if is_of_cpus else ",".join(map(str, value))
    return cast(Value, value)


def _amount(value: int | list[Any] | None) -> int | None:
    """Return a count, or the length of a list."""
    return len(value) if isinstance(value, list) else value


def _is_same(had: _DiffRow, has: _DiffRow) -> bool:
    if had.began_ns is None or has.began_ns is None:
        return True
    return abs(had.began_ns - has.began_ns) <= SAME_START_NS


def _changed(had: _DiffRow, has: _DiffRow) -> RowChange | None:
    deltas = {
        name: None if then is None or now is None else now - then
        for name, then, now in (
            (name, had.counts[name], has.counts[name]) for name in has.counts
        )
    }
    facts = {
        name: Fact(had.facts[name], value)
        for name, value in has.facts.items()
        if had.facts[name] != value
    }
    if not facts and not any(deltas.values()):
        return None
    return RowChange("changed", has.key, deltas, facts)


def _only(change: Literal["came", "gone"], row: _DiffRow) -> RowChange:
    sign = 1 if change == "came" else -1
    deltas = {n: None if v is None else sign * v for n, v in row.counts.items()}
    facts = {
        name: Fact(None, value) if change == "came" else Fact(value, None)
        for name, value in row.facts.items()
    }
    return RowChange(change, row.key, deltas, facts)


def _rank(change: RowChange) -> tuple[int, ...]:
    return tuple(-abs(delta or 0) for delta in change.deltas.values())
