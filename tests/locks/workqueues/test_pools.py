# SPDX-License-Identifier: LGPL-2.1-or-later

"""Work items that are stuck: why, and who keeps them waiting.

Workers, work items and the ends of waits are facts in ``tests/truth/workqueues.py``.
"""

import re
from typing import Any

import pytest
from drgn import Object, Program, cast
from drgn.helpers.linux.kthread import to_kthread
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.pid import find_task
from msgspec.structs import replace

from fixtures import lab
from msatools.kernel.clocks import Jiffies, read_jiffies
from msatools.locks.locks import collect_locks
from msatools.locks.report import LocksReport, Root, WorkPool
from msatools.locks.report_builder import LocksOptions
from msatools.locks.root_rows import root_of_pool
from msatools.locks.workqueues import list_workqueues, stalled_pools
from tests.locks.io.test_inflight import context_of
from tests.locks.reports import LoggedReport, logged_report
from tests.support.dumps import open_dump
from tests.support.overlay import lose, put

DUMP = "workqueues-6.12"
DUMPS = [DUMP, "workqueues-6.1"]
QUIET = (
    *("memory-6.12", "crash-6.12", "locks-6.12"),
    # A panic without kdump takes the CPUs that it stops out of the online mask.
    "crashes-nested-6.12",
    "crashes-nested-6.1",
)
SPINNING_CPU, STARVED_CPU, OFFLINE_CPU = 1, 2, 3
LIMIT_NS = 30 * 10**9
"""The kernel has no watchdog of workqueues, so the default of that is the limit."""


@pytest.fixture(params=DUMPS)
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


def cases(dump: LoggedReport) -> dict[str, dict[str, Any]]:
    return {case["name"]: case for case in dump.run.workload["cases"]}


def what(dump: LoggedReport, case: str, waiter: int = 0) -> str | None:
    """Return what a waiter of a case waits for, in words."""
    wait = dump.waits[cases(dump)[case]["waiters"][waiter]]
    assert wait.lock is not None
    return dump.locks[wait.lock].what


def root_of(dump: LoggedReport, case: str) -> Root:
    pid = cases(dump)[case]["waiters"][0]
    roots = dump.report.roots
    (root,) = [root for root in roots if pid in (*root.waiters, *root.chain)]
    return root


def test_why_work_has_not_begun(dump: LoggedReport) -> None:
    pending = "work wm_pending_work, not begun: "
    limited = f"{pending}max_active 1 of wm_limited is reached"
    assert what(dump, "limited") == limited
    spinning = what(dump, "spin") or ""
    assert spinning.startswith(f"{pending}pool ")
    ends = f"(CPU {SPINNING_CPU}) starts no other worker while wm_spin_work runs"
    assert spinning.endswith(ends)
    starved = what(dump, "starved") or ""
    assert f"(CPU {STARVED_CPU}) that is to run it waits for a CPU" in starved


def test_work_for_an_offline_cpu_is_a_root(dump: LoggedReport) -> None:
    root = root_of(dump, "offline")
    timer = f"its timer is on CPU {OFFLINE_CPU}, which is offline"
    assert root.reason == f"work wm_pending_work, not begun: {timer}"
    assert root.pid is None


def test_roots_say_what_workers_do(dump: LoggedReport) -> None:
    for case, doing in {
        "sleep": "asleep in work wm_sleep_work of wm_sleep",
        "chain": "asleep in work wm_chain_work of wm_chain",
        # Perhaps in an interrupt.
        "spin": rf"runs on CPU {SPINNING_CPU}( in \w+,)? in work wm_spin_work of "
        "wm_spin",
    }.items():
        root = root_of(dump, case)
        assert root.pid == cases(dump)[case]["worker"]
        assert re.fullmatch(doing, root.reason)


def test_who_has_the_cpu_of_a_starved_worker(dump: LoggedReport) -> None:
    hog = dump.run.workload["hog"]
    reason = f"waits for CPU {STARVED_CPU}, which real-time task {hog} hog has"
    assert root_of(dump, "starved").reason == reason


def test_confidence_in_work_beside_a_completion(dump: LoggedReport) -> None:
    for case, confidence in (("on-stack", "likely"), ("in-object", "evidence")):
        (pid,) = cases(dump)[case]["waiters"]
        (owner,) = dump.locks[dump.waits[pid].lock or ""].owners
        assert (owner.pid, owner.confidence) == (
            cases(dump)[case]["worker"],
            confidence,
        )


def test_ordered_workqueue_that_flushes_itself(dump: LoggedReport) -> None:
    worker = cases(dump)["ordered"]["worker"]
    (deadlock,) = dump.report.deadlocks
    assert (deadlock.pids, deadlock.confidence) == ((worker,), "exact")


def test_ordered_workqueue_whose_rescuer_flushes_it() -> None:
    """As where no other worker could be made: it is one of its pool's workers, too."""
    prog = open_dump(DUMP, "btf")
    (case,) = [c for c in lab.build(DUMP).workload["cases"] if c["name"] == "ordered"]
    task = find_task(prog, case["worker"])
    worker = cast("struct worker *", to_kthread(task).data)
    queue = worker.current_pwq.wq
    put(
        prog,
        queue.rescuer.address_of_().value_(),
        worker.value_().to_bytes(8, "little"),
    )
    (deadlock,) = collect_locks(prog).deadlocks
    assert (deadlock.pids, deadlock.confidence) == ((case["worker"],), "exact")


