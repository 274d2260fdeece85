# SPDX-License-Identifier: LGPL-2.1-or-later

"""The view ``--stalls`` of reports made by hand: see ``tests/golden/cpus``."""

from collections.abc import Iterable

from msgspec.structs import replace

from msatools.cpus.model import CrossCall, OverdueTimer, Stalls, StopMachine
from msatools.cpus.stall_chains import StallEvidence
from msatools.cpus.stall_findings import find_stalls
from msatools.render.blocks import Block, Table
from msatools.render.cpus.report import cpus_blocks as blocks
from tests.cpus.madecpus import cpu, report
from tests.cpus.stalls.made import (
    LIMITS,
    SECOND,
    evidence,
    grace_period,
    held,
    lock,
    queue,
    reader,
    task,
)
from tests.render.screens import EVIL, Screens, check_escaped, check_screens
from tests.support.golden import Golden

OFF = {"tick_late_ns": 31 * SECOND, "interrupts": "off", "watchdog_ns": 32 * SECOND}


def of(seen: StallEvidence, stolen: tuple[int, ...] = ()) -> Stalls:
    return Stalls(
        limits=seen.limits,
        found=find_stalls(seen),
        cpus=tuple(seen.cpus.values()),
        rcu=seen.rcu,
        calls=tuple(seen.calls),
        stop_machine=seen.stop_machine,
        timers=tuple(seen.timers),
        halted_ns=seen.halted_ns,
        stolen=stolen,
    )


def shown(stalls: Stalls, *, verbose: bool = False) -> Iterable[Block]:
    made = replace(report([cpu(0), cpu(1)]), stalls=stalls)
    return blocks(made, view="stalls", verbose=verbose)


def chain(name: str = "mount") -> Stalls:
    """A chain of two CPUs, tasks that wait for RCU, and a cross call."""
    waiters = tuple(
        reader(200 + n, name, state="D", function="synchronize_rcu") for n in range(7)
    )
    return of(
        evidence(
            held(
                5,
                why="spins-for-lock",
                comm=name,
                function="take",
                wanted=lock(2),
                running_ns=31 * SECOND,
                waiting=2,
            ),
            held(2, **OFF, comm=name),
            held(1, why="waits-for-call", comm=name, calls_cpus=(2,)),
            queues=[
                queue(5, task(105, name, 31), [task(9, "migration/5", 30, "stop")]),
                queue(1, task(101, name, 6)),
            ],
            rcu=grace_period(cpus=(5,), age_ns=31 * SECOND, waiters=waiters),
            calls=[
                CrossCall(cpu=2, function="drain", caller=1, kind="call"),
                CrossCall(cpu=2, function=None, caller=None, kind="wake-up"),
            ],
            timers=[
                OverdueTimer(cpu=2, kind="hrtimer", function="t", late_ns=31 * SECOND)
            ],
        ),
        stolen=(2,),
    )


def screens() -> Screens:
    quiet = of(evidence(rcu=grace_period(active=False, age_ns=None)))
    below = of(evidence(held(1, tick_late_ns=2 * SECOND), rcu=grace_period(age_ns=9)))
    unknown = replace(LIMITS, soft_watchdog=None, hard_watchdog=None)
    stop = StopMachine(
        function=None, step="prepare", stopped=(0, 2), missing=(2,), since_ns=None
    )
    reading = reader(77, "reader", state="R", cpu=1)
    asked = grace_period(
        active=False,
        age_ns=2 * SECOND,
        expedited_cpus=(3,),
        expedited_tasks=(reading,),
        thread=None,
        callbacks=None,
    )
    hog = queue(1, task(50, "hog", 3, "realtime"), [task(9, "ksoftirqd/1", 28)])
    many = [
        held(number, why="spins-for-lock", wanted=lock(2), running_ns=31 * SECOND)
        for number in range(8, 40)
    ]
    herd = evidence(
        held(2, **OFF),
        *many,
        queues=[
            queue(each.cpu, task(each.pid or 0, "task", 31), [task(9, "m", 30)])
            for each in many
        ],
    )
    crashed = evidence(
        held(0, tick_late_ns=90 * SECOND, why="panic"), halted_ns=90 * SECOND
    )
    return {
        "many CPUs for one lock": [
            block for block in shown(of(herd)) if not isinstance(block, Table)
        ],
        "after a crash": shown(of(crashed)),
        "nothing": shown(quiet),
        "nothing, -v": shown(quiet, verbose=True),
        "below the limits": shown(below),
        "below the limits, -v": shown(below, verbose=True),
        "a chain": shown(chain()),
        "a chain, -v": shown(chain(), verbose=True),
        "nothing is known": shown(of(evidence(limits=unknown, rcu=None))),
        "a grace period that does not begin": shown(of(evidence(rcu=asked))),
        "a machine that stops": shown(of(evidence(stop_machine=stop)), verbose=True),
        "a realtime task": shown(of(evidence(queues=[hog]))),
    }


def test_golden(golden: Golden) -> None:
    check_screens(golden, "cpus/stalls", screens())


def test_names_are_escaped() -> None:
    check_escaped(shown(chain(EVIL), verbose=True), at_least=8)
