# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-cpus: CPUs, sets, interrupts and run queues in /proc and /sys."""

import re
from typing import Any

from fixtures.lab import Run
from msatools.cli.options import cpu_list
from tests.truth.fact import Fact, Figures

CPU = "sys/devices/system/cpu"
TOPOLOGY = {
    "package": "physical_package_id",
    "die": "die_id",
    "core": "core_id",
}
QUIET = r"nvme|ttyS0|timer"
"""Interrupts that continue after the guest has recorded them: of the clock, the serial
console, and the disk with the journal."""


OF_CPUS = ("arch_timer", "arm-pmu")
"""Numbered interrupts that are not of devices."""


def text(run: Run, name: str) -> str:
    return run.truth(name).decode().strip()


def by_cpu(key: str) -> Any:
    """Return a function that returns a key of each CPU."""
    return lambda report: {row["cpu"]: row[key] for row in report["cpus"]}


def of_processor(key: str) -> Any:
    return lambda report: {row["cpu"]: row["processor"][key] for row in report["cpus"]}


def has_state(state: str) -> Any:
    """Return a function that lists the CPUs in a state."""

    def listed(report: Any) -> Figures:
        return {state: [r["cpu"] for r in report["cpus"] if state in r["state"]]}

    return listed


def listed_in(state: str, name: str) -> Any:
    return lambda run: {state: listed(run, name)}


def listed(run: Run, name: str) -> list[int]:
    said = text(run, f"{CPU}/{name}")
    # Where nothing was asked for at boot, older kernels have no mask at all.
    return [] if said in ("", "(null)") else sorted(cpu_list(said))


def online(run: Run) -> list[int]:
    return listed(run, "online")


def topology(file: str) -> Any:
    def recorded(run: Run) -> Figures:
        return {
            cpu: int(text(run, f"{CPU}/cpu{cpu}/topology/{file}"))
            for cpu in online(run)
        }

    return recorded


def nodes(run: Run) -> Figures:
    pattern = r"sys/devices/system/node/node(\d+)/cpulist"
    found = (re.fullmatch(pattern, name) for name in run.truth_names())
    return {
        cpu: int(match[1])
        for match in found
        if match
        for cpu in cpu_list(text(run, match[0]))
    }


def effective(run: Run) -> Figures:
    """Return the CPUs of each cpuset that the guest made and assigned CPUs to."""
    return {
        made["path"]: sorted(cpu_list(text(run, f"{directory}/cpuset.cpus.effective")))
        for made in run.workload["sets"]
        if made["cpus"]
        for directory in [f"sys/fs/cgroup{made['path']}"]
    }


def partition_kinds(run: Run) -> Figures:
    return {
        made["path"]: made["partition"] if made["valid"] else "invalid"
        for made in run.workload["sets"]
        if made["partition"] != "member"
    }


def device_interrupts(run: Run) -> list[tuple[int, list[str], list[int]]]:
    """Return the device interrupts: number, other words of the line, and CPUs."""
    head, *lines = text(run, "proc/interrupts").splitlines()
    cpus = [int(word.removeprefix("CPU")) for word in head.split()]
    found = []
    for line in lines:
        name, *words = line.split()
        # On arm64 the CPUs' own ones are among them.
        if name.rstrip(":").isdigit() and words[-1] not in OF_CPUS:
            found.append((int(name.rstrip(":")), words, cpus))
    return found


def interrupts(run: Run) -> Figures:
    """Return the counts per online CPU of interrupts from devices at rest."""
    return {
        (irq, cpu): int(word)
        for irq, words, cpus in device_interrupts(run)
        if not re.search(QUIET, words[-1])
        for cpu, word in zip(cpus, words, strict=False)
    }


def reported_interrupts(report: Any) -> Figures:
    return {
        (irq["irq"], row["cpu"]): irq["counts"].get(str(row["cpu"]), 0)
        for irq in report["irqs"]
        for row in report["cpus"]
    }


def affinities(kind: str) -> Any:
    def recorded(run: Run) -> Figures:
        return {
            irq: sorted(cpu_list(listed))
            for irq, _, _ in device_interrupts(run)
            if (listed := text(run, f"proc/irq/{irq}/{kind}_affinity_list"))
        }

    return recorded


def of_irqs(key: str) -> Any:
    return lambda report: {irq["irq"]: irq[key] for irq in report["irqs"]}


def policies(run: Run) -> Figures:
    """Return the nice values of the tasks that never sleep and have a fair policy."""
    return {
        task["pid"]: task["nice"]
        for task in run.workload["tasks"].values()
        if task.get("does", "rest") != "rest" and task["policy"] in (0, 3, 5)
    }


def queued(key: str) -> Any:
    def reported(report: Any) -> Figures:
        return {
            task["pid"]: task[key]
            for queue in report["run_queues"]
            for task in (queue["current"], *queue["waiting"])
            if task
        }

    return reported


def queues(report: Any) -> Figures:
    return {
        task["pid"]: [queue["cpu"]]
        for queue in report["run_queues"]
        for task in (queue["current"], *queue["waiting"])
        if task and task["pid"]
    }


def hogs(run: Run) -> Figures:
    return {
        task["pid"]: task["cpus"]
        for task in run.workload["tasks"].values()
        if task.get("does", "rest") != "rest"
    }


FACTS = (
    Fact("online CPUs", has_state("on"), listed_in("on", "online")),
    Fact("nohz_full CPUs", has_state("nohz_full"), listed_in("nohz_full", "nohz_full")),
    *(
        Fact(f"{key} of a CPU", of_processor(key), topology(file))
        for key, file in TOPOLOGY.items()
    ),
    Fact("node of a CPU", of_processor("node"), nodes),
    Fact(
        "CPUs of a set",
        lambda report: {row["name"]: row["cpus"] for row in report["sets"]},
        effective,
    ),
    Fact(
        "kind of a partition",
        lambda report: {row["name"]: row["kind"] for row in report["sets"]},
        partition_kinds,
    ),
    Fact("interrupts", reported_interrupts, interrupts),
    Fact("affinity of an interrupt", of_irqs("affinity"), affinities("smp")),
    Fact(
        "effective affinity of an interrupt",
        of_irqs("effective"),
        affinities("effective"),
    ),
    Fact("run queue of a hog", queues, hogs),
    Fact("nice of a hog", queued("nice"), policies),
)
