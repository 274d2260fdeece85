# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-cpus, of reports made by hand."""

import io
import time
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from msatools.cpus.model import Cpu, CpuSet, CpusReport, Queued, State
from msatools.kernel.report import Note
from msatools.render import show
from msatools.render.blocks import Block, Span, Table, Text
from msatools.render.cpus import COLUMNS, View, blocks
from msatools.render.cpuwords import amount, percent
from msatools.target.model import Crash
from tests.cpus.madecpus import (
    NOTHING,
    bound,
    cpu,
    cpuset,
    fifo,
    finding,
    irq,
    offline,
    processor,
    queue,
    queued,
    report,
    running,
    tasks,
    times,
    vector,
)
from tests.locks.madelocks import SECOND, TARGET

VIEWS: tuple[View, ...] = get_args(View)

ON: tuple[State, ...] = ("on",)
CPUS = [
    cpu(0, minf=12_345, mjf=27, xcal=990, tlb=1, **times(usr=20, sys=30, idl=50)),
    cpu(1, runq=8, current=running(600, "hog"), state=ON, **times(usr=99.5, sys=0.5)),
    offline(2),
    cpu(
        3,
        set="/quiet",
        state=("on", "no-intr", "isolated", "nohz_full", "rcu_nocb"),
        current=running(900, "pinned"),
        **times(usr=90, sys=9, irq=0.6, wt=0.2, st=0.2),
    ),
]
SETS = [
    cpuset("default", [0, 1]),
    cpuset("/quiet", [3], irqs_routed=(28,), irqs_allowed=(25, 28), irqs_managed=1),
    cpuset("/limit", [0], kind="limit", source="cpuset"),
]
BOTH = report(CPUS, SETS)


def printed(made: CpusReport, **options: Any) -> list[str]:
    out = io.StringIO()
    show(blocks(made, **options), out)
    return out.getvalue().splitlines()


def body(made: CpusReport, **options: Any) -> list[str]:
    """Give what is below the head."""
    return printed(made, **options)[2 if options.get("verbose") else 1 :]


def table(made: CpusReport, header: str, **options: Any) -> list[str]:
    """Give a table, by what the line of its headers begins with."""
    lines = body(made, **options)
    start = next(n for n, x in enumerate(lines) if x.lstrip().startswith(header))
    return lines[start:]


def spans(made: CpusReport, **options: Any) -> list[Span]:
    """Give all pieces of text that have a style."""

    def of(block: Block) -> list[Any]:
        if isinstance(block, Text):
            return list(block.spans)
        assert isinstance(block, Table)
        return [cell for row in block.rows for cell in row]

    cells = [cell for block in blocks(made, **options) for cell in of(block)]
    return [cell for cell in cells if isinstance(cell, Span)]


# --- head and foot


def test_head() -> None:
    head = "6.12  vmcore (ELF)  types: btf  "
    assert printed(BOTH)[0] == head + "3 CPUs online of 4"
    made = replace(BOTH, load=(3.1, 2.884, 10), taken_at_ns=35_072_000_000)
    assert printed(made)[0] == (
        head + "3 CPUs online of 4, load 3.10 2.88 10.00, now 35.072 s"
    )
    made = replace(report([cpu(0)]), interval_ns=5 * SECOND)
    assert printed(made)[0] == (
        head + "1 CPU online, interval 5.000 s, counts per second"
    )


def test_head_of_some_cpus() -> None:
    """It does not say that no others are online."""
    made = report([cpu(3)], coverage={"cpus": 256})
    assert printed(made)[0].endswith("  1 of 256 CPUs")


def test_panic() -> None:
    target = replace(TARGET, crash=Crash("Oops", 1, 600, "hog"))
    made = replace(BOTH, target=target, run_queues=(queue(1, panicked=True),))
    assert printed(made)[1] == "crashed: Oops, CPU 1, pid 600 hog"
    assert Span("panicked", "bad") in spans(made)


@pytest.mark.parametrize("view", VIEWS)
def test_foot(view: View) -> None:
    made = replace(
        BOTH,
        coverage={"cpus": 4, "irqs": 57, "tasks": 0, "irq_affinity_unreadable": 2},
        notes=(Note("lost", "where some interrupts may go is lost"),),
    )
    assert printed(made, view=view)[-2:] == [
        "coverage: 4 cpus, 57 irqs; 2 irq affinity unreadable",
        "note: where some interrupts may go is lost",
    ]


def test_coverage_is_told_if_something_is_lost() -> None:
    made = replace(BOTH, coverage={"cpus": 4, "irqs_broken": 0})
    assert not any(line.startswith("coverage") for line in printed(made))
    assert printed(made, verbose=True)[-1] == "coverage: 4 cpus; 0 lost"


# --- sets


def test_sets() -> None:
    assert body(BOTH)[:3] == [
        "SET      CPUS  KIND      FROM              IRQS",
        "default  0-1   root      /                 3 routed, 4 allowed",
        "/quiet   3     isolated  cpuset partition  1 routed, 2 allowed (1 managed)",
    ]


@pytest.mark.parametrize("options", [{"view": "sets"}, {"verbose": True}])
def test_limits_are_sets_on_request(options: dict[str, Any]) -> None:
    assert body(BOTH, **options)[3] == (
        "/limit   0     limit     cpuset            0 routed"
    )


@pytest.mark.parametrize("view", VIEWS)
def test_default_set_alone_is_no_table(view: View) -> None:
    made = report([cpu(0)], [SETS[0], SETS[2]], irqs=())
    assert not any(line.startswith("SET") for line in body(made, view="cpus"))
    made = report([cpu(0)], irqs=())
    assert not any(line.startswith("SET") for line in body(made, view=view))


