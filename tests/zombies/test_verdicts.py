# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every verdict, for real zombies and for zombies made by hand."""

from typing import Any, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.kernel.report import LossLog
from msatools.tasks.stacks import StackCollector
from msatools.tasks.syscalls import WaitOpts
from msatools.zombies.model import Evidence, Heir, Verdict
from msatools.zombies.parents import NONE, SIGCHLD, UNKNOWN, Dead, ParentFacts, Parents
from msatools.zombies.verdicts import (
    BRIEF_NS,
    VERDICTS,
    advice,
    evidence,
    read_doing,
    verdicts,
)
from tests.support.golden import Golden
from tests.zombies.dumps import Dump

SECOND = 1_000_000_000
HOUR = 3600 * SECOND

EXITED, NOTHREAD, ALL, CLONE = 4, 0x2000_0000, 0x4000_0000, 0x8000_0000

PROCESS, MAKER, OTHER_THREAD, TRACER = 0x1000, 0x2000, 0x2800, 0x3000
OWN_PROCESS, OWN_PID, GROUP = 0x4000, 0x5000, 0x6000


def test_every_verdict_of_a_guest(dump: Dump) -> None:
    """Every verdict occurs; tests/truth/zombies.py checks that they are right."""
    assert {*VERDICTS} - {*dump.verdicts.values()} == {"being-reaped", "unknown"}


# --- zombies made by hand


def dead(**other: Any) -> Dead:
    """Make a process that exited an hour ago; several if values are lists."""
    values: dict[str, Any] = {
        "row": 9,
        "leads": True,
        "reaped": False,
        "exit_code": 0,
        "exit_signal": SIGCHLD,
        "ptraced": False,
        "real_parent": MAKER,
        "parent": MAKER,
        "process": OWN_PROCESS,
        "thread_pid": OWN_PID,
        "threads": 0,
        "others": 0,
        "namespace": 4026531836,
        "ns_pid": 0,
        "age_ns": HOUR,
        "age_bound": 2,
    }
    values |= other
    count = max(len(v) if isinstance(v, list) else 1 for v in values.values())
    kinds = dict.fromkeys(("real_parent", "parent", "process", "thread_pid"), "u8")
    kinds |= dict.fromkeys(("leads", "reaped", "ptraced"), "?")
    return Dead(
        **{
            name: np.full(count, value, kinds.get(name, "i8"))
            for name, value in values.items()
        }
    )


def parent(**other: Any) -> ParentFacts:
    """Make a parent with one thread that sleeps and ignores its children."""
    values: dict[str, Any] = {
        "process": PROCESS,
        "pid": 147,
        "comm": "farm",
        "row": 5,
        "living": (5,),
        "state": "S",
        "age_ns": SECOND,
        "disposition": "default",
        "handler": None,
        "ignored": 0,
        "caught": 0,
        "blocked": 0,
        "blocks": False,
        "pending": False,
        "blocking": frozenset(),
        "sigwaits": False,
        "reaper": None,
        "waits": (),
        "stopped": frozenset(),
        "frozen": frozenset(),
        "stuck": frozenset(),
        "killable": True,
    }
    return ParentFacts(**(values | other))


def parents(
    *facts: ParentFacts, index: list[int] | None = None, **other: Any
) -> Parents:
    """Make the parents of one dead task, or of those in *index*."""
    index = [0] if index is None else index
    count = len(index)
    values = {
        "row": np.full(count, 5),
        "stuck_ns": np.full(count, UNKNOWN, np.int64),
        "group": np.full(count, GROUP, np.uint64),
        "tracer": np.zeros(count, np.int64),
        "elsewhere": np.zeros(count, np.bool_),
    }
    values |= {name: np.array([value] * count) for name, value in other.items()}
    return Parents(facts=facts, index=np.array(index, np.intp), **values)


def wait(
    kind: str = "any", pid: int = 0, flags: int = EXITED, **other: Any
) -> WaitOpts:
    number = 150 if pid else None
    values = {"task": MAKER, "kind": kind, "pid": pid, "number": number}
    return WaitOpts(**(values | {"flags": flags} | other))


FOR_OTHER = wait("pid", 0x7777)

STOPPED = {"stopped": frozenset({5}), "state": "T"}
HANDLED = {"disposition": "handler", "handler": 0x40_0000, "caught": 1 << 16}
BLOCKED = {"pending": True, "blocks": True, "blocked": 1 << 16}
STUCK = {"stuck_ns": HOUR}
TRACED = {"elsewhere": True, "tracer": 220}

