# SPDX-License-Identifier: LGPL-2.1-or-later

"""All that msa-cpus reports of real dumps, against what the guests' kernels said."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from fixtures import lab
from msatools.cpus.cpus import Cpus, NoSuchCpuError, collect_cpus
from msatools.cpus.model import Cpu, CpuSet, CpusReport, Finding, RunQueue
from msatools.cpus.options import CpusOptions
from msatools.render.json import dumps as as_json
from msatools.target import describe
from msatools.values import ranges
from tests.cpus.setdumps import CPU, GROUPS, numbers
from tests.support.dumps import TYPES, open_dump

KERNELS = ("6.1", "6.12")
ALL = tuple(
    f"{scenario}-{kernel}" for scenario, kernel in product(("cpus", "cpulock"), KERNELS)
)
SECOND = 10**9
TICK_NS = 4_000_000
"""HZ is 250."""

KEPT = (1884 / 2048, 2014 / 2048, 2037 / 2048)
"""What is left after 5 s of the load over 1, 5 and 15 minutes."""

COUNTED = (
    *("minf", "mjf", "xcal", "tlb", "intr", "soft", "csw"),
    *("usr_ns", "nice_ns", "sys_ns", "irq_ns", "softirq_ns", "wt_ns", "st_ns"),
    *("gst_ns", "idl_ns"),
)
"""Columns that grow."""


@dataclass(frozen=True)
class Told:
    run: lab.Run
    report: CpusReport

    @property
    def rows(self) -> dict[int, Cpu]:
        return {row.cpu: row for row in self.report.cpus}

    @property
    def queues(self) -> dict[int, RunQueue]:
        return {queue.cpu: queue for queue in self.report.run_queues}

    @property
    def sets(self) -> dict[str, CpuSet]:
        return {each.name: each for each in self.report.sets}

    @property
    def roles(self) -> dict[str, int]:
        """What the guest had its CPUs for."""
        roles: dict[str, int] = self.run.workload["cpus"]
        return roles

    @property
    def pids(self) -> dict[str, int]:
        """The guest's tasks."""
        return {n: task["pid"] for n, task in self.run.workload["tasks"].items()}

    def findings(self, code: str) -> list[Finding]:
        return [each for each in self.report.findings if each.code == code]

    def where(self, code: str) -> set[int]:
        """Tell on which CPUs something was found."""
        return {cpu for each in self.findings(code) for cpu in each.cpus}

    def truth(self, name: str) -> str:
        return self.run.truth(name).decode().strip()

    def has(self, name: str) -> bool:
        return name in self.run.truth_names()

    def cpus(self, name: str) -> set[int]:
        """Give the CPUs that a file of /sys/devices/system/cpu lists."""
        return {*numbers(self.truth(f"{CPU}/{name}"))}

    @property
    def online(self) -> set[int]:
        return self.cpus("online")

    @property
    def isolated(self) -> set[int]:
        """The CPUs that the command line isolates, or a partition."""
        found = self.cpus("isolated")
        for each in self.run.workload.get("sets", ()):
            if each["partition"] == "isolated" and each["valid"]:
                found |= {*numbers(each["cpus"])}
        return found

    @property
    def irqs(self) -> dict[int, str]:
        """Name the interrupts of devices, as the last column of /proc/interrupts."""
        lines = (line.split() for line in self.truth("proc/interrupts").splitlines())
        found = {}
        for first, *words in lines:
            if first.rstrip(":").isdigit():
                names = re.search(r"-(?:edge|fasteoi)\s+(.*)", " ".join(words))
                found[int(first.rstrip(":"))] = names[1] if names else ""
        return found

    def interrupts(self) -> dict[str, Counter[int]]:
        """Count interrupts by name or number, and by CPU that is online."""
        head, *lines = self.truth("proc/interrupts").splitlines()
        online = [int(word.removeprefix("CPU")) for word in head.split()]
        found = {}
        for line in lines:
            name, _, rest = line.partition(":")
            words = rest.split()[: len(online)]
            counts = [int(word) for word in words if word.isdigit()]
            # Of some there is a total alone.
            if len(counts) == len(online):
                found[name.strip()] = Counter(dict(zip(online, counts, strict=True)))
        return found

    def came(self) -> dict[int, Counter[int]]:
        """Give those of devices, by number."""
        every = self.interrupts()
        return {int(name): every[name] for name in every if name.isdigit()}

    def affinity(self, irq: int, kind: str = "smp") -> set[int]:
        return {*numbers(self.truth(f"proc/irq/{irq}/{kind}_affinity_list"))}

    def is_own(self, irq: int) -> bool:
        """Tell whether it is of a queue that a disk has for one CPU alone."""
        queue = re.fullmatch(r"nvme\d+q[1-9]\d*", self.irqs[irq])
        return bool(queue) and len(self.affinity(irq) & self.online) == 1

    def routed(self, cpu: int) -> set[int]:
        """Tell which interrupts that are not for it alone go to a CPU."""
        return {
            irq
            for irq in self.irqs
            if cpu in self.affinity(irq, "effective") & self.affinity(irq)
            and self.affinity(irq) & self.online
            and not self.is_own(irq)
        }


