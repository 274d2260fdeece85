# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every verdict: of real zombies, and of some that are made up, by the facts alone."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from msatools.kernel.report import Findings
from msatools.tasks.stacks import StackCollector
from msatools.tasks.waitopts import WaitOpts
from msatools.zombies.dead import UNKNOWN, Dead
from msatools.zombies.doing import read_doing
from msatools.zombies.evidence import advice, evidence
from msatools.zombies.model import Evidence, Heir, Verdict
from msatools.zombies.parentfacts import SIGCHLD, ParentFacts
from msatools.zombies.parents import NONE, Parents
from msatools.zombies.verdicts import BRIEF_NS, VERDICTS, verdicts
from tests.zombies.dumps import Dump

SECOND = 1_000_000_000
HOUR = 3600 * SECOND

EXITED, NOTHREAD, ALL, CLONE = 4, 0x2000_0000, 0x4000_0000, 0x8000_0000

PROCESS, MAKER, OTHER_THREAD, TRACER = 0x1000, 0x2000, 0x2800, 0x3000
OWN_PROCESS, OWN_PID, GROUP = 0x4000, 0x5000, 0x6000


def test_every_verdict_of_a_guest(dump: Dump) -> None:
    """That they are the right ones: tests/truth/zombies."""
    assert {*VERDICTS} - {*dump.verdicts.values()} == {"being-reaped", "unknown"}


def test_children_that_the_kernel_reaped_are_no_zombies(dump: Dump) -> None:
    gone = {
        child for one in dump.workload["reaped_by_kernel"] for child in one["children"]
    }
    assert gone
    assert not gone & set(dump.table["pid"].tolist())


# --- one zombie, made up


def dead(**other: Any) -> Dead:
    """One process that ended an hour ago; several, where lists are given."""
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
    """A process of one thread that sleeps and does nothing about its children."""
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
    """Those of one dead task, or of those in *index*."""
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

# What makes each verdict hold: of the dead, its parent, and what is between them.
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
    # Who is in wait() is not blocked; nobody reaps who waits for what it would take.
    ("parent-blocked", "waiting-for-other"),
    # Only those that send SIGCHLD are behind one that is blocked.
    ("sigchld-blocked", "clone-child"),
    # What is traced is taken whatever it sends.
    ("traced", "clone-child"),
}


def verdict(one: Dead, of: Parents) -> Verdict:
    (number,) = verdicts(one, of).tolist()
    return VERDICTS[number]


def made(*cases: Verdict) -> Verdict:
    """The verdict where what makes each of some holds at once, the last over others."""
    of_dead: dict[str, Any] = {}
    of_parent: dict[str, Any] = {}
    between: dict[str, Any] = {}
    for each in cases:
        of_dead |= CASES[each][0]
        of_parent |= CASES[each][1]
        between |= CASES[each][2]
    return verdict(dead(**of_dead), parents(parent(**of_parent), **between))


def test_all_are_there() -> None:
    assert tuple(CASES) == VERDICTS == get_args(Verdict)


@pytest.mark.parametrize("name", CASES)
def test_each_verdict(name: Verdict) -> None:
    assert made(name) == name


@pytest.mark.parametrize("first", VERDICTS[:-2])
def test_order(first: Verdict) -> None:
    """Where two hold, the one that is tested first is the verdict."""
    for second in VERDICTS[VERDICTS.index(first) + 1 : -1]:
        if (first, second) not in TOGETHER:
            assert made(second, first) == first, second


def test_threads_that_are_not_known() -> None:
    assert verdict(dead(threads=UNKNOWN), parents(parent())) == "unknown"


def test_parents_that_are_not_known() -> None:
    unknown = parents(index=[NONE])
    assert verdict(dead(), unknown) == "unknown"
    assert verdict(dead(threads=2), unknown) == "leader-exited"
    assert verdict(dead(reaped=True), unknown) == "being-reaped"


def test_parents_without_living_threads() -> None:
    assert verdict(dead(), parents(parent(living=()))) == "never-waits"


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
def test_what_a_wait_takes(
    flags: int, own: dict[str, Any], sends: int, wanted: Verdict
) -> None:
    of = parents(parent(waits=(wait(flags=flags, **own),)))
    assert verdict(dead(exit_signal=sends), of) == wanted


def test_one_wait_of_two_takes_it() -> None:
    assert verdict(dead(), parents(parent(waits=(FOR_OTHER, wait())))) == "being-reaped"


def test_a_wait_that_is_frozen() -> None:
    of = parents(parent(waits=(wait(),), **STOPPED))
    assert verdict(dead(), of) == "parent-stopped"


def test_a_wait_does_not_take_what_another_traces() -> None:
    of = parents(parent(waits=(wait(),)), **TRACED)
    assert verdict(dead(ptraced=True, parent=TRACER), of) == "traced"


