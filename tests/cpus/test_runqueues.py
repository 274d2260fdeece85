# SPDX-License-Identifier: LGPL-2.1-or-later

"""Running and waiting tasks agree with the guest's record and the kernel's queues."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from drgn import Object, Program, container_of, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.rbtree import rbtree_inorder_for_each_entry
from drgn.helpers.linux.sched import cpu_curr, task_cpu
from msgspec.structs import replace

from fixtures import lab
from msatools.cpus.queued import quota_waiters
from msatools.cpus.runqueues import LATE_NS, LagWhy, lag_why
from msatools.kernel.clocks import read_accounting
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.accounting import bound_of
from tests.cpus.damaged import lose, put, put_word
from tests.cpus.guests import KERNELS, TICK_NS, is_changing
from tests.cpus.queuedumps import Seen, all_of, look_at, seen
from tests.support.dumps import open_dump, spinning
from tests.support.elf import in_user_mode

POLICIES = {0: "OTHER", 1: "FIFO", 2: "RR", 3: "BATCH", 5: "IDLE", 6: "DEADLINE"}
LIMITED = {"limited-0", "limited-1"}
"""The tasks of a group that is throttled most of the time."""

SPINS = ("spin", "read_zeros")
"""Activities of the workload's tasks that never sleep."""


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(f"cpus-{request.param}")


