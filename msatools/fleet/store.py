# SPDX-License-Identifier: LGPL-2.1-or-later

"""Store results as Parquet files in a folder, and query them by SQL."""

import contextlib
import json
import os
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
from msgspec import Struct

from msatools.fleet.dumps import VERSION, Result, Row
from msatools.fleet.single import FleetError, FleetNote

if TYPE_CHECKING:
    import duckdb

# --- Parquet files of results: written whole, and checked before they are read.
#
# A file is named BATCH.CHECKSUM.parquet. Those of dumps and verdicts of one batch
# belong together. A full disk, a copy that was cut off or a deleted file leaves some
# that cannot be read: those are left out, each with a reason, and stop no other.


_VERDICTS = b"msatools.verdicts"
"""Key in the metadata of a file of ``dumps``: the number of their verdicts."""

_NAME = re.compile(r"(?P<batch>[^.]+)\.(?P<checksum>[0-9a-f]{8})\.parquet")
_CHUNK = 1 << 20


class _Footer(Struct, frozen=True, kw_only=True):
    """Facts from the footer of a Parquet file."""

    rows: int
    verdicts: int | None
    """Number of verdicts of its dumps; ``None`` if it does not say."""


class _UnreadableError(Exception):
    """A file cannot be read; the text says why."""


def write_file(
    folder: Path,
    batch: str,
    rows: Iterable[Mapping[str, object]],
    schema: pa.Schema,
    verdicts: int,
) -> None:
    """Write a file of a batch; it appears whole, or not at all.

    :param verdicts: Number of verdicts in the batch.
    :raises OSError: if it cannot be written
    """
    part = folder / f".{batch}.parquet"
    schema = schema.with_metadata({_VERDICTS: str(verdicts)})
    try:
        table = pa.Table.from_pylist(list(rows), schema)
        pq.write_table(table, part, compression="zstd")
        with part.open("rb") as file:
            checksum = _checksum(file)
            os.fsync(file.fileno())
        part.replace(folder / f"{batch}.{checksum}.parquet")
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _checksum(file: IO[bytes]) -> str:
    checksum = 0
    while chunk := file.read(_CHUNK):
        checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


class ResultFiles:
    """The readable files of ``dumps`` and ``verdicts`` in a folder.

    If one of a batch is not, both are left out: dumps without their verdicts would look
    as if nothing were wrong with them.

    :param schemas: Columns of each table.
    :raises OSError: if the folder cannot be read
    """

    def __init__(self, folder: Path, schemas: Mapping[str, pa.Schema]) -> None:
        self._schemas = schemas
        # List dumps first: the verdicts of each were written before it.
        self._files = {name: _listed(folder / name) for name in ("dumps", "verdicts")}
        self._footers: dict[Path, _Footer] = {}
        self._unread: dict[str, FleetNote] = {}
        for table, batch, path in self._readable():
            try:
                self._footers[path] = _footer(path, self._schemas[table])
            except _UnreadableError as error:
                self._leave_out(batch, path, str(error))
        for batch in self._files["dumps"].keys() - self._unread:
            self._check_verdicts(batch, folder)

    @property
    def unread(self) -> tuple[FleetNote, ...]:
        """A note for each batch that cannot be read."""
        return tuple(self._unread[batch] for batch in sorted(self._unread))

    @property
    def count(self) -> int:
        """Number of files that are read."""
        return sum(1 for _ in self._readable())

    def dataset(self, table: str) -> pds.Dataset:
        """Return all rows of a table; columns of later versions are left out."""
        return pds.dataset(
            [str(path) for each, _, path in self._readable() if each == table],
            schema=self._schemas[table],
            format="parquet",
        )

    def find_damage(self) -> bool:
        """Read all files; return whether some turn out to be damaged, or are gone."""
        before = len(self._unread)
        for _, batch, path in self._readable():
            try:
                _read(path)
            except _UnreadableError as error:
                self._leave_out(batch, path, str(error))
        return len(self._unread) > before

    def _readable(self) -> Iterator[tuple[str, str, Path]]:
        """Yield the table, the batch and the path of each file that is not left out."""
        for table, found in self._files.items():
            for batch, path in found.items():
                if batch not in self._unread:
                    yield table, batch, path

    def _check_verdicts(self, batch: str, folder: Path) -> None:
        """Leave out dumps whose verdicts are not all there."""
        wanted = self._footers[self._files["dumps"][batch]].verdicts
        path = self._files["verdicts"].get(batch)
        if path is None and wanted:
            missing = folder / "verdicts" / f"{batch}.*.parquet"
            self._leave_out(batch, missing, "missing")
        elif path is not None and wanted not in (None, self._footers[path].rows):
            self._leave_out(batch, path, f"not the {wanted:,} verdicts of its dumps")

    def _leave_out(self, batch: str, path: Path, why: str) -> None:
        dumps = self._files["dumps"].get(batch)
        footer = self._footers.get(dumps) if dumps else None
        count = f"the {footer.rows:,} dumps" if footer else "dumps"
        spoiled = [
            f"{table}/{found[batch].name}"
            for table, found in self._files.items()
            if batch in found
        ]
        self._unread[batch] = FleetNote(
            code="results-lost",
            text=f"{path}: {why}; {count} that only it has are left out; delete "
            f"{' and '.join(spoiled)}, and msa-fleet run reads them again",
        )


def _listed(folder: Path) -> dict[str, Path]:
    """Return the finished files of a table by batch."""
    # The folder of a table may have been deleted.
    with contextlib.suppress(FileNotFoundError):
        return {
            _batch(path): path
            for path in sorted(folder.iterdir())
            if path.suffix == ".parquet" and not path.name.startswith(".")
        }
    return {}


