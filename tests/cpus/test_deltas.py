# SPDX-License-Identifier: LGPL-2.1-or-later

"""What CPUs have counted from one look to another."""

from collections.abc import Sequence

import numpy as np
import pytest

from msatools.cpus.counters import Counters
from msatools.cpus.counts import Counts
from msatools.cpus.deltas import delta
from msatools.cpus.vectors import Vectors
from msatools.kernel.report import Findings

SECOND = 1_000_000_000
WRAP = 1 << 32

Numbers = Sequence[int | None]


def counts(numbers: Numbers) -> Counts:
    values = np.array([number or 0 for number in numbers], np.int64)
    return Counts(values, np.array([number is not None for number in numbers]))


def look(
    at_s: float | None = 0,
    online: Sequence[bool] = (True, True),
    cpus: Sequence[int] = (0, 1),
    **columns: Numbers,
) -> Counters:
    """Make counters of two CPUs; columns in capitals are times, in seconds."""
    none = (0,) * len(cpus)
    kept = {"faults": none, "mjf": none, "csw": none, "runq": none, "irqs": none}
    times: dict[str, Numbers] = {"USER": none, "IDLE": none, "IOWAIT": none}
    for name, numbers in columns.items():
        if name.isupper():
            times[name] = [n if n is None else n * SECOND for n in numbers]
        elif name in kept:
            kept[name] = numbers
    return Counters(
        cpus=np.array(cpus, np.int64),
        online=np.array(online, np.bool_),
        taken_ns=None if at_s is None else int(at_s * SECOND),
        interval_ns=None,
        counts={name: counts(numbers) for name, numbers in kept.items()},
        times={name: counts(numbers) for name, numbers in times.items()},
        vectors=Vectors({"LOC": counts(columns.get("loc", none))}, {"ERR": 5}),
        softirqs={"TIMER": counts(columns.get("timer", none))},
    )


def between(before: Counters, after: Counters) -> tuple[Counters, Findings]:
    findings = Findings()
    return delta(before, after, findings), findings


