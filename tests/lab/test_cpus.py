# SPDX-License-Identifier: LGPL-2.1-or-later
"""The guests with eight CPUs are what their workload says that they are."""

import re
from collections import Counter
from typing import Any

import drgn
import pytest
from drgn.helpers.linux.irq import irq_to_desc
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.percpu import per_cpu, per_cpu_ptr

from fixtures import lab
from fixtures.lab import cpus
from fixtures.lab.guest import cpus as guest
from fixtures.lab.guest.cputruth import COUNTERS
from fixtures.lab.kernels import KERNELS

BOTH = ["6.1", "6.12"]
EFFECTIVE = {
    "": "0-3,7",
    "db": "5",
    "db/mysql": "5",
    "quiet": "6",
    # Without a CPU of its own it has those of the set that it lies in.
    "gone": "0-3,7",
    "limit": "0-2",
    "limit/all": "0-2",
    "limit/one": "1",
    "limit/root": "2",
    "mems": "0-3,7",
}
REASONS = {
    "6.1": {
        "gone": " (No cpu available due to hotplug)",
        "limit/root": " (Parent is not a partition root)",
    },
    "6.12": {
        "gone": "",  # it forgets why
        "limit/root": " (Invalid cpu list in cpuset.cpus.exclusive)",
    },
}
# What tasks may run on that are pinned to something else, or to nothing.
ALLOWED = {
    "in-db": "5",
    "in-quiet": "6",
    "in-gone": "0-3,7",
    "in-limit": "0-2",
    "in-limit-one": "1",
    "in-limit-root": "2",
    "in-mems": "0-3,7",
    "stray-moved": "6",
    "stray-gone": "0-3,7",
}
EARLY = {"6.1": "0-3,7", "6.12": "1"}
"""Since 6.2 a task keeps what it was pinned to, as far as its set has that."""
TS_FLAG_STOPPED = 1 << 1
STILL = "eth3"
"""Nothing is sent to it, so its interrupt does not come and is not moved yet."""
CONSOLE = "ttyS0"
"""The one device that the guest still uses once the counters are read."""

Facts = dict[str, Any]


@pytest.fixture(scope="module", params=BOTH)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"cpus-{request.param}")


@pytest.fixture(scope="module")
def prog(run: lab.Run) -> drgn.Program:
    prog = drgn.Program()
    assert run.elf
    prog.set_core_dump(run.elf)
    prog.load_debug_info([run.vmlinux])
    return prog


def text(run: lab.Run, name: str) -> str:
    return run.truth(name).decode(errors="replace").strip()


def cpu_file(run: lab.Run, name: str) -> str:
    return text(run, f"sys/devices/system/cpu/{name}")


def group_file(run: lab.Run, path: str, name: str) -> str:
    return text(run, f"sys/fs/cgroup/{path}/{name}".replace("//", "/"))


def of_task(run: lab.Run, task: Facts, name: str) -> str:
    return text(run, f"proc/{task['pid']}/task/{task['pid']}/{name}")


def status(run: lab.Run, task: Facts, name: str) -> str:
    found = re.search(rf"^{name}:\t(.*)$", of_task(run, task, "status"), re.MULTILINE)
    assert found
    return found[1]


def stat(run: lab.Run, task: Facts) -> dict[int, str]:
    """The fields of /proc/PID/stat by their number in proc(5), from the third on."""
    fields = of_task(run, task, "stat").rpartition(") ")[2].split()
    return dict(enumerate(fields, start=3))


def tasks(run: lab.Run, kind: str) -> dict[str, Facts]:
    return {
        name: task for name, task in run.workload["tasks"].items() if task["is"] == kind
    }


def numbers(cpu_list: str) -> set[int]:
    found: set[int] = set()
    for part in cpu_list.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if first else set()
    return found


def interrupts(run: lab.Run) -> dict[str, dict[int, int]]:
    """The counts of each CPU, by the number of the interrupt or its letters."""
    head, *lines = text(run, "proc/interrupts").splitlines()
    online = [int(word.removeprefix("CPU")) for word in head.split()]
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        counts = rest.split()[: len(online)]
        if len(counts) == len(online):  # those of errors have one for all
            found[name.strip()] = dict(zip(online, map(int, counts), strict=True))
    return found


def clock(run: lab.Run, number: int) -> int:
    found = re.search(r"now at (\d+) nsecs", text(run, f"clock/{number}"))
    assert found
    return int(found[1])


# --- the scenario


def test_machine_has_threads_and_networks() -> None:
    words = " ".join(cpus.machine(KERNELS["6.1"]).arguments())
    assert "tcg,thread=multi" in words
    assert "-smp 8,sockets=3,cores=2,threads=2,maxcpus=12" in words
    assert words.count("virtio-net-pci") == words.count("hubport") == 4


