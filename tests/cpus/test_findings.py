# SPDX-License-Identifier: LGPL-2.1-or-later

"""Findings: what is worth a line of CPUs and sets, and what is not. Pure."""

from collections.abc import Sequence
from typing import Any

import pytest

from msatools.cpus.findings import LONG_NS, MOST, WAITS_NS, Known, findings
from msatools.cpus.model import Cpu, CpuSet, Finding, Irq, Queued, RunQueue
from tests.cpus.madecpus import (
    bound,
    cpu,
    cpuset,
    fifo,
    irq,
    offline,
    queue,
    queued,
    tasks,
)
from tests.locks.madelocks import SECOND

SWITCHED = 2 * SECOND


def found(
    cpus: Sequence[Cpu] = (),
    sets: Sequence[CpuSet] = (),
    queues: Sequence[RunQueue] = (),
    irqs: Sequence[Irq] = (),
    in_interval: bool = False,
    asks_irqs: bool = False,
) -> tuple[Finding, ...]:
    return findings(
        Known(
            cpus=cpus,
            sets=sets,
            queues=queues,
            irqs=irqs,
            in_interval=in_interval,
            asks_irqs=asks_irqs,
        )
    )


def busy(number: int, **others: Any) -> Cpu:
    return cpu(number, **({"state": ("on",)} | others))


def isolated(number: int, *states: str, **others: Any) -> Cpu:
    given: dict[str, Any] = {"state": ("on", *(states or ("isolated",)))}
    return cpu(number, **(given | others))


def hog(number: int, *waiting: Queued, **others: Any) -> RunQueue:
    """Make the run queue of a CPU that runs task 9 for two seconds."""
    given: dict[str, Any] = {
        "current": queued(9),
        "switched_ns": SWITCHED,
        "lag_why": None,
        "running": 1 + len(waiting),
    }
    return queue(number, waiting=waiting, **(given | others))


def test_nothing_to_tell() -> None:
    assert found() == ()
    # A quiet machine.
    quiet = found(
        [cpu(0), busy(1), busy(2), offline(3)],
        [cpuset("default", (0, 1, 2)), cpuset("/none", ())],
        [queue(0), hog(1), hog(2), queue(3, current=None, lag_why="offline")],
        [irq(24, {0: 40, 1: 30, 2: 30})],
    )
    assert quiet == ()


# --- CPUs that stand


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            {},
            "cpu3 takes no interrupts, and has had no tick for 4.1 s: they are off, or "
            "a hypervisor does not run it; runs 9 task-9",
        ),
        (
            {"ticked_ns": None, "current": None},
            "cpu3 takes no interrupts, and has had no tick for an unknown time: they "
            "are off, or a hypervisor does not run it",
        ),
    ],
)
def test_interrupts_off(others: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"lag_why": "interrupts off", "ticked_ns": 4_094_000_000}
    (one,) = found([busy(3)], queues=[hog(3, **(given | others))])
    assert one == Finding(code="not-ticked", text=text, cpus=(3,), advice=None)


@pytest.mark.parametrize("why", ["idle", "tick stopped", "offline", None])
def test_clocks_that_stand_for_a_reason(why: str | None) -> None:
    standing = hog(3, lag_why=why, ticked_ns=90 * SECOND, lag_ns=90 * SECOND)
    assert found([busy(3)], queues=[standing]) == ()


@pytest.mark.parametrize(
    ("waiting", "who"),
    [
        ([queued(4)], "1 task waits, the longest for 4.0 s"),
        ([queued(4), queued(12), queued(7)], "3 tasks wait, the longest for 12.0 s"),
        # Those that just came wait too.
        ([queued(4), queued(5, wait_ns=5)], "2 tasks wait, the longest for 4.0 s"),
        ([queued(4), queued(5, wait_ns=None)], "2 tasks wait, the longest for 4.0 s"),
        ([queued(4), queued(8, throttled=True)], "1 task waits, the longest for 4.0 s"),
    ],
)
@pytest.mark.parametrize("sched_class", ["fair", "realtime", "deadline", "stop"])
def test_not_switched(sched_class: str, waiting: list[Queued], who: str) -> None:
    """Whatever it is that does not let others run."""
    current = queued(9, sched_class=sched_class)
    (one,) = found([busy(3)], queues=[hog(3, *waiting, current=current)])
    text = f"cpu3 has run 9 task-9 for 2.0 s, and {who}"
    assert one == Finding(code="not-switched", text=text, cpus=(3,), advice=None)


