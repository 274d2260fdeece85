# SPDX-License-Identifier: LGPL-2.1-or-later

"""Cells and tables of prstat, of reports made by hand: see ``tests/golden/prstat``."""

import os
import pwd
from typing import Any

import pytest
from msgspec.structs import replace

from msatools.kernel.clocks import Accounting
from msatools.kernel.report import Note
from msatools.locks.report import Herd, WaitTarget, Waker
from msatools.program.model import Address
from msatools.prstat.model import (
    Children,
    ClassGroup,
    Load,
    LoadGroup,
    OffCpu,
    PrstatReport,
    Split,
    StackGroup,
    TaskGroup,
    TaskRow,
    Totals,
    Waited,
    Why,
)
from msatools.prstat.states import StateTime
from msatools.render.blocks import Span, share
from msatools.render.prstat.columns import COLUMNS, TaskContext, cells
from msatools.render.prstat.report import folded
from msatools.render.prstat.report import prstat_blocks as blocks
from tests.locks.madelocks import SECOND, TARGET
from tests.render.screens import FRAMES, Screens, check_screens, printed
from tests.support.golden import Golden

MS = 1_000_000

ROW = TaskRow(
    pid=12,
    tgid=10,
    ppid=1,
    uid=1000,
    comm="cat",
    cgroup="/a",
    kthread=False,
    threads=3,
    state="S",
    pri=20,
    nice=0,
    cpu=1,
    size_bytes=8 << 20,
    rss_bytes=4 << 20,
    task_class="LCK",
    class_age_ns=5 * SECOND,
    class_age_bound="exact",
    on=None,
    lifetime_ns=10 * SECOND,
    user_ns=SECOND,
    system_ns=SECOND // 2,
    latency_ns=SECOND // 4,
    latency_bound="exact",
    off_cpu_ns=8_250 * MS,
    zombie_ns=0,
    breakdown=None,
    nvcsw=5,
    sleeps=5,
    nivcsw=4125,
    min_flt=0,
    maj_flt=1,
)
SPLIT = Split(SECOND, 2 * SECOND, 5_250 * MS, 0, {"blkio": SECOND, "swapin": None}, 1.0)
REPORT = PrstatReport(
    target=TARGET,
    taken_at_ns=SECOND,
    interval_ns=None,
    coverage={},
    notes=(),
    bound_ns=1,
    accounting=Accounting(False, False, False, False, True),
    totals=Totals(1, 3, {"S": 3}, {"LCK": 3}, (1.0, 0.5, 0.25), 2, 1 << 30),
    tasks=(ROW,),
    per_thread=False,
    herds=(),
)
ABOUT = TaskContext(names=False, per_thread=True, precise_cputime=False, full=False)
PROCESS = replace(ABOUT, per_thread=False)
PATH = "/srv/" + "long/" * 20 + "name"
ONS = {
    "lock": WaitTarget(
        kind="lock", type="rwsem", name="i_rwsem", path=PATH, waiters=1234
    ),
    "tcp": WaitTarget(
        kind="socket",
        inode=1483,
        type="tcp",
        local="127.0.0.1:46472",
        peer="127.0.0.1:34721",
    ),
    "unix": WaitTarget(kind="socket", inode=1, type="unix stream", local=PATH),
    "futex": WaitTarget(kind="futex", address=Address(0x4C80F0), waiters=50),
}


def row(**changes: Any) -> TaskRow:
    return replace(ROW, **changes)


def cell(name: str, of: TaskRow = ROW, about: TaskContext = ABOUT) -> str:
    ((found,),) = next(cells([name], [of], about))
    return found.text if isinstance(found, Span) else found


# --- cells


