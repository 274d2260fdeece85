# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-cpus, of reports made by hand: see ``tests/golden/cpus``."""

from functools import partial
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from msatools.cpus.model import CpusReport, State
from msatools.kernel.report import Note
from msatools.model import names
from msatools.program.model import Crash
from msatools.render.cpus.columns import amount, percent
from msatools.render.cpus.report import View
from msatools.render.cpus.report import cpus_blocks as blocks
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
from tests.render.screens import (
    EVIL,
    Screens,
    check_escaped,
    check_screens,
    printed,
)
from tests.support.cost import calls
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
ONE = report([cpu(0)])
INVALID = cpuset(
    "/gone",
    [0, 1],
    kind="invalid",
    asked=(4,),
    source="cpuset partition (root)",
    reason="Parent is not a partition root",
)


def heads() -> Screens:
    crash = replace(TARGET, crash=Crash("Oops", 1, 600, "hog"))
    troubled = replace(
        BOTH,
        sets=(SETS[0], INVALID),
        irqs=(),
        coverage={"cpus": 4, "irqs": 57, "tasks": 0, "irq_affinity_unreadable": 2},
        notes=(Note("lost", "where some interrupts may go is lost"),),
        findings=(
            finding("not-ticked", "cpu3 has interrupts off"),
            finding("most-interrupts", "cpu0 takes 71 % of them", "move some"),
        ),
    )
    whole = replace(BOTH, coverage={"cpus": 4, "irqs_broken": 0})
    return {
        "load and time": blocks(
            replace(BOTH, load=(3.1, 2.884, 10), taken_at_ns=35_072_000_000)
        ),
        "of some CPUs, which does not say that no others are online": blocks(
            report([cpu(3)], coverage={"cpus": 256})
        ),
        "a crash": blocks(
            replace(BOTH, target=crash, run_queues=(queue(1, panicked=True),))
        ),
        **{f"trouble: {view}": blocks(troubled, view=view) for view in VIEWS},
        "or on request": blocks(whole, verbose=True),
    }


def sets() -> Screens:
    everywhere = cpuset("default", [0], irqs_routed=(1,), irqs_allowed=(1, 2, 3))
    some = cpuset("/a", [1], irqs_allowed=(2, 3), irqs_managed=2)
    long = f"/kubepods.slice/pod{'0' * 40}/end"
    named = report([cpu(0, set=long)], [cpuset("default", []), cpuset(long, [0])])
    alone = report([cpu(0)], irqs=())
    return {
        **{f"nor is it alone: {view}": blocks(alone, view=view) for view in VIEWS},
        "what is not known to be all is not called so": blocks(
            report([cpu(0)], [everywhere, some], coverage={"cpus": 9})
        ),
        "long names": blocks(named),
    }


def cpus() -> Screens:
    """The table like mpstat's."""
    states: tuple[tuple[State, ...], ...] = (
        (),
        ("on", "idle"),
        ("on", "no-intr", "isolated", "idle"),
        ("on", "nohz_full", "rcu_nocb"),
        ("on", "rcu_nocb"),
        ("on", "isolated", "stopped", "inactive"),
        *((state,) for state in get_args(State) if state != "off"),
    )
    counted = cpu(0, minf=206_295, mjf=1, xcal=2, tlb=0, intr=10**7, soft=None)
    guest = cpu(0, **times(usr=10, gst=70, idl=20))
    shares = ("cpu", "usr", "sys", "gst", "irq", "wt", "st", "idl")
    lost = ("usr_ns", "sys_ns", "irq_ns", "wt_ns", "idl_ns")
    unknown: list[dict[str, Any]] = [dict.fromkeys([name]) for name in lost]
    parts = cpu(0, **times(usr=50, nice=20, irq=50, softirq=40))
    many = [cpu(n) for n in range(256)]
    many[7:12] = [
        cpu(7, state=ON, current=running(5), **times(usr=1, idl=99)),
        cpu(8, **times(usr=1, idl=99)),
        cpu(9, runq=1),
        cpu(10, state=("on", "inactive", "idle")),
        cpu(11, **{**NOTHING, "current": running()}),
    ]
    return {
        "all columns": blocks(report([cpu(0, icsw=1500, migr=3)]), columns=["all"]),
        "counts of an interval are of a second": blocks(
            report([counted], interval_ns=5 * SECOND)
        ),
        "guests have a column, and their time is no user's": blocks(
            report([guest, cpu(1)])
        ),
        "parts of other times do not count twice": blocks(
            report([parts]), columns=("cpu", "usr", "nice", "irq", "softirq")
        ),
        "no share of what is not known whole; of no time; without steal": blocks(
            report(
                [
                    *(replace(CPUS[0], **none) for none in unknown),
                    cpu(6, **times()),
                    replace(CPUS[0], st_ns=None, gst_ns=None),
                ]
            ),
            columns=shares,
        ),
        "the most telling states first, without what is implied": blocks(
            report(
                [
                    *(cpu(n, state=state) for n, state in enumerate(states)),
                    cpu(20, current=None),
                    cpu(21, state=ON, current=running(5)),
                ]
            ),
            columns=("cpu", "state", "current"),
        ),
        "or alone": blocks(report([offline(4)], [])),
        "of very many, those that do nothing are no rows": blocks(report(many)),
        "no CPU": blocks(report([], [])),
    }


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