@pytest.mark.parametrize(
    "one",
    [
        # One task alone may run for as long as it likes.
        hog(3),
        hog(3, queued(4, throttled=True)),
        hog(3, queued(4, wait_ns=LONG_NS - 1)),
        hog(3, queued(4, wait_ns=None)),
        hog(3, queued(4), switched_ns=LONG_NS - 1),
        hog(3, queued(4), switched_ns=None),
        hog(3, queued(4), current=None),
        # On its way to that task.
        hog(3, queued(4), current=queued(0)),
    ],
)
def test_switched(one: RunQueue) -> None:
    assert found([busy(3)], queues=[one]) == ()


@pytest.mark.parametrize("since", [0, LONG_NS - 1, None])
@pytest.mark.parametrize("sched_class", ["realtime", "deadline", "stop"])
def test_starving(sched_class: str, since: int | None) -> None:
    """Though the CPU was another's for a moment."""
    current = queued(9, sched_class=sched_class)
    waiting = [fifo(8, 20), queued(4), queued(5, wait_ns=LONG_NS - 1)]
    (one,) = found(queues=[hog(3, *waiting, current=current, switched_ns=since)])
    assert one == Finding(
        code="starving-tasks",
        text=f"cpu3 runs 9 task-9, which is {sched_class}, and 2 tasks wait, the "
        "longest for 8.0 s",
        cpus=(3,),
        advice=None,
    )


@pytest.mark.parametrize(
    "waiting",
    [[], [queued(4, wait_ns=LONG_NS - 1)], [queued(4, throttled=True)]],
)
def test_not_starving(waiting: list[Queued]) -> None:
    current = fifo(9, 50)
    assert found(queues=[hog(3, *waiting, current=current, switched_ns=0)]) == ()


# --- sets


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"reason": "Parent is not a partition root"}, None),
        # One whose CPUs are there.
        ({"asked": (1,)}, "the kernel does not say why"),
        ({"asked": None}, "the kernel does not say why"),
        ({"asked": (1, 2)}, "the kernel does not say why"),
        ({"asked": (3,), "reason": "Not exclusive"}, "Not exclusive"),
    ],
)
def test_partition_that_is_not_in_force(
    others: dict[str, Any], why: str | None
) -> None:
    invalid = cpuset("/db", (0, 1), kind="invalid", **others)
    (one,) = found([busy(0), busy(1), offline(2), offline(3)], [invalid])
    why = why or others["reason"]
    assert one == Finding(
        code="partition-invalid",
        text=f"partition /db is not in force: {why}",
        cpus=others.get("asked") or (),
        advice=None,
    )


@pytest.mark.parametrize("kind", ["root", "isolated", "limit", "isolcpus", "nohz_full"])
def test_sets_that_are_in_force(kind: str) -> None:
    assert found([busy(0)], [cpuset("/db", (0,), kind=kind, asked=(0, 5))]) == ()


STRAY = bound(7, (0, 1), "may run on 0, which /db has not")
KTHREAD = bound(8, (0, 1), "last on 1, and is of default", kthread=True)


