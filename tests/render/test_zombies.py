# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-zombies, of reports made by hand: see ``tests/golden/zombies``."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from msatools.kernel.report import Note
from msatools.program.model import Address
from msatools.render.blocks import Block
from msatools.render.zombies.report import View
from msatools.render.zombies.report import zombies_blocks as blocks
from msatools.render.zombies.words import WHY
from msatools.zombies.model import (
    HeldMemory,
    Limit,
    Verdict,
    Zombie,
    ZombieChanges,
    ZombiesReport,
)
from tests.locks.madelocks import SECOND
from tests.render.screens import EVIL, Screens, check_escaped, check_screens, printed
from tests.support.cost import calls
from tests.support.golden import Golden
from tests.zombies.madezombies import (
    FIRST_NAMESPACE,
    asked,
    evidence,
    group,
    heir,
    leak,
    limit,
    report,
    thread,
    waiting,
    zombie,
)

VIEWS: tuple[View, ...] = get_args(View)
FARM = [
    zombie(16 + n, comm="farm", parent_comm="farm", exit_code=9 if n % 4 == 0 else 0)
    for n in range(35)
]
STUCK = zombie(34, 509, parent_comm="zpar", verdict="parent-blocked", uid=1000)
GROUPS = [
    group(FARM, evidence=evidence("its only thread sleeps"), advice="end 147"),
    group(
        [STUCK],
        evidence=evidence("it sleeps in D", root="frozen file system /mnt/frozen"),
        advice="thaw /mnt/frozen",
        parent_state="D",
    ),
]
LIMITS = [
    limit("threads-max", 42, 50, 36, first=True),
    limit("pid_max", 41, 400, 36, scope=f"pid_ns {FIRST_NAMESPACE}"),
    limit("RLIMIT_NPROC", 40, None, 35, scope="uid 0"),
    limit("RLIMIT_NPROC", None, 100, 1, scope="uid 1000"),
]
BOTH = report([*FARM, STUCK], GROUPS, LIMITS)


def crowd(count: int, *, parents: int = 1) -> ZombiesReport:
    return report(
        [zombie(1000 + n, 10 + n % parents, cgroup=f"/g{n}") for n in range(count)]
    )


# --- whole screens

FULL = evidence(
    "a handler, and SIGCHLD is pending",
    sigchld="handler",
    handler=Address(0x4011D0),
    pending=True,
    blocked=True,
    blocked_signals=(17, 40),
    ignored_signals=(13,),
    caught_signals=(),
    reaper="subreaper",
    tracer=9,
    root="a mutex",
    root_pid=12,
    threads=(
        thread(147),
        thread(
            *(148,),
            state="D",
            doing="in wait() for child 12",
            waiting=waiting("pid", 12, "__WALL"),
            blocks_sigchld=True,
        ),
    ),
    thread_count=40,
)
DOING = "asleep in clock_nanosleep"
EVIDENCE = {
    "threads": evidence(threads=(thread(147), thread(148)), thread_count=1002),
    "one thread and no words": evidence("", threads=(thread(147),)),
    "what it does": evidence(f"147 is {DOING}", threads=(thread(147),)),
    "what its thread does": evidence(f"thread 147 is {DOING}", threads=(thread(147),)),
    "all": FULL,
    "default": evidence(sigchld="default"),
    "ignored": evidence(sigchld="ignored", pending=False, blocked=False),
    "not blocked by all": evidence(sigchld="default", blocked=False, thread_count=2),
    "init": evidence(reaper="init"),
    "root": evidence(root="a disk"),
    "a group": evidence(
        threads=(thread(1, waiting=waiting("group", None, "__WCLONE")),)
    ),
    "any": evidence(threads=(thread(1, doing="", waiting=waiting()),)),
}
"""Evidence by what is special about it: shown in one line, or in full with ``-v``."""

HEIRS = (
    heir(509, 300, reaps=False),
    heir(147, 1, why="init of PID namespace 4026531836"),
    heir(12, 5, reaps=None, heir_comm=None),
    heir(1, None, reaps=None, why="the kernel panics without it"),
)


