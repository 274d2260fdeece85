# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-zombies, of reports made by hand."""

import io
import time
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
    Evidence,
    Held,
    Verdict,
    Zombie,
    ZombiesReport,
)
from tests.locks.madelocks import SECOND
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


# --- head and foot


def test_head() -> None:
    head = printed(BOTH)[0]
    assert head == "6.12  vmcore (ELF)  types: btf  427 tasks, 36 zombies of 2 parents"
    later = replace(BOTH, taken_at_ns=51_686_000_000, interval_ns=SECOND)
    assert printed(later)[0].endswith(
        "now 51.686 s, interval 1.000 s, 427 tasks, 36 zombies of 2 parents"
    )
    one = printed(report([zombie(1)]))[0]
    assert one.endswith("427 tasks, 1 zombie of 1 parent")
    assert printed(BOTH, verbose=True)[1].startswith("types of other modules")


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


def test_groups() -> None:
    assert body(BOTH) == [
        "COUNT  PARENT    ST  AGE             WHY"
        "                                       LIMITS",
        "   35  147 farm  S   ~16.0s..~50.0s  never waits for children"
        "                  threads-max 84 %",
        "    its only thread sleeps",
        "    ended with status 0 (26), SIGKILL (9); user 0; cgroup /",
        "    do: end 147",
        "    1  509 zpar  D   ~34.0s          parent blocked: frozen file system /mnt…",
        "    it sleeps in D",
        "    ended with status 0; user 1000; cgroup /",
        "    do: thaw /mnt/frozen",
        "LIMIT         OF                 USED  MAX  LEFT  DEAD   %"
        "  [# dead  = others  . left]",
        "threads-max   system               42   50     8    36  84"
        "  [##############===...]  first to be hit",
        "pids left     pid_ns 4026531836    41  400   359    36  10"
        "  [##..................]",
        "RLIMIT_NPROC  uid 1000              -  100     -     1   -",
    ]


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_has_words(verdict: Verdict) -> None:
    assert set(WHY) == set(get_args(Verdict))
    (row,) = (x for x in body(report([zombie(1, verdict=verdict)])) if "147 p" in x)
    assert row.endswith(WHY[verdict])


def test_who_is_to_blame() -> None:
    traced = [zombie(1, verdict="traced", tracer=77)]
    made = report(traced, [group(traced, evidence=evidence(tracer=77))])
    assert body(made)[1].endswith("tracer 77 must wait first")
    # All of it with -v, or where there is room.
    (row,) = (x for x in body(BOTH, verbose=True) if x.startswith("    1  509"))
    assert row.endswith("parent blocked: frozen file system /mnt/frozen")
    short = group([STUCK], evidence=evidence(root="I/O on dm-1 (suspended)"))
    row = body(report([STUCK], [short]))[1]
    assert row.endswith("parent blocked: I/O on dm-1 (suspended)")


def test_unknown_parent() -> None:
    """What cannot be read is a dash."""
    dead = [zombie(1, 0, parent_comm=None, verdict="unknown", uid=None, cgroup=None)]
    made = report(dead, [group(dead, parent_state=None, advice="", exit_codes={})])
    assert body(made) == [
        "COUNT  PARENT  ST  AGE    WHY        LIMITS",
        "    1  -       -   ~1.0s  not known",
        "    it sleeps",
    ]


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


def test_belongings() -> None:
    dead = [
        zombie(
            n,
            uid=n,
            cgroup=f"/box/{n}",
            namespace=FIRST_NAMESPACE + n,
            exit_code=11 | 0x80 if n else 2 << 8,
        )
        for n in range(5)
    ]
    (words,) = (x for x in body(report(dead)) if "ended" in x)
    assert words == (
        "    ended with SIGSEGV (core) (4), status 2 (1); user 0, 1, 2 +2; "
        "cgroup /box/0, /box/1, /box/2 +2; "
        "PID namespace 4026531836, 4026531837, 4026531838 +2"
    )
    whole = "\n".join(body(report(dead), verbose=True))
    assert "user 0, 1, 2, 3, 4;" in whole
    assert "cgroup /box/0, /box/1, /box/2, /box/3, /box/4;" in whole