# Facts that cause each verdict: of the zombie, its parent, and their relation.
CASES: dict[Verdict, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "leader-exited": ({"threads": 3, "others": 3}, {}, {}),
    "being-reaped": ({"reaped": True}, {}, {}),
    "traced": ({"ptraced": True, "parent": TRACER}, {}, TRACED),
    "parent-blocked": ({}, {"stuck": frozenset({5}), "state": "D"}, STUCK),
    "parent-stopped": ({}, STOPPED, {}),
    "reaper-never-reaps": ({}, {"reaper": "subreaper"}, {}),
    "sigchld-blocked": ({}, BLOCKED, {}),
    "waiting-for-other": ({}, {"waits": (FOR_OTHER,)}, {}),
    "clone-child": ({"exit_signal": 10}, {}, {}),
    "handler-missed": ({}, HANDLED, {}),
    "never-waits": ({}, {}, {}),
    "unknown": ({}, {"disposition": None, "waits": None}, {}),
}

TOGETHER = {
    # A parent in wait() is not blocked, and one whose wait takes the zombie reaps it.
    ("parent-blocked", "waiting-for-other"),
    # A blocked SIGCHLD affects only zombies that send it.
    ("sigchld-blocked", "clone-child"),
    # A tracer takes a traced zombie whatever signal it sends.
    ("traced", "clone-child"),
}


def verdict(one: Dead, of: Parents) -> Verdict:
    (number,) = verdicts(one, of).tolist()
    return VERDICTS[number]


def made(*cases: Verdict) -> Verdict:
    """Return the verdict if the facts of several hold; later facts override earlier."""
    of_dead: dict[str, Any] = {}
    of_parent: dict[str, Any] = {}
    between: dict[str, Any] = {}
    for case in cases:
        of_dead |= CASES[case][0]
        of_parent |= CASES[case][1]
        between |= CASES[case][2]
    return verdict(dead(**of_dead), parents(parent(**of_parent), **between))


def test_every_verdict_has_a_case() -> None:
    assert tuple(CASES) == VERDICTS == get_args(Verdict)


@pytest.mark.parametrize("name", CASES)
def test_each_verdict(name: Verdict) -> None:
    assert made(name) == name


@pytest.mark.parametrize("first", VERDICTS[:-2])
def test_order(first: Verdict) -> None:
    """If the facts of two verdicts hold, the earlier verdict is returned."""
    for second in VERDICTS[VERDICTS.index(first) + 1 : -1]:
        if (first, second) not in TOGETHER:
            assert made(second, first) == first, second


def of(between: dict[str, Any] | None = None, **facts: Any) -> Parents:
    """Make the parent of one dead task with some facts changed."""
    return parents(parent(**facts), **(between or {}))


UNKNOWN_PARENT = parents(index=[NONE])
TO_TRACER = {"ptraced": True, "parent": TRACER}
BY_THREAD = {"ptraced": True, "parent": OTHER_THREAD}
OWN_WAIT = wait(flags=EXITED | NOTHREAD, task=OTHER_THREAD)
STUCK_HERE = {"stuck": frozenset({5})}
BRIEF = {"stuck_ns": BRIEF_NS - 1}
SOME = {"living": (5, 6), "stopped": frozenset({5})}
ABOUT = {"reaper": "init", "pending": True, "blocks": True}
WAITING_INIT = {"reaper": "init", "waits": (wait(),)}

