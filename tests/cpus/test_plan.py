# SPDX-License-Identifier: LGPL-2.1-or-later

"""Plans to set CPUs apart: what they ask for, what stays, and what is refused."""

import io
import json
import re
import subprocess
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import pytest
from drgn import Program
from drgn.helpers.linux.pid import find_task
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools.cli.drgn_prompt import run_in_drgn
from msatools.cpus.plan import mask
from msatools.program import TargetError
from tests.cpus.guests import KERNELS, Guest, numbers
from tests.support.dumps import open_dump
from tests.support.overlay import put

APART = {2, 3}


@cache
def printed(kernel: str, *words: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, open_dump(f"cpus-{kernel}", "btf"), list(words))
    return out.getvalue()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def plan(kernel: str) -> Any:
    return json.loads(printed(kernel, "--plan", "2-3", "--json"))["plan"]


@pytest.fixture
def guest(kernel: str) -> Guest:
    return Guest(lab.build(f"cpus-{kernel}"))


def step(plan: Any, name: str) -> list[str]:
    (found,) = (each for each in plan["steps"] if each["name"] == name)
    commands: list[str] = found["commands"]
    return commands


def stays(plan: Any, name: str) -> Any:
    (found,) = (each for each in plan["stays"] if each["name"] == name)
    return found


def test_masks() -> None:
    assert mask([]) == "0"
    assert mask([0, 1]) == "3"
    assert mask([31]) == "80000000"
    assert mask([0, 1, 33]) == "2,00000003"
    assert mask([64]) == "1,00000000,00000000"


def test_others_are_those_without_a_set(plan: Any) -> None:
    """CPUs 4 (offline), 5 and 6 (partitions), and 7 (boot) are no help."""
    assert (plan["cpus"], plan["others"]) == ([2, 3], [0, 1])


def test_partition(plan: Any) -> None:
    group = "/sys/fs/cgroup/set-apart"
    assert f"echo 2-3 > {group}/cpuset.cpus" in step(plan, "partition")
    assert f"echo isolated > {group}/cpuset.cpus.partition" in step(plan, "partition")


def partition_of(prog: Program) -> Any:
    out = io.StringIO()
    with redirect_stdout(out):
        run_in_drgn(COMMAND, prog, ["--plan", "1", "--json"])
    steps = json.loads(out.getvalue())["plan"]["steps"]
    (found,) = (each for each in steps if each["name"] == "partition")
    return found


@pytest.mark.parametrize("name", ["memory-5.10"])
def test_kernel_without_isolated_partitions(name: str) -> None:
    found = partition_of(open_dump(name, "btf"))
    group = "/sys/fs/cgroup/set-apart"
    assert f"echo root > {group}/cpuset.cpus.partition" in found["commands"]
    assert "with load balancing" in found["text"]


def test_controller_in_cgroup_v1() -> None:
    """It has no partitions: there is no command, but a reason."""
    prog = open_dump("cpus-6.12", "dwarf")
    put(prog, prog["cpuset_cgrp_subsys"].root.address_, bytes(8))
    found = partition_of(prog)
    assert found["commands"] == []
    assert "cgroup v1" in found["text"]


def test_interrupts_are_those_that_proc_lets_move(plan: Any, guest: Guest) -> None:
    """Each leaves the CPUs, and keeps the others that it may go to."""
    default, *moves = step(plan, "interrupts")
    assert default == "echo e3 > /proc/irq/default_smp_affinity"
    asked = {}
    for line in moves:
        matched = re.fullmatch(r"echo (\S+) > /proc/irq/(\d+)/smp_affinity_list", line)
        assert matched, line
        asked[int(matched[2])] = {*numbers(matched[1])}
    left = {
        *stays(plan, "managed-interrupts")["irqs"],
        *stays(plan, "fixed-interrupts")["irqs"],
    }
    assert not left & asked.keys()
    online = {*guest.online}
    for irq in asked.keys() | left:
        before = {*numbers(guest.truth(f"proc/irq/{irq}/smp_affinity_list"))}
        assert before & APART
        if irq in asked:
            assert asked[irq] == ((before - APART) & online or {0, 1})
    # Interrupt 0 is that of the timer, which is on one CPU.
    assert 0 in stays(plan, "fixed-interrupts")["irqs"]


def test_threads_that_stay(plan: Any, kernel: str) -> None:
    """Kernel threads of these CPUs alone, and tasks with an affinity of their own."""
    prog = open_dump(f"cpus-{kernel}", "dwarf")
    bound = stays(plan, "bound-threads")["pids"]
    names = [find_task(prog, pid).comm.string_().decode() for pid in bound]
    assert {f"ksoftirqd/{cpu}" for cpu in APART} <= {*names}
    assert {f"migration/{cpu}" for cpu in APART} <= {*names}
    for name in names:
        assert re.search(r"[/](2|3)\b", name), name
    own = stays(plan, "own-affinity")["pids"]
    assert own
    assert not {*own} & {*bound}
    for pid in own:
        allowed = find_task(prog, pid).cpus_mask.bits[0].value_()
        assert allowed & 0b1100
        # Those that may run on all CPUs without a set have no affinity of their own.
        assert allowed & 0b1111 != 0b1111


REFUSED = {
    "4": "CPU 4: offline; bring it online first",
    "3-4": "CPU 4: offline",
    "5": "CPU 5: in partition /db already; dissolve it first",
    "2,6": "CPU 6: in partition /quiet already",
    "7": "CPU 7: set apart at boot already, by isolcpus=",
    "0-3": "CPU 0-3: no CPU would be left for all else; leave one out",
    "99": "CPU 99: this kernel has none of that number",
}


@pytest.mark.parametrize("cpus", REFUSED)
def test_refused(kernel: str, cpus: str) -> None:
    with pytest.raises(TargetError, match=f"^{re.escape(REFUSED[cpus])}"):
        printed(kernel, "--plan", cpus)


def test_text_is_a_script(kernel: str, plan: Any) -> None:
    """All but the commands are comments; words for the next boot are one, too."""
    for words in (("--plan", "2-3"), ("--plan", "2-3", "-v")):
        subprocess.run(
            ["sh", "-n"], input=printed(kernel, *words), text=True, check=True
        )
    _, *lines = printed(kernel, "--plan", "2-3").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "note:"))]
    assert commands == [
        command
        for each in plan["steps"]
        if each["name"] != "boot"
        for command in each["commands"]
    ]
    (boot,) = step(plan, "boot")
    assert f"# {boot}" in lines
    assert "nohz_full=2-3" in boot.split()
