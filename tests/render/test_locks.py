# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-locks, of reports made by hand."""

import io
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest

from msatools.kernel.report import Note
from msatools.locks.model import Herd, On
from msatools.locks.report import Changes, Inversion, LocksReport
from msatools.render import show
from msatools.render.blocks import Span, Text
from msatools.render.locks import View, blocks
from msatools.target.model import Address
from tests.locks.madelocks import SECOND, deadlock, lock, owner, report, root, wait

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


# --- by root


def test_root() -> None:
    assert body(LIKELY) == [
        "ROOT 1  pid 487 mmap-R  D 8m07s  FUSE server 480 (/mnt/d)  blocks 2 (1 D)",
        f"  ~ rwsem {MMAP}  1 reader, owner ~487, seen on its stack",
        "    W 486 mmap-P  D 8m06s  vm_mmap_pgoff",
        "    R 488 ps      S 8m08s  read()",
    ]


def test_columns_of_waiters_are_aligned() -> None:
    """By what is printed: what is escaped is longer."""
    waits = [
        wait(9, "mutex 1", comm="x\x1b", age_ns=SECOND // 1000, caller="here"),
        wait(123456, "mutex 1", comm="long-name", age_ns=90 * SECOND, caller="there"),
        wait(77, "mutex 1", age_bound="upper", caller="where"),
    ]
    made = report(waits, [lock("mutex 1", (9, 123456, 77), "=1")], [root(1, (3, 0))])
    lines = body(made)[2:]
    assert lines == [
        "           9 x\\x1b      D    1ms  here",
        "      123456 long-name  D  90.0s  there",
        "          77 task-77    D <77.0s  where",
    ]


def test_roots_are_in_the_order_of_the_report() -> None:
    made = report(
        [wait(3, "mutex 1"), wait(4, "mutex 2")],
        [lock("mutex 1", (3,), "=1"), lock("mutex 2", (4,), "=2")],
        [root(2, (1, 0)), root(1, (1, 0))],
    )
    heads = [line[:13] for line in body(made) if line.startswith("ROOT")]
    assert heads == ["ROOT 1  pid 2", "ROOT 2  pid 1"]


def test_waiters_have_what_they_have_under_them() -> None:
    assert body(chain(4)) == [
        "ROOT 1  pid 1 task-1  R 1.0s  runs on CPU 1  blocks 3 (3 D)",
        "  = mutex 1  owner =1",
        "      2 task-2  D 2.0s  -",
        "      = mutex 2  owner =2",
        "          3 task-3  D 3.0s  -",
        "          = mutex 3  owner =3",
        "              4 task-4  D 4.0s  -",
    ]


def test_readers_share_what_hangs_on_them() -> None:
    """Two tasks with the same lock, which is told in full once under each root."""
    made = report(
        [wait(4, "rwsem 1"), wait(2, "mutex 9"), wait(3, "mutex 9")],
        [lock("rwsem 1", (4,), "~2 ~3"), lock("mutex 9", (2, 3), "=1")],
        [root(1, (3, 0))],
    )
    assert body(made)[1:] == [
        "  = mutex 9  owner =1",
        "      2 task-2  D 2.0s  -",
        "      ~ rwsem 1  owners ~2 task-2, ~3 task-3",
        "          4 task-4  D 4.0s  -",
        "      3 task-3  D 3.0s  -",
        "      ~ rwsem 1  (see above)",
    ]


def test_outside_of_all_tasks() -> None:
    served = root(
        480,
        (2, 0),
        kind="external",
        reason="FUSE server 480 (/mnt/d)",
        comm="srv",
        waiters=(2, 3),
    )
    made = report([wait(2), wait(3, caller="read_pages")], [], [served])
    assert body(made) == [
        "ROOT 1  FUSE server 480 (/mnt/d)  blocks 2 (2 D)",
        "    2 task-2  D 2.0s  -",
        "    3 task-3  D 3.0s  read_pages",
    ]


def test_one_who_waits_for_what_is_outside_stands_for_it() -> None:
    outside = root(
        None, (2, 0), kind="external", reason="vda 254:0", lock="folio 1", waiters=(2,)
    )
    made = report(
        [wait(2, "folio 1"), wait(3, "mutex 1")],
        [lock("folio 1", (2,)), lock("mutex 1", (3,), "=2")],
        [outside],
    )
    assert body(made) == [
        "ROOT 1  pid 2 task-2  D 2.0s  folio 1: vda 254:0  blocks 2 (2 D)",
        "  = mutex 1  owner =2",
        "      3 task-3  D 3.0s  -",
    ]


def test_lock_that_nobody_has() -> None:
    outside = root(
        None, (2, 0), kind="external", reason="nobody", lock="mutex 1", waiters=(2, 3)
    )
    waits = [wait(2, "mutex 1"), wait(3, "mutex 1")]
    made = report(waits, [lock("mutex 1", (2, 3))], [outside])
    assert body(made) == [
        "ROOT 1  nobody  blocks 2 (2 D)",
        "  - mutex 1  owner -",
        "      2 task-2  D 2.0s  -",
        "      3 task-3  D 3.0s  -",
    ]


def test_direct_waiters_that_wait_for_no_lock() -> None:
    made = report([wait(2, caller="do_wait")], [], [root(1, (1, 0), waiters=(2,))])
    assert body(made)[1:] == ["    2 task-2  D 2.0s  do_wait"]


def test_long_lists_are_cut_and_say_so() -> None:
    lines = body(crowd(300))
    assert [line.split()[0] for line in lines[2:7]] == [
        "100",
        "101",
        "102",
        "103",
        "104",
    ]
    assert lines[7:] == ["    … 295 more: -v shows them"]
    assert len(body(crowd(300), verbose=True)) == 303  # and a line on types
    # Not for a single one.
    assert len(body(crowd(6))) == 8


def test_cut_lists_keep_those_for_whom_others_wait() -> None:
    made = crowd(300)
    more = lock("rwsem 2", (50,), "=390")
    made = replace(made, waits=(*made.waits, wait(50, "rwsem 2")))
    lines = body(replace(made, locks=(*made.locks, more)))
    assert lines[7:] == [
        "      390 task-390  D 6m30s  -",
        "      = rwsem 2  owner =390",
        "          50 task-50  D 50.0s  -",
        "    … 294 more: -v shows them",
    ]


def test_one_root_is_not_all_there_is_to_see() -> None:
    count = 9
    locks = [
        lock(f"mutex {n}", tuple(range(100 * n, 100 * n + 5)), "=1")
        for n in range(1, count)
    ]
    waits = [wait(pid, each.id) for each in locks for pid in each.waiters]
    made = report(waits, locks, [root(1, (len(waits), 0))])
    lines = body(made)
    assert len(lines) == 1 + 12 + 1
    told = sum("task-" in line for line in lines[1:])
    left = len(waits) - told
    assert lines[-1] == f"  … {left} of those behind it are not shown: -v shows them"
    whole = body(made, verbose=True)
    assert sum("task-" in line for line in whole) == 1 + len(waits)
    assert not any("…" in line for line in whole)


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


def test_20000_who_wait_for_one() -> None:
    """In a time that grows no faster than they do."""
    start = time.monotonic()
    idle = crowd(20_000, of="futex 9:0x10", owners="")
    idle = replace(idle, waits=tuple(replace(each, state="S") for each in idle.waits))
    for made in (idle, crowd(20_000)):
        for view in VIEWS:
            assert body(made, view=view)
            assert body(made, view=view, verbose=True)
    # Five seconds here; by the square of their number it would be hours.
    assert time.monotonic() - start < 60


def test_many_locks_of_one_task() -> None:
    locks = [lock(f"mutex {n}", (100 + n,), "=1") for n in range(6)]
    waits = [wait(100 + n, f"mutex {n}") for n in range(6)]
    lines = body(report(waits, locks, [root(1, (6, 0))]))
    assert lines[-1] == "  … 2 more locks: -v shows them"


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
        assert body(chain(3000), view=view)
    assert body(chain(3000), verbose=True)


def test_tasks_that_the_report_does_not_have() -> None:
    """With -p, those in a queue that nobody asked for."""
    locks = [lock("mutex 1", (5, 2, 6, 7), "=1"), lock("mutex 6", (2,), "=6")]
    made = report([wait(2, "mutex 1")], locks, [root(1, (4, 0))])
    assert body(made)[2:] == [
        "      2 task-2  D 2.0s  -",
        "      6 task-6",
        "      = mutex 6  owner =6",
        "          2 task-2  D 2.0s  -",
        "    … 2 not among those asked for",
    ]


def test_what_hangs_on_no_root() -> None:
    idle = [wait(n, "futex 9:0x10", state="S") for n in range(20, 22)]
    either = wait(22, any_of=("futex 9:0x20", "futex 9:0x10"), state="S")
    lost = wait(3, why="its stack is lost", state="D")
    disk = wait(4, on=On(kind="disk", path="/a", device="vda 254:0"), caller="fsync")
    made = report(
        [*idle, either, lost, disk],
        [lock("futex 9:0x10", (20, 21, 22)), lock("futex 9:0x20", (22,))],
    )
    assert body(made) == [
        "UNOWNED  3 tasks wait for 2 locks that nobody is known to hold, such as idle "
        "threads for work: 3 futex; --by lock lists them",
        "OTHERS  2 blocked tasks hang on no root",
        "    4 task-4  D 4.0s  fsync, /a vda",
        "    3 task-3  D 3.0s  its stack is lost",
    ]
    # Whoever is in D, or wants a lock, has something to do.
    both = [wait(5, "folio 1"), wait(6, "mutex 2", state="S", caller="here")]
    made = report(both, [lock("folio 1", (5,)), lock("mutex 2", (6,))])
    assert body(made) == [
        "OTHERS  2 blocked tasks hang on no root",
        "    6 task-6  S 6.0s  here, for mutex 2",
        "    5 task-5  D 5.0s  -, for folio 1",
    ]
    many = report([wait(n) for n in range(1, 9)])
    assert body(many)[0] == "OTHERS  8 blocked tasks hang on no root"
    assert body(many)[-1] == "  … 3 more: --by task lists them"


def test_idle_queues_are_no_roots_to_look_at() -> None:
    pids = tuple(range(20, 40))
    idle = root(None, (0, 20), kind="external", lock="wait_queue 1", waiters=pids)
    waits = [wait(pid, "wait_queue 1", state="S") for pid in pids]
    made = report(waits, [lock("wait_queue 1", pids)], [idle])
    assert body(made)[0].startswith("UNOWNED  20 tasks wait for 1 lock that nobody")
    assert len(body(made)) == 1
    assert body(made, verbose=True)[1].startswith("ROOT 1  ")
    # In D they do not idle, nor does who keeps others waiting.
    stuck = replace(made, waits=(replace(waits[0], state="D"), *waits[1:]))
    assert body(stuck)[0].startswith("ROOT 1  ")
    held = replace(made, locks=(*made.locks, lock("mutex 1", (50,), "=30")))
    assert body(held)[0].startswith("ROOT 1  ")


# --- deadlocks, herds, inversions, changes


def test_deadlock_is_first() -> None:
    assert body(CYCLE) == [
        "DEADLOCK  163 =mutex lm_a=> 164 =mutex lm_b=> 163",
        "    163 abba-a  D 2m43s  thread",
        "    164 abba-b  D 2m44s  -",
        "ROOT 1  cycle of 2: 163 abba-a, 164 abba-b  they wait for each other  "
        "blocks 1 (1 D)",
        "    164 abba-b  D 2m44s  -",
        "    = mutex lm_a  owner =164",
        "        165 third  D 2m45s  -",
    ]
    for view in VIEWS:
        assert body(CYCLE, view=view)[0].startswith("DEADLOCK  163")


def test_deadlock_that_is_possible() -> None:
    likely = lock("mutex 0x1", (163, 165), "~164 =9", name="lm_a")
    evident = lock("mutex 0x2", (164,), "?163")
    made = replace(
        CYCLE,
        locks=(likely, evident),
        deadlocks=(deadlock("163 164", ["mutex 0x1", "mutex 0x2"], exact=False),),
    )
    assert body(made)[0] == (
        "POSSIBLE DEADLOCK  163 ~mutex lm_a~> 164 ?mutex 0x2?> 163"
    )


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


def test_herds() -> None:
    cond = crowd(300, of="futex 150:0x4c1608", owners="")
    start = "HERD  300 x futex 150:0x4c1608  owner - (nobody is known to hold it)  "
    start += "asleep for 20.0s..30.0s after 6 sleeps each (median)"
    ends = {
        "none": "",
        "one dump": "; woken together, by one look",
        "confirmed": "; all slept again in the interval",
    }
    for confidence, end in ends.items():
        herd: Any = replace(HERD, confidence=confidence)
        assert start + end in printed(replace(cond, herds=(herd,)))
    held = replace(HERD, owner=1, max_age_ns=HERD.min_age_ns)
    held = replace(held, lock=crowd(20).locks[0].id)
    lines = printed(replace(crowd(20), herds=(held,)))
    assert any("owner =1 task-1  asleep for 20.0s after" in line for line in lines)


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


def test_inversions() -> None:
    found = Inversion(
        lock="mutex 0x1", owner=164, waiter=163, owner_pri=39, waiter_pri=-2
    )
    assert (
        "INVERSION  =164 abba-b (priority 39) has mutex lm_a, waits for a CPU, "
        "and keeps 163 abba-a (priority -2) waiting"
    ) in printed(replace(CYCLE, inversions=(found,)))


def test_changes() -> None:
    changes = Changes(begun=(1, 2), ended=(), moved=(3,), stuck=tuple(range(10, 30)))
    made = replace(LIKELY, interval_ns=SECOND, changes=changes)
    line = "Changes: 2 begun (1 2), 0 ended, 1 moved (3), "
    line += "20 stuck (10 11 12 13 14 15 16 17 +12)"
    assert line in printed(made)
    assert any(line.endswith(" 28 29)") for line in printed(made, verbose=True))


def test_crowds_that_grow() -> None:
    made = crowd(2)
    grown = replace(made.locks[0], delta_waiters=2)
    made = replace(made, interval_ns=SECOND, locks=(grown,))
    assert body(made)[1] == "  = mutex 1  owner =1, +2 waiters"
    head, row = body(made, view="lock")[:2]
    assert head.split()[:3] == ["WAITERS", "CHANGE", "OLDEST"]
    assert row.split()[:3] == ["2", "+2", "1m41s"]


# --- tables and chains


def test_by_lock() -> None:
    head, *rows = body(LIKELY, view="lock")
    name = f"rwsem {MMAP}"
    columns = ("WAITERS", "OLDEST", f"{'LOCK':{len(name)}}", "READERS")
    columns += (f"{'OWNERS':18}", "WAITING")
    assert head == "  ".join(columns)
    assert rows == [
        f"      2   8m08s  {name}        1  ~487 mmap-R (seen)  486 488",
        f"      1   8m07s  {'folio 0xf0':{len(name)}}        -  {'-':18}  487",
    ]


def test_by_lock_with_many() -> None:
    many = " ".join(f"~{n}" for n in range(1, 8))
    made = crowd(20, owners=many)
    row = body(made, view="lock")[1]
    assert "~1 task-1, ~2 task-2, ~3 task-3 +4" in row
    assert row.endswith("100 101 102 103 104 105 106 107 +12")
    assert "~7 task-7" in body(made, view="lock", verbose=True)[2]


def test_by_task() -> None:
    thread = wait(
        5,
        any_of=tuple(f"futex 9:{n}" for n in range(5)),
        tgid=4,
        age_bound="estimate",
        task_class="LCK",
        state="S",
    )
    disk = wait(3, on=On(kind="disk", path="/a"), caller="fsync", call="fsync")
    lost = wait(2, why="its stack is lost")
    locks = [lock(f"futex 9:{n}", (5,)) for n in range(5)]
    made = report([thread, disk, lost], [*locks])
    head, *rows = body(made, view="task")
    assert head.split() == [
        *("PID/TID", "STATE", "NOW", "FOR", "MODE", "WAITS", "FOR", "OWNERS", "IN"),
        "COMMAND",
    ]
    assert [" ".join(row.split()) for row in rows] == [
        "4/5 S LCK ~5.0s - futex 9:0 or futex 9:1 or futex 9:2 +2 - - task-5",
        "3 D KLK 3.0s - /a - fsync, fsync() task-3",
        "2 D KLK 2.0s - its stack is lost - - task-2",
    ]
    mode = body(LIKELY, view="task")[1:]
    assert [row.split()[4] for row in mode] == ["read", "-", "write"]


def test_holders() -> None:
    made = report(
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
    head, *rows = body(made, view="holders")
    assert head.split() == [
        *("PID", "LOCKS", "DIRECT", "ALL", "STATE", "FOR", "COMMAND", "HAS", "DOES")
    ]
    assert [" ".join(row.split()) for row in rows] == [
        "1 2 2 4 R 1.0s task-1 =mutex lm, ~rwsem 5 runs on CPU 1",
        "2 1 2 2 D 2.0s task-2 =mutex 2 waits for mutex lm",
        "5 1 1 1 - - task-5 ?rwsem 5 -",
    ]


def test_chains() -> None:
    assert body(LIKELY, view="chains") == [
        f"488 ps  S 8m08s -> rwsem {MMAP} ~> 487 mmap-R -> folio 0xf0: "
        "FUSE server 480 (/mnt/d)",
        "487 mmap-R  D 8m07s -> folio 0xf0: FUSE server 480 (/mnt/d)",
        f"486 mmap-P  D 8m06s -> rwsem {MMAP} ~> 487 mmap-R -> folio 0xf0: "
        "FUSE server 480 (/mnt/d)",
    ]
    assert body(CYCLE, view="chains")[3:] == [
        "165 third  D 2m45s -> mutex lm_a => 164 abba-b -> mutex lm_b => 163 abba-a "
        "-> mutex lm_a => 164 abba-b (again)",
        "164 abba-b  D 2m44s -> mutex lm_b => 163 abba-a -> mutex lm_a => 164 abba-b "
        "(again)",
        "163 abba-a  D 2m43s -> mutex lm_a => 164 abba-b -> mutex lm_b => 163 abba-a "
        "(again)",
    ]


def test_chains_of_every_end() -> None:
    made = report(
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
    assert body(made, view="chains") == [
        "5 task-5  D 5.0s -> mutex 1 => 1 task-1 (+1): runs on CPU 1",
        "4 task-4  D 4.0s -> mutex 2: nobody is known to hold it",
        "3 task-3  D 3.0s -> fsync",
        "2 task-2  D 2.0s -> mutex 3 => 8 task-8",
    ]
    asleep = report([*made.waits, wait(8, caller="nap")], made.locks, ())
    assert body(asleep, view="chains")[4].endswith("=> 8 task-8: nap")


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


# --- stacks


STACK = ("schedule", "rwsem_down_write_slowpath", "vm_mmap_pgoff")


def test_stacks_are_under_their_tasks_once_each() -> None:
    waits = [
        wait(2, "mutex 1", stack=STACK),
        wait(3, "mutex 1", stack=STACK),
        wait(4, "mutex 1", stack=("schedule",)),
    ]
    boss = root(1, (3, 0), stack=("main",))
    made = report(waits, [lock("mutex 1", (2, 3, 4), "=1")], [boss])
    assert body(made) == [
        "ROOT 1  pid 1 task-1  R 1.0s  runs on CPU 1  blocks 3 (3 D)",
        "    main",
        "  = mutex 1  owner =1",
        "      2 task-2  D 2.0s  -",
        "        schedule",
        "        rwsem_down_write_slowpath",
        "        vm_mmap_pgoff",
        "      3 task-3  D 3.0s  -",
        "        (the stack of 2)",
        "      4 task-4  D 4.0s  -",
        "        schedule",
    ]
    alike = [f"    {frame}" for frame in STACK]
    other = ["STACK of 1 task  4", "    schedule"]
    assert body(made, view="lock")[-6:] == ["STACK of 2 tasks  2 3", *alike, *other]
    views: tuple[View, ...] = ("task", "chains")
    for view in views:
        # The longest wait first.
        lines = body(made, view=view)[-6:]
        assert lines == [*other, "STACK of 2 tasks  3 2", *alike]
    assert body(made, view="holders")[-2:] == ["STACK of 1 task  1", "    main"]


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


def test_names_and_places() -> None:
    """With -v a lock is told by both."""
    lines = body(LIKELY, verbose=True)
    assert f"  ~ rwsem {MMAP} (0xa0)  1 reader, owner ~487, seen on its stack" in lines