def irqs_of(*sets: CpuSet, **others: Any) -> list[str]:
    lines = table(report([cpu(0)], sets, **others), "SET")
    at = lines[0].index("IRQS")
    return [line[at:] for line in lines[1 : 1 + len(sets)]]


def test_interrupts_of_sets() -> None:
    """All of those that may go anywhere, none, or some."""
    everywhere = cpuset("default", [0], irqs_routed=(1,), irqs_allowed=(1, 2, 3))
    some = cpuset("/a", [1], irqs_allowed=(2, 3), irqs_managed=2)
    none = cpuset("/b", [2])
    assert irqs_of(everywhere, some, none) == [
        "all",
        "0 routed, 2 allowed (2 managed)",
        "0 routed",
    ]
    # What is not known to be all is not called so.
    assert irqs_of(everywhere, some, coverage={"cpus": 9})[0] == "1 routed, 3 allowed"
    assert irqs_of(cpuset("/b", [2]), cpuset("/c", [3])) == ["0 routed", "0 routed"]


INVALID = cpuset(
    "/gone",
    [0, 1],
    kind="invalid",
    asked=(4,),
    source="cpuset partition (root)",
    reason="Parent is not a partition root",
)


@pytest.mark.parametrize("view", VIEWS)
def test_invalid_partition(view: View) -> None:
    made = report([cpu(0), cpu(1)], [cpuset("default", [0, 1]), INVALID], irqs=())
    assert body(made, view=view)[:3] == [
        "SET      CPUS  KIND     FROM                     IRQS      WHY",
        "default  0-1   root     /                        all",
        "/gone    0-1   invalid  cpuset partition (root)  0 routed  "
        "Parent is not a partition root",
    ]
    assert Span("invalid", "bad") in spans(made, view=view)


def test_set_of_no_cpu_and_of_many() -> None:
    odd = cpuset("/odd", range(1, 256, 2))
    made = report([cpu(0)], [cpuset("default", []), odd])
    assert [line.split()[1] for line in table(made, "SET")[1:3]] == [
        "none",
        "1,3,5,7,9,11,13,15",
    ]
    assert table(made, "SET")[2].split()[2] == "+120"
    whole = table(made, "SET", verbose=True)[2]
    assert whole.split()[1] == ",".join(map(str, range(1, 256, 2)))


# --- mpstat


def test_cpus() -> None:
    assert table(BOTH, "CPU") == [
        "CPU  SET      STATE                        minf  mjf  xcal  tlb  intr  soft"
        "   csw  runq   usr   sys  irq   wt   st   idl  CURRENT",
        "  0  default  on                          12.3K   27   990    1  1.2K   567"
        "  4.1K     0  20.0  30.0  0.0  0.0  0.0  50.0  idle",
        "  1  default  on                              0    0     0    0  1.2K   567"
        "  4.1K     8  99.5   0.5  0.0  0.0  0.0   0.0  hog",
        "  3  /quiet   isolated,nohz_full,no-intr      0    0     0    0  1.2K   567"
        "  4.1K     0  90.0   9.0  0.6  0.2  0.2   0.0  pinned",
        "offline: 2",
    ]


def test_cpus_without_sets_fit_a_narrow_terminal() -> None:
    lines = body(report(CPUS[:2]))
    assert lines[0].split()[:3] == ["CPU", "STATE", "minf"]
    assert max(map(len, lines)) <= 100


def test_counts_of_an_interval_are_of_a_second() -> None:
    made = report(
        [cpu(0, minf=206_295, mjf=1, xcal=2, tlb=0, intr=10**7, soft=None)],
        interval_ns=5 * SECOND,
    )
    cells = dict(zip(*(line.split() for line in body(made)), strict=True))
    told = ("minf", "mjf", "xcal", "tlb", "intr", "soft", "runq")
    assert [cells[name] for name in told] == [
        *("41259", "<1", "<1", "0", "2.0M", "-", "0"),
    ]


@pytest.mark.parametrize(
    ("number", "interval_ns", "text"),
    [
        (0, None, "0"),
        (4125, None, "4.1K"),
        (0, SECOND, "0"),
        (1, 2 * SECOND, "1"),
        (1, 3 * SECOND, "<1"),
        (99_999, SECOND, "99999"),
        (100_000, SECOND, "100K"),
        (1, SECOND // 10, "10"),
        (5, 0, "-"),
        (None, None, "-"),
        (None, SECOND, "-"),
    ],
)
def test_amount(number: int | None, interval_ns: int | None, text: str) -> None:
    assert amount(number, interval_ns) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0"), (0.7104, "71.0"), (0.9994, "99.9"), (1, "100"), (None, "-")],
)
def test_percent(share: float | None, text: str) -> None:
    assert percent(share) == text


def shown(one: Cpu, *names: str, **others: Any) -> list[str]:
    """Give the cells of a CPU in some columns."""
    rows = table(report([one], **others), "CPU", columns=("cpu", *names))
    return rows[1].split()[1:]


def test_guests() -> None:
    """A column of their own where there are any; their time is no user's."""
    assert "gst" not in body(report([cpu(0)]))[0]
    guest = cpu(0, **times(usr=10, gst=70, idl=20))
    head, row, _ = body(report([guest, cpu(1)]))
    assert dict(zip(head.split(), row.split(), strict=True))["gst"] == "70.0"
    assert shown(guest, "usr", "gst", "idl") == ["10.0", "70.0", "20.0"]


def test_parts_of_other_times_do_not_count_twice() -> None:
    one = cpu(0, **times(usr=50, nice=20, irq=50, softirq=40))
    assert shown(one, "usr", "nice", "irq", "softirq") == [
        *("50.0", "20.0", "50.0", "40.0"),
    ]


@pytest.mark.parametrize("lost", ["usr_ns", "sys_ns", "irq_ns", "wt_ns", "idl_ns"])
def test_no_share_of_what_is_not_known_whole(lost: str) -> None:
    nothing: dict[str, Any] = {lost: None}
    one = replace(CPUS[0], **nothing)
    names = ("usr", "sys", "irq", "wt", "st", "idl")
    assert shown(one, *names) == ["-"] * 6


def test_shares_without_steal_and_guests() -> None:
    one = replace(CPUS[0], st_ns=None, gst_ns=None)
    assert shown(one, "usr", "st", "gst", "idl") == ["20.0", "-", "-", "50.0"]


def test_no_time() -> None:
    """As of a CPU that was offline for all of an interval."""
    assert shown(cpu(0, **times()), "usr", "idl") == ["-", "-"]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_known(view: View, verbose: bool) -> None:
    """What is not kept is a dash, never 0."""
    none: dict[str, Any] = dict.fromkeys(f.name for f in fields(processor(0)))
    made = report(
        [
            cpu(
                0,
                **{**NOTHING, "state": ON},
                processor=replace(processor(0), **(none | {"siblings": ()})),
            )
        ],
        [cpuset("default", [0], nodes=(), root_domain=None, balanced=None)],
        run_queues=[queue(0, current=None, lag_ns=None, ticked_ns=None)],
        irqs=(irq(1, {}, name="", chip=None),),
    )
    text = "\n".join(body(made, view=view, verbose=verbose))
    assert "None" not in text
    if view == "cpus":
        assert table(made, "CPU", verbose=verbose)[1].split() == [
            *("0", "on", *["-"] * 15),
        ]
    if view == "irqs" and verbose:
        row = table(made, "IRQ", view=view, verbose=True)[1]
        assert row.split() == ["1", "-", "-", "none", "none", "0", "-"]
    if view == "info":
        assert table(made, "CPU", view=view)[1].split() == ["0", "on", *["-"] * 9]


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ((), "on"),
        (("on",), "on"),
        (("on", "idle"), "on"),
        (("on", "no-intr", "isolated", "idle"), "isolated,no-intr"),
        (("on", "nohz_full", "rcu_nocb"), "nohz_full"),
        (("on", "rcu_nocb"), "rcu_nocb"),
        (("on", "isolated", "stopped", "inactive"), "stopped,inactive,isolated"),
    ],
)
def test_states(states: tuple[State, ...], text: str) -> None:
    """The most telling ones first, without those that are implied."""
    assert shown(cpu(0, state=states), "state", "current") == [text, "idle"]


def test_idle_is_told_once() -> None:
    assert shown(cpu(0), "state") == ["idle"]
    assert shown(cpu(0, current=None), "state", "current") == ["idle", "-"]
    at_work = cpu(0, state=ON, current=running(5))
    assert shown(at_work, "state", "current") == ["on", "task-5"]


def test_every_state_is_told() -> None:
    for state in get_args(State):
        given = offline(0) if state == "off" else cpu(0, state=(state,))
        assert shown(given, "state") == [state]


def test_alarming_states() -> None:
    made = report([cpu(0, state=("on", "isolated", "inactive"))])
    assert Span("inactive,isolated", "warn") in spans(made)


def test_long_names_of_sets() -> None:
    name = f"/kubepods.slice/pod{'0' * 40}/end"
    made = report([cpu(0, set=name)], [cpuset("default", []), cpuset(name, [0])])
    assert table(made, "CPU")[1].split()[1] == f"…{'0' * 15}/end"
    assert table(made, "SET")[2].split()[0] == name
    assert table(made, "CPU", verbose=True)[1].split()[1] == name


# --- columns


def test_columns_are_those_of_the_model() -> None:
    names = {field.name.removesuffix("_ns") for field in fields(Cpu)}
    assert set(COLUMNS) == names - {"online", "processor"}


def test_some_columns() -> None:
    assert table(BOTH, "CPU", columns=("cpu", "csw", "current"))[:4] == [
        "CPU   csw  CURRENT",
        "  0  4.1K  idle",
        "  1  4.1K  hog",
        "  3  4.1K  pinned",
    ]


def test_all_columns() -> None:
    made = report([cpu(0, icsw=1500, migr=3)])
    lines = body(made, columns=["all"])
    assert [word.lower() for word in lines[0].split()] == list(COLUMNS)
    cells = dict(zip(COLUMNS, lines[1].split(), strict=True))
    assert [cells[name] for name in ("icsw", "migr", "smtx", "srw", "syscl")] == [
        *("1.5K", "3", "-", "-", "-"),
    ]
    assert lines[2:] == [
        "smtx, srw, syscl: Linux counts none by CPU",
        "icsw, migr: from the tasks that are here, or were here last",
    ]


def test_reasons_are_told_of_columns_that_were_asked_for() -> None:
    assert body(report([cpu(0)]), columns=("cpu", "srw"))[2:] == [
        "srw: Linux counts none by CPU"
    ]
    assert len(body(report([cpu(0)]))) == 2


# --- which CPUs


def test_offline_cpus() -> None:
    """A line for all, or rows on request."""
    made = report([cpu(0), offline(1), offline(4), offline(5)])
    assert body(made)[-1] == "offline: 1,4-5"
    rows = table(made, "CPU", verbose=True)
    assert rows[3].split() == ["4", "off", *["-"] * 15]
    assert not any("offline" in line for line in rows)
    # Counts from before it went offline are kept.
    assert shown(cpu(1, online=False, state=("off",)), "intr") == ["1.2K"]


def test_offline_cpu_that_was_asked_for() -> None:
    made = report([offline(4)], [], coverage={"cpus": 8})
    assert body(made)[1].split()[:2] == ["4", "off"]
    assert body(report([offline(4)], []))[1].split()[:2] == ["4", "off"]


def test_rows() -> None:
    lines = table(BOTH, "CPU", rows=1)
    assert lines[2:] == ["… 2 more CPUs: -n COUNT shows them", "offline: 2"]
    assert "… 1 more CPU: -n COUNT shows it" in table(BOTH, "CPU", rows=2)


def test_many_cpus() -> None:
    """Those that do nothing are no rows if there are very many."""
    cpus = [cpu(n) for n in range(256)]
    cpus[7] = cpu(7, state=ON, current=running(5), **times(usr=1, idl=99))
    cpus[8] = cpu(8, **times(usr=1, idl=99))
    cpus[9] = cpu(9, runq=1)
    cpus[10] = cpu(10, state=("on", "inactive", "idle"))
    cpus[11] = cpu(11, **{**NOTHING, "current": running()})
    made = report(cpus)
    *rows, last = body(made)[1:]
    assert [row.split()[0] for row in rows] == ["7", "8", "9", "10", "11"]
    assert last == "… 251 CPUs idle 100 %: 0-6,12-255: -v shows them"
    for options in ({"verbose": True}, {"rows": 300}, {"columns": ("cpu", "idl")}):
        assert len(table(made, "CPU", **options)) >= 257
    assert len(body(report(cpus[:128]))) == 129


def test_no_row_at_all() -> None:
    assert body(report([], [])) == []
    assert body(report([cpu(n) for n in range(200)])) == [
        "… 200 CPUs idle 100 %: 0-199: -v shows them"
    ]


# --- run queues


def queues(*made: Any, rows: int | None = None) -> list[str]:
    """Give what is told of run queues."""
    lines = body(report([cpu(0)], run_queues=made), verbose=True, rows=rows)
    return lines[2:-1]


def test_run_queues() -> None:
    deadline = {"sched_class": "deadline", "policy": "DEADLINE", "nice": None}
    waiting = (
        queued(30, deadline_ns=-3_000_000, **deadline),
        queued(31, deadline_ns=2 * SECOND, **deadline),
        fifo(5, 40, policy="RR", cgroup="/rt"),
        queued(6, sched_class="realtime", wait_bound="upper"),
        queued(70, nice=-5, wait_bound="estimate", cgroup="/"),
        queued(8, policy="IDLE", wait_ns=None, throttled=True, cgroup="/limited"),
    )
    made = queue(
        3,
        current=fifo(812, 50, comm="rt-hog", cgroup="/rt"),
        switched_ns=4_200_000_000,
        waiting=waiting,
        lag_why=None,
        ticked_ns=3_000_000,
        doing="kernel native_queued_spin_lock_slowpath",
    )
    assert queues(made) == [
        "cpu 3  6 waiting (1 throttled), running 4.2s: 812 rt-hog  FIFO 50  /rt",
        "|    kernel native_queued_spin_lock_slowpath, last tick 3ms ago",
        "|- 30  task-30  DEADLINE, 3ms late     waits 30.0s",
        "|- 31  task-31  DEADLINE, due in 2.0s  waits 31.0s",
        "|-  5  task-5   RR 40                  waits 5.0s          /rt",
        "|-  6  task-6   OTHER (realtime)       waits <6.0s",
        "|- 70  task-70  OTHER nice -5          waits ~70.0s",
        "`-  8  task-8   IDLE                   waits -, throttled  /limited",
    ]
    assert queues(made, rows=5)[-2:] == [
        "|- 70  task-70  OTHER nice -5          waits ~70.0s",
        "`- … 1 more task: -n COUNT shows it",
    ]


def test_run_queue_of_other_classes() -> None:
    def head(current: Queued) -> str:
        return queues(queue(0, current=current, lag_why=None))[0]

    stop = fifo(19, 99, comm="migration/0", sched_class="stop")
    assert head(stop) == "cpu 0  running 2.0s: 19 migration/0  FIFO 99 (stop)"
    ext = queued(5, sched_class="ext")
    assert head(ext) == "cpu 0  running 2.0s: 5 task-5  OTHER (ext)"
    batch = queued(5, policy="BATCH")
    assert head(batch) == "cpu 0  running 2.0s: 5 task-5  BATCH"


def test_deadline_that_is_now() -> None:
    now = queued(5, sched_class="deadline", policy="DEADLINE", deadline_ns=0)
    assert queues(queue(0, waiting=[now]))[-1].split("  ")[2:4] == [
        *("DEADLINE, due in 0us", "waits 5.0s"),
    ]


def test_quiet_cpus_are_one_line() -> None:
    made = (queue(0), queue(4, lag_why="offline", current=None), queue(5), queue(6))
    assert queues(*made) == ["cpus 0,5-6 idle", "cpu 4 offline"]
    assert queues(queue(7, lag_why=None)) == ["cpu 7 idle"]