@pytest.mark.parametrize(
    ("straying", "who"),
    [
        ([STRAY], ""),
        ([STRAY, KTHREAD], ""),
        ([STRAY, bound(9, (0,), "x")], ", and 1 more"),
        ([STRAY, bound(9, (0,), "x"), bound(10, (0,), "x"), KTHREAD], ", and 2 more"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        *(("root", "partition"), ("isolated", "partition"), ("limit", "set")),
        *(("isolcpus", "set"), ("nohz_full", "set"), ("invalid", "set")),
    ],
)
def test_straying(kind: str, word: str, straying: list[Any], who: str) -> None:
    reason = "invalid for a reason" if kind == "invalid" else None
    one = cpuset("/db", (1,), kind=kind, tasks=tasks(2, (), straying), reason=reason)
    *_, last = found([busy(0), busy(1)], [one])
    assert last == Finding(
        code="straying-tasks",
        text=f"{word} /db has tasks that stray: 7 task-7: {STRAY.why}{who}",
        cpus=(1,),
        advice="msa-cpus --sets tells who they are",
    )


@pytest.mark.parametrize(
    "one",
    [
        # Nobody looked.
        cpuset("/db", (1,)),
        cpuset("/db", (1,), tasks=tasks(2)),
        cpuset("/db", (1,), tasks=tasks(2, [STRAY])),
        # The kernel's own come and go.
        cpuset("/db", (1,), tasks=tasks(2, (), [KTHREAD])),
        # All that somebody bound to CPUs that are offline.
        cpuset("default", (1,), tasks=tasks(2, (), [STRAY])),
    ],
)
def test_not_straying(one: CpuSet) -> None:
    assert found([busy(0), busy(1)], [one]) == ()


IDLE = cpu(1, set="/quiet", state=("on", "isolated", "idle"))
QUIET = cpuset("/quiet", (1,))
LATE = queued(4, wait_ns=WAITS_NS)


def test_set_that_idles() -> None:
    (one,) = found(
        [busy(0), IDLE],
        [cpuset("default", (0,)), QUIET],
        [hog(0, LATE, switched_ns=0), queue(1)],
    )
    assert one == Finding(
        code="idle-while-waiting",
        text="set /quiet idles (cpu1), and in set default 1 task waits for cpu0, the "
        "longest for 0.1 s",
        cpus=(1,),
        advice=None,
    )


def test_set_that_idles_while_many_wait() -> None:
    """The one where most wait; CPUs that are offline neither idle nor wait."""
    cpus = [
        *(busy(0), busy(1), busy(2, set="/db"), busy(5, set="/app")),
        *(cpu(number, set="/quiet", state=("on", "idle")) for number in (3, 4)),
        offline(6, set="/quiet"),
    ]
    queues = [
        hog(0, LATE, switched_ns=0),
        hog(1, queued(5, wait_ns=SECOND), queued(6, wait_ns=5), switched_ns=0),
        hog(2, *(queued(n, wait_ns=n * SECOND) for n in (7, 8, 30)), switched_ns=0),
        *(queue(number) for number in (3, 4)),
        hog(5, queued(40), switched_ns=0),
    ]
    (one,) = found(cpus, [], queues)
    assert one.cpus == (3, 4)
    assert one.text == (
        "set /quiet idles (cpu3-4), and in set /db 3 tasks wait for cpu2, the longest "
        "for 30.0 s"
    )
    # And where they wait on several.
    (one,) = found(cpus, [], queues[:2])
    assert "in set default 2 tasks wait for cpu0-1, the longest for 1.0 s" in one.text


@pytest.mark.parametrize(
    ("cpus", "waiting"),
    [
        # Nobody waits, or for no longer than until the next tick.
        ([busy(0), IDLE], []),
        ([busy(0), IDLE], [queued(4, wait_ns=WAITS_NS - 1)]),
        ([busy(0), IDLE], [queued(4, wait_ns=None)]),
        ([busy(0), IDLE], [queued(4, throttled=True)]),
        # A set idles if all of it does.
        ([busy(0), IDLE, busy(2, set="/quiet")], [LATE]),
        # Tasks of its own it will take soon, or the one in charge finds another line.
        ([busy(0, set="/quiet"), IDLE], [LATE]),
        ([busy(0), offline(1, set="/quiet")], [LATE]),
        ([busy(0), busy(1, set="/quiet")], [LATE]),
    ],
)
def test_set_that_does_not_idle(cpus: list[Cpu], waiting: list[Queued]) -> None:
    queues = [hog(0, *waiting, switched_ns=0), queue(1)]
    assert found(cpus, [QUIET], queues) == ()


# --- interrupts

FOUR = [busy(0), busy(1), isolated(2), isolated(3, "nohz_full"), offline(4)]


def test_isolated_cpu_that_may_get_interrupts() -> None:
    """Since boot: where they go now, as nobody knows when those counted came."""
    (one,) = found(FOUR, irqs=[irq(24, {}, effective=(2,), affinity=(2,))])
    assert one == Finding(
        code="isolated-takes-interrupts",
        text="cpu2 is isolated, and may get 1 interrupt of devices (24 eth0)",
        cpus=(2,),
        advice="echo 0-1 > /proc/irq/24/smp_affinity_list",
    )


def test_each_isolated_cpu_has_its_line() -> None:
    """Those that came most often first, and not more than a line takes."""
    irqs = [
        *(irq(24 + number, {3: number}, effective=(3,)) for number in range(1, 6)),
        irq(40, {2: 3}, effective=(2,)),
        irq(41, {2: 9}, effective=(2,)),
    ]
    first, second, *_ = found(FOUR, irqs=irqs)
    assert first.cpus == (2,)
    assert first.text == (
        "cpu2 is isolated, and may get 2 interrupts of devices (41 eth17, 40 eth16)"
    )
    assert first.advice == "echo 0-1 > /proc/irq/41/smp_affinity_list and the others'"
    assert second.cpus == (3,)
    assert second.text == (
        "cpu3 is nohz_full, and may get 5 interrupts of devices (29 eth5, 28 eth4, "
        "27 eth3, ...)"
    )


def test_isolated_cpu_that_took_interrupts() -> None:
    """In an interval: what came, wherever it goes now."""
    irqs = [
        irq(24, {0: 9, 2: 1}, effective=(0,)),
        irq(25, {0: 8, 2: 4}, effective=(0,)),
        # This one may, but did not.
        irq(26, {1: 20}, effective=(2,)),
    ]
    (one,) = found(FOUR, irqs=irqs, in_interval=True)
    assert one.code == "isolated-takes-interrupts"
    assert one.text == (
        "cpu2 is isolated, and takes 2 interrupts of devices (25 eth1, 24 eth0)"
    )
    (one,) = found(FOUR, irqs=irqs)
    assert one.text == (
        "cpu2 is isolated, and may get 1 interrupt of devices (26 eth2)"
    )


OWN = irq(24, {}, effective=(2,), affinity=(2, 4), managed=True)
SHARED = irq(25, {}, effective=(2,), affinity=(1, 2), managed=True)


def test_queue_of_its_own_disturbs_if_it_came() -> None:
    assert found(FOUR, irqs=[OWN]) == ()
    came = irq(24, {2: 1}, effective=(2,), affinity=(2, 4), managed=True)
    one, *_ = found(FOUR, irqs=[came], in_interval=True)
    assert one.code == "isolated-takes-interrupts"


def test_only_the_kernel_moves_what_it_manages() -> None:
    (one,) = found(FOUR, irqs=[SHARED])
    assert one.text.endswith("may get 1 interrupt of devices (25 eth1)")
    advice = "the kernel places these itself: boot with isolcpus=managed_irq,LIST"
    assert one.advice == advice
    # Of others nobody need boot for.
    (one,) = found(FOUR, irqs=[SHARED, irq(30, {}, effective=(2,))])
    assert one.advice == "echo 0-1 > /proc/irq/30/smp_affinity_list"


def test_nowhere_else_to_go() -> None:
    all_of = [isolated(2), isolated(3), offline(4)]
    (one,) = found(all_of, irqs=[irq(24, {}, effective=(2,))])
    assert one.advice is None


@pytest.mark.parametrize(
    "one",
    [
        busy(2),
        busy(2, set="/db"),
        isolated(2, "rcu_nocb"),
        isolated(2, "no-intr", "isolated"),
        offline(2, state=("off", "isolated")),
    ],
)
def test_cpus_that_may_be_interrupted(one: Cpu) -> None:
    assert found([busy(0), one], irqs=[irq(24, {}, effective=(2,))]) == ()


@pytest.mark.parametrize("in_interval", [False, True])
def test_most_interrupts(in_interval: bool) -> None:
    irqs = [
        irq(24, {0: 300, 1: 20}, affinity=(0, 1, 4)),
        irq(25, {0: 400, 1: 80}, affinity=(0, 2)),
        irq(26, {1: 200}),
    ]
    (one,) = found([busy(0), busy(1)], irqs=irqs, in_interval=in_interval)
    assert one == Finding(
        code="most-interrupts",
        text="cpu0 takes 70 % of device interrupts (most of irq 25 eth1, affinity 0,2)",
        cpus=(0,),
        advice=None,
    )


def test_busiest_cpu_is_named_if_interrupts_were_asked_for() -> None:
    even = [irq(24, {0: 30}), irq(25, {1: 29}), irq(26, {2: 28})]
    cpus = [busy(0), busy(1), busy(2)]
    assert found(cpus, irqs=even) == ()
    (one,) = found(cpus, irqs=even, asks_irqs=True)
    assert one.text == (
        "cpu0 takes 34 % of device interrupts (most of irq 24 eth0, affinity 0)"
    )
    # Too few to tell anything.
    assert found(cpus, irqs=[irq(24, {0: 99})]) == ()


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [
        ([busy(0), busy(1)], {}),
        # One of two always takes half of them.
        ([busy(0), busy(1)], {0: 50, 1: 50}),
        ([busy(0), busy(1)], {0: 66, 1: 34}),
        ([busy(0), busy(1), busy(2)], {0: 49, 1: 49, 2: 2}),
        # Who else should take them?
        ([busy(0)], {0: 100}),
        ([busy(0), offline(1)], {0: 100}),
    ],
)
def test_interrupts_that_are_spread(cpus: list[Cpu], counts: dict[int, int]) -> None:
    assert found(cpus, irqs=[irq(24, counts)] if counts else []) == ()


