# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parquet files of results: written whole, and checked before they are read.

A file is named ``BATCH.CHECKSUM.parquet``. Those of ``dumps`` and ``verdicts`` of one
batch belong together. A full disk, a copy that was cut off or a deleted file leaves
some that cannot be read: those are left out, each with a reason, and stop no other.
"""

import contextlib
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
from msgspec import Struct

from msatools.fleet.model import FleetNote

_VERDICTS = b"msatools.verdicts"
"""Key in the metadata of a file of ``dumps``: the number of their verdicts."""

_NAME = re.compile(r"(?P<batch>[^.]+)\.(?P<checksum>[0-9a-f]{8})\.parquet")
_CHUNK = 1 << 20


class _Footer(Struct, frozen=True, kw_only=True):
    """What the end of a file says."""

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
    """Write a file of a batch, which is there as a whole or not at all.

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
    """The files of ``dumps`` and ``verdicts`` in a folder that can be read.

    If one of a batch cannot, both are left out: dumps without their verdicts would look
    as if nothing were wrong with them.

    :param schemas: Columns of each table.
    :raises OSError: if the folder cannot be read
    """

    def __init__(self, folder: Path, schemas: Mapping[str, pa.Schema]) -> None:
        self._schemas = schemas
        # Verdicts are written first, so those of all dumps that are found are there.
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
    # A folder may be gone with all that was in it.
    with contextlib.suppress(FileNotFoundError):
        return {
            _batch(path): path
            for path in sorted(folder.iterdir())
            if path.suffix == ".parquet" and not path.name.startswith(".")
        }
    return {}


def _batch(path: Path) -> str:
    # Others may add files, and names of their own.
    named = _NAME.fullmatch(path.name)
    return named["batch"] if named else path.stem


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of reading into those of this module."""
    try:
        yield
    except FileNotFoundError as error:
        raise _UnreadableError("gone") from error
    except OSError as error:
        # Arrow's own have no number.
        why = os.strerror(error.errno) if error.errno else f"damaged ({_line(error)})"
        raise _UnreadableError(why) from error
    # The others are of sizes and texts that cannot be.
    except (pa.ArrowException, ValueError, MemoryError, OverflowError) as error:
        raise _UnreadableError(f"damaged ({_line(error)})") from error


def _footer(path: Path, schema: pa.Schema) -> _Footer:
    """Return what the end of a file says, if the file is as it was written."""
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