@lru_cache(maxsize=16)
def told(name: str, types: str = "btf", **options: Any) -> Told:
    prog = open_dump(name, types)
    return Told(lab.build(name), collect_cpus(prog, options=CpusOptions(**options)))


@pytest.fixture(params=ALL)
def dump(request: pytest.FixtureRequest) -> Told:
    return told(request.param, irqs=True, tasks=True, doing=True)


@pytest.fixture(params=KERNELS)
def sets(request: pytest.FixtureRequest) -> Told:
    """CPUs in sets of all kinds."""
    return told(f"cpus-{request.param}", irqs=True, tasks=True, doing=True)


@pytest.fixture(params=KERNELS)
def locked(request: pytest.FixtureRequest) -> Told:
    """CPUs with interrupts, preemption or softirqs off."""
    return told(f"cpulock-{request.param}", irqs=True, tasks=True, doing=True)


def test_nothing_is_lost(dump: Told) -> None:
    coverage = dict(dump.report.coverage)
    assert dump.report.notes == ()
    assert coverage.pop("cpus") == len(dump.cpus("possible"))
    assert coverage.pop("irqs") >= len(dump.irqs)
    assert coverage.pop("tasks") > 100
    assert 0 < coverage.pop("reads") < coverage.pop("bytes_read")
    # There all the time, so that who looks for it finds it.
    assert coverage == {"cpus_unreadable": 0}


def test_head(dump: Told) -> None:
    report = dump.report
    (line,) = re.findall(r"^now at (\d+)", dump.truth("clock/8"), re.M)
    assert report.taken_at_ns is not None
    # What it noted last may be a tick old.
    assert report.taken_at_ns > int(line) - TICK_NS
    assert report.interval_ns is None
    nodes = {
        int(match[1])
        for name in dump.run.truth_names()
        if (match := re.match(r"sys/devices/system/node/node(\d+)/", name))
    }
    assert {*report.nodes} == nodes
    assert report.load is not None
    assert len(report.load) == 3
    told_load = [float(word) for word in dump.truth("proc/loadavg").split()[:3]]
    # Read before: each 5 s since, they have gone a part of the way (FIXED_1 - EXP_n,
    # kernel/sched/loadavg.h) to what waited then: from no task to all there are.
    (read,) = re.findall(r"^now at (\d+)", dump.truth("clock/2"), re.M)
    steps = 1 + (report.taken_at_ns - int(read)) // (5 * SECOND)
    tasks = report.coverage["tasks"]
    for ours, theirs, kept in zip(report.load, told_load, KEPT, strict=True):
        rest = kept**steps
        # The file has two digits.
        assert theirs * rest - 0.01 <= ours <= theirs * rest + tasks * (1 - rest) + 0.01


# --- each CPU


def test_states_are_those_of_sysfs(dump: Told) -> None:
    asked = dump.run.workload.get("isolation", {"nohz_full": "7", "rcu_nocbs": "7"})
    isolation = {
        "isolated": dump.isolated,
        "nohz_full": dump.cpus("nohz_full"),
        "rcu_nocb": {*numbers(asked["rcu_nocbs"]), *numbers(asked["nohz_full"])},
    }
    assert all(len(cpus) >= (name != "isolated") for name, cpus in isolation.items())
    assert dump.rows.keys() == dump.cpus("possible")
    for cpu, row in dump.rows.items():
        is_on = cpu in dump.online
        assert row.online is is_on
        assert ("on" in row.state, "off" in row.state) == (is_on, not is_on)
        for state, cpus in isolation.items():
            assert (state in row.state) is (cpu in cpus), (cpu, state)
        idles = row.current is not None and row.current.pid == 0
        assert ("idle" in row.state) is idles
        assert not {"inactive", "stopped"} & {*row.state}
        assert row.processor.active is is_on