def test_every_cpu_has_a_role_of_its_own() -> None:
    assert sorted(guest.CPUS.values()) == list(range(cpus.CPUS))


# --- CPUs


def test_cpus_of_every_state(run: lab.Run) -> None:
    assert cpu_file(run, "online") == "0-3,5-7"
    assert cpu_file(run, "present") == "0-7"
    room = {"6.1": set(range(8, 12)), "6.12": set()}[run.kernel.kernel.name]
    assert numbers(cpu_file(run, "possible")) == set(range(8)) | room
    assert numbers(cpu_file(run, "offline")) == {4} | room
    assert cpu_file(run, "isolated") == cpu_file(run, "nohz_full") == "7"
    assert "rcu_nocbs=6" in text(run, "proc/cmdline").split()
    assert cpu_file(run, "cpu4/online") == "0"
    assert cpu_file(run, "cpu4/hotplug/state") == "0"
    assert cpu_file(run, "cpu5/hotplug/state") == cpu_file(run, "cpu0/hotplug/state")


def test_threads_cores_and_packages(run: lab.Run) -> None:
    assert cpu_file(run, "cpu3/topology/thread_siblings_list") == "2-3"
    # An offline CPU is of no core.
    assert cpu_file(run, "cpu5/topology/thread_siblings_list") == "5"
    packages = {
        cpu_file(run, f"cpu{cpu}/topology/physical_package_id")
        for cpu in (0, 1, 2, 3, 5, 6, 7)
    }
    assert packages == {"0", "1"}
    assert text(run, "sys/devices/system/node/node0/cpulist") == "0-3"
    assert text(run, "sys/devices/system/node/node1/cpulist") == "5-7"


# --- sets


def test_sets_have_the_cpus_that_they_are_to_have(run: lab.Run) -> None:
    found = {path: group_file(run, path, "cpuset.cpus.effective") for path in EFFECTIVE}
    assert found == EFFECTIVE
    assert group_file(run, "limit", "cpuset.mems.effective") == "0"
    assert group_file(run, "mems", "cpuset.mems.effective") == "1"
    for one in run.workload["sets"]:
        assert group_file(run, one["path"], "cpuset.cpus") == one["cpus"]
        assert group_file(run, one["path"], "cpuset.mems") == one["mems"]


def test_partitions_are_valid_and_invalid(run: lab.Run) -> None:
    reasons = REASONS[run.kernel.kernel.name]
    found = {}
    for one in run.workload["sets"]:
        path = one["path"].lstrip("/")
        state = group_file(run, path, "cpuset.cpus.partition")
        if one["partition"] != "member":
            found[path] = state
            assert one["valid"] == ("invalid" not in state)
        else:
            assert state == "member"
    assert found == {
        "db": "root",
        "quiet": "isolated",
        **{path: f"root invalid{reason}" for path, reason in reasons.items()},
    }


def test_new_kernels_tell_of_isolated_and_exclusive_cpus(run: lab.Run) -> None:
    if run.kernel.kernel.name == "6.1":
        assert "sys/fs/cgroup/cpuset.cpus.isolated" not in run.truth_names()
    else:
        assert group_file(run, "", "cpuset.cpus.isolated") == "6-7"
        assert group_file(run, "db", "cpuset.cpus.exclusive.effective") == "5"


# --- tasks


def test_tasks_are_scheduled_as_they_were_told(run: lab.Run) -> None:
    for name, task in run.workload["tasks"].items():
        fields = stat(run, task)
        assert int(fields[41]) == task["policy"], name
        assert int(fields[40]) == task["rt_priority"], name
        assert int(fields[19]) == task["nice"], name
        assert of_task(run, task, "cgroup") == f"0::{task['cgroup']}", name
        assert fields[3] == ("S" if task["does"] == "rest" else "R"), name
    policies = Counter(task["policy"] for task in run.workload["tasks"].values())
    assert set(policies) == {0, 1, 2, 3, 5, 6}


def test_tasks_may_run_where_they_were_pinned(run: lab.Run) -> None:
    allowed = ALLOWED | {"pinned-early": EARLY[run.kernel.kernel.name]}
    for name, task in run.workload["tasks"].items():
        found = numbers(status(run, task, "Cpus_allowed_list"))
        wanted = numbers(allowed[name]) if name in allowed else set(task["cpus"])
        assert found == wanted, name
        if task["does"] != "rest":
            assert int(stat(run, task)[39]) in found, name
    task = run.workload["tasks"]["in-mems"]
    assert status(run, task, "Mems_allowed_list") == "1"


