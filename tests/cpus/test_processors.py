# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each CPU is, against the guest's /sys/devices/system/cpu."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drgn import Program, offsetof, sizeof
from drgn.helpers.linux.percpu import per_cpu

from fixtures import lab
from msatools.cpus.model import Processor
from msatools.cpus.ticksched import _latest, read_tick_sched
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.values import cpu_list
from tests.cpus.damaged import borrowed, lose, put, put_word
from tests.cpus.queuedumps import KERNELS, Seen, look_at, seen
from tests.support.dumps import TYPES

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"

TICK_NS = 4_000_000
"""HZ is 250."""

FAR_NS = 1_000_000_000
TICK_STOPPED = 2
"""TS_FLAG_STOPPED"""


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(f"cpus-{request.param}")


def online(dump: Seen) -> list[tuple[int, Processor]]:
    cpus = cpu_list(dump.truth(f"{CPU}/online"))
    return [pair for pair in all_cpus(dump) if pair[0] in cpus]


def all_cpus(dump: Seen) -> list[tuple[int, Processor]]:
    return list(zip(dump.percpu.cpus.tolist(), dump.processors, strict=True))


def test_nothing_is_lost(dump: Seen) -> None:
    assert not dump.findings.lost
    assert not dump.findings.notes


def test_there_is_one_for_each_possible_cpu(dump: Seen) -> None:
    possible = cpu_list(dump.truth(f"{CPU}/possible"))
    assert [cpu for cpu, _ in all_cpus(dump)] == sorted(possible)


def test_places_are_those_of_sysfs(dump: Seen) -> None:
    cpus = online(dump)
    assert len({processor.package for _, processor in cpus}) > 1
    assert max(len(processor.siblings) for _, processor in cpus) > 1
    for cpu, processor in cpus:
        where = f"{CPU}/cpu{cpu}/topology"
        siblings = sorted(cpu_list(dump.truth(f"{where}/core_cpus_list")))
        assert processor.package == int(dump.truth(f"{where}/physical_package_id"))
        assert processor.die == int(dump.truth(f"{where}/die_id"))
        assert processor.core == int(dump.truth(f"{where}/core_id"))
        assert processor.siblings == tuple(siblings)
        assert processor.thread == siblings.index(cpu)


def test_a_cpu_that_went_offline_is_still_where_it_was(dump: Seen) -> None:
    cpu = dump.cpu("gone")
    processor = dict(all_cpus(dump))[cpu]
    assert not processor.active
    assert (processor.siblings, processor.thread) == ((), None)
    # It is in the same package as its neighbours, as the guest's CPUs are numbered.
    (package,) = {
        other.package
        for number, other in online(dump)
        if number in (cpu - 1, cpu + 1) and other.node == processor.node
    }
    assert processor.package == package


@pytest.mark.kernels
def test_a_cpu_that_never_was_online_is_nowhere() -> None:
    dump = seen("cpus-6.1")
    present = cpu_list(dump.truth(f"{CPU}/present"))
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


def test_active_ones_are_online(dump: Seen) -> None:
    active = {cpu for cpu, processor in all_cpus(dump) if processor.active}
    assert active == {cpu for cpu, _ in online(dump)}


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


def test_a_tick_brings_the_run_queues_clock_up_to_date(dump: Seen) -> None:
    """So that is no older than the last tick of a CPU whose tick goes on.

    The two clocks are not corrected in the guest, and differ by less than a tick. A
    tick comes late if the host has other things to do: one that was due at some time
    brings the clock to a later one, and that not before the kernel was there.
    """
    ticking = 0
    for row, cpu in enumerate(dump.percpu.cpus.tolist()):
        ticked = dump.ticks.ticked_ns[row]
        if ticked is None or dump.ticks.stopped[row]:
            continue
        offset = dump.clocks.monotonic_offset_ns
        assert offset is not None
        clock = dump.by_cpu[cpu].clock_ns - offset
        assert clock >= ticked - TICK_NS
        assert ticked <= dump.ticks.latest_ns
        ticking += 1
    assert ticking >= 3


def test_ticks_of_an_offline_cpu_are_not_known(dump: Seen) -> None:
    for row, (cpu, _) in enumerate(all_cpus(dump)):
        is_offline = dump.by_cpu[cpu].lag_why == "offline"
        assert (dump.ticks.ticked_ns[row] is None) == is_offline


@pytest.fixture
def prog() -> Iterator[Program]:
    """A dump to be damaged."""
    with borrowed("cpus-6.12") as prog:
        yield prog