DOING = "asleep in clock_nanosleep"


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (evidence(), "it sleeps"),
        (
            evidence(threads=(thread(147), thread(148)), thread_count=1002),
            f"it sleeps; thread 147 S 1.0s {DOING} (+1,001)",
        ),
        (evidence("", threads=(thread(147),)), f"thread 147 S 1.0s {DOING}"),
        (
            evidence(f"147 is {DOING}", threads=(thread(147),)),
            f"147 is {DOING}; thread 147 S 1.0s",
        ),
        (
            evidence(f"thread 147 is {DOING}", threads=(thread(147),)),
            f"thread 147 is {DOING}, S 1.0s",
        ),
    ],
)
def test_evidence_in_one_line(told: Evidence, line: str) -> None:
    """With what is not said yet of what the parent is doing, and for how long."""
    assert body(report(FARM, [group(FARM, evidence=told)]))[2] == f"    {line}"


def test_evidence_of_a_leader_is_not_of_its_parent() -> None:
    dead = [zombie(1, verdict="leader-exited", threads=2)]
    told = evidence("others live", threads=(thread(147),))
    assert body(report(dead, [group(dead, evidence=told)]))[2] == "    others live"


def test_many_ways_to_end() -> None:
    dead = [zombie(n, exit_code=n << 8) for n in range(6)]
    ways = [f"status {n} (1)" for n in range(6)]
    (words,) = (x for x in body(report(dead)) if "ended" in x)
    assert words.startswith(f"    ended with {', '.join(ways[:3])} +3; user")
    (words,) = (x for x in body(report(dead), verbose=True) if "ended" in x)
    assert words.startswith(f"    ended with {', '.join(ways)}; user")


# --- evidence in full

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
FULL_TEXT = f"a handler, and SIGCHLD is pending; thread 147 S 1.0s {DOING} (+39)"


def test_evidence_in_full() -> None:
    lines = body(report(FARM, [group(FARM, evidence=FULL)]), verbose=True)
    start = lines.index(f"    {FULL_TEXT}")
    assert lines[start + 1 : start + 7] == [
        "    SIGCHLD: handler 0x4011d0, pending, blocked by all threads",
        "    blocks SIGCHLD signal 40; ignores SIGPIPE; catches none",
        "    it is a subreaper; tracer 9; at the root: a mutex (pid 12)",
        "    thread 147 thread-147  S 1.0s  TMR  asleep in clock_nanosleep",
        "    thread 148 thread-148  D 1.0s  TMR  in wait() for child 12, "
        "__WALL, blocks SIGCHLD",
        "    … 38 more of its threads",
    ]
    # Else one line.
    short = body(report(FARM, [group(FARM, evidence=FULL)]))
    assert not any("SIGPIPE" in line or "thread-148" in line for line in short)


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({"sigchld": "default"}, "SIGCHLD: default action"),
        (
            {"sigchld": "ignored", "pending": False, "blocked": False},
            "SIGCHLD: ignored, not pending, not blocked",
        ),
        (
            {"sigchld": "default", "blocked": False, "thread_count": 2},
            "SIGCHLD: default action, not blocked by all threads",
        ),
        ({"reaper": "init"}, "it is init of its PID namespace"),
        ({"root": "a disk"}, "at the root: a disk"),
        (
            {"threads": (thread(1, waiting=waiting("group", None, "__WCLONE")),)},
            f"thread 1 thread-1  S 1.0s  TMR  {DOING}, __WCLONE",
        ),
        (
            {"threads": (thread(1, doing="", waiting=waiting()),)},
            "thread 1 thread-1  S 1.0s  TMR  -",
        ),
    ],
)
def test_evidence_lines(others: dict[str, Any], line: str) -> None:
    made = report(FARM, [group(FARM, evidence=evidence(**others))])
    assert f"    {line}" in body(made, verbose=True)


def test_nothing_is_said_of_what_is_not_known() -> None:
    lines = body(report([zombie(1)]), verbose=True)
    start = lines.index("    it sleeps")
    assert lines[start + 1].startswith("    ended with")


# --- one by one


def test_every_zombie() -> None:
    inner = zombie(
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
    )
    lines = body(report([zombie(12), inner]), verbose=True)
    start = next(n for n, x in enumerate(lines) if x.lstrip().startswith("PID "))
    assert lines[start:] == [
        "PID     AGE  PARENT          VERDICT      ENDED           USER  THREADS"
        "  TRACER  PID NAMESPACE       CGROUP  COMMAND",
        " 12  ~12.0s  147 parent-147  never-waits  0               0           0"
        "       -  4026531836          /       dead-12",
        "  5   <5.0s  9               traced       SIGABRT (core)  -           2"
        "      77  4026532168 (PID 3)  -       dead-5",
    ]


def test_rows_of_zombies() -> None:
    lines = body(crowd(9), verbose=True, rows=4)
    assert sum("dead-" in line for line in lines) == 4
    assert lines[-1] == "… 5 more zombies: -n COUNT shows them"


# --- by something else


