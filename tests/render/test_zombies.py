# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-zombies, of reports made by hand."""

import io
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest

from msatools.kernel.report import Note
from msatools.render import show
from msatools.render.zombielimits import bar
from msatools.render.zombies import View, blocks
from msatools.render.zombiewords import WHY
from msatools.target.model import Address
from msatools.zombies.model import (
    Changes,
    Held,
    Verdict,
    Zombie,
    ZombiesReport,
)
from tests.locks.madelocks import SECOND
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
    limit("pids left", 41, 400, 36, scope=f"pid_ns {FIRST_NAMESPACE}"),
    limit("RLIMIT_NPROC", 40, None, 35, scope="uid 0"),
    limit("RLIMIT_NPROC", None, 100, 1, scope="uid 1000"),
]
BOTH = report([*FARM, STUCK], GROUPS, LIMITS)


def printed(made: ZombiesReport, **options: Any) -> list[str]:
    out = io.StringIO()
    show(blocks(made, **options), out)
    return out.getvalue().splitlines()


def body(made: ZombiesReport, **options: Any) -> list[str]:
    """Give what is between the head and what every view of many ends with."""
    _, *lines, last = printed(made, **options)
    assert last.startswith("coverage: ")
    return lines


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
"""In a line each, and in full with -v."""

HEIRS = (
    heir(509, 300, reaps=False),
    heir(147, 1, why="init of PID namespace 4026531836"),
    heir(12, 5, reaps=None, heir_comm=None),
    heir(1, None, reaps=None, why="the kernel panics without it"),
)
LEAKS = (leak(774, 1), leak(778, 1003, task=1, pidfd=2))


def with_evidence() -> ZombiesReport:
    """Make a report with a group for all evidence there is."""
    dead = [zombie(n, n) for n in range(1, len(EVIDENCE) + 1)]
    pairs = zip(dead, EVIDENCE.values(), strict=True)
    return report(dead, [group([one], evidence=told) for one, told in pairs])


def belongings() -> list[Zombie]:
    return [
        zombie(
            n,
            uid=n,
            cgroup=f"/box/{n}",
            namespace=FIRST_NAMESPACE + n,
            exit_code=11 | 0x80 if n else 2 << 8,
        )
        for n in range(5)
    ]


def strange() -> list[Zombie]:
    """Make zombies of which some is known that seldom is there, and some is not."""
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
    changes=Changes(begun=1200, reaped=1),
    groups=(replace(GROUPS[0], delta=1199), GROUPS[1]),
)
SHORT = [group([STUCK], evidence=evidence(root="I/O on dm-1 (suspended)"))]
TRACED = zombie(1, verdict="traced", tracer=77)
LED = zombie(1, verdict="leader-exited", threads=2)
SIX_WAYS = report([zombie(n, exit_code=n << 8) for n in range(6)])
HELD = Held(bytes=36 * 10880, each_bytes={"task_struct": 9792, "signal_struct": 1088})

SCREENS: dict[str, dict[str, tuple[ZombiesReport, dict[str, Any]]]] = {
    "groups": {
        "two groups": (BOTH, {}),
        "-v": (BOTH, {"verbose": True}),
        "memory": (replace(SIX_WAYS, held=HELD), {}),
        "memory as a whole": (
            replace(SIX_WAYS, held=Held(bytes=5 << 20, each_bytes={})),
            {},
        ),
        "a limit that was lowered": (
            report([zombie(1)], limits=[limit("pid_max", 200, 100)]),
            {},
        ),
        "an interval": (CHANGED, {}),
        "an interval, at the end of which all are reaped": (
            report(interval_ns=SECOND, changes=Changes(begun=0, reaped=36)),
            {},
        ),
        "a tracer": (
            report([TRACED], [group([TRACED], evidence=evidence(tracer=77))]),
            {},
        ),
        "room for a cause": (report([STUCK], SHORT), {}),
        "of a leader, not its parent": (
            report(
                [LED],
                [
                    group(
                        [LED], evidence=evidence("others live", threads=(thread(147),))
                    )
                ],
            ),
            {},
        ),
        "many belongings": (report(belongings()), {}),
        "many belongings, -v": (report(belongings()), {"verbose": True}),
        "many ways to end": (SIX_WAYS, {}),
        "many ways to end, -v": (SIX_WAYS, {"verbose": True}),
        "little is known": (
            report(
                strange()[2:],
                [group(strange()[2:], parent_state=None, advice="", exit_codes={})],
            ),
            {},
        ),
        "rows, -v": (report(strange()), {"verbose": True}),
    },
    "evidence": {
        "in a line each": (with_evidence(), {"rows": 20}),
        "in full": (with_evidence(), {"verbose": True}),
    },
    "tallies": {
        **{
            view: (BOTH, {"view": view})
            for view in ("verdict", "user", "cgroup", "namespace")
        },
        **{
            f"{view} of little": (report(strange()), {"view": view})
            for view in ("user", "cgroup", "namespace")
        },
        "many verdicts": (report(of_many_verdicts()), {"view": "user"}),
        "many verdicts, -v": (
            report(of_many_verdicts()),
            {"view": "user", "verbose": True},
        ),
    },
    "heirs and leaks": {
        "heirs": (replace(BOTH, heirs=HEIRS), {"view": "tree"}),
        "leaks": (replace(BOTH, leaks=LEAKS), {"view": "leaks"}),
    },
    "one task": {
        "a zombie": (one(zombie(34, exit_code=9, uid=1000, cgroup="/box")), {}),
        "-v": (replace(one(zombie(34)), reads=57), {"verbose": True}),
        "a thread lives": (one(INNER), {}),
        "threads live": (one(replace(INNER, threads=2)), {}),
        "nothing is known": (
            report(asked=(asked(34, "unknown", ppid=0, parent_comm=None),)),
            {},
        ),
        "it lives": (replace(one(None, state="D"), taken_at_ns=SECOND), {}),
    },
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, golden: Golden) -> None:
    lines = []
    for title, (made, options) in SCREENS[name].items():
        lines += [f"--- {title}", *printed(made, **options), ""]
    golden(f"zombies/{name.replace(' ', '-')}", lines)


