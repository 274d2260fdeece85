# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counters of CPUs, against what the guest's kernel said of them last.

The kernel goes on from then until the guest is stopped. What a counter can do meanwhile
is its bound here; what stood still has to be exact.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
import pytest
from drgn import Program, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu

from fixtures import lab
from msatools.cpus.counters import Counters, read_counters
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from tests.cpus.damaged import borrowed, lose, put
from tests.support.dumps import open_dump

KERNELS = ("6.1", "6.12")
TICK_NS = 4_000_000
"""HZ is 250."""

USER_TICK_NS = 10_000_000
"""/proc/stat has whole ones of these (USER_HZ)."""

CONSOLE_MOST = len("\r\nLAB-TRUTH 2\r\n") + 1
"""What the serial line may interrupt for the guest's last words, once a character and
once when there is no more; all other devices are at rest."""

GIVEN_BACK = 20
"""Interrupts of nvme's before it had one for each queue: it gives its first one back,
which takes its count with it. Those of the CPU stay."""

TIMES = (
    *("USER", "NICE", "SYSTEM", "IDLE", "IOWAIT", "IRQ", "SOFTIRQ", "STEAL"),
    *("GUEST", "GUEST_NICE"),
)
"""In the order of /proc/stat."""

# Of these a CPU takes as many as it has timers: its tick, and another in between, such
# as that of a deadline.
TIMED = {"LOC", "TIMER", "RCU", "HRTIMER"}

# These others ask for: a CPU that is idle is asked at each tick of another to balance
# for it. One that has no tick is asked by itself (IWI).
ASKED = {"CAL", "RES", "SCHED", "IWI"}

ByCpu = dict[int, int]


@dataclass
class Seen:
    """The counters of a dump, and the truth."""

    run: lab.Run
    counters: Counters
    clocks: Clocks
    findings: Findings
    reads: int

    def truth(self, name: str) -> str:
        return self.run.truth(name).decode()

    def moment_ns(self, clock: int) -> int:
        """When it was by a clock of the truth."""
        (now,) = re.findall(r"^now at (\d+)", self.truth(f"clock/{clock}"), re.M)
        return int(now)

    def elapsed_ns(self, clock: int) -> int:
        """How long the kernel went on after a moment of the truth, at most.

        What it noted last may be a tick old.
        """
        last = max(self.counters.taken_ns or 0, self.clocks.monotonic_ns or 0)
        now = self.moment_ns(clock)
        assert last + TICK_NS > now
        return last + TICK_NS - now

    def ticks(self, clock: int) -> int:
        """How many ticks a CPU had since then, at most."""
        return self.elapsed_ns(clock) // TICK_NS + 1

    @cached_property
    def cpus(self) -> list[int]:
        cpus: list[int] = self.counters.cpus.tolist()
        return cpus

    @cached_property
    def online(self) -> list[int]:
        return self.counters.cpus[self.counters.online].tolist()

    @cached_property
    def rows(self) -> dict[int, dict[str, int | None]]:
        return self.counters.rows()

    def total(self, column: str) -> int:
        return sum(row[column] or 0 for row in self.rows.values())

    def time(self, name: str, cpu: int) -> int:
        time = self.counters.times[name].at(self.cpus.index(cpu))
        assert time is not None
        return time

    @cached_property
    def interrupts(self) -> dict[str, ByCpu]:
        return table(self.truth("proc/interrupts"))

    @cached_property
    def stat(self) -> dict[str, list[int]]:
        lines = (line.split() for line in self.truth("proc/stat").splitlines())
        return {name: [int(number) for number in rest] for name, *rest in lines}


def table(text: str) -> dict[str, ByCpu]:
    """Read a table of /proc with a column a CPU; totals have none."""
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


def look_at(prog: Program) -> tuple[Counters, Clocks, Findings, int]:
    reader, findings = Reader(prog), Findings()
    percpu, clocks = read_percpu(prog, findings), read_clocks(Reader(prog), findings)
    counters = read_counters(reader, percpu, clocks, findings)
    return counters, clocks, findings, reader.reads