def test_no_intr_is_where_affinities_let_none_go(dump: Told) -> None:
    """Not of queues, which stay where they are; one for one CPU alone is no matter."""
    taking: set[int] = set()
    for irq, name in dump.irqs.items():
        queue = re.fullmatch(r"nvme\d+q[1-9]\d*", name)
        # The timer that boots the others is bound to where it began.
        if queue or name == "timer":
            taking |= set() if dump.is_own(irq) else dump.affinity(irq, "effective")
        else:
            taking |= dump.affinity(irq)
    found = {cpu for cpu, row in dump.rows.items() if "no-intr" in row.state}
    assert found == dump.online - taking
    # Else it would prove little of one of the two.
    assert bool(found) is dump.run.name.startswith("cpulock")


def test_sets_of_cpus(sets: Told) -> None:
    names = {
        sets.roles["partition"]: "/db",
        sets.roles["quiet"]: "/quiet",
        sets.roles["isolated"]: "isolcpus",
    }
    for cpu, row in sets.rows.items():
        assert row.set == names.get(cpu, "default"), cpu


def test_cpu_of_no_partition_is_named_by_its_word(locked: Told) -> None:
    alone = locked.roles["tickless"]
    for cpu, row in locked.rows.items():
        assert row.set == ("nohz_full" if cpu == alone else "default")


def test_what_runs(dump: Told) -> None:
    for cpu, row in dump.rows.items():
        queue = dump.queues[cpu]
        if not row.online:
            assert row.current is queue.current is None
            assert row.runq == 0
            continue
        assert row.current is not None
        assert queue.current is not None
        assert row.current.pid == queue.current.pid
        assert row.current.comm == queue.current.comm
        assert row.current.sched_class == queue.current.sched_class
        assert row.runq == queue.running
        # As many as run or wait, but for those throttled; some sleep on the queue.
        able = [task for task in queue.waiting if not task.throttled]
        assert row.runq >= len(able)


def test_hogs_run_where_they_are_bound_to(sets: Told) -> None:
    for role, name in (("realtime", "rt-hog"), ("isolated", "isolated-hog")):
        current = sets.rows[sets.roles[role]].current
        assert current is not None
        assert (current.comm, current.pid) == (name, sets.pids[name])
    current = sets.rows[sets.roles["realtime"]].current
    assert current is not None
    assert current.sched_class == "realtime"
    assert sets.queues[sets.roles["isolated"]].doing == "user mode"
    quiet = sets.rows[sets.roles["quiet"]]
    assert quiet.current is not None
    assert (quiet.current.pid, quiet.current.sched_class) == (0, "idle")


def test_spins_are_what_cpus_do(locked: Told) -> None:
    for role, name in (
        ("irqs-off", "cm-irqs-off"),
        ("preempt-off", "cm-preempt-off"),
        ("softirq-off", "cm-softirq-off"),
    ):
        cpu = locked.roles[role]
        current = locked.rows[cpu].current
        assert current is not None
        assert current.comm == name
        assert current.pid == locked.run.workload["spins"][name]["pid"]
        assert locked.queues[cpu].doing == "kernel cm_spin_on"


def test_counters_are_there(dump: Told) -> None:
    """What they are told by is tested where they are read."""
    for row in dump.report.cpus:
        for column in (*COUNTED, "runq", "icsw", "migr"):
            assert isinstance(getattr(row, column), int), (row.cpu, column)
        assert row.smtx is row.srw is row.syscl is None
    truth = dump.interrupts()
    for cpu in dump.online:
        if dump.run.name.startswith("cpus"):
            # These stand still at the end.
            assert dump.rows[cpu].tlb == truth["TLB"][cpu]
        assert (dump.rows[cpu].xcal or 0) >= truth["CAL"][cpu]
        own = sum(counts[cpu] for name, counts in truth.items() if name != "TLB")
        assert (dump.rows[cpu].intr or 0) >= own > 0
    (switched,) = re.findall(r"^ctxt (\d+)", dump.truth("proc/stat"), re.M)
    assert sum(row.csw or 0 for row in dump.report.cpus) >= int(switched)


