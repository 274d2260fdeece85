# SPDX-License-Identifier: LGPL-2.1-or-later

"""What CPUs run and what waits, against the guest and the kernel's own queues."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from drgn import Object, Program, container_of, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.rbtree import rbtree_inorder_for_each_entry
from drgn.helpers.linux.sched import cpu_curr

from fixtures import lab
from msatools.cpus.runqueues import LATE_NS, LagWhy, lag_why
from msatools.kernel.accounting import read_accounting
from msatools.kernel.report import Findings
from msatools.prstat.microstates import bound_of
from msatools.target.crash import crash_of
from tests.cpus.queuedumps import KERNELS, Seen, all_of, look_at, seen
from tests.support.dumps import TYPES, open_dump
from tests.support.elf import in_user_mode
from tests.zombies.conftest import lose, put

TICK_NS = 4_000_000
"""HZ is 250."""

POLICIES = {0: "OTHER", 1: "FIFO", 2: "RR", 3: "BATCH", 5: "IDLE", 6: "DEADLINE"}
SPINNING = "LAB-SPINNING "
SPINS = ("spin", "read_zeros")
"""What tasks of the guest do that never sleep."""


@pytest.fixture(params=product(KERNELS, TYPES), ids="-".join)
def dump(request: pytest.FixtureRequest) -> Seen:
    kernel, types = request.param
    return seen(f"cpus-{kernel}", types)


def hogs(dump: Seen) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the tasks that never sleep, each of which may run on one CPU alone."""
    for name, task in dump.tasks.items():
        if task["does"] in SPINS:
            yield name, task


def test_nothing_is_lost_and_all_are_counted(dump: Seen) -> None:
    assert not dump.findings.notes
    assert not dump.findings.coverage


def test_each_hog_is_once_where_it_is_bound_to(dump: Seen) -> None:
    places = {pid: [] for pid in (task["pid"] for _, task in hogs(dump))}
    for queue in dump.queues:
        for task in all_of(queue):
            places.get(task.pid, []).append(queue.cpu)
    assert places == {task["pid"]: task["cpus"] for _, task in hogs(dump)}
    assert len(places) >= 25


def test_nobody_else_waits_but_threads_of_the_kernel(dump: Seen) -> None:
    known = {task["pid"] for _, task in hogs(dump)}
    for queue in dump.queues:
        for task in queue.waiting:
            if task.pid not in known:
                flags = dump.truth(f"proc/{task.pid}/task/{task.pid}/stat").split()[8]
                assert int(flags) & 0x00200000, task


def test_hogs_are_what_the_guest_made_them(dump: Seen) -> None:
    found = {task.pid: task for queue in dump.queues for task in all_of(queue)}
    for name, made in hogs(dump):
        task = found[made["pid"]]
        stat = dump.truth(f"proc/{task.pid}/task/{task.pid}/stat")
        fields = stat.rpartition(") ")[2].split()
        assert task.comm == name
        assert task.policy == POLICIES[made["policy"]]
        assert task.priority == int(fields[15])
        assert (task.rt_priority or 0) == made["rt_priority"] == int(fields[37])
        if task.nice is None:
            assert made["policy"] in (1, 2, 6)
        else:
            assert task.nice == made["nice"] == int(fields[16])
        assert task.cgroup == made["cgroup"]
        classes = {1: "realtime", 2: "realtime", 6: "deadline"}
        assert task.sched_class == classes.get(made["policy"], "fair")
        assert (task.deadline_ns is None) == (made["policy"] != 6)


def test_starved_ones_are_in_the_order_in_which_they_would_run(dump: Seen) -> None:
    names = [task.comm for task in dump.queue("realtime").waiting]
    starving = dump.run.workload["starving"]
    assert [name for name in names if name in starving] == starving
    current = dump.queue("realtime").current
    assert current is not None
    assert current.comm == "rt-hog"