def queues() -> Screens:
    four = {"ticked_ns": 4 * SECOND}
    late = {"current": queued(9), **four}
    made = (
        # Run queues without anything to show share one line.
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
        queue(13, lag_why="interrupts off", lag_ns=4 * SECOND, **four),
        queue(14, panicked=True, **four),
        queue(15, panicked=True, ticked_ns=None),
        queue(16, waiting=[queued(5)], switched_ns=None, **four),
        queue(17, current=None, ticked_ns=None, lag_ns=None),
        queue(18, waiting=[queued(5)], current=None, lag_why="offline", **four),
        queue(19, lag_why="tick stopped", lag_ns=SECOND // 10, **late),
        # A clock less than 0.1 s late is normal.
        queue(20, lag_why=None, lag_ns=SECOND // 10 - 1, **late),
    )
    every = report([cpu(0)], run_queues=made)
    waiting = report([cpu(0)], run_queues=[queue(0, waiting=[queued(5)])])
    others: tuple[View, ...] = ("irqs", "info", "sets")
    return {
        **{f"not in {v}": blocks(waiting, view=v, verbose=True) for v in others},
        "all": blocks(every, verbose=True),
        "five": blocks(every, verbose=True, rows=5),
    }


INTERRUPTS = report(
    CPUS,
    irqs=(
        irq(26, {}, managed=True, affinity=(2,), effective=(), name="nvme0q5"),
        irq(24, {0: 8000, 1: 5}, share=0.8, name="virtio0-input.0", chip="PCI-MSIX"),
        irq(25, {3: 2000}, share=0.2),
    ),
    vectors=(
        vector("LOC", {0: 500, 1: 12_345, 3: 1}, text="Local timer"),
        vector("TRM", {}, text="Thermal"),
        vector("ERR", {}, total=3, text="APIC errors"),
    ),
    softirqs=(vector("NET_RX", {1: 7}, text="Reception"), vector("HI", {})),
)


def irqs() -> Screens:
    shown = partial(blocks, view="irqs")
    one = [cpu(0)]
    busy = {n: 123_456 + n for n in range(8)}
    wide = report(
        [cpu(n) for n in range(8)],
        irqs=(irq(24, busy, name="virtio0-input.0", affinity=(0, 2, 4), share=1.0),),
        vectors=(vector("CAL", busy, text="Function calls"),),
    )
    long = report(one, irqs=(irq(11, {0: 5}, name=", ".join(["ahci[0000:1f.2]"] * 4)),))

    def of(count: int, each: int) -> CpusReport:
        interrupt = irq(24, dict.fromkeys(range(count), each), name="eth")
        return report([cpu(n) for n in range(count)], irqs=(interrupt,))

    return {
        "-v": shown(INTERRUPTS, verbose=True),
        "an interval": shown(replace(INTERRUPTS, interval_ns=10 * SECOND)),
        **{
            f"{count} CPUs, each {each}": shown(of(count, each))
            for count, each in ((9, 1), (9, 1234), (12, 1), (12, 12_345), (13, 1))
        },
        "eight that are busy are within 120 columns": shown(wide),
        "long names": shown(long),
        "nobody looked": shown(ONE),
    }


def info() -> Screens:
    """The table like psrinfo's."""
    shown = partial(blocks, view="info")
    special = processor(
        *(5,),
        die=1,
        hotplug="sched:active",
        hotplug_target="offline",
        idle_state="C6",
        idle_depth=3,
        tick_stopped=False,
        capacity=430,
    )
    eight = [cpu(n) for n in range(8)]
    plain = [processor(n, node=None, siblings=(n,)) for n in range(2)]

    def lost(**what: Any) -> CpusReport:
        return report([cpu(0, processor=processor(0, **what)), *eight[1:]])

    return {
        "what is special": shown(report([cpu(5, processor=special, state=ON), cpu(0)])),
        "without nodes": shown(report([cpu(n, processor=plain[n]) for n in range(2)])),
    }


def psrset() -> Screens:
    shown = partial(blocks, view="sets")
    stray = "may run on 3, and is of default"
    full = report(
        [cpu(0)],
        [
            cpuset(
                *("default", [0, 1]),
                nodes=(0, 1),
                tasks=tasks(
                    120,
                    [bound(600, [1]), bound(812, [0], cgroup=None, comm="rt-hog")],
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
                        bound(266, [1, 3], stray, comm="stray"),
                        bound(39, [0, 1], "last on 3", comm="rcuog/4", kthread=True),
                    ],
                ),
            ),
            INVALID,
            replace(INVALID, name="/silent", reason=None),
            cpuset("/idle", [4], tasks=tasks()),
        ],
    )
    odd = tuple(range(1, 41, 2))
    numbers = report(
        [cpu(0)],
        [
            cpuset(
                *("/odd", odd),
                asked=(*odd, 999),
                irqs_allowed=odd,
                irqs_routed=odd[1:],
                tasks=tasks(1, [bound(5, odd)]),
            ),
            cpuset("default", [0]),
        ],
        irqs=[irq(1, {0: 1}, affinity=odd, effective=odd)],
    )
    pinned = [bound(100 + n, [0]) for n in range(12)]
    crowd = tasks(12, pinned, [bound(5, [1], "why")] * 11)
    crowded = report([cpu(0)], [cpuset("default", [0], tasks=crowd)])
    return {
        "with tasks": shown(full),
        **{
            f"many numbers: {view}{' -v' * v}": blocks(numbers, view=view, verbose=v)
            for view in VIEWS[1:]
            for v in (False, True)
        },
        "many tasks": shown(crowded),
    }


def nothing_is_known() -> Screens:
    """Unknown values are a dash, never 0."""
    none: dict[str, Any] = dict.fromkeys(names(processor(0)))
    unknown = replace(processor(0), **(none | {"siblings": ()}))
    made = report(
        [cpu(0, **{**NOTHING, "state": ON}, processor=unknown)],
        [cpuset("default", [0], nodes=(), root_domain=None, balanced=None)],
        run_queues=[queue(0, current=None, lag_ns=None, ticked_ns=None)],
        irqs=(irq(1, {}, name="", chip=None),),
    )
    return {
        f"{view}{' -v' * verbose}": blocks(made, view=view, verbose=verbose)
        for view in VIEWS
        for verbose in (False, True)
    }


def design() -> Screens:
    """The sample of the design document, with a finding."""
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
    most = "cpu21 takes 71 % of device interrupts (irq 44 eth0-rx, affinity 21)"
    made = report(
        [hot],
        [
            cpuset("default", range(16), irqs_allowed=(44,), irqs_routed=(44,)),
            cpuset("/db", range(16, 30)),
        ],
        interval_ns=5 * SECOND,
        load=(3.1, 2.88, 2.71),
        findings=[finding("most-interrupts", most)],
    )
    return {"the design": blocks(made)}


GROUPS = {
    made.__name__.replace("_", "-"): made
    for made in (
        *(heads, sets, cpus, queues, irqs, info, psrset, nothing_is_known, design),
    )
}


@pytest.mark.parametrize("group", GROUPS)
def test_golden(golden: Golden, group: str) -> None:
    check_screens(golden, f"cpus/{group}", GROUPS[group]())


def test_golden_numbers(golden: Golden) -> None:
    spans = (None, 0, SECOND // 10, SECOND, 2 * SECOND, 3 * SECOND)
    lines = [
        f"{number} in {ns} ns: {amount(number, ns)}"
        for number in (None, 0, 1, 4125, 99_999, 100_000)
        for ns in spans
    ]
    shares = (None, 0, 0.7104, 0.9994, 1)
    lines += [f"{share}: {percent(share)}" for share in shares]
    golden("cpus/numbers", lines)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_text_of_a_dump_is_escaped(view: View, verbose: bool) -> None:
    task = bound(5, [0], comm=EVIL, cgroup=EVIL)
    evil_tasks = tasks(1, [task], [bound(6, [0], EVIL, comm=EVIL)])
    evil_cpu = processor(0, hotplug=EVIL, hotplug_target=EVIL, idle_state=EVIL)
    evil_queue = queue(
        *(0,),
        current=queued(5, comm=EVIL, cgroup=EVIL),
        waiting=[queued(6, comm=EVIL, policy=EVIL, cgroup=EVIL)],
        doing=EVIL,
    )
    made = report(
        [cpu(0, set=EVIL, state=ON, current=running(5, EVIL), processor=evil_cpu)],
        [
            cpuset(EVIL, [0], source=EVIL, reason=EVIL, kind="invalid"),
            cpuset("default", [0], tasks=evil_tasks),
        ],
        run_queues=[evil_queue],
        irqs=[irq(1, {0: 1}, name=EVIL, chip=EVIL)],
        vectors=[vector(EVIL, {0: 1}, text=EVIL)],
        findings=[finding("straying-tasks", EVIL, EVIL)],
        notes=(Note("lost", EVIL),),
    )
    check_escaped(blocks(made, view=view, verbose=verbose))


def cost(count: int) -> int:
    """Return the number of function calls that all views of ``count`` CPUs take."""
    counts = dict.fromkeys(range(count), 5)
    numbers = range(count // 4)
    made = report(
        [cpu(n, set=f"/{n // 4}", current=running(n + 1)) for n in range(count)],
        [cpuset(f"/{n}", range(4 * n, 4 * n + 4)) for n in numbers],
        irqs=[irq(n, counts) for n in range(20)],
        vectors=[vector(f"V{n}", counts) for n in range(5)],
        softirqs=(),
        run_queues=[
            queue(n, current=queued(n + 1), waiting=[queued(5)] * 4)
            for n in range(count)
        ],
    )
    shown = [partial(blocks, made, view=v) for v in VIEWS]
    return calls(lambda: [printed([*show(), *show(verbose=True)]) for show in shown])


def test_work_is_linear_in_cpus() -> None:
    """Twice the CPUs take twice the calls, not four times."""
    assert cost(128) < 2.5 * cost(64)
