# SPDX-License-Identifier: LGPL-2.1-or-later

"""Findings about CPUs and sets made by hand.

The findings of each case are in ``tests/golden/cpus/findings.txt``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from msatools.cpus.diagnostics import LONG_WAIT_NS, MOST, WAITS_NS, Known, findings
from msatools.cpus.model import Cpu, Diagnostic, Irq, RunnableTask, RunQueue
from msatools.reports.units import ranges
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
from tests.support.golden import Golden

Case = Mapping[str, Any]
"""Arguments of :func:`found` that are not empty."""


def found(**known: Any) -> tuple[Diagnostic, ...]:
    nothing = {"cpus": (), "sets": (), "queues": (), "irqs": (), "in_interval": False}
    return findings(Known(**(nothing | known)))


def busy(number: int, **others: Any) -> Cpu:
    return cpu(number, **({"state": ("on",)} | others))


def isolated(number: int, *states: str, **others: Any) -> Cpu:
    given: dict[str, Any] = {"state": ("on", *(states or ("isolated",)))}
    return cpu(number, **(given | others))


def hog(number: int, *waiting: RunnableTask, **others: Any) -> RunQueue:
    """Make the run queue of a CPU that has run task 9 for two seconds."""
    given: dict[str, Any] = {
        "current": queued(9),
        "switched_ns": 2 * SECOND,
        "lag_why": None,
        "running": 1 + len(waiting),
    }
    return queue(number, waiting=waiting, **(given | others))


def on_hog(*waiting: RunnableTask, **others: Any) -> Case:
    """Make a case of one busy CPU."""
    return {"cpus": [busy(3)], "queues": [hog(3, *waiting, **others)]}


# --- CPUs that do not switch

OFF: Case = {"lag_why": "interrupts off", "ticked_ns": 4_094_000_000}
THROTTLED = queued(4, throttled=True)
WAITING: Mapping[str, Sequence[RunnableTask]] = {
    "one": [queued(4)],
    "three": [queued(4), queued(12), queued(7)],
    "one that just came": [queued(4), queued(5, wait_ns=5)],
    "one for an unknown time": [queued(4), queued(5, wait_ns=None)],
    "one that is throttled": [queued(4), queued(8, throttled=True)],
}
CLASSES = ("fair", "realtime", "deadline", "stop")

STANDING: Mapping[str, Case] = {
    "nothing": {},
    "a quiet machine": {
        "cpus": [cpu(0), busy(1), busy(2), offline(3)],
        "sets": [cpuset("default", (0, 1, 2)), cpuset("/none", ())],
        "queues": [
            *(queue(0), hog(1), hog(2)),
            queue(3, current=None, lag_why="offline"),
        ],
        "irqs": [irq(24, {0: 40, 1: 30, 2: 30})],
    },
    "interrupts off": on_hog(**OFF),
    "not run by its host": on_hog(**OFF | {"lag_why": "not run by its host"}),
    "off, nobody knows since when": on_hog(
        **OFF | {"ticked_ns": None, "current": None}
    ),
    **{
        f"a clock that stands: {why}": on_hog(
            lag_why=why, ticked_ns=90 * SECOND, lag_ns=90 * SECOND
        )
        for why in ("idle", "tick stopped", "offline", None)
    },
    **{
        f"{each} runs, waiting: {who}": on_hog(
            *waiting, current=queued(9, sched_class=each)
        )
        for each in CLASSES
        for who, waiting in WAITING.items()
    },
    # A single task can run for any time.
    "alone": on_hog(),
    "who waits is throttled": on_hog(THROTTLED),
    "who waits just came": on_hog(queued(4, wait_ns=LONG_WAIT_NS - 1)),
    "who waits does so for an unknown time": on_hog(queued(4, wait_ns=None)),
    "runs since just now": on_hog(queued(4), switched_ns=LONG_WAIT_NS - 1),
    "runs since nobody knows when": on_hog(queued(4), switched_ns=None),
    "nobody knows what runs": on_hog(queued(4), current=None),
    "on its way to who waits": on_hog(queued(4), current=queued(0)),
    # Even if the CPU was briefly switched.
    **{
        f"{each} tasks starve others, switched {since}": on_hog(
            *(fifo(8, 20), queued(4), queued(5, wait_ns=LONG_WAIT_NS - 1)),
            current=queued(9, sched_class=each),
            switched_ns=since,
        )
        for each in CLASSES[1:]
        for since in (0, LONG_WAIT_NS - 1, None)
    },
    **{
        f"nobody starves: {number}": on_hog(
            *waiting, current=fifo(9, 50), switched_ns=0
        )
        for number, waiting in enumerate(
            ([], [queued(4, wait_ns=LONG_WAIT_NS - 1)], [THROTTLED])
        )
    },
    "many CPUs alike": {
        "cpus": [busy(number) for number in range(9)],
        "queues": [hog(number, queued(4)) for number in range(9)],
    },
    "fewer CPUs alike": {
        "cpus": [busy(number) for number in range(5)],
        "queues": [hog(number, queued(4)) for number in range(5)],
    },
}

# --- sets

STRAY = bound(7, (0, 1), "may run on 0, which /db has not")
KTHREAD = bound(8, (0, 1), "last on 1, and is of default", kthread=True)
KINDS = ("root", "isolated", "limit", "isolcpus", "nohz_full")
TWO = [busy(0), busy(1)]


def of_set(name: str, cpus: Sequence[int], **others: Any) -> Case:
    """Make a case of one set, with two CPUs online."""
    all_of = [*TWO, offline(2), offline(3)]
    return {"cpus": all_of, "sets": [cpuset(name, cpus, **others)]}


def invalid(**others: Any) -> Case:
    return of_set("/db", (0, 1), kind="invalid", **others)


def straying(*who: Any, name: str = "/db", **others: Any) -> Case:
    return of_set(name, (1,), tasks=tasks(2, (), who), **others)


STRAYS = {
    "one": [STRAY],
    "one and a thread": [STRAY, KTHREAD],
    "two": [STRAY, bound(9, (0,), "x")],
    "three and a thread": [STRAY, *(bound(n, (0,), "x") for n in (9, 10)), KTHREAD],
}
SETS: Mapping[str, Case] = {
    "invalid for a reason": invalid(reason="Parent is not a partition root"),
    "invalid, with CPUs that are there": invalid(asked=(1,)),
    "invalid, with any CPUs": invalid(asked=None),
    "invalid, with some CPUs that are there": invalid(asked=(1, 2)),
    "invalid for two reasons": invalid(asked=(3,), reason="Not exclusive"),
    **{
        f"in force: {kind}": of_set("/db", (0,), kind=kind, asked=(0, 5))
        for kind in KINDS
    },
    **{
        f"{who} that stray, of a set that is {kind}": straying(*strays, kind=kind)
        for kind in KINDS
        for who, strays in STRAYS.items()
    },
    "stray, of one that is invalid": straying(STRAY, kind="invalid", reason="none"),
    "nobody looked": of_set("/db", (1,)),
    "nobody strays": straying(),
    "pinned ones do not stray": of_set("/db", (1,), tasks=tasks(2, [STRAY])),
    "the kernel's own come and go": straying(KTHREAD),
    # Tasks bound to offline CPUs.
    "default": straying(STRAY, name="default"),
}

# --- idle sets

IDLE = cpu(1, set="/quiet", state=("on", "isolated", "idle"))
QUIET = cpuset("/quiet", (1,))
LATE = queued(4, wait_ns=WAITS_NS)
MANY = {
    "cpus": [
        *(busy(0), busy(1), busy(2, set="/db"), busy(5, set="/app")),
        *(cpu(number, set="/quiet", state=("on", "idle")) for number in (3, 4)),
        offline(6, set="/quiet"),
    ],
    "queues": [
        hog(0, LATE, switched_ns=0),
        hog(1, queued(5, wait_ns=SECOND), queued(6, wait_ns=5), switched_ns=0),
        hog(2, *(queued(n, wait_ns=n * SECOND) for n in (7, 8, 30)), switched_ns=0),
        *(queue(number) for number in (3, 4)),
        hog(5, queued(40), switched_ns=0),
    ],
}


def idling(cpus: Sequence[Cpu], *waiting: RunnableTask) -> Case:
    queues = [hog(0, *waiting, switched_ns=0), queue(1)]
    return {"cpus": cpus, "sets": [QUIET], "queues": queues}


IDLING: Mapping[str, Case] = {
    "a set that idles": idling([busy(0), IDLE], LATE),
    "the one where most wait": MANY,
    "where they wait on several": MANY | {"queues": MANY["queues"][:2]},
    "nobody waits": idling([busy(0), IDLE]),
    "until the next tick": idling([busy(0), IDLE], queued(4, wait_ns=WAITS_NS - 1)),
    "for an unknown time": idling([busy(0), IDLE], queued(4, wait_ns=None)),
    "throttled": idling([busy(0), IDLE], THROTTLED),
    "all of a set has to idle": idling([busy(0), IDLE, busy(2, set="/quiet")], LATE),
    # Its own waiting tasks run soon, or are another finding.
    "its own tasks wait": idling([busy(0, set="/quiet"), IDLE], LATE),
    "it is offline": idling([busy(0), offline(1, set="/quiet")], LATE),
    "it is busy": idling([busy(0), busy(1, set="/quiet")], LATE),
}

# --- interrupts

FOUR = [busy(0), busy(1), isolated(2), isolated(3, "nohz_full"), offline(4)]
TO_2 = irq(24, {}, effective=(2,))
OWN = {"effective": (2,), "affinity": (2, 4), "managed": True}
SHARED = irq(25, {}, effective=(2,), affinity=(1, 2), managed=True)
CAME = [
    irq(24, {0: 9, 2: 1}, effective=(0,)),
    irq(25, {0: 8, 2: 4}, effective=(0,)),
    # This one is allowed, but did not occur.
    irq(26, {1: 20}, effective=(2,)),
]
UNEVEN = [
    irq(24, {0: 900, 1: 60}, affinity=(0, 1, 4)),
    irq(25, {0: 1200, 1: 240}, affinity=(0, 2)),
    irq(26, {1: 600}),
]
EVEN = [irq(24, {0: 30}), irq(25, {1: 29}), irq(26, {2: 28})]
THREE = [busy(0), busy(1), busy(2)]


def disturbed(*irqs: Irq, cpus: Sequence[Cpu] = FOUR, **others: Any) -> Case:
    return {"cpus": cpus, "irqs": irqs, **others}


INTERRUPTS: Mapping[str, Case] = {
    # Since boot, the current target counts, because the time of counts is unknown.
    "may be disturbed": disturbed(irq(24, {}, effective=(2,), affinity=(2,))),
    "each has its line, those that came most often first": disturbed(
        *(irq(24 + number, {3: number}, effective=(3,)) for number in range(1, 6)),
        *(irq(40, {2: 3}, effective=(2,)), irq(41, {2: 9}, effective=(2,))),
    ),
    "what came in an interval, wherever it goes now": disturbed(
        *CAME, in_interval=True
    ),
    "the same since boot": disturbed(*CAME),
    "a queue of its own": disturbed(irq(24, {}, **OWN)),
    "a queue of its own that came": disturbed(irq(24, {2: 1}, **OWN), in_interval=True),
    "only the kernel moves what it manages": disturbed(SHARED),
    "of others nobody need boot for": disturbed(SHARED, irq(30, {}, effective=(2,))),
    "nowhere else to go": disturbed(TO_2, cpus=[isolated(2), isolated(3), offline(4)]),
    **{
        f"may be interrupted: {one.set}, {' '.join(one.state)}": disturbed(
            TO_2, cpus=[busy(0), one]
        )
        for one in (
            *(busy(2), busy(2, set="/db"), isolated(2, "rcu_nocb")),
            *(isolated(2, "no-intr", "isolated"),),
            offline(2, state=("off", "isolated")),
        )
    },
    "most": disturbed(*UNEVEN, cpus=TWO),
    "most in an interval": disturbed(*UNEVEN, cpus=TWO, in_interval=True),
    "even": disturbed(*EVEN, cpus=THREE),
    "even, and asked for": disturbed(*EVEN, cpus=THREE, asks_irqs=True),
    "too few to tell": disturbed(irq(24, {0: 1999}), cpus=THREE),
    "too few in an interval": disturbed(irq(24, {0: 99}), cpus=THREE, in_interval=True),
    "most of a clock": disturbed(irq(0, {0: 9000}, name="timer"), cpus=THREE),
    "none": disturbed(cpus=TWO),
    # Of two CPUs, one always takes half or more.
    "half": disturbed(irq(24, {0: 1000, 1: 1000}), cpus=TWO),
    "not much more than half": disturbed(irq(24, {0: 1320, 1: 680}), cpus=TWO),
    "half of three": disturbed(irq(24, {0: 980, 1: 980, 2: 40}), cpus=THREE),
    # There is no other CPU.
    "one CPU alone": disturbed(irq(24, {0: 2000}), cpus=[busy(0)]),
    "one CPU that is online": disturbed(irq(24, {0: 2000}), cpus=[busy(0), offline(1)]),
}

# --- all cases

ALL_AT_ONCE: Case = {
    "cpus": [busy(0), busy(1), IDLE, isolated(2), busy(3), busy(5)],
    "sets": [
        cpuset("/bad", (0,), kind="invalid", reason="none"),
        cpuset("/db", (3,), tasks=tasks(1, (), [STRAY])),
    ],
    "queues": [
        hog(5, queued(4), current=fifo(9, 50), switched_ns=0),
        hog(0, queued(4)),
        hog(3, lag_why="interrupts off", ticked_ns=SECOND),
    ],
    "irqs": [irq(24, {2: 5000}, effective=(2,))],
}
CASES = {**STANDING, **SETS, **IDLING, **INTERRUPTS, "worst first": ALL_AT_ONCE}


def lines() -> Iterator[str]:
    for name, case in CASES.items():
        yield f"{name}:"
        for one in found(**case):
            yield f"  {one.code} [{ranges(one.cpus)}] {one.text}"
            if one.advice is not None:
                yield f"    {one.advice}"


def test_golden_findings(golden: Golden) -> None:
    golden("cpus/findings", lines())


@pytest.mark.parametrize(
    ("others", "least"), [(1, 67), (2, 50), (7, 50)], ids=["2", "3", "8"]
)
def test_least_share_of_a_finding(others: int, least: int) -> None:
    cpus = [busy(number) for number in range(1 + others)]
    assert MOST == 0.5
    for count in (least - 1, least):
        counts = {0: count, 1: 100 - count}
        if others > 1:
            rest = 100 - count
            counts = {0: count, 1: rest // 2, 2: rest - rest // 2}
        counts = {cpu: 20 * number for cpu, number in counts.items()}
        diagnostics = found(cpus=cpus, irqs=[irq(24, counts)])
        assert [row.cpus for row in diagnostics] == ([(0,)] if count == least else [])
