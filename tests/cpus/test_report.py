# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of msa-cpus on real dumps.

Other modules compare the parts of a report with the guests' records. Here, reports are
put together, and have their findings.
"""

import re
from collections import Counter
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from fixtures import lab
from msatools.cpus.cpus import Cpus, CpusOptions, NoSuchSetError, collect_cpus
from msatools.cpus.diagnostics import LONG_WAIT_NS
from msatools.cpus.model import Cpu, CpuSet, CpusReport, Diagnostic, RunQueue
from msatools.kernel.percpu import NoSuchCpuError
from msatools.program import describe
from msatools.reports.forms import dumps as as_json
from msatools.reports.units import duration
from tests.cpus.guests import (
    CPU,
    GROUPS,
    KERNELS,
    SECOND,
    TICK_NS,
    Guest,
    excused,
    numbers,
)
from tests.support.dumps import TYPES, open_dump

ALL = tuple(
    f"{scenario}-{kernel}" for scenario, kernel in product(("cpus", "cpulock"), KERNELS)
)
EVERYTHING = {"irqs": True, "tasks": True, "doing": True, "stalls": True}

KEPT = (1884 / 2048, 2014 / 2048, 2037 / 2048)
"""Decay of the 1, 5 and 15 minute load averages over 5 s."""

COUNTED = (
    *("minf", "mjf", "xcal", "tlb", "intr", "soft", "csw"),
    *("usr_ns", "nice_ns", "sys_ns", "irq_ns", "softirq_ns", "wt_ns", "st_ns"),
    *("gst_ns", "idl_ns"),
)
"""Columns with counters."""


class ReportedGuest(Guest):
    """A guest's record and the report of its dump."""

    def __init__(self, run: lab.Run, report: CpusReport) -> None:
        super().__init__(run)
        self.report = report

    @property
    def rows(self) -> dict[int, Cpu]:
        return {row.cpu: row for row in self.report.cpus}

    @property
    def queues(self) -> dict[int, RunQueue]:
        return {queue.cpu: queue for queue in self.report.run_queues}

    @property
    def sets(self) -> dict[str, CpuSet]:
        return {cpuset.name: cpuset for cpuset in self.report.sets}

    def findings(self, code: str) -> list[Diagnostic]:
        return [row for row in self.report.findings if row.code == code]


@lru_cache(maxsize=16)
def reported(name: str, types: str = "btf", **options: Any) -> ReportedGuest:
    prog = open_dump(name, types)
    return ReportedGuest(
        lab.build(name), collect_cpus(prog, options=CpusOptions(**options))
    )


@pytest.fixture(params=ALL)
def dump(request: pytest.FixtureRequest) -> ReportedGuest:
    return reported(request.param, **EVERYTHING)


@pytest.fixture(params=KERNELS)
def sets(request: pytest.FixtureRequest) -> ReportedGuest:
    """Dumps with CPUs in sets of all kinds."""
    return reported(f"cpus-{request.param}", **EVERYTHING)


@pytest.fixture(params=KERNELS)
def locked(request: pytest.FixtureRequest) -> ReportedGuest:
    """Dumps with CPUs that have interrupts, preemption or softirqs off."""
    return reported(f"cpulock-{request.param}", **EVERYTHING)


def test_nothing_is_lost(dump: ReportedGuest) -> None:
    coverage = dict(dump.report.coverage)
    excuse = excused(open_dump(dump.run.name, "btf"))
    assert {note.code for note in dump.report.notes} <= excuse
    if "run-queue-differs" in excuse:
        coverage.pop("run_queues_differ", 0)
    assert coverage.pop("cpus") == len(dump.numbers(f"{CPU}/possible"))
    assert coverage.pop("irqs") >= len(dump.report.irqs or ()) > 0
    assert coverage.pop("tasks") > 100
    assert 0 < coverage.pop("reads") < coverage.pop("bytes_read")
    # Those of tasks in uninterruptible sleep: who waits for RCU.
    coverage.pop("stacks", 0)
    # The key is always present.
    assert coverage == {"cpus_unreadable": 0}