def hogs(dump: Seen) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tasks that never sleep, each bound to one CPU."""
    for name, task in dump.made.items():
        if task["does"] in SPINS:
            yield name, task


def test_policies_of_hogs(dump: Seen) -> None:
    found = {task.pid: task for queue in dump.queues for task in all_of(queue)}
    for name, made in hogs(dump):
        task = found[made["pid"]]
        fields = dump.stat(task.pid)
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


def test_starved_tasks_are_in_running_order(dump: Seen) -> None:
    names = [task.comm for task in all_of(dump.queue("realtime"))]
    order = ["rt-hog", *dump.run.workload["starving"]]
    assert [name for name in names if name in order] == order


def test_starved_tasks_wait_since_they_were_woken(dump: Seen) -> None:
    """They have not run or slept since, so an upper bound is exact as well."""
    slack = bound_of(read_accounting(dump.prog, LossLog()))
    now = dump.clocks.monotonic_ns
    assert now is not None
    waits = {task.comm: task.wait_ns for task in dump.queue("realtime").waiting}
    bounds = {task.wait_bound for task in dump.queue("realtime").waiting}
    delays = has(dump.prog, "struct sched_entity", "sched_delayed")
    # A task that has moved and not run since may have slept on the way.
    assert bounds <= ({"exact", "upper"} if delays else {"exact"})
    starved = [task for task in dump.made.items() if task[1]["is"] == "starved"]
    assert len(starved) == 6
    for name, made in starved:
        wait = waits[name]
        assert wait is not None
        assert made["from_ns"] - slack <= now - wait <= made["to_ns"] + slack, name


def test_throttled_tasks_are_those_of_the_throttled_group(dump: Seen) -> None:
    """The group has a quota of 1 ms per second, and can be running just then."""
    (count,) = {throttles(dump, name).value_() for name in LIMITED}
    tasks = all_of(dump.queue("groups"))
    throttled = {task.comm for task in tasks if task.throttled}
    assert throttled == (LIMITED if count else set())


@pytest.mark.parametrize("name", ["cpus-7.x"])
def test_tasks_throttled_one_by_one_are_found_without_all_tasks(name: str) -> None:
    """They are on no run queue, but on lists of their groups."""
    prog = open_dump(name, "btf")
    reader, losses = Reader(prog), LossLog()
    percpu = read_percpu(reader, losses)
    found = sorted(quota_waiters(reader, percpu, losses))
    flagged = [task for task in for_each_task(prog) if task.throttled]
    assert found == sorted((task_cpu(task), task.value_()) for task in flagged)
    assert {task.comm.string_().decode() for task in flagged} == LIMITED
    assert not losses.notes


def throttles(dump: Seen, name: str) -> Object:
    """Return the number of throttled groups above a task."""
    return find_task(dump.prog, dump.made[name]["pid"]).se.cfs_rq.throttle_count


def test_deadlines_are_relative_to_now(dump: Seen) -> None:
    """Deadlines of runnable tasks are in order."""
    tasks = [task for task in all_of(dump.queue("partition")) if task.deadline_ns]
    assert {task.comm for task in tasks} == {"deadline-short", "deadline-long"}
    for task in tasks:
        deadline = find_task(dump.prog, task.pid).dl.deadline
        assert task.deadline_ns == deadline.value_() - dump.clocks.local_ns


def test_scheduling_classes_are_in_order(dump: Seen) -> None:
    order = ["stop", "deadline", "realtime", "fair"]
    for queue in dump.queues:
        ranks = [
            (task.throttled, order.index(task.sched_class)) for task in queue.waiting
        ]
        assert ranks == sorted(ranks)


# --- the fair class, by the kernel's trees


def runs_before(dump: Seen, queue: Object) -> list[int]:
    """Return the tasks below a ``struct cfs_rq`` in running order, by its tree.

    The tree is sorted by virtual runtime; since v6.6 by deadline, and entities with at
    most the weighted average come first. The group of the running task is in no tree,
    but its other tasks have a turn as well.
    """
    entities = in_tree(queue)
    turn = turn_of(queue, entities)
    waiting = list(map(turn, entities))
    assert [when for _, when in waiting] == sorted(when for _, when in waiting)
    if queue.curr and queue.curr.my_q:
        entities.append(queue.curr)
    entities.sort(key=turn)
    return [pid for entity in entities for pid in tasks_under(dump, entity)]


def in_tree(queue: Object) -> list[Object]:
    """Return the waiting entities of a ``struct cfs_rq``."""
    tree = queue.tasks_timeline.rb_root.address_of_()
    kind = "struct sched_entity"
    return list(rbtree_inorder_for_each_entry(kind, tree, "run_node"))


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
    """Compute the average virtual runtime of waiting entities and the running one."""
    zero = queue.zero_vruntime.value_()
    if queue.curr and queue.curr.on_rq:
        entities = [*entities, queue.curr]
    weights = [weight(entity) for entity in entities]
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
        queue, rq = dump.by_cpu[cpu], dump.rq(cpu)
        found = [
            task.pid
            for task in queue.waiting
            if task.sched_class == "fair" and not task.throttled
        ]
        longest = max(longest, len(found))
        if is_changing(rq):
            continue  # the task that it chose next is in no tree, the last one is
        assert found == runs_before(dump, rq.cfs)
    assert longest >= 7


# --- clocks and running tasks


def test_current_task_is_that_of_the_run_queue(dump: Seen) -> None:
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
            # It can be on its way to a task that was just woken.
            if not dump.rq(queue.cpu).nr_running:
                assert (queue.running, queue.waiting) == (0, ())


def test_lag_of_clocks(dump: Seen) -> None:
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


@pytest.mark.parametrize(
    ("online", "idle", "stopped", "late", "expected"),
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
def test_reason_of_a_lagging_clock(
    online: bool, idle: bool, stopped: bool | None, late: int | None, expected: LagWhy
) -> None:
    why = lag_why(online=online, idle=idle, tick_stopped=stopped, late_ns=late)
    assert why == expected


# --- activity of CPUs


def test_activity_of_cpus(dump: Seen) -> None:
    """A spinning task is in user mode, unless it was interrupted."""
    assert dump.run.elf
    in_user = in_user_mode(dump.run.elf)
    spinning = 0
    for queue in dump.queues:
        doing = dump.doing(queue.cpu)
        if queue.current is None:
            continue
        assert doing is not None
        assert doing.startswith(("user mode", "kernel ", "interrupt "))
        assert (doing == "user mode") == in_user[queue.cpu]
        name = queue.current.comm
        if name in dump.made and dump.made[name]["does"] == "spin":
            spinning += in_user[queue.cpu]
        elif queue.current.pid == 0:
            assert not in_user[queue.cpu]
    assert spinning > 0


# --- stopped clocks and losses


@pytest.fixture
def whole(program: Program) -> Seen:
    """A dump that the test can damage, with the latest time stamp on its first CPU.

    So the results of other CPUs do not depend on which one had the latest stamp.
    """
    dump = look_at(program, lab.build("cpus-6.12"))
    home = dump.cpu("home")
    put_word(dump.rq(home).clock, dump.clocks.local_ns)
    sched = per_cpu(program["tick_cpu_sched"], home)
    put_word(sched.idle_entrytime, dump.ticks.latest_ns)
    return dump.again()


@pytest.fixture(params=KERNELS)
def locked(request: pytest.FixtureRequest) -> Seen:
    """CPUs with interrupts, preemption and softirqs off, and tasks waiting for them."""
    return seen(f"cpulock-{request.param}")


def test_exactly_the_cpu_with_interrupts_off_is_found(locked: Seen) -> None:
    late = [queue.cpu for queue in locked.queues if queue.lag_why == "interrupts off"]
    assert late == [locked.cpu("irqs-off")]


def test_time_since_interrupts_are_off(locked: Seen) -> None:
    """The guest's thread saw a tick, then disabled interrupts: it has both times."""
    spin = spinning(locked.run)["cm-irqs-off"]
    queue = locked.queue("irqs-off")
    assert queue.ticked_ns is not None
    ticked = locked.ticks.latest_ns - queue.ticked_ns
    # A tick that comes late is one that was due less than a tick before.
    assert spin["before_tick_ns"] - TICK_NS < ticked <= spin["start_ns"]


