# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of I/O in flight and of workqueues: see ``tests/golden/locks``."""

from typing import Any

import pytest
from msgspec.structs import replace

from msatools.locks.report import (
    BusyWorker,
    DiskIo,
    InFlight,
    LocksReport,
    OfflineWork,
    QueuedWork,
    Stage,
    WorkPool,
    Workqueue,
    Workqueues,
)
from msatools.program.model import Address
from msatools.render.locks.report import locks_blocks as blocks
from tests.locks.madelocks import SECOND, report, root, wait
from tests.render.screens import EVIL, Screens, check_escaped, check_screens
from tests.support.golden import Golden


def request(
    stage: Stage, sector: int | None, age: int | None, **others: Any
) -> InFlight:
    given: dict[str, Any] = {
        "address": Address(0xFFFF_8880_0000_0000),
        "operation": "read",
        "bytes": 4096 if sector is not None else 0,
        "driver_age_ns": None,
        "tag": None,
        "pid": None,
    }
    age_ns = None if age is None else age * SECOND
    return InFlight(stage=stage, sector=sector, age_ns=age_ns, **(given | others))


def disk(name: str, *requests: InFlight, **others: Any) -> DiskIo:
    given: dict[str, Any] = {
        "device": "254:0",
        "reads": 0,
        "writes": 0,
        "scheduler": None,
        "depth": None,
        "is_suspended": False,
        "is_frozen": False,
        "is_quiesced": False,
        "no_completion_ns": None,
        "below": (),
    }
    return DiskIo(name=name, requests=requests, **(given | others))


BUSY = disk(
    "vda",
    request("driver", 40968, 36, driver_age_ns=35 * SECOND, tag=7),
    request("driver", None, 30, operation="flush", driver_age_ns=30 * SECOND, tag=8),
    request("dispatch", 8, 3, operation="write", bytes=65536),
    request("scheduler", 16, 2, operation="write", bytes=512),
    request("plugged", 24, None, operation="discard", bytes=1 << 30, pid=77),
    reads=1,
    writes=1,
    scheduler="mq-deadline",
    depth=16,
    no_completion_ns=8 * SECOND,
)
HELD = disk("dm-1", request("deferred", 22, 39), is_suspended=True, below=("sda",))
TOP = disk("dm-2", reads=2, below=("loop0",))
LOOP = disk("loop0", request("driver", 2048, 39), reads=1, depth=128, below=("dm-1",))
QUIET = disk("sda", no_completion_ns=SECOND)
LOST = disk("sdb", reads=None, writes=None)
FROZEN = disk("sdc", depth=1, is_frozen=True, is_quiesced=True)
MANY = disk("sdd", *(request("queued", n, 60 - n) for n in range(20)), reads=0)

STACKED = report(
    [wait(2), wait(3)],
    [],
    [
        root(
            *(None, (2, 0)),
            kind="external",
            reason="I/O on dm-1 254:1 (suspended)",
            waiters=(2, 3),
            disks=("dm-2", "loop0", "dm-1"),
        ),
        root(4, (1, 0), reason="I/O on vda 253:0", disks=("vda",)),
        root(5, (1, 0), reason="I/O on dm-2 254:2", disks=("dm-2",)),
    ],
    io=(BUSY, HELD, LOOP, TOP),
)


def listed(*disks: DiskIo) -> LocksReport:
    return report(io=disks, has_all_io=True)


def io_screens() -> Screens:
    mixed = listed(MANY, BUSY, HELD, TOP, FROZEN, LOST, QUIET)
    return {
        "all disks": blocks(mixed, view="io"),
        "idle ones, too": blocks(mixed, view="io", verbose=True),
        "two requests of each": blocks(mixed, view="io", rows=2),
        "nothing in flight": blocks(listed(QUIET), view="io"),
        "under roots": blocks(STACKED),
    }


SPIN = BusyWorker(
    pid=59,
    comm="kworker/1:1+wm_spin",
    function="wm_spin_work",
    workqueue="wm_spin",
    state="R",
    age_ns=SECOND // 5,
    work_age_ns=58 * SECOND,
    intensive=False,
    rescuer=False,
)
UNKNOWN = replace(
    SPIN,
    pid=60,
    function=None,
    workqueue=None,
    state=None,
    age_ns=None,
    work_age_ns=None,
    intensive=True,
    rescuer=True,
)


def work(function: str | None, waiter: int | None = None) -> QueuedWork:
    return QueuedWork(function=function, workqueue="events", waiter=waiter)


def pool(number: int, *works: QueuedWork, **others: Any) -> WorkPool:
    given: dict[str, Any] = {
        "address": Address(0xFFFF_8880_0000_1000),
        "cpu": 1,
        "cpus": None,
        "node": None,
        "nice": 0,
        "flags": (),
        "pending": len(works),
        "progress_age_ns": None,
        "is_stalled": False,
        "workers": 2,
        "idle": 2,
        "running": 0,
        "busy": (),
        "manager": None,
        "culprits": (),
        "why": None,
    }
    return WorkPool(id=number, works=works, **(given | others))


STALLED = pool(
    *(6, work("vmstat_update"), work(None), work("wq_barrier_func", 204), work("last")),
    progress_age_ns=45 * SECOND,
    is_stalled=True,
    idle=1,
    running=1,
    busy=(SPIN,),
    culprits=(59,),
    why="pool 6 (CPU 1) starts no other worker while wm_spin_work runs",
)
UNBOUND = pool(16, cpu=None, cpus=(0, 1, 3), nice=None, flags=("disassociated",))
QUEUE = Workqueue(
    name="wm_limited",
    address=Address(0xFFFF_8880_0000_2000),
    flags=("unbound", "mem-reclaim"),
    max_active=1,
    active=1,
    inactive=2,
    works=(work("second"), work("wq_barrier_func", 7)),
    rescuer=12,
    maydays=1,
)
OFFLINE = OfflineWork(cpu=3, function="late", workqueue="events", expires_ns=None)


def made(*pools: WorkPool, **others: Any) -> LocksReport:
    given: dict[str, Any] = {"queues": (), "offline": ()}
    return report(workqueues=Workqueues(pools=pools, **(given | others)))


def work_screens() -> Screens:
    busy = replace(UNBOUND, busy=(UNKNOWN,), cpus=None)
    all_kinds = made(STALLED, busy, pool(2), queues=(QUEUE,), offline=(OFFLINE,))
    return {
        "pools, busy workers, workqueues and delayed work": blocks(
            all_kinds, view="workqueues"
        ),
        "quiet pools, too": blocks(all_kinds, view="workqueues", verbose=True),
        "the first pool": blocks(all_kinds, view="workqueues", rows=1),
        "nothing to do": blocks(made(UNBOUND, pool(2)), view="workqueues"),
        "unknown": blocks(report(), view="workqueues"),
    }


SCREENS = {"io": io_screens, "workqueues": work_screens}


@pytest.mark.parametrize("name", SCREENS)
def test_golden(golden: Golden, name: str) -> None:
    check_screens(golden, f"locks/{name}", SCREENS[name]())


def test_hostile_names() -> None:
    evil = disk(EVIL, request("driver", 1, 1), scheduler=EVIL, below=(EVIL,))
    check_escaped(blocks(listed(evil), view="io"), 2)
    worker = replace(SPIN, comm=EVIL, function=EVIL, workqueue=EVIL)
    hostile = made(
        replace(STALLED, busy=(worker,), works=(work(EVIL),)),
        queues=(replace(QUEUE, name=EVIL),),
        offline=(replace(OFFLINE, function=EVIL),),
    )
    check_escaped(blocks(hostile, view="workqueues"), 4)