# --- head and foot


@pytest.mark.parametrize("view", VIEWS)
def test_foot(view: View) -> None:
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
    assert printed(made, view=view)[-3:] == [
        "coverage: 426 tasks scanned, 1 unreadable; 2 parents unreadable",
        "cost: 57 reads of the kernel's memory",
        "note: parent 12 is gone",
    ]


def test_cost_of_one_read() -> None:
    assert printed(replace(BOTH, reads=1))[-1] == "cost: 1 read of the kernel's memory"


@pytest.mark.parametrize("view", [v for v in VIEWS if v != "leaks"])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_zombie(view: View, verbose: bool) -> None:
    """One line."""
    made = report(limits=LIMITS)
    skipped = 1 if verbose else 0
    assert body(made, view=view, verbose=verbose)[skipped:] == ["No zombie."]
    some = body(made, view=view, verbose=verbose, some=True)[skipped:]
    assert some == ["No zombie of those that were asked for."]


@pytest.mark.parametrize("lost", ["tasks_unreadable", "lists_broken"])
def test_no_zombie_as_far_as_can_be_read(lost: str) -> None:
    made = report(limits=LIMITS)
    made = replace(made, coverage={**made.coverage, lost: 1})
    assert body(made)[0] == "No zombie among the tasks that could be read."


# --- groups


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_has_words(verdict: Verdict) -> None:
    assert set(WHY) == set(get_args(Verdict))
    (row,) = (x for x in body(report([zombie(1, verdict=verdict)])) if "147 p" in x)
    assert row.endswith(WHY[verdict])


def test_only_the_largest_are_explained() -> None:
    made = report([zombie(n, n) for n in range(1, 21)], limits=LIMITS)
    lines = body(made)
    rows = [x for x in lines if "parent-" in x]
    assert (len(rows), sum("do: " in x for x in lines)) == (10, 3)
    assert "… 10 more groups: -n COUNT shows them" in lines
    assert "Why: 20 never-waits" in lines
    asked_for = body(made, rows=19)
    assert sum("do: " in x for x in asked_for) == 19
    assert "… 1 more group: -n COUNT shows it" in asked_for
    for whole in (body(made, rows=20), body(made, verbose=True)):
        assert not any("…" in x or x.startswith("Why") for x in whole)
        assert sum("do: " in x for x in whole) == 20


def test_why_of_all_if_not_all_are_shown() -> None:
    rest = [zombie(n, n, verdict="traced") for n in range(100, 120)]
    lines = body(report([*FARM, STUCK, *rest]))
    assert "Why: 35 never-waits, 20 traced, 1 parent-blocked" in lines


def test_nothing_is_said_of_what_is_not_known() -> None:
    lines = body(report([zombie(1)]), verbose=True)
    start = lines.index("    it sleeps")
    assert lines[start + 1].startswith("    ended with")


# --- one by one


def test_rows_of_zombies() -> None:
    lines = body(crowd(9), verbose=True, rows=4)
    assert sum("dead-" in line for line in lines) == 4
    assert lines[-1] == "… 5 more zombies: -n COUNT shows them"


# --- by something else


def test_tallies_are_in_order() -> None:
    """The largest first, and of those that are alike by name."""
    dead = [zombie(n, cgroup=path) for n, path in enumerate(["/c", "/b", "/a", "/b"])]
    rows = body(report(dead), view="cgroup")[1:]
    assert [row.split()[:2] for row in rows] == [["2", "/b"], ["1", "/a"], ["1", "/c"]]