def _batch(path: Path) -> str:
    # Users may add files under any name.
    named = _NAME.fullmatch(path.name)
    return named["batch"] if named else path.stem


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of reading to :class:`_UnreadableError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise _UnreadableError("gone") from error
    except OSError as error:
        # An OSError that Arrow raises has no errno.
        why = os.strerror(error.errno) if error.errno else f"damaged ({_line(error)})"
        raise _UnreadableError(why) from error
    # All but ArrowException are raised for impossible sizes and texts.
    except (pa.ArrowException, ValueError, MemoryError, OverflowError) as error:
        raise _UnreadableError(f"damaged ({_line(error)})") from error


def _footer(path: Path, schema: pa.Schema) -> _Footer:
    """Read the footer of a file, and check the file's checksum and columns."""
    with _errors():
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _UnreadableError("no regular file")
        with path.open("rb") as file:
            named = _NAME.fullmatch(path.name)
            if named and _checksum(file) != named["checksum"]:
                raise _UnreadableError("damaged (its checksum is another)")
            footer = pq.ParquetFile(file)
            found, rows = footer.schema_arrow, footer.metadata.num_rows
        for name in ("identity", *found.names):
            if name in schema.names and (
                name not in found.names
                or not found.field(name).type.equals(schema.field(name).type)
            ):
                raise _UnreadableError(f"its column {name} is not that of msa-fleet")
        verdicts = (found.metadata or {}).get(_VERDICTS)
        return _Footer(
            rows=rows, verdicts=int(verdicts) if verdicts is not None else None
        )


def _read(path: Path) -> None:
    with _errors(), path.open("rb") as file:
        for batch in pq.ParquetFile(file).iter_batches():
            batch.validate(full=True)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


# --- The folder of results: Parquet files that are written once, under names of their
# own.
#
# Writers never change a file, and a file appears whole by a rename. So several runs can
# write into one folder, and a run can be killed at any moment. Which row of a dump
# counts is decided when they are read.


T = TypeVar("T")

MARK = "msa-fleet.json"
"""Name of the file that marks a folder as one of results."""

_MARK_PART = f".{MARK}."
"""Prefix of the mark's name while it is being written."""

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
"""One row for each dump: of the newest version, and there rather a report than a
failure. The row of an unreadable file counts until a file at its path was read."""


_CLOSED: Mapping[str, str | bool] = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "temp_directory": "",
}
"""Settings of a database that reaches no file and no network: a query is text that may
have been copied from anywhere."""


class FolderMark(Enum):
    """State of the file that marks a folder as one of results."""

    NONE = 0
    DAMAGED = 1
    GOOD = 2


class Results:
    """A folder of results."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.notes: tuple[FleetNote, ...] = ()
        """Notes on the files that are missing in the last answer of :meth:`ask`."""

        self.coverage: dict[str, int] = {}
        """Number of files read for the last answer, and of unreadable ones."""

    def create(self) -> None:
        """Make the folder, if it is not there.

        :raises FleetError: if it cannot be written, or is one of something else
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Listed before the mark is read: a concurrent run writes its mark first.
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
                # Fail now, not after the first reports were made.
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise FleetError(f"{folder}: not writable; name another folder")
        except OSError as error:
            raise _os_error(self.path, error) from error

    def _mark(self) -> FolderMark:
        """Return the state of the folder's mark.

        :raises FleetError: if the folder is of another version
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
        """Add the rows of *results*; either all of them count, or none.

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
        """Return the identities of the dumps that have a result of *version*.

        :param only_reports: Whether results without a report are left out.
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
        """Call *question* with a database with the views ``dumps`` and ``verdicts``.

        It is in memory, and statements reach only these views: no file, no network.
        Files of results are read by pyarrow while the question is asked. Those that
        cannot be read are left out, and the question is asked again without them;
        :attr:`notes` names them.

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
                # The error may not be about a file, and does not name one.
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


# --- Questions to the results in SQL, which DuckDB answers.


_REACH = "a query reaches the tables dumps and verdicts alone"
_HINT = "msa-fleet sql RESULTS 'DESCRIBE dumps' lists the columns"


class QueryResult(Struct, frozen=True, kw_only=True):
    """Names of the columns, and the rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def query(results: Results, text: str) -> QueryResult:
    """Return the answer to a query about ``dumps`` and ``verdicts``.

    It can read no other file, and change none.

    :raises FleetError: if there are no results, or the query is wrong
    """
    import duckdb

    def question(database: "duckdb.DuckDBPyConnection") -> QueryResult:
        try:
            return _answer(database, text)
        # All but duckdb.Error: values that Python cannot hold, as the year 20000.
        except (duckdb.Error, OverflowError, ValueError) as error:
            why = " ".join(str(error).split())
            is_refused = isinstance(error, duckdb.PermissionException)
            raise FleetError(f"{why}; {_REACH if is_refused else _HINT}") from error

    return results.ask(question)


def _answer(database: "duckdb.DuckDBPyConnection", text: str) -> QueryResult:
    """Return the answer to a query, which a signal can stop at any time."""
    # Python handles a signal only after a call of DuckDB returns, which may take long.
    # So another thread runs the query, and the main thread waits for it.
    with ThreadPoolExecutor(1) as executor:
        cursor = executor.submit(database.execute, text)
        try:
            # DuckDB returns None for a text without a statement.
            if cursor.result() is None:
                raise FleetError(f"no query; {_HINT}")
            rows = executor.submit(database.fetchall).result()
        except BaseException:
            database.interrupt()
            raise
    names = tuple(str(column[0]) for column in database.description or ())
    return QueryResult(columns=names, rows=tuple(map(tuple, rows)))
