# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-locks, of reports made by hand."""

import io
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, get_args

import pytest

from msatools.kernel.report import Note
from msatools.locks.model import Confidence, Herd, On
from msatools.locks.report import Changes, Inversion, LocksReport
from msatools.render import show
from msatools.render.blocks import Span, Text
from msatools.render.locks import View, blocks
from msatools.target.model import Address
from tests.locks.madelocks import SECOND, deadlock, lock, owner, report, root, wait
from tests.support.effort import calls
from tests.support.golden import Golden

VIEWS: tuple[View, ...] = get_args(View)

MMAP = "mm_struct(486 mmap-P).mmap_lock"
LIKELY = report(
    [
        wait(487, "folio 0xf0", comm="mmap-R", caller="filemap_fault"),
        wait(486, "rwsem 0xa0", comm="mmap-P", mode="write", caller="vm_mmap_pgoff"),
        wait(488, "rwsem 0xa0", comm="ps", mode="read", call="read", state="S"),
    ],
    [
        lock(
            "rwsem 0xa0",
            (486, 488),
            [owner("~487", "mmap-R", seen=True)],
            name=MMAP,
            readers=1,
        ),
        lock("folio 0xf0", (487,)),
    ],
    [root(487, (1, 1), comm="mmap-R", state="D", reason="FUSE server 480 (/mnt/d)")],
)
"""A page fault that a FUSE server does not answer, within mmap_lock."""

CYCLE = report(
    [
        wait(163, "mutex 0x1", comm="abba-a", caller="thread"),
        wait(164, "mutex 0x2", comm="abba-b"),
        wait(165, "mutex 0x1", comm="third"),
    ],
    [
        lock("mutex 0x1", (163, 165), "=164", name="lm_a"),
        lock("mutex 0x2", (164,), "=163", name="lm_b"),
    ],
    [
        root(
            None,
            (1, 0),
            kind="cycle",
            reason="they wait for each other",
            waiters=(163, 164),
        )
    ],
    deadlocks=[deadlock("163 164", ["mutex 0x1", "mutex 0x2"])],
)


@dataclass(frozen=True)
class Case:
    """A report, and how it is shown."""

    report: LocksReport
    options: dict[str, Any] = field(default_factory=dict)


def chain(length: int) -> LocksReport:
    """Task 2 waits for task 1, 3 for 2 and so on."""
    return report(
        [wait(n, f"mutex {n - 1}") for n in range(2, length + 1)],
        [lock(f"mutex {n}", (n + 1,), f"={n}") for n in range(1, length)],
        [root(1, (length - 1, 0))],
    )


def crowd(count: int, *, of: str = "mutex 1", owners: str = "=1") -> LocksReport:
    pids = tuple(range(100, 100 + count))
    roots = [root(1, (count, 0))] if owners else []
    return report([wait(pid, of) for pid in pids], [lock(of, pids, owners)], roots)


def printed(made: LocksReport, **options: Any) -> list[str]:
    out = io.StringIO()
    show(blocks(made, **options), out)
    return out.getvalue().splitlines()


def body(made: LocksReport, **options: Any) -> list[str]:
    """Give what is between the head and what every view ends with."""
    _, *lines, last = printed(made, **options)
    assert last.startswith("coverage: ")
    return [line for line in lines if not line.startswith("R, W: ")]


# --- head and foot


def test_head() -> None:
    head = printed(LIKELY)[0]
    assert head == "6.12  vmcore (ELF)  types: btf  427 tasks, 3 blocked (2 D)"
    later = replace(LIKELY, taken_at_ns=51_686_000_000, interval_ns=SECOND)
    assert printed(later)[0].endswith(
        "now 51.686 s, interval 1.000 s, 427 tasks, 3 blocked (2 D)"
    )
    assert printed(LIKELY, verbose=True)[1].startswith("types of other modules")


