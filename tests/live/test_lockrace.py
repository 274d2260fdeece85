# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks that are taken and given back all the time: no exact owner is a wrong one.

The lab's module keeps beside each lock who has it: a record that is set once the lock
is had and cleared before it is given back, so that it is right whenever it says a
task. The guest is stopped at any moment, looked at, and goes on.
"""

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drgn import Program

from fixtures import lab
from msatools.locks.locks import Locks
from msatools.locks.report import LocksReport
from msatools.locks.report_builder import LocksOptions
from msatools.program import TargetSpec, open_target
from tests.support.kernellocks import QUEUES, Lock, owner
from tests.support.terminal import Terminal
from tests.support.usage import free_programs

KERNELS = ("6.1", "6.12")

STOPS = 50

LOOKS = 100
"""Of 100 that are not checked at their end, some 40 tell what is not so."""

PATIENCE = 10
"""So many times as often a guest is looked at until it has shown all that it can."""

STILL_SECONDS = 60
"""After which a guest that does nothing has failed."""

NAMES_OWNER = ("mutex", "ww_mutex", "rwsem", "rt_mutex")
FORMATS = {4: "<i", 8: "<Q"}


@pytest.fixture(scope="module", params=KERNELS)
def race(request: pytest.FixtureRequest) -> Iterator[lab.Live]:
    with lab.live(f"lockrace-{request.param}") as live:
        yield live


def looking_at(race: lab.Live, *, dwarf: bool = False) -> tuple[Program, Locks]:
    free_programs()
    vmlinux = str(race.vmlinux) if dwarf else None
    types = "dwarf" if dwarf else "btf"
    opened = open_target(TargetSpec(qemu=str(race.qmp), types=types, vmlinux=vmlinux))
    return opened.prog, Locks(opened.prog, opened.target, LocksOptions())


def look(session: Locks) -> LocksReport:
    return session.report(lambda done, total: None)


def test_what_is_told_at_any_moment(race: lab.Live) -> None:
    """By the module's records, and by the locks themselves as drgn reads them."""
    prog, session = looking_at(race, dwarf=True)
    locks = race.workload["locks"]
    racers = {thread["pid"] for thread in race.workload["threads"]}
    # What has to be seen once, else the test would prove nothing.
    unseen = {
        *(f"owner of a {type_}" for type_ in NAMES_OWNER),
        *(f"{lock['name']} is held" for lock in locks),
        *(f"a {lock['type']} is waited for" for lock in locks),
    }
    stops = done = 0
    while stops < STOPS or unseen:
        assert stops < PATIENCE * STOPS, unseen
        stops += 1
        done = go_on(prog, race, done)
        with race.stopped():
            records = read_records(prog, race)
            report = look(session)
            queues = check_records(prog, locks, records, racers)
            assert read_records(prog, race) == records
        for lock, record in zip(locks, records, strict=True):
            if record["pid"] or record["readers"]:
                unseen.discard(f"{lock['name']} is held")
            if queues[record["lock"]]:
                unseen.discard(f"a {lock['type']} is waited for")
        for type_ in check_report(report, records, queues):
            unseen.discard(f"owner of a {type_}")


def check_records(
    prog: Program,
    locks: list[Lock],
    records: list[dict[str, int]],
    racers: set[int],
) -> dict[int, list[int]]:
    """Check what the module says by what locks say; return their queues by address."""
    queues = {}
    for lock, record in zip(locks, records, strict=True):
        assert record["lock"] == int(lock["address"], 16)
        assert record["pid"] in racers | {0}
        queue = queues[record["lock"]] = QUEUES[lock["type"]](prog, record["lock"])
        assert set(queue) <= racers
        if (found := owner(prog, lock)) is None:
            continue
        # A record names who holds a lock, but not always everyone.
        pid, readers = found
        assert record["readers"] <= readers
        if record["pid"]:
            assert (pid, readers) == (record["pid"], 0), lock["name"]
    return queues


def check_report(
    report: LocksReport, records: list[dict[str, int]], queues: dict[int, list[int]]
) -> Iterator[str]:
    """Check what is reported; yield the types of locks whose exact owner is known."""
    assert report.deadlocks == ()
    by_address = {record["lock"]: record for record in records}
    for lock in report.locks:
        record = by_address.get(lock.address or 0)
        if record is None:
            continue
        assert set(lock.waiters) <= set(queues[record["lock"]]), lock
        exact = [own.pid for own in lock.owners if own.confidence == "exact"]
        if not exact:
            continue
        assert len(exact) == 1
        assert not record["readers"], lock
        assert set(exact).isdisjoint(lock.waiters), lock
        if record["pid"]:
            assert exact == [record["pid"]], (lock, record)
            yield lock.type


def go_on(prog: Program, race: lab.Live, before: int) -> int:
    """Wait until locks were taken anew; return how many have been so far."""
    end = time.monotonic() + STILL_SECONDS
    while time.monotonic() < end:
        done = sum(record["taken"] for record in read_records(prog, race))
        assert done >= before
        if done > before:
            return done
        time.sleep(0.001)
    raise AssertionError("the guest does nothing")


def read_records(prog: Program, race: lab.Live) -> list[dict[str, int]]:
    about = race.workload["records"]
    data = prog.read(int(about["address"], 16), about["stride"] * about["count"])
    return [
        {
            name: struct.unpack_from(FORMATS[size], data, start + offset)[0]
            for name, (offset, size) in about["fields"].items()
        }
        for start in range(0, len(data), about["stride"])
    ]


def test_nothing_is_told_of_who_does_not_rest(race: lab.Live) -> None:
    """But what is so: no deadlock, no owner that waits for its own lock."""
    _, session = looking_at(race)
    looks = ended = 0
    while looks < LOOKS or not ended:
        assert looks < PATIENCE * LOOKS
        looks += 1
        report = look(session)
        assert report.deadlocks == ()
        told = {wait.pid for wait in report.waits}
        for lock in report.locks:
            assert set(lock.waiters) <= told, (lock, report.coverage, report.notes)
            exact = {own.pid for own in lock.owners if own.confidence == "exact"}
            assert exact.isdisjoint(lock.waiters), lock
        ended += report.coverage.get("waits_ended", 0)


def test_key_that_ends_it(race: lab.Live) -> None:
    free_programs()
    msa_locks = Path(sys.executable).with_name("msa-locks")
    terminal = Terminal([msa_locks, "--qemu", race.qmp, "--types", "btf", "0.5"])
    terminal.read_until("live guest")
    terminal.press("q")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen
