# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-cpus, of reports made by hand."""

import io
import sys
from dataclasses import fields, replace
from types import FrameType
from typing import Any, get_args

import pytest

from msatools.cpus.model import Cpu, CpuSet, CpusReport, State
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
from tests.support.golden import Golden

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

DEADLINE = {"sched_class": "deadline", "policy": "DEADLINE", "nice": None}
WAITING = (
    queued(30, deadline_ns=-3_000_000, **DEADLINE),
    queued(31, deadline_ns=2 * SECOND, **DEADLINE),
    queued(32, deadline_ns=0, **DEADLINE),
    fifo(5, 40, policy="RR", cgroup="/rt"),
    queued(6, sched_class="realtime", wait_bound="upper"),
    queued(70, nice=-5, wait_bound="estimate", cgroup="/"),
    queued(8, policy="IDLE", wait_ns=None, throttled=True, cgroup="/limited"),
)
FOUR = {"ticked_ns": 4 * SECOND}
QUEUES = report(
    [cpu(0)],
    run_queues=(
        # Quiet ones are one line.
        *(queue(0), queue(4, lag_why="offline", current=None), queue(5), queue(6)),
        queue(7, lag_why=None),
        queue(
            3,
            current=fifo(812, 50, comm="rt-hog", cgroup="/rt"),
            switched_ns=4_200_000_000,
            waiting=WAITING,
            lag_why=None,
            ticked_ns=3_000_000,
            doing="kernel native_queued_spin_lock_slowpath",
        ),
        queue(
            10,
            current=fifo(19, 99, comm="migration/0", sched_class="stop"),
            lag_why=None,
        ),
        queue(11, current=queued(5, sched_class="ext"), lag_why=None),
        queue(12, current=queued(5, policy="BATCH"), lag_why=None),
        queue(13, lag_why="interrupts off", lag_ns=4 * SECOND, **FOUR),
        queue(14, panicked=True, **FOUR),
        queue(15, panicked=True, ticked_ns=None),
        queue(16, waiting=[queued(5)], switched_ns=None, **FOUR),
        queue(17, current=None, ticked_ns=None, lag_ns=None),
        queue(18, waiting=[queued(5)], current=None, lag_why="offline", **FOUR),
        queue(
            19,
            current=queued(9),
            lag_why="tick stopped",
            lag_ns=SECOND // 10,
            **FOUR,
        ),
        # A little late is everybody.
        queue(20, current=queued(9), lag_why=None, lag_ns=SECOND // 10 - 1, **FOUR),
    ),
)


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


COUNTS = dict.fromkeys(range(256), 1) | {21: 745}
MANY = report(
    [cpu(n) for n in range(256)],
    irqs=(
        irq(44, COUNTS, name="eth0-rx", share=1.0),
        irq(45, dict.fromkeys(range(200), 1), share=0.0),
    ),
    vectors=(vector("LOC", {3: 7} | COUNTS), vector("ERR", {}, total=1)),
    softirqs=(vector("RCU", dict.fromkeys(range(17), 1)),),
)
"""Where not each CPU has room for a column, the one that takes most."""


def test_interrupts_of_some_cpus() -> None:
    made = replace(INTERRUPTS, cpus=(CPUS[1],), coverage={"cpus": 4})
    head = table(made, "IRQ", view="irqs")[0]
    assert [word for word in head.split() if word.startswith("cpu")] == ["cpu1"]


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


SETS_IN_FULL = report(
    [cpu(0)],
    [
        cpuset(
            *("default", [0, 1]),
            nodes=(0, 1),
            tasks=tasks(
                *(120, [bound(600, [1]), bound(812, [0], cgroup=None, comm="rt-hog")]),
                percpu_threads=16,
            ),
        ),
        cpuset(
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
        ),
        INVALID,
        replace(INVALID, name="/silent", reason=None),
    ],
)


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


def test_the_design(golden: Golden) -> None:
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
    golden("cpus/design", printed(made))


GOLDEN: dict[str, tuple[CpusReport, dict[str, Any]]] = {
    "cpus": (BOTH, {}),
    "verbose": (BOTH, {"verbose": True}),
    "columns": (BOTH, {"columns": ("cpu", "csw", "current")}),
    "info": (BOTH, {"view": "info"}),
    "sets": (SETS_IN_FULL, {"view": "sets"}),
    "limits": (BOTH, {"view": "sets"}),
    "queues": (QUEUES, {"verbose": True}),
    "queues-five": (QUEUES, {"verbose": True, "rows": 5}),
    "irqs": (INTERRUPTS, {"view": "irqs"}),
    "irqs-verbose": (INTERRUPTS, {"view": "irqs", "verbose": True}),
    "irqs-interval": (
        replace(INTERRUPTS, interval_ns=10 * SECOND),
        {"view": "irqs"},
    ),
    "irqs-many": (MANY, {"view": "irqs"}),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(golden: Golden, name: str) -> None:
    made, options = GOLDEN[name]
    golden(f"cpus/{name}", printed(made, **options))


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


def calls(count: int) -> int:
    """Return the calls of functions that all views of so many CPUs take."""
    counts = dict.fromkeys(range(count), 5)
    made = report(
        [cpu(n, set=f"/{n // 4}", current=running(n + 1)) for n in range(count)],
        [cpuset("default", [])]
        + [cpuset(f"/{n}", range(4 * n, 4 * n + 4)) for n in range(count // 4)],
        irqs=[irq(n, counts) for n in range(20)],
        vectors=[vector(f"V{n}", counts) for n in range(5)],
        softirqs=(),
        run_queues=[
            queue(n, current=queued(n + 1), waiting=[queued(5)] * 4)
            for n in range(count)
        ],
    )
    number = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for view in VIEWS:
            for verbose in (False, True):
                assert body(made, view=view, verbose=verbose)
    finally:
        sys.setprofile(before)
    return number


def test_many_cpus_cost_no_more_each() -> None:
    """Twice as many take twice the calls; by their square, it would be four times."""
    assert calls(128) < 2.5 * calls(64)