@pytest.mark.parametrize(
    ("others", "lines"),
    [
        (
            {"lag_why": "interrupts off", "lag_ns": 4 * SECOND},
            [
                "cpu 1  idle 2.0s",
                "     interrupts off, its clock is 4.0s behind, last tick 4.0s ago",
            ],
        ),
        (
            {"panicked": True},
            ["cpu 1  idle 2.0s", "     last tick 4.0s ago; the kernel died here"],
        ),
        (
            {"panicked": True, "ticked_ns": None},
            ["cpu 1  idle 2.0s", "     the kernel died here"],
        ),
        (
            {"waiting": [queued(5)], "switched_ns": None},
            [
                "cpu 1  1 waiting, idle",
                "|    last tick 4.0s ago",
                "`- 5  task-5  OTHER  waits 5.0s",
            ],
        ),
        (
            {"current": None, "ticked_ns": None, "lag_ns": None},
            ["cpu 1  running: -"],
        ),
        (
            {"waiting": [queued(5)], "current": None, "lag_why": "offline"},
            [
                "cpu 1  1 waiting, running: -",
                "|    offline, last tick 4.0s ago",
                "`- 5  task-5  OTHER  waits 5.0s",
            ],
        ),
        (
            {"current": queued(9), "lag_why": "tick stopped", "lag_ns": SECOND // 10},
            [
                "cpu 1  running 2.0s: 9 task-9  OTHER",
                "     tick stopped, its clock is 100ms behind, last tick 4.0s ago",
            ],
        ),
        (
            # A little late is everybody.
            {"current": queued(9), "lag_why": None, "lag_ns": SECOND // 10 - 1},
            ["cpu 1  running 2.0s: 9 task-9  OTHER", "     last tick 4.0s ago"],
        ),
    ],
)
def test_clocks(others: dict[str, Any], lines: list[str]) -> None:
    assert queues(queue(1, **({"ticked_ns": 4 * SECOND} | others))) == lines


def test_interrupts_off_stands_out() -> None:
    made = report([cpu(0)], run_queues=[queue(0, lag_why="interrupts off")])
    words = "interrupts off, last tick 0us ago"
    assert Span(words, "bad") in spans(made, verbose=True)


def test_run_queues_are_told_on_request() -> None:
    made = report([cpu(0)], run_queues=[queue(0, waiting=[queued(5)])])
    assert not any("waiting" in line for line in body(made))
    for view in ("irqs", "info", "sets"):
        assert not any("waiting" in x for x in body(made, view=view, verbose=True))


# --- interrupts

IRQS = (
    irq(26, {}, managed=True, affinity=(2,), effective=(), name="nvme0q5"),
    irq(24, {0: 8000, 1: 5}, share=0.8, name="virtio0-input.0", chip="PCI-MSIX"),
    irq(25, {3: 2000}, share=0.2),
)
VECTORS = (
    vector("LOC", {0: 500, 1: 12_345, 3: 1}, text="Local timer"),
    vector("TRM", {}, text="Thermal"),
    vector("ERR", {}, total=3, text="APIC errors"),
)
SOFTIRQS = (vector("NET_RX", {1: 7}, text="Reception"), vector("HI", {}))
INTERRUPTS = report(CPUS, irqs=IRQS, vectors=VECTORS, softirqs=SOFTIRQS)


def test_interrupts() -> None:
    assert body(INTERRUPTS, view="irqs") == [
        "IRQ  NAME             AFFINITY  GOES-TO  COUNT  SHARE  cpu0  cpu1  cpu3",
        " 24  virtio0-input.0  0-1       0         8.0K   80.0  8.0K     5     0",
        " 25  eth1             3         3         2.0K   20.0     0     0  2.0K",
        "… 1 interrupt did not come: -v shows it",
        "",
        "VECTOR  COUNT  cpu0   cpu1  cpu3  WHAT",
        "LOC     12.8K   500  12.3K     1  Local timer",
        "ERR         3     -      -     -  APIC errors",
        "",
        "SOFTIRQ  COUNT  cpu1  WHAT",
        "NET_RX       7     7  Reception",
    ]


def test_all_interrupts() -> None:
    lines = body(INTERRUPTS, view="irqs", verbose=True)
    assert lines[:4] == [
        "IRQ  NAME             CHIP      AFFINITY     GOES-TO  COUNT  SHARE"
        "  cpu0  cpu1  cpu3",
        " 24  virtio0-input.0  PCI-MSIX  0-1          0         8.0K   80.0"
        "  8.0K     5     0",
        " 25  eth1             PCI-MSI   3            3         2.0K   20.0"
        "     0     0  2.0K",
        " 26  nvme0q5          PCI-MSI   2 (managed)  none         0      -"
        "     0     0     0",
    ]
    names = ("LOC", "TRM", "ERR", "NET_RX", "HI")
    assert [x.split()[0] for x in lines if x.startswith(names)] == list(names)
    assert lines[-2:] == ["time per interrupt: Linux keeps none", "coverage: 0 lost"]


def test_interrupts_of_an_interval() -> None:
    made = replace(INTERRUPTS, interval_ns=10 * SECOND)
    lines = body(made, view="irqs")
    assert lines[1].split()[-5:] == ["801", "80.0", "800", "1", "0"]
    assert "LOC      1285    50  1235    <1  Local timer" in lines


def test_interrupts_of_some_cpus() -> None:
    made = replace(INTERRUPTS, cpus=(CPUS[1],), coverage={"cpus": 4})
    head = table(made, "IRQ", view="irqs")[0]
    assert [word for word in head.split() if word.startswith("cpu")] == ["cpu1"]


def test_interrupts_of_many_cpus() -> None:
    """The CPU that takes most of each, where not each has room for a column."""
    counts = dict.fromkeys(range(256), 1) | {21: 745}
    made = report(
        [cpu(n) for n in range(256)],
        irqs=(
            irq(44, counts, name="eth0-rx", share=1.0),
            irq(45, dict.fromkeys(range(200), 1), share=0.0),
        ),
        vectors=(vector("LOC", {3: 7} | counts), vector("ERR", {}, total=1)),
        softirqs=(vector("RCU", dict.fromkeys(range(17), 1)),),
    )
    lines = table(made, "IRQ", view="irqs")
    assert lines[:3] == [
        "IRQ  NAME     AFFINITY  GOES-TO  COUNT  SHARE  MOST ON",
        " 44  eth0-rx  0-255     0         1.0K    100  cpu21 74 %",
        " 45  eth21    0-199     0          200    0.0  cpu0 <1 %",
    ]
    assert "LOC      1.0K  cpu21 74 %  What LOC is" in lines
    assert "ERR         1  -           What ERR is" in lines
    assert "RCU         17  cpu0 5 %  What RCU is" in lines


@pytest.mark.parametrize(
    ("cpus", "each", "fit"),
    [(9, 1, True), (9, 1234, True), (13, 1, False), (12, 1, True), (12, 12_345, False)],
)
def test_cpus_have_columns_if_they_fit(cpus: int, each: int, fit: bool) -> None:
    """If the lines do not get too long."""
    made = report(
        [cpu(n) for n in range(cpus)],
        irqs=(irq(24, dict.fromkeys(range(cpus), each), name="eth"),),
    )
    head, row = body(made, view="irqs")
    last = f"cpu{cpus - 1}" if fit else "MOST ON"
    assert head.endswith(f"  {last}")
    assert row.endswith(f"  cpu0 {100 // cpus} %") != fit


def test_width_of_interrupts() -> None:
    """Of eight CPUs, all of them busy, they are within 120 columns."""
    counts = {n: 123_456 + n for n in range(8)}
    made = report(
        [cpu(n) for n in range(8)],
        irqs=(irq(24, counts, name="virtio0-input.0", affinity=(0, 2, 4), share=1.0),),
        vectors=(vector("CAL", counts, text="Function calls"),),
    )
    lines = body(made, view="irqs")
    assert lines[0].endswith("cpu7")
    assert max(map(len, lines)) <= 120


def test_long_names_of_interrupts() -> None:
    name = ", ".join(["ahci[0000:00:1f.2]"] * 4)
    made = report([cpu(0)], irqs=(irq(11, {0: 5}, name=name),))
    row = body(made, view="irqs")[1]
    assert row.startswith(" 11  ahci[0000:00:1f.2], ahci[0000:0…  ")
    assert name in body(made, view="irqs", verbose=True)[1]


def test_rows_of_interrupts() -> None:
    lines = body(INTERRUPTS, view="irqs", rows=1)
    assert lines[2] == "… 1 more interrupt: -n COUNT shows it"
    assert not any("eth1" in line for line in lines)


def test_order_of_interrupts() -> None:
    """Those that came most often first, and of those that are alike by number."""
    made = report([cpu(0)], irqs=[irq(n, {0: n // 2}) for n in (24, 28, 29, 25)])
    rows = body(made, view="irqs")[1:]
    assert [row.split()[0] for row in rows] == ["28", "29", "24", "25"]


def test_no_interrupts() -> None:
    assert body(report([cpu(0)], irqs=()), view="irqs") == [
        "No device has interrupted."
    ]
    assert body(report([cpu(0)]), view="irqs") == [
        "Interrupts of devices were not looked at."
    ]
    made = report([cpu(0)], irqs=[irq(1, {})])
    assert body(made, view="irqs", verbose=True)[0].endswith("  SHARE")
    made = report([cpu(0)], irqs=[irq(1, {}), irq(2, {})])
    assert body(made, view="irqs") == [
        "No device has interrupted.",
        "… 2 interrupts did not come: -v shows them",
    ]


# --- psrinfo


def test_info() -> None:
    assert table(BOTH, "1 package", view="info") == [
        "1 package, 2 cores, 3 threads, 1 NUMA node",
        "CPU  STATE                                NODE  PACKAGE  CORE  THREAD"
        "  SIBLINGS  CAPACITY  HOTPLUG  IDLE-STATE  TICK",
        "  0  idle                                    0        0     0       0"
        "  0-1           1024  online   -           stopped",
        "  1  on                                      0        0     0       1"
        "  0-1           1024  online   -           stopped",
        "  2  off                                     0        0     1       0"
        "  2-3           1024  online   -           -",
        "  3  isolated,nohz_full,rcu_nocb,no-intr     0        0     1       1"
        "  2-3           1024  online   -           stopped",
    ]


def test_info_of_what_is_special() -> None:
    one = processor(
        *(5,),
        die=1,
        hotplug="sched:active",
        hotplug_target="offline",
        idle_state="C6",
        idle_depth=3,
        tick_stopped=False,
        capacity=430,
    )
    made = report([cpu(5, processor=one, state=ON), cpu(0)])
    assert table(made, "CPU", view="info")[1].split() == [
        *("5", "on", "1", "1", "1", "0", "1", "4-5", "430"),
        *("sched:active", "->", "offline", "C6", "(3)", "on"),
    ]
    assert Span("sched:active -> offline", "warn") in spans(made, view="info")
    made = report([cpu(5, processor=replace(one, idle_state=None))])
    assert table(made, "CPU", view="info")[1].split()[-2:] == ["3", "on"]


def test_rows_of_info() -> None:
    lines = table(BOTH, "CPU", view="info", rows=3)
    assert lines[4] == "… 1 more CPU: -n COUNT shows it"


def test_places_are_counted_if_they_are_known() -> None:
    cpus = [cpu(n) for n in range(8)]
    assert body(report(cpus), view="info")[0] == (
        "2 packages, 4 cores, 8 threads, 2 NUMA nodes"
    )
    without = [
        cpu(n, processor=processor(n, node=None, siblings=(n,))) for n in range(2)
    ]
    assert body(report(without), view="info")[0] == "1 package, 2 cores, 2 threads"
    for lost in ({"package": None}, {"siblings": ()}):
        cpus[0] = cpu(0, processor=processor(0, **lost))
        assert body(report(cpus), view="info")[0].startswith("CPU")


# --- psrset


def sections(*sets: CpuSet, **options: Any) -> list[str]:
    """Give what is told of each set below the table of them."""
    lines = body(report([cpu(0)], sets), view="sets", **options)
    return lines[lines.index("") :]


def test_sets_in_full() -> None:
    default = cpuset(
        "default",
        [0, 1],
        nodes=(0, 1),
        tasks=tasks(
            *(120, [bound(600, [1]), bound(812, [0], cgroup=None, comm="rt-hog")]),
            percpu_threads=16,
        ),
    )
    quiet = cpuset(
        *("/quiet", [3]),
        asked=(3, 5),
        exclusive=(3, 5),
        balanced=None,
        irqs_routed=(27,),
        irqs_allowed=(25, 27),
        irqs_managed=1,
        tasks=tasks(
            1,
            straying=[
                bound(266, [1, 3], "may run on 3, and is of default", comm="stray"),
                bound(39, [0, 1, 3], "last on 3", comm="rcuog/4", kthread=True),
            ],
        ),
    )
    assert sections(default, quiet) == [
        "",
        "default  root  /",
        "    CPUs 0-1",
        "    memory nodes 0-1; root domain 0xffff888000001000; balanced",
        "    interrupts: 3 routed (24-26), all 4 allowed (24-27)",
        "    tasks: 120 threads, and 16 of the kernel for one CPU each",
        "    2 pinned",
        "        PID  COMMAND   CPUS  CGROUP",
        "        600  task-600  1     /",
        "        812  rt-hog    0     -",
        "",
        "/quiet  isolated  cpuset partition",
        "    CPUs 3; asked for 3,5; exclusive 3,5",
        "    memory node 0",
        "    interrupts: 1 routed (27), 2 allowed (25,27), 1 of them managed",
        "    tasks: 1 thread",
        "    2 straying",
        "        PID  COMMAND    CPUS   CGROUP  WHY",
        "        266  stray      1,3    /       may run on 3, and is of default",
        "         39  [rcuog/4]  0-1,3  /       last on 3",
    ]


def test_sets_not_in_force() -> None:
    assert sections(INVALID)[1:] == [
        "/gone  invalid  cpuset partition (root)",
        "    not in force: Parent is not a partition root",
        "    CPUs 0-1; asked for 4",
        "    memory node 0; not balanced",
        "    interrupts: 0 routed, 0 allowed",
    ]
    silent = sections(replace(INVALID, reason=None))
    assert silent[2] == "    not in force: the kernel does not say why"


def test_many_numbers() -> None:
    """Of CPUs and interrupts, of which -v tells all."""
    odd = tuple(range(1, 256, 2))
    one = cpuset("/odd", odd, asked=(*odd, 999), irqs_allowed=odd, irqs_routed=odd[1:])
    made = replace(one, tasks=tasks(1, [bound(5, odd)]))
    whole, first = ",".join(map(str, odd)), "1,3,5,7,9,11,13,15"
    lines = sections(made, cpuset("default", [0]))
    assert lines[2] == f"    CPUs {first} +120; asked for {first} +121"
    assert (
        f"127 routed (3,5,7,9,11,13,15,17 +119), 128 allowed ({first} +120)" in lines[4]
    )
    assert lines[8].endswith(f"{first} +120  /")
    for place, line in enumerate(sections(made, cpuset("default", [0]), verbose=True)):
        assert (whole in line) == (place in (2, 4, 8))
    lost = irq(1, {0: 1}, affinity=odd, effective=odd)
    for verbose, text in ((False, f"{first} +120"), (True, whole)):
        row = body(report([cpu(0)], irqs=[lost]), view="irqs", verbose=verbose)[1]
        assert f"  {text}  {text}  " in row


def test_tasks_of_a_set_are_told_if_somebody_looked() -> None:
    assert not any("tasks" in line for line in sections(cpuset("default", [0])))
    empty = sections(cpuset("default", [0], tasks=tasks()))
    assert empty[-1] == "    tasks: 0 threads"


def test_many_tasks_of_a_set() -> None:
    many = [bound(100 + n, [0]) for n in range(12)]
    one = cpuset("default", [0], tasks=tasks(12, many, [bound(5, [1], "why")] * 11))
    lines = sections(one)
    assert sum("task-1" in line for line in lines) == 10
    assert "        … 2 more pinned tasks: -n COUNT shows them" in lines
    assert "        … 1 more straying task: -n COUNT shows it" in lines
    assert sum("task-1" in line for line in sections(one, rows=3)) == 3
    whole = sections(one, verbose=True)
    assert sum("task-1" in line for line in whole) == 12
    assert not any("…" in line for line in whole)


# --- findings

FINDINGS = (
    finding("not-ticked", "cpu3 has interrupts off"),
    finding("most-interrupts", "cpu0 takes 71 % of device interrupts", "move some"),
)


@pytest.mark.parametrize("view", VIEWS)
def test_findings(view: View) -> None:
    made = replace(BOTH, findings=FINDINGS)
    assert printed(made, view=view)[-3:] == [
        "! cpu3 has interrupts off",
        "! cpu0 takes 71 % of device interrupts",
        "    do: move some",
    ]
    styled = spans(made, view=view)
    assert Span("! cpu3 has interrupts off", "bad") in styled
    assert Span("! cpu0 takes 71 % of device interrupts", "warn") in styled
    assert Span("do: move some", "dim") in styled


def test_the_design() -> None:
    """What the sample of the design shows, with all there is to be said."""
    hot = cpu(
        21,
        state=ON,
        minf=27 * 5,
        mjf=0,
        xcal=99 * 5,
        tlb=5,
        intr=41_259 * 5,
        soft=41_036 * 5,
        csw=635 * 5,
        runq=7,
        current=running(150, "ksoftirqd/21"),
        **times(sys=0.6, irq=1.75, idl=2.65),
    )
    made = report(
        [hot],
        [
            cpuset("default", range(16), irqs_allowed=(44,), irqs_routed=(44,)),
            cpuset("/db", range(16, 30)),
        ],
        interval_ns=5 * SECOND,
        load=(3.1, 2.88, 2.71),
        findings=[
            finding(
                "most-interrupts",
                "cpu21 takes 71 % of device interrupts (irq 44 eth0-rx, affinity 21)",
            )
        ],
    )
    assert printed(made) == [
        "6.12  vmcore (ELF)  types: btf  1 CPU online, load 3.10 2.88 2.71, "
        "interval 5.000 s, counts per second",
        "SET      CPUS   KIND      FROM              IRQS",
        "default  0-15   root      /                 all",
        "/db      16-29  isolated  cpuset partition  0 routed",
        "CPU  STATE  minf  mjf  xcal  tlb   intr   soft  csw  runq  usr   sys   irq"
        "   wt   st   idl  CURRENT",
        " 21  on       27    0    99    1  41259  41036  635     7  0.0  12.0  35.0"
        "  0.0  0.0  53.0  ksoftirqd/21",
        "! cpu21 takes 71 % of device interrupts (irq 44 eth0-rx, affinity 21)",
    ]


# --- all of them


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_what_is_well_does_not_stand_out(view: View, verbose: bool) -> None:
    quiet = cpuset("default", [0, 1, 3], tasks=tasks(1, [bound(5, [0])] * 11))
    waiting = [queued(5, cgroup="/a")] * 3
    made = replace(
        INTERRUPTS,
        sets=(quiet, SETS[1]),
        run_queues=(
            queue(0),
            queue(1, current=queued(9, cgroup="/a"), waiting=waiting),
        ),
    )
    for options in ({}, {"rows": 2}, {"columns": ("all",)}):
        styled = spans(made, view=view, verbose=verbose, **options)
        assert {span.style for span in styled} <= {None, "title", "dim"}
    many = report([cpu(n) for n in range(200)])
    assert {span.style for span in spans(many)} <= {"title", "dim"}


EVIL = "a\x1b[31m\u202eb\nc"
SAFE = r"a\x1b[31m\u202eb\x0ac"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_text_of_a_dump_is_escaped(view: View, verbose: bool) -> None:
    evil_tasks = tasks(
        *(1, [bound(5, [0], comm=EVIL, cgroup=EVIL)]),
        [bound(6, [0], EVIL, comm=EVIL)],
    )
    place = processor(0, hotplug=EVIL, hotplug_target=EVIL, idle_state=EVIL)
    made = report(
        [cpu(0, set=EVIL, state=ON, current=running(5, EVIL), processor=place)],
        [
            cpuset(EVIL, [0], source=EVIL, reason=EVIL, kind="invalid"),
            cpuset("default", [0], tasks=evil_tasks),
        ],
        run_queues=[
            queue(
                *(0,),
                current=queued(5, comm=EVIL, cgroup=EVIL),
                waiting=[queued(6, comm=EVIL, policy=EVIL, cgroup=EVIL)],
                doing=EVIL,
            )
        ],
        irqs=[irq(1, {0: 1}, name=EVIL, chip=EVIL)],
        vectors=[vector(EVIL, {0: 1}, text=EVIL)],
        findings=[finding("straying-tasks", EVIL, EVIL)],
        notes=(Note("lost", EVIL),),
    )
    out = io.StringIO()
    show(blocks(made, view=view, verbose=verbose), out)
    text = out.getvalue()
    assert all(line.isprintable() for line in text.split("\n"))
    assert SAFE in text


def test_256_cpus_with_much_to_say() -> None:
    """In a time that grows no faster than they do."""
    numbers = range(256)
    counts = dict.fromkeys(numbers, 5)
    made = report(
        [cpu(n, set=f"/{n % 64}", current=running(n + 1)) for n in numbers],
        [cpuset("default", [])]
        + [cpuset(f"/{n}", range(n, 256, 64)) for n in range(64)],
        irqs=[irq(n, counts) for n in range(1000)],
        vectors=[vector(f"V{n}", counts) for n in range(25)],
        softirqs=(),
        run_queues=[
            queue(n, current=queued(n + 1), waiting=[queued(5)] * 40) for n in numbers
        ],
    )
    start = time.monotonic()
    for view in VIEWS:
        assert body(made, view=view)
        assert body(made, view=view, verbose=True)
    # Two seconds here; by the square of their number it would be minutes.
    assert time.monotonic() - start < 20