def test_starved_ones_wait_since_they_were_woken(dump: Seen) -> None:
    """They have never run since, nor slept, so that an upper bound is exact too."""
    slack = bound_of(read_accounting(dump.prog, Findings()))
    now = dump.clocks.monotonic_ns
    assert now is not None
    waits = {task.comm: task.wait_ns for task in dump.queue("realtime").waiting}
    bounds = {task.wait_bound for task in dump.queue("realtime").waiting}
    delays = has(dump.prog, "struct sched_entity", "sched_delayed")
    assert bounds == {"upper" if delays else "exact"}
    starved = [task for task in dump.tasks.items() if task[1]["is"] == "starved"]
    assert len(starved) == 6
    for name, made in starved:
        wait = waits[name]
        assert wait is not None
        assert made["from_ns"] - slack <= now - wait <= made["to_ns"] + slack, name


def test_throttled_ones_come_last(dump: Seen) -> None:
    """Unless the dump met the group in the millisecond of a second that it has."""
    queue = dump.queue("groups")
    current = queue.current
    assert current is not None
    throttled = [task.comm for task in queue.waiting if task.throttled]
    if current.comm.startswith("limited-"):
        assert throttled == []
    else:
        assert sorted(throttled) == ["limited-0", "limited-1"]
        assert [task.comm for task in queue.waiting][-2:] == throttled


def test_other_queues_have_none_throttled_but_deadline_tasks(dump: Seen) -> None:
    for queue in dump.queues:
        if queue.cpu == dump.cpu("groups"):
            continue
        for task in queue.waiting:
            is_out = find_task(dump.prog, task.pid).dl.dl_throttled
            assert task.throttled == (task.sched_class == "deadline" and bool(is_out))


def test_deadlines_are_from_now_on(dump: Seen) -> None:
    """Those of the tasks that may run are in order."""
    tasks = [task for task in all_of(dump.queue("partition")) if task.deadline_ns]
    assert {task.comm for task in tasks} == {"deadline-short", "deadline-long"}
    for task in tasks:
        deadline = find_task(dump.prog, task.pid).dl.deadline
        assert task.deadline_ns == deadline.value_() - dump.clocks.local_ns


def test_classes_come_in_their_order(dump: Seen) -> None:
    order = ["stop", "deadline", "realtime", "fair"]
    for queue in dump.queues:
        ranks = [
            (task.throttled, order.index(task.sched_class)) for task in queue.waiting
        ]
        assert ranks == sorted(ranks)


# --- the fair class, by the kernel's own trees


def runs_before(dump: Seen, queue: Object) -> list[int]:
    """List the tasks under a ``struct cfs_rq`` as its tree has them.

    The tree is by virtual runtime; since v6.6, by deadline, and those that have had no
    more than the weighted average of all come first. A group that has the task that
    runs is in no tree, but has a turn for its others too.
    """
    tree = queue.tasks_timeline.rb_root.address_of_()
    kind = "struct sched_entity"
    entities = list(rbtree_inorder_for_each_entry(kind, tree, "run_node"))
    turn = turn_of(queue, entities)
    waiting = list(map(turn, entities))
    assert [when for _, when in waiting] == sorted(when for _, when in waiting)
    if queue.curr and queue.curr.my_q:
        entities.append(queue.curr)
    entities.sort(key=turn)
    return [pid for entity in entities for pid in tasks_under(dump, entity)]


def turn_of(
    queue: Object, entities: list[Object]
) -> Callable[[Object], tuple[bool, int]]:
    if not has(queue.prog_, "struct sched_entity", "deadline"):
        least = queue.min_vruntime.value_()
        return lambda entity: (False, since(entity.vruntime, least))
    zero = queue.zero_vruntime.value_()
    average = average_of(queue, entities) if entities else 0
    return lambda entity: (
        since(entity.vruntime, zero) > average,
        since(entity.deadline, zero),
    )


def has(prog: Program, kind: str, member: str) -> bool:
    return bool(prog.type(kind).has_member(member))


def average_of(queue: Object, entities: list[Object]) -> Fraction:
    """Compute the average virtual runtime anew, of those that wait and what runs."""
    zero = queue.zero_vruntime.value_()
    if queue.curr and queue.curr.on_rq:
        entities = [*entities, queue.curr]
    weights = [max(entity.load.weight.value_() >> 10, 2) for entity in entities]
    times = [since(entity.vruntime, zero) for entity in entities]
    total = sum(w * t for w, t in zip(weights, times, strict=True))
    return Fraction(total, sum(weights))