def with_evidence() -> ZombiesReport:
    """Make a report with a group for each of ``EVIDENCE``."""
    dead = [zombie(n, n) for n in range(1, len(EVIDENCE) + 1)]
    pairs = zip(dead, EVIDENCE.values(), strict=True)
    return report(dead, [group([one], evidence=its) for one, its in pairs])


def strange() -> list[Zombie]:
    """Make zombies with rare members, and with unknown ones."""
    return [
        zombie(12),
        zombie(
            *(5, 9),
            parent_comm=None,
            uid=None,
            cgroup=None,
            verdict="traced",
            tracer=77,
            threads=2,
            namespace=4026532168,
            ns_pid=3,
            exit_code=6 | 0x80,
            age_bound="upper",
        ),
        zombie(1, 0, parent_comm=None, verdict="unknown", uid=None, namespace=None),
    ]


def of_many_verdicts() -> list[Zombie]:
    kinds: list[Verdict] = ["traced", "unknown", "clone-child", "parent-stopped"]
    every = kinds * 2 + kinds[:3] * 2
    return [zombie(n, verdict=kind) for n, kind in enumerate(every)]


def one(dead: Zombie | None, **others: Any) -> ZombiesReport:
    """Make a report of one task."""
    pid, verdict = (5, None) if dead is None else (dead.pid, dead.verdict)
    groups = [group([dead], evidence=FULL, advice="end 147")] if dead else []
    task = asked(pid, verdict, **others)
    dead_ = [dead] if dead else []
    return report(dead_, groups, asked=(task,), coverage={"tasks_scanned": 1})


INNER = zombie(
    *(34, 147),
    exit_code=3 << 8,
    cgroup=None,
    namespace=4026532168,
    ns_pid=3,
    threads=1,
    tracer=77,
)
CHANGED = replace(
    BOTH,
    taken_at_ns=51_686_000_000,
    interval_ns=5 * SECOND,
    limits=(
        limit("threads-max", 42, 50, 36, first=True, left_ns=12 * SECOND),
        LIMITS[1],
    ),
    changes=ZombieChanges(begun=1200, reaped=1),
    groups=(replace(GROUPS[0], delta=1199), GROUPS[1]),
)
TRACED = zombie(1, verdict="traced", tracer=77)
LED = zombie(1, verdict="leader-exited", threads=2)
SIX_WAYS = report([zombie(n, exit_code=n << 8) for n in range(6)])
HELD = HeldMemory(
    bytes=36 * 10880, each_bytes={"task_struct": 9792, "signal_struct": 1088}
)


def groups() -> Screens:
    led = group([LED], evidence=evidence("others live", threads=(thread(147),)))
    unknown = strange()[2:]
    little = group(unknown, parent_state=None, advice="", exit_codes={})
    lost = replace(report(limits=LIMITS), coverage={"tasks_unreadable": 1})
    broken = replace(lost, coverage={"lists_broken": 1})
    rest = [zombie(n, n, verdict="traced") for n in range(100, 120)]
    kinds = [zombie(n, verdict=kind) for n, kind in enumerate(get_args(Verdict))]
    escaped = zombie(1, 7, parent_comm=EVIL)
    return {
        "two groups": blocks(BOTH),
        "-v": blocks(BOTH, verbose=True),
        "memory": blocks(replace(SIX_WAYS, held=HELD)),
        "a limit that was lowered": blocks(
            report([zombie(1)], limits=[limit("pid_max", 200, 100)])
        ),
        "an interval": blocks(CHANGED),
        "an interval, at the end of which all are reaped": blocks(
            report(interval_ns=SECOND, changes=ZombieChanges(begun=0, reaped=36))
        ),
        "a tracer": blocks(
            report([TRACED], [group([TRACED], evidence=evidence(tracer=77))])
        ),
        "of a leader, not its parent": blocks(report([LED], [led])),
        "little is known": blocks(report(unknown, [little])),
        "rows, -v": blocks(report(strange()), verbose=True),
        "every verdict": blocks(report(kinds), rows=20),
        "names that are escaped shift no column": blocks(report([escaped, *FARM])),
        "why of all, if not all are shown": blocks(report([*FARM, STUCK, *rest])),
        "four zombies": blocks(crowd(9), verbose=True, rows=4),
        "none among the tasks that could be read": blocks(lost),
        "or in lists that are whole": blocks(broken),
    }


