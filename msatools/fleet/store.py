# SPDX-License-Identifier: LGPL-2.1-or-later

"""The folder of results: Parquet files that are written once, under names of their own.

Writers never change a file, and a file appears whole by a rename. So several runs can
write into one folder, and a run can be killed at any moment. Which row of a dump counts
is decided when they are read.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq

from msatools.fleet.errors import FleetError
from msatools.fleet.rows import VERSION, Result, Row

if TYPE_CHECKING:
    import duckdb

MARK = "msa-fleet.json"
"""File that makes a folder one of results."""

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


class Results:
    """A folder of results."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def create(self) -> None:
        """Make the folder, if it is not there.

        :raises FleetError: if it cannot be written, or is one of something else
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._is_marked():
                if any(self.path.iterdir()):
                    raise FleetError(
                        f"{self.path}: a folder with other files; name a new one"
                    )
                self._write_mark()
            for name in _TABLES:
                folder = self.path / name
                folder.mkdir(exist_ok=True)
                # Not only after the first reports.
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise FleetError(f"{folder}: not writable; name another folder")
        except OSError as error:
            raise _os_error(self.path, error) from error

    def check(self) -> None:
        """Check that there are results.

        :raises FleetError: if there are none
        """
        if not self._is_marked():
            raise FleetError(
                f"{self.path}: no results of msa-fleet; name the folder of its run -o"
            )

    def _is_marked(self) -> bool:
        try:
            mark = json.loads((self.path / MARK).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:
            raise FleetError(
                f"{self.path / MARK}: {error}; name another folder"
            ) from error
        if not isinstance(mark, dict) or mark.get("schema") != SCHEMA:
            raise FleetError(
                f"{self.path}: results of another version of msa-fleet; name a new "
                "folder"
            )
        return True

    def _write_mark(self) -> None:
        part = self.path / f".{uuid.uuid4().hex}"
        part.write_text(json.dumps({"schema": SCHEMA}) + "\n")
        part.replace(self.path / MARK)

    def write(self, results: Sequence[Result]) -> None:
        """Add rows; they are all there, or none of them.

        :raises FleetError: if they cannot be written
        """
        if not results:
            return
        name = f"{uuid.uuid4().hex}.parquet"
        verdicts = [row for result in results for row in result.verdicts]
        # Verdicts count only if their dump's row is there.
        if verdicts:
            self._write("verdicts", name, verdicts)
        self._write("dumps", name, [result.dump for result in results])

    def _write(self, table: str, name: str, rows: Iterable[Row]) -> None:
        folder = self.path / table
        part = folder / f".{name}"
        try:
            try:
                pq.write_table(
                    pa.Table.from_pylist(list(rows), _TABLES[table]),
                    part,
                    compression="zstd",
                )
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.replace(folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
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
        with self.open() as database:
            rows = database.execute(query, [version, only_reports]).fetchall()
        return {identity for (identity,) in rows}

    @contextlib.contextmanager
    def open(self) -> Iterator["duckdb.DuckDBPyConnection"]:
        """Yield a database in memory with the views ``dumps`` and ``verdicts``.

        Its statements reach nothing but these: no file, no network. The files of the
        results are read by pyarrow, as they are when it is opened.

        :raises FleetError: if there are no results, or they cannot be read
        """
        import duckdb

        self.check()
        with self._errors(), duckdb.connect(config={**_CLOSED}) as database:
            for name in _TABLES:
                database.register(f"stored_{name}", self._stored(name))
            # Times in the tables are UTC; so now() has to be.
            database.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
            database.execute(_VIEWS)
            yield database

    def _stored(self, table: str) -> pds.Dataset:
        """Return all rows of a table; columns of later versions are left out."""
        files = sorted(
            str(path)
            for path in (self.path / table).glob("*.parquet")
            if not path.name.startswith(".")
        )
        return pds.dataset(files, schema=_TABLES[table], format="parquet")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of reading into those for the user."""
        import duckdb

        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise FleetError(f"{self.path}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _os_error(path: Path, error: OSError) -> FleetError:
    why = os.strerror(error.errno) if error.errno else str(error)
    return FleetError(f"{path}: {why}; name another folder, or make room")