def queue(prog: drgn.Program, cpu: int) -> list[int]:
    """The PIDs in a CPU's real-time queue, the one that runs among them."""
    run_queue = per_cpu(prog["runqueues"], cpu)
    found = []
    for priority in run_queue.rt.active.queue:
        for entity in list_for_each_entry(
            "struct sched_rt_entity", priority.address_of_(), "run_list"
        ):
            task = drgn.container_of(entity, "struct task_struct", "rt")
            found.append(task.pid.value_())
    return found


def test_queue_of_real_time_tasks(run: lab.Run, prog: drgn.Program) -> None:
    made = run.workload["tasks"]
    names = ["rt-hog", *run.workload["starving"]]
    realtime = [made[name]["pid"] for name in names if made[name]["rt_priority"]]
    assert queue(prog, guest.REALTIME) == realtime
    current = per_cpu(prog["runqueues"], guest.REALTIME).curr.pid.value_()
    assert current == made["rt-hog"]["pid"]


def test_queues_have_their_hogs(run: lab.Run, prog: drgn.Program) -> None:
    waiting = {
        cpu: per_cpu(prog["runqueues"], cpu).nr_running.value_() for cpu in range(8)
    }
    assert waiting[guest.FAIR] >= len(guest.FAIR_HOGS)
    assert waiting[guest.GROUPS] >= len(guest.GROUP_HOGS)
    assert waiting[guest.REALTIME] >= len(guest.STARVED) + 1
    assert waiting[guest.PARTITION] >= len(guest.DEADLINES) + 1
    assert waiting[guest.ISOLATED] == 1
    assert waiting[guest.QUIET] == waiting[guest.GONE] == 0


def test_tick_of_a_busy_cpu_is_stopped(prog: drgn.Program) -> None:
    tick = per_cpu(prog["tick_cpu_sched"], guest.ISOLATED)
    if hasattr(tick, "flags"):  # bit fields in 6.1
        assert tick.flags & TS_FLAG_STOPPED
    else:
        assert tick.tick_stopped


# --- interrupts


def test_interrupts_may_land_where_they_are_to(run: lab.Run) -> None:
    wanted = 0
    driver = run.workload["networks"][STILL]["driver_name"]
    for name, irq in run.workload["irqs"].items():
        place = f"proc/irq/{irq['irq']}"
        affinity = numbers(text(run, f"{place}/smp_affinity_list"))
        effective = numbers(text(run, f"{place}/effective_affinity_list"))
        if name == guest.GOES:
            # Its one CPU went: the kernel lets it land on any.
            assert affinity >= set(range(cpus.CPUS))
            assert effective
            assert guest.GONE not in effective
        elif irq["wanted"]:
            assert affinity == numbers(irq["wanted"]), name
            assert len(effective) == 1, name
            if name != f"{driver}-input.0":
                assert effective <= affinity, name
            wanted += 1
    assert wanted == len(guest.AFFINITIES)
    managed = [name for name, irq in run.workload["irqs"].items() if irq["managed"]]
    assert len(managed) >= 4 + cpus.CPUS


def test_interrupts_landed_there(run: lab.Run) -> None:
    counts = interrupts(run)
    networks = run.workload["networks"]
    for (device, direction), cpu_list in guest.AFFINITIES.items():
        name = f"{networks[device]['driver_name']}-{direction}.0"
        here = counts[str(run.workload["irqs"][name]["irq"])]
        there = numbers(cpu_list)
        landed = sum(here[cpu] for cpu in there)
        # A few came before they were told.
        assert sum(here.values()) - landed <= 3, name


# --- counters


def test_counters_are_read_one_after_the_other(run: lab.Run) -> None:
    names = run.truth_names()
    last = [name for path in COUNTERS for name in (path.lstrip("/"),)]
    expected = [
        name for number, one in enumerate(last) for name in (f"clock/{number}", one)
    ]
    assert names[-len(expected) - 1 :] == [*expected, f"clock/{len(COUNTERS)}"]
    times = [clock(run, number) for number in range(len(COUNTERS) + 1)]
    assert times == sorted(times)


def test_devices_stood_still_since(run: lab.Run, prog: drgn.Program) -> None:
    truth = interrupts(run)
    for name, irq in run.workload["irqs"].items():
        if name == CONSOLE:
            continue
        counts = irq_to_desc(prog, irq["irq"]).kstat_irqs
        for cpu, count in truth[str(irq["irq"])].items():
            one = per_cpu_ptr(counts, cpu)
            # A count alone in 6.1.
            found = one.cnt if hasattr(one, "cnt") else one[0]
            assert found.value_() == count, (name, cpu)


def test_counters_differ_between_cpus(run: lab.Run) -> None:
    """Else a report that takes one CPU for another would be right."""
    lines = text(run, "proc/stat").splitlines()
    rows = [line.split()[1:] for line in lines if re.match(r"cpu\d", line)]
    assert len({tuple(row) for row in rows}) == 7