def test_traced_by_its_parent() -> None:
    """Whatever it sends, a plain wait takes it."""
    traced = dead(ptraced=True, exit_signal=10)
    assert verdict(traced, parents(parent())) == "never-waits"
    assert verdict(traced, parents(parent(waits=(wait(),)))) == "being-reaped"
    own = wait(flags=EXITED | NOTHREAD, task=OTHER_THREAD)
    traced = dead(ptraced=True, parent=OTHER_THREAD)
    assert verdict(traced, parents(parent(waits=(own,)))) == "being-reaped"


def test_a_thread_that_is_traced() -> None:
    """And its process, which cannot go before it."""
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


def test_sleep_that_is_brief() -> None:
    stuck = {"stuck": frozenset({5})}
    of = parents(parent(**stuck), stuck_ns=BRIEF_NS - 1)
    assert verdict(dead(), of) == "never-waits"
    assert verdict(dead(age_ns=BRIEF_NS - 1), of) == "parent-blocked"
    assert verdict(dead(), parents(parent(**stuck), stuck_ns=BRIEF_NS)) == (
        "parent-blocked"
    )


def test_a_blocked_parent_that_waits_in_another_thread() -> None:
    of = parents(parent(stuck=frozenset({5}), waits=(FOR_OTHER,)), stuck_ns=HOUR)
    assert verdict(dead(), of) == "waiting-for-other"


def test_sigchld_is_blocked_for_those_that_send_it() -> None:
    of = parents(parent(**BLOCKED))
    assert verdict(dead(exit_signal=10), of) == "clone-child"
    open_ = parents(parent(pending=True))
    assert verdict(dead(), open_) == "never-waits"


def test_some_threads_are_stopped() -> None:
    some = parent(living=(5, 6), stopped=frozenset({5}))
    assert verdict(dead(), parents(some)) == "never-waits"
    every = replace(some, stopped=frozenset({5, 6}))
    assert verdict(dead(), parents(every)) == "parent-stopped"


def test_reaper_that_is_about_to() -> None:
    """It takes SIGCHLD, which has just come; what has been dead for long it left."""
    takes: dict[str, Any] = {"reaper": "init", "pending": True, "blocks": True}
    init = parents(parent(**takes))
    assert verdict(dead(age_ns=999_999_999), init) == "sigchld-blocked"
    assert verdict(dead(age_ns=1_000_000_000), init) == "reaper-never-reaps"
    unaware = parents(parent(**takes | {"pending": False}))
    assert verdict(dead(age_ns=1), unaware) == "reaper-never-reaps"


def test_reapers_that_wait() -> None:
    """For others only; for what sends SIGCHLD."""
    init = parent(reaper="init", waits=(FOR_OTHER,))
    assert verdict(dead(), parents(init)) == "reaper-never-reaps"
    plain = parent(reaper="init", waits=(wait(),))
    assert verdict(dead(exit_signal=0), parents(plain)) == "clone-child"
    assert verdict(dead(), parents(plain)) == "being-reaped"


def test_handlers_that_are_about_to_run() -> None:
    about = parent(**HANDLED, pending=True)
    assert verdict(dead(), parents(about)) == "unknown"
    taken = parent(**HANDLED, blocks=True)  # by sigwait() or a signalfd
    assert verdict(dead(), parents(taken)) == "handler-missed"


def test_ignored_too_late() -> None:
    assert verdict(dead(), parents(parent(disposition="ignored"))) == "never-waits"


def test_children_of_one_parent_may_differ() -> None:
    three = dead(exit_signal=[SIGCHLD, 10, SIGCHLD], thread_pid=[1, OWN_PID, OWN_PID])
    waits = (wait("pid", OWN_PID, flags=EXITED | CLONE),)
    of = parents(parent(waits=waits), parent(), index=[0, 0, 1])
    found = [VERDICTS[number] for number in verdicts(three, of)]
    assert found == ["waiting-for-other", "being-reaped", "never-waits"]


# --- what is told of them


def text(name: Verdict, *tracers: int, **other: Any) -> str:
    return evidence(name, parent(**CASES[name][1] | other), (), tracers).text


def test_evidence_of_each() -> None:
    assert text("leader-exited") == "its first thread has ended, and others live"
    assert text("being-reaped") == "it is taken off right now"
    assert text("traced", 220) == "traced by 220, which has to wait for it first"
    assert text("traced", 1, 2, 3, 4, 4) == (
        "traced by 1, 2, 3 and 1 more, which have to wait for it first"
    )
    assert text("parent-stopped") == "it is stopped"
    assert text("parent-stopped", frozen=frozenset({5})) == "it is frozen"
    assert text("parent-stopped", living=(5, 6)) == "all 2 threads are stopped"
    assert text("reaper-never-reaps") == "it is a subreaper, and no thread is in wait()"
    assert text("sigchld-blocked") == "SIGCHLD is pending, and blocked"
    assert text("sigchld-blocked", living=(5, 6)).endswith("blocked by all 2 threads")
    assert text("waiting-for-other") == "in wait() for child 150"
    assert "__WALL" in text("clone-child")
    assert "handler" in text("handler-missed")
    assert text("never-waits") == "SIGCHLD has no handler, and no thread is in wait()"
    assert "is ignored, but was not" in text("never-waits", disposition="ignored")
    assert "sigwait()" in text("never-waits", sigwaits=True)


