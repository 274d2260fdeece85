# SPDX-License-Identifier: LGPL-2.1-or-later

"""Topology, hotplug state and ticks of CPUs agree with the guest's sysfs."""

import pytest
from drgn import Program, offsetof, sizeof
from drgn.helpers.linux.percpu import per_cpu
from msgspec.structs import replace

from fixtures import lab
from msatools.cpus.model import Processor
from msatools.cpus.times import _latest, read_tick_sched
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.cpus.damaged import lose, put, put_word
from tests.cpus.guests import CPU, KERNELS, TICK_NS
from tests.cpus.queuedumps import Seen, look_at, seen

FAR_NS = 1_000_000_000
TICK_STOPPED = 2
"""TS_FLAG_STOPPED"""


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(f"cpus-{request.param}")


def all_cpus(dump: Seen) -> list[tuple[int, Processor]]:
    return list(zip(dump.percpu.cpus.tolist(), dump.processors, strict=True))


def test_offline_cpu_keeps_its_topology(dump: Seen) -> None:
    cpu, cpus = dump.cpu("gone"), dict(all_cpus(dump))
    assert not cpus[cpu].active
    assert (cpus[cpu].siblings, cpus[cpu].thread) == ((), None)
    # CPUs are numbered so that it is in the package of its neighbours.
    near = [cpus[number] for number in (cpu - 1, cpu + 1)]
    (package,) = {each.package for each in near if each.node == cpus[cpu].node}
    assert cpus[cpu].package == package


@pytest.mark.parametrize("name", ["cpus-6.1"])
def test_cpu_that_was_never_online_has_no_topology(name: str) -> None:
    dump = seen(name)
    present = dump.numbers(f"{CPU}/present")
    assert [cpu for cpu, _ in all_cpus(dump)] == [*dump.numbers(f"{CPU}/possible")]
    absent = [processor for cpu, processor in all_cpus(dump) if cpu not in present]
    assert absent
    for processor in absent:
        assert processor.package is processor.core is processor.thread is None
        assert processor.hotplug == "offline"
        assert not processor.active


def test_hotplug_states_are_those_of_sysfs(dump: Seen) -> None:
    lines = dump.truth(f"{CPU}/hotplug/states").splitlines()
    names = {int(number): name for number, name in (x.split(": ") for x in lines)}
    states = set()
    for cpu, processor in all_cpus(dump):
        if dump.has(f"{CPU}/cpu{cpu}/hotplug/state"):
            state = int(dump.truth(f"{CPU}/cpu{cpu}/hotplug/state"))
            assert processor.hotplug == names[state]
            assert processor.hotplug_target is None
            states.add(processor.hotplug)
    assert states == {"online", "offline"}


def test_capacity_is_that_of_the_run_queue(dump: Seen) -> None:
    for cpu, processor in all_cpus(dump):
        assert processor.capacity == dump.rq(cpu).cpu_capacity.value_()
        assert 0 < processor.capacity <= 1024


def test_ticks_are_stopped_where_tasks_do_not_compete(dump: Seen) -> None:
    stopped = {cpu: processor.tick_stopped for cpu, processor in all_cpus(dump)}
    for role in ("fair", "groups", "realtime", "partition"):
        assert stopped[dump.cpu(role)] is False
    assert set(stopped.values()) == {False, True}
    for cpu, is_stopped in stopped.items():
        sched = per_cpu(dump.prog["tick_cpu_sched"], cpu)
        try:
            assert is_stopped == bool(sched.tick_stopped)
        except AttributeError:
            assert is_stopped == bool(sched.flags & TICK_STOPPED)


def test_run_queue_clock_is_not_older_than_the_last_tick(dump: Seen) -> None:
    """A tick updates the run queue's clock, on CPUs whose tick is not stopped.

    The two clocks differ by less than a tick, as they are not corrected in the guest.
    On a busy host a tick is late: the clock is set to the time at which it is handled.
    """
    ticking = 0
    for row, cpu in enumerate(dump.percpu.cpus.tolist()):
        ticked = dump.ticks.ticked_ns[row]
        # In an interrupt the tick of a nohz_full CPU begins anew before its clock.
        if ticked is None or dump.ticks.stopped[row] or cpu == dump.roles["isolated"]:
            continue
        offset = dump.clocks.monotonic_offset_ns
        assert offset is not None
        clock = dump.by_cpu[cpu].clock_ns - offset
        assert clock >= ticked - TICK_NS
        assert ticked <= dump.ticks.latest_ns
        ticking += 1
    assert ticking >= 3


def test_ticks_of_an_offline_cpu_are_unknown(dump: Seen) -> None:
    for row, (cpu, _) in enumerate(all_cpus(dump)):
        is_offline = dump.by_cpu[cpu].lag_why == "offline"
        assert (dump.ticks.ticked_ns[row] is None) == is_offline


