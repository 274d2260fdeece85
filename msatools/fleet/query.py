# SPDX-License-Identifier: LGPL-2.1-or-later

"""Questions to the results in SQL, which DuckDB answers."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from msgspec import Struct

from msatools.fleet.errors import FleetError
from msatools.fleet.store import Results

if TYPE_CHECKING:
    import duckdb

_REACH = "a query reaches the tables dumps and verdicts alone"
_HINT = "msa-fleet sql RESULTS 'DESCRIBE dumps' lists the columns"


class QueryResult(Struct, frozen=True, kw_only=True):
    """Names of the columns, and the rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def query(results: Results, text: str) -> QueryResult:
    """Return the answer to a query about ``dumps`` and ``verdicts``.

    It reaches no file but these, and changes none.

    :raises FleetError: if there are no results, or the query is wrong
    """
    import duckdb

    def question(database: "duckdb.DuckDBPyConnection") -> QueryResult:
        try:
            return _answer(database, text)
        # The others are of values that Python does not have, such as the year 20000.
        except (duckdb.Error, OverflowError, ValueError) as error:
            why = " ".join(str(error).split())
            is_refused = isinstance(error, duckdb.PermissionException)
            raise FleetError(f"{why}; {_REACH if is_refused else _HINT}") from error

    return results.ask(question)


def _answer(database: "duckdb.DuckDBPyConnection", text: str) -> QueryResult:
    """Return the answer to a query, which a signal can stop at any time."""
    # In DuckDB a signal waits for a part of the query, which may take long; in the main
    # thread that waits for another one it does not.
    with ThreadPoolExecutor(1) as executor:
        cursor = executor.submit(database.execute, text)
        try:
            # There is none if there was no statement.
            if cursor.result() is None:
                raise FleetError(f"no query; {_HINT}")
            rows = executor.submit(database.fetchall).result()
        except BaseException:
            database.interrupt()
            raise
    names = tuple(str(column[0]) for column in database.description or ())
    return QueryResult(columns=names, rows=tuple(map(tuple, rows)))