def none() -> Screens:
    empty, views = report(limits=LIMITS), [v for v in VIEWS if v != "leaks"]
    some = partial(blocks, empty, some=True)
    return {
        **{view: blocks(empty, view=view) for view in views},
        **{f"{view}, -v": blocks(empty, view=view, verbose=True) for view in views},
        **{f"{view}, of some": some(view=view) for view in views},
    }


def feet() -> Screens:
    made = replace(
        BOTH,
        coverage={
            "tasks": 427,
            "tasks_scanned": 426,
            "tasks_unreadable": 1,
            "parents_unreadable": 2,
            "lists_broken": 0,
            "zombies": 36,
        },
        reads=57,
        notes=(Note("lost", "parent 12 is gone"),),
    )
    return {
        **{view: blocks(made, view=view) for view in VIEWS},
    }


def in_full() -> Screens:
    return {
        "in full": blocks(with_evidence(), verbose=True),
    }


def tallies() -> Screens:
    views: tuple[View, ...] = ("verdict", "user", "cgroup", "ns")
    many = partial(blocks, report(of_many_verdicts()), view="user")
    paths = [zombie(n, cgroup=path) for n, path in enumerate(["/c", "/b", "/a", "/b"])]
    by_cgroup = partial(blocks, view="cgroup")
    return {
        **{view: blocks(BOTH, view=view) for view in views},
        **{
            f"{view} of little": blocks(report(strange()), view=view)
            for view in views[1:]
        },
        "many verdicts": many(),
        "many verdicts, -v": many(verbose=True),
        "the largest first, then by name": by_cgroup(report(paths)),
        "many keys": by_cgroup(crowd(30)),
        "as many as were asked for": by_cgroup(crowd(30), rows=30),
    }


def heirs_and_leaks() -> Screens:
    tree, leaks = partial(blocks, view="tree"), partial(blocks, view="leaks")
    loop = (heir(147, 509), heir(509, 147), heir(5, 5))
    inherited = tuple(heir(10 + n, 1) for n in range(40))
    many = replace(crowd(40, parents=40), heirs=inherited)
    thirty = report(leaks=tuple(leak(n, 1) for n in range(1, 31)))
    return {
        "heirs": tree(replace(BOTH, heirs=HEIRS)),
        "heirs of each other, as in a damaged dump": tree(replace(BOTH, heirs=loop)),
        "no heirs": tree(replace(BOTH, heirs=())),
        "many heirs": tree(many),
        "many heirs, all": tree(many, rows=40),
        "no leaks": leaks(replace(BOTH, leaks=())),
        "leaks that cannot be told, which is not none": leaks(
            replace(BOTH, leaks=None)
        ),
        "many leaks": leaks(thirty),
        "many leaks, all": leaks(thirty, rows=30),
    }


def limits() -> Screens:
    def of(*made: Limit, verbose: bool = False) -> list[Block]:
        shown = blocks(report([zombie(1)], limits=made), verbose=verbose)
        return [block for block in shown if is_about_limits(block)]

    def is_about_limits(block: Block) -> bool:
        text = printed([block])
        return text[0].startswith(("LIMIT", "…"))

    sorts = [
        *(limit("pids.max", 90 - n, 100, scope=f"/{n}") for n in range(9)),
        *(limit("RLIMIT_NPROC", 9, 100, scope=f"uid {n}") for n in range(9)),
        limit("threads-max", 1, 1000),
        limit("pid_max", None, 1000),
    ]
    little = [limit("pids.max", n, 100, scope=f"/{n}") for n in (10, 10, 9)]
    return {
        "the nearest of each sort, and those that are filled to a part": of(*sorts),
        "of which little is used": of(*little),
        **{
            f"{used} of {most}, {dead} by the dead": of(
                limit("pid_max", used, most, dead)
            )
            for used, most, dead in (
                *((0, 7, 0), (1, 1000, 0), (1, 1000, 1), (50, 100, 25), (10, 100, 90)),
                *((999, 1000, 0), (999, 1000, 1), (100, 100, 50), (1000, 1000, 0)),
                *((0, 0, 0), (3, 2, 0), (200, 100, 100)),
            )
        },
    }


