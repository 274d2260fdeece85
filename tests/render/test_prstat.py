# SPDX-License-Identifier: LGPL-2.1-or-later

"""prstat's cells and tables, of reports made by hand."""

import io
import os
import pwd
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from msatools.kernel.accounting import Accounting
from msatools.kernel.report import Note
from msatools.locks.model import Herd, On
from msatools.prstat.model import (
    Children,
    Group,
    OffCpu,
    PrstatReport,
    Split,
    StackGroup,
    TaskRow,
    Totals,
    Why,
)
from msatools.render import show
from msatools.render.blocks import Span
from msatools.render.prstat import blocks, folded
from msatools.render.prstat_columns import COLUMNS, Context, share, write
from msatools.target.model import Address, Target

MS = 1_000_000
SECOND = 1000 * MS

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
TARGET = Target(
    path="vmcore",
    kind="elf",
    live=False,
    release="6.12",
    arch="x86_64",
    page_size=4096,
    types="btf",
    dump_level=None,
    truncated=False,
    crash=None,
    format="ELF",
)
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
ABOUT = Context(names=False, per_thread=True, precise_cputime=False, full=False)


def cell(name: str, about: Context = ABOUT, **changes: Any) -> str:
    found = write(name, replace(ROW, **changes), about)
    return found.text if isinstance(found, Span) else found


def printed(report: PrstatReport, **options: Any) -> list[str]:
    out = io.StringIO()
    show(blocks(report, **options), out)
    return out.getvalue().splitlines()


# --- cells


@pytest.mark.parametrize(
    ("ns", "of_ns", "text"),
    [
        (0, 1000, "0.0"),
        (1, 10**6, "0.0"),
        (237, 1000, "23.7"),
        (9994, 10_000, "99.9"),
        (9995, 10_000, "100"),
        (1000, 1000, "100"),
        (3, 1, "300"),
        (1001, 1, "100K"),
        (5, 0, "-"),
        (0, 0, "-"),
    ],
)
def test_share(ns: int, of_ns: int, text: str) -> None:
    assert share(ns, of_ns) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PID", "10/12"),
        ("TGID", "10"),
        ("PPID", "1"),
        ("USER", "1000"),
        ("SIZE", "8.0M"),
        ("STATE", "S"),
        ("TIME", "0:01.50"),
        ("CPU", "15.0"),
        ("NLWP", "3"),
        ("CGROUP", "/a"),
        ("NOW", "LCK"),
        ("FOR", "5.0s"),
        ("ON", "-"),
        ("USR", "~10.0"),
        ("SYS", "~5.0"),
        ("LAT", "2.5"),
        ("OFF", "82.5"),
        ("ZMB", "0.0"),
        ("VCX", "5"),
        ("ICX", "4.1K"),
        ("MIN", "0"),
        ("SCL", "-"),
        ("SIG", "-"),
        ("TRP", "-"),
        ("OFF/VCX", "1.6s"),
        ("LIFE", "10.0s"),
        ("PROCESS/NLWP", "cat"),
    ],
)
def test_cell(name: str, text: str) -> None:
    assert cell(name) == text


def test_every_column_of_what_is_not_known() -> None:
    """A dash, and never 0."""
    nothing = dict.fromkeys(
        ("ppid", "uid", "cgroup", "threads", "size_bytes", "rss_bytes")
    )
    row = {**nothing, "lifetime_ns": 0, "sleeps": 0}
    dashes = {name for name in COLUMNS if cell(name, **row) == "-"}
    assert dashes == {
        *("PPID", "USER", "CGROUP", "NLWP", "SIZE", "RSS", "ON"),
        *("CPU", "USR", "SYS", "LAT", "OFF", "ZMB", "OFF/VCX", "OFF-BY"),
        *("IOW", "BLK", "SLP", "STP", "COV"),
        *("BIO", "SWP", "RCL", "THR", "CMP", "COW", "IRQ", "SCL", "SIG", "TRP"),
        *("CUSR", "CSYS", "CVCX", "CICX", "CMIN", "CMAJ"),
    }


def test_marks_of_time_on_the_cpu() -> None:
    """Ticks are samples; but the kernel's own threads have one mode."""
    assert cell("SYS", kthread=True) == "5.0"
    assert cell("SYS", replace(ABOUT, precise_cputime=True)) == "5.0"
    assert cell("SYS", system_ns=0) == "0.0"
    assert cell("SYS", lifetime_ns=0) == "-"


def test_marks_of_latency() -> None:
    bound = {"latency_bound": "upper"}
    assert (cell("LAT", **bound), cell("OFF", **bound)) == ("<2.5", ">82.5")
    assert cell("OFF/VCX", **bound) == ">1.6s"
    assert cell("LAT", latency_ns=1000, **bound) == "0.0"
    # What is all there can be, at this precision.
    assert cell("OFF", latency_ns=1000, **bound) == "82.5"


def test_marks_of_ages() -> None:
    assert cell("FOR", class_age_bound="upper") == "<5.0s"
    assert cell("FOR", class_age_bound="estimate") == "~5.0s"
    assert cell("ZMB", zombie_ns=SECOND) == "~10.0"