def test_head(dump: ReportedGuest) -> None:
    report = dump.report
    assert report.taken_at_ns is not None
    # The kernel's last time stamp can be a tick old.
    assert report.taken_at_ns > dump.moment_ns(8) - TICK_NS
    assert report.interval_ns is None
    names = " ".join(dump.run.truth_names())
    nodes = re.findall(r"sys/devices/system/node/node(\d+)/", names)
    assert {*report.nodes} == {*map(int, nodes)}
    assert report.load is not None
    assert len(report.load) == 3
    recorded = [float(word) for word in dump.truth("proc/loadavg").split()[:3]]
    # Every 5 s since they were read, they decay towards the number of runnable tasks
    # (FIXED_1 - EXP_n, kernel/sched/loadavg.h), from none to all tasks.
    steps = 1 + (report.taken_at_ns - dump.moment_ns(2)) // (5 * SECOND)
    tasks = report.coverage["tasks"]
    for ours, theirs, kept in zip(report.load, recorded, KEPT, strict=True):
        rest = kept**steps
        # The file has two decimals.
        assert theirs * rest - 0.01 <= ours <= theirs * rest + tasks * (1 - rest) + 0.01


@pytest.mark.parametrize("kernel", KERNELS)
def test_optional_parts_are_null_by_default(kernel: str) -> None:
    report = reported(f"cpus-{kernel}").report
    full = reported(f"cpus-{kernel}", **EVERYTHING).report
    assert (report.irqs, report.vectors, report.softirqs) == (None, None, None)
    assert {each.tasks for each in report.sets} == {None}
    assert report.coverage["tasks"] == 0
    # The rest is the same.
    assert report.cpus == tuple(replace(r, icsw=None, migr=None) for r in full.cpus)
    assert report.run_queues == tuple(replace(q, doing=None) for q in full.run_queues)


# --- findings


def idles(sets: ReportedGuest) -> bool:
    """Return whether the CPU of the quiet set was idle: it can just have woken up."""
    return "idle" in sets.rows[sets.roles["quiet"]].state


def test_findings(sets: ReportedGuest) -> None:
    codes = Counter(each.code for each in sets.report.findings)
    for code, times in (
        ("not-ticked", 0),
        ("partition-invalid", 2),
        ("isolated-takes-interrupts", 2),
        ("idle-while-waiting", int(idles(sets))),
        ("most-interrupts", 1),
    ):
        assert codes.pop(code, 0) == times, code
    # Whether threads of the default set are on the isolated CPU is chance.
    assert 1 <= codes.pop("straying-tasks") <= 3
    # On the CPUs of real-time and deadline tasks. 6.12 gives fair tasks 50 ms of each
    # second there (the fair server).
    first = [
        queue
        for queue in sets.report.run_queues
        if queue.current and queue.current.sched_class in ("deadline", "realtime")
    ]
    kinds = ("not-switched", "starving-tasks", "cpu-starved")
    assert sum(codes.pop(kind, 0) for kind in kinds) == len(first) > 0
    # Who of the hogs of little weight has had no turn for long depends on the host.
    hogs = {
        task for task, of in sets.run.workload["tasks"].items() if of["is"] == "hog"
    }
    for each in sets.findings("no-turn"):
        assert [name for name in hogs if name in each.text], each.text
    codes.pop("no-turn", 0)
    assert codes.total() == 0


def test_partitions_that_are_not_in_force(sets: ReportedGuest) -> None:
    found = {each.cpus: each.text for each in sets.findings("partition-invalid")}
    for fact in sets.run.workload["sets"]:
        if fact["valid"]:
            continue
        path = fact["path"]
        state = sets.truth(f"{GROUPS}{path}/cpuset.cpus.partition")
        assert "invalid" in state
        reason = state.partition("(")[2].rstrip(")")
        # 6.12 has no reason for a partition without CPUs.
        why = reason or f"no CPU of it is online (cpuset.cpus is {fact['cpus']})"
        text = found.pop(numbers(fact["cpus"]))
        assert text == f"partition {path} is not in force: {why}"
    assert found == {}