NOTHING = dict.fromkeys(("ppid", "uid", "cgroup", "threads", "size_bytes", "rss_bytes"))
UPPER = {"latency_bound": "upper"}
PARTS = (
    OffCpu("LCK", 5 * SECOND, 0),
    OffCpu("TMR", SECOND, SECOND // 5),
    OffCpu("POL", 1000, 0),
    OffCpu(None, SECOND, 0),
)
WAITED = Waited(0, MS, 5 * SECOND, 0, untold_ns=SECOND, is_estimate=True)
LASTS = Waited(SECOND, 0, 3 * SECOND, 0, untold_ns=4_250 * MS, is_estimate=False)
FAULTS = replace(SPLIT, delays={"blkio": SECOND, "swapin": 2 * SECOND})
PART = replace(SPLIT, coverage=0.4, stopped_ns=None)
CELLS: dict[str, tuple[TaskRow, TaskContext]] = {
    "a thread": (ROW, ABOUT),
    "a process": (ROW, PROCESS),
    "a process, its threads not known": (row(threads=None), PROCESS),
    "nothing known": (row(**NOTHING, lifetime_ns=0, sleeps=0), ABOUT),
    "old": (row(lifetime_ns=117_200 * MS), ABOUT),
    "of the kernel": (row(kthread=True), ABOUT),
    "modes counted precisely": (ROW, replace(ABOUT, precise_cputime=True)),
    "latency a bound": (row(**UPPER), ABOUT),
    "age a bound": (row(class_age_bound="upper"), ABOUT),
    "age an estimate": (row(class_age_bound="estimate"), ABOUT),
    "a zombie": (row(zombie_ns=SECOND, state="Z"), ABOUT),
    "split": (row(breakdown=SPLIT), ABOUT),
    "split in part": (row(breakdown=PART), ABOUT),
    "split of nothing": (
        row(breakdown=Split(0, 0, 0, 0, {}, 0.0), off_cpu_ns=1000),
        ABOUT,
    ),
    "off by class": (row(off_cpu=PARTS), ABOUT),
    "off by no class": (row(off_cpu=()), ABOUT),
    "waited, by samples": (row(waited=WAITED), ABOUT),
    "waited, exactly": (row(waited=replace(LASTS, untold_ns=0)), ABOUT),
    "wait that lasts": (row(waited=LASTS), ABOUT),
    "page faults by delays": (row(waited=LASTS, breakdown=FAULTS), ABOUT),
    "children": (
        row(children=Children(SECOND, 61 * SECOND, 3, 4000, 5, 6)),
        ABOUT,
    ),
    **{f"on {kind}": (row(on=on), ABOUT) for kind, on in ONS.items()},
    "on lock, in full": (row(on=ONS["lock"]), replace(ABOUT, full=True)),
}


def test_golden_cells(golden: Golden) -> None:
    """All cells of a thread, and of other rows the cells that differ from them."""
    usual = {name: cell(name) for name in COLUMNS}
    lines = []
    for what, (of, about) in CELLS.items():
        lines.append(f"{what}:")
        for name in COLUMNS:
            found = cell(name, of, about)
            if what == "a thread" or found != usual[name]:
                lines.append(f"    {name:<12} {found}")
    golden("prstat/cells", lines)


def test_golden_shares(golden: Golden) -> None:
    shares = ((0, 1000), (1, 10**6), (237, 1000), (9994, 10_000), (9995, 10_000))
    shares += ((1000, 1000), (3, 1), (1001, 1), (5, 0), (0, 0))
    golden("prstat/shares", [f"{ns} of {of}: {share(ns, of)}" for ns, of in shares])


def test_users_have_names_on_the_running_kernel() -> None:
    here = replace(ABOUT, names=True)
    own = row(uid=os.getuid())
    assert cell("USER", own, here) == pwd.getpwuid(os.getuid()).pw_name
    assert cell("USER", row(uid=4_000_000_000), here) == "4000000000"
    assert cell("USER", row(uid=None), here) == "-"


def test_bad_states_stand_out() -> None:
    for state, style in (("D", "warn"), ("Z", "warn"), ("S", None), ("R", None)):
        ((found,),) = next(cells(["STATE"], [row(state=state)], ABOUT))
        assert (found.style if isinstance(found, Span) else None) == style


# --- tables

ON = Accounting(True, True, False, False, True)
HOSTILE = row(comm="a\x1b[31m\r\n\u202eb", cgroup="/x\x07")
HERD = Herd(
    lock="futex 10:0x10",
    waiters=1000,
    owner=None,
    kind="futex",
    address=Address(16),
    pids=(10,),
    min_age_ns=20 * MS,
    max_age_ns=30 * MS,
    nvcsw_median=6,
    confidence="one dump",
)
GROUPS = (
    TaskGroup("5", 2, 3, 3 << 30, 1 << 29, 90 * SECOND, 0.123),
    TaskGroup("-", 1, 1, 0, 0, 0, 0.0),
)
CLASSES = (
    ClassGroup("LCK", 2, 100, 90 * SECOND, 2 * SECOND, None, None),
    ClassGroup("TMR", 1, 1, SECOND, SECOND, None, None),
)
IN_CLASSES = (
    ClassGroup("LCK", 2, 100, 90 * SECOND, 2 * SECOND, 300 * SECOND, 5 * MS),
    ClassGroup("USR", 0, 0, 0, 0, SECOND, 0),
    ClassGroup("-", 0, 0, 0, 0, 40 * MS, 0),
)
STACKS = (
    StackGroup(
        frames=("schedule", "wait [jbd2]", "entry"),
        task_class="DSK",
        pids=(9, 3, 5),
        min_age_ns=1500,
        max_age_ns=SECOND,
        ages_ns=(1500, SECOND, 2999),
        comms=("a b;c", "cat", "a b;c"),
    ),
    StackGroup(("schedule",), "TMR", tuple(range(11)), 5, 5, (5,) * 11, ("x\n",) * 11),
)
LOAD = Load(
    1,
    11,
    (
        LoadGroup(
            *(
                "D",
                "DSK",
                "cat",
                WaitTarget(kind="disk", device="vda 254:0"),
                "ext4_read",
            ),
            pids=tuple(range(11)),
            max_age_ns=5 * SECOND,
        ),
        LoadGroup("R", "SYS", "a\x1bb", None, None, (12,), 1000),
    ),
)
STATES = tuple(
    StateTime(f"STATE_{bound}", "gelato", ns, bound, threads, ns, f"why {bound}")
    for bound, ns, threads in (
        ("exact", 90 * SECOND, 5),
        ("estimate", SECOND, 0),
        ("upper", 0, 1),
        ("lower", 5, 2000),
        ("none", None, None),
    )
)
NOBODY = replace(REPORT.totals, processes=0, threads=0, states={}, classes={})
LOST = replace(REPORT.totals, load_averages=None, states={}, classes={}, ram_bytes=None)
SWITCHED = replace(REPORT, accounting=ON, tasks=(ROW, row(breakdown=SPLIT)))
WITHIN = replace(
    SWITCHED,
    interval_ns=5 * SECOND,
    tasks=(row(off_cpu=PARTS, waited=WAITED),) * 21,
    taken_at_ns=None,
)
THREADS = replace(REPORT, per_thread=True)
EVIL_GROUP = replace(GROUPS[0], key="/\x1b")
DEAD = replace(REPORT, totals=replace(REPORT.totals, classes={"ZMB": 1}))
WHY = (Why("LAT", "upper", "Because."), Why("SIG", "not kept", "No."))
NOTE = Note("lost", "something\x1b is lost")


def screens() -> Screens:
    """Names are escaped; columns depend on the options and the kernel's accounting."""
    one = replace(WITHIN, tasks=WITHIN.tasks[:1])
    stop = replace(LASTS, stopped_ns=LASTS.untold_ns, untold_ns=0)
    unkept = replace(WITHIN, accounting=REPORT.accounting)
    stopped = replace(unkept, tasks=(row(off_cpu=PARTS, waited=stop),))
    confirmed = replace(HERD, owner=7, confidence="confirmed")
    waker = Waker(pid=7, tgid=10, comm="waker\x1b", frames=FRAMES)
    again = replace(confirmed, waker=waker, wakeups=5170, in_vain=0.98, woken=3)
    hostile = replace(REPORT, tasks=(HOSTILE,), cgroups=(EVIL_GROUP,))
    states, load = replace(REPORT, states=STATES), replace(REPORT, load=LOAD)
    stacks = replace(REPORT, stacks=STACKS)
    return {
        "usual": blocks(REPORT),
        "microstates": blocks(REPORT, microstates=True),
        "microstates of threads": blocks(THREADS, microstates=True),
        "microstates, one dead": blocks(DEAD, microstates=True),
        "microstates, split": blocks(SWITCHED, microstates=True),
        "microstates, an interval": blocks(one, microstates=True),
        "an interval": blocks(WITHIN, columns=("PID", "LIFE")),
        "an interval, all rows": blocks(WITHIN, columns=("PID", "LIFE"), rows=21),
        "columns": blocks(REPORT, microstates=True, columns=("LIFE", "COMMAND")),
        "children": blocks(replace(REPORT, tasks=(row(children=Children(*range(6))),))),
        "groups": blocks(replace(REPORT, users=GROUPS, cgroups=(GROUPS[1],))),
        "groups by class": blocks(replace(REPORT, by={"class": CLASSES, "ns": GROUPS})),
        "groups by class, an interval": blocks(replace(one, by={"class": IN_CLASSES})),
        "nobody": blocks(replace(REPORT, tasks=(), totals=NOBODY, selects=True)),
        "microstates, an interval with a stop": blocks(stopped, microstates=True),
        "what is lost": blocks(replace(REPORT, totals=LOST, users=GROUPS, load=LOAD)),
        "herds and notes": blocks(replace(REPORT, herds=(HERD,), notes=(NOTE,))),
        "a herd that is woken": blocks(replace(WITHIN, tasks=(), herds=(again,))),
        "why": blocks(replace(REPORT, why=WHY)),
        "load": blocks(load),
        "states": blocks(states),
        "stacks": blocks(stacks),
        "stacks in full": blocks(stacks, verbose=True),
        "stacks, the first": blocks(stacks, rows=1),
        "hostile": blocks(hostile, columns=("COMMAND", "CGROUP")),
    }


def test_golden_views(golden: Golden) -> None:
    check_screens(golden, "prstat/views", screens())


@pytest.mark.parametrize("weight", ["count", "age"])
def test_golden_folded(weight: str, golden: Golden) -> None:
    """Frames are outermost first; separators of the format are replaced in names."""
    stacks = folded(replace(REPORT, stacks=STACKS), weight)
    golden(f"prstat/folded-{weight}", printed(stacks))
