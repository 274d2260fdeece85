# SPDX-License-Identifier: LGPL-2.1-or-later

"""Questions to the results in SQL, which DuckDB answers."""

from dataclasses import dataclass

from msatools.fleet.errors import FleetError
from msatools.fleet.store import Results


@dataclass(frozen=True, kw_only=True)
class QueryResult:
    """Names of the columns, and the rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def query(results: Results, text: str) -> QueryResult:
    """Return the answer to a query about ``dumps`` and ``verdicts``.

    :raises FleetError: if there are no results, or the query is wrong
    """
    import duckdb

    database = results.open()
    try:
        cursor = database.execute(text)
        columns = [str(column[0]) for column in cursor.description or ()]
        rows = cursor.fetchall() if columns else []
    except duckdb.Error as error:
        why = " ".join(str(error).split())
        raise FleetError(f"{why}; msa-fleet sql RESULTS 'DESCRIBE dumps'") from error
    return QueryResult(columns=tuple(columns), rows=tuple(map(tuple, rows)))