def since(vruntime: Object, zero: int) -> int:
    return (vruntime.value_() - zero + (1 << 63)) % (1 << 64) - (1 << 63)


def tasks_under(dump: Seen, entity: Object) -> list[int]:
    if entity.my_q:
        return runs_before(dump, entity.my_q[0])
    if has(dump.prog, "struct sched_entity", "sched_delayed") and entity.sched_delayed:
        return []
    return [container_of(entity, "struct task_struct", "se").pid.value_()]


def test_fair_tasks_are_in_the_order_of_the_kernels_trees(dump: Seen) -> None:
    longest = 0
    for cpu in for_each_online_cpu(dump.prog):
        queue = dump.by_cpu[cpu]
        found = [
            task.pid
            for task in queue.waiting
            if task.sched_class == "fair" and not task.throttled
        ]
        assert found == runs_before(dump, dump.rq(cpu).cfs)
        longest = max(longest, len(found))
    assert longest >= 7


# --- clocks, and what runs


def test_what_runs_is_what_the_kernel_says(dump: Seen) -> None:
    online = set(for_each_online_cpu(dump.prog))
    for queue in dump.queues:
        if queue.cpu not in online:
            assert queue.current is None
            continue
        task = cpu_curr(dump.prog, queue.cpu)
        assert queue.current is not None
        assert queue.current.pid == task.pid
        assert queue.current.comm.encode() == task.comm.string_()
        assert queue.switched_ns == queue.current.wait_ns
        if task.pid:
            arrival = task.sched_info.last_arrival.value_()
            assert queue.switched_ns == dump.clocks.local_ns - arrival
            assert queue.current.wait_bound == "exact"
        else:
            assert queue.current.sched_class == "idle"
            assert (queue.running, queue.waiting) == (0, ())


def test_a_hog_that_nobody_interrupts_runs_since_it_was_woken(dump: Seen) -> None:
    queue = dump.queue("realtime")
    assert queue.switched_ns is not None
    slack = bound_of(read_accounting(dump.prog, Findings()))
    now = dump.clocks.monotonic_ns
    assert now is not None
    # The kernel's own stop threads may have come before it for a moment.
    assert now - queue.switched_ns >= dump.tasks["rt-hog"]["from_ns"] - slack


def test_clocks_lag_as_they_do(dump: Seen) -> None:
    online = set(for_each_online_cpu(dump.prog))
    latest = max(dump.rq(cpu).clock.value_() for cpu in online)
    for queue in dump.queues:
        assert queue.clock_ns == dump.rq(queue.cpu).clock.value_()
        assert queue.running == dump.rq(queue.cpu).nr_running.value_()
        if queue.clock_ns:
            assert queue.lag_ns == latest - queue.clock_ns
        else:
            assert queue.lag_ns is None
    assert min(queue.lag_ns for queue in dump.queues if queue.lag_ns is not None) == 0


def test_it_is_told_why_clocks_stand(dump: Seen) -> None:
    online = set(for_each_online_cpu(dump.prog))
    for queue, stopped in zip(dump.queues, dump.ticks.stopped, strict=True):
        if queue.cpu not in online:
            assert queue.lag_why == "offline"
            assert queue.ticked_ns is None
        elif not stopped:
            assert queue.lag_why is None
        elif queue.current is not None and queue.current.pid == 0:
            assert queue.lag_why == "idle"
        else:
            assert queue.lag_why == "tick stopped"
            assert queue.cpu == dump.cpu("isolated")
    assert dump.queue("gone").lag_why == "offline"
    assert not any(queue.panicked for queue in dump.queues)


@pytest.mark.parametrize(
    ("online", "idle", "stopped", "late", "told"),
    [
        (True, False, False, 0, None),
        (True, False, False, LATE_NS - 1, None),
        (True, False, False, LATE_NS, "interrupts off"),
        (True, True, False, LATE_NS, "interrupts off"),
        (True, True, True, LATE_NS, "interrupts off"),
        (True, False, True, LATE_NS, "interrupts off"),
        (True, True, True, LATE_NS - 1, "idle"),
        (True, False, True, -60 * LATE_NS, "tick stopped"),
        (True, True, True, None, "idle"),
        (True, False, True, None, "tick stopped"),
        (True, False, None, 60 * LATE_NS, "interrupts off"),
        (True, False, None, 0, None),
        (True, False, False, None, None),
        (False, True, False, 60 * LATE_NS, "offline"),
        (False, True, None, None, "offline"),
    ],
)
def test_why_a_clock_stands(
    online: bool, idle: bool, stopped: bool | None, late: int | None, told: LagWhy
) -> None:
    why = lag_why(online=online, idle=idle, tick_stopped=stopped, late_ns=late)
    assert why == told


