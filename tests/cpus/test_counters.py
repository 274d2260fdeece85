# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counters of CPUs agree with the guest's last record of them.

The kernel runs on until the guest is stopped. A counter's possible increase until then
is its bound here; counters at rest must be exact.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
import pytest
from drgn import Program, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu

from fixtures import lab
from msatools.cpus.counters import CpuCounters, read_counters
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from tests.cpus.damaged import lose, put, put_word
from tests.cpus.guests import KERNELS, TICK_NS, Guest, excused
from tests.support.dumps import open_dump

USER_TICK_NS = 10_000_000
"""Unit of times in /proc/stat (USER_HZ)."""

CONSOLE_MOST = len("\r\nLAB-TRUTH 2\r\n") + 1
"""Maximum interrupts of the serial line for the guest's last message: one per
character, and one at the end. All other devices are at rest."""

TIMES = (
    *("USER", "NICE", "SYSTEM", "IDLE", "IOWAIT", "IRQ", "SOFTIRQ", "STEAL"),
    *("GUEST", "GUEST_NICE"),
)
"""Times in the order of /proc/stat."""

# Counted per timer of a CPU: its tick, and another one in between, such as a deadline.
# Machine checks are polled for every five minutes.
TIMED = {"LOC", "MCP"}

# Requested by other CPUs: an idle CPU can be asked to balance at each tick of another
# CPU. A CPU without a tick requests its own (IWI).
ASKED = {"CAL", "RES", "IWI"}

ByCpu = dict[int, int]


@dataclass
class Seen(Guest):
    """The counters of a dump, and the guest's record."""

    counters: CpuCounters
    clocks: Clocks
    losses: LossLog
    reads: int

    def elapsed_ns(self, clock: int) -> int:
        """Return the maximum time that the kernel ran after a reading of the clock.

        The kernel's last time stamp can be a tick old.
        """
        last = max(self.counters.taken_ns or 0, self.clocks.monotonic_ns or 0)
        now = self.moment_ns(clock)
        assert last + TICK_NS > now
        return last + TICK_NS - now

    def ticks(self, clock: int) -> int:
        """Return the maximum number of ticks of a CPU since then."""
        return self.elapsed_ns(clock) // TICK_NS + 1

    @cached_property
    def cpus(self) -> list[int]:
        cpus: list[int] = self.counters.cpus.tolist()
        return cpus

    @cached_property
    def rows(self) -> dict[int, dict[str, int | None]]:
        return self.counters.rows()

    def total(self, column: str) -> int:
        return sum(row[column] or 0 for row in self.rows.values())

    def time(self, name: str, cpu: int) -> int:
        time = self.counters.times[name].at(self.cpus.index(cpu))
        assert time is not None
        return time

    def recorded(self, name: str, cpu: int) -> int:
        return self.stat[f"cpu{cpu}"][TIMES.index(name)] * USER_TICK_NS

    @cached_property
    def interrupts(self) -> dict[str, ByCpu]:
        return table(self.truth("proc/interrupts"))

    @cached_property
    def stat(self) -> dict[str, list[int]]:
        lines = (line.split() for line in self.truth("proc/stat").splitlines())
        return {name: [int(number) for number in rest] for name, *rest in lines}


def table(text: str) -> dict[str, ByCpu]:
    """Parse a table of /proc with a column per CPU; rows of totals have no columns."""
    head, *lines = text.splitlines()
    cpus = [int(word.removeprefix("CPU")) for word in head.split()]
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        numbers = [int(word) for word in rest.split()[: len(cpus)] if word.isdigit()]
        if len(numbers) == len(cpus):
            found[name.strip()] = dict(zip(cpus, numbers, strict=True))
        else:
            found[name.strip()] = {-1: numbers[0]}
    return found