@lru_cache(maxsize=4)
def seen(name: str, types: str) -> Seen:
    return Seen(lab.build(name), *look_at(open_dump(name, types)))


@lru_cache(maxsize=2)
def with_debug_info(name: str) -> Program:
    return open_dump(name, "dwarf")


@pytest.fixture(params=KERNELS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(f"cpus-{request.param}", "btf")


@pytest.fixture
def program() -> Iterator[Program]:
    """A dump to be damaged."""
    with borrowed("cpus-6.12") as prog:
        yield prog


def test_nothing_is_lost(dump: Seen) -> None:
    assert not dump.findings.notes
    assert not dump.findings.coverage
    assert dump.cpus == list(for_each_possible_cpu(with_debug_info(dump.run.name)))
    for row in dump.rows.values():
        assert None not in row.values()


def test_online(dump: Seen) -> None:
    assert dump.online == sorted(next(iter(dump.interrupts.values())))
    assert set(range(8)) - set(dump.online) == {dump.run.workload["cpus"]["gone"]}


def test_vectors(dump: Seen) -> None:
    rows = {row.name: row for row in dump.counters.vector_rows()}
    told = {name: by for name, by in dump.interrupts.items() if not name.isdigit()}
    assert len(told) >= 15
    for name, numbers in told.items():
        row = rows.pop(name)
        if -1 in numbers:
            assert (row.counts, row.total) == ({}, numbers[-1]), name
            continue
        for cpu, number in numbers.items():
            more = row.counts.get(cpu, 0) - number
            assert 0 <= more <= most(dump, name, 4), (name, cpu)
        assert row.total == sum(row.counts.values())
    # Those that the kernel shows only where it could have them.
    assert rows.keys() <= {"PLT", "HYP", "HRE", "HVS"}
    assert not any(row.total for row in rows.values())


def most(dump: Seen, name: str, clock: int) -> int:
    """How many of a kind one CPU can have taken since a moment; most have rested."""
    if name in TIMED:
        return 2 * dump.ticks(clock)
    if name in ASKED:
        return len(dump.online) * dump.ticks(clock)
    return 0


def test_softirqs(dump: Seen) -> None:
    told = table(dump.truth("proc/softirqs"))
    rows = dump.counters.softirq_rows()
    assert [row.name for row in rows] == list(told)
    for row in rows:
        assert row.total == sum(row.counts.values())
        assert row.text
        for cpu, number in told[row.name].items():
            more = row.counts.get(cpu, 0) - number
            allowed = most(dump, row.name, 5) if cpu in dump.online else 0
            assert 0 <= more <= allowed, (row.name, cpu)
    more = dump.total("soft") - dump.stat["softirq"][0]
    sums = (most(dump, row.name, 6) for row in rows)
    assert 0 <= more <= len(dump.online) * sum(sums)


def test_function_calls_and_flushes(dump: Seen) -> None:
    """Each event is in one of them: a flush is a call, and no interrupt besides."""
    rows = {row.name: row for row in dump.counters.vector_rows()}
    for cpu in dump.cpus:
        assert dump.rows[cpu]["xcal"] == rows["CAL"].counts.get(cpu, 0)
        assert dump.rows[cpu]["tlb"] == rows["TLB"].counts.get(cpu, 0)
    assert dump.total("tlb") > 0


def test_interrupts(dump: Seen) -> None:
    """Devices' by CPU, and all in total, as /proc/stat has them."""
    devices = [by for name, by in dump.interrupts.items() if name.isdigit()]
    irqs = dump.counters.counts["irqs"]
    grown = {}
    for row, cpu in enumerate(dump.cpus):
        if cpu in dump.online:
            number = sum(by[cpu] for by in devices)
            grown[cpu] = irqs.values[row] - number
    console = int(dump.truth("proc/irq/4/effective_affinity_list"))
    assert 0 <= grown.pop(console) <= CONSOLE_MOST + GIVEN_BACK
    assert all(number >= 0 for number in grown.values())
    assert sum(grown.values()) <= GIVEN_BACK
    # A flush of the TLB is no interrupt besides the call that brought it.
    none = {"TLB", "DFR", "ERR", "MIS", "PIN", "NPI", "PIW", "PMN"}
    vectors = [row for row in dump.counters.vector_rows() if row.name not in none]
    for row, cpu in enumerate(dump.cpus):
        own = sum(vector.counts.get(cpu, 0) for vector in vectors)
        assert dump.rows[cpu]["intr"] == irqs.values[row] + own
    own = sum(most(dump, name, 6) for name in ("LOC", "CAL", "RES", "IWI"))
    errors = dump.counters.vectors.totals["ERR"]
    more = dump.total("intr") + errors - dump.stat["intr"][0]
    assert 0 <= more <= len(dump.online) * own + CONSOLE_MOST


def test_times(dump: Seen) -> None:
    """To the tick; idle CPUs have none, and are exact nevertheless."""
    elapsed = dump.elapsed_ns(6)
    for cpu, name in product(dump.online, TIMES):
        told = dump.stat[f"cpu{cpu}"][TIMES.index(name)] * USER_TICK_NS
        # A tick counts for all that ran since the one before.
        more = dump.time(name, cpu) - told
        assert 0 <= more < elapsed + USER_TICK_NS + TICK_NS, (cpu, name)
        if name in ("STEAL", "GUEST", "GUEST_NICE", "IRQ"):
            assert more == 0


def test_times_of_all(dump: Seen) -> None:
    """With the CPU that is offline, of which there is no line."""
    for name, told in zip(TIMES, dump.stat["cpu"], strict=True):
        ours = sum(dump.time(name, cpu) for cpu in dump.cpus)
        more = ours - told * USER_TICK_NS
        each = dump.elapsed_ns(6) + TICK_NS
        assert 0 <= more < len(dump.online) * each + USER_TICK_NS, name


def test_cpu_that_sleeps(dump: Seen) -> None:
    """It has had no tick for long, and is idle until the end."""
    cpu = dump.run.workload["cpus"]["quiet"]
    counted = (
        per_cpu(with_debug_info(dump.run.name)["kernel_cpustat"], cpu)
        .cpustat[5]
        .value_()
    )
    told = dump.stat[f"cpu{cpu}"][TIMES.index("IDLE")] * USER_TICK_NS
    assert 0 <= dump.time("IDLE", cpu) - told < dump.elapsed_ns(6) + USER_TICK_NS
    assert dump.time("IDLE", cpu) != counted


def test_cpu_that_runs_without_ticks(dump: Seen) -> None:
    """One of nohz_full, whose hog has not entered the kernel since."""
    cpu = dump.run.workload["cpus"]["isolated"]
    counted = (
        per_cpu(with_debug_info(dump.run.name)["kernel_cpustat"], cpu)
        .cpustat[0]
        .value_()
    )
    told = dump.stat[f"cpu{cpu}"][TIMES.index("USER")] * USER_TICK_NS
    assert counted < dump.time("USER", cpu)
    told += dump.stat[f"cpu{cpu}"][TIMES.index("SYSTEM")] * USER_TICK_NS
    more = dump.time("USER", cpu) + dump.time("SYSTEM", cpu) - told
    # It runs all the time, by the clock of run queues. The file was read between two
    # moments, and leaves out a part of a tick of each of the two times.
    now = dump.clocks.monotonic_ns
    assert now is not None
    assert now - dump.moment_ns(7) <= more
    assert more < now - dump.moment_ns(6) + 2 * USER_TICK_NS


def test_columns_of_time(dump: Seen) -> None:
    for cpu in dump.online:
        row = dump.rows[cpu]
        user, nice, guest, nice_guest = (
            dump.time(name, cpu) for name in ("USER", "NICE", "GUEST", "GUEST_NICE")
        )
        assert row["usr_ns"] == user + nice - guest - nice_guest
        assert row["nice_ns"] == nice - nice_guest
        assert row["irq_ns"] == dump.time("IRQ", cpu) + dump.time("SOFTIRQ", cpu)
        assert row["softirq_ns"] == dump.time("SOFTIRQ", cpu)
        assert row["sys_ns"] == dump.time("SYSTEM", cpu)
        assert (row["idl_ns"], row["wt_ns"], row["st_ns"], row["gst_ns"]) == (
            dump.time("IDLE", cpu),
            dump.time("IOWAIT", cpu),
            0,
            0,
        )


def test_faults(dump: Seen) -> None:
    """Hardly any since: the truth is read into locked memory, and the hogs spin.

    NUMA balancing may have taken a page from each, to see whether it comes back for it.
    """
    lines = (line.split() for line in dump.truth("proc/vmstat").splitlines())
    told = {name: int(number) for name, number in lines}
    faults, major = (dump.counters.counts[name] for name in ("faults", "mjf"))
    more = faults.values.sum() - told["pgfault"]
    assert 0 <= more <= len(dump.run.workload["tasks"])
    assert major.values.sum() == dump.total("mjf") == told["pgmajfault"]
    for row, cpu in enumerate(dump.cpus):
        less = int(faults.values[row] - major.values[row])
        assert dump.rows[cpu]["minf"] == max(less, 0)
    # A CPU that goes offline hands its faults to another.
    gone = dump.run.workload["cpus"]["gone"]
    assert dump.rows[gone]["minf"] == dump.rows[gone]["mjf"] == 0


def test_switches_and_run_queues(dump: Seen) -> None:
    pattern = r"^cpu#(\d+),.*\n  \.nr_running +: (\d+)\n  \.nr_switches +: (\d+)$"
    told = re.findall(pattern, dump.truth("sys/kernel/debug/sched/debug"), re.M)
    cpus = dump.run.workload["cpus"]
    assert [int(cpu) for cpu, _, _ in told] == dump.online
    hogs = Counter(
        task["cpus"][0]
        for task in dump.run.workload["tasks"].values()
        if task["does"] != "rest" and not task["cgroup"].startswith("/limited")
    )
    for cpu, running, switches in told:
        row = dump.rows[int(cpu)]
        assert row["runq"] is not None
        assert row["csw"] is not None
        # To another and back at each tick, at most.
        assert 0 <= row["csw"] - int(switches) <= 2 * dump.ticks(0)
        # Workers of the kernel come and go; hogs stay, but the group that has a
        # thousandth of each second, and deadline tasks that have used up theirs.
        if int(cpu) != cpus["partition"]:
            assert min(row["runq"], int(running)) >= hogs[int(cpu)]
    more = dump.total("csw") - dump.stat["ctxt"][0]
    assert 0 <= more <= 2 * dump.ticks(6) * len(dump.online)
    assert hogs[cpus["fair"]] == 8


def test_cpus_that_never_were(dump: Seen) -> None:
    """Possible ones, beyond those that there are."""
    for cpu in dump.cpus[8:]:
        assert not any(dump.rows[cpu].values())


NAMES = ("memory-5.10", "memory-6.1", "tasks-6.12", "locks-6.1")


@pytest.mark.parametrize("name", [*NAMES, "cpus-6.1", "cpus-6.12"])
def test_against_drgn(name: str) -> None:
    """Member by member, with debug info."""
    prog, look = with_debug_info(name), seen(name, "btf")
    assert not look.findings.notes
    vectors = {
        "LOC": "apic_timer_irqs",
        "RES": "irq_resched_count",
        "CAL": "irq_call_count",
        "TLB": "irq_tlb_count",
        "NMI": "__nmi_count",
    }
    for cpu in look.cpus:
        own = {row.name: row.counts.get(cpu, 0) for row in look.counters.vector_rows()}
        stat = per_cpu(prog["irq_stat"], cpu)
        for vector, member in vectors.items():
            assert own[vector] == stat.member_(member).value_()
        queue = per_cpu(prog["runqueues"], cpu)
        assert look.rows[cpu]["csw"] == queue.nr_switches.value_()
        assert look.rows[cpu]["runq"] == queue.nr_running.value_()
        events = per_cpu(prog["vm_event_states"], cpu).event
        major = events[prog["PGMAJFAULT"].value_()].value_()
        assert look.rows[cpu]["mjf"] == major
        kstat = per_cpu(prog["kstat"], cpu)
        assert look.rows[cpu]["soft"] == sum(kstat.softirqs.value_())


def test_cost(dump: Seen) -> None:
    """Some reads a CPU, however many things they count."""
    assert dump.reads < 20 + 10 * len(dump.cpus)


# --- what is lost


def test_variables_of_a_cpu_that_are_lost(program: Program) -> None:
    whole = seen("cpus-6.12", "btf")
    for name in ("runqueues", "kstat", "irq_stat", "kernel_cpustat", "vm_event_states"):
        variable = per_cpu(program[name], 1)
        lose(program, variable.address_, sizeof(variable))
    counters, _, findings, _ = look_at(program)
    rows = counters.rows()
    # What it was idle before it went on is its tick's to know.
    known = {name for name, number in rows.pop(1).items() if number is not None}
    assert known == {"idl_ns", "wt_ns"}
    # One without ticks goes by the latest clock of all, which may have been lost.
    exact = whole.run.workload["cpus"]["isolated"]
    for cpu in set(whole.cpus) - {1, exact}:
        assert rows[cpu] == whole.rows[cpu]
    lost = {"rq", "kernel_stat", "irq_cpustat_t", "kernel_cpustat", "vm_event_state"}
    assert lost <= findings.lost.keys()


def test_tick_that_is_lost(program: Program) -> None:
    """What it alone has is not known, all else is."""
    lose(program, per_cpu(program["tick_cpu_sched"], 2).address_, 8)
    counters, _, findings, _ = look_at(program)
    row = counters.rows()[2]
    assert row.pop("idl_ns") is row.pop("wt_ns") is None
    assert None not in row.values()
    assert findings.lost["tick_sched"] == 1


def test_task_of_a_cpu_without_ticks_that_is_lost(program: Program) -> None:
    """It alone knows what it has run; what the CPU took meanwhile is known."""
    whole = seen("cpus-6.12", "btf")
    cpu = whole.run.workload["cpus"]["isolated"]
    task = per_cpu(program["runqueues"], cpu).curr
    lose(program, task.vtime.address_of_().value_(), sizeof(task.vtime))
    counters, _, findings, _ = look_at(program)
    rows = counters.rows()
    row = rows.pop(cpu)
    assert {name for name, number in row.items() if number is None} == {
        *("usr_ns", "nice_ns", "sys_ns", "gst_ns")
    }
    assert rows == {other: whole.rows[other] for other in rows}
    assert findings.lost["task_struct"] == 1


def test_counts_that_cannot_be(program: Program) -> None:
    queue = per_cpu(program["runqueues"], 3)
    put(program, queue.nr_switches.address_, b"\xff" * 8)
    counters, _, findings, _ = look_at(program)
    assert counters.rows()[3]["csw"] is None
    assert counters.rows()[2]["csw"] == seen("cpus-6.12", "btf").rows[2]["csw"]
    assert findings.coverage["counts_broken"] == 1


def test_names_of_softirqs_that_are_lost(program: Program) -> None:
    """They are known, and there are as many as the kernel counts."""
    lose(program, program.symbol("softirq_to_name").address, 8)
    counters, _, findings, _ = look_at(program)
    rows = seen("cpus-6.12", "btf").counters.softirq_rows()
    assert counters.softirq_rows() == rows
    assert [code for code, _ in findings.notes] == ["softirq-names"]


def test_clock_that_is_lost(program: Program) -> None:
    """The stamps of ticks tell the time, but for what came after the last."""
    whole = seen("cpus-6.12", "btf").counters
    lose(program, program["tk_core"].address_, 64)
    counters, _, findings, _ = look_at(program)
    assert findings.lost["clocks"] == 1
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
    findings = look_at(program)[2]
    assert [code for code, _ in findings.notes] == ["clocks-changing"]


def test_ticks_that_go_on(program: Program) -> None:
    """With nohz=off the ticks count idle time."""
    put(program, program.symbol("tick_nohz_active").address, bytes(4))
    counters = look_at(program)[0]
    for row, cpu in enumerate(counters.cpus.tolist()):
        counted = per_cpu(program["kernel_cpustat"], cpu).cpustat
        assert counters.times["IDLE"].at(row) == counted[5].value_()
        assert counters.times["IOWAIT"].at(row) == counted[6].value_()