def test_many_keys() -> None:
    lines = body(crowd(30), view="cgroup")
    assert sum("never-waits" in line for line in lines) == 20
    assert lines[-1] == "… 10 more rows: -n COUNT shows them"
    assert len(body(crowd(30), view="cgroup", rows=30)) == 31


# --- heirs


def test_heirs_that_are_parents_too() -> None:
    """Even of each other, which no kernel has and a damaged dump may."""
    made = replace(BOTH, heirs=(heir(147, 509), heir(509, 147), heir(5, 5)))
    lines = body(made, view="tree")
    assert sum(line.startswith("`- ") for line in lines) == 3


def test_no_heirs() -> None:
    assert body(replace(BOTH, heirs=()), view="tree") == [
        "Who would inherit them is not known."
    ]


def test_many_heirs() -> None:
    made = replace(
        crowd(40, parents=40), heirs=tuple(heir(10 + n, 1) for n in range(40))
    )
    lines = body(made, view="tree")
    assert len(lines) == 1 + 25 + 1
    assert lines[-1] == "… 15 more parents: -n COUNT shows them"
    assert len(body(made, view="tree", rows=40)) == 41
    assert not any("…" in line for line in body(made, view="tree", verbose=True))


# --- struct pids


def test_no_leaks() -> None:
    """Whether there are zombies or not."""
    none = "No struct pid has more references than holders that can be named."
    for made in (replace(BOTH, leaks=()), report(leaks=())):
        assert body(made, view="leaks") == [none]


def test_leaks_that_cannot_be_told() -> None:
    """It does not say that there are none."""
    told = body(replace(BOTH, leaks=None), view="leaks")
    assert told == ["Whether struct pids leak cannot be told."]


def test_many_leaks() -> None:
    made = report(leaks=tuple(leak(n, 1) for n in range(1, 31)))
    assert body(made, view="leaks")[-1] == "… 10 more struct pids: -n COUNT shows them"
    assert len(body(made, view="leaks", rows=30)) == 31
    assert len(body(made, view="leaks", verbose=True)) == 32


# --- limits and memory


def limits(*made: Any, **options: Any) -> list[str]:
    lines = body(report([zombie(1)], limits=made), **options)
    start = next((n for n, x in enumerate(lines) if x.startswith("LIMIT")), len(lines))
    return lines[start + 1 :]


def test_many_limits() -> None:
    made = [limit("pids.max", n, 20, scope=f"/{n}") for n in range(10, 1, -1)]
    lines = limits(*made)
    assert len(lines) == 9
    assert lines[-1] == "… 1 more limit, which is farther away: -v shows it"
    assert len(limits(*made, verbose=True)) == 9
    assert limits(*made, *made)[-1].startswith("… 10 more limits, which are farther")


def test_the_nearest_of_each_sort_of_limit_is_shown() -> None:
    """And those that are filled to a part; in the order of the report."""
    made = [
        *(limit("pids.max", 90 - n, 100, scope=f"/{n}") for n in range(9)),
        *(limit("RLIMIT_NPROC", 9, 100, scope=f"uid {n}") for n in range(9)),
        limit("threads-max", 1, 1000),
        limit("pids left", None, 1000),
    ]
    *lines, last = limits(*made)
    assert [line.split()[:2] for line in lines] == [
        *(["pids.max", f"/{n}"] for n in range(5)),
        ["RLIMIT_NPROC", "uid"],
        ["threads-max", "system"],
        ["pids", "left"],
    ]
    assert last.startswith("… 12 more limits")


def test_limits_of_which_little_is_used() -> None:
    made = [limit("pids.max", n, 100, scope=f"/{n}") for n in (10, 10, 9)]
    assert len(limits(*made)) == 3
    assert limits(*made)[-1].startswith("… 1 more limit,")


@pytest.mark.parametrize(
    ("used", "most", "dead", "drawn"),
    [
        (0, 100, 0, "[....................]"),
        # However little there is, or is left.
        (1, 1000, 0, "[=...................]"),
        (1, 1000, 1, "[#...................]"),
        (999, 1000, 999, "[###################.]"),
        (999, 1000, 1, "[#==================.]"),
        (50, 100, 25, "[#####=====..........]"),
        (100, 100, 50, "[##########==========]"),
        # A limit that was lowered; counters that do not agree.
        (200, 100, 100, "[####################]"),
        (10, 100, 90, "[##..................]"),
        (0, 0, 0, "[====================]"),
    ],
)
def test_bar(used: int, most: int, dead: int, drawn: str) -> None:
    assert bar(limit("pid_max", used, most, dead)) == drawn