def test_switches_and_moves_come_from_tasks(sets: Told) -> None:
    """Exact where nothing runs any more: on the CPU that is offline."""
    gone = sets.roles["gone"]
    icsw = migr = 0
    for directory, cpu in last_cpus(sets):
        if cpu == gone:
            status = sets.truth(f"{directory}/status")
            icsw += number(status, "nonvoluntary_ctxt_switches:")
            if sets.has(f"{directory}/sched"):
                migr += number(
                    sets.truth(f"{directory}/sched"), r"se.nr_migrations\s*:"
                )
    assert sets.rows[gone].icsw == icsw > 0
    assert (sets.rows[gone].migr or 0) >= migr
    for row in sets.report.cpus:
        # A task takes with it what it did elsewhere, but to where it was moved to.
        assert (row.icsw, row.migr) != (None, None)
    total = sum(row.icsw or 0 for row in sets.report.cpus)
    told_of = (
        number(sets.truth(f"{directory}/status"), "nonvoluntary_ctxt_switches:")
        for directory, _ in last_cpus(sets)
    )
    assert total >= sum(told_of)


def last_cpus(dump: Told) -> Iterator[tuple[str, int]]:
    """Give the directory of each thread, and the CPU that it was on last."""
    for name in dump.run.truth_names():
        if match := re.fullmatch(r"(proc/\d+/task/\d+)/stat", name):
            words = dump.truth(name).rpartition(")")[2].split()
            yield match[1], int(words[36])