def test_tallies() -> None:
    assert body(BOTH, view="verdict")[:3] == [
        "COUNT  VERDICT         PARENTS   AGE             WHY",
        "   35  never-waits     147 farm  ~16.0s..~50.0s  never waits for children",
        "    1  parent-blocked  509 zpar  ~34.0s          parent blocked",
    ]
    assert body(BOTH, view="user")[:3] == [
        "COUNT  USER  PARENTS   AGE             WHY",
        "   35  0     147 farm  ~16.0s..~50.0s  35 never-waits",
        "    1  1000  509 zpar  ~34.0s          1 parent-blocked",
    ]
    assert body(BOTH, view="cgroup")[:2] == [
        "COUNT  CGROUP  PARENTS                 AGE             WHY",
        "   36  /       147 farm (35), 1 other  ~16.0s..~50.0s  "
        "35 never-waits, 1 parent-blocked",
    ]
    assert body(BOTH, view="namespace")[1].lstrip().startswith("36  4026531836  ")


def test_tallies_are_in_order() -> None:
    """The largest first, and of those that are alike by name."""
    dead = [zombie(n, cgroup=path) for n, path in enumerate(["/c", "/b", "/a", "/b"])]
    rows = body(report(dead), view="cgroup")[1:]
    assert [row.split()[:2] for row in rows] == [["2", "/b"], ["1", "/a"], ["1", "/c"]]


def test_tally_of_many_verdicts() -> None:
    kinds: list[Verdict] = ["traced", "unknown", "clone-child", "parent-stopped"]
    dead = [zombie(n, verdict=kind) for n, kind in enumerate(kinds * 2 + kinds[:3] * 2)]
    row = body(report(dead), view="user")[1]
    assert row.endswith("  4 traced, 4 unknown, 4 clone-child +1")
    row = body(report(dead), view="user", verbose=True)[2]
    assert row.endswith("  4 traced, 4 unknown, 4 clone-child, 2 parent-stopped")


def test_tallies_end_with_limits() -> None:
    for view in ("verdict", "cgroup", "user", "namespace"):
        lines = body(BOTH, view=view)  # type: ignore[arg-type]
        assert any(line.startswith("threads-max") for line in lines)


def test_tally_of_what_is_not_known() -> None:
    dead = zombie(1, uid=None, cgroup=None, namespace=None)
    for view in ("cgroup", "user", "namespace"):
        assert body(report([dead]), view=view)[1].split()[:2] == ["1", "-"]


def test_many_keys() -> None:
    lines = body(crowd(30), view="cgroup")
    assert sum("never-waits" in line for line in lines) == 20
    assert lines[-1] == "… 10 more rows: -n COUNT shows them"
    assert len(body(crowd(30), view="cgroup", rows=30)) == 31


# --- heirs


def test_heirs() -> None:
    made = replace(
        BOTH,
        heirs=(
            heir(509, 300, reaps=False),
            heir(147, 1, why="init of PID namespace 4026531836"),
            heir(12, 5, reaps=None, heir_comm=None),
            heir(1, None, reaps=None, why="the kernel panics without it"),
        ),
    )
    assert body(made, view="tree") == [
        "1 heir-1  reaps its dead",
        "`- 147 farm  35 zombies  its heir: init of PID namespace 4026531836",
        "300 heir-300  does not reap its dead",
        "`- 509 zpar  1 zombie  its heir: subreaper",
        "5  whether it reaps its dead is not known",
        "`- 12  0 zombies  its heir: subreaper",
        "no heir",
        "`- 1  0 zombies  the kernel panics without it",
    ]


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


def test_leaks() -> None:
    made = replace(BOTH, leaks=(leak(774, 1), leak(778, 1003, task=1, pidfd=2)))
    assert body(made, view="leaks") == [
        "PID  STRUCT PID          REFERENCES  UNNAMED  ITS TASK"
        "       HOLDERS THAT CAN BE NAMED",
        "774  0xffff888000000306           1        1  none any more  -",
        "778  0xffff88800000030a       1,003    1,000  zombie         1 task, 2 pidfd",
    ]


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


def test_what_is_no_limit_is_shown_on_request() -> None:
    endless = limit("pids.max", 5, None, 1, scope="/box")
    assert limits(endless) == []
    assert limits(endless, verbose=True) == [
        "pids.max  /box     5  none     -     1  -"
    ]


def test_limit_that_was_lowered() -> None:
    """Nothing is left of it."""
    assert limits(limit("pid_max", 200, 100)) == [
        "pid_max  system   200  100     0     0  200  [====================]"
    ]


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