def test_isolated_cpu_with_an_interrupt(sets: ReportedGuest) -> None:
    cpu = sets.roles["isolated"]
    irq = sets.run.workload["irqs"]["virtio1-input.0"]
    assert irq["wanted"] == str(cpu)
    (found,) = [
        each
        for each in sets.findings("isolated-takes-interrupts")
        if each.cpus == (cpu,)
    ]
    assert f"{irq['irq']} virtio1-input.0" in found.text


def test_idle_set(sets: ReportedGuest) -> None:
    if not idles(sets):
        pytest.skip("the CPU was stopped as it had something to do, by chance")
    (found,) = sets.findings("idle-while-waiting")
    assert found.cpus == (sets.roles["quiet"],)
    match = re.fullmatch(
        rf"set /quiet idles \(cpu{sets.roles['quiet']}\), and in set default (\d+) "
        r"tasks wait for cpu([\d,-]+), the longest for (?:at most )?"
        r"(?:(\d+)m)?([\d.]+)s",
        found.text,
    )
    assert match
    starving = [sets.made[name] for name in sets.run.workload["starving"]]
    assert int(match[1]) >= len(starving)
    assert sets.roles["realtime"] in numbers(match[2])
    # They have not run since they were woken; kernel threads can wait for longer.
    assert sets.report.taken_at_ns is not None
    longest = max(sets.report.taken_at_ns - task["to_ns"] for task in starving)
    # Of more than 100 s whole ones are shown.
    seconds = 60 * int(match[3] or 0) + float(match[4])
    assert seconds > longest / SECOND - (1 if match[3] else 0.1)


def test_cpus_that_do_not_switch(locked: ReportedGuest) -> None:
    """CPUs with several switching tasks or a single task are not found."""
    off = locked.roles["irqs-off"]
    (dead,) = locked.findings("not-ticked")
    pid = locked.run.workload["spins"]["cm-irqs-off"]["pid"]
    ticked = locked.queues[off].ticked_ns
    assert ticked is not None
    # The guest is stopped six seconds later, and its last tick was before that.
    assert 4 * SECOND <= ticked < 60 * SECOND
    assert (dead.cpus, dead.text) == (
        (off,),
        f"cpu{off} takes no interrupts, and has had no tick for "
        f"{duration(ticked)}: they are off, or a hypervisor does not run it; "
        f"runs pid {pid} cm-irqs-off",
    )
    spin = {(locked.roles[role],) for role in ("irqs-off", "preempt-off")}
    spin.add((locked.roles["softirq-off"],))
    found = {each.cpus for each in locked.findings("not-switched")}
    # Two hogs take turns there, unless the host has had no time for that CPU.
    turns = locked.roles["turns"]
    if (locked.queues[turns].switched_ns or 0) >= LONG_WAIT_NS:
        found.discard((turns,))
    assert found == spin
    # No set is idle or invalid, and no thread strays.
    assert {each.code for each in locked.report.findings} == {
        *("not-ticked", "not-switched", "isolated-takes-interrupts"),
        "most-interrupts",  # as interrupts are asked for
    }