def look_at(prog: Program) -> tuple[CpuCounters, Clocks, LossLog, int]:
    reader, losses = Reader(prog), LossLog()
    percpu, clocks = (
        read_percpu(Reader(prog), losses),
        read_clocks(Reader(prog), losses),
    )
    counters = read_counters(reader, percpu, clocks, losses)
    return counters, clocks, losses, reader.reads


@lru_cache(maxsize=4)
def seen(name: str, types: str) -> Seen:
    return Seen(lab.build(name), *look_at(open_dump(name, types)))


@lru_cache(maxsize=2)
def with_debug_info(name: str) -> Program:
    return open_dump(name, "dwarf")


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(f"cpus-{request.param}", "btf")


def test_nothing_is_lost(dump: Seen) -> None:
    prog = with_debug_info(dump.run.name)
    assert {code for code, _ in dump.losses.notes} <= excused(prog)
    assert not dump.losses.coverage
    assert dump.cpus == list(for_each_possible_cpu(prog))
    for row in dump.rows.values():
        assert None not in row.values()


def test_online(dump: Seen) -> None:
    assert dump.counters.cpus[dump.counters.online].tolist() == [*dump.online]
    assert set(range(8)) - set(dump.online) == {dump.roles["gone"]}


def test_vectors(dump: Seen) -> None:
    softirqs = [row.name for row in dump.counters.softirq_rows()]
    assert softirqs == [*table(dump.truth("proc/softirqs"))]
    rows = {row.name: row for row in dump.counters.vector_rows()}
    vectors = {name: by for name, by in dump.interrupts.items() if not name.isdigit()}
    assert len(vectors) >= 15
    for name, numbers in vectors.items():
        row = rows.pop(name)
        if -1 in numbers:
            assert (row.counts, row.total) == ({}, numbers[-1]), name
            continue
        for cpu, number in numbers.items():
            more = row.counts.get(cpu, 0) - number
            assert 0 <= more <= most(dump, name, 4), (name, cpu)
        assert row.total == sum(row.counts.values())
    # The kernel shows these only on hardware that can have them.
    assert rows.keys() <= {"PLT", "HYP", "HRE", "HVS"}
    assert not any(row.total for row in rows.values())


def most(dump: Seen, name: str, clock: int) -> int:
    """Return the maximum number of events on a CPU since a reading; usually 0."""
    if name in TIMED:
        return 2 * dump.ticks(clock)
    if name in ASKED:
        return len(dump.online) * dump.ticks(clock)
    return 0


def test_interrupts(dump: Seen) -> None:
    """Totals are those in /proc/stat."""
    # A TLB flush is not an interrupt in addition to its function call.
    none = {"TLB", "DFR", "ERR", "MIS", "PIN", "NPI", "PIW", "PMN"}
    vectors = [row for row in dump.counters.vector_rows() if row.name not in none]
    for row, cpu in enumerate(dump.cpus):
        own = sum(vector.counts.get(cpu, 0) for vector in vectors)
        devices = dump.counters.counts["irqs"].at(row)
        assert dump.rows[cpu]["intr"] == devices + own
    own = sum(most(dump, name, 6) for name in ("LOC", "CAL", "RES", "IWI"))
    errors = dump.counters.vectors.totals["ERR"]
    more = dump.total("intr") + errors - dump.stat["intr"][0]
    assert 0 <= more <= len(dump.online) * own + CONSOLE_MOST


def test_times(dump: Seen) -> None:
    """Times agree to a tick; those of idle CPUs are exact without ticks."""
    elapsed = dump.elapsed_ns(6)
    for cpu, name in product(dump.online, TIMES):
        # A tick is accounted for all the time since the previous one.
        more = dump.time(name, cpu) - dump.recorded(name, cpu)
        assert 0 <= more < elapsed + USER_TICK_NS + TICK_NS, (cpu, name)
        if name in ("STEAL", "GUEST", "GUEST_NICE", "IRQ"):
            assert more == 0