@pytest.mark.parametrize(
    ("others", "least"), [(1, 67), (2, 50), (7, 50)], ids=["2", "3", "8"]
)
def test_share_that_is_worth_a_line(others: int, least: int) -> None:
    cpus = [busy(number) for number in range(1 + others)]
    assert MOST == 0.5
    for count in (least - 1, least):
        counts = {0: count, 1: 100 - count}
        if others > 1:
            rest = 100 - count
            counts = {0: count, 1: rest // 2, 2: rest - rest // 2}
        told = found(cpus, irqs=[irq(24, counts)])
        assert [each.cpus for each in told] == ([(0,)] if count == least else [])


def test_worst_first() -> None:
    """All of them at once."""
    cpus = [busy(0), busy(1), IDLE, isolated(2), busy(3), busy(5)]
    all_of = found(
        cpus,
        [
            cpuset("/bad", (0,), kind="invalid", reason="none"),
            cpuset("/db", (3,), tasks=tasks(1, (), [STRAY])),
        ],
        [
            hog(5, queued(4), current=fifo(9, 50), switched_ns=0),
            hog(0, queued(4)),
            hog(3, lag_why="interrupts off", ticked_ns=SECOND),
        ],
        [irq(24, {2: 500}, effective=(2,))],
    )
    assert [each.code for each in all_of] == [
        *("not-ticked", "not-switched", "starving-tasks", "partition-invalid"),
        *("isolated-takes-interrupts", "idle-while-waiting", "straying-tasks"),
        "most-interrupts",
    ]


def test_many_cpus_alike_are_told_together() -> None:
    cpus = [busy(number) for number in range(9)]
    queues = [hog(number, queued(4)) for number in range(9)]
    *first, last = found(cpus, (), queues)
    assert [each.cpus for each in first] == [(0,), (1,), (2,), (3,)]
    assert (last.code, last.cpus) == ("not-switched", (4, 5, 6, 7, 8))
    assert last.text == "likewise 5 other CPUs: 4-8"
    assert len(found(cpus[:5], (), queues[:5])) == 5
