# SPDX-License-Identifier: LGPL-2.1-or-later

"""I/O in flight on slow, late, suspended and stacked disks.

Counts, requests and the disks at the end of waits are facts in ``tests/truth/io.py``.
"""

from itertools import pairwise

import pytest
from drgn import Object, Program

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.context import LockContext
from msatools.locks.disks import all_disks
from msatools.locks.io import in_flight
from msatools.locks.locks import collect_locks
from msatools.locks.report_builder import LocksOptions
from msatools.locks.struct_reader import Layout
from msatools.tasks.table import TaskReader
from tests.locks.reports import logged_report
from tests.support.dumps import open_dump
from tests.support.overlay import lose, put

DUMP = "inflight-6.12"
DUMPS = [DUMP, "inflight-6.1"]
LATE_NS = 1_000_000_000
"""How late jiffies, of which some ages are made, may count a tick on a busy machine."""


def context_of(prog: Program) -> LockContext:
    reader, losses = Reader(prog), LossLog()
    tasks = TaskReader(reader).read_all(losses)
    clocks = read_clocks(reader, losses)
    return LockContext(Layout(reader), tasks, losses, clocks, alone=False)


@pytest.mark.parametrize("name", DUMPS)
def test_requests_are_as_old_as_their_processes_asked(name: str) -> None:
    """A process asks after the guest has noted the time, and before the next one."""
    run = lab.build(name)
    context = context_of(open_dump(name, "btf"))
    now, io = context.monotonic_ns, in_flight(context)
    assert now is not None
    ages = {
        (disk.name, request.sector): request.age_ns
        for disk in io.all()
        for request in disk.requests
    }
    top, loop, *_ = run.workload["stack"]["disks"]
    asked = run.workload["requests"]
    for this, following in pairwise(asked):
        disk = loop if this["disk"] == top else this["disk"]
        age = ages[disk, this["sector"]]
        assert age is not None
        began_ns = now - age
        assert this["asked_ns"] - LATE_NS <= began_ns <= following["asked_ns"] + LATE_NS


@pytest.mark.parametrize("name", DUMPS)
def test_writeback_leads_to_the_slow_disk(name: str) -> None:
    """sync waits for a worker, which waits for a tag or its share of the disk."""
    made = logged_report(name)
    work = made.run.workload
    (root,) = [each for each in made.report.roots if work["sync"] in each.behind]
    assert root.kind == "external"
    assert root.disks is not None
    assert root.disks[-1] == work["disks"]["slow"]
    assert root.reason.startswith(f"I/O on {work['disks']['slow']} ")
    (owner,) = made.locks[made.waits[work["sync"]].lock or ""].owners
    assert owner.confidence == "likely"
    writer = made.waits[owner.pid]
    assert writer.comm.startswith("kworker/")
    assert writer.pid in root.waiters


@pytest.mark.parametrize("name", DUMPS)
def test_disks_of_roots_only(name: str) -> None:
    """Without --io, only disks that roots wait for are in the report."""
    made = logged_report(name).report
    wanted = {disk for root in made.roots for disk in root.disks or ()}
    assert {disk.name for disk in made.io or ()} == wanted
    assert made.has_all_io is None
    everything = collect_locks(open_dump(name, "btf"), options=LocksOptions(io=True))
    assert {*(disk.name for disk in everything.io or ())} > wanted
    assert everything.has_all_io


@pytest.mark.parametrize("name", DUMPS)
def test_stuck_io_is_of_the_disks_that_hold_it(name: str) -> None:
    run = lab.build(name)
    names = run.workload["disks"]
    context = context_of(open_dump(name, "btf"))
    io = in_flight(context)
    found = {
        io.way(disk).disks[-1].name
        for disk in all_disks(context).all
        if any((each.age_ns or 0) >= 10**9 for each in io.of_disk(disk).requests)
    }
    assert found == {names[each] for each in ("slow", "late", "suspended", "under")}


def test_way_of_a_disk_that_does_nothing() -> None:
    """It is waited for all the same, and is its own end."""
    context = context_of(open_dump(DUMP, "btf"))
    back = lab.build(DUMP).workload["stack"]["disks"][-1]
    (disk,) = [disk for disk in all_disks(context).all if disk.name == back]
    way = in_flight(context).way(disk)
    assert [each.name for each in way.disks] == [back]
    assert way.below == ()


def slow_queue(prog: Program) -> Object:
    context = context_of(prog)
    (disk,) = [disk for disk in all_disks(context).all if disk.name == "vda"]
    return Object(prog, "struct request_queue", address=disk.queue)


def test_queue_that_is_lost() -> None:
    """Counts are unknown, not 0, and the loss is counted."""
    prog = open_dump(DUMP, "btf")
    queue = slow_queue(prog)
    lose(
        prog, queue.address_ + queue.tag_set.address_of_().value_() - queue.address_, 8
    )
    context = context_of(prog)
    (disk,) = in_flight(context).named(["vda"])
    assert (disk.reads, disk.writes, disk.requests) == (None, None, ())
    assert context.losses.lost["disks_unreadable"] == 1
    others = [each for each in in_flight(context).all() if each.name != "vda"]
    assert all(each.reads is not None for each in others)


@pytest.mark.parametrize("value", [0, 1 << 30])
def test_impossible_number_of_tags(value: int) -> None:
    prog = open_dump(DUMP, "btf")
    tags = slow_queue(prog).tag_set.tags[0]
    put(prog, tags.nr_tags.address_of_().value_(), value.to_bytes(4, "little"))
    context = context_of(prog)
    (disk,) = in_flight(context).named(["vda"])
    assert disk.reads is None
    assert context.losses.lost["disks_unreadable"] == 1


def test_bios_in_a_loop() -> None:
    """A list of deferred bios that does not end is read once around."""
    prog = open_dump(DUMP, "btf")
    suspended = lab.build(DUMP).workload["disks"]["suspended"]
    (before,) = in_flight(context_of(prog)).named([suspended])
    first, *_, last = before.requests
    following = prog.type("struct bio").member("bi_next").offset
    put(prog, last.address + following, first.address.to_bytes(8, "little"))
    (after,) = in_flight(context_of(prog)).named([suspended])
    assert after.requests == before.requests