def counted(dump: Seen, cpu: int, name: str) -> int:
    """Return a time in the kernel's own structure."""
    prog = with_debug_info(dump.run.name)
    number = prog.constant(f"CPUTIME_{name}").value_()
    ns: int = per_cpu(prog["kernel_cpustat"], cpu).cpustat[number].value_()
    return ns


def test_cpu_that_sleeps(dump: Seen) -> None:
    """It has had no tick for a long time and is idle until the end."""
    cpu = dump.roles["quiet"]
    more = dump.time("IDLE", cpu) - dump.recorded("IDLE", cpu)
    assert 0 <= more < dump.elapsed_ns(6) + USER_TICK_NS
    assert dump.time("IDLE", cpu) != counted(dump, cpu, "IDLE")


def test_cpu_that_runs_without_ticks(dump: Seen) -> None:
    """The hog on a nohz_full CPU has not entered the kernel since.

    If it was stopped in an interrupt, the kernel has just counted all of its time.
    """
    cpu = dump.roles["isolated"]
    assert counted(dump, cpu, "USER") <= dump.time("USER", cpu)
    names = ("USER", "SYSTEM")
    more = sum(dump.time(name, cpu) - dump.recorded(name, cpu) for name in names)
    # It runs all the time, by the run queue's clock. The file was read between two
    # readings of the clock, and rounds both times down to ticks.
    now = dump.clocks.monotonic_ns
    assert now is not None
    assert now - dump.moment_ns(7) <= more
    assert more < now - dump.moment_ns(6) + 2 * USER_TICK_NS


VECTORS = {
    "LOC": "apic_timer_irqs",
    "RES": "irq_resched_count",
    "CAL": "irq_call_count",
    "TLB": "irq_tlb_count",
    "NMI": "__nmi_count",
}


@pytest.mark.parametrize(
    "name",
    ["memory-5.10", "memory-6.1", "tasks-6.12", "locks-6.1", "cpus-6.1", "cpus-6.12"],
)
def test_members_are_as_in_drgn(name: str) -> None:
    """Counters are compared member by member, with debug info."""
    prog, look = with_debug_info(name), seen(name, "btf")
    assert {code for code, _ in look.losses.notes} <= excused(prog)
    assert look.total("tlb") > 0
    vectors = {row.name: row.counts for row in look.counters.vector_rows()}
    softirqs = look.counters.softirq_rows()
    assert all(row.total == sum(row.counts.values()) for row in softirqs)
    assert all(row.text for row in softirqs)
    for index, cpu in enumerate(look.cpus):
        row, stat = look.rows[cpu], per_cpu(prog["irq_stat"], cpu)
        for vector, member in VECTORS.items():
            count = stat.member_(member).value_()
            assert vectors[vector].get(cpu, 0) == count
            # Each event is counted once: a flush is a function call.
            if column := {"CAL": "xcal", "TLB": "tlb"}.get(vector):
                assert row[column] == count
        queue = per_cpu(prog["runqueues"], cpu)
        assert row["csw"] == queue.nr_switches.value_()
        assert row["runq"] == queue.nr_running.value_()
        events = per_cpu(prog["vm_event_states"], cpu).event
        faults, major = (
            events[prog[name].value_()].value_() for name in ("PGFAULT", "PGMAJFAULT")
        )
        # A CPU that goes offline passes its faults to another.
        less = (faults - major + (1 << 63)) % (1 << 64) - (1 << 63)
        assert (row["minf"], row["mjf"]) == (max(less, 0), major)
        kstat = per_cpu(prog["kstat"], cpu)
        assert look.counters.counts["irqs"].at(index) == kstat.irqs_sum.value_()
        numbers = kstat.softirqs.value_()
        assert row["soft"] == sum(numbers)
        assert [softirq.counts.get(cpu, 0) for softirq in softirqs] == numbers


def test_cost(dump: Seen) -> None:
    """Reads per CPU do not depend on the number of counters."""
    assert dump.reads < 20 + 10 * len(dump.cpus)