@pytest.mark.parametrize(
    ("used", "most", "percent"),
    [(0, 7, "0"), (999, 1000, "99"), (1000, 1000, "100"), (3, 2, "150"), (0, 0, "100")],
)
def test_percent(used: int, most: int, percent: str) -> None:
    """A hundred is when nothing is left, not when little is."""
    (row,) = limits(limit("pid_max", used, most))
    assert row.split("  [")[0].split()[-1] == percent


@pytest.mark.parametrize(
    ("others", "scope", "name", "told"),
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
    others: dict[str, Any], scope: str, name: str, told: bool
) -> None:
    """Those that it counts towards."""
    made = report([zombie(1, **others)], limits=[limit(name, 8, 10, 1, scope=scope)])
    assert body(made)[1].endswith(f"  {name} 80 %") == told


def test_limit_of_a_group_is_the_nearest_that_it_matters_to() -> None:
    near = limit("threads-max", 99, 100, 1)
    far = limit("pids left", 8, 10, 1)
    farther = limit("RLIMIT_NPROC", 2, 10, 1)
    unknown = limit("pid_max", None, 10, 1)
    made = report([zombie(1)], limits=[near, farther, far, unknown])
    assert body(made)[1].endswith("  pids left 80 %")
    # Nor is one told of which little is used.
    made = report([zombie(1)], limits=[replace(far, used=9, max=100)])
    assert body(made)[1].endswith("never waits for children")
    # One of a hundred is not what makes it full; one of ten may be.
    made = report([zombie(1)], limits=[replace(near, used=10, max=11)])
    assert body(made)[1].endswith("  threads-max 90 %")


# --- one task


def test_what_was_lost_of_one_task() -> None:
    made = report(asked=(asked(5),), coverage={"tasks": 1, "parents_unreadable": 1})
    assert printed(made)[-1] == (
        "coverage: 1 task scanned, 0 unreadable; 1 parents unreadable"
    )


# --- all of them

EVIL = "a\x1b[31m\u202eb\nc"
SAFE = r"a\x1b[31m\u202eb\x0ac"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_text_of_a_dump_is_escaped(view: View, verbose: bool) -> None:
    dead = [zombie(1, comm=EVIL, parent_comm=EVIL, cgroup=f"/{EVIL}")]
    told = evidence(EVIL, root=EVIL, threads=(thread(1, comm=EVIL, doing=EVIL),))
    made = report(
        dead,
        [group(dead, evidence=told, advice=EVIL)],
        [limit("pids.max", 1, 2, 1, scope=f"/{EVIL}", first=True)],
        heirs=(heir(147, 1, heir_comm=EVIL, why=EVIL),),
        leaks=(leak(1, 2, **{EVIL: 1}),),
        notes=(Note("lost", EVIL),),
    )
    out = io.StringIO()
    show(blocks(made, view=view, verbose=verbose), out)
    text = out.getvalue()
    assert all(line.isprintable() for line in text.split("\n"))
    assert SAFE in text


def test_one_task_is_escaped() -> None:
    dead = zombie(1, cgroup=EVIL)
    task = asked(1, "never-waits", comm=EVIL, parent_comm=EVIL)
    lines = printed(report([dead], asked=(task,)))
    assert all(line.isprintable() for line in lines)
    assert sum(SAFE in line for line in lines) == 2


def test_escaped_names_do_not_shift_columns() -> None:
    dead = [zombie(1, 7, parent_comm=EVIL), *FARM]
    head, *lines = body(report(dead))
    rows = [line for line in lines if "never waits" in line]
    assert len(rows) == 2
    assert {row.index("never waits") for row in rows} == {head.index("WHY")}


@pytest.mark.parametrize("view", VIEWS)
def test_a_screenful(view: View) -> None:
    """However much there is, without -v."""
    made = replace(
        crowd(2000, parents=500),
        limits=tuple(limit("pids.max", 1, 2, 1, scope=f"/{n}") for n in range(200)),
        heirs=tuple(heir(10 + n, 1) for n in range(500)),
        leaks=tuple(leak(n, 1) for n in range(500)),
        held=Held(bytes=1 << 20, each_bytes={"task_struct": 9792}),
    )
    assert len(printed(made, view=view)) <= 36


def calls_of(count: int) -> int:
    """Count the calls that all views of some zombies take."""
    made = replace(crowd(count, parents=7), heirs=(), leaks=())
    calls = 0

    def count_call(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        for view in VIEWS:
            for verbose in (False, True):
                printed(made, view=view, verbose=verbose)
    finally:
        sys.setprofile(None)
    return calls


def test_effort_grows_as_zombies_do() -> None:
    """And not by their square."""
    few, many = calls_of(500), calls_of(2000)
    assert many < 4.5 * few
