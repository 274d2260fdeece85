# SPDX-License-Identifier: LGPL-2.1-or-later

"""Gelato and Solaris states, of threads made by hand and in the lab's dumps."""

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.kernel.structs import Booleans
from msatools.prstat.states import StateTime, states
from msatools.tasks.accounting import EXIT_ZOMBIE
from msatools.tasks.waits import TaskClass
from tests.prstat.dumps import MIDWAY, OFF, ON, Dump, long, read_dump
from tests.prstat.made import BLOCKED, NOW, SECOND, Made, Thread
from tests.prstat.made import OFF as NO_STATISTICS
from tests.prstat.made import ON as STATISTICS

GELATO = (
    *("ONCPU_USR", "ONCPU_SYS", "ONCPU_TRAP", "INTERRUPTED"),
    *("ONACTIVEQUEUE", "ONEXPIREDQUEUE"),
    *("PAGING_SLEEP", "FUTEX_SLEEP", "POLL_SLEEP"),
    *("INTERRUPTIBLE_SLEEP", "UNINTERRUPTIBLE_SLEEP", "STOPPED", "ZOMBIE"),
)
SOLARIS = (
    *("USER", "SYSTEM", "TRAP", "TFAULT", "DFAULT", "KFAULT"),
    *("USER_LOCK", "SLEEP", "WAIT_CPU", "STOPPED"),
)
States = dict[str, StateTime]


def of(made: Made | Dump, family: str, **options: Booleans) -> States:
    table = made.table if isinstance(made, Dump) else made.tasks
    found = states(table, made.lives, made.parts, made.accounting, made.now, **options)
    assert tuple(s.name for s in found) == GELATO + SOLARIS
    for state in found:
        assert (state.ns is None) == (state.bound == "none")
        assert (state.now_ns is None) == (state.now_threads is None)
        assert state.reason
        assert "\n" not in state.reason
    return {state.name: state for state in found if state.family == family}


def sleeper(task_class: TaskClass, **more: object) -> Thread:
    """Return a thread that ran 2 s, waited 1 s, slept 3 s, and has slept for 4 s."""
    past = {"sum_exec_ns": 2 * SECOND, "run_delay_ns": SECOND}
    slept = {"sum_sleep_ns": 3 * SECOND, "sum_block_ns": SECOND}
    start = NOW - 4 * SECOND
    stamp = {"sleep_start_ns": start, "exec_start_ns": start}
    kind = {"task_class": task_class, "age_ns": 4 * SECOND}
    return {**past, **slept, **stamp, **kind, **more}


@pytest.mark.parametrize(
    ("task_class", "more", "gelato", "solaris"),
    [
        (TaskClass.USR, {}, "ONCPU_USR", "USER"),
        (TaskClass.SYS, {}, "ONCPU_SYS", "SYSTEM"),
        (TaskClass.INT, {}, "INTERRUPTED", "SYSTEM"),
        (TaskClass.LAT, {}, "ONACTIVEQUEUE", "WAIT_CPU"),
        (TaskClass.WAK, {"state": 0x200}, "ONACTIVEQUEUE", "WAIT_CPU"),
        (TaskClass.FLT, {"state": BLOCKED}, "PAGING_SLEEP", "DFAULT"),
        (TaskClass.SWP, {"state": BLOCKED}, "PAGING_SLEEP", "DFAULT"),
        (TaskClass.LCK, {}, "FUTEX_SLEEP", "USER_LOCK"),
        (TaskClass.POL, {}, "POLL_SLEEP", "SLEEP"),
        (TaskClass.TMR, {}, "INTERRUPTIBLE_SLEEP", "SLEEP"),
        (TaskClass.DSK, {"state": BLOCKED}, "UNINTERRUPTIBLE_SLEEP", "SLEEP"),
        (TaskClass.KTW, {"state": 0x402}, "UNINTERRUPTIBLE_SLEEP", "SLEEP"),
        (TaskClass.STP, {"state": 4}, "STOPPED", "STOPPED"),
        (TaskClass.TRC, {"state": 8}, "STOPPED", "STOPPED"),
        (TaskClass.ZMB, {"exit_state": EXIT_ZOMBIE}, "ZOMBIE", None),
    ],
)
def test_where_a_thread_is_now(
    task_class: TaskClass, more: dict[str, int], gelato: str, solaris: str | None
) -> None:
    made = Made(sleeper(task_class, **more), accounting=NO_STATISTICS)
    for family, name in (("gelato", gelato), ("solaris", solaris)):
        found = of(made, family)
        current = {n: s.now_ns for n, s in found.items() if s.now_threads}
        assert current == ({name: 4 * SECOND} if name else {})
        unknown = {n for n, s in found.items() if s.now_threads is None}
        never = {"ONCPU_TRAP", "ONEXPIREDQUEUE"}
        assert unknown == (
            never if family == "gelato" else {"TRAP", "TFAULT", "KFAULT"}
        )