# --- losses


def test_unreadable_task_of_a_cpu_without_ticks(program: Program) -> None:
    """Only the task has its run time since; the CPU's other counters are known."""
    whole = seen("cpus-6.12", "btf")
    cpu = whole.run.workload["cpus"]["isolated"]
    task = per_cpu(program["runqueues"], cpu).curr
    lose(program, task.vtime.address_of_().value_(), sizeof(task.vtime))
    counters, _, losses, _ = look_at(program)
    rows = counters.rows()
    row = rows.pop(cpu)
    assert {name for name, number in row.items() if number is None} == {
        *("usr_ns", "nice_ns", "sys_ns", "gst_ns")
    }
    assert rows == {other: whole.rows[other] for other in rows}
    assert losses.lost["task_struct_unreadable"] == 1


def test_time_not_yet_accounted_to_the_cpu(program: Program) -> None:
    """A task's time is accounted in units of a tick; the rest is in the task."""
    whole = seen("cpus-6.12", "btf")
    cpu = whole.run.workload["cpus"]["isolated"]
    row = whole.cpus.index(cpu)
    vtime = per_cpu(program["runqueues"], cpu).curr.vtime
    # Make it run in user mode, in case it was interrupted.
    put(
        program,
        vtime.state.address_,
        program["VTIME_USER"].value_().to_bytes(4, "little"),
    )
    found = []
    for kept in (0, 3 * TICK_NS):
        put_word(vtime.utime, kept)
        found.append(look_at(program)[0].times["USER"].at(row))
    assert found[1] - found[0] == 3 * TICK_NS


def test_impossible_counts(program: Program) -> None:
    queue = per_cpu(program["runqueues"], 3)
    put(program, queue.nr_switches.address_, b"\xff" * 8)
    counters, _, losses, _ = look_at(program)
    assert counters.rows()[3]["csw"] is None
    assert counters.rows()[2]["csw"] == seen("cpus-6.12", "btf").rows[2]["csw"]
    assert losses.coverage["counts_broken"] == 1


def test_unreadable_names_of_softirqs(program: Program) -> None:
    """Built-in names are used, as many as the kernel has counters."""
    lose(program, program.symbol("softirq_to_name").address, 8)
    counters, _, losses, _ = look_at(program)
    rows = seen("cpus-6.12", "btf").counters.softirq_rows()
    assert counters.softirq_rows() == rows
    assert [code for code, _ in losses.notes] == ["softirq-names"]


def test_unreadable_clock(program: Program) -> None:
    """The time is that of the last tick's stamp."""
    whole = seen("cpus-6.12", "btf").counters
    lose(program, program["tk_core"].address_, 64)
    counters, _, losses, _ = look_at(program)
    # By each of the two readers.
    assert losses.lost["clocks_unreadable"] == 2
    assert counters.taken_ns is not None
    assert whole.taken_ns is not None
    late = whole.taken_ns - counters.taken_ns
    assert late >= 0
    less = whole.times["IDLE"].values - counters.times["IDLE"].values
    assert np.isin(less, (0, late)).all()


def test_clock_that_is_being_set(program: Program) -> None:
    sequence = program["tk_core"].seq.seqcount.sequence
    number = sequence.value_() | 1
    put(program, sequence.address_, number.to_bytes(4, "little"))
    losses = look_at(program)[2]
    assert [code for code, _ in losses.notes] == ["clocks-changing"]


def test_ticks_that_continue_when_idle(program: Program) -> None:
    """With nohz=off the ticks count idle time."""
    put(program, program.symbol("tick_nohz_active").address, bytes(4))
    counters = look_at(program)[0]
    for row, cpu in enumerate(counters.cpus.tolist()):
        counted = per_cpu(program["kernel_cpustat"], cpu).cpustat
        assert counters.times["IDLE"].at(row) == counted[5].value_()
        assert counters.times["IOWAIT"].at(row) == counted[6].value_()