def test_tasks_wait_for_a_cpu_that_does_not_yield(locked: Seen) -> None:
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
        doing = locked.doing(queue.cpu)
        assert doing is not None
        # The other CPUs have ticks, and can be in one.
        if role == "irqs-off" or not doing.startswith("interrupt "):
            assert doing == "kernel cm_spin_on"


def test_stop_class_thread_waits_first(locked: Seen) -> None:
    """It is migration/N, woken by other CPUs to move tasks."""
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


@pytest.mark.parametrize("role", ["groups", "quiet", "isolated"])
def test_cpu_with_an_overdue_timer_is_found(whole: Seen, role: str) -> None:
    """CPUs with a tick, idle, and running a task without a tick."""
    cpu = whole.cpu(role)
    expires = per_cpu(whole.prog["hrtimer_bases"], cpu).expires_next
    for late, reason in (
        (LATE_NS, "interrupts off"),
        (10 * LATE_NS, "interrupts off"),
        (LATE_NS - 1, whole.by_cpu[cpu].lag_why),
    ):
        put_word(expires, whole.ticks.latest_ns - late)
        changed = replace(whole.by_cpu[cpu], lag_why=reason)
        assert whole.again().by_cpu == {**whole.by_cpu, cpu: changed}


def test_missing_tick_is_found_while_timers_are_served(
    whole: Seen,
) -> None:
    cpu = whole.cpu("groups")
    put_word(per_cpu(whole.prog["hrtimer_bases"], cpu).expires_next, (1 << 63) - 1)
    sched = per_cpu(whole.prog["tick_cpu_sched"], cpu)
    put_word(sched.last_tick_jiffies, 0)
    for late, reason in ((LATE_NS, "interrupts off"), (LATE_NS - 1, None)):
        put_word(sched.sched_timer.node.expires, whole.ticks.latest_ns - late + TICK_NS)
        found = whole.again()
        assert found.by_cpu[cpu].lag_why == reason
        assert found.by_cpu[cpu].ticked_ns == late


def test_stopped_clock_lags(whole: Seen) -> None:
    cpu = whole.cpu("groups")
    put_word(whole.rq(cpu).clock, whole.clocks.local_ns - 3 * LATE_NS)
    # Its tick is unchanged.
    changed = {
        "clock_ns": whole.clocks.local_ns - 3 * LATE_NS,
        "lag_ns": 3 * LATE_NS,
    }
    found = whole.again().by_cpu
    assert found == {**whole.by_cpu, cpu: replace(whole.by_cpu[cpu], **changed)}


def test_damaged_clock_is_null(whole: Seen) -> None:
    cpu = whole.cpu("groups")
    put_word(whole.rq(cpu).clock, 1 << 63)
    found = whole.again().by_cpu
    changed = replace(whole.by_cpu[cpu], clock_ns=0, lag_ns=None)
    assert found == {**whole.by_cpu, cpu: changed}


def test_unreadable_run_queue_is_left_out(whole: Seen) -> None:
    lost = whole.cpu("groups")
    lose(whole.prog, whole.rq(lost).address_, sizeof(whole.rq(lost)))
    found = whole.again()
    assert found.by_cpu == {
        cpu: queue for cpu, queue in whole.by_cpu.items() if cpu != lost
    }
    assert found.losses.coverage["rq_unreadable"] == 2  # processors, too
    assert found.processors[lost].capacity is None