@pytest.mark.parametrize("kernel", KERNELS)
def test_btf_tells_what_dwarf_tells(kernel: str) -> None:
    btf, dwarf = (seen(f"cpus-{kernel}", types) for types in TYPES)
    assert btf.queues == dwarf.queues


@pytest.mark.parametrize("types", TYPES)
def test_an_old_kernel_tells_too(types: str) -> None:
    dump = seen("memory-5.10", types)
    assert not dump.findings.notes
    assert [queue.lag_why for queue in dump.queues] == ["idle", "idle"]
    for queue in dump.queues:
        assert queue.current is not None
        assert queue.current.comm == f"swapper/{queue.cpu}"


# --- what each CPU does


def test_what_cpus_do_is_what_their_tasks_do(dump: Seen) -> None:
    """Who spins is in user mode, but for what interrupts it and what comes of that."""
    assert dump.run.elf
    in_user = in_user_mode(dump.run.elf)
    spinning = 0
    for queue in dump.queues:
        told = dump.doing(queue.cpu)
        if queue.current is None:
            continue
        assert told is not None
        assert told.startswith(("user mode", "kernel ", "interrupt "))
        assert (told == "user mode") == in_user[queue.cpu]
        name = queue.current.comm
        if name in dump.tasks and dump.tasks[name]["does"] == "spin":
            spinning += in_user[queue.cpu]
        elif queue.current.pid == 0:
            assert not in_user[queue.cpu]
    assert spinning > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_cpus_do_needs_no_dwarf(kernel: str) -> None:
    btf, dwarf = (seen(f"cpus-{kernel}", types) for types in TYPES)
    for queue in btf.queues:
        assert btf.doing(queue.cpu) == dwarf.doing(queue.cpu)


# --- clocks that stand, and what is lost


@pytest.fixture
def program() -> Program:
    """One dump opened anew, to be damaged."""
    return open_dump("cpus-6.12", "btf")


def put_word(member: Object, value: int) -> None:
    put(member.prog_, member.address_, (value % (1 << 64)).to_bytes(8, "little"))


@pytest.fixture(params=product(KERNELS, TYPES), ids="-".join)
def locked(request: pytest.FixtureRequest) -> Seen:
    """CPUs with interrupts, preemption and softirqs off, and tasks behind them."""
    kernel, types = request.param
    return seen(f"cpulock-{kernel}", types)


def test_a_cpu_with_interrupts_off_is_found_and_no_other(locked: Seen) -> None:
    late = [queue.cpu for queue in locked.queues if queue.lag_why == "interrupts off"]
    assert late == [locked.cpu("irqs-off")]


def test_it_is_told_since_when_interrupts_are_off(locked: Seen) -> None:
    """The guest's thread took the CPU, turned them off, and told what time it was.

    Busy hosts let the CPU rest in between: the kernel has kept when it took it.
    """
    (line,) = [x for x in locked.run.console.splitlines() if x.startswith(SPINNING)]
    spin = json.loads(line.removeprefix(SPINNING))["cm-irqs-off"]
    offset = locked.clocks.monotonic_offset_ns
    assert offset is not None
    arrived = find_task(locked.prog, spin["pid"]).sched_info.last_arrival.value_()
    queue = locked.queue("irqs-off")
    assert queue.ticked_ns is not None
    ticked = locked.ticks.latest_ns - queue.ticked_ns
    # The last tick that was due before it, unless one came before the thread went on.
    assert arrived - offset - TICK_NS <= ticked <= spin["start_ns"] + TICK_NS


