# SPDX-License-Identifier: LGPL-2.1-or-later

"""Results of dumps that need not be there, and reports that workers make of nothing."""

import json
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from msatools.fleet.dumps import Identity, Result, result_of
from msatools.fleet.single import Outcome, State
from msatools.fleet.store import Results
from tests.fleet.dumps import DAY, START
from tests.fleet.program import made_report

_numbers = count()


def identity(name: str = "", host: str = "web1", day: int = 0) -> Identity:
    """Return the identity of a dump; without a name, of another one each time."""
    name = name or f"dump{next(_numbers)}"
    return Identity(
        path=f"/crash/{host}/{name}",
        digest=f"{name}-{host}",
        size_bytes=1 << 20,
        host=host,
        release="6.12.1",
        time_ns=(START + day * DAY) * 10**9,
        error=None,
    )


def outcome(state: State = "done", error: str | None = None, **report: Any) -> Outcome:
    """Return what came of a dump."""
    text = json.dumps(report or made_report()) if state == "done" else None
    return Outcome(state=state, error=error, report=text, seconds=1.5, worker="here")


def report(
    fingerprint: str | None = None, *codes: str, day: int = 0, **keys: Any
) -> dict[str, Any]:
    """Return a report of a crash that has a fingerprint, and verdicts with codes."""
    crash = {"cause": "bug", "function": "f", "fingerprint": fingerprint}
    made = made_report(**(crash if fingerprint else {}))
    made["machine"]["time_ns"] = (START + day * DAY) * 10**9
    made["verdicts"] = [
        {
            "code": code,
            "severity": "critical",
            "confidence": "exact",
            "text": f"{code} it is",
            "evidence": ["a fact"],
            "see": "msa-locks vmcore",
        }
        for code in codes
    ]
    return {**made, **keys}


def result(
    fingerprint: str | None = None,
    *codes: str,
    name: str = "",
    host: str = "web1",
    day: int = 0,
    **keys: Any,
) -> Result:
    """Return the rows of a dump with a report."""
    found = report(fingerprint, *codes, day=day, **keys)
    return result_of(identity(name, host, day), outcome(**found))


def results(path: Path | str, *found: Result) -> Results:
    """Return a folder of results."""
    made = Results(str(path))
    made.create()
    made.write(found)
    return made


def nothing(path: str) -> Outcome:
    """Report on no dump at all; for workers."""
    return outcome()


def by_name(path: str) -> Outcome:
    """Report by the name of a dump, which is its fingerprint; for workers."""
    return outcome(**report(Path(path).name.partition("-")[0]))


def slowly(path: str) -> Outcome:
    """Report a little later, so that there is time to kill the worker; for workers."""
    time.sleep(0.2)
    return by_name(path)


def killing(path: str) -> Outcome:
    """End the worker if the dump is one that does; for workers."""
    if "killer" in path:
        os._exit(1)
    return by_name(path)


def workers_of(pid: int) -> Iterator[int]:
    """Yield the PIDs of Dask's workers that a process has, starting ones too."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"spawn_main" in words:
                yield int(child)


def asked(made: Results, query: str) -> list[tuple[object, ...]]:
    """Return the answer of the results to a query."""
    return made.ask(lambda database: database.execute(query).fetchall())
