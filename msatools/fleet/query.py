# SPDX-License-Identifier: LGPL-2.1-or-later

"""Questions to the results in SQL, which DuckDB answers."""

from dataclasses import dataclass

from msatools.fleet.errors import FleetError
from msatools.fleet.store import Results

_HINT = "msa-fleet sql RESULTS 'DESCRIBE dumps' lists the columns"


@dataclass(frozen=True, kw_only=True)
class QueryResult:
    """Names of the columns, and the rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def query(results: Results, text: str) -> QueryResult:
    """Return the answer to a query about ``dumps`` and ``verdicts``.

    It reaches no file but these, and changes none.

    :raises FleetError: if there are no results, or the query is wrong
    """
    import duckdb

    with results.open() as database:
        try:
            cursor = database.execute(text)
            # There is none if there was no statement.
            if cursor is None:
                raise FleetError(f"no query; {_HINT}")
            columns = [str(column[0]) for column in cursor.description or ()]
            rows = cursor.fetchall()
        except duckdb.PermissionException as error:
            why = " ".join(str(error).split())
            raise FleetError(
                f"{why}; a query reaches the tables dumps and verdicts alone"
            ) from error
        # The others are of values that Python does not have, such as the year 20000.
        except (duckdb.Error, OverflowError, ValueError) as error:
            why = " ".join(str(error).split())
            raise FleetError(f"{why}; {_HINT}") from error
    return QueryResult(columns=tuple(columns), rows=tuple(map(tuple, rows)))