def test_when_limits_are_hit() -> None:
    soon = limit("threads-max", 42, 50, 36, first=True, left_ns=12 * SECOND)
    made = replace(
        BOTH,
        interval_ns=5 * SECOND,
        limits=(soon, LIMITS[1]),
        changes=Changes(begun=1200, reaped=1),
        groups=(replace(GROUPS[0], delta=1199), GROUPS[1]),
    )
    lines = body(made)
    assert lines[0].startswith("COUNT     +/-  PARENT")
    assert lines[1].startswith("   35  +1,199  147 farm")
    assert lines[5].startswith("    1       -  509 zpar")
    assert lines[-4:] == [
        "LIMIT        OF                 USED  MAX  LEFT  DEAD   %  HIT IN"
        "  [# dead  = others  . left]",
        "threads-max  system               42   50     8    36  84  ~12.0s"
        "  [##############===...]  first to be hit",
        "pids left    pid_ns 4026531836    41  400   359    36  10       -"
        "  [##..................]",
        "Changes: 1,200 began, 1 was reaped",
    ]


def test_changes_when_all_are_reaped() -> None:
    made = report(interval_ns=SECOND, changes=Changes(begun=0, reaped=36))
    assert body(made) == ["No zombie.", "Changes: 0 began, 36 were reaped"]


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


def test_memory() -> None:
    each = {"task_struct": 9792, "signal_struct": 1088}
    made = replace(BOTH, held=Held(bytes=36 * 10880, each_bytes=each))
    assert body(made)[-1] == (
        "memory: zombies hold 382 KiB, 10,880 bytes each: "
        "task_struct 9,792, signal_struct 1,088"
    )
    unsplit = replace(BOTH, held=Held(bytes=5 << 20, each_bytes={}))
    assert body(unsplit)[-1] == "memory: zombies hold 5.0 MiB"


# --- one task


def one(dead: Zombie, **others: Any) -> list[str]:
    made = group([dead], evidence=FULL, advice="end 147")
    task = asked(dead.pid, dead.verdict, **others)
    return printed(report([dead], [made], asked=(task,), coverage={"tasks_scanned": 1}))


def test_one_zombie() -> None:
    dead = zombie(34, exit_code=9, uid=1000, cgroup="/box")
    assert one(dead)[1:] == [
        "34 dead-34  a zombie for ~34.0s: never waits for children (never-waits); "
        "parent 147 parent-147 (S for 50.0s)",
        "    ended with SIGKILL; user 1000; cgroup /box",
        f"    {FULL_TEXT}",
        "    do: end 147",
    ]


def test_more_of_one_zombie() -> None:
    dead = zombie(
        *(34, 147),
        exit_code=3 << 8,
        cgroup=None,
        namespace=4026532168,
        ns_pid=3,
        threads=1,
        tracer=77,
    )
    assert one(dead)[2] == (
        "    ended with status 3; user 0; PID namespace 4026532168 (PID 3); "
        "1 thread of it lives on; tracer 77"
    )
    assert "; 2 threads of it live on;" in one(replace(dead, threads=2))[2]


def test_one_zombie_with_all_evidence() -> None:
    dead = zombie(34)
    made = report(
        [dead],
        [group([dead], evidence=FULL)],
        asked=(asked(34, "never-waits"),),
        reads=57,
    )
    lines = printed(made, verbose=True)
    assert "    blocks SIGCHLD signal 40; ignores SIGPIPE; catches none" in lines
    assert lines[-2].startswith("coverage: ")
    assert lines[-1] == "cost: 57 reads of the kernel's memory"


def test_one_zombie_of_which_nothing_is_known() -> None:
    made = report(asked=(asked(34, "unknown", ppid=0, parent_comm=None),))
    assert printed(made)[1:] == [
        "34 dead-34  a zombie for ~34.0s: not known (unknown); parent -"
    ]


def test_one_that_lives() -> None:
    made = report(asked=(asked(5, state="D"),), taken_at_ns=SECOND)
    assert printed(made) == [
        "6.12  vmcore (ELF)  types: btf  now 1.000 s",
        "5 task-5  D for 5.0s, no zombie; parent 147 parent-147",
        "    --parent 5 tells of its children that are",
    ]


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


def test_20000_zombies() -> None:
    """In a time that grows no faster than they do."""
    made = replace(crowd(20_000, parents=7), heirs=(), leaks=())
    start = time.monotonic()
    for view in VIEWS:
        assert body(made, view=view)
        assert body(made, view=view, verbose=True)
    # Some seconds here; by the square of their number it would be many minutes.
    assert time.monotonic() - start < 60
