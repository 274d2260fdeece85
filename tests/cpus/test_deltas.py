# SPDX-License-Identifier: LGPL-2.1-or-later

"""Differences of CPU counters between two samples."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from msatools.cpus.counters import CpuCounters, delta
from msatools.cpus.times import Counts
from msatools.cpus.vectors import Vectors
from msatools.kernel.report import LossLog

SECOND = 1_000_000_000
WRAP = 1 << 32

Numbers = Sequence[float | None]


def counts(numbers: Numbers) -> Counts:
    values = np.array([number or 0 for number in numbers], np.int64)
    return Counts(values, np.array([number is not None for number in numbers]))


def sample(
    at_s: float | None = 0,
    online: Sequence[bool] = (True, True),
    cpus: Sequence[int] = (0, 1),
    **columns: Numbers,
) -> CpuCounters:
    """Make counters of two CPUs; columns in capitals are times, in seconds."""
    none = (0,) * len(cpus)
    kept = {"faults": none, "mjf": none, "csw": none, "runq": none, "irqs": none}
    times: dict[str, Numbers] = {"USER": none, "IDLE": none, "IOWAIT": none}
    for name, numbers in columns.items():
        if name.isupper():
            times[name] = [n if n is None else int(n * SECOND) for n in numbers]
        elif name in kept:
            kept[name] = numbers
    return CpuCounters(
        cpus=np.array(cpus, np.int64),
        online=np.array(online, np.bool_),
        taken_ns=None if at_s is None else int(at_s * SECOND),
        interval_ns=None,
        counts={name: counts(numbers) for name, numbers in kept.items()},
        times={name: counts(numbers) for name, numbers in times.items()},
        vectors=Vectors({"LOC": counts(columns.get("loc", none))}, {"ERR": 5}),
        softirqs={"TIMER": counts(columns.get("timer", none))},
    )


def between(before: CpuCounters, after: CpuCounters) -> tuple[CpuCounters, LossLog]:
    losses = LossLog()
    return delta(before, after, losses), losses


def column(counters: CpuCounters, name: str) -> list[int | None]:
    """Return a column of the table, times in seconds."""
    rows = [row[name] for row in counters.rows().values()]
    if not name.endswith("_ns"):
        return rows
    return [number if number is None else number // SECOND for number in rows]


Expected = Mapping[str, list[int | None]]
CASES: Mapping[str, tuple[CpuCounters, CpuCounters, Expected]] = {
    "all grow": (
        sample(10, csw=(5, 7), USER=(1, 2), IDLE=(3, 4), faults=(9, 9), irqs=(1, 1)),
        sample(12, csw=(6, 9), USER=(2, 2), IDLE=(4, 6), faults=(9, 10), irqs=(3, 1)),
        {
            "csw": [1, 2],
            "usr_ns": [1, 0],
            "idl_ns": [1, 2],
            "wt_ns": [0, 0],
            "minf": [0, 1],
            "intr": [2, 0],
        },
    ),
    "a run queue is as it is": (
        *(sample(0, runq=(8, 0)), sample(1, runq=(3, 2))),
        {"runq": [3, 2]},
    ),
    "words begin anew": (
        sample(0, loc=(WRAP - 2, 4), timer=(WRAP - 1, 0)),
        sample(1, loc=(3, 4), timer=(0, 0)),
        {"intr": [5, 0], "soft": [1, 0]},
    ),
    # Idle time is moved to iowait when a task starts to wait for I/O.
    "idle becomes waiting for I/O": (
        sample(0, IDLE=(10, 10), IOWAIT=(0, 3)),
        sample(2, IDLE=(4, 15), IOWAIT=(8, 0)),
        {"idl_ns": [0, 2], "wt_ns": [2, 0]},
    ),
    "more idle time than an interval of unknown length": (
        *(sample(0, IDLE=(1, 1)), sample(None, IDLE=(3, 9))),
        {"idl_ns": [2, 8]},
    ),
    "by as much as the clock is late": (
        *(sample(0, USER=(1, 5)), sample(1, USER=(1, 4.99))),
        {"usr_ns": [0, 0]},
    ),
    "a CPU in the first sample, one in the second": (
        sample(0, cpus=(0, 2), csw=(1, 10), IDLE=(1, 1), loc=(3, 3)),
        sample(1, cpus=(1, 2), csw=(7, 12), IDLE=(2, 2), loc=(9, 5)),
        {"csw": [None, 2], "idl_ns": [None, 1], "intr": [None, 2]},
    ),
    "what was not known is not": (
        sample(0, csw=(None, 1), USER=(None, 1), loc=(None, 1)),
        sample(1, csw=(4, 4), USER=(3, 2), loc=(2, 2)),
        {"csw": [None, 3], "usr_ns": [None, 1], "intr": [None, 1]},
    ),
}
NOTED: Mapping[str, tuple[CpuCounters, CpuCounters, Expected]] = {
    # It was read while it changed, by an unknown amount.
    "csw": (*(sample(0, csw=(5, 7)), sample(1, csw=(6, 6))), {"csw": [1, None]}),
    "USER": (
        *(sample(0, USER=(1, 5)), sample(1, USER=(1, 4.8))),
        {"usr_ns": [0, None]},
    ),
    # More than the interval: read while the kernel added to it.
    "IDLE": (
        *(sample(0, IDLE=(1, 1)), sample(2, IDLE=(3, 9))),
        {"idl_ns": [2, None], "wt_ns": [0, None]},
    ),
    # Before v6.8: a CPU was off and on again between two samples.
    "IDLE, IOWAIT": (
        *(sample(0, IDLE=(5, 9)), sample(2, IDLE=(7, 1))),
        {"idl_ns": [2, None], "wt_ns": [0, None], "usr_ns": [0, 0]},
    ),
    # A CPU went offline: its faults move to another CPU, and its idle time elsewhere.
    "IDLE, faults": (
        sample(0, IDLE=(5, 5), faults=(7, 4), csw=(1, 1)),
        sample(2, (True, False), IDLE=(7, 6), faults=(12, 0), csw=(2, 2)),
        {
            "minf": [None, None],
            "mjf": [None, None],
            "csw": [1, 1],
            "idl_ns": [2, None],
        },
    ),
    # A CPU came online.
    "IDLE of one that came": (
        sample(0, (True, False), IDLE=(5, 5), faults=(7, 4)),
        sample(2, IDLE=(7, 6), faults=(9, 5)),
        {"minf": [2, 1], "idl_ns": [2, None]},
    ),
    # A CPU was off and on again between two samples.
    "faults": (
        *(sample(0, faults=(7, 4)), sample(2, faults=(12, 1))),
        {"minf": [None, None]},
    ),
}


@pytest.mark.parametrize("name", [*CASES, *NOTED])
def test_between_two_samples(name: str) -> None:
    before, after, expected = (CASES | NOTED)[name]
    grown, losses = between(before, after)
    assert {key: column(grown, key) for key in expected} == expected
    assert grown.taken_ns == after.taken_ns
    assert grown.cpus.tolist() == after.cpus.tolist()
    assert grown.online.tolist() == after.online.tolist()
    assert grown.vectors.totals == {"ERR": 0}
    if name in CASES:
        assert not losses.notes
        return
    (note,) = losses.notes.values()
    assert note.code == "cpus-changed"
    for counter in name.partition(" of ")[0].split(", "):
        assert counter in note.text


def test_interval() -> None:
    assert between(sample(10), sample(12))[0].interval_ns == 2 * SECOND
    assert between(sample(10), sample(None))[0].interval_ns is None


def test_rows_of_vectors() -> None:
    grown, _ = between(sample(0, loc=(WRAP - 2, 4)), sample(1, loc=(3, 4)))
    (row,) = grown.vector_rows()[:1]
    assert (row.name, dict(row.counts), row.total) == ("LOC", {0: 5}, 5)
