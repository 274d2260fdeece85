# SPDX-License-Identifier: LGPL-2.1-or-later

"""Clocks are read, and a damaged one is replaced or reported."""

import re

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.percpu import per_cpu

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.support.dumps import open_dump
from tests.support.overlay import lose, put

NAME = "tasks-6.12"
RELIABLE = "cpus-6.12"
"""Its kernel was told that its time stamp counter is reliable."""

UNSTABLE = "memory-6.12"
"""Its time stamp counter is not reliable."""

SECOND = 10**9
IMPOSSIBLE = [(1 << 60) + 1, 1 << 63, (1 << 64) - 1]


def write(prog: Program, address: int, value: int) -> None:
    put(prog, address, value.to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("cpu", "member", "value"),
    [
        (0, "clock", IMPOSSIBLE[0]),
        (1, "clock", IMPOSSIBLE[1]),
        (0, "clock_task", IMPOSSIBLE[2]),
        (1, "clock_task", IMPOSSIBLE[0]),
    ],
)
def test_run_queue_that_is_damaged(cpu: int, member: str, value: int) -> None:
    """The clocks of the other CPU are used."""
    prog, losses = open_dump(NAME, "btf"), LossLog()
    other = per_cpu(prog["runqueues"], 1 - cpu)
    queue = per_cpu(prog["runqueues"], cpu)
    write(prog, queue.member_(member).address_, value)
    clocks = read_clocks(Reader(prog), losses)
    assert clocks.local_ns == other.clock.value_()
    assert losses.lost["run_queues_unreadable"] == 1
    assert losses.coverage["run_queues_unreadable"] == 1


@pytest.mark.parametrize(
    ("value", "offset"), [*((n, None) for n in IMPOSSIBLE[:2]), ((1 << 64) - 5, -5)]
)
def test_offset(value: int, offset: int | None) -> None:
    """The offset can be negative; an impossible one is reported as unknown."""
    prog, losses = open_dump(UNSTABLE, "btf"), LossLog()
    write(prog, prog["__gtod_offset"].address_, value)
    clocks = read_clocks(Reader(prog), losses)
    assert clocks.monotonic_offset_ns == offset
    assert (clocks.monotonic_ns is None) == (offset is None)
    assert losses.lost["clocks_unreadable"] == (offset is None)


def test_online_mask_that_is_lost() -> None:
    """The clocks of all present CPUs are used instead."""
    prog, losses = open_dump(NAME, "btf"), LossLog()
    whole = read_clocks(Reader(prog), losses)
    assert whole.local_ns
    assert not losses.lost
    mask = prog["__cpu_online_mask"]
    lose(prog, mask.address_, sizeof(mask))
    clocks = read_clocks(Reader(prog), losses)
    assert clocks.local_ns == whole.local_ns
    assert clocks.behind_ns.tolist() == whole.behind_ns.tolist()
    assert losses.lost == {"cpumasks_unreadable": 1}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        *(("cpus-6.1", "btf"), ("cpus-6.12", "btf"), ("cpus-7.x", "btf")),
        *(("tasks-6.12arm64", "btf"), ("tasks-6.1arm64", "dwarf")),
    ],
)
def test_offset_by_the_counter(name: str, types: str) -> None:
    """The guest read CLOCK_MONOTONIC, and then the scheduler's clock.

    In guests of ``cpus``, CLOCK_MONOTONIC has gained 0.1 s since the kernel compared
    them.
    """
    clocks = read_clocks(Reader(open_dump(name, types)), LossLog())
    shown = lab.build(name).truth("sys/kernel/debug/sched/debug").decode("latin-1")
    found = dict(
        re.findall(r"^(cpu_clk|sched_clk|ktime) +: (\d+\.\d{6})$", shown, re.M)
    )
    # Where the clock is always stable, there is no other one.
    local = found.get("cpu_clk", found["sched_clk"])
    passed, monotonic = (int(text.replace(".", "")) for text in (local, found["ktime"]))
    assert clocks.monotonic_offset_ns is not None
    # A microsecond more than the scales of the two clocks can differ by meanwhile.
    late = passed - monotonic - clocks.monotonic_offset_ns
    # The host may leave the CPU out between the two readings.
    assert -1000 < late < SECOND
    assert clocks.monotonic_ns is not None
    assert clocks.monotonic_ns > monotonic


@pytest.mark.parametrize("lost", [False, True])
def test_clock_that_follows_the_counter(lost: bool) -> None:
    """What the kernel has kept is read only if the timekeeper is lost."""
    prog, losses = open_dump(RELIABLE, "btf"), LossLog()
    whole = read_clocks(Reader(prog), losses).monotonic_offset_ns
    write(prog, prog["__gtod_offset"].address_, 5)
    if lost:
        write(prog, prog["tk_core"].timekeeper.tkr_mono.base.address_, 1 << 62)
    assert read_clocks(Reader(prog), losses).monotonic_offset_ns == (
        5 if lost else whole
    )
    assert losses.lost["clocks_unreadable"] == lost


@pytest.mark.parametrize(
    "name", ["__SCK__pv_sched_clock", "__sched_clock_stable", "clocksource_tsc"]
)
def test_clock_that_does_not_follow_the_counter(name: str) -> None:
    """As of a hypervisor, or of another clock source."""
    prog = open_dump(RELIABLE, "btf")
    write(prog, prog["__gtod_offset"].address_, 5)
    address = prog.symbol(name).address
    if name == "clocksource_tsc":
        address, before = prog["tk_core"].timekeeper.tkr_mono.clock.address_, address
        assert prog.read_u64(address) == before
    write(prog, address, 0)
    assert read_clocks(Reader(prog), LossLog()).monotonic_offset_ns == 5


@pytest.mark.parametrize("name", ["memory-6.12arm64"])
def test_clock_of_the_counter_that_is_damaged(name: str) -> None:
    def offset(member: str, change: int) -> int | None:
        prog = open_dump(name, "btf")
        clock = Object(prog, "struct clock_data", address=prog.symbol("cd").address)
        for number in range(2):
            value = clock.read_data[number].member_(member)
            write(prog, value.address_, value.value_() + change)
        return read_clocks(Reader(prog), LossLog()).monotonic_offset_ns

    whole = offset("epoch_ns", 0)
    assert whole is not None
    assert offset("epoch_ns", 5) == whole + 5
    assert offset("epoch_cyc", 1 << 50) is None