def test_without_statistics() -> None:
    made = Made(sleeper(TaskClass.LCK, sum_sleep_ns=0), accounting=NO_STATISTICS)
    gelato, solaris = of(made, "gelato"), of(made, "solaris")
    for name in ("INTERRUPTIBLE_SLEEP", "UNINTERRUPTIBLE_SLEEP", "STOPPED"):
        assert gelato[name].ns is None
        assert "schedstats" in gelato[name].reason
    assert solaris["SLEEP"].ns == 7 * SECOND


def test_interrupts_and_paging() -> None:
    keeps = replace(STATISTICS, irq_time=True)
    delays = {"irq": SECOND, "swapin": SECOND // 2}
    whole = sleeper(TaskClass.LCK, sum_exec_ns=SECOND, delays=delays)
    made = Made(whole, accounting=keeps)
    found = {name: (s.ns, s.bound) for name, s in of(made, "gelato").items()}
    assert found["INTERRUPTED"] == (SECOND, "exact")
    assert found["PAGING_SLEEP"] == (SECOND // 2, "lower")
    assert of(made, "solaris")["SLEEP"].ns == 7 * SECOND
    one = sleeper(TaskClass.LCK, delays=delays)
    some = of(Made(one, sleeper(TaskClass.LCK)), "gelato")
    assert some["PAGING_SLEEP"].bound == "lower"
    assert some["INTERRUPTED"].ns is None
    assert "IRQ_TIME" in some["INTERRUPTED"].reason
    none = of(Made(sleeper(TaskClass.LCK), accounting=keeps), "gelato")
    assert "delay accounting" in none["INTERRUPTED"].reason


def test_page_faults_that_last_count() -> None:
    """Without a current fault, the number of faults is unknown."""
    delays = {"swapin": 0}
    fault = sleeper(TaskClass.FLT, delays=delays)
    made = Made(fault, fault, sleeper(TaskClass.LCK, delays=delays))
    text = np.array([True, False, False])
    for family, name, ns in (
        ("gelato", "PAGING_SLEEP", 8 * SECOND),
        ("solaris", "DFAULT", 4 * SECOND),
    ):
        found = of(made, family, text_faults=text)[name]
        assert (found.ns, found.bound) == (ns, "lower")
        rests = np.array([False, False, True])
        found = of(made, family, selected=rests, text_faults=text)[name]
        assert (found.ns, found.bound) == (None, "none")


# --- all threads in the dumps


@pytest.fixture(params=[*OFF, *ON, *long(*MIDWAY)])
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


def test_each_thread_is_in_one_state(dump: Dump) -> None:
    """States that are always counted sum to the lifetimes."""
    gelato, solaris = of(dump, "gelato"), of(dump, "solaris")
    current, alive = (
        sum(state.now_threads or 0 for state in family.values())
        for family in (gelato, solaris)
    )
    dead = gelato["ZOMBIE"].now_threads or 0
    assert (current, alive) == (len(dump.table), len(dump.table) - dead)
    assert sum(s.now_ns or 0 for s in gelato.values()) == dump.now.age_ns.sum()
    assert dead >= 4
    total = int(dump.lives.lifetime_ns.sum())
    sleep = [solaris["SLEEP"].ns]
    if solaris["STOPPED"].bound == "exact":
        sleep.append(solaris["STOPPED"].ns)
    always = ("ONCPU_USR", "ONCPU_SYS", "ONACTIVEQUEUE", "ZOMBIE")
    assert sum(gelato[n].ns or 0 for n in always) + sum(n or 0 for n in sleep) == total
    kept = {"INTERRUPTIBLE_SLEEP", "UNINTERRUPTIBLE_SLEEP", "STOPPED"}
    assert {gelato[n].ns is None for n in kept} == {dump.run.name in OFF}


def test_tasks_are_in_their_recorded_states(dump: Dump) -> None:
    """The task that waits for a disk interruptibly is left out."""
    for task_class, state in {
        "LCK": "FUTEX_SLEEP",
        "POL": "POLL_SLEEP",
        "FLT": "PAGING_SLEEP",
        "SWP": "PAGING_SLEEP",
        "STP": "STOPPED",
        "TRC": "STOPPED",
        "ZMB": "ZOMBIE",
        "TMR": "INTERRUPTIBLE_SLEEP",
        "DSK": "UNINTERRUPTIBLE_SLEEP",
    }.items():
        named = [
            name
            for name, task in dump.tasks.items()
            if task["class"] == task_class and task["steady"] and name != "aio-wait"
        ]
        assert named
        found = of(dump, "gelato", selected=dump.named(*named))[state]
        assert found.now_threads == len(named), task_class