def one_task() -> Screens:
    lost = {"tasks": 1, "parents_unreadable": 1}
    return {
        "-v": blocks(replace(one(zombie(34)), reads=57), verbose=True),
        "a thread lives": blocks(one(INNER)),
        "threads live": blocks(one(replace(INNER, threads=2))),
        "nothing is known": blocks(
            report(asked=(asked(34, "unknown", ppid=0, parent_comm=None),))
        ),
        "it lives": blocks(replace(one(None, state="D"), taken_at_ns=SECOND)),
        "what was lost": blocks(report(asked=(asked(5),), coverage=lost)),
    }


SCREENS: dict[str, Callable[[], Screens]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        *(groups, none, feet, in_full, tallies, heirs_and_leaks, limits, one_task),
    )
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, golden: Golden) -> None:
    check_screens(golden, f"zombies/{name}", SCREENS[name]())


def test_every_verdict_has_words() -> None:
    assert set(WHY) == set(get_args(Verdict))


@pytest.mark.parametrize(
    ("others", "scope", "name", "shown"),
    [
        ({}, "system", "threads-max", True),
        ({"cgroup": "/a/b"}, "/a", "pids.max", True),
        ({"cgroup": "/a/b"}, "/a/b", "pids.max", True),
        ({"cgroup": "/ab"}, "/a", "pids.max", False),
        ({"cgroup": "/a"}, "/a/b", "pids.max", False),
        ({"cgroup": "/a"}, "control group 0xffff888001234500", "pids.max", False),
        ({"uid": 7}, "uid 7", "RLIMIT_NPROC", True),
        ({"uid": 7}, "uid 7 of user_ns 4026531837", "RLIMIT_NPROC", True),
        ({"uid": 7}, "uid 70", "RLIMIT_NPROC", False),
        ({"uid": 7}, "uid 1 of user_ns 7", "RLIMIT_NPROC", False),
        ({"namespace": 4026532168}, "pid_ns 4026532168", "pid_max", True),
        ({"namespace": 4026532168}, f"pid_ns {FIRST_NAMESPACE}", "pid_max", True),
        ({}, "pid_ns 4026532168", "pid_max", False),
    ],
)
def test_limits_of_a_group(
    others: dict[str, Any], scope: str, name: str, shown: bool
) -> None:
    """A group shows a limit only if its zombies count towards it."""
    made = report([zombie(1, **others)], limits=[limit(name, 8, 10, 1, scope=scope)])
    assert printed(blocks(made))[2].endswith(f"  {name} 80 %") == shown


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_text_of_a_dump_is_escaped(view: View, verbose: bool) -> None:
    dead = [zombie(1, comm=EVIL, parent_comm=EVIL, cgroup=f"/{EVIL}")]
    proof = evidence(EVIL, root=EVIL, threads=(thread(1, comm=EVIL, doing=EVIL),))
    made = report(
        dead,
        [group(dead, evidence=proof, advice=EVIL)],
        [limit("pids.max", 1, 2, 1, scope=f"/{EVIL}", first=True)],
        heirs=(heir(147, 1, heir_comm=EVIL, why=EVIL),),
        leaks=(leak(1, 2, **{EVIL: 1}),),
        notes=(Note("lost", EVIL),),
    )
    check_escaped(blocks(made, view=view, verbose=verbose))


def test_one_task_is_escaped() -> None:
    task = asked(1, "never-waits", comm=EVIL, parent_comm=EVIL)
    check_escaped(blocks(report([zombie(1, cgroup=EVIL)], asked=(task,))), 2)


def cost(count: int) -> int:
    """Return the calls that all views of some zombies take."""
    made = replace(crowd(count, parents=7), heirs=(), leaks=())
    shown = [partial(blocks, made, view=view) for view in VIEWS]
    return calls(lambda: [printed([*show(), *show(verbose=True)]) for show in shown])


def test_work_is_linear_in_zombies() -> None:
    """Four times the zombies take four times the calls, not sixteen times."""
    assert cost(400) < 4.5 * cost(100)