def test_a_stopped_tick_was_last_when_either_stamp_says(prog: Program) -> None:
    dump = look_at(prog, lab.build("cpus-6.12"))
    cpu = dump.cpu("quiet")
    updated = prog["last_jiffies_update"].value_()
    jiffies = prog["jiffies_64"].value_()
    sched = per_cpu(prog["tick_cpu_sched"], cpu)
    # An interrupt may just have started it again.
    flags = sched.flags.value_() | TICK_STOPPED
    put(prog, sched.flags.address_, flags.to_bytes(sizeof(sched.flags), "little"))
    for before, ticks_ago, told in (
        (30 * TICK_NS, 20, updated - 20 * TICK_NS),
        (10 * TICK_NS, 20, updated - 11 * TICK_NS),
        (10 * TICK_NS, 1 << 60, updated - 11 * TICK_NS),
        (-1 << 62, 20, updated - 20 * TICK_NS),
        (30 * TICK_NS, 0, updated),
    ):
        put_word(sched.last_tick, updated - before)
        put_word(sched.last_tick_jiffies, jiffies - ticks_ago)
        ticks = read_tick_sched(Reader(prog), dump.percpu, Findings())
        row = dump.percpu.cpus.tolist().index(cpu)
        assert ticks.ticked_ns[row] == told


@pytest.mark.parametrize(
    ("updated", "ticked", "idle", "latest"),
    [
        (50, [40, 0], [0, 30], 50),
        (50, [60, 0], [0, 30], 60),
        (50, [40, 0], [0, 70], 70),
        # That no CPU is ahead of all others by so much, tells what is damaged.
        (50, [50 + FAR_NS, 0], [0, 0], 50 + FAR_NS),
        (50, [51 + FAR_NS, 0], [0, 0], 50),
        (50, [40, 0], [0, 1 << 60], 50),
        (50, [0, 0], [0, 0], 50),
        (0, [0, 0], [0, 0], 0),
    ],
)
def test_the_latest_moment_that_is_noted(
    updated: int, ticked: list[int], idle: list[int], latest: int
) -> None:
    assert _latest(updated, ticked, idle) == latest


def test_a_cpu_in_an_idle_state_names_it(prog: Program) -> None:
    """Guests have none, so one is put into memory that nothing else needs."""
    run = lab.build("cpus-6.12")
    cpu = run.workload["cpus"]["quiet"]
    driver = prog.type("struct cpuidle_driver")
    state = prog.type("struct cpuidle_state")
    at = prog["init_task"].address_
    states = at + offsetof(driver, "states")
    third = states + 2 * sizeof(state)
    put(prog, third, b"C6".ljust(16, b"\0"))
    put_word(prog["cpuidle_curr_driver"], at)
    put_word(per_cpu(prog["runqueues"], cpu).idle_state, third)
    found = look_at(prog, run).processors
    told = {(processor.idle_state, processor.idle_depth) for processor in found}
    assert told == {(None, None), ("C6", 2)}
    assert (found[cpu].idle_state, found[cpu].idle_depth) == ("C6", 2)
    # A driver of another's: its number is not known.
    put_word(prog["cpuidle_curr_driver"], third)
    found = look_at(prog, run).processors
    assert (found[cpu].idle_state, found[cpu].idle_depth) == ("C6", None)


def test_what_cannot_be_read_costs_notes_alone(prog: Program) -> None:
    run = lab.build("cpus-6.12")
    whole = look_at(prog, run).processors
    for name in ("cpu_info", "tick_cpu_sched", "numa_node", "cpuhp_state"):
        variable = per_cpu(prog[name], 1)
        lose(prog, variable.address_, sizeof(variable))
    lose(prog, prog["__cpu_active_mask"].address_, 8)
    dump = look_at(prog, run)
    assert not any(processor.active for processor in dump.processors)
    lost = dump.processors[1]
    assert lost.package is lost.node is lost.hotplug is lost.tick_stopped is None
    for cpu in (0, *range(2, len(whole))):
        assert dump.processors[cpu] == replace(whole[cpu], active=None)
    assert dump.findings.coverage == {
        "cpuinfo_x86_unreadable": 1,
        "tick_sched_unreadable": 1,
        "cpuhp_cpu_state_unreadable": 1,
        "numa_node_unreadable": 1,
        "cpumasks_unreadable": 1,
    }
    assert "the mask of active CPUs" in dump.findings.lost


@pytest.mark.parametrize("kernel", KERNELS)
def test_btf_tells_what_dwarf_tells(kernel: str) -> None:
    btf, dwarf = (seen(f"cpus-{kernel}", types) for types in TYPES)
    assert btf.processors == dwarf.processors
    assert btf.ticks == dwarf.ticks


@pytest.mark.parametrize("name", ["memory-5.10"])
def test_an_old_kernel_tells_too(name: str) -> None:
    dump = seen(name)
    assert not dump.findings.lost
    assert [p.node for p in dump.processors] == [0, 1]
    assert [p.package for p in dump.processors] == [0, 1]
    assert [p.siblings for p in dump.processors] == [(0,), (1,)]
    assert [p.hotplug for p in dump.processors] == ["online", "online"]
    assert all(ticked for ticked in dump.ticks.ticked_ns)