def test_last_tick_of_a_stopped_tick_is_the_later_stamp(program: Program) -> None:
    dump = look_at(program, lab.build("cpus-6.12"))
    cpu = dump.cpu("quiet")
    updated = program["last_jiffies_update"].value_()
    jiffies = program["jiffies_64"].value_()
    sched = per_cpu(program["tick_cpu_sched"], cpu)
    # An interrupt can just have restarted it.
    flags = sched.flags.value_() | TICK_STOPPED
    put(program, sched.flags.address_, flags.to_bytes(sizeof(sched.flags), "little"))
    for before, ticks_ago, expected in (
        (30 * TICK_NS, 20, updated - 20 * TICK_NS),
        (10 * TICK_NS, 20, updated - 11 * TICK_NS),
        (10 * TICK_NS, 1 << 60, updated - 11 * TICK_NS),
        (-1 << 62, 20, updated - 20 * TICK_NS),
        (30 * TICK_NS, 0, updated),
    ):
        put_word(sched.last_tick, updated - before)
        put_word(sched.last_tick_jiffies, jiffies - ticks_ago)
        ticks = read_tick_sched(Reader(program), dump.percpu, LossLog())
        row = dump.percpu.cpus.tolist().index(cpu)
        assert ticks.ticked_ns[row] == expected


@pytest.mark.parametrize(
    ("updated", "ticked", "idle", "latest"),
    [
        (50, [40, 0], [0, 30], 50),
        (50, [60, 0], [0, 30], 60),
        (50, [40, 0], [0, 70], 70),
        # A CPU that is far ahead of all others is damaged.
        (50, [50 + FAR_NS, 0], [0, 0], 50 + FAR_NS),
        (50, [51 + FAR_NS, 0], [0, 0], 50),
        (50, [40, 0], [0, 1 << 60], 50),
        (50, [0, 0], [0, 0], 50),
        (0, [0, 0], [0, 0], 0),
    ],
)
def test_latest_time_stamp(
    updated: int, ticked: list[int], idle: list[int], latest: int
) -> None:
    assert _latest(updated, ticked, idle) == latest


def test_idle_state_of_a_cpu(program: Program) -> None:
    """Guests have no idle states, so one is written to unused memory."""
    run = lab.build("cpus-6.12")
    cpu = run.workload["cpus"]["quiet"]
    driver = program.type("struct cpuidle_driver")
    state = program.type("struct cpuidle_state")
    at = program["init_task"].address_
    states = at + offsetof(driver, "states")
    third = states + 2 * sizeof(state)
    put(program, third, b"C6".ljust(16, b"\0"))
    put_word(program["cpuidle_curr_driver"], at)
    put_word(per_cpu(program["runqueues"], cpu).idle_state, third)
    found = look_at(program, run).processors
    expected = {(processor.idle_state, processor.idle_depth) for processor in found}
    assert expected == {(None, None), ("C6", 2)}
    assert (found[cpu].idle_state, found[cpu].idle_depth) == ("C6", 2)
    # With another driver, the state's index is unknown.
    put_word(program["cpuidle_curr_driver"], third)
    found = look_at(program, run).processors
    assert (found[cpu].idle_state, found[cpu].idle_depth) == ("C6", None)


def test_unreadable_memory_is_noted(program: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(program, run).processors
    for name in ("cpu_info", "tick_cpu_sched", "numa_node", "cpuhp_state"):
        variable = per_cpu(program[name], 1)
        lose(program, variable.address_, sizeof(variable))
    lose(program, program["__cpu_active_mask"].address_, 8)
    dump = look_at(program, run)
    assert not any(processor.active for processor in dump.processors)
    lost = dump.processors[1]
    assert lost.package is lost.node is lost.hotplug is lost.tick_stopped is None
    for cpu in (0, *range(2, len(whole))):
        assert dump.processors[cpu] == replace(whole[cpu], active=None)
    assert dump.losses.coverage == {
        "cpuinfo_x86_unreadable": 1,
        "tick_sched_unreadable": 1,
        "cpuhp_cpu_state_unreadable": 1,
        "numa_node_unreadable": 1,
        # It is read for the clocks, too.
        "cpumasks_unreadable": 2,
    }
    assert dump.losses.about["the mask of active CPUs"] == 2


@pytest.mark.parametrize("name", ["memory-5.10"])
def test_old_kernel(name: str) -> None:
    dump = seen(name)
    assert not dump.losses.lost
    assert [p.node for p in dump.processors] == [0, 1]
    assert [p.package for p in dump.processors] == [0, 1]
    assert [p.siblings for p in dump.processors] == [(0,), (1,)]
    assert [p.hotplug for p in dump.processors] == ["online", "online"]
    assert all(ticked for ticked in dump.ticks.ticked_ns)
