# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks that are taken and given back all the time: no exact owner is a wrong one.

The lab's module keeps beside each lock who has it: a record that is set once the lock
is had and cleared before it is given back, so that it is right whenever it says a
task. The guest is stopped at any moment, looked at, and goes on.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures import lab
from msatools.locks.locks import Locks
from msatools.locks.options import LocksOptions
from msatools.target import TargetSpec, open_target

STOPS = 50
KERNELS = ("6.1", "6.12")


@pytest.fixture(scope="module", params=KERNELS)
def race(request: pytest.FixtureRequest) -> Iterator[lab.Live]:
    with lab.live(f"lockrace-{request.param}") as live:
        yield live


def test_exact_owners_have_what_they_are_said_to_have(race: lab.Live) -> None:
    opened = open_target(TargetSpec(qemu=str(race.qmp)))
    session = Locks(opened.prog, opened.target, LocksOptions())
    layout = race.workload["records"]
    seen: Counter[str] = Counter()
    for _ in range(STOPS):
        with race.stopped():
            report = session.report(lambda done, total: None)
            data = opened.prog.read(
                int(layout["address"], 16), layout["stride"] * layout["count"]
            )
        assert report.deadlocks == ()
        records = dict(record(data, layout, n) for n in range(layout["count"]))
        for lock in report.locks:
            holder, readers = records.get(lock.address or 0, (None, 0))
            exact = [own.pid for own in lock.owners if own.confidence == "exact"]
            if holder is None or not exact:
                continue
            assert len(exact) == 1
            assert not readers, lock
            seen[f"{lock.type} told"] += 1
            if holder:
                assert exact == [holder], (lock, holder)
                seen[f"{lock.type} known"] += 1
            assert set(exact).isdisjoint(lock.waiters), lock
        time.sleep(0.02)  # it goes on
    # Else the test would prove nothing.
    for type_ in ("mutex", "ww_mutex", "rwsem", "rt_mutex"):
        assert seen[f"{type_} known"] > 0, seen


def record(
    data: bytes, layout: dict[str, Any], number: int
) -> tuple[int, tuple[int, int]]:
    """A lock's address; the thread that has it, 0 if none is recorded; its readers."""
    start = number * layout["stride"]

    def field(name: str) -> int:
        offset, size = layout["fields"][name]
        return int.from_bytes(data[start + offset : start + offset + size], "little")

    return field("lock"), (field("pid"), field("readers"))