def column(counters: Counters, name: str) -> list[int | None]:
    """Give a column of the table, times in seconds."""
    rows = [row[name] for row in counters.rows().values()]
    if not name.endswith("_ns"):
        return rows
    return [number if number is None else number // SECOND for number in rows]


def test_all_grow() -> None:
    before = look(10, csw=(5, 7), USER=(1, 2), IDLE=(3, 4), faults=(9, 9), irqs=(1, 1))
    after = look(12, csw=(6, 9), USER=(2, 2), IDLE=(4, 6), faults=(9, 10), irqs=(3, 1))
    grown, findings = between(before, after)
    assert column(grown, "csw") == [1, 2]
    assert column(grown, "usr_ns") == [1, 0]
    assert column(grown, "idl_ns") == [1, 2]
    assert column(grown, "wt_ns") == [0, 0]
    assert column(grown, "minf") == [0, 1]
    assert column(grown, "intr") == [2, 0]
    assert grown.interval_ns == 2 * SECOND
    assert grown.taken_ns == after.taken_ns
    assert grown.vectors.totals == {"ERR": 0}
    assert not findings.notes


def test_run_queue_is_as_it_is() -> None:
    grown, _ = between(look(0, runq=(8, 0)), look(1, runq=(3, 2)))
    assert column(grown, "runq") == [3, 2]


def test_words_begin_anew() -> None:
    before = look(0, loc=(WRAP - 2, 4), timer=(WRAP - 1, 0))
    grown, findings = between(before, look(1, loc=(3, 4), timer=(0, 0)))
    assert column(grown, "intr") == [5, 0]
    assert column(grown, "soft") == [1, 0]
    (row,) = grown.vector_rows()[:1]
    assert (row.name, dict(row.counts), row.total) == ("LOC", {0: 5}, 5)
    assert not findings.notes


def test_counter_that_goes_back() -> None:
    """It was read while it changed, and nobody knows by how much."""
    grown, findings = between(look(0, csw=(5, 7)), look(1, csw=(6, 6)))
    assert column(grown, "csw") == [1, None]
    (note,) = findings.notes.values()
    assert note.code == "cpus-changed"
    assert "csw" in note.text


@pytest.mark.parametrize(("back", "known"), [(0.01, True), (0.2, False)])
def test_time_that_goes_back(back: float, known: bool) -> None:
    """By as much as the clock is late: nothing. By more: unknown."""
    grown, findings = between(look(0, USER=(1, 5)), look(1, USER=(1, 5 - back)))
    assert column(grown, "usr_ns") == [0, 0 if known else None]
    assert bool(findings.notes) != known


def test_idle_becomes_waiting_for_io() -> None:
    """All that a CPU was idle for changes sides, when a task comes to wait for I/O."""
    before = look(0, IDLE=(10, 10), IOWAIT=(0, 3))
    after = look(2, IDLE=(4, 15), IOWAIT=(8, 0))
    grown, findings = between(before, after)
    assert column(grown, "idl_ns") == [0, 2]
    assert column(grown, "wt_ns") == [2, 0]
    assert not findings.notes


def test_idle_for_longer_than_there_was_time() -> None:
    """It was read while the kernel added to it."""
    before, after = look(0, IDLE=(1, 1)), look(2, IDLE=(3, 9))
    grown, findings = between(before, after)
    assert column(grown, "idl_ns") == [2, None]
    assert column(grown, "wt_ns") == [0, None]
    assert findings.notes
    after = look(None, IDLE=(3, 9))
    grown, findings = between(before, after)
    assert column(grown, "idl_ns") == [2, 8]
    assert grown.interval_ns is None


def test_idle_begins_anew() -> None:
    """A CPU was off and on again between two looks, before v6.8."""
    grown, findings = between(look(0, IDLE=(5, 9)), look(2, IDLE=(7, 1)))
    assert column(grown, "idl_ns") == [2, None]
    assert column(grown, "wt_ns") == [0, None]
    assert column(grown, "usr_ns") == [0, 0]
    assert findings.notes


def test_cpu_that_went_offline() -> None:
    """Its faults are another's, nobody knows whose; its idle time is kept elsewhere."""
    before = look(0, IDLE=(5, 5), faults=(7, 4), csw=(1, 1))
    after = look(2, (True, False), IDLE=(7, 6), faults=(12, 0), csw=(2, 2))
    grown, findings = between(before, after)
    assert column(grown, "minf") == column(grown, "mjf") == [None, None]
    assert column(grown, "idl_ns") == [2, None]
    assert column(grown, "csw") == [1, 1]
    assert grown.online.tolist() == [True, False]
    (note,) = findings.notes.values()
    assert "IDLE" in note.text
    assert "faults" in note.text


def test_cpu_that_came() -> None:
    before = look(0, (True, False), IDLE=(5, 5), faults=(7, 4))
    after = look(2, IDLE=(7, 6), faults=(9, 5))
    grown, _ = between(before, after)
    assert column(grown, "minf") == [2, 1]
    assert column(grown, "idl_ns") == [2, None]


def test_faults_that_went_back() -> None:
    """A CPU was off and on again between two looks."""
    grown, _ = between(look(0, faults=(7, 4)), look(2, faults=(12, 1)))
    assert column(grown, "minf") == [None, None]


def test_cpus_that_could_not_be_read() -> None:
    """One in the first look, one in the second."""
    before = look(0, cpus=(0, 2), csw=(1, 10), IDLE=(1, 1), loc=(3, 3))
    after = look(1, cpus=(1, 2), csw=(7, 12), IDLE=(2, 2), loc=(9, 5))
    grown, findings = between(before, after)
    assert grown.cpus.tolist() == [1, 2]
    assert column(grown, "csw") == [None, 2]
    assert column(grown, "idl_ns") == [None, 1]
    assert column(grown, "intr") == [None, 2]
    # There was nothing known to lose.
    assert not findings.notes


def test_what_was_not_known_is_not() -> None:
    before = look(0, csw=(None, 1), USER=(None, 1), loc=(None, 1))
    grown, findings = between(before, look(1, csw=(4, 4), USER=(3, 2), loc=(2, 2)))
    assert column(grown, "csw") == [None, 3]
    assert column(grown, "usr_ns") == [None, 1]
    assert column(grown, "intr") == [None, 1]
    assert not findings.notes
