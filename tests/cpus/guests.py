# SPDX-License-Identifier: LGPL-2.1-or-later

"""A guest's own record of its CPUs."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task

from fixtures import lab
from msatools.cli.options import cpu_list

KERNELS = ("6.1", "6.12")
SECOND = 10**9
TICK_NS = 4_000_000
"""HZ is 250."""

CPU = "sys/devices/system/cpu"
GROUPS = "sys/fs/cgroup"


@dataclass
class Guest:
    """The record of a guest."""

    run: lab.Run

    def truth(self, name: str) -> str:
        """Return the text of a file."""
        return self.run.truth(name).decode().strip()

    def has(self, name: str) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.run.truth_names())

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the numbers in a file with a CPU list."""
        return numbers(self.truth(name))

    @property
    def online(self) -> tuple[int, ...]:
        return self.numbers(f"{CPU}/online")

    @property
    def roles(self) -> dict[str, int]:
        """Role -> CPU, as the workload uses them."""
        roles: dict[str, int] = self.run.workload["cpus"]
        return roles

    @property
    def made(self) -> dict[str, dict[str, Any]]:
        """The tasks that the guest made, by name."""
        tasks: dict[str, dict[str, Any]] = self.run.workload["tasks"]
        return tasks

    def pids(self, *names: str) -> set[int]:
        """Return the thread IDs of tasks that the guest made."""
        return {self.made[name]["pid"] for name in names}

    @cached_property
    def threads(self) -> dict[int, str]:
        """Thread ID -> directory in /proc."""
        pattern = r"(proc/\d+/task/(\d+))/status"
        found = (re.fullmatch(pattern, name) for name in self._names)
        return {int(match[2]): match[1] for match in found if match}

    def status(self, pid: int, field: str) -> str:
        """Return a field of a thread's ``status``."""
        text = self.truth(f"{self.threads[pid]}/status")
        (line,) = [line for line in text.splitlines() if line.startswith(f"{field}:")]
        return line.partition(":")[2].strip()

    def stat(self, pid: int) -> list[str]:
        """Return the fields of a thread's ``stat`` from its state on."""
        text = self.truth(f"{self.threads[pid]}/stat")
        return text.rpartition(") ")[2].split()

    def moment_ns(self, clock: int) -> int:
        """Return the time of one of the guest's readings of the clock."""
        pattern = r"^now at (\d+)"
        (now,) = re.findall(pattern, self.truth(f"clock/{clock}"), re.M)
        return int(now)


def is_changing(queue: Object) -> bool:
    """Return whether a CPU was stopped while it changed a ``struct rq``."""
    name = "__lock" if queue.prog_.type("struct rq").has_member("__lock") else "lock"
    return bool(queue.member_(name).raw_lock.val.counter)


def excused(prog: Program) -> set[str]:
    """Return codes of notes that are right if a CPU was stopped at that instruction."""
    codes = set()
    try:
        keeper = prog.symbol("timekeeper_data")  # since v6.17
    except LookupError:
        keeper = prog.symbol("tk_core")
    # The sequence is the first member (kernel/time/timekeeping.c).
    if prog.read_u32(keeper.address) % 2:
        codes.add("clocks-changing")
    if any(
        is_changing(per_cpu(prog["runqueues"], cpu))
        for cpu in for_each_online_cpu(prog)
    ):
        codes.add("run-queue-differs")
    return codes


def is_throttled(prog: Program, pid: int) -> bool:
    """Return whether a task may not run now: its group's quota begins anew each period.

    :param pid: Thread ID of a task of the fair or the deadline class.
    """
    task = find_task(prog, pid)
    if task.type_.type.has_member("throttled"):
        # "sched/fair: Switch to task based throttle model" (in v6.18)
        groups = task.throttled
    else:
        groups = task.se.cfs_rq.throttle_count
    return bool(groups) or bool(task.dl.dl_throttled)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the kernel's format."""
    return tuple(sorted(cpu_list(text))) if text else ()