def test_evidence_has_the_facts() -> None:
    found = evidence("sigchld-blocked", parent(**HANDLED | BLOCKED, ignored=1 << 12))
    assert (found.sigchld, found.handler) == ("handler", 0x40_0000)
    assert (found.pending, found.blocked) == (True, True)
    assert found.blocked_signals == found.caught_signals == (SIGCHLD,)
    assert found.ignored_signals == (13,)
    assert (found.thread_count, found.tracer, found.root) == (1, None, None)
    assert evidence("traced", parent(), (), [220, 220]).tracer == 220
    assert evidence("traced", parent(), (), [220, 221]).tracer is None


def test_evidence_of_a_parent_that_is_not_known() -> None:
    found = evidence("unknown", None)
    assert found.text == "nothing is known of its parent"
    assert found.sigchld is found.blocked_signals is found.pending is None


@pytest.mark.parametrize("name", VERDICTS)
def test_advice_is_one_line_that_names_who_to_act_on(name: Verdict) -> None:
    told = advice(name, parent(**CASES[name][1]), tracers=[220])
    assert "\n" not in told
    if name in ("being-reaped", "leader-exited"):
        assert "does nothing" not in told
    else:
        assert told.endswith("; kill -9 on a zombie does nothing")
        assert ("220" if name == "traced" else "147 farm") in told
    assert advice(name, None)


def test_advice_tells_who_inherits() -> None:
    heir = Heir(ppid=147, heir=1, heir_comm="init", why="init", reaps=True)
    told = advice("never-waits", parent(), heir=heir)
    assert told.startswith(
        "restart or fix 147 farm: it never waits for its children; if 147 ends, 1 "
        "inherits and reaps them;"
    )
    idle = advice("never-waits", parent(), heir=replace(heir, reaps=False))
    assert "1 inherits them, and does not reap them either" in idle
    init = parent(reaper="init")
    for none in (None, replace(heir, heir=None)):
        told = advice("reaper-never-reaps", init, heir=none)
        assert "if 147 ends, its PID namespace does" in told
    first = advice("never-waits", parent(pid=1, reaper="init"))
    assert first.startswith("fix 1 farm")
    assert "1 cannot end" in first


def test_advice_on_who_has_just_died() -> None:
    """A parent that did not have the time is not to be restarted."""
    brief = advice("never-waits", parent(), age_ns=10**9 - 1)
    assert brief.startswith("look again: none has been dead for a second, and 147 farm")
    assert "restart" in advice("never-waits", parent(), age_ns=10**9)
    stuck = CASES["parent-blocked"][1]
    assert "kill -9 147" in advice("parent-blocked", parent(**stuck), age_ns=0)


def test_advice_for_who_can_be_killed() -> None:
    stuck = CASES["parent-blocked"][1]
    assert "kill -9 147" in advice("parent-blocked", parent(**stuck))
    firm = advice("parent-blocked", parent(**stuck, killable=False))
    assert "cannot even be killed" in firm
    init = advice("parent-blocked", parent(**stuck, reaper="init"))
    assert "do not kill it: if 147 ends, its PID namespace does" in init


def test_advice_for_who_is_stopped() -> None:
    assert "kill -CONT 147" in advice("parent-stopped", parent(**STOPPED))
    traced = advice("parent-stopped", parent(**STOPPED | {"state": "t"}))
    assert "tracer of 147 farm" in traced
    frozen = parent(**STOPPED, frozen=frozenset({5}))
    assert "thaw" in advice("parent-stopped", frozen)


def test_evidence_of_a_guest(dump: Dump) -> None:
    """Each parent that is said to be at fault is shown doing what it does."""
    collector = StackCollector(dump.reader, Findings())
    doing = read_doing(collector, dump.prog, dump.table, dump.parents, dump.clocks)
    found: dict[str, Evidence] = {}
    for place, pid in enumerate(dump.pids):
        index = dump.parents.index[place]
        of = dump.parents.facts[index]
        if of.comm not in found:
            name = dump.verdicts[pid]
            tracers = [int(dump.parents.tracer[place])]
            found[of.comm] = evidence(name, of, doing[index], tracers)
    assert found["blocked-vfork"].text.endswith("() of vfork()")
    assert "filemap" in found["blocked-fuse"].text
    assert found["debugged"].text == "it is stopped by a tracer"
    assert found["init-1"].text.startswith("it is init of a PID namespace")
    assert found["waiter-stops"].text == "in wait() for any child to stop or go on"
    told = found["waiter-polls"].threads
    assert [each.waiting is not None for each in told] == [False, True]