@pytest.mark.parametrize("view", VIEWS)
def test_foot(view: View) -> None:
    coverage = {
        "tasks": 428,
        "tasks_scanned": 427,
        "tasks_unreadable": 2,
        "zombies": 1,
        "locks_unknown": 3,
        "stacks_incomplete": 4,
        "futex_chains_broken": 0,
        "reads": 5,
    }
    notes = (Note("lost", "something\x1b is lost"),)
    lines = printed(replace(LIKELY, coverage=coverage, notes=notes), view=view)
    assert lines[-3].startswith("R, W: to read, to write.")
    assert lines[-2:] == [
        "coverage: 427 tasks scanned, 2 unreadable; 1 zombie has no stack; "
        "3 locks not found; 4 stacks incomplete",
        "note: something\\x1b is lost",
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_blocked(view: View) -> None:
    assert printed(report(), view=view)[1:] == [
        "No task is blocked.",
        "coverage: 391 tasks scanned, 0 unreadable; 36 zombies have no stack",
    ]
    some = body(report(), view=view, some=True)
    assert some == ["No task of those that were asked for is blocked."]


HERD = Herd(
    lock="futex 150:0x4c1608",
    waiters=300,
    owner=None,
    kind="futex",
    address=Address(0x4C1608),
    pids=(150,),
    min_age_ns=20 * SECOND,
    max_age_ns=30 * SECOND,
    nvcsw_median=6,
    confidence="none",
)


# --- all that a view may have to say, as text to be read


def herds() -> dict[str, Case]:
    cond = crowd(300, of="futex 150:0x4c1608", owners="")
    held = replace(HERD, owner=1, max_age_ns=HERD.min_age_ns, lock="mutex 1")
    found: dict[str, Case] = {
        f"a crowd that is a herd: {confidence}": Case(
            replace(cond, herds=(replace(HERD, confidence=confidence),))
        )
        for confidence in get_args(Confidence)
    }
    return found | {
        "of a lock that a task has": Case(replace(crowd(20), herds=(held,)))
    }


def idle() -> dict[str, Case]:
    pids = tuple(range(20, 40))
    nobody = root(None, (0, 20), kind="external", lock="wait_queue 1", waiters=pids)
    waits = [wait(pid, "wait_queue 1", state="S") for pid in pids]
    made = report(waits, [lock("wait_queue 1", pids)], [nobody])
    stuck = replace(made, waits=(replace(waits[0], state="D"), *waits[1:]))
    held = replace(made, locks=(*made.locks, lock("mutex 1", (50,), "=30")))
    workers = [wait(n, "futex 9:0x10", state="S") for n in range(20, 22)]
    either = wait(22, any_of=("futex 9:0x20", "futex 9:0x10"), state="S")
    lost = wait(3, why="its stack is lost", state="D")
    disk = wait(4, on=On(kind="disk", path="/a", device="vda 254:0"), caller="fsync")
    both = [wait(5, "folio 1"), wait(6, "mutex 2", state="S", caller="here")]
    return {
        "what hangs on no root": Case(
            report(
                [*workers, either, lost, disk],
                [lock("futex 9:0x10", (20, 21, 22)), lock("futex 9:0x20", (22,))],
            )
        ),
        "whoever is in D, or wants a lock, has something to do": Case(
            report(both, [lock("folio 1", (5,)), lock("mutex 2", (6,))])
        ),
        "many others": Case(report([wait(n) for n in range(1, 9)])),
        "idle queues are no roots to look at": Case(made),
        "but with -v": Case(made, {"verbose": True}),
        "in D they do not idle": Case(stuck),
        "nor does who keeps others waiting": Case(held),
    }


def roots() -> dict[str, Case]:
    def external(**others: Any) -> Any:
        return root(None, (2, 0), kind="external", **others)

    served = root(
        *(480, (2, 0)),
        kind="external",
        reason="FUSE server 480 (/mnt/d)",
        comm="srv",
        waiters=(2, 3),
    )
    two = [wait(2, "mutex 1"), wait(3, "mutex 1")]
    many = [
        lock(f"mutex {n}", tuple(range(100 * n, 100 * n + 5)), "=1")
        for n in range(1, 9)
    ]
    waits = [wait(pid, each.id) for each in many for pid in each.waiters]
    six = [lock(f"mutex {n}", (100 + n,), "=1") for n in range(6)]
    more, asked = crowd(300), [lock("mutex 1", (5, 2, 6, 7), "=1")]
    more = replace(
        more,
        waits=(*more.waits, wait(50, "rwsem 2")),
        locks=(*more.locks, lock("rwsem 2", (50,), "=390")),
    )
    return {
        "a reader that a server does not answer": Case(LIKELY),
        "with -v a lock is told by its name and its place": Case(
            LIKELY, {"verbose": True}
        ),
        "columns are aligned by what is printed: what is escaped is longer": Case(
            report(
                [
                    wait(
                        9, "mutex 1", comm="x\x1b", age_ns=SECOND // 1000, caller="here"
                    ),
                    wait(
                        *(123456, "mutex 1"),
                        comm="long-name",
                        age_ns=90 * SECOND,
                        caller="there",
                    ),
                    wait(77, "mutex 1", age_bound="upper", caller="where"),
                ],
                [lock("mutex 1", (9, 123456, 77), "=1")],
                [root(1, (3, 0))],
            )
        ),
        "roots are in the order of the report": Case(
            report(
                [wait(3, "mutex 1"), wait(4, "mutex 2")],
                [lock("mutex 1", (3,), "=1"), lock("mutex 2", (4,), "=2")],
                [root(2, (1, 0)), root(1, (1, 0))],
            )
        ),
        "waiters have what they have under them": Case(chain(4)),
        "readers share a lock, told in full once under each root": Case(
            report(
                [wait(4, "rwsem 1"), wait(2, "mutex 9"), wait(3, "mutex 9")],
                [lock("rwsem 1", (4,), "~2 ~3"), lock("mutex 9", (2, 3), "=1")],
                [root(1, (3, 0))],
            )
        ),
        "outside of all tasks": Case(
            report([wait(2), wait(3, caller="read_pages")], [], [served])
        ),
        "one who waits for what is outside stands for it": Case(
            report(
                [wait(2, "folio 1"), wait(3, "mutex 1")],
                [lock("folio 1", (2,)), lock("mutex 1", (3,), "=2")],
                [external(reason="vda 254:0", lock="folio 1", waiters=(2,))],
            )
        ),
        "a lock that nobody has": Case(
            report(
                two,
                [lock("mutex 1", (2, 3))],
                [external(reason="nobody", lock="mutex 1", waiters=(2, 3))],
            )
        ),
        "direct waiters that wait for no lock": Case(
            report([wait(2, caller="do_wait")], [], [root(1, (1, 0), waiters=(2,))])
        ),
        "long lists are cut": Case(crowd(300)),
        "not for a single one": Case(crowd(6)),
        "but keep those for whom others wait": Case(more),
        "one root is not all there is to see": Case(
            report(waits, many, [root(1, (len(waits), 0))])
        ),
        "many locks of one task": Case(
            report(
                [wait(each.waiters[0], each.id) for each in six],
                six,
                [root(1, (6, 0))],
            )
        ),
        "with -p, those in a queue that nobody asked for": Case(
            report(
                [wait(2, "mutex 1")],
                [*asked, lock("mutex 6", (2,), "=6")],
                [root(1, (4, 0))],
            )
        ),
    }


def cycles() -> dict[str, Case]:
    possible = replace(
        CYCLE,
        locks=(
            lock("mutex 0x1", (163, 165), "~164 =9", name="lm_a"),
            lock("mutex 0x2", (164,), "?163"),
        ),
        deadlocks=(deadlock("163 164", ["mutex 0x1", "mutex 0x2"], exact=False),),
    )
    alone = report(
        [wait(5, "mutex 0x1")],
        [lock("mutex 0x1", (5,), "=5")],
        deadlocks=[deadlock("5", ["mutex 0x1"])],
    )
    inversion = Inversion(
        lock="mutex 0x1", owner=164, waiter=163, owner_pri=39, waiter_pri=-2
    )
    return {
        "a deadlock comes first": Case(CYCLE),
        "its chains end where they have been": Case(CYCLE, {"view": "chains"}),
        "one that is possible": Case(possible),
        "of one": Case(alone),
        "priority inversion": Case(replace(CYCLE, inversions=(inversion,))),
    }


def intervals() -> dict[str, Case]:
    changes = Changes(begun=(1, 2), ended=(), moved=(3,), stuck=tuple(range(10, 30)))
    changed = replace(LIKELY, interval_ns=SECOND, changes=changes)
    made = crowd(2)
    grown = (replace(made.locks[0], delta_waiters=2),)
    made = replace(made, interval_ns=SECOND, locks=grown)
    return {
        "what has changed": Case(changed),
        "all that has": Case(changed, {"verbose": True}),
        "a crowd that grows": Case(made),
        "by lock": Case(made, {"view": "lock"}),
    }


def tables() -> dict[str, Case]:
    thread = wait(
        5,
        any_of=tuple(f"futex 9:{n}" for n in range(5)),
        tgid=4,
        age_bound="estimate",
        task_class="LCK",
        state="S",
    )
    disk = wait(3, on=On(kind="disk", path="/a"), caller="fsync", call="fsync")
    others = report(
        [thread, disk, wait(2, why="its stack is lost")],
        [lock(f"futex 9:{n}", (5,)) for n in range(5)],
    )
    held = report(
        [
            wait(2, "mutex 1"),
            wait(3, "mutex 2"),
            wait(4, "mutex 2"),
            wait(6, "rwsem 5"),
        ],
        [
            lock("mutex 2", (3, 4), "=2"),
            lock("mutex 1", (2,), "=1", name="lm"),
            lock("rwsem 5", (6,), "?5 ~1"),
        ],
        [root(1, (4, 0), comm="boss")],
    )
    ends = report(
        [
            wait(5, "mutex 1"),
            wait(4, "mutex 2"),
            wait(3, caller="fsync"),
            wait(2, "mutex 3"),
        ],
        [
            lock("mutex 1", (5,), "=1 =9"),
            lock("mutex 2", (4,)),
            lock("mutex 3", (2,), "=8"),
        ],
        [root(1, (1, 0))],
    )
    asleep = report([*ends.waits, wait(8, caller="nap")], ends.locks)
    readers = crowd(20, owners=" ".join(f"~{n}" for n in range(1, 8)))
    by_lock: dict[str, Any] = {"view": "lock"}
    return {
        "by lock": Case(LIKELY, by_lock),
        "with many owners and waiters": Case(readers, by_lock),
        "all of them": Case(readers, by_lock | {"verbose": True}),
        "by task": Case(LIKELY, {"view": "task"}),
        "what else they wait for": Case(others, {"view": "task"}),
        "holders": Case(held, {"view": "holders"}),
        "chains": Case(LIKELY, {"view": "chains"}),
        "chains of every end": Case(ends, {"view": "chains"}),
        "of one who sleeps": Case(asleep, {"view": "chains"}),
    }


def stacks() -> dict[str, Case]:
    stack = ("schedule", "rwsem_down_write_slowpath", "vm_mmap_pgoff")
    waits = [
        wait(2, "mutex 1", stack=stack),
        wait(3, "mutex 1", stack=stack),
        wait(4, "mutex 1", stack=("schedule",)),
    ]
    boss = root(1, (3, 0), stack=("main",))
    made = report(waits, [lock("mutex 1", (2, 3, 4), "=1")], [boss])
    return {view: Case(made, {"view": view}) for view in VIEWS}


GROUPS = {
    made.__name__: made
    for made in (roots, idle, cycles, herds, intervals, tables, stacks)
}


@pytest.mark.parametrize("group", GROUPS)
def test_golden(group: str, golden: Golden) -> None:
    text = []
    for title, case in GROUPS[group]().items():
        text += [f"--- {title}", *body(case.report, **case.options), ""]
    golden(f"locks/{group}", text)


# --- where there is much to say


def test_work_grows_no_faster_than_who_waits() -> None:
    def work(count: int) -> int:
        held, idle = crowd(count), crowd(count, of="futex 9:0x10", owners="")
        idle = replace(idle, waits=tuple(replace(one, state="S") for one in idle.waits))

        def show_all() -> None:
            for made in (held, idle):
                for view in VIEWS:
                    assert body(made, view=view)
                    assert body(made, view=view, verbose=True)

        return calls(show_all)

    assert work(800) < 3 * work(400)


def test_roots_share_a_screen() -> None:
    """The first has more room than the last, and each some."""
    locks = [
        lock(f"mutex {number}", tuple(range(10 * number, 10 * number + 4)), f"={owner}")
        for owner in range(1, 10)
        for number in range(100 * owner, 100 * owner + 4)
    ]
    waits = [wait(pid, each.id) for each in locks for pid in each.waiters]
    roots = [root(n, (16, 0)) for n in range(1, 10)]
    lines = body(report(waits, locks, roots))
    heads = [at for at, line in enumerate(lines) if line.startswith("ROOT")]
    sizes = [end - start for start, end in pairwise([*heads, len(lines)])]
    # Each with its own line, and one that tells how many are not shown.
    assert sizes == [14, 14, 6, *(5,) * 6]


def test_many_roots() -> None:
    count = 14
    locks = [lock(f"mutex {n}", (100 + n,), f"={n}") for n in range(1, count + 1)]
    waits = [wait(each.waiters[0], each.id) for each in locks]
    made = report(waits, locks, [root(n, (1, 0)) for n in range(1, count + 1)])

    def roots(**options: Any) -> int:
        return sum(line.startswith("ROOT") for line in body(made, **options))

    assert (roots(), roots(rows=3), roots(rows=99), roots(verbose=True)) == (
        *(10, 3),
        *(14, 14),
    )
    assert body(made)[-1] == "… 4 more roots: -n COUNT shows them"
    assert body(made, rows=13)[-1] == "… 1 more root: -n COUNT shows it"
    assert body(made, rows=14)[-1].endswith("D 1m54s  -")


def test_deep_chains_go_on_elsewhere() -> None:
    lines = body(chain(40), verbose=True)
    assert lines[-1].endswith("… 7 behind it: --chains shows the way")
    # Each of the 32 is four columns farther in than the one before it.
    assert max(map(len, lines)) < 180


def test_chain_of_many() -> None:
    """No recursion that a dump could exhaust."""
    for view in VIEWS:
        assert body(chain(1500), view=view)
    assert body(chain(1500), verbose=True)


def styles(made: LocksReport, word: str) -> set[str | None]:
    return {
        span.style
        for block in blocks(made)
        if isinstance(block, Text)
        for span in block.spans
        if isinstance(span, Span) and span.text.startswith(word)
    }


def test_styles() -> None:
    assert styles(CYCLE, "DEADLOCK") == {"bad"}
    possible = replace(CYCLE.deadlocks[0], confidence="possible")
    assert styles(replace(CYCLE, deadlocks=(possible,)), "POSSIBLE") == {"warn"}
    assert styles(LIKELY, "D") == {"warn"}
    assert styles(LIKELY, "S") == set()


def test_deadlock_of_one_and_of_many() -> None:
    alone = deadlock("5", ["mutex 0x1"])
    made = report(
        [wait(5, "mutex 0x1")], [lock("mutex 0x1", (5,), "=5")], deadlocks=[alone]
    )
    assert body(made)[0] == "DEADLOCK  5 =mutex 0x1=> 5"
    pids = range(1, 31)
    large = deadlock(" ".join(map(str, pids)), [f"mutex {n}" for n in pids])
    made = report(
        [wait(n, f"mutex {n}") for n in pids],
        [lock(f"mutex {n}", (n,), f"={n % 30 + 1}") for n in pids],
        deadlocks=[large],
    )
    first = body(made)[0]
    assert first.endswith("12 =mutex 12=> … 18 more: -v shows them … 1")
    assert body(made, verbose=True)[1].endswith("30 =mutex 30=> 1")


def test_many_crowds() -> None:
    """Those of which nothing says that they thunder are cut; -v has them all."""
    crowds = [replace(HERD, lock=f"futex 150:{n:#x}") for n in range(9)]
    thunders = replace(HERD, lock="futex 9:0x9", confidence="one dump")
    report = replace(crowd(20), herds=(*crowds, thunders))
    lines = printed(report)
    assert sum(line.startswith("HERD") for line in lines) == 5
    assert any("futex 9:0x9" in line for line in lines)
    assert "… 5 more crowds on one lock each: -v shows them" in lines
    lines = printed(report, verbose=True)
    assert sum(line.startswith("HERD") for line in lines) == 10


def test_long_chains_are_cut() -> None:
    first = body(chain(40), view="chains")[0]
    assert first.count(" -> ") == 12
    assert first.endswith("  … and on: -v shows more")
    assert body(chain(40), view="chains", verbose=True)[1].endswith("runs on CPU 1")


@pytest.mark.parametrize(
    ("view", "what"), [("task", "row"), ("chains", "chain"), ("lock", "row")]
)
def test_rows(view: View, what: str) -> None:
    """All of a dump, twenty of each sample, and as many as are asked for."""
    made = chain(31)
    heads = 0 if view == "chains" else 1
    assert len(body(made, view=view)) == heads + 30
    few = body(made, view=view, rows=3)
    assert few[-1] == f"… 27 more {what}s: -n COUNT shows them"
    assert len(few) == heads + 4
    sample = replace(made, interval_ns=SECOND)
    assert body(sample, view=view)[-1] == f"… 10 more {what}s: -n COUNT shows them"
    assert len(body(sample, view=view, rows=99)) == heads + 30


# --- names from a dump


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_hostile_names(view: View, verbose: bool) -> None:
    name = "a\x1b[31m\r\n\u202eb"
    hostile = replace(
        report(
            [
                wait(2, "mutex 1", comm=name, caller=name, call=name, why=name),
                wait(3, why=name, comm=name),
                wait(4, "mutex 4", comm=name, stack=(name,)),
                wait(5, "mutex 4", comm=name),
            ],
            [
                lock("mutex 1", (2,), [owner("=1", name)], name=name),
                lock("mutex 4", (4, 5)),
            ],
            [
                root(1, (1, 0), comm=name, reason=name, stack=(name,)),
                root(
                    None,
                    (2, 0),
                    kind="external",
                    reason=name,
                    lock="mutex 4",
                    waiters=(4, 5),
                ),
            ],
        ),
        deadlocks=(deadlock("2", [f"mutex {name}"]),),
        herds=(replace(HERD, lock=name),),
        inversions=(
            Inversion(lock=name, owner=1, waiter=2, owner_pri=1, waiter_pri=0),
        ),
        notes=(Note("lost", name),),
        coverage={f"{name}_lost": 1},
    )
    lines = printed(hostile, view=view, verbose=verbose)
    assert all(line.isprintable() for line in lines)
    assert sum("a\\x1b[31m\\x0d\\x0a\\u202eb" in line for line in lines) > 5