@pytest.mark.parametrize("name", DUMPS)
def test_stalled_pools(name: str) -> None:
    """The guest rested for longer than the limit after two pools had stalled."""
    context = context_of(open_dump(name, "btf"))
    found = stalled_pools(context)
    stalled = {pool.cpu: pool for pool in found if pool.nice == 0}
    assert {SPINNING_CPU, STARVED_CPU} <= stalled.keys() <= {1, 2}
    (spin,) = [c for c in lab.build(name).workload["cases"] if c["name"] == "spin"]
    assert stalled[SPINNING_CPU].culprits == (spin["worker"],)
    assert all((pool.progress_age_ns or 0) >= LIMIT_NS for pool in found)
    listed = list_workqueues(context)
    assert [pool for pool in listed.pools if pool.is_stalled] == list(found)
    assert listed.stalled_after_ns == LIMIT_NS


def test_stalled_pool_is_a_root_unless_its_culprit_is() -> None:
    made = logged_report(DUMP).report
    pools = {root.pool for root in made.roots if root.pool is not None}
    culprits = {root.pid for root in made.roots if root.kind == "task"}
    context = context_of(open_dump(DUMP, "btf"))
    for pool in stalled_pools(context):
        known = not culprits.isdisjoint(pool.culprits)
        assert known is (pool.id not in pools), pool


def test_root_of_a_pool() -> None:
    context = context_of(open_dump(DUMP, "btf"))
    (pool,) = [each for each in stalled_pools(context) if each.cpu == SPINNING_CPU][:1]
    few = replace(pool, pending=1, progress_age_ns=LIMIT_NS)
    root = root_of_pool(few)
    assert root.reason == (
        f"pool {pool.id} (CPU {SPINNING_CPU}) with 1 work item pending, and none begun "
        f"for 30.0s: {pool.why}"
    )
    assert (root.kind, root.pid, root.pool) == ("external", *pool.culprits, pool.id)


@pytest.mark.parametrize("name", QUIET)
def test_no_pool_is_stalled_where_all_is_well(name: str) -> None:
    made = collect_locks(open_dump(name, "btf"), options=LocksOptions(workqueues=True))
    assert made.workqueues is not None
    assert not any(pool.is_stalled for pool in made.workqueues.pools)
    assert not any(root.pool for root in made.roots)
    assert made.workqueues.offline == ()


def pools_of(prog: Program) -> tuple[LocksReport, dict[int | None, WorkPool]]:
    made = collect_locks(prog, options=LocksOptions(workqueues=True))
    assert made.workqueues is not None
    usual = [pool for pool in made.workqueues.pools if pool.nice == 0]
    return made, {pool.cpu: pool for pool in usual if "bh" not in pool.flags}


def test_worklist_that_is_lost() -> None:
    """What can be read of the pool is reported, and the loss is counted."""
    prog = open_dump(DUMP, "btf")
    _, before = pools_of(prog)
    pool = before[SPINNING_CPU]
    work = Object(prog, "struct worker_pool", address=pool.address).worklist.next
    lose(prog, work.value_(), 16)
    made, after = pools_of(prog)
    assert made.coverage["lists_broken"] > 0
    assert after[SPINNING_CPU].pending == 0
    assert after[SPINNING_CPU].busy == pool.busy


def test_worker_that_points_at_no_task() -> None:
    prog = open_dump(DUMP, "btf")
    made, before = pools_of(prog)
    pool = Object(prog, "struct worker_pool", address=before[SPINNING_CPU].address)
    workers = list_for_each_entry("struct worker", pool.workers.address_of_(), "node")
    (worker,) = [each for each in workers if each.current_work]
    put(prog, worker.task.address_of_().value_(), (0x1234).to_bytes(8, "little"))
    after, _ = pools_of(prog)
    assert after.coverage["workqueues_unreadable"] > 0
    assert len(after.workqueues.pools) == len(made.workqueues.pools)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("count", "moment", "past"),
    [
        (1000, 5000, 5000),
        (999, 1000, 1000),
        (1250, 1_005_000, None),
        (1000 - 250, None, None),
        ((1 << 64) - 1, None, None),
    ],
)
def test_time_of_jiffies(count: int, moment: int | None, past: int | None) -> None:
    jiffies = Jiffies(tick_ns=4000, count=1000, updated_ns=5000)
    assert (jiffies.time_ns(count), jiffies.past_ns(count)) == (moment, past)


def test_jiffies_are_the_clock() -> None:
    """The last update is at most some ticks old."""
    prog = open_dump(DUMP, "btf")
    jiffies, context = read_jiffies(prog), context_of(prog)
    now = jiffies.time_ns(jiffies.count)
    assert now == jiffies.updated_ns
    assert context.monotonic_ns is not None
    assert 0 <= context.monotonic_ns - jiffies.updated_ns < 10**9