def test_broken_list_costs_the_later_tasks(whole: Seen) -> None:
    cpu = whole.cpu("fair")
    listed = list_of(whole, cpu)
    # The allocated size: it can be smaller than the type's.
    size = whole.prog["task_struct_cachep"].object_size.value_()
    lose(whole.prog, listed[3].value_(), size)
    found = whole.again()
    known = {task.pid.value_() for task in listed[:3] if not task.se.sched_delayed}
    assert known <= {task.pid for task in all_of(found.by_cpu[cpu])}
    # The running task is known from the run queue.
    assert len(all_of(found.by_cpu[cpu])) <= len(known) + 1
    assert found.losses.coverage["queues_broken"] == 1
    assert found.losses.coverage["run_queues_differ"] == 1
    for queue in found.queues:
        if queue.cpu != cpu:
            assert queue == whole.by_cpu[queue.cpu]


def test_loop_in_a_list_ends(whole: Seen) -> None:
    cpu = whole.cpu("fair")
    listed = list_of(whole, cpu)
    second = listed[1].se.group_node.address_of_().value_()
    put_word(listed[4].se.group_node.next, second)
    found = whole.again()
    known = {task.pid.value_() for task in listed[:5] if not task.se.sched_delayed}
    current = whole.by_cpu[cpu].current
    assert current is not None
    assert {task.pid for task in all_of(found.by_cpu[cpu])} == known | {current.pid}
    assert found.losses.coverage["queues_broken"] == 1


def list_of(dump: Seen, cpu: int) -> list[Object]:
    head = dump.rq(cpu).cfs_tasks.address_of_()
    return list(list_for_each_entry("struct task_struct", head, "se.group_node"))


def test_throttled_tasks_are_last(whole: Seen) -> None:
    """All tasks of a throttled group are throttled, and no others."""
    (group,) = {throttles(whole, name).address_ for name in LIMITED}
    cpu = whole.cpu("groups")
    for count in (0, 1, 2):
        put(whole.prog, group, count.to_bytes(4, "little"))
        waiting = whole.again().by_cpu[cpu].waiting
        throttled = [task.comm for task in waiting if task.throttled]
        if not count:
            assert throttled == []
            continue
        running = {task.comm for task in all_of(whole.by_cpu[cpu])[:1]}
        assert {*throttled} == LIMITED - running
        assert [task.comm for task in waiting][-len(throttled) :] == throttled


