# SPDX-License-Identifier: LGPL-2.1-or-later

"""The views of msa-locks, of reports made by hand: see ``tests/golden/locks``."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from msatools.kernel.report import Note
from msatools.locks.report import (
    Confidence,
    Contended,
    Herd,
    Inversion,
    LockChanges,
    LocksReport,
    OwnerSeen,
    WaitTarget,
    Waker,
)
from msatools.program.model import Address
from msatools.render.locks.report import View
from msatools.render.locks.report import locks_blocks as blocks
from tests.locks.madelocks import SECOND, deadlock, lock, owner, report, root, wait
from tests.render.screens import (
    EVIL,
    FRAMES,
    Screens,
    check_escaped,
    check_screens,
    printed,
)
from tests.support.cost import calls
from tests.support.golden import Golden

VIEWS: tuple[View, ...] = tuple(
    view for view in get_args(View) if view not in ("io", "workqueues")
)
"""The views of waits; the others are in ``test_locks_io.py``."""

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


HOT = Contended(
    lock="mutex 0xff10",
    type="mutex",
    name="i_rwsem of /srv",
    looks=40,
    share=0.5,
    mean_queue=1.25,
    max_queue=1234,
    wait_ns=SECOND + SECOND // 4,
    error_ns=SECOND // 8,
    owners=tuple(
        OwnerSeen(pid=pid, comm="one\x1b", looks=9, where="DSK folio_wait_bit")
        for pid in (7, 8, 9)
    ),
)


def heads() -> Screens:
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
    lost = replace(LIKELY, coverage=coverage, notes=(Note("lost", "one\x1b is lost"),))
    return {
        **{f"foot: {view}": blocks(lost, view=view) for view in VIEWS},
        **{
            f"nothing is blocked: {view}": blocks(report(), view=view) for view in VIEWS
        },
        **{
            f"of some: {view}": blocks(report(), view=view, some=True) for view in VIEWS
        },
    }


def herds() -> Screens:
    cond = crowd(300, of="futex 150:0x4c1608", owners="")
    held = replace(HERD, owner=1, max_age_ns=HERD.min_age_ns, lock="mutex 1")
    nine = [replace(HERD, lock=f"futex 150:{n:#x}") for n in range(9)]
    thunders = replace(HERD, lock="futex 9:0x9", confidence="one dump")
    many = replace(crowd(20), herds=(*nine, thunders))
    waker = Waker(pid=7, tgid=150, comm="waker\x1b", frames=FRAMES)
    asleep = replace(thunders, waker=waker)
    again = replace(asleep, confidence="confirmed", wakeups=1034, in_vain=0.978)
    met = replace(HOT, lock=again.lock, name="/lab/herd+0xbd368")
    thundered = replace(crowd(20), interval_ns=SECOND // 2, contention=(met,))
    return {
        **{
            f"a crowd that is a herd: {confidence}": blocks(
                replace(cond, herds=(replace(HERD, confidence=confidence),))
            )
            for confidence in get_args(Confidence)
        },
        "of a lock that a task has": blocks(replace(crowd(20), herds=(held,))),
        "that is woken again and again": blocks(replace(thundered, herds=(again,))),
        "those of which nothing says that they thunder are cut": blocks(many),
    }


def idle() -> Screens:
    pids = tuple(range(20, 40))
    nobody = root(None, (0, 20), kind="external", lock="wait_queue 1", waiters=pids)
    waits = [wait(pid, "wait_queue 1", state="S") for pid in pids]
    made = report(waits, [lock("wait_queue 1", pids)], [nobody])
    stuck = replace(made, waits=(replace(waits[0], state="D"), *waits[1:]))
    workers = [wait(n, "futex 9:0x10", state="S") for n in range(20, 22)]
    either = wait(22, any_of=("futex 9:0x20", "futex 9:0x10"), state="S")
    lost = wait(3, why="its stack is lost", state="D")
    disk = wait(
        4, on=WaitTarget(kind="disk", path="/a", device="vda 254:0"), caller="fsync"
    )
    return {
        "what hangs on no root": blocks(
            report(
                [*workers, either, lost, disk],
                [lock("futex 9:0x10", (20, 21, 22)), lock("futex 9:0x20", (22,))],
            )
        ),
        "idle queues are no roots to look at": blocks(made),
        "in D they do not idle": blocks(stuck),
    }


def roots() -> Screens:
    def external(**others: Any) -> Any:
        return root(None, (2, 0), kind="external", **others)

    served = root(
        *(480, (2, 0)),
        kind="external",
        reason="FUSE server 480 (/mnt/d)",
        comm="srv",
        waiters=(2, 3),
    )
    many = [
        lock(f"mutex {n}", tuple(range(100 * n, 100 * n + 5)), "=1")
        for n in range(1, 9)
    ]
    waits = [wait(pid, each.id) for each in many for pid in each.waiters]
    locks = [lock(f"mutex {n}", (100 + n,), f"={n}") for n in range(1, 15)]
    fourteen = report(
        [wait(each.waiters[0], each.id) for each in locks],
        locks,
        [root(n, (1, 0)) for n in range(1, 15)],
    )
    more, asked = crowd(300), [lock("mutex 1", (5, 2, 6, 7), "=1")]
    more = replace(
        more,
        waits=(*more.waits, wait(50, "rwsem 2")),
        locks=(*more.locks, lock("rwsem 2", (50,), "=390")),
    )
    return {
        "a reader that a server does not answer": blocks(LIKELY),
        "readers share a lock, told in full once under each root": blocks(
            report(
                [wait(4, "rwsem 1"), wait(2, "mutex 9"), wait(3, "mutex 9")],
                [lock("rwsem 1", (4,), "~2 ~3"), lock("mutex 9", (2, 3), "=1")],
                [root(1, (3, 0))],
            )
        ),
        "outside of all tasks": blocks(
            report([wait(2), wait(3, caller="read_pages")], [], [served])
        ),
        "one who waits for what is outside stands for it": blocks(
            report(
                [wait(2, "folio 1"), wait(3, "mutex 1")],
                [lock("folio 1", (2,)), lock("mutex 1", (3,), "=2")],
                [external(reason="vda 254:0", lock="folio 1", waiters=(2,))],
            )
        ),
        "direct waiters that wait for no lock": blocks(
            report([wait(2, caller="do_wait")], [], [root(1, (1, 0), waiters=(2,))])
        ),
        "one root is not all there is to see": blocks(
            report(waits, many, [root(1, (len(waits), 0))])
        ),
        "with -p, those in a queue that nobody asked for": blocks(
            report(
                [wait(2, "mutex 1")],
                [*asked, lock("mutex 6", (2,), "=6")],
                [root(1, (4, 0))],
            )
        ),
        **{f"{rows} of them": blocks(fourteen, rows=rows) for rows in (3, 13, 14)},
    }


def cycles() -> Screens:
    pids = range(1, 31)
    large = report(
        [wait(n, f"mutex {n}") for n in pids],
        [lock(f"mutex {n}", (n,), f"={n % 30 + 1}") for n in pids],
        deadlocks=[deadlock(" ".join(map(str, pids)), [f"mutex {n}" for n in pids])],
    )
    inversion = Inversion(
        lock="mutex 0x1", owner=164, waiter=163, owner_pri=39, waiter_pri=-2
    )
    return {
        "a deadlock comes first": blocks(CYCLE),
        "its chains end where they have been": blocks(CYCLE, view="chains"),
        "of many": blocks(large),
        "priority inversion": blocks(replace(CYCLE, inversions=(inversion,))),
    }


def intervals() -> Screens:
    changes = LockChanges(
        begun=(1, 2), ended=(), moved=(3,), stuck=tuple(range(10, 30))
    )
    changed = replace(LIKELY, interval_ns=SECOND, changes=changes)
    made = crowd(2)
    grown = (replace(made.locks[0], delta_waiters=2),)
    made = replace(made, interval_ns=SECOND, locks=grown)
    cold = replace(HOT, lock="futex 7:0x10", name=None, share=0.025, owners=())
    contended = replace(made, contention=(HOT, cold))
    return {
        "locks that are hot": blocks(contended),
        "all of many": blocks(replace(contended, contention=(HOT,) * 12), verbose=True),
        "what has changed": blocks(changed),
        "by lock": blocks(made, view="lock"),
    }


def tables() -> Screens:
    thread = wait(
        5,
        any_of=tuple(f"futex 9:{n}" for n in range(5)),
        tgid=4,
        age_bound="estimate",
        task_class="LCK",
        state="S",
    )
    disk = wait(3, on=WaitTarget(kind="disk", path="/a"), caller="fsync", call="fsync")
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
    return {
        "by task": blocks(LIKELY, view="task"),
        "what else they wait for": blocks(others, view="task"),
        "holders": blocks(held, view="holders"),
        "of one who sleeps": blocks(asleep, view="chains"),
        "long ones are cut": blocks(chain(15), view="chains"),
    }


def stacks() -> Screens:
    stack = ("schedule", "rwsem_down_write_slowpath", "vm_mmap_pgoff")
    waits = [
        wait(2, "mutex 1", stack=stack),
        wait(3, "mutex 1", stack=stack),
        wait(4, "mutex 1", stack=("schedule",)),
    ]
    boss = root(1, (3, 0), stack=("main",))
    made = report(waits, [lock("mutex 1", (2, 3, 4), "=1")], [boss])
    return {view: blocks(made, view=view) for view in VIEWS}


GROUPS: dict[str, Callable[[], Screens]] = {
    made.__name__: made
    for made in (heads, roots, idle, cycles, herds, intervals, tables, stacks)
}


@pytest.mark.parametrize("group", GROUPS)
def test_golden(group: str, golden: Golden) -> None:
    check_screens(golden, f"locks/{group}", GROUPS[group]())


# --- large reports


def test_work_is_linear_in_waiters() -> None:
    def work(count: int) -> int:
        held, idle = crowd(count), crowd(count, of="futex 9:0x10", owners="")
        idle = replace(idle, waits=tuple(replace(one, state="S") for one in idle.waits))
        shown = [partial(blocks, of, view=v) for of in (held, idle) for v in VIEWS]
        return calls(
            lambda: [printed([*show(), *show(verbose=True)]) for show in shown]
        )

    assert work(800) < 3 * work(400)


def test_deep_chains_refer_to_chains() -> None:
    lines = printed(blocks(chain(40), verbose=True))
    assert lines[-3].endswith("… 7 behind it: --chains shows the way")
    # Each of the 32 levels is indented by four more columns.
    assert max(map(len, lines)) < 180


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("verbose", [False, True])
def test_hostile_names(view: View, verbose: bool) -> None:
    outside = root(
        *(None, (2, 0)), kind="external", reason=EVIL, lock="mutex 4", waiters=(4, 5)
    )
    made = report(
        [
            wait(2, "mutex 1", comm=EVIL, caller=EVIL, call=EVIL, why=EVIL),
            wait(3, why=EVIL, comm=EVIL),
            wait(4, "mutex 4", comm=EVIL, stack=(EVIL,)),
            wait(5, "mutex 4", comm=EVIL),
        ],
        [
            lock("mutex 1", (2,), [owner("=1", EVIL)], name=EVIL),
            lock("mutex 4", (4, 5)),
        ],
        [root(1, (1, 0), comm=EVIL, reason=EVIL, stack=(EVIL,)), outside],
    )
    hostile = replace(
        made,
        deadlocks=(deadlock("2", [f"mutex {EVIL}"]),),
        herds=(replace(HERD, lock=EVIL),),
        inversions=(
            Inversion(lock=EVIL, owner=1, waiter=2, owner_pri=1, waiter_pri=0),
        ),
        notes=(Note("lost", EVIL),),
        coverage={f"{EVIL}_lost": 1},
    )
    check_escaped(blocks(hostile, view=view, verbose=verbose), 6)