def test_tasks_wait_behind_what_does_not_yield(locked: Seen) -> None:
    for role, spins in (
        ("irqs-off", "cm-irqs-off"),
        ("preempt-off", "cm-preempt-off"),
        ("softirq-off", "cm-softirq-off"),
    ):
        queue = locked.queue(role)
        assert queue.current is not None
        assert queue.current.comm == spins
        assert queue.switched_ns is not None
        assert queue.switched_ns > 3 * LATE_NS
        hogs = {f"hog-{queue.cpu}-{number}" for number in range(2)}
        waits = {task.comm: task.wait_ns for task in queue.waiting}
        assert hogs <= set(waits)
        for name in hogs:
            assert waits[name] is not None
            assert waits[name] >= queue.switched_ns
        assert locked.doing(queue.cpu) == "kernel cm_spin_on"


def test_a_thread_that_would_stop_a_cpu_waits_first(locked: Seen) -> None:
    """That is migration/N, which other CPUs want to take tasks from there."""
    stopping = [
        queue
        for queue in locked.queues
        if "stop" in {task.sched_class for task in queue.waiting}
    ]
    assert stopping
    for queue in stopping:
        assert queue.waiting[0].comm == f"migration/{queue.cpu}"
        assert (queue.waiting[0].policy, queue.waiting[0].rt_priority) == ("FIFO", 99)
        assert locked.rq(queue.cpu).stop.on_rq == 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("role", ["groups", "quiet", "isolated"])
def test_a_cpu_whose_timer_is_overdue_is_found(kernel: str, role: str) -> None:
    """One with a tick, one that is idle, one that runs a task without a tick."""
    prog, run = open_dump(f"cpus-{kernel}", "btf"), lab.build(f"cpus-{kernel}")
    whole = look_at(prog, run)
    cpu = whole.cpu(role)
    expires = per_cpu(prog["hrtimer_bases"], cpu).expires_next
    for late, told in (
        (LATE_NS, "interrupts off"),
        (10 * LATE_NS, "interrupts off"),
        (LATE_NS - 1, whole.by_cpu[cpu].lag_why),
    ):
        put_word(expires, whole.ticks.latest_ns - late)
        found = look_at(prog, run)
        assert found.by_cpu[cpu] == replace(whole.by_cpu[cpu], lag_why=told)
        for queue in found.queues:
            if queue.cpu != cpu:
                assert queue == whole.by_cpu[queue.cpu]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tick_that_does_not_come_is_found_while_timers_are_served(
    kernel: str,
) -> None:
    prog, run = open_dump(f"cpus-{kernel}", "btf"), lab.build(f"cpus-{kernel}")
    whole = look_at(prog, run)
    cpu = whole.cpu("groups")
    put_word(per_cpu(prog["hrtimer_bases"], cpu).expires_next, (1 << 63) - 1)
    sched = per_cpu(prog["tick_cpu_sched"], cpu)
    put_word(sched.last_tick_jiffies, 0)
    for late, told in ((LATE_NS, "interrupts off"), (LATE_NS - 1, None)):
        put_word(sched.sched_timer.node.expires, whole.ticks.latest_ns - late + TICK_NS)
        found = look_at(prog, run)
        assert found.by_cpu[cpu].lag_why == told
        assert found.by_cpu[cpu].ticked_ns == late