def test_entity_above_the_average_is_later(whole: Seen) -> None:
    """The average includes the running entity, which is not in the kernel's sums."""
    cpu = whole.cpu("fair")
    queue = whole.rq(cpu).cfs
    if not queue.curr or is_changing(whole.rq(cpu)):
        pytest.skip("the CPU was stopped in the scheduler, by chance")
    others = in_tree(queue)
    # The task with the earliest deadline: it is first if it is eligible.
    entity = next(each for each in others if not each.sched_delayed)
    others.remove(entity)
    first = container_of(entity, "struct task_struct", "se").pid.value_()
    zero = queue.zero_vruntime.value_()
    weights = [weight(other) for other in (entity, queue.curr, *others)]
    farthest = max(abs(since(other.vruntime, zero)) for other in (queue.curr, *others))
    # Enough to raise the average above all others, and no more: the kernel's sum, of
    # times by weight, has 64 bits, and a task of SCHED_IDLE can be 50 s ahead.
    more = 2 * (farthest + 1) * sum(weights) // weights[0] + 1
    change = zero + more - entity.vruntime.value_()
    put_word(queue.avg_vruntime, queue.avg_vruntime.value_() + weights[0] * change)
    put_word(entity.vruntime, zero + more)
    found = whole.again()
    assert pids_of(found, cpu)[-1] == first
    assert pids_of(found, cpu) == runs_before(found, queue)
    # Make the running entity run longer still, so that the average is above that.
    put_word(queue.curr.vruntime, zero + (more + farthest) * sum(weights) // weights[1])
    found = whole.again()
    assert pids_of(found, cpu)[0] == first
    assert pids_of(found, cpu) == runs_before(found, queue)


def test_entities_with_one_deadline_are_in_the_order_of_the_tree(whole: Seen) -> None:
    """That is the order in which they were put there, as of tasks and groups alike."""
    cpu = whole.cpu("fair")
    queue = whole.rq(cpu).cfs
    if is_changing(whole.rq(cpu)):
        pytest.skip("the CPU was stopped in the scheduler, by chance")
    entities = in_tree(queue)
    for entity in entities:
        put_word(entity.deadline, entities[0].deadline.value_())
    expected = [
        pid
        for entity in sorted(entities, key=turn_of(queue, entities))
        for pid in tasks_under(whole, entity)
    ]
    assert len(expected) >= 5
    found = whole.again()
    assert [pid for pid in pids_of(found, cpu) if pid in expected] == expected


def weight(entity: Object) -> int:
    """Return the weight of an entity, scaled down as in the kernel."""
    scaled: int = entity.load.weight.value_() >> 10
    return max(scaled, 2)


def pids_of(dump: Seen, cpu: int) -> list[int]:
    return [task.pid for task in dump.by_cpu[cpu].waiting]


def deadline_tasks(dump: Seen) -> list[Object]:
    names = ("deadline-short", "deadline-long")
    return [find_task(dump.prog, dump.made[name]["pid"]) for name in names]


def throttle(task: Object, is_throttled: bool) -> None:
    """Set or clear the throttled bit of a deadline task."""
    member = task.prog_.type("struct sched_dl_entity").member("dl_throttled")
    offset, bit = divmod(member.bit_offset, 8)
    address = task.dl.address_ + offset
    others = task.prog_.read(address, 1)[0] & ~(1 << bit)
    put(task.prog_, address, bytes([others | is_throttled << bit]))


def test_deadline_tasks_are_in_the_order_of_their_deadlines(whole: Seen) -> None:
    cpu = whole.cpu("partition")
    tasks = deadline_tasks(whole)
    for task in tasks:
        throttle(task, False)
    # Make another task the running one.
    put_word(whole.rq(cpu).curr, whole.rq(cpu).idle.value_())
    for order in (tasks, tasks[::-1]):
        for number, task in enumerate(order):
            put_word(task.dl.deadline, whole.clocks.local_ns + (number - 1) * 1000)
        waiting = [
            task
            for task in whole.again().by_cpu[cpu].waiting
            if task.sched_class == "deadline"
        ]
        assert [task.pid for task in waiting] == [task.pid.value_() for task in order]
        assert [task.deadline_ns for task in waiting] == [-1000, 0]


def test_throttled_deadline_tasks_are_found_on_no_queue(whole: Seen) -> None:
    cpu = whole.cpu("partition")
    runs, waits = deadline_tasks(whole)
    # Make the first one the running task.
    put_word(whole.rq(cpu).curr, runs.value_())
    for task in (runs, waits):
        on_cpu = int(task is runs).to_bytes(4, "little")
        put(whole.prog, task.on_cpu.address_, on_cpu)
    throttle(waits, True)
    # While it is still on the queue, it is listed once.
    before = whole.again().by_cpu[cpu]
    pid = waits.pid.value_()
    assert [task.pid for task in before.waiting].count(pid) == 1
    put_word(whole.rq(cpu).dl.root.rb_root.rb_node, 0)
    found = whole.again().by_cpu[cpu]
    assert (found.waiting[-1].pid, found.waiting[-1].throttled) == (pid, True)
    assert len(found.waiting) == len(before.waiting)


def test_delayed_sleeper_does_not_wait(whole: Seen) -> None:
    cpu = whole.cpu("fair")
    sleeper = whole.by_cpu[cpu].waiting[2]
    delayed = find_task(whole.prog, sleeper.pid).se.sched_delayed
    put(whole.prog, delayed.address_, b"\1")
    found = whole.again()
    others = [task for task in whole.by_cpu[cpu].waiting if task != sleeper]
    assert found.by_cpu[cpu].waiting == tuple(others)
    # The kernel's count includes it.
    assert found.by_cpu[cpu].running == whole.by_cpu[cpu].running
    assert not found.losses.notes


def test_wrong_count_is_noted(whole: Seen) -> None:
    queue = whole.rq(whole.cpu("fair"))
    count = queue.nr_running.value_()
    assert count >= 8
    put(whole.prog, queue.nr_running.address_, (count + 1).to_bytes(4, "little"))
    (note,) = whole.again().losses.notes.values()
    assert note.code == "run-queue-differs"
    text = f"CPU 1 counts {count + 1} tasks that can run, {count} were found"
    assert text in note.text


@pytest.mark.parametrize("part", ["task", "queue"])
def test_lost_activity_is_counted(whole: Seen, part: str) -> None:
    """It was None, as that of a CPU without registers."""
    cpu = next(queue.cpu for queue in whole.queues if whole.doing(queue.cpu))
    task, queue = whole.rq(cpu).curr, whole.rq(cpu)
    losses = {"task": "stacks_unreadable", "queue": "cpus_unreadable"}
    before = whole.losses.coverage[losses[part]]
    address = task.value_() if part == "task" else queue.address_
    lose(whole.prog, address, sizeof(task[0] if part == "task" else queue))
    assert whole.doing(cpu) is None
    assert whole.losses.coverage[losses[part]] == before + 1