def test_split() -> None:
    cells = [
        cell(name, breakdown=SPLIT)
        for name in ("IOW", "BLK", "SLP", "STP", "COV", "BIO", "SWP", "RCL")
    ]
    assert cells == ["10.0", "20.0", "52.5", "0.0", "100", "10.0", "-", "-"]


def test_split_that_is_not_all() -> None:
    part = replace(SPLIT, coverage=0.4, stopped_ns=None)
    cells = [cell(name, breakdown=part) for name in ("IOW", "BLK", "SLP", "STP", "COV")]
    assert cells == [">10.0", ">20.0", ">52.5", "-", "40"]
    none = replace(SPLIT, sleep_ns=None, coverage=None)
    assert [cell(name, breakdown=none) for name in ("SLP", "COV")] == ["-", "-"]


def test_split_of_nothing() -> None:
    """Of no time off the CPU, no share is covered."""
    empty = Split(0, 0, 0, 0, {}, 0.0)
    cells = [
        cell(name, breakdown=empty, off_cpu_ns=1000) for name in ("COV", "SLP", "IOW")
    ]
    assert cells == ["-", "0.0", "0.0"]


def test_off_by_class() -> None:
    parts = (
        OffCpu("LCK", 5 * SECOND, 0),
        OffCpu("TMR", SECOND, SECOND // 5),
        OffCpu("POL", 1000, 0),
        OffCpu(None, SECOND, 0),
    )
    assert cell("OFF-BY", off_cpu=parts) == "LCK 50.0, TMR ~10.0+-2.0, ? 10.0"
    assert cell("OFF-BY", off_cpu=()) == "-"


def test_processes_and_threads() -> None:
    process = replace(ABOUT, per_thread=False)
    assert cell("PID", process) == "12"
    assert cell("PID", tgid=12) == "12"
    assert cell("PROCESS/NLWP", process) == "cat/3"
    assert cell("PROCESS/NLWP", process, threads=None) == "cat"


def test_users_have_names_on_the_machine_itself() -> None:
    here = replace(ABOUT, names=True)
    assert cell("USER", here, uid=os.getuid()) == pwd.getpwuid(os.getuid()).pw_name
    assert cell("USER", here, uid=4_000_000_000) == "4000000000"
    assert cell("USER", here, uid=None) == "-"


def test_children() -> None:
    children = Children(SECOND, 61 * SECOND, 3, 4000, 5, 6)
    names = ("CUSR", "CSYS", "CVCX", "CICX", "CMIN", "CMAJ")
    cells = [cell(name, children=children) for name in names]
    assert cells == ["0:01.00", "1:01.00", "3", "4.0K", "5", "6"]


def test_what_is_waited_on() -> None:
    """Only paths are cut, and at their beginning; with -v they are whole."""
    path = "/srv/" + "long/" * 20 + "name"
    full = replace(ABOUT, full=True)
    lock = On(kind="lock", type="rwsem", name="i_rwsem", path=path, waiters=1234)
    assert cell("ON", on=lock) == (
        "rwsem i_rwsem .../long/long/long/long/name (1,234 waiters)"
    )
    assert cell("ON", full, on=lock) == f"rwsem i_rwsem {path} (1,234 waiters)"
    one, other = "127.0.0.1:46472", "127.0.0.1:34721"
    socket = On(kind="socket", inode=1483, type="tcp", local=one, peer=other)
    assert cell("ON", on=socket) == f"socket:[1483] tcp {one} -> {other}"
    unix = On(kind="socket", inode=1, type="unix stream", local=path)
    assert cell("ON", on=unix) == "socket:[1] unix stream .../long/long/long/long/name"
    short = On(kind="futex", address=Address(0x4C80F0), waiters=50)
    assert cell("ON", on=short) == "futex 0x4c80f0 (50 waiters)"


def test_bad_states_stand_out() -> None:
    for state, style in (("D", "warn"), ("Z", "warn"), ("S", None), ("R", None)):
        found = write("STATE", replace(ROW, state=state), ABOUT)
        assert (found.style if isinstance(found, Span) else None) == style


# --- tables


def test_usual_view() -> None:
    head, names, row, total, now = printed(REPORT)
    assert head.startswith("6.12  vmcore (ELF)  types: btf  now 1.000 s, ")
    assert head.endswith("schedstats off, delayacct off")
    assert names.split() == [
        *("PID", "USER", "SIZE", "RSS", "STATE", "PRI", "NICE", "TIME", "CPU", "NOW"),
        *("FOR", "PROCESS/NLWP"),
    ]
    assert row.split()[-3:] == ["LCK", "5.0s", "cat/3"]
    assert total == (
        "Total: 1 process, 3 threads (3 S), load averages: 1.00, 0.50, 0.25"
    )
    assert now == "Now: 3 LCK"


def names_of(report: PrstatReport, **options: Any) -> list[str]:
    return printed(report, **options)[1].split()


def test_columns_are_by_what_is_kept() -> None:
    on = replace(REPORT, accounting=Accounting(True, False, False, False, True))
    assert "SLP" not in names_of(REPORT, microstates=True)
    assert {"IOW", "BLK", "SLP", "STP", "COV"} <= set(names_of(on, microstates=True))
    both = replace(on, accounting=Accounting(True, True, False, False, True))
    rows = (ROW, replace(ROW, breakdown=SPLIT))
    names = names_of(replace(both, tasks=rows), microstates=True)
    assert [name for name in names if name in ("BIO", "SWP", "RCL")] == ["BIO", "SWP"]
    within = names_of(replace(both, interval_ns=SECOND), microstates=True)
    assert "OFF-BY" in within
    assert not {"SLP", "BIO"} & set(within)
    threads = names_of(replace(REPORT, per_thread=True), microstates=True)
    assert (threads[0], threads[-1]) == ("PID/TID", "THREAD")


def test_columns_of_ones_own() -> None:
    lines = printed(REPORT, microstates=True, columns=("LIFE", "COMMAND"))
    assert lines[1:3] == [" LIFE  COMMAND", "10.0s  cat"]


def test_children_have_a_view() -> None:
    row = replace(ROW, children=Children(1, 2, 3, 4, 5, 6))
    names = names_of(replace(REPORT, tasks=(row,)))
    assert names[1:-1] == ["CUSR", "CSYS", "CVCX", "CICX", "CMIN", "CMAJ"]


def test_hostile_names() -> None:
    row = replace(ROW, comm="a\x1b[31m\r\n\u202eb", cgroup="/x\x07")
    report = replace(
        REPORT, tasks=(row,), cgroups=(Group("/\x1b", 1, 1, 0, 0, 0, 0.0),)
    )
    for options in ({}, {"microstates": True}, {"columns": ("COMMAND", "CGROUP")}):
        lines = printed(report, **options)
        assert all(line.isprintable() for line in lines)
        assert any("a\\x1b[31m\\x0d\\x0a\\u202eb" in line for line in lines)


def test_groups() -> None:
    groups = (
        Group("5", 2, 3, 3 << 30, 1 << 29, 90 * SECOND, 0.123),
        Group("-", 1, 1, 0, 0, 0, 0.0),
    )
    lines = printed(replace(REPORT, users=groups))
    cells = [line.split() for line in lines if line.endswith(("USER", " 5", " -"))]
    assert cells[-2:] == [
        ["2", "3", "3.0G", "512M", "50.0%", "90.0s", "12.3%", "5"],
        ["1", "1", "0K", "0K", "0.0%", "0us", "0.0%", "-"],
    ]
    unknown = replace(REPORT.totals, ram_bytes=None)
    lines = printed(replace(REPORT, totals=unknown, users=groups))
    assert any(line.split()[4:5] == ["-"] for line in lines)


def test_averages_that_are_lost() -> None:
    totals = replace(REPORT.totals, load_averages=None, states={}, classes={})
    lines = printed(replace(REPORT, totals=totals))
    assert lines[-2:] == ["Total: 1 process, 3 threads", "Now: -"]


def test_herds_and_notes() -> None:
    herd = Herd(
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
    note = Note("lost", "something\x1b is lost")
    lines = printed(replace(REPORT, herds=(herd,), notes=(note,)))
    assert lines[-2:] == [
        "HERD futex 10:0x10: 1,000 waiters woken together, asleep for 20ms..30ms after "
        "6 sleeps each (median); owner -; by one look",
        "note: something\\x1b is lost",
    ]


def test_why_is_all_that_is_shown() -> None:
    reasons = (Why("LAT", "upper", "Because."), Why("SIG", "not kept", "No."))
    assert printed(replace(REPORT, why=reasons)) == [
        "LAT  < upper bound",
        "  Because.",
        "SIG  - not kept",
        "  No.",
    ]


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


def folded_lines(weight: str) -> Iterator[str]:
    out = io.StringIO()
    show(folded(replace(REPORT, stacks=STACKS), weight), out)
    yield from out.getvalue().splitlines()


def test_folded() -> None:
    """Outermost first; in names no character that the format has for itself."""
    assert list(folded_lines("count")) == [
        "a_b:c;entry;wait [jbd2];schedule 2",
        "cat;entry;wait [jbd2];schedule 1",
        "x\\x0a;schedule 11",
    ]
    assert list(folded_lines("age"))[:2] == [
        "a_b:c;entry;wait [jbd2];schedule 3",
        "cat;entry;wait [jbd2];schedule 1000000",
    ]


def test_stacks() -> None:
    report = replace(REPORT, stacks=STACKS)
    lines = printed(report)
    assert lines[1:6] == [
        "3 threads  DSK  2us..1.0s  a b;c, cat: 9 3 5",
        "    schedule",
        "    wait [jbd2]",
        "    entry",
        "",
    ]
    assert lines[6] == "11 threads  TMR  0us  x\\x0a: 0 1 2 3 4 5 6 7 +3"
    assert "x\\x0a: 0 1 2 3 4 5 6 7 8 9 10" in "\n".join(printed(report, verbose=True))