DETAILS: list[tuple[Dead, Parents, Verdict]] = [
    (dead(threads=UNKNOWN), of(), "unknown"),
    (dead(), UNKNOWN_PARENT, "unknown"),
    (dead(threads=2), UNKNOWN_PARENT, "leader-exited"),
    (dead(reaped=True), UNKNOWN_PARENT, "being-reaped"),
    (dead(), of(living=()), "never-waits"),
    # One of two waits takes it; a frozen wait does not.
    (dead(), of(waits=(FOR_OTHER, wait())), "being-reaped"),
    (dead(), of(waits=(wait(),), **STOPPED), "parent-stopped"),
    # A wait does not take a zombie traced by another process, but one traced by its
    # parent, whatever signal it sends and whichever thread waits.
    (dead(**TO_TRACER), of(TRACED, waits=(wait(),)), "traced"),
    (dead(ptraced=True, exit_signal=10), of(), "never-waits"),
    (dead(ptraced=True, exit_signal=10), of(waits=(wait(),)), "being-reaped"),
    (dead(**BY_THREAD), of(waits=(OWN_WAIT,)), "being-reaped"),
    # A short sleep explains a recent death.
    (dead(), of(BRIEF, **STUCK_HERE), "never-waits"),
    (dead(age_ns=BRIEF_NS - 1), of(BRIEF, **STUCK_HERE), "parent-blocked"),
    (dead(), of({"stuck_ns": BRIEF_NS}, **STUCK_HERE), "parent-blocked"),
    # It waits in another thread.
    (dead(), of(STUCK, waits=(FOR_OTHER,), **STUCK_HERE), "waiting-for-other"),
    # SIGCHLD is blocked for those that send it.
    (dead(exit_signal=10), of(**BLOCKED), "clone-child"),
    (dead(), of(pending=True), "never-waits"),
    # Some threads are stopped; all threads are stopped.
    (dead(), of(**SOME), "never-waits"),
    (dead(), of(**SOME | {"stopped": frozenset({5, 6})}), "parent-stopped"),
    # A reaper can still handle a recent SIGCHLD, but not an old zombie.
    (dead(age_ns=999_999_999), of(**ABOUT), "sigchld-blocked"),
    (dead(age_ns=1_000_000_000), of(**ABOUT), "reaper-never-reaps"),
    (dead(age_ns=1), of(**ABOUT | {"pending": False}), "reaper-never-reaps"),
    # A reaper that waits only for others, or only for children that send SIGCHLD.
    (dead(), of(reaper="init", waits=(FOR_OTHER,)), "reaper-never-reaps"),
    (dead(exit_signal=0), of(**WAITING_INIT), "clone-child"),
    (dead(), of(**WAITING_INIT), "being-reaped"),
    # A handler that is about to run; SIGCHLD taken by sigwait() or a signalfd.
    (dead(), of(**HANDLED, pending=True), "unknown"),
    (dead(), of(**HANDLED, blocks=True), "handler-missed"),
    # Ignored too late.
    (dead(), of(disposition="ignored"), "never-waits"),
]


@pytest.mark.parametrize(("one", "between", "wanted"), DETAILS)
def test_details(one: Dead, between: Parents, wanted: Verdict) -> None:
    assert verdict(one, between) == wanted


@pytest.mark.parametrize(
    ("flags", "own", "sends", "wanted"),
    [
        (EXITED, {}, SIGCHLD, "being-reaped"),
        (EXITED, {}, 10, "clone-child"),
        (EXITED, {}, 0, "clone-child"),
        (EXITED | ALL, {}, 10, "being-reaped"),
        (EXITED | CLONE, {}, 10, "being-reaped"),
        (EXITED | CLONE, {}, SIGCHLD, "waiting-for-other"),
        (EXITED | CLONE | ALL, {}, SIGCHLD, "being-reaped"),
        (EXITED | NOTHREAD, {}, SIGCHLD, "being-reaped"),
        (EXITED | NOTHREAD, {"task": OTHER_THREAD}, SIGCHLD, "waiting-for-other"),
        (2, {}, SIGCHLD, "waiting-for-other"),
        (EXITED, {"kind": "pid", "pid": OWN_PID}, SIGCHLD, "being-reaped"),
        (EXITED, {"kind": "pid", "pid": GROUP}, SIGCHLD, "waiting-for-other"),
        (EXITED, {"kind": "group", "pid": GROUP}, SIGCHLD, "being-reaped"),
        (EXITED, {"kind": "group", "pid": OWN_PID}, SIGCHLD, "waiting-for-other"),
        (EXITED, {"kind": "pid", "pid": OWN_PID}, 10, "clone-child"),
    ],
)
def test_zombies_that_a_wait_takes(
    flags: int, own: dict[str, Any], sends: int, wanted: Verdict
) -> None:
    of = parents(parent(waits=(wait(flags=flags, **own),)))
    assert verdict(dead(exit_signal=sends), of) == wanted


def test_traced_thread() -> None:
    """Its process cannot be reaped before it."""
    both = dead(
        leads=[True, False],
        ptraced=[False, True],
        exit_signal=[SIGCHLD, -1],
        parent=[MAKER, TRACER],
        others=1,
    )
    of = parents(parent(), index=[0, 0])
    of = replace(of, elsewhere=np.array([False, True]))
    assert [VERDICTS[n] for n in verdicts(both, of)] == ["traced", "traced"]
    alone = both.only(np.array([True, False]))
    assert verdict(alone, parents(parent())) == "being-reaped"


