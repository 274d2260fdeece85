# SPDX-License-Identifier: LGPL-2.1-or-later

"""The folder of results: Parquet files that are written once, under names of their own.

Writers never change a file, and a file appears whole by a rename. So several runs can
write into one folder, and a run can be killed at any moment. Which row of a dump counts
is decided when they are read.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from msatools.fleet.errors import FleetError
from msatools.fleet.files import ResultFiles, write_file
from msatools.fleet.model import FleetNote
from msatools.fleet.rows import VERSION, Result, Row

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")

MARK = "msa-fleet.json"
"""File that makes a folder one of results."""

_MARK_PART = f".{MARK}."
"""Start of the name of such a file that is not finished."""

SCHEMA = "msatools.fleet-results/1"

_TEXT, _NUMBER = pa.string(), pa.int64()
_TEXTS = pa.list_(_TEXT)

DUMPS = pa.schema(
    {
        **dict.fromkeys(("result", "identity", "path"), _TEXT),
        "size_bytes": _NUMBER,
        **dict.fromkeys(("state", "error", "version"), _TEXT),
        "finished_ns": _NUMBER,
        "seconds": pa.float64(),
        **dict.fromkeys(("worker", "host", "release", "arch", "format"), _TEXT),
        "truncated": pa.bool_(),
        **dict.fromkeys(("time_ns", "uptime_ns", "cpus", "ram_bytes"), _NUMBER),
        **dict.fromkeys(("cause", "message", "function", "module", "taints"), _TEXT),
        **dict.fromkeys(("comm", "fingerprint"), _TEXT),
        **dict.fromkeys(("cpu", "pid"), _NUMBER),
        "frames": _TEXTS,
        "report": _TEXT,
    }.items()
)
"""Columns of ``dumps``, one row a dump."""

VERDICTS = pa.schema(
    {
        **dict.fromkeys(("result", "identity"), _TEXT),
        "rank": _NUMBER,
        **dict.fromkeys(("code", "severity", "confidence", "text", "see"), _TEXT),
        "evidence": _TEXTS,
    }.items()
)
"""Columns of ``verdicts``, one row a verdict."""

_TABLES = {"dumps": DUMPS, "verdicts": VERDICTS}

_VIEWS = """
CREATE VIEW dumps AS
    WITH rows AS (
        SELECT *,
            max(finished_ns) OVER (PARTITION BY identity, version) AS version_ns,
            bool_or(identity NOT LIKE 'path-%') OVER (PARTITION BY path) AS is_read
        FROM stored_dumps)
    SELECT * EXCLUDE (version_ns, is_read),
        make_timestamp(time_ns // 1000) AS "time"
    FROM rows
    WHERE identity NOT LIKE 'path-%' OR NOT is_read
    QUALIFY row_number() OVER (PARTITION BY identity
        ORDER BY version_ns DESC, state = 'done' DESC, finished_ns DESC, result) = 1;
CREATE VIEW verdicts AS
    SELECT * FROM stored_verdicts SEMI JOIN dumps USING (result);
"""
"""Of a dump the newest version of the report counts, and of that a report before a
failure. What could not be opened counts until it was read under the same path."""


_CLOSED: Mapping[str, str | bool] = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "temp_directory": "",
}
"""Settings of a database that reaches no file and no network: a query is text that may
have been copied from anywhere."""


class FolderMark(Enum):
    """What the file says that makes a folder one of results."""

    NONE = 0
    DAMAGED = 1
    GOOD = 2


class Results:
    """A folder of results."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.notes: tuple[FleetNote, ...] = ()
        """What the last answer is without."""

        self.coverage: dict[str, int] = {}
        """Number of files that it is from, and of those that cannot be read."""

    def create(self) -> None:
        """Make the folder, if it is not there.

        :raises FleetError: if it cannot be written, or is one of something else
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the mark: what another run has made since has come after its mark.
            others = any(
                not path.name.startswith(_MARK_PART) for path in self.path.iterdir()
            )
            mark = self._mark()
            if mark is FolderMark.NONE and others:
                raise FleetError(
                    f"{self.path}: a folder with other files; name a new one"
                )
            if mark is not FolderMark.GOOD:
                self._write_mark()
            for name in _TABLES:
                folder = self.path / name
                folder.mkdir(exist_ok=True)
                # Not only after the first reports.
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise FleetError(f"{folder}: not writable; name another folder")
        except OSError as error:
            raise _os_error(self.path, error) from error

    def _mark(self) -> FolderMark:
        """Return whether it is a folder of results.

        :raises FleetError: if it is one of another version
        """
        try:
            found = json.loads((self.path / MARK).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return FolderMark.NONE
        # Cut off, overwritten, or of another user.
        except (OSError, ValueError):
            return FolderMark.DAMAGED
        if not isinstance(found, dict) or "schema" not in found:
            return FolderMark.DAMAGED
        if found["schema"] != SCHEMA:
            raise FleetError(
                f"{self.path}: results of another version of msa-fleet; name a new "
                "folder"
            )
        return FolderMark.GOOD

    def _write_mark(self) -> None:
        part = self.path / f"{_MARK_PART}{uuid.uuid4().hex}"
        with part.open("w") as file:
            file.write(json.dumps({"schema": SCHEMA}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path / MARK)

    def write(self, results: Sequence[Result]) -> None:
        """Add rows; they are all there, or none of them.

        :raises FleetError: if they cannot be written
        """
        if not results:
            return
        batch = uuid.uuid4().hex
        verdicts = [row for result in results for row in result.verdicts]
        # Verdicts count only if their dump's row is there.
        if verdicts:
            self._write("verdicts", batch, verdicts, len(verdicts))
        self._write("dumps", batch, [result.dump for result in results], len(verdicts))

    def _write(
        self, table: str, batch: str, rows: Iterable[Row], verdicts: int
    ) -> None:
        folder = self.path / table
        try:
            write_file(folder, batch, rows, _TABLES[table], verdicts)
        except OSError as error:
            raise _os_error(folder, error) from error

    def done(self, version: str = VERSION, *, only_reports: bool = False) -> set[str]:
        """Return the identities that need no report of *version* any more.

        :param only_reports: Whether dumps without a report are left out.
        """
        query = (
            "SELECT identity FROM dumps WHERE version = ? AND identity NOT LIKE "
            "'path-%' AND (state = 'done' OR NOT ?)"
        )
        rows = self.ask(
            lambda database: database.execute(query, [version, only_reports]).fetchall()
        )
        return {identity for (identity,) in rows}

    def ask(self, question: Callable[["duckdb.DuckDBPyConnection"], T]) -> T:
        """Return what is asked of a database with the views ``dumps`` and ``verdicts``.

        It is in memory, and statements reach nothing but these: no file, no network.
        Files of results are read by pyarrow while the question is asked. Those that
        cannot be read are left out, and the question is asked again without them; then
        there are :attr:`notes`.

        :raises FleetError: if there are no results
        """
        import duckdb

        mark = self._mark()
        if mark is FolderMark.NONE:
            raise FleetError(
                f"{self.path}: no results of msa-fleet; name the folder of its run -o"
            )
        try:
            files = ResultFiles(self.path, _TABLES)
            while True:
                try:
                    with duckdb.connect(config={**_CLOSED}) as database:
                        _register(database, files)
                        answer = question(database)
                        break
                # An error does not say which file it is about, or whether it is.
                except Exception:
                    if not files.find_damage():
                        raise
        except OSError as error:
            why = error.strerror or _first_line(error)
            raise FleetError(f"{error.filename or self.path}: {why}") from error
        except (duckdb.Error, pa.ArrowException) as error:
            raise FleetError(f"{self.path}: {_first_line(error)}") from error
        self.notes = (*self._mark_notes(mark), *files.unread)
        self.coverage = {
            "files_read": files.count,
            "files_unreadable": len(files.unread),
        }
        return answer

    def _mark_notes(self, mark: FolderMark) -> Iterator[FleetNote]:
        if mark is FolderMark.DAMAGED:
            yield FleetNote(
                code="mark-damaged",
                text=f"{self.path / MARK}: damaged; the files beside it are taken for "
                "results of this version; msa-fleet run writes it anew",
            )


def _register(database: "duckdb.DuckDBPyConnection", files: ResultFiles) -> None:
    for name in _TABLES:
        database.register(f"stored_{name}", files.dataset(name))
    # Times in the tables are UTC; so now() has to be.
    database.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
    database.execute(_VIEWS)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _os_error(path: Path, error: OSError) -> FleetError:
    why = os.strerror(error.errno) if error.errno else str(error)
    return FleetError(f"{path}: {why}; name another folder, or make room")