# --- selection


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cpus", [(3,), (1, 5), (4, 6, 7)])
def test_selected_cpus(kernel: str, cpus: tuple[int, ...]) -> None:
    whole = reported(f"cpus-{kernel}", tasks=True)
    report = reported(f"cpus-{kernel}", tasks=True, cpus=frozenset(cpus)).report
    assert report.cpus == tuple(whole.rows[cpu] for cpu in cpus)
    assert report.run_queues == tuple(whole.queues[cpu] for cpu in cpus)
    for part in ("sets", "findings"):
        of_these = [
            each for each in getattr(whole.report, part) if {*cpus} & {*each.cpus}
        ]
        assert getattr(report, part) == tuple(of_these)
    assert {*report.notes} <= {*whole.report.notes}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("/db",), {"partition"}),
        (("/quiet", "isolcpus"), {"quiet", "isolated"}),
        (("nohz_full",), {"isolated"}),
        (("/limit/one",), {"fair"}),
        (("default",), {"home", "fair", "groups", "realtime", "gone"}),
    ],
)
def test_selected_sets(kernel: str, names: tuple[str, ...], roles: set[str]) -> None:
    whole = reported(f"cpus-{kernel}")
    some = reported(f"cpus-{kernel}", sets=names)
    wanted = {whole.roles[role] for role in roles}
    if names == ("default",):
        # CPUs that were never present are in no set.
        possible, present = (
            {*whole.numbers(f"{CPU}/{name}")} for name in ("possible", "present")
        )
        wanted |= possible - present
    assert some.rows == {cpu: whole.rows[cpu] for cpu in sorted(wanted)}
    assert some.queues.keys() == wanted
    assert {*names} <= some.sets.keys()


@pytest.mark.parametrize("kernel", KERNELS)
def test_cpus_and_sets_are_combined(kernel: str) -> None:
    found = reported(
        f"cpus-{kernel}", sets=("/db", "default"), cpus=frozenset({1, 5, 7})
    )
    assert found.rows.keys() == {1, 5}
    none = reported(f"cpus-{kernel}", sets=("/db",), cpus=frozenset({1}))
    assert none.report.cpus == none.report.run_queues == ()


@pytest.mark.parametrize(
    ("options", "subject", "words"),
    [
        ({"cpus": frozenset({0, 77, 12})}, "CPU 12,77", "none of that number"),
        ({"sets": ("/db", "/nowhere")}, "set /nowhere", "none of that name"),
        ({"sets": ("/nowhere",)}, "set /nowhere", "choose from default, /db, /quiet"),
    ],
)
def test_unknown_cpus_and_sets(
    options: dict[str, Any], subject: str, words: str
) -> None:
    with pytest.raises((NoSuchCpuError, NoSuchSetError)) as error:
        reported("cpus-6.12", **options)
    assert str(error.value).startswith(f"{subject}: ")
    assert words in str(error.value)


# --- equal reports


@pytest.mark.parametrize("name", ALL)
def test_dwarf_gives_the_same(name: str) -> None:
    """All numbers are the same."""
    target = reported(name, **EVERYTHING).report.target
    one, other = (
        as_json(replace(reported(name, types, **EVERYTHING).report, target=target))
        for types in TYPES
    )
    assert one == other


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_reports(kernel: str) -> None:
    """A second report does not depend on the first, and its interval is empty."""
    prog = open_dump(f"cpus-{kernel}", "btf")
    session = Cpus(prog, describe(prog), CpusOptions(irqs=True, tasks=True))
    steps: list[tuple[int, int]] = []
    first = session.report(lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps)
    assert {total for _, total in steps} == {4}
    second = session.report(lambda done, total: None)
    # Layouts found by the first report need no reads.
    assert replace(second, coverage={}) == replace(first, coverage={})
    session.begin(lambda done, total: None)
    since = session.advance(lambda done, total: None)
    assert since.interval_ns == 0
    assert {note.code for note in since.notes} <= excused(prog)
    for row, whole in zip(since.cpus, first.cpus, strict=True):
        for column in (*COUNTED, "icsw", "migr"):
            assert getattr(row, column) == 0, (row.cpu, column)
        assert row.runq == whole.runq
        assert row.current == whole.current
        # Managed queues count only if an interrupt occurred.
        assert {*row.state} >= {*whole.state}
    assert since.irqs is not None
    assert {irq.total for irq in since.irqs} == {0}
    assert {irq.share for irq in since.irqs} == {None}
    codes = {each.code for each in since.findings}
    assert not codes & {"most-interrupts", "isolated-takes-interrupts"}
    assert since.run_queues == first.run_queues
    assert since.sets == first.sets
