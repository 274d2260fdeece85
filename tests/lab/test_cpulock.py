# SPDX-License-Identifier: LGPL-2.1-or-later
"""The CPUs of the guest that its module holds on to do nothing else."""

import json
import re
from typing import Any

import drgn
import pytest
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.sched import task_cpu

from fixtures import lab
from fixtures.lab import cpulock
from fixtures.lab.guest import cpulock as guest

BOTH = ["6.1", "6.12"]
SPINS = {
    "cm-irqs-off": (guest.IRQS, "cm_irqs_off"),
    "cm-preempt-off": (guest.PREEMPT, "cm_preempt_off"),
    "cm-softirq-off": (guest.SOFTIRQS, "cm_softirq_off"),
}
SECOND = 10**9

Facts = dict[str, Any]


@pytest.fixture(scope="module", params=BOTH)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"cpulock-{request.param}")


@pytest.fixture(scope="module")
def prog(run: lab.Run) -> drgn.Program:
    prog = drgn.Program()
    assert run.elf
    prog.set_core_dump(run.elf)
    prog.load_debug_info([run.vmlinux])
    return prog


@pytest.fixture(scope="module")
def spins(run: lab.Run) -> dict[str, Facts]:
    """What the module said once its threads were spinning."""
    found = re.search(rf"^{cpulock.SPINNING} (.*)$", run.console, re.MULTILINE)
    assert found
    said: dict[str, Facts] = json.loads(found[1])
    return said


def now_ns(prog: drgn.Program) -> int:
    """CLOCK_MONOTONIC at the last update of the kernel's clock, up to a tick ago."""
    reading = prog["tk_core"].timekeeper.tkr_mono
    return int(reading.base + (reading.xtime_nsec >> reading.shift))


def test_module_has_the_cpus_that_the_guest_names() -> None:
    source = (cpulock.SOURCE / "main.c").read_text()
    found = re.findall(r'\{ "(cm-\S+)", \.cpu = (\d), \.spin = (\w+) \}', source)
    assert {name: (int(cpu), function) for name, cpu, function in found} == SPINS


def test_threads_spin_on_their_cpus(
    prog: drgn.Program, spins: dict[str, Facts]
) -> None:
    assert set(spins) == set(SPINS)
    for name, (cpu, _) in SPINS.items():
        task = find_task(prog, spins[name]["pid"])
        assert task.comm.string_().decode() == name
        assert (task_cpu(task), task.on_cpu.value_()) == (cpu, 1)
        assert per_cpu(prog["runqueues"], cpu).curr == task


def test_they_have_spun_for_seconds(
    run: lab.Run, prog: drgn.Program, spins: dict[str, Facts]
) -> None:
    for spin in spins.values():
        assert spin["start_ns"] > run.workload["times"]["monotonic_ns"]
        assert now_ns(prog) - spin["start_ns"] > 3 * SECOND


def test_timers_of_one_cpu_do_not_go_off(
    prog: drgn.Program, spins: dict[str, Facts]
) -> None:
    start = max(spin["start_ns"] for spin in spins.values())
    due = {
        cpu: per_cpu(prog["hrtimer_bases"], cpu).expires_next.value_()
        for cpu in range(8)
    }
    late = {cpu for cpu, time in due.items() if time < start + SECOND}
    assert late == {guest.IRQS}


def test_hogs_wait_behind_them(run: lab.Run, prog: drgn.Program) -> None:
    for name, made in run.workload["tasks"].items():
        (cpu,) = made["cpus"]
        task = find_task(prog, made["pid"])
        assert task.on_rq.value_() == 1, name
        assert task_cpu(task) == cpu, name
        if cpu in {spin[0] for spin in SPINS.values()}:
            assert not task.on_cpu, name
            assert per_cpu(prog["runqueues"], cpu).nr_running.value_() >= 3


def test_hogs_of_other_cpus_run(run: lab.Run, prog: drgn.Program) -> None:
    tasks = run.workload["tasks"]
    running = {
        name for name, made in tasks.items() if find_task(prog, made["pid"]).on_cpu
    }
    turns = {f"hog-{guest.TURNS}-0", f"hog-{guest.TURNS}-1"}
    assert len(running & turns) == 1
    assert running - turns == {"hog-tickless"}