def number(text: str, pattern: str) -> int:
    (found,) = re.findall(rf"^{pattern}\s*(\d+)$", text, re.M)
    return int(found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_was_not_asked_for_is_not_there(kernel: str) -> None:
    report = told(f"cpus-{kernel}").report
    assert (report.irqs, report.vectors, report.softirqs) == (None, None, None)
    assert {row.icsw for row in report.cpus} == {row.migr for row in report.cpus}
    assert {row.icsw for row in report.cpus} == {None}
    assert {each.tasks for each in report.sets} == {None}
    assert {queue.doing for queue in report.run_queues} == {None}
    assert report.coverage["tasks"] == 0
    # All else is the same.
    full = told(f"cpus-{kernel}", irqs=True, tasks=True, doing=True).report
    for row, other in zip(report.cpus, full.cpus, strict=True):
        assert row == replace(other, icsw=None, migr=None)
    for queue, whole in zip(report.run_queues, full.run_queues, strict=True):
        assert queue == replace(whole, doing=None)


# --- sets and interrupts


def test_sets_that_the_guest_made(sets: Told) -> None:
    made = [
        each["path"]
        for each in sets.run.workload["sets"]
        if each["partition"] != "member" or each["cpus"] or each["mems"]
    ]
    assert sets.sets.keys() == {"default", "isolcpus", "nohz_full", *made}
    for path in made:
        file = f"{GROUPS}{path}/cpuset.cpus.effective"
        assert sets.sets[path].cpus == numbers(sets.truth(file))
    for each in sets.report.sets:
        assert each.tasks is not None
        there = {*each.cpus}
        # One that was moved, and has not come since, is on its way.
        routed = {
            irq
            for irq in sets.irqs
            if there & sets.affinity(irq, "effective")
            and sets.affinity(irq) & sets.affinity(irq, "effective")
        }
        assert {*each.irqs_routed} <= routed
        # Of queues whose CPUs are gone, or never were, files say where they would go.
        assert {*each.irqs_routed} == {
            irq for irq in routed if sets.affinity(irq) & sets.online
        }
        allowed = {irq for irq in sets.irqs if there & sets.affinity(irq)}
        assert {*each.irqs_allowed} == allowed


def test_interrupts(dump: Told) -> None:
    report = dump.report
    assert report.irqs is not None
    assert report.vectors is not None
    assert report.softirqs is not None
    assert {irq.irq: irq.name for irq in report.irqs} == dump.irqs
    truth = dump.came()
    for irq in report.irqs:
        assert all(
            irq.counts.get(cpu, 0) >= count for cpu, count in truth[irq.irq].items()
        )
        assert irq.time_ns is None
    assert sum(irq.share or 0 for irq in report.irqs) == pytest.approx(1)
    softirqs = dump.truth("proc/softirqs").splitlines()[1:]
    names = [line.partition(":")[0].strip() for line in softirqs]
    assert [each.name for each in report.softirqs] == names
    lines = dump.truth("proc/interrupts").splitlines()[1:]
    names = [line.partition(":")[0].strip() for line in lines]
    shown = {name for name in names if not name.isdigit()}
    assert {each.name for each in report.vectors} >= shown


# --- findings


def test_what_is_found(sets: Told) -> None:
    codes = Counter(each.code for each in sets.report.findings)
    for code, times in (
        ("not-ticked", 0),
        ("partition-invalid", 2),
        ("isolated-takes-interrupts", 2),
        ("idle-while-waiting", 1),
        ("most-interrupts", 1),
    ):
        assert codes.pop(code, 0) == times, code
    # Those of default may, by chance, have been on other CPUs than the isolated one.
    assert 1 <= codes.pop("straying-tasks") <= 3
    # On the CPUs of real-time and deadline tasks, while they have these.
    first = [queue for queue in sets.report.run_queues if runs_first(queue)]
    late = codes.pop("not-switched", 0) + codes.pop("starving-tasks", 0)
    assert late == len(first) > 0
    assert codes.total() == 0


def runs_first(queue: RunQueue) -> bool:
    """Tell whether a CPU runs a task that comes before all fair ones.

    6.12 gives fair ones a share of what deadline tasks want: 50 ms of each second.
    """
    current = queue.current
    return current is not None and current.sched_class in ("deadline", "realtime")


@pytest.mark.parametrize(
    ("role", "starving"),
    [
        ("realtime", {"rt-49", "rt-40-first", "rt-low", "rt-fair"}),
        ("partition", {"db-fifo"}),
    ],
)
def test_cpu_that_lets_others_wait(sets: Told, role: str, starving: set[str]) -> None:
    """Real-time and deadline tasks never sleep.

    The CPU may have been taken from them for a moment, by its own stop thread.
    """
    cpu = sets.roles[role]
    queue = sets.queues[cpu]
    found, *others = [
        each
        for code in ("not-switched", "starving-tasks")
        for each in sets.findings(code)
        if cpu in each.cpus or not runs_first(queue)
    ]
    if not runs_first(queue):
        assert role == "partition"
        assert cpu not in {*found.cpus, *(cpu for each in others for cpu in each.cpus)}
        return
    assert not others
    assert queue.current is not None
    assert queue.current.comm in sets.run.workload["tasks"]
    runs = f"{queue.current.pid} {queue.current.comm}"
    waiting = [task for task in queue.waiting if not task.throttled]
    assert {sets.pids[name] for name in starving} <= {task.pid for task in waiting}
    assert queue.switched_ns is not None
    if queue.switched_ns >= SECOND:
        assert found.code == "not-switched"
        what = f"has run {runs} for {queue.switched_ns / SECOND:.1f} s, and"
    else:
        assert found.code == "starving-tasks"
        what = f"runs {runs}, which is {queue.current.sched_class}, and"
        waiting = [task for task in waiting if (task.wait_ns or 0) >= SECOND]
    last = max(waiting, key=lambda task: task.wait_ns or 0)
    bound = "at most " if last.wait_bound == "upper" else ""
    longest = f"{bound}{(last.wait_ns or 0) / SECOND:.1f} s"
    number = "1 task waits" if len(waiting) == 1 else f"{len(waiting)} tasks wait"
    assert found.text == f"cpu{cpu} {what} {number}, the longest for {longest}"


def test_partitions_that_are_not_in_force(sets: Told) -> None:
    found = {each.cpus: each.text for each in sets.findings("partition-invalid")}
    for fact in sets.run.workload["sets"]:
        if fact["valid"]:
            continue
        path = fact["path"]
        text = found.pop(numbers(fact["cpus"]))
        state = sets.truth(f"{GROUPS}{path}/cpuset.cpus.partition")
        assert "invalid" in state
        reason = state.partition("(")[2].rstrip(")")
        # 6.12 does not say why one without CPUs is none.
        why = reason or f"no CPU of it is online (cpuset.cpus is {fact['cpus']})"
        assert text == f"partition {path} is not in force: {why}"
    assert found == {}


def test_isolated_cpus_that_may_be_interrupted(dump: Told) -> None:
    isolated = dump.isolated | dump.cpus("nohz_full")
    expected = {cpu: routed for cpu in isolated if (routed := dump.routed(cpu))}
    assert len(expected) >= 1
    assert dump.where("isolated-takes-interrupts") == expected.keys()
    for each in dump.findings("isolated-takes-interrupts"):
        (cpu,) = each.cpus
        irqs = expected[cpu]
        plural = "" if len(irqs) == 1 else "s"
        what = "isolated" if cpu in dump.isolated else "nohz_full"
        start = f"cpu{cpu} is {what}, and may get {len(irqs)} interrupt{plural} of"
        assert each.text.startswith(f"{start} devices (")
        named = re.findall(r"[(,] ?(\d+) ([\w.-]+)", each.text)
        assert len(named) == min(len(irqs), 3)
        assert all(dump.irqs[int(irq)] == name for irq, name in named)
        assert {int(irq) for irq, _ in named} <= irqs
        assert each.advice is not None
        # Who says so may write it: all but what the kernel places by itself.
        movable = {irq for irq in irqs if not dump.irqs[irq].startswith("nvme")}
        if not movable:
            assert "isolcpus=managed_irq" in each.advice
            continue
        advice = re.match(
            r"echo ([\d,-]+) > /proc/irq/(\d+)/smp_affinity_list", each.advice
        )
        assert advice
        default = {cpu.cpu for cpu in dump.report.cpus if cpu.set == "default"}
        assert {*numbers(advice[1])} == dump.online & default - isolated
        assert int(advice[2]) in movable
        assert ("and the others'" in each.advice) is (len(movable) > 1)


def test_interrupt_that_goes_to_the_isolated_cpu(sets: Told) -> None:
    """The one that somebody has told to."""
    cpu = sets.roles["isolated"]
    irq = sets.run.workload["irqs"]["virtio1-input.0"]
    assert irq["wanted"] == str(cpu)
    (found,) = [
        each
        for each in sets.findings("isolated-takes-interrupts")
        if each.cpus == (cpu,)
    ]
    assert f"{irq['irq']} virtio1-input.0" in found.text


def test_set_that_idles(sets: Told) -> None:
    (found,) = sets.findings("idle-while-waiting")
    assert found.cpus == (sets.roles["quiet"],)
    match = re.fullmatch(
        r"set /quiet idles \(cpu(\d+)\), and in set default (\d+) tasks wait for "
        r"cpu([\d,-]+), the longest for (?:at most )?([\d.]+) s",
        found.text,
    )
    assert match
    assert int(match[1]) == sets.roles["quiet"]
    starving = [sets.run.workload["tasks"][n] for n in sets.run.workload["starving"]]
    assert int(match[2]) >= len(starving)
    assert sets.roles["realtime"] in numbers(match[3])
    assert {*numbers(match[3])} <= {
        sets.roles[role] for role in ("home", "fair", "groups", "realtime")
    }
    # These have not run since they were woken up; the kernel's may wait for longer.
    taken_at_ns = sets.report.taken_at_ns
    assert taken_at_ns is not None
    longest = max(taken_at_ns - task["to_ns"] for task in starving)
    assert float(match[4]) > longest / SECOND - 0.1


def test_tasks_that_stray(sets: Told) -> None:
    """By the set's own list: the first of those that are not the kernel's."""
    expected = {}
    for each in sets.report.sets:
        assert each.tasks is not None
        strays = [task for task in each.tasks.straying if not task.kthread]
        if strays and each.name != "default":
            expected[each.cpus] = (each.name, strays)
    found = {each.cpus: each.text for each in sets.findings("straying-tasks")}
    assert found.keys() == expected.keys()
    for cpus, (name, strays) in expected.items():
        assert f" {name} has tasks that stray: {strays[0].pid} " in found[cpus]
        more = re.search(r", and (\d+) more$", found[cpus])
        assert len(strays) == 1 + (int(more[1]) if more else 0)
    isolcpus = next(s for name, s in expected.values() if name == "isolcpus")
    assert sets.pids["stray-isolated"] in {task.pid for task in isolcpus}


def test_cpu_that_takes_most_interrupts(dump: Told) -> None:
    """By the counts of the dump, which test_interrupts() holds against the guest's.

    The guest still writes to its console and reads its disk after it has recorded its
    own: where two CPUs have taken about as many, that decides which has most.
    """
    assert dump.report.irqs is not None
    came = {irq.irq: irq.counts for irq in dump.report.irqs}
    by_cpu: Counter[int] = Counter()
    for counts in came.values():
        by_cpu.update(counts)
    (found,) = dump.findings("most-interrupts")
    (cpu,) = found.cpus
    assert by_cpu[cpu] == max(by_cpu.values())
    match = re.fullmatch(
        r"cpu(\d+) takes (\d+) % of device interrupts "
        r"\(most of irq (\d+) (\S+), affinity ([\d,-]+)\)",
        found.text,
    )
    assert match
    assert int(match[1]) == cpu
    assert match[2] == f"{100 * by_cpu[cpu] / by_cpu.total():.0f}"
    irq = int(match[3])
    assert came[irq][cpu] == max(counts.get(cpu, 0) for counts in came.values())
    assert match[4] == dump.irqs[irq]
    assert match[5] == dump.truth(f"proc/irq/{irq}/smp_affinity_list")


def test_cpu_with_interrupts_off(locked: Told) -> None:
    off = locked.roles["irqs-off"]
    (found,) = locked.findings("not-ticked")
    assert found.cpus == (off,)
    pid = locked.run.workload["spins"]["cm-irqs-off"]["pid"]
    ticked = locked.queues[off].ticked_ns
    assert ticked is not None
    # It is stopped four seconds after that, or later.
    assert 4 * SECOND <= ticked < 60 * SECOND
    assert found.text == (
        f"cpu{off} takes no interrupts, and has had no tick for "
        f"{ticked / SECOND:.1f} s: they are off, or a hypervisor does not run it; "
        f"runs {pid} cm-irqs-off"
    )


def test_what_else_is_found_there(locked: Told) -> None:
    """CPUs where tasks wait, and not those that take turns, or run one task alone."""
    spin = {locked.roles[role] for role in ("irqs-off", "preempt-off", "softirq-off")}
    assert locked.where("not-switched") == spin
    codes = {each.code for each in locked.report.findings}
    # No set idles as a whole, none is invalid, and nobody strays.
    assert codes == {
        *("not-ticked", "not-switched", "isolated-takes-interrupts"),
        "most-interrupts",
    }


def test_worst_comes_first(dump: Told) -> None:
    order = [
        *("not-ticked", "not-switched", "starving-tasks", "partition-invalid"),
        *("isolated-takes-interrupts", "idle-while-waiting", "straying-tasks"),
        "most-interrupts",
    ]
    codes = [each.code for each in dump.report.findings]
    assert codes == sorted(codes, key=order.index)


# --- selection


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cpus", [(3,), (1, 5), (4, 6, 7)])
def test_some_cpus(kernel: str, cpus: tuple[int, ...]) -> None:
    whole = told(f"cpus-{kernel}", tasks=True)
    report = told(f"cpus-{kernel}", tasks=True, cpus=frozenset(cpus)).report
    assert report.cpus == tuple(whole.rows[cpu] for cpu in cpus)
    assert report.run_queues == tuple(whole.queues[cpu] for cpu in cpus)
    assert report.sets == tuple(
        each for each in whole.report.sets if {*cpus} & {*each.cpus}
    )
    assert report.findings == tuple(
        each for each in whole.report.findings if {*cpus} & {*each.cpus}
    )
    assert report.notes == ()


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
def test_some_sets(kernel: str, names: tuple[str, ...], roles: set[str]) -> None:
    whole = told(f"cpus-{kernel}")
    some = told(f"cpus-{kernel}", sets=names)
    wanted = {whole.roles[role] for role in roles}
    if names == ("default",):
        # Those that never were are in no set.
        wanted |= whole.cpus("possible") - whole.cpus("present")
    assert some.rows == {cpu: whole.rows[cpu] for cpu in sorted(wanted)}
    assert some.queues.keys() == wanted
    assert {*names} <= some.sets.keys()


@pytest.mark.parametrize("kernel", KERNELS)
def test_cpus_of_sets_are_both(kernel: str) -> None:
    found = told(f"cpus-{kernel}", sets=("/db", "default"), cpus=frozenset({1, 5, 7}))
    assert found.rows.keys() == {1, 5}
    none = told(f"cpus-{kernel}", sets=("/db",), cpus=frozenset({1}))
    assert none.report.cpus == none.report.run_queues == ()


@pytest.mark.parametrize(
    ("options", "subject", "words"),
    [
        ({"cpus": frozenset({0, 77, 12})}, "CPU 12,77", "none of that number"),
        ({"sets": ("/db", "/nowhere")}, "set /nowhere", "none of that name"),
        ({"sets": ("/nowhere",)}, "set /nowhere", "there are default, /db, /quiet"),
    ],
)
def test_what_is_not_there(options: dict[str, Any], subject: str, words: str) -> None:
    with pytest.raises(NoSuchCpuError) as error:
        told("cpus-6.12", **options)
    assert str(error.value).startswith(f"{subject}: ")
    assert words in str(error.value)


# --- the same, however it is looked at


@pytest.mark.parametrize("name", ALL)
def test_same_with_debug_info(name: str) -> None:
    """Number for number."""
    target = told(name, irqs=True, tasks=True, doing=True).report.target
    one, other = (
        as_json(
            replace(
                told(name, types, irqs=True, tasks=True, doing=True).report,
                target=target,
            )
        )
        for types in TYPES
    )
    assert one == other


@pytest.mark.parametrize("kernel", KERNELS)
def test_again_and_again(kernel: str) -> None:
    """A second look forgets the first; between the two of a dump nothing happens."""
    prog = open_dump(f"cpus-{kernel}", "btf")
    session = Cpus(prog, describe(prog), CpusOptions(irqs=True, tasks=True))
    steps: list[tuple[int, int]] = []
    first = session.report(lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps)
    assert {total for _, total in steps} == {4}
    second = session.report(lambda done, total: None)
    # Layouts that the first has found need no reads any more.
    assert replace(second, coverage={}) == replace(first, coverage={})
    session.begin(lambda done, total: None)
    since = session.advance(lambda done, total: None)
    assert since.interval_ns == 0
    assert since.notes == ()
    for row, whole in zip(since.cpus, first.cpus, strict=True):
        for column in (*COUNTED, "icsw", "migr"):
            assert getattr(row, column) == 0, (row.cpu, column)
        assert row.runq == whole.runq
        assert row.current == whole.current
        # Queues of their own count only if something came.
        assert {*row.state} >= {*whole.state}
    assert since.irqs is not None
    assert {irq.total for irq in since.irqs} == {0}
    assert {irq.share for irq in since.irqs} == {None}
    codes = {each.code for each in since.findings}
    assert not codes & {"most-interrupts", "isolated-takes-interrupts"}
    assert since.run_queues == first.run_queues
    assert since.sets == first.sets


@pytest.mark.parametrize("name", ["memory-5.10", "crash-6.1", "crash-6.12"])
def test_other_kernels(name: str) -> None:
    """Without partitions, and some of them dead."""
    dump = told(name, irqs=True, tasks=True, doing=True)
    report = dump.report
    assert report.notes == ()
    assert {row.set for row in report.cpus} == {"default"}
    assert [each.name for each in report.sets] == ["default"]
    for row in report.cpus:
        assert row.online
        assert None not in [getattr(row, column) for column in COUNTED]
    crash = report.target.crash
    panicked = [queue.cpu for queue in report.run_queues if queue.panicked]
    assert panicked == ([] if crash is None else [crash.cpu])
    assert (crash is not None) is name.startswith("crash")


def test_lists_of_cpus_are_short(sets: Told) -> None:
    """As in messages: the ones that the kernel's files have."""
    assert ranges(sets.online) == sets.truth(f"{CPU}/online")
