# SPDX-License-Identifier: LGPL-2.1-or-later
"""The guests with many CPUs have as many as their names say, and those are busy."""

import re
from itertools import product

import drgn
import pytest
from drgn.helpers.linux.cpumask import (
    cpu_online_mask,
    cpu_possible_mask,
    cpumask_to_cpulist,
)
from drgn.helpers.linux.sched import cpu_rq

from fixtures import lab
from fixtures.lab.guest.possiblecpus import NICES
from fixtures.lab.possiblecpus import MANY_ONLINE, ONLINE, POSSIBLE, QUEUES

GUESTS = {
    **{f"possiblecpus{count}": (count, ONLINE) for count in POSSIBLE},
    f"onlinecpus{MANY_ONLINE}": (MANY_ONLINE, MANY_ONLINE),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "kernel"), list(product(GUESTS, ("6.1", "6.12"))))
def test_cpus(name: str, kernel: str) -> None:
    run = lab.build(f"{name}-{kernel}")
    prog = drgn.Program()
    assert run.elf
    prog.set_core_dump(run.elf)
    prog.load_debug_info([run.vmlinux])
    possible, online = (f"0-{count - 1}" for count in GUESTS[name])

    assert said(run, "possible") == said(run, "present") == possible
    assert said(run, "online") == online
    assert cpumask_to_cpulist(cpu_possible_mask(prog)) == possible
    assert cpumask_to_cpulist(cpu_online_mask(prog)) == online
    interrupts = run.truth("proc/interrupts").decode()
    assert len(re.findall(r" nvme0q\d+$", interrupts, re.M)) == 1 + QUEUES
    assert set(run.workload["hogs"]) == {str(n) for n in range(1, GUESTS[name][1])}
    for cpu, hogs in run.workload["hogs"].items():
        queue = cpu_rq(prog, int(cpu))
        assert len(hogs) == len(NICES) <= queue.nr_running.value_()


def said(run: lab.Run, name: str) -> str:
    return run.truth(f"sys/devices/system/cpu/{name}").decode().strip()