def test_children_of_one_parent_can_differ() -> None:
    three = dead(exit_signal=[SIGCHLD, 10, SIGCHLD], thread_pid=[1, OWN_PID, OWN_PID])
    waits = (wait("pid", OWN_PID, flags=EXITED | CLONE),)
    of = parents(parent(waits=waits), parent(), index=[0, 0, 1])
    found = [VERDICTS[number] for number in verdicts(three, of)]
    assert found == ["waiting-for-other", "being-reaped", "never-waits"]


# --- evidence and advice


def text(name: Verdict, *tracers: int, **other: Any) -> str:
    return evidence(name, parent(**CASES[name][1] | other), (), tracers).text


def test_golden_evidence(golden: Golden) -> None:
    two = {"living": (5, 6)}
    texts = {
        **{f"{name}": text(name) for name in VERDICTS},
        "traced by one": text("traced", 220),
        "traced by four": text("traced", 1, 2, 3, 4, 4),
        "frozen": text("parent-stopped", frozen=frozenset({5})),
        "two threads are stopped": text("parent-stopped", **two),
        "SIGCHLD is blocked by two": text("sigchld-blocked", **two),
        "ignored": text("never-waits", disposition="ignored"),
        "taken by sigwait()": text("never-waits", sigwaits=True),
        "the parent is not known": evidence("unknown", None).text,
    }
    golden("zombies/evidence", [f"{name}: {line}" for name, line in texts.items()])


def test_golden_advice(golden: Golden) -> None:
    """Advice is one line with the task to act on, and the heir if it exits."""
    heir = Heir(ppid=147, heir=1, heir_comm="init", why="init", reaps=True)
    idle, none = replace(heir, reaps=False), replace(heir, heir=None)
    init, first = parent(reaper="init"), parent(pid=1, reaper="init")
    stuck, brief = CASES["parent-blocked"][1], 10**9 - 1
    frozen = STOPPED | {"frozen": frozenset({5})}
    texts = {
        **{
            f"{name}": advice(name, parent(**CASES[name][1]), tracers=[220])
            for name in VERDICTS
        },
        **{f"{name}, of whom?": advice(name, None) for name in VERDICTS},
        "an heir that reaps": advice("never-waits", parent(), heir=heir),
        "one that does not": advice("never-waits", parent(), heir=idle),
        "init": advice("reaper-never-reaps", init),
        "init, without an heir": advice("reaper-never-reaps", init, heir=none),
        "the first process": advice("never-waits", first),
        "brief": advice("never-waits", parent(), age_ns=brief),
        "not brief": advice("never-waits", parent(), age_ns=10**9),
        "blocked, and brief": advice("parent-blocked", parent(**stuck), age_ns=0),
        "blocked for good": advice("parent-blocked", parent(**stuck, killable=False)),
        "blocked init": advice("parent-blocked", parent(**stuck, reaper="init")),
        "stopped by its tracer": advice(
            "parent-stopped", parent(**STOPPED | {"state": "t"})
        ),
        "frozen": advice("parent-stopped", parent(**frozen)),
    }
    golden("zombies/advice", [f"{what}: {said}" for what, said in texts.items()])


def test_evidence_of_a_guest(dump: Dump) -> None:
    """Evidence of each parent at fault shows what it is doing."""
    collector = StackCollector(dump.reader, LossLog())
    doing = read_doing(
        *(collector, dump.reader, dump.table, dump.parents, dump.clocks),
        LossLog(),
    )
    found: dict[str, Evidence] = {}
    for row, pid in enumerate(dump.pids):
        index = dump.parents.index[row]
        of = dump.parents.facts[index]
        if of.comm not in found:
            name = dump.verdicts[pid]
            tracers = [int(dump.parents.tracer[row])]
            found[of.comm] = evidence(name, of, doing[index], tracers)
    assert found["blocked-vfork"].text.endswith("() of vfork()")
    assert "filemap" in found["blocked-fuse"].text
    assert found["debugged"].text == "it is stopped by a tracer"
    assert found["init-1"].text.startswith("it is init of a PID namespace")
    assert found["waiter-stops"].text == "in wait() for any child to stop or go on"
    polling = found["waiter-polls"].threads
    assert [thread.waiting is not None for thread in polling] == [False, True]