def test_a_clock_that_stands_lags(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    cpu = whole.cpu("groups")
    queue = per_cpu(program["runqueues"], cpu)
    put_word(queue.clock, whole.clocks.local_ns - 3 * LATE_NS)
    found = look_at(program, run).by_cpu[cpu]
    assert found.lag_ns == 3 * LATE_NS
    # Its tick came nevertheless.
    assert found.lag_why is None


def test_a_damaged_clock_is_none(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    cpu = whole.cpu("groups")
    put_word(per_cpu(program["runqueues"], cpu).clock, 1 << 63)
    found = look_at(program, run)
    assert found.by_cpu[cpu].lag_ns is None
    assert found.by_cpu[cpu].waiting == whole.by_cpu[cpu].waiting


def test_a_run_queue_that_is_lost_is_left_out(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    # Not the one with the latest clock, by which all are told.
    lost = min(whole.by_cpu, key=lambda cpu: whole.by_cpu[cpu].clock_ns or 0)
    queue = per_cpu(program["runqueues"], lost)
    lose(program, queue.address_, sizeof(queue))
    found = look_at(program, run)
    assert found.by_cpu == {
        cpu: queue for cpu, queue in whole.by_cpu.items() if cpu != lost
    }
    assert found.findings.coverage["rq_unreadable"] == 2  # processors, too
    assert found.processors[lost].capacity is None


def test_a_list_that_breaks_off_costs_what_comes_after(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    cpu = whole.cpu("fair")
    listed = list_of(program, cpu)
    # As much as there is: what the type has at its end, the CPU may not need.
    size = program["task_struct_cachep"].object_size.value_()
    lose(program, listed[3].value_(), size)
    found = look_at(program, run)
    pids = {task.pid.value_() for task in listed[:3]}
    assert {task.pid for task in found.by_cpu[cpu].waiting} == pids - {
        whole.by_cpu[cpu].current.pid
    }
    assert found.findings.coverage["lists_broken"] == 1
    assert found.findings.coverage["run_queues_differ"] == 1
    for queue in found.queues:
        if queue.cpu != cpu:
            assert queue == whole.by_cpu[queue.cpu]


def test_a_list_in_a_circle_ends(program: Program) -> None:
    run = lab.build("cpus-6.12")
    cpu = run.workload["cpus"]["fair"]
    listed = list_of(program, cpu)
    second = listed[1].se.group_node.address_of_().value_()
    put_word(listed[4].se.group_node.next, second)
    found = look_at(program, run)
    assert len(all_of(found.by_cpu[cpu])) == 5
    assert found.findings.coverage["lists_broken"] == 1


def test_groups_in_a_circle_end(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    cpu = whole.cpu("groups")
    (task,) = [
        task for task in list_of(program, cpu) if task.comm.string_() == b"group-b"
    ]
    put_word(task.se.parent.parent, task.se.parent.value_())
    found = look_at(program, run)
    names = {task.comm for task in all_of(whole.by_cpu[cpu])}
    assert {task.comm for task in all_of(found.by_cpu[cpu])} == names


def list_of(prog: Program, cpu: int) -> list[Object]:
    head = per_cpu(prog["runqueues"], cpu).cfs_tasks.address_of_()
    return list(list_for_each_entry("struct task_struct", head, "se.group_node"))


def test_who_had_more_than_the_average_comes_later(program: Program) -> None:
    """The average counts what runs, too, which is not in the kernel's sums."""
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    cpu = whole.cpu("fair")
    queue = per_cpu(program["runqueues"], cpu).cfs
    first = whole.by_cpu[cpu].waiting[0].pid
    # As if it had run for long, but were to be done before all others.
    entity = find_task(program, first).se
    more = 1 << 40
    zero, weight = queue.zero_vruntime.value_(), entity.load.weight.value_() >> 10
    change = zero + more - entity.vruntime.value_()
    put_word(queue.avg_vruntime, queue.avg_vruntime.value_() + weight * change)
    put_word(entity.vruntime, zero + more)
    found = look_at(program, run)
    assert found.by_cpu[cpu].waiting[-1].pid == first
    assert pids_of(found, cpu) == runs_before(found, queue)
    # As if what runs had run for longer still.
    put_word(queue.curr.vruntime, zero + (more << 8))
    found = look_at(program, run)
    assert found.by_cpu[cpu].waiting[0].pid == first
    assert pids_of(found, cpu) == runs_before(found, queue)


def pids_of(dump: Seen, cpu: int) -> list[int]:
    return [task.pid for task in dump.by_cpu[cpu].waiting]


def test_deadline_tasks_are_in_the_order_of_their_deadlines(program: Program) -> None:
    run = lab.build("cpus-6.12")
    dump = look_at(program, run)
    cpu = dump.cpu("partition")
    names = ("deadline-short", "deadline-long")
    tasks = [find_task(program, dump.tasks[name]["pid"]) for name in names]
    # Their runtime is all of their period.
    assert not any(task.dl.dl_throttled for task in tasks)
    # As if something else ran.
    put_word(per_cpu(program["runqueues"], cpu).curr, dump.rq(cpu).idle.value_())
    for order in (tasks, tasks[::-1]):
        for number, task in enumerate(order):
            put_word(task.dl.deadline, dump.clocks.local_ns + (number - 1) * 1000)
        waiting = look_at(program, run).by_cpu[cpu].waiting[:2]
        assert [task.pid for task in waiting] == [task.pid.value_() for task in order]
        assert [task.deadline_ns for task in waiting] == [-1000, 0]


def test_throttled_deadline_tasks_are_found_though_on_no_queue(
    program: Program,
) -> None:
    run = lab.build("cpus-6.12")
    dump = look_at(program, run)
    cpu = dump.cpu("partition")

    def deadline_tasks() -> list[Any]:
        tasks = dump.by_cpu[cpu].waiting
        return [task for task in tasks if task.sched_class == "deadline"]

    if len(deadline_tasks()) == 2:
        # What came between: as if the first ran.
        first = find_task(program, deadline_tasks()[0].pid)
        put_word(per_cpu(program["runqueues"], cpu).curr, first.value_())
        dump = look_at(program, run)
    (waits,) = deadline_tasks()
    task = find_task(program, waits.pid)
    member = program.type("struct sched_dl_entity").member("dl_throttled")
    place, bit = divmod(member.bit_offset, 8)
    at = task.dl.address_ + place
    put(program, at, bytes([program.read(at, 1)[0] | 1 << bit]))
    assert task.dl.dl_throttled == 1
    # While it is on the queue still, it is there once.
    assert look_at(program, run).by_cpu[cpu] == dump.by_cpu[cpu]
    put_word(dump.rq(cpu).dl.root.rb_root.rb_node, 0)
    found = look_at(program, run).by_cpu[cpu].waiting
    assert found[-1] == replace(waits, throttled=True)
    assert len(found) == len(dump.by_cpu[cpu].waiting)


def test_a_task_that_sleeps_on_the_queue_does_not_wait(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run)
    cpu = whole.cpu("fair")
    sleeper = whole.by_cpu[cpu].waiting[2]
    delayed = find_task(program, sleeper.pid).se.sched_delayed
    put(program, delayed.address_, b"\1")
    found = look_at(program, run)
    others = [task for task in whole.by_cpu[cpu].waiting if task != sleeper]
    assert found.by_cpu[cpu].waiting == tuple(others)
    # The kernel counts it, and so do we.
    assert found.by_cpu[cpu].running == len(others) + 2
    assert not found.findings.notes


def test_a_wrong_count_is_noted(program: Program) -> None:
    run = lab.build("cpus-6.12")
    cpu = run.workload["cpus"]["fair"]
    queue = per_cpu(program["runqueues"], cpu)
    count = queue.nr_running.value_()
    assert count >= 8
    put(program, queue.nr_running.address_, (count + 1).to_bytes(4, "little"))
    found = look_at(program, run)
    (note,) = found.findings.notes.values()
    assert note.code == "run-queue-differs"
    text = f"CPU 1 counts {count + 1} tasks that can run, {count} were found"
    assert text in note.text


def test_where_a_kernel_died() -> None:
    for kernel in KERNELS:
        name = f"crash-{kernel}"
        prog, run = open_dump(name, "btf"), lab.build(name)
        crash = crash_of(prog)
        assert crash is not None
        found = look_at(prog, run, crash.cpu)
        assert [queue.cpu for queue in found.queues if queue.panicked] == [crash.cpu]
        (died,) = [queue for queue in found.queues if queue.panicked]
        assert died.current is not None
        assert died.current.pid == crash.pid
        assert not found.findings.notes


@pytest.mark.parametrize("kernel", KERNELS)
def test_cost_is_some_reads_a_cpu_and_a_task(kernel: str) -> None:
    dump = seen(f"cpus-{kernel}")
    cpus = len(dump.queues)
    tasks = sum(len(all_of(queue)) for queue in dump.queues)
    run_queues, processors = dump.reads
    # Of each CPU, the queue, and the thread that stops it. Of each task, what links it,
    # the task itself with two parts, and some tasks' groups with their names.
    assert run_queues <= 2 * cpus + 4 * tasks + 40
    # Of each CPU, five structures; the names of some steps.
    assert processors <= 5 * cpus + 10
